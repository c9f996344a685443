"""Reads a safetensors file, independently of the package's writer."""

import json
import math
import struct


def read(content: bytes) -> tuple[dict[str, tuple[list[int], list[float]]], dict[str, str]]:
    """Return shape and numbers of each float32 tensor, and the metadata."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32"
        begin, end = entry["data_offsets"]
        tensors[name] = entry["shape"], list(struct.unpack(f"<{math.prod(entry['shape'])}f", data[begin:end]))
    return tensors, metadata
