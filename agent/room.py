"""`limits.inflight_bytes`: one sum over all that requests in flight hold, bodies as they come in, tensors, and what is
made of them. Bookkeeping only: who holds memory says so here before it takes it.
"""

from __future__ import annotations

from typing import Self

from split.errors import Overloaded


class Room:
    """Bytes that all requests in flight may hold together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0


class Holding:
    """What one request holds of the room, in a `with` block or until `release`: what it came with, and what is made
    of it while it waits for the companion."""

    __slots__ = ("_held_bytes", "_input_bytes", "_room")

    def __init__(self, room: Room, input_bytes: int = 0) -> None:
        self._room = room
        self._input_bytes = input_bytes
        self._held_bytes = 0
        self.made(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def made(self, made_bytes: int) -> None:
        """Hold so much beside what it came with from now on, instead of what was held beside it; Overloaded, and
        nothing changes, where that is more and there is no room for it."""
        more = self._input_bytes + made_bytes - self._held_bytes
        room = self._room
        if more > 0 and room.held_bytes + more > room.limit_bytes:
            raise Overloaded(
                f"no room for {more} more bytes of a request ({room.held_bytes} of {room.limit_bytes} are in flight);"
                " try again, or raise limits.inflight_bytes"
            )
        room.held_bytes += more
        self._held_bytes += more

    def beside(self) -> Holding:
        """For a part of the request, whose inputs are held here already."""
        return Holding(self._room)

    def release(self) -> None:
        """Give it all back."""
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0
