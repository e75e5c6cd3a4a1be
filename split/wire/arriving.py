"""A message under way to this side, and the memory it is put into."""

from __future__ import annotations

import mmap
from typing import Final

from split.wire.frames import FrameHeader
from split.wire.limits import FRAME_HEADER_BYTES, MAX_FRAME_BYTES

_NOTHING: Final = memoryview(b"")


def _room(size: int) -> memoryview:
    """A buffer that takes memory as bytes come, not as they are announced: a header is cheap to send."""
    if size <= MAX_FRAME_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Arriving:
    """Metadata first, then the payload, each in a buffer of its exact size.

    Both buffers have room for one more frame header behind their end: a read may then take the rest of a body and the
    next header in one go, and the header is overwritten by the bytes that belong there.
    """

    __slots__ = ("filled", "metadata", "metadata_bytes", "number", "payload", "payload_bytes", "priority")

    def __init__(self, header: FrameHeader) -> None:
        self.number = header.number
        self.priority = header.priority
        self.metadata_bytes = header.metadata_bytes
        self.payload_bytes = header.payload_bytes
        self.metadata = _room(header.metadata_bytes + FRAME_HEADER_BYTES)
        self.payload = _room(header.payload_bytes + FRAME_HEADER_BYTES) if header.payload_bytes else _NOTHING
        self.filled = 0

    @property
    def missing(self) -> int:
        return self.metadata_bytes + self.payload_bytes - self.filled

    def place(self, body_left: int) -> tuple[memoryview, int]:
        """Where the next bytes go (with room for a header behind), and how many of them are body."""
        if self.filled < self.metadata_bytes:
            take = min(body_left, self.metadata_bytes - self.filled)
            return self.metadata[self.filled : self.filled + take + FRAME_HEADER_BYTES], take
        start = self.filled - self.metadata_bytes
        take = min(body_left, self.payload_bytes - start)
        return self.payload[start : start + take + FRAME_HEADER_BYTES], take
