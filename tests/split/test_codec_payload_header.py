"""split/codec/payload_header.py: a table of damaged headers, built by hand from PAYLOAD.md's offsets."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from split.codec.payload import encode
from split.codec.payload_header import read_header
from split.errors import CodecError


def damaged(at: int, fresh: bytes) -> bytes:
    """A small raw payload with some bytes of it replaced."""
    payload = bytearray(b"".join(encode({"x": np.arange(6, dtype="f4").reshape(2, 3)}, "raw")))
    payload[at : at + len(fresh)] = fresh
    return bytes(payload)


# Preamble 16 bytes; entry: name length at 16, dtype 18, rank 19, kind 20, packing 21, axis 22, zero 23, stored 24,
# plain 32, dims 40 and 48, name 56; data at 64.
@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "at least 16 bytes"),
        (damaged(0, b"NOPE"), "starts with"),
        (damaged(4, b"\x02"), "version 2"),
        (damaged(5, b"\x01"), "version 1"),
        (damaged(6, b"\xff\xff"), "claims 65535 tensors"),
        (damaged(6, b"\x02\x00"), "header ends within tensor 1"),
        (damaged(6, b"\x00\x00"), "follow the last entry"),
        (damaged(8, struct.pack("<I", 10_000)), "header claims 10000"),
        (damaged(8, struct.pack("<I", 30)), "header ends within"),
        (damaged(16, b"\x00\x00"), "name of 0 bytes"),
        (damaged(16, b"\xff\x0f"), "header ends within"),
        (damaged(16, b"\xff\xff"), "name of 65535 bytes"),
        (damaged(18, b"\x63"), "element type 99"),
        (damaged(18, b"\x0c"), "takes 48 bytes"),
        (damaged(18, b"\x0d"), "cannot be coded as RAW"),
        (damaged(19, b"\x11"), "rank 17"),
        (damaged(20, b"\x04"), "kind 4"),
        (damaged(20, b"\x01"), "takes 12 bytes as HALF"),
        (damaged(20, b"\x03"), "cannot be coded as STRINGS"),
        (damaged(21, b"\x07"), "packing 7"),
        (damaged(21, b"\x01"), "packing 24 bytes into 24"),
        (damaged(22, b"\x01"), "cannot be coded as RAW"),
        (damaged(23, b"\x01"), "element type"),
        (damaged(24, struct.pack("<Q", 23)), "not packed, yet 23"),
        (damaged(24, struct.pack("<QQ", 2**63, 2**63)), "takes 24 bytes as RAW"),
        (damaged(40, struct.pack("<Q", 2**63)), "more than"),
        (damaged(40, struct.pack("<QQ", 2**63, 0)), "more than"),
        (damaged(40, struct.pack("<Q", 3)), "takes 36 bytes"),
        (damaged(56, b"\xff"), "not UTF-8"),
    ],
)
def test_a_malformed_header_is_refused_with_what_is_wrong(payload: bytes, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        read_header(memoryview(payload))


def test_a_name_given_twice_is_refused() -> None:
    payload = b"".join(encode({"a": np.zeros(0, "f4"), "b": np.zeros(0, "f4")}, "raw"))
    with pytest.raises(CodecError, match="'a' is in the payload twice"):
        read_header(memoryview(payload.replace(b"b", b"a")))
