"""The bytes of frames against bytes written by hand from PROTOCOL.md §2 and §3."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from split.errors import RemoteProtocolError
from split.wire.frames import (
    FrameCutter,
    FrameHeader,
    FrameKind,
    decode_credit,
    decode_header,
    decode_metadata,
    encode_credit,
    encode_metadata,
)
from split.wire.messages import Cancel, Ping, Pong, Priority

BEGIN = bytes.fromhex("01 02 0000 07000000 05000000 03000000 02000000".replace(" ", ""))


def header_bytes(kind: int, priority: int, reserved: int, number: int, body: int, metadata: int, payload: int) -> bytes:
    """An independent writer of the header: each field by hand, little-endian."""
    fields = ((kind, 1), (priority, 1), (reserved, 2), (number, 4), (body, 4), (metadata, 4), (payload, 4))
    return b"".join(value.to_bytes(width, "little") for value, width in fields)


def test_a_begin_header_has_the_bytes_of_the_specification() -> None:
    header = FrameHeader(FrameKind.BEGIN, Priority.NORMAL, 7, 5, 3, 2)
    assert header.encode() == BEGIN
    assert decode_header(BEGIN) == header


@given(
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
    st.integers(0, 262_124),
    st.integers(1, 2**20),
    st.integers(0, 2**32 - 1),
)
def test_every_begin_header_reads_back_as_it_was_written(
    priority: int, number: int, body: int, metadata: int, payload: int
) -> None:
    data = header_bytes(1, priority, 0, number, body, metadata, payload)
    assert decode_header(data) == FrameHeader(1, priority, number, body, metadata, payload)
    assert decode_header(data).encode() == data


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ((0, 0, 0, 1, 1, 1, 0), "frame kind must be 1 to 3"),
        ((4, 0, 0, 1, 1, 1, 0), "frame kind must be 1 to 3"),
        ((127, 0, 0, 1, 1, 1, 0), "frame kind must be 1 to 3"),
        ((1, 0, 0, 1, 262_125, 1, 0), "body may have 262124 bytes, the header says 262125"),
        ((200, 0, 0, 1, 2**32 - 1, 0, 0), "body may have 262124 bytes"),
        ((1, 0, 1, 1, 1, 1, 0), "reserved bytes"),
        ((1, 4, 0, 1, 1, 1, 0), "priority must be 0 to 3, got 4"),
        ((1, 0, 0, 1, 1, 0, 0), "metadata must have 1 to 1048576 bytes, the header says 0"),
        ((1, 0, 0, 1, 1, 1_048_577, 0), "metadata must have 1 to 1048576 bytes, the header says 1048577"),
        ((2, 0, 0, 1, 1, 1, 0), "only a BEGIN frame declares sizes"),
        ((2, 0, 0, 1, 1, 0, 9), "only a BEGIN frame declares sizes"),
        ((3, 0, 0, 1, 1, 0, 0), "a RESET frame has no body"),
        ((128, 0, 0, 0, 7, 0, 0), "a CREDIT frame's body has 8 bytes, the header says 7"),
        ((128, 0, 0, 0, 9, 0, 0), "a CREDIT frame's body has 8 bytes, the header says 9"),
    ],
)
def test_a_header_that_cannot_be_is_refused_with_what_came(fields: tuple[int, ...], said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        decode_header(header_bytes(*fields))


def test_kinds_from_128_on_are_left_to_later_versions() -> None:
    assert decode_header(header_bytes(129, 9, 9, 1, 4, 9, 9)).body_bytes == 4
    assert decode_header(header_bytes(255, 0, 0, 0, 0, 0, 0)).body_bytes == 0


def test_a_credit_frame_has_the_bytes_of_the_specification() -> None:
    assert encode_credit(2**40 + 3) == header_bytes(128, 0, 0, 0, 8, 0, 0) + (2**40 + 3).to_bytes(8, "little")
    assert decode_header(header_bytes(128, 9, 9, 9, 8, 9, 9)).kind == FrameKind.CREDIT
    assert decode_credit(bytes([255] * 8)) == 2**64 - 1


@given(
    st.binary(min_size=1, max_size=60),
    st.lists(st.binary(max_size=90), max_size=5),
    st.lists(st.integers(1, 80), min_size=1, max_size=5),
)
def test_the_bodies_of_a_messages_frames_joined_are_its_metadata_and_payload_whatever_size_each_has(
    metadata: bytes, parts: list[bytes], sizes: list[int]
) -> None:
    cutter = FrameCutter(metadata, parts, priority=Priority.BULK)
    frames = [cutter.begin(9, sizes[0])]
    while cutter.left:
        frames.append(cutter.proceed(sizes[len(frames) % len(sizes)]))
    whole = metadata + b"".join(parts)
    assert b"".join(frame[20:] for frame in frames) == whole
    assert frames[0][:20] == header_bytes(1, 3, 0, 9, len(frames[0]) - 20, len(metadata), len(whole) - len(metadata))
    for frame in frames[1:]:
        assert frame[:20] == header_bytes(2, 3, 0, 9, len(frame) - 20, 0, 0)
    assert all(len(frame) - 20 == sizes[index % len(sizes)] for index, frame in enumerate(frames[:-1]))
    assert 0 < len(frames[-1]) - 20 <= sizes[(len(frames) - 1) % len(sizes)]
    assert cutter.reset() == header_bytes(3, 3, 0, 9, 0, 0, 0)


def test_payload_of_wider_elements_is_cut_by_bytes() -> None:
    wide = memoryview(bytearray(range(16))).cast("I")
    frame = FrameCutter(b"m", [wide], priority=Priority.NORMAL).begin(1, 80)
    assert frame[20:] == b"m" + bytes(range(16))


def test_metadata_is_the_messagepack_of_a_tagged_map() -> None:
    assert msgspec.msgpack.decode(encode_metadata(Cancel(request_id="ab", attempt=2))) == {
        "t": "cancel",
        "request_id": "ab",
        "attempt": 2,
    }


def test_metadata_fields_of_a_later_minor_version_are_ignored() -> None:
    data = msgspec.msgpack.encode({"t": "pong", "nonce": 3, "invented": [1, {"x": None}]})
    assert decode_metadata(data) == Pong(nonce=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"nonce": 1}),
        msgspec.msgpack.encode({"t": "from-the-future"}),
        msgspec.msgpack.encode({"t": "ping"}),
        msgspec.msgpack.encode({"t": "ping", "nonce": "1"}),
        msgspec.msgpack.encode({"t": "ping", "nonce": 1}) + b"\0",
        encode_metadata(Ping(nonce=1))[:-1],
        b"\x82\xa1t\xa7goodbye\xa6reason\xa2\xff\xfe",
        b"\x82\xa1t\xa5hello\xa6codecs\xdd\xff\xff\xff\xff",
        b"\x82\xa1t\xa5infer\xa7encoded\x81\xa1a\x81\xa1b" + b"\x91" * 100_000,
    ],
    ids=[
        "nothing",
        "no MessagePack",
        "no map",
        "no tag",
        "unknown tag",
        "missing field",
        "wrong type",
        "something behind",
        "cut short",
        "no UTF-8",
        "array that lies about its length",
        "nested without end",
    ],
)
def test_metadata_that_is_no_message_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no message of this protocol"):
        decode_metadata(data)
