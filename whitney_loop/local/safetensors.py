"""A writer of the safetensors file format, for what a PEFT adapter needs of it: tensors of float32 (F32).

A file has three parts: the length of the header (8 bytes, little-endian); the header (JSON: for each tensor its dtype,
shape, and where its data begins and ends; ``__metadata__`` holds strings); the data, little-endian, row by row.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """``values`` are its numbers, row by row."""

    shape: list[int]
    values: list[float]


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file that holds ``tensors``. Raise OverflowError if a value does not fit into F32."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, (shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must be aligned for readers that map the file into memory
    return struct.pack("<Q", len(text)) + text + bytes(data)
