"""The safetensors file format, as much of it as this package writes: tensors of F32 and F64.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name → dtype, shape and the two
offsets of its data; ``__metadata__`` → strings), and the data, little-endian, row by row, without gaps.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

_FORMATS = {"F32": ("f", 4), "F64": ("d", 8)}
_MAX_HEADER_BYTES = 100_000  # our own headers take some hundred bytes; a longer one is another kind of file


class Tensor(NamedTuple):
    """``values`` are the numbers row by row; there are as many as the product of ``shape``."""

    dtype: str
    shape: list[int]
    values: list[float]


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file that holds ``tensors``.

    Raises OverflowError where a finite value does not fit into F32.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    data = bytearray()
    for name, (dtype, shape, values) in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{math.prod(shape)}{_FORMATS[dtype][0]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want the data aligned
    return struct.pack("<Q", len(text)) + text + bytes(data)


def decode(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file. Raises ValueError where it is damaged or holds another dtype."""
    header, data = _split(content)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("safetensors: __metadata__ must map names to strings")
    tensors = {}
    position = 0
    for begin, end, name, dtype, shape in sorted(_entry(name, fields) for name, fields in header.items()):
        if begin != position or end > len(data):
            raise ValueError(
                f"safetensors: tensor {name!r} claims the bytes {begin} to {end} of {len(data)}; "
                f"expected a start at {position} and an end inside the file"
            )
        values = struct.unpack(f"<{math.prod(shape)}{_FORMATS[dtype][0]}", data[begin:end])
        tensors[name] = Tensor(dtype, shape, list(values))
        position = end
    if position != len(data):
        raise ValueError(f"safetensors: {len(data) - position} bytes at the end belong to no tensor")
    return tensors, metadata


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError(
            f"safetensors: a header of {length} bytes does not fit a file of {len(content)} bytes "
            f"(the limit is {_MAX_HEADER_BYTES})"
        )
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"safetensors: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("safetensors: the header is not a JSON object")
    return header, content[8 + length :]


def _entry(name: str, fields: Any) -> tuple[int, int, str, str, list[int]]:
    """Begin, end, name, dtype and shape of a tensor, each of the right type and size."""
    if not isinstance(fields, dict):
        raise ValueError(f"safetensors: tensor {name!r} is {fields!r}; expected an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _FORMATS:
        raise ValueError(f"safetensors: tensor {name!r} has dtype {dtype!r}; expected {' or '.join(_FORMATS)}")
    if not _are_sizes(shape):
        raise ValueError(f"safetensors: tensor {name!r} has shape {shape!r}; expected a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"safetensors: tensor {name!r} has data_offsets {offsets!r}; expected two")
    begin, end = offsets
    size = math.prod(shape) * _FORMATS[dtype][1]
    if end - begin != size:
        raise ValueError(f"safetensors: tensor {name!r} has {end - begin} bytes; {shape} takes {size}")
    return begin, end, name, dtype, shape


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
