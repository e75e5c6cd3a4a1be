"""What waits to be sent on one connection: messages by priority in, frames out, counted in bytes.

No protocol state beyond what sending needs: numbers rise, at most one message per priority is begun and not out, and a
message that is dropped half-way is followed by its RESET. What may be sent when is `connection.py`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

from split.errors import Overloaded
from split.wire.frames import Buffer, FrameCutter
from split.wire.limits import CONTROL_QUEUE_BYTES, FRAME_HEADER_BYTES, MESSAGE_OVERHEAD_BYTES
from split.wire.messages import Message, Priority


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
        return self.frames.number > 0


class Outbox:
    """The queues of one connection, one per priority."""

    def __init__(self, *, queue_bytes: int, frame_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self.frame_bytes = frame_bytes
        """Of the next frames, header and body, at most."""
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
        """Queue a message behind those of its priority, whatever waits already."""
        self._queues[outgoing.priority].append(outgoing)
        self._count(outgoing.priority, outgoing.left, MESSAGE_OVERHEAD_BYTES)

    def drop(self, unwanted: Callable[[Outgoing], bool], *, reset: bool) -> None:
        """Take out what is unwanted; with `reset` the peer is told of each that has begun."""
        for outgoing in [one for one in chain.from_iterable(self._queues.values()) if unwanted(one)]:
            self._queues[outgoing.priority].remove(outgoing)
            self._count(outgoing.priority, -outgoing.left, -MESSAGE_OVERHEAD_BYTES)
            if reset and outgoing.begun:
                self._resets.append(outgoing.frames.reset())

    def count(self, kind: type[Message]) -> int:
        """How many messages of that kind and of priority CONTROL wait."""
        return sum(isinstance(one.message, kind) for one in self._queues[Priority.CONTROL])

    def next_frame(self) -> bytes | None:
        """The best frame now (a reset, else lowest priority number, else first come); None when nothing waits."""
        if self._resets:
            return self._resets.popleft()
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is None:
            return None
        outgoing = queue[0]
        room = self.frame_bytes - FRAME_HEADER_BYTES
        if outgoing.begun:
            frame = outgoing.frames.proceed(room)
        else:
            frame = outgoing.frames.begin(self._next_number, room)
            self._next_number += 1
        body_bytes = len(frame) - FRAME_HEADER_BYTES
        if outgoing.left == 0:
            queue.popleft()
        self._count(outgoing.priority, -body_bytes, 0 if outgoing.left else -MESSAGE_OVERHEAD_BYTES)
        return frame

    def _count(self, priority: Priority, own_bytes: int, overhead_bytes: int) -> None:
        self.queued_bytes += own_bytes
        self._counted_bytes[priority is Priority.CONTROL] += own_bytes + overhead_bytes
