"""How fast this machine computes at the moment, and telling devices when that changes: one that has left because others
use the machine, too, learns of its end from nobody else while it sends nothing.

A piece of work of 1 ms on each thread that a session may use is timed three times, four times a second at most: while
requests come, for a minute after, and then once a second for as long as it was slow when it was last said. The least
counts: a load that one of them escapes is none that would keep a device away. What is told is the plain time: devices
know nothing of the piece, only how its time has changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

LOOK_S: Final = 0.25
"""Between two looks: with the second one of a change and half a round trip a device knows within 0.3 s."""
AGAIN_S: Final = 0.03
"""After a surprise: two in the same direction are a change, one is a stall."""
USED_S: Final = 60.0
"""So long after a request it is looked as often."""
LOOK_SLOW_S: Final = 1.0
PIECE_S: Final = 0.001
PIECES: Final = 3
"""Of each look: 1.2 % of the machine at four a second."""
PIECE_BYTES: Final = 64 << 10
FIRST_LOOKS: Final = 3
"""Before anything is told: what comes later is held against it."""
CHANGE: Final = math.log(1.5)
"""Told is what differs by more; less is learned from replies, and hardly keeps anybody away."""
SLOW: Final = CHANGE
"""So much above the least ever told it is slow."""
THREADS_MAX: Final = 16


class PaceWatch:
    """Times go in, what is to be told comes out. Pure."""

    def __init__(self) -> None:
        self.told_ms = 0.0
        """What a piece takes, as told last; 0.0 before the first."""
        self._first_ms: list[float] = []
        self._least_told_ms = math.inf
        self._agreed_at_s = -math.inf
        self._surprise_ms = 0.0

    @property
    def is_surprised(self) -> bool:
        """The last look is to be repeated soon."""
        return self._surprise_ms > 0.0 or 0 < len(self._first_ms) < FIRST_LOOKS

    @property
    def is_slow(self) -> bool:
        return self.told_ms > 0.0 and math.log(self.told_ms / self._least_told_ms) > SLOW

    def looked(self, took_ms: float, now_s: float) -> float | None:
        """A piece took so long. Seconds ago that it was as told before, 0.0 where it still is or nothing was told
        before; None: not known yet."""
        if self.told_ms == 0.0:
            self._first_ms.append(took_ms)
            return self._tell(min(self._first_ms), now_s, since_s=0.0) if len(self._first_ms) == FIRST_LOOKS else None
        off = math.log(took_ms / self.told_ms)
        if abs(off) <= CHANGE:
            self._agreed_at_s, self._surprise_ms = now_s, 0.0
            return 0.0
        if self._surprise_ms == 0.0 or (self._surprise_ms > self.told_ms) != (off > 0.0):
            self._surprise_ms = took_ms
            return None
        return self._tell(math.sqrt(took_ms * self._surprise_ms), now_s, since_s=now_s - self._agreed_at_s)

    def _tell(self, ms: float, now_s: float, *, since_s: float) -> float:
        self.told_ms, self._agreed_at_s, self._surprise_ms = ms, now_s, 0.0
        self._least_told_ms = min(self._least_told_ms, ms)
        return since_s


class Pieces:
    """The piece of work, on so many threads at once; the slowest counts, as in a session."""

    def __init__(self, threads: int) -> None:
        self._threads = max(min(threads, THREADS_MAX), 1)
        self._pool = ThreadPoolExecutor(self._threads, "pace")
        self._times = 1
        while self._piece_s() < PIECE_S:
            self._times *= 2

    async def took_ms(self) -> float:
        """The least of `PIECES`, one after the other."""
        return min([await self._slowest_s() for _ in range(PIECES)]) * 1000.0

    async def _slowest_s(self) -> float:
        loop = asyncio.get_running_loop()
        return max(
            await asyncio.gather(*(loop.run_in_executor(self._pool, self._piece_s) for _ in range(self._threads)))
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _piece_s(self) -> float:
        began_s = time.perf_counter()
        for _ in range(self._times):
            hashlib.sha256(_PIECE).digest()
        return time.perf_counter() - began_s


_PIECE: Final = bytes(PIECE_BYTES)


class Pace:
    """`is_busy`: a request is computed, whose time tells by itself."""

    def __init__(self, pieces: Pieces, *, is_busy: Callable[[], bool]) -> None:
        self.used_at_s = -math.inf
        """When the last request came, monotonic; set by who takes them."""
        self.tell: Callable[[float, float], None] = lambda work_ms, since_s: None
        """Called after each look that told something, changed or not: ms of a piece, and how many seconds ago it was
        still as told before."""
        self._pieces = pieces
        self._is_busy = is_busy
        self._watch = PaceWatch()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.pause_s(time.monotonic()))
            await self.look()

    def pause_s(self, now_s: float) -> float:
        """Until the next look."""
        if self._watch.is_surprised:
            return AGAIN_S
        return LOOK_S if now_s - self.used_at_s < USED_S else LOOK_SLOW_S

    async def look(self) -> None:
        """Time a piece, where somebody may want to know, and nothing is computed meanwhile."""
        unused = time.monotonic() - self.used_at_s >= USED_S
        if self._is_busy() or (unused and not self._watch.is_slow):
            return
        took_ms = await self._pieces.took_ms()
        if self._is_busy():
            return
        since_s = self._watch.looked(took_ms, time.monotonic())
        if since_s is not None:
            self.tell(self._watch.told_ms, since_s)
