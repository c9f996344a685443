"""The safetensors file format, as much of it as a PEFT adapter needs: tensors of float32 (F32), to be written.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape and the two
offsets of its data; ``__metadata__`` → strings), and the data, little-endian, row by row, without gaps.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """``values`` are the numbers row by row; there are as many as the product of ``shape``."""

    shape: list[int]
    values: list[float]


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file that holds ``tensors``. Raises OverflowError if a value does not fit into F32."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, (shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want the data aligned
    return struct.pack("<Q", len(text)) + text + bytes(data)
