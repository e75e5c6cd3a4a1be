"""The bytes of frames: a fixed header of 20 bytes and a body. Stateless; `connection.py` gives them meaning.

A message is its metadata (MessagePack) followed by its payload, cut into frames: one BEGIN, then as many CONTINUE as
its declared size needs. A message ends where its declared bytes end, so there is no flag for the last frame to
contradict them. Layout and rules: PROTOCOL.md §2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec

from split.errors import RemoteProtocolError
from split.wire.limits import FRAME_HEADER_BYTES, MAX_FRAME_BYTES, MAX_METADATA_BYTES
from split.wire.messages import PAYLOAD_MESSAGES, Message, Priority

Buffer = bytes | bytearray | memoryview

_HEADER: Final = struct.Struct("<BBHIIII")
_CREDIT: Final = struct.Struct("<Q")
CREDIT_BODY_BYTES: Final = _CREDIT.size
assert _HEADER.size == FRAME_HEADER_BYTES


class FrameKind(IntEnum):
    """Kinds below 128 must be understood; an unknown kind from 128 on is skipped with its body (room for v1.x)."""

    BEGIN = 1
    CONTINUE = 2
    RESET = 3
    CREDIT = 128
    """What the receiver of the frame may have sent in all (§7); v1.0 skips it."""


SKIPPABLE_FROM: Final = 128


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What stands before every body; positional, since one is made per frame."""

    kind: int
    priority: int
    number: int
    """The sender's number of the message, rising with every BEGIN."""
    body_bytes: int
    metadata_bytes: int
    """Of the whole message; BEGIN only, 0 elsewhere."""
    payload_bytes: int
    """Of the whole message; BEGIN only, 0 elsewhere."""

    def encode(self) -> bytes:
        """The header in 20 bytes, as PROTOCOL.md has them."""
        return _HEADER.pack(
            self.kind, self.priority, 0, self.number, self.body_bytes, self.metadata_bytes, self.payload_bytes
        )


def decode_header(data: Buffer) -> FrameHeader:
    """The header in 20 bytes, its own fields checked; RemoteProtocolError where one cannot be."""
    kind, priority, reserved, number, body_bytes, metadata_bytes, payload_bytes = _HEADER.unpack(data)
    if kind == 0 or (kind < SKIPPABLE_FROM and kind > FrameKind.RESET):
        raise RemoteProtocolError(f"frame kind must be 1 to 3 or at least {SKIPPABLE_FROM}, got {kind}")
    if kind == FrameKind.CREDIT and body_bytes != CREDIT_BODY_BYTES:
        raise RemoteProtocolError(f"a CREDIT frame's body has {CREDIT_BODY_BYTES} bytes, the header says {body_bytes}")
    if body_bytes > MAX_FRAME_BYTES - FRAME_HEADER_BYTES:
        raise RemoteProtocolError(
            f"a frame's body may have {MAX_FRAME_BYTES - FRAME_HEADER_BYTES} bytes, the header says {body_bytes}"
        )
    if kind < SKIPPABLE_FROM:
        if reserved:
            raise RemoteProtocolError(f"the reserved bytes of a frame header must be 0, got {reserved:#06x}")
        if priority > Priority.BULK:
            raise RemoteProtocolError(f"priority must be 0 to {int(Priority.BULK)}, got {priority}")
        if kind == FrameKind.BEGIN:
            if not 0 < metadata_bytes <= MAX_METADATA_BYTES:
                raise RemoteProtocolError(
                    f"a message's metadata must have 1 to {MAX_METADATA_BYTES} bytes, the header says {metadata_bytes}"
                )
        elif metadata_bytes or payload_bytes:
            raise RemoteProtocolError(
                f"only a BEGIN frame declares sizes, a frame of kind {kind} says {metadata_bytes} and {payload_bytes}"
            )
        if kind == FrameKind.RESET and body_bytes:
            raise RemoteProtocolError(f"a RESET frame has no body, the header says {body_bytes} bytes")
    return FrameHeader(kind, priority, number, body_bytes, metadata_bytes, payload_bytes)


def encode_credit(total_bytes: int) -> bytes:
    """The frame that lets its receiver have sent `total_bytes` since the connection began."""
    return FrameHeader(FrameKind.CREDIT, 0, 0, CREDIT_BODY_BYTES, 0, 0).encode() + _CREDIT.pack(total_bytes)


def decode_credit(body: Buffer) -> int:
    """The total in the body of a CREDIT frame."""
    total_bytes: int = _CREDIT.unpack(body)[0]
    return total_bytes


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode_metadata(message: Message) -> bytes:
    """MessagePack of one message's metadata."""
    return _encoder.encode(message)


def decode_metadata(data: Buffer) -> Message:
    """The message in these bytes; RemoteProtocolError when they are none of v1's."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RemoteProtocolError(f"metadata of {len(data)} bytes is no message of this protocol: {error}") from error
    return message


def may_have_payload(message: Message) -> bool:
    """Whether this kind of message carries a payload."""
    return isinstance(message, PAYLOAD_MESSAGES)


class FrameCutter:
    """The frames of one message, made one at a time and as large as asked for each (each byte is copied once, here).

    Header and body are joined: under TLS a frame then fills whole records, and one write is one system call.
    """

    __slots__ = ("_metadata_bytes", "_pieces", "_priority", "left", "number")

    def __init__(self, metadata: bytes, payload: Sequence[Buffer], *, priority: Priority) -> None:
        self._pieces = [memoryview(metadata)]
        self._pieces += [piece for part in payload if (piece := memoryview(part).cast("B")).nbytes]
        self._pieces.reverse()
        self._priority = priority
        self._metadata_bytes = len(metadata)
        self.left = sum(piece.nbytes for piece in self._pieces)
        """Bytes of the message that are in no frame yet."""
        self.number = 0
        """Of the message, given with its first frame; 0 before."""

    def begin(self, number: int, body_bytes: int) -> bytes:
        """The first frame, with at most `body_bytes` (at least 1) of the message, which is `number` from now on."""
        self.number = number
        body_bytes = min(body_bytes, self.left)
        payload_bytes = self.left - self._metadata_bytes
        return self._join(
            FrameHeader(FrameKind.BEGIN, self._priority, number, body_bytes, self._metadata_bytes, payload_bytes)
        )

    def proceed(self, body_bytes: int) -> bytes:
        """The next frame, with at most `body_bytes` (at least 1) of what is left (at least 1)."""
        return self._join(
            FrameHeader(FrameKind.CONTINUE, self._priority, self.number, min(body_bytes, self.left), 0, 0)
        )

    def reset(self) -> bytes:
        """The frame that voids what was sent of the message."""
        return FrameHeader(FrameKind.RESET, self._priority, self.number, 0, 0, 0).encode()

    def _join(self, header: FrameHeader) -> bytes:
        need = header.body_bytes
        self.left -= need
        frame: list[Buffer] = [header.encode()]
        while need:
            piece = self._pieces.pop()
            if piece.nbytes > need:
                self._pieces.append(piece[need:])
                piece = piece[:need]
            frame.append(piece)
            need -= piece.nbytes
        return b"".join(frame)
