"""Room for pictures while they are decoded: a phone's photo takes 100 MB, the largest that is taken 400 MB, and the
threads that decode are as many as the default pool has. Waiting is first come, first served, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from split.errors import TooLarge

DECODING_BYTES: Final = 512 << 20
"""One picture of `PIXELS_MAX` pixels, or ten of twelve megapixels with two cores to decode them."""

T = TypeVar("T")


class DecodingRoom:
    """One per companion; used from the event loop only."""

    def __init__(self, room_bytes: int = DECODING_BYTES) -> None:
        self._room_bytes = room_bytes
        self._taken_bytes = 0
        self._first = asyncio.Lock()
        """Held by the first of those that wait; fair."""
        self._left = asyncio.Event()
        self._under_way: set[asyncio.Task[object]] = set()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """`work()` in a thread, begun when `size` bytes are free; TooLarge when they never are.

        Cancelling it ends the waiting; a thread at work goes on, and keeps its room until it ends.
        """
        if size > self._room_bytes:
            raise TooLarge(
                f"the request's pictures take {size} bytes while they are decoded, at most {self._room_bytes} are "
                "given to one request; send fewer or smaller ones"
            )
        async with self._first:
            while self._taken_bytes + size > self._room_bytes:
                self._left.clear()
                await self._left.wait()
            self._taken_bytes += size
        task: asyncio.Task[T] = asyncio.create_task(asyncio.to_thread(work))
        self._under_way.add(task)

        def ended(_: asyncio.Task[T]) -> None:
            self._under_way.discard(task)
            self._taken_bytes -= size
            self._left.set()

        task.add_done_callback(ended)
        return await asyncio.shield(task)
