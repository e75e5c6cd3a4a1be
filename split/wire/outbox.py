"""What waits to be sent on one connection: messages by priority in, frames out, counted in bytes.

No protocol state beyond what sending needs: numbers rise, at most one message per priority is begun and not out, and a
message that is dropped half-way is followed by its RESET. What may be sent when is `connection.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from split.errors import Overloaded
from split.wire.credit import cost
from split.wire.frames import Buffer, FrameCutter
from split.wire.limits import CONTROL_QUEUE_BYTES, FRAME_HEADER_BYTES, MAX_FRAME_BYTES, MESSAGE_OVERHEAD_BYTES
from split.wire.messages import Message, ModelChunk, Pong, Priority


class Outgoing:
    """A message that is not yet out."""

    __slots__ = ("frames", "message", "priority")

    def __init__(self, message: Message, metadata: bytes, payload: Sequence[Buffer], priority: Priority) -> None:
        self.message = message
        self.priority = priority
        self.frames = FrameCutter(metadata, payload, priority=priority)

    @property
    def left(self) -> int:
        """Bytes that are in no frame yet."""
        return self.frames.left

    @property
    def begun(self) -> bool:
        """Whether a frame of it has left."""
        return self.frames.number > 0


class Outbox:
    """The queues of one connection, one per priority."""

    def __init__(self, *, queue_bytes: int, frame_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self.frame_bytes = frame_bytes
        """Of the next frames, header and body, at most."""
        self.credit_bytes: int | None = None
        """What messages of priorities 1 to 3 may cost in all, as the peer says; None: it does not say."""
        self._spent_bytes = 0
        self._grant = b""
        self._queues: dict[Priority, deque[Outgoing]] = {priority: deque() for priority in Priority}
        self._resets: deque[bytes] = deque()
        self._next_number = 1
        self._counted_bytes = {True: 0, False: 0}
        """Of CONTROL (True) and of all else: each has its own bound, so that a full queue never holds up a Ping."""
        self.queued_bytes = 0
        """Bytes of messages accepted and not yet taken as frames."""

    def require_room(self, outgoing: Outgoing) -> None:
        """Overloaded when this message does not fit beside those of its kind, CONTROL or data; alone, any does."""
        control = outgoing.priority is Priority.CONTROL
        bound, counted = CONTROL_QUEUE_BYTES if control else self._queue_bytes, self._counted_bytes[control]
        if counted and counted + outgoing.left + MESSAGE_OVERHEAD_BYTES > bound:
            raise Overloaded(
                f"{type(outgoing.message).__name__} of {outgoing.left} bytes does not fit: {counted} bytes of "
                f"{'control messages' if control else 'data'} wait for the link already, the bound is {bound}"
            )

    def put(self, outgoing: Outgoing) -> None:
        """Queue a message behind those of its priority, whatever waits already; the files of models behind all others
        of theirs, so that no request waits for more of them than the piece that has begun."""
        queue, behind = self._queues[outgoing.priority], 0
        if not isinstance(outgoing.message, ModelChunk):
            while behind < len(queue) and _may_wait(queue[-1 - behind]):
                behind += 1
        queue.insert(len(queue) - behind, outgoing)
        self._count(outgoing.priority, outgoing.left, MESSAGE_OVERHEAD_BYTES)

    def drop(self, unwanted: Callable[[Outgoing], bool], *, reset: bool) -> None:
        """Take out what is unwanted; with `reset` the peer is told of each that has begun."""
        for outgoing in [one for one in chain.from_iterable(self._queues.values()) if unwanted(one)]:
            self._queues[outgoing.priority].remove(outgoing)
            self._count(outgoing.priority, -outgoing.left, -MESSAGE_OVERHEAD_BYTES)
            if reset and outgoing.begun:
                self._resets.append(outgoing.frames.reset())

    def waiting_pongs(self) -> list[Pong]:
        """The answers to pings that are not out yet."""
        return [one.message for one in self._queues[Priority.CONTROL] if isinstance(one.message, Pong)]

    def next_frame(self) -> bytes | None:
        """The best frame now (credit or a reset, else lowest priority number, else first come); None when nothing waits
        or what waits may not be sent."""
        if self._grant:
            grant, self._grant = self._grant, b""
            return grant
        if self._resets:
            return self._resets.popleft()
        outgoing = self._next_outgoing()
        if outgoing is None:
            return None
        room = min(self.frame_bytes - FRAME_HEADER_BYTES, self._allowed_bytes(outgoing))
        if room <= 0:
            return None
        begins = not outgoing.begun
        if begins:
            frame = outgoing.frames.begin(self._next_number, room)
            self._next_number += 1
        else:
            frame = outgoing.frames.proceed(room)
        body_bytes = len(frame) - FRAME_HEADER_BYTES
        if outgoing.priority is not Priority.CONTROL:
            self._spent_bytes += cost(body_bytes, begins=begins)
        if outgoing.left == 0:
            self._queues[outgoing.priority].popleft()
        self._count(outgoing.priority, -body_bytes, 0 if outgoing.left else -MESSAGE_OVERHEAD_BYTES)
        return frame

    @property
    def blocked(self) -> bool:
        """Whether something waits and may not be sent before the peer gives credit."""
        outgoing = self._next_outgoing()
        return outgoing is not None and self._allowed_bytes(outgoing) <= 0

    def grant(self, frame: bytes) -> None:
        """Tell the peer its credit; what it was not told yet is replaced."""
        self._grant = frame

    def _next_outgoing(self) -> Outgoing | None:
        return next((queue[0] for queue in self._queues.values() if queue), None)

    def _allowed_bytes(self, outgoing: Outgoing) -> int:
        """Of this message's next body, by credit; 0 or less: nothing."""
        if outgoing.priority is Priority.CONTROL or self.credit_bytes is None:
            return MAX_FRAME_BYTES
        return self.credit_bytes - self._spent_bytes - cost(0, begins=not outgoing.begun)

    def _count(self, priority: Priority, own_bytes: int, overhead_bytes: int) -> None:
        self.queued_bytes += own_bytes
        self._counted_bytes[priority is Priority.CONTROL] += own_bytes + overhead_bytes


def _may_wait(outgoing: Outgoing) -> bool:
    """A piece of a model that has not begun; in a queue, such pieces are the last."""
    return isinstance(outgoing.message, ModelChunk) and not outgoing.begun
