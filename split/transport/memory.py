"""Two channel ends in one process, joined by the real wire protocol and nothing else: for tests, and for users' tests.

Deterministic: no socket, no task, no clock of its own; bytes arrive during the `send` that made them, or, with a
`delay`, when the caller says so. Faults: `kill`, `freeze`, `drop_message`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from split.errors import RemoteProtocolError
from split.transport.channel import Observation, PeerIdentity
from split.transport.endpoint import Endpoint
from split.wire.connection import WireConnection
from split.wire.frames import FrameKind, decode_header
from split.wire.limits import DEFAULT_LIMITS, FRAME_HEADER_BYTES, Limits
from split.wire.messages import Hello

Delay = Callable[[int, Callable[[], None]], None]
"""Called with a frame's size in bytes and the function that delivers it; the next frame waits until that was called."""

DEVICE: Final = PeerIdentity(name="device", role="device")
COMPANION: Final = PeerIdentity(name="companion", role="companion")


class MemoryChannel(Endpoint):
    """One end; made by `memory_pair`."""

    def __init__(self, hello: Hello, peer: PeerIdentity, limits: Limits) -> None:
        super().__init__(WireConnection(hello, limits=limits))
        self._peer = peer
        self._delay: Delay | None = None
        self._other: MemoryChannel = self
        self._frozen = False
        self._pumping = False
        self._on_the_way: bytes | None = None
        self._begun = 0
        self._drop_begun: set[int] = set()
        self._dropped_numbers: set[int] = set()
        self._kill_after_bytes: int | None = None
        self._kill_reason = ""
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._other._sent_bytes

    @property
    def ahead_bytes(self) -> int:
        return self.queued_bytes

    def observe(self) -> Observation:
        return Observation(
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            queued_bytes=self.queued_bytes,
            connections=(),
        )

    # ---- faults

    def kill(self, reason: str = "the connection was reset by the peer", *, after_bytes: int = 0) -> None:
        """Cut the link both ways, now or when `after_bytes` more bytes of this end have arrived at the other."""
        self._kill_after_bytes = after_bytes
        self._kill_reason = reason
        if after_bytes == 0:
            self._cut()

    def freeze(self) -> None:
        """Fall silent: nothing of this end arrives any more, and nothing says so. `send` still takes messages."""
        self._frozen = True

    def thaw(self) -> None:
        """End `freeze`; what waited goes out."""
        self._frozen = False
        self._pump()

    def drop_message(self, nth: int) -> None:
        """Lose the `nth` message that this end begins from now on (1 is the next), all its frames, without a trace."""
        assert nth >= 1, nth
        self._drop_begun.add(self._begun + nth)

    # ---- Endpoint

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._frozen and not self._other._holding and self._on_the_way is None:
                if self._closed_because is not None or (frame := self._connection.next_frame()) is None:
                    break
                if self._is_dropped(frame):
                    continue
                self._on_the_way = frame
                if self._delay is None:
                    self._arrive()
                else:
                    self._delay(len(frame), self._arrive)
        finally:
            self._pumping = False
        self._moved()

    def _arrive(self) -> None:
        frame = self._on_the_way
        self._on_the_way = None
        if frame is None or self._closed_because is not None:
            return
        left = self._kill_after_bytes
        if left is not None:
            frame = frame[:left]
            self._kill_after_bytes = left - len(frame)
        self._sent_bytes += len(frame)
        self._other._take(frame)
        if self._kill_after_bytes == 0:
            self._cut()
        self._pump()
        self._moved()

    def _take(self, data: bytes) -> None:
        self._deliver(self._connection.receive(data))
        self._pump()
        failure = self._connection.failure
        if failure is not None:
            self._failed(failure)
            if isinstance(failure, RemoteProtocolError):
                self._other._lost("the peer closed the connection")

    def _is_dropped(self, frame: bytes) -> bool:
        header = decode_header(frame[:FRAME_HEADER_BYTES])
        if header.kind == FrameKind.BEGIN:
            self._begun += 1
            if self._begun in self._drop_begun:
                self._dropped_numbers.add(header.number)
        return header.number in self._dropped_numbers

    def _cut(self) -> None:
        for end in (self, self._other):
            end._lost(self._kill_reason)

    def _hold_reading(self, hold: bool) -> None:
        if not hold:
            self._other._pump()

    async def _end(self) -> None:
        self._other._lost("the peer closed the connection")


def memory_pair(
    device_hello: Hello,
    companion_hello: Hello,
    *,
    device: PeerIdentity = DEVICE,
    companion: PeerIdentity = COMPANION,
    limits: Limits = DEFAULT_LIMITS,
    delay: Delay | None = None,
) -> tuple[MemoryChannel, MemoryChannel]:
    """The device's end and the companion's end of one open channel.

    `limits` holds for both ends (a Hello's `max_message_bytes` is what its end takes). `delay` holds for every frame
    after the Hellos. RemoteProtocolError when the Hellos do not go together.
    """
    device_end = MemoryChannel(device_hello, companion, limits)
    companion_end = MemoryChannel(companion_hello, device, limits)
    device_end._other, companion_end._other = companion_end, device_end
    device_end._pump()
    companion_end._pump()
    for end in (device_end, companion_end):
        if end._connection.failure is not None:
            raise end._connection.failure
        end._begun = 0
        end._delay = delay
    return device_end, companion_end
