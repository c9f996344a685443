"""The safetensors format: the bytes on disk, and every kind of damaged file refused."""

from __future__ import annotations

import json
import struct

import pytest

from whitney_loop.local.safetensors import Tensor, decode, encode


def a_file(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(1,), data_offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


def test_what_was_encoded_is_decoded_exactly():
    tensors = {
        "doubles": Tensor("F64", [2, 2], [0.1, -0.0, 5e-324, 1.7976931348623157e308]),
        "floats": Tensor("F32", [3], [0.5, -2.0, 2.0**-149]),
        "scalar": Tensor("F64", [], [1 / 3]),
        "empty": Tensor("F32", [0, 7], []),
    }
    metadata = {"format": "pt", "é": "ü"}
    assert decode(encode(tensors, metadata)) == (tensors, metadata)


def test_the_bytes_are_those_of_the_format():
    content = encode({"w": Tensor("F32", [2, 1], [1.0, -2.5])}, {"format": "pt"})
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    }
    assert content[8 : 8 + length].startswith(b"{")
    assert content[8 + length :] == bytes.fromhex("0000803f000020c0")


def test_a_file_written_by_hand_is_read():
    header = {"b": entry("F64", [1], [4, 12]), "a": entry("F32", [1], [0, 4])}
    tensors, metadata = decode(a_file(header, struct.pack("<fd", 0.25, 0.1)))
    assert tensors == {"a": Tensor("F32", [1], [0.25]), "b": Tensor("F64", [1], [0.1])}
    assert metadata == {}


def test_a_value_too_large_for_f32_is_refused_rather_than_made_infinite():
    with pytest.raises(OverflowError):
        encode({"w": Tensor("F32", [1], [1e39])}, {})


@pytest.mark.parametrize("length", range(0, 400, 7))
def test_a_truncated_file_is_refused(length):
    content = encode({"w": Tensor("F64", [40], [1.0] * 40)}, {"step": "3"})
    assert len(content) > 400
    with pytest.raises(ValueError, match="safetensors"):
        decode(content[:length])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "does not fit"),
        (struct.pack("<Q", 2**63) + b"{}", "does not fit"),
        (a_file(b'{"a": "' + b"x" * 200_000 + b'"}'), "limit"),
        (a_file(b"[" * 90_000), "not JSON"),
        (a_file(b"\xff\xfe{"), "not JSON"),
        (a_file(b"{"), "not JSON"),
        (a_file([]), "not a JSON object"),
        (a_file({"__metadata__": {"step": 3}}), "strings"),
        (a_file({"w": None}), "expected an object"),
        (a_file({"w": entry("F16")}), "dtype"),
        (a_file({"w": entry(["F32"])}), "dtype"),
        (a_file({"w": entry(shape=[-1])}), "shape"),
        (a_file({"w": entry(shape=[True])}), "shape"),
        (a_file({"w": entry(shape=[2.0])}), "shape"),
        (a_file({"w": entry(data_offsets=[0])}), "data_offsets"),
        (a_file({"w": entry(data_offsets=[-4, 0])}), "data_offsets"),
        (a_file({"w": entry(data_offsets=[0, 8])}, bytes(8)), "takes 4"),
        (a_file({"w": entry(shape=[2**62, 4])}, bytes(4)), "takes"),
        (a_file({"w": entry(data_offsets=[4, 8])}, bytes(8)), "start at 0"),
        (a_file({"w": entry()}, bytes(3)), "inside the file"),
        (a_file({"w": entry(), "v": entry()}, bytes(4)), "start at 4"),
        (a_file({"w": entry()}, bytes(5)), "belong to no tensor"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(content, complaint):
    with pytest.raises(ValueError, match=complaint):
        decode(content)
