"""What happened to the last requests, for `isthmus audit`: sizes, times, link and load, in the format of `record.py`.

The last hour is in memory, and on disk as well where `record.enabled` says so. Both are bounded in bytes whatever the
rate of requests: when more come than an hour's bytes have room for, runs of requests are recorded in full with gaps
between them (a queue shows only in requests that follow each other), and each batch says how many it stands for.

Nothing here is waited for by an answer: `note` is called when its books are settled. Used on the event loop only; files
are written by `run`, in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent.journal import Entry
from agent.planner import Known
from agent.record import FORMAT, Head, Request, Requests, pack
from agent.record_files import HOUR_BYTES, HOUR_S, RecordFiles
from agent.record_rows import is_known, row_of
from agent.record_tables import Tables
from agent.version import VERSION
from split.plan.power import NO_POWER, Power

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""Between two batches: what a crash costs."""
RING_BYTES: Final = 1_000_000
"""Of the last hour, in memory."""
RESERVE_BYTES: Final = 50_000
"""Of an hour's bytes, for what must be written: the last batch, the tables of models that come late."""
START_BYTES: Final = 100_000
"""Of an hour's bytes, that may be used at once; the rest comes evenly over it."""
RUN_BYTES: Final = 16_000
"""When an hour's bytes are used as far as they have come, recording pauses until so many are there: 400 requests."""
ROW_BYTES: Final = 60.0
"""Of one request, packed, before the first batch tells; typical are 40."""
ROWS_MAX: Final = 2048
"""Of one batch: 1 MB in memory until it is packed."""
WAITING_BYTES: Final = 200_000
"""Of frames that the disk does not take; then the oldest requests are given up, and counted."""


@dataclass(slots=True, kw_only=True)
class _Chapter:
    """What belongs to one head: an hour by the wall clock, as far as this process was there."""

    hour: int
    zero_s: float
    head: bytes
    used_bytes: int
    tables: Tables = field(default_factory=Tables)
    batches: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(End, monotonic seconds; frame)."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A frame that is not on disk yet."""

    hour: int
    frame: bytes
    requests: int
    """That it stands for; 0: it must not be left out."""


class Recorder:
    """`knows(model, now_s)`: what the planner knows of a model; None where it does not. `power(now_s,
    model)`: what the device draws while this model runs. `files`: None keeps the last hour only, in memory."""

    def __init__(
        self,
        *,
        knows: Callable[[str, float], Known | None],
        power: Callable[[float, str], Power] = lambda now_s, model: NO_POWER,
        slowdown: float = 1.0,
        price_per_gb: float = 0.0,
        price_per_companion_s: float = 0.0,
        files: RecordFiles | None = None,
        now_s: Callable[[], float],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._knows = knows
        self._power = power
        self._slowdown = slowdown
        self._prices = (price_per_gb, price_per_companion_s)
        self._files = files
        self._now_s = now_s
        self._wall_s = wall_s
        self._row_bytes = ROW_BYTES
        self._waiting: list[_Waiting] = []
        self._chapters: deque[_Chapter] = deque()
        self._rows: list[Request] = []
        self._recorded: set[str] = set()
        """Models that `_rows` has any of."""
        self._seen: Counter[str] = Counter()
        self._lost = 0
        self._rows_max = 0
        self._paused = False
        self._unwritten = 0
        self.write_error = ""
        """Why the last hour's record could not be written the last time; "" when it could."""
        self._begin()

    # -- recording ----------------------------------------------------------------------------------------------------

    def note(self, entry: Entry) -> None:
        """One finished request. Nothing that goes wrong here is its caller's."""
        try:
            self._note(entry)
        except Exception:  # a bug of ours
            log.exception("a finished request could not be recorded")

    def _note(self, entry: Entry) -> None:
        model = entry.model
        done_at_s = entry.received_at_s + entry.total_ms / 1000
        if len(self._rows) >= self._rows_max and model in self._recorded:
            self._seen[model] += 1
            return
        known = self._knows(model, done_at_s)
        if known is None or not is_known(entry, known):
            self._lost += 1  # not measured yet, or replaced in the meantime
            return
        chapter = self._chapters[-1]
        written, frame = chapter.tables.of(
            model, entry.facts.sizes, known, lambda: self._power(done_at_s, model), done_at_s
        )
        if frame:
            self._spend(frame, requests=0)
        if written is None:
            self._lost += 1
            return
        self._seen[model] += 1
        self._recorded.add(model)
        self._rows.append(row_of(entry, known, table=written.number, work=written.work, zero_s=chapter.zero_s))

    # -- batches ------------------------------------------------------------------------------------------------------

    def close_batch(self, *, always: bool = False) -> None:
        """What has come so far becomes a frame, if an hour's bytes have room for it (`always`: in any case)."""
        now_s = self._now_s()
        hour = self._hour()
        always = always or hour != self._chapters[-1].hour
        if (self._seen or self._lost) and (always or not self._paused):
            frame = pack([Requests(seen=dict(self._seen), lost=self._lost, rows=tuple(self._rows))])
            if self._rows:
                self._row_bytes += 0.3 * (len(frame) / len(self._rows) - self._row_bytes)
            self._chapters[-1].batches.append((now_s, frame))
            self._spend(frame, requests=self._seen.total() + self._lost)
            self._rows, self._recorded, self._lost = [], set(), 0
            self._seen.clear()
        if hour != self._chapters[-1].hour:
            self._begin()
        self._make_room(now_s)
        left_bytes = self._left_bytes()
        self._paused = left_bytes < (RUN_BYTES if self._paused else self._row_bytes)
        self._rows_max = 0 if self._paused else int(min(left_bytes / self._row_bytes, ROWS_MAX))

    def _begin(self) -> None:
        hour, now_s = self._hour(), self._now_s()
        head = Head(
            format=FORMAT,
            agent=f"isthmus {VERSION}",
            started_s=round(self._wall_s(), 3),
            slowdown=self._slowdown,
            price_per_gb=self._prices[0],
            price_per_companion_s=self._prices[1],
        )
        frame = pack([head])
        used_bytes = 0 if self._files is None else self._files.size_bytes(hour)
        self._chapters.append(_Chapter(hour=hour, zero_s=now_s, head=frame, used_bytes=used_bytes))
        self._spend(frame, requests=0)
        self._rows_max = int(min(max(self._left_bytes(), 0.0) / self._row_bytes, ROWS_MAX))

    def _left_bytes(self) -> float:
        """What of this hour's bytes has come and is not used."""
        passed = self._wall_s() / HOUR_S - self._chapters[-1].hour
        come = START_BYTES + (HOUR_BYTES - RESERVE_BYTES - START_BYTES) * min(max(passed, 0.0), 1.0)
        return come - self._chapters[-1].used_bytes

    def _spend(self, frame: bytes, *, requests: int) -> None:
        chapter = self._chapters[-1]
        chapter.used_bytes += len(frame)
        if self._files is not None:
            self._waiting.append(_Waiting(chapter.hour, frame, requests))

    def _hour(self) -> int:
        return int(self._wall_s() // HOUR_S)

    def _make_room(self, now_s: float) -> None:
        """Forget what is older than an hour, and the oldest beyond `RING_BYTES`."""
        while True:
            oldest = self._chapters[0]
            if not oldest.batches and len(self._chapters) > 1:
                self._chapters.popleft()
            elif oldest.batches and (oldest.batches[0][0] < now_s - HOUR_S or self.ring_bytes() > RING_BYTES):
                oldest.batches.popleft()
            else:
                return

    def ring_bytes(self) -> int:
        """What the last hour takes in memory."""
        return sum(map(len, self._frames()))

    def _frames(self) -> list[bytes]:
        return [
            frame
            for chapter in self._chapters
            for frame in (chapter.head, *chapter.tables.frames, *(frame for _, frame in chapter.batches))
        ]

    def last_hour(self) -> bytes:
        """The record of the last hour, up to now; asking for it again and again uses no more of the hour's bytes than
        have come."""
        if self._rows and self._left_bytes() > 0.0:
            self.close_batch()
        return b"".join(self._frames())

    # -- disk ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Close batches and write them down, until cancelled; `close` does it for the last time."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.close_batch()
            await self.write_down()

    async def write_down(self) -> None:
        """What is closed, to disk, if it is to be there."""
        if self._files is not None and self._waiting:
            waiting, self._waiting = self._waiting, []
            self._wrote(*await asyncio.to_thread(_write_down, self._files, waiting, self._openings()))

    def close(self) -> None:
        """The daemon ends."""
        self.close_batch(always=True)
        if self._files is not None:
            waiting, self._waiting = self._waiting, []
            self._wrote(*_write_down(self._files, waiting, self._openings()))

    def _openings(self) -> dict[int, tuple[bytes, ...]]:
        """Hour → its head and tables."""
        return {chapter.hour: (chapter.head, *chapter.tables.frames) for chapter in self._chapters}

    def snapshot(self) -> dict[str, Any]:
        """For `isthmus status`."""
        return {
            "on_disk": self._files is not None,
            "memory_bytes": self.ring_bytes(),
            "unwritten": self._unwritten,
            "write_error": self.write_error,
        }

    def _wrote(self, left: list[_Waiting], error: str) -> None:
        """`left` is to be tried again, as far as it may wait."""
        if error and not self.write_error:
            log.warning("the record of traffic cannot be written (%s); requests are answered as ever", error)
        if self.write_error and not error:
            log.info("the record of traffic can be written again")
        self.write_error = error
        hour, given_up, kept = self._chapters[-1].hour, 0, []
        over = sum(len(one.frame) for one in left) - WAITING_BYTES
        for one in left:
            if one.hour == hour and (over <= 0 or not one.requests):
                kept.append(one)
            else:
                over -= len(one.frame)
                given_up += one.requests
        if given_up:
            self._unwritten += given_up
            kept.append(_Waiting(hour, pack([Requests(seen={}, lost=given_up, rows=())]), 0))
        self._waiting = kept + self._waiting


def _write_down(
    files: RecordFiles, waiting: list[_Waiting], openings: Mapping[int, Sequence[bytes]]
) -> tuple[list[_Waiting], str]:
    """Each hour's frames to its file; what is left and why. Blocking."""
    left: list[_Waiting] = []
    error = ""
    for hour in dict.fromkeys(one.hour for one in waiting):
        frames = [one for one in waiting if one.hour == hour]
        if why := files.append(hour, [one.frame for one in frames], openings.get(hour, ())):
            left += frames
            error = why
    return left, error
