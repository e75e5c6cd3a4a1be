"""A message under way to this side, and its memory, which grows with what comes and not with what was announced."""

from __future__ import annotations

import mmap
from typing import Final

from split.errors import RemoteProtocolError
from split.wire.frames import FrameHeader
from split.wire.limits import FRAME_HEADER_BYTES, MIB

FIRST_ROOM_BYTES: Final = 1 * MIB
"""Of a payload: taken when the message begins. Up to here the heap has it ready; fresh pages for every message cost
0.55 ms/MB, which is half of what TLS costs (`mmap`, measured with frames of 64 KiB)."""
GROWTH: Final = 4
"""Once the room is full it becomes so many times as large: at most a third of the bytes are copied once more."""
HEAP_BYTES: Final = 32 * MIB
"""A larger room is mapped, at once as large as the message: glibc's heap keeps no larger block (M_MMAP_THRESHOLD), and
filling a fresh one with zeros held up the event loop for 40 ms at 60 MB, 180 at 250. Of a mapping only what came is
memory."""


class Arriving:
    """Metadata first, then the payload, each in a buffer of its own.

    Both have room for one more frame header behind their end: a read may then take the rest of a body and the next
    header in one go, and the header is overwritten by the bytes that belong there.
    """

    __slots__ = ("_mapped", "_payload", "filled", "metadata", "metadata_bytes", "number", "payload_bytes", "priority")

    def __init__(self, header: FrameHeader) -> None:
        self.number = header.number
        self.priority = header.priority
        self.metadata_bytes = header.metadata_bytes
        self.payload_bytes = header.payload_bytes
        self.metadata = memoryview(bytearray(header.metadata_bytes + FRAME_HEADER_BYTES))
        self._payload = memoryview(b"")
        self._mapped = False
        self.filled = 0

    @property
    def missing(self) -> int:
        """Bytes that have still to come."""
        return self.metadata_bytes + self.payload_bytes - self.filled

    @property
    def payload(self) -> memoryview:
        """What was received of it."""
        return self._payload[: max(self.filled - self.metadata_bytes, 0)]

    @property
    def room_bytes(self) -> int:
        """Memory that it takes now."""
        return self.metadata.nbytes + (self.payload if self._mapped else self._payload).nbytes

    def make_room(self, body_bytes: int) -> None:
        """A body comes; RemoteProtocolError when there is no memory for it."""
        there = max(self.filled - self.metadata_bytes, 0)
        wanted = self.filled + body_bytes - self.metadata_bytes
        if wanted <= 0 or wanted + FRAME_HEADER_BYTES <= self._payload.nbytes:
            return
        size = min(max(FIRST_ROOM_BYTES, GROWTH * there, wanted), self.payload_bytes)
        self._mapped = size > HEAP_BYTES
        try:
            if self._mapped:
                size = self.payload_bytes
                larger = memoryview(mmap.mmap(-1, size + FRAME_HEADER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON))
            else:
                larger = memoryview(bytearray(size + FRAME_HEADER_BYTES))
        except (MemoryError, OSError) as error:
            raise RemoteProtocolError(
                f"there is no memory here for {size} bytes of message {self.number}, which has {self.payload_bytes}"
            ) from error
        larger[:there] = self._payload[:there]
        self._payload = larger

    def place(self, body_left: int) -> tuple[memoryview, int]:
        """Where the next bytes go (with room for a header behind), and how many of them are body."""
        if self.filled < self.metadata_bytes:
            take = min(body_left, self.metadata_bytes - self.filled)
            return self.metadata[self.filled : self.filled + take + FRAME_HEADER_BYTES], take
        start = self.filled - self.metadata_bytes
        take = min(body_left, self.payload_bytes - start)
        return self._payload[start : start + take + FRAME_HEADER_BYTES], take
