"""The safetensors format: the bytes on disk."""

from __future__ import annotations

import json
import struct

import pytest

import safetensors_file
from whitney_loop.local.safetensors import Tensor, encode


def test_the_bytes_are_those_of_the_format():
    content = encode({"w": Tensor([2, 1], [1.0, -2.5])}, {"format": "pt"})
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }
    assert content[8 : 8 + length].startswith(b"{")
    assert content[8 + length :] == bytes.fromhex("0000803f000020c0")


def test_tensors_and_metadata_are_read_back():
    tensors = {"floats": Tensor([3], [0.5, -2.0, 2.0**-149]), "scalar": Tensor([], [0.25]), "empty": Tensor([0, 7], [])}
    metadata = {"format": "pt", "é": "ü"}
    assert safetensors_file.read(encode(tensors, metadata)) == (tensors, metadata)


def test_a_value_too_large_for_f32_is_refused_rather_than_made_infinite():
    with pytest.raises(OverflowError):
        encode({"w": Tensor([1], [1e39])}, {})
