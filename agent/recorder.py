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
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agent.journal import Entry
from agent.planner import Known
from agent.record import (
    FORMAT,
    STAGES,
    TABLES_PER_HEAD,
    Behaviour,
    DevicePower,
    Head,
    PlanCosts,
    Request,
    Requests,
    Table,
    pack,
)
from agent.record_files import HOUR_BYTES, HOUR_S, RecordFiles
from agent.version import VERSION
from split.plan.observation import Floats
from split.plan.power import NO_POWER, Power
from split.plan.table import Column, PlanTable
from split.profiles.contract import PRIVACY_ORDER

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
TABLES_MAX: Final = 64
"""In one hour; then a request is recorded by the nearest of its model, with the work it has of that."""
FINE: Final = 8
"""Steps in which sizes double: sizes within 5 % share a table."""
LOOK_S: Final = 1.0
"""Between two looks at whether a table is still right."""
OTHER_RATIO: Final = 0.1
"""It is not if a cost is off by more, and it is a minute old, or off by `ANEW_RATIO`: the companion has told its own
times."""
ANEW_RATIO: Final = 0.5
SAME_S: Final = 60.0

LEAST_MBIT_S: Final = 1e-4
ENDLESS_MS: Final = 1e9
"""What stands for more, eleven days."""

_COMPARED: Final = [Column.HEAD, Column.TAIL]


@dataclass(slots=True, kw_only=True)
class _Written:
    """A table as it was written."""

    number: int
    table: PlanTable
    cloud_ms: Floats
    """As the planner had them."""
    costs: Floats
    """Of these, at the table's sizes, those that are compared."""
    work: float
    at_s: float
    looked_at_s: float


@dataclass(slots=True, kw_only=True)
class _Chapter:
    """What belongs to one head: an hour by the wall clock, as far as this process was there."""

    hour: int
    zero_s: float
    head: bytes
    used_bytes: int
    tables: list[bytes] = field(default_factory=list)
    written: dict[tuple[str, tuple[int, ...]], _Written] = field(default_factory=dict)
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
        chosen, ran = entry.decision.chosen, entry.ran
        rows = {} if known is None else known.table.row_of
        if known is None or chosen.plan not in rows or (ran is not None and ran not in rows):
            self._lost += 1  # not measured yet, or replaced in the meantime
            return
        written = self._table(model, entry.facts.sizes, known, done_at_s)
        if written is None:
            self._lost += 1
            return
        self._seen[model] += 1
        self._recorded.add(model)
        facts = entry.facts
        self._rows.append(
            Request(
                _fine(entry.received_at_s - self._chapters[-1].zero_s),
                written.number,
                _fine(math.prod(facts.sizes) / written.work),
                _rough(entry.deadline_ms),
                facts.encoded_bytes,
                PRIVACY_ORDER.index(facts.privacy),
                facts.mode is not None or facts.cut is not None or facts.codec is not None,
                rows[chosen.plan],
                -1 if ran is None else rows[ran],
                bool(entry.fallback),
                chosen.parts,
                _rough(chosen.predicted_ms),
                _rough(entry.total_ms),
                _rough(chosen.stages_ms.get("queue", 0.0)),
                _rough(known.cloud_queue_ms),
                _fine(known.alpha),
                _fine(known.beta),
                _link(entry.decision.link),
                _stages(entry),
            )
        )

    def _table(self, model: str, sizes: tuple[int, ...], known: Known, now_s: float) -> _Written | None:
        """The table for a request of these sizes, written if there is none that fits; None where there is no room."""
        chapter = self._chapters[-1]
        key = (model, tuple(map(_near, sizes)))
        written = chapter.written.get(key)
        if written is not None:
            if written.cloud_ms is known.cloud_ms or now_s < written.looked_at_s + LOOK_S:
                return written
            written.looked_at_s = now_s
            if not _became_other(written, known, _costs(known, key[1]), now_s):
                return written
        if len(chapter.tables) < TABLES_MAX:
            table = _costs(known, key[1])
            number = len(chapter.tables)
            assert number < TABLES_PER_HEAD
            frame = pack([_as_written(number, model, key[1], table, known, self._power(now_s, model))])
            chapter.tables.append(frame)
            self._spend(frame, requests=0)
            written = chapter.written[key] = _Written(
                number=number,
                table=known.table,
                cloud_ms=known.cloud_ms,
                costs=table.costs[_COMPARED],
                work=math.prod(key[1]),
                at_s=now_s,
                looked_at_s=now_s,
            )
        return written or _nearest(chapter, model, sizes)

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
            for frame in (chapter.head, *chapter.tables, *(frame for _, frame in chapter.batches))
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
        return {chapter.hour: (chapter.head, *chapter.tables) for chapter in self._chapters}

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


def _as_written(number: int, model: str, sizes: tuple[int, ...], table: PlanTable, known: Known, power: Power) -> Table:
    return Table(
        table=number,
        model=model,
        sizes=sizes,
        image_ms=_fine(known.image_ms),
        plans=tuple(
            PlanCosts(
                table.labels[row],
                _fine(costs[Column.HEAD]),
                _fine(costs[Column.ENCODE]),
                round(costs[Column.UP]),
                _fine(costs[Column.CLOUD_DECODE] * known.speed_ratio + costs[Column.ENCODED] * known.cloud_image_ms),
                _fine(costs[Column.TAIL]),
                round(costs[Column.DOWN]),
                _fine(costs[Column.REPLY]),
                _fine(costs[Column.FINISH]),
                sum(bool(level[row]) for level in table.allowed),
                table.fidelity[row],
            )
            for row, costs in enumerate(table.costs.T.tolist())
        ),
        power=DevicePower(
            compute_w=_fine(power.compute_w),
            send_w=_fine(power.send_w),
            receive_w=_fine(power.receive_w),
            wait_w=_fine(power.wait_w),
            measured=power.measured,
            source=power.source,
        ),
        behaviour=_behaviour(known),
    )


def _behaviour(known: Known) -> Behaviour:
    asked = known.behaviour
    weights = asked.weights
    return Behaviour(
        weights=(weights.latency, weights.throughput, weights.energy, weights.cost),
        service_class=asked.service_class,
        strategy=asked.fallback.strategy,
        rate_min_per_s=asked.throughput_min_per_s,
    )


def _costs(known: Known, sizes: tuple[int, ...]) -> PlanTable:
    return known.table.with_compute(tail_ms=known.cloud_ms).at(sizes)


def _became_other(written: _Written, known: Known, table: PlanTable, now_s: float) -> bool:
    """Whether requests are to be held against other costs from now on."""
    if written.table is not known.table:
        return True
    written.cloud_ms = known.cloud_ms
    off = float(np.max(np.abs(table.costs[_COMPARED] - written.costs) / np.maximum(written.costs, 1e-3)))
    return off > ANEW_RATIO or (off > OTHER_RATIO and now_s >= written.at_s + SAME_S)


def _near(size: int) -> int:
    """The size whose table stands for this one: 8 in each octave, small ones as they are."""
    return size if size <= FINE else round(2.0 ** (round(math.log2(size) * FINE) / FINE))


def _nearest(chapter: _Chapter, model: str, sizes: tuple[int, ...]) -> _Written | None:
    work = math.prod(sizes)
    known = [one for (name, _), one in chapter.written.items() if name == model]
    return min(known, key=lambda one: abs(math.log(max(work, 1) / one.work)), default=None)


def _stages(entry: Entry) -> tuple[float, ...]:
    measured = entry.stages_ms
    found = [_rough(measured.get(stage, 0.0)) for stage in STAGES]
    found[_HEAD] += _rough(measured.get("whole", 0.0))
    while found and not found[-1]:
        found.pop()
    return tuple(found)


_HEAD: Final = STAGES.index("head")


def _link(estimate: Mapping[str, float]) -> tuple[float, ...]:
    if not estimate:
        return ()
    up_mbit_s, down_mbit_s = (max(_fine(estimate[name]), LEAST_MBIT_S) for name in ("up_mbit_s", "down_mbit_s"))
    return _rough(estimate["rtt_ms"]), up_mbit_s, down_mbit_s


def _rough(ms: float) -> float:
    """To 10 µs; `round` takes twice as long."""
    return int(min(ms, ENDLESS_MS) * 100 + 0.5) / 100


def _fine(value: float) -> float:
    return int(value * 10_000 + 0.5) / 10_000
