"""Credit in bytes, both ways: how much a peer may send before what it sent was read (PROTOCOL.md §7).

Priorities 1 to 3 cost credit, CONTROL does not: so a side whose program reads slowly need not stop reading the stream,
and a Cancel or a Ping passes whatever waits. Invariant: totals only rise, so that a lost or old grant does no harm.
"""

from __future__ import annotations

from split.errors import RemoteProtocolError
from split.wire.limits import MESSAGE_OVERHEAD_BYTES


def cost(body_bytes: int, *, begins: bool) -> int:
    """What a frame of priority 1 to 3 costs: its body, and for a BEGIN what any message takes, however small."""
    return body_bytes + MESSAGE_OVERHEAD_BYTES if begins else body_bytes


class Granted:
    """What the peer may send here.

    What was received and not read takes room in the window. A message that is under way takes none: it is bounded by
    its own size, and a message larger than the window could otherwise never become whole.
    """

    __slots__ = ("_received", "_total", "_unread", "_window")

    def __init__(self, window_bytes: int) -> None:
        self._window = window_bytes
        self._total = window_bytes
        """All that the peer may have sent since the connection began, as far as it was told."""
        self._received = 0
        self._unread = 0

    def take(self, cost_bytes: int) -> None:
        """A frame begins to come. RemoteProtocolError when the peer has no credit for it."""
        self._received += cost_bytes
        if self._received > self._total:
            raise RemoteProtocolError(
                f"a frame costs {cost_bytes} bytes of credit, the peer had {self._total - self._received + cost_bytes}"
            )

    def hold(self, cost_bytes: int) -> None:
        """A message is whole and waits to be read."""
        self._unread += cost_bytes

    def release(self, cost_bytes: int) -> None:
        """A message that waited was read."""
        self._unread -= cost_bytes
        assert self._unread >= 0, self._unread

    def top_up(self) -> int | None:
        """The total to tell the peer, once half a window has become free since it was told last; None before."""
        total = self._received - self._unread + self._window
        if total - self._total < self._window // 2:
            return None
        self._total = total
        return total
