"""When a request that waits for the companion must be finished here, so that every one of them meets its deadline.

`split.plan.slack.latest_starts` says by when each local finish must start, given that they share one worker. One that
the worker could not start by then, because of what it has to do before, begins at once; and work that enters the worker
later is let in behind the finishes that it would make late (`make_room`). Where it pays to begin earlier
(`split.plan.hedging` says from when on), that is done as soon as the worker is free, one at a time, where no other is
late by it. One that is not expected to be through by its deadline begins only when the companion has failed: before,
it would keep the worker from all others, for an answer that nobody gets. Not a judgement on the
companion: only a clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from split.plan.slack import MARGIN_RATIO, latest_starts, reserved_ms

Finish = asyncio.Future[Any]
"""The local finish, under way."""

EARLY_S = 1e-6
"""A timer fires when the clock is there but for its resolution: what is due so soon is due."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    begin: Callable[[], Finish]
    begun: asyncio.Future[Finish]
    deadline_at_s: float
    in_time: bool
    """It is expected to be through by then."""
    runs_ms: float
    """What the worker would be busy with it, at most: its margin in."""
    reserved_ms: float
    give_up_at_s: float
    hedge_at_s: float


class Lateness:
    """`watch` gives a future that is done as soon as the local finish has begun."""

    def __init__(self, *, queue_ms: Callable[[], float]) -> None:
        self._queue_ms = queue_ms
        self._watched: dict[str, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._beginning = False
        self._closed = False

    def watch(
        self,
        key: str,
        *,
        deadline_at_s: float,
        local_ms: float,
        timeout_ms: float | None,
        begin: Callable[[], Finish],
        hedge_after_ms: float = math.inf,
        margin_ratio: float = MARGIN_RATIO,
    ) -> asyncio.Future[Finish]:
        """`local_ms`: what the device would need; `timeout_ms`: bound on the wait inside the deadline (None: none);
        `hedge_after_ms`: from then on the finish begins while the worker has nothing else to do; `margin_ratio`: of
        `local_ms`, kept beside it (`split.plan.slack.margin_ratio`).

        `begin` hands the finish to the worker, at once and without waiting; it is called at most once. What it returns
        is the result of the future given here, what it raises that future's exception.
        """
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        left_ms = (deadline_at_s - now_s) * 1000
        self._watched[key] = _Watched(
            begin=begin,
            begun=loop.create_future(),
            deadline_at_s=deadline_at_s,
            in_time=local_ms <= left_ms,
            runs_ms=local_ms * (1 + margin_ratio),
            reserved_ms=reserved_ms(local_ms, left_ms, margin_ratio),
            give_up_at_s=math.inf if timeout_ms is None else now_s + timeout_ms / 1000,
            hedge_at_s=now_s + hedge_after_ms / 1000,
        )
        begun = self._watched[key].begun
        self.make_room(math.inf if self._closed else 0.0)
        return begun

    def hurry(self, key: str) -> None:
        """The companion has failed this request: begin now, if it has not begun."""
        if (watched := self._watched.pop(key, None)) is not None:
            _begin(watched)

    def forget(self, key: str) -> None:
        """The request is answered; what has begun is the caller's to end."""
        if (watched := self._watched.pop(key, None)) is not None:
            watched.begun.cancel()
            self.make_room()

    def hurry_all(self) -> None:
        """Nothing is heard of the companion: all that waits for it and can be in time begins now, in the order of
        deadlines."""
        self.make_room(math.inf)

    def close(self) -> None:
        """The daemon stops: what waits for the companion, and what comes to wait for it, is finished here at once. A
        reply that comes first is the answer still."""
        self._closed = True
        self.hurry_all()

    def make_room(self, entering_ms: float = 0.0, deadline_at_s: float = math.inf) -> None:
        """The worker's load has changed, or a job of so many ms is about to enter it: every finish that could not start
        in time behind all that begins now, in the order of deadlines. One whose own deadline is later than that of the
        job does not go before it: it is seen once the job has entered."""
        if self._beginning or not (self._watched or self._timer):
            return
        self._beginning = True  # each one that begins enters the worker itself, and is seen by the next round here
        try:
            while due := self._due(entering_ms, deadline_at_s):
                for watched in sorted(due, key=lambda one: one.deadline_at_s):
                    _begin(watched)
        finally:
            self._beginning = False

    def has_room(self, ms: float) -> bool:
        """Whether the worker could take a job of so many ms that nobody waits for, and no finish would begin for it."""
        return self._has_room(ms, None)

    def _has_room(self, ms: float, own: str | None) -> bool:
        """`own`: whose finish that job is."""
        now_s = asyncio.get_running_loop().time()
        free_at_s = now_s + (self._queue_ms() + ms) / 1000
        return all(start_s >= free_at_s for start_s in self._starts(now_s, own).values())

    def _starts(self, now_s: float, own: str | None = None) -> dict[str, float]:
        pending = [(k, w.deadline_at_s, w.reserved_ms) for k, w in self._watched.items() if w.in_time and k != own]
        return latest_starts(now_s, pending)

    def _due(self, entering_ms: float, deadline_at_s: float) -> list[_Watched]:
        """Take out what must begin now; one timer for the rest."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        free_at_s = now_s + self._queue_ms() / 1000
        behind_at_s = free_at_s + entering_ms / 1000
        starts = self._starts(now_s)
        due, next_at_s = [], math.inf
        hedged: str | None = None
        for key in starts:
            watched = self._watched[key]
            could_at_s = behind_at_s if watched.deadline_at_s <= deadline_at_s else free_at_s
            begin_at_s = min(now_s if starts[key] < could_at_s else starts[key], watched.give_up_at_s)
            if begin_at_s <= now_s + EARLY_S:
                due.append(key)
            elif (hedge_at_s := max(watched.hedge_at_s, behind_at_s)) <= now_s + EARLY_S:
                if hedged is None or watched.deadline_at_s < self._watched[hedged].deadline_at_s:
                    hedged = key
                next_at_s = min(next_at_s, begin_at_s)
            else:
                next_at_s = min(next_at_s, begin_at_s, hedge_at_s)
        if hedged is not None and not due and self._has_room(self._watched[hedged].runs_ms, hedged):
            due.append(hedged)
        if self._timer is not None:
            self._timer.cancel()
        wanted = next_at_s < math.inf and not due
        self._timer = loop.call_at(next_at_s, self.make_room) if wanted else None
        return [self._watched.pop(key) for key in due]


def _begin(watched: _Watched) -> None:
    if watched.begun.done():  # nobody waits any more
        return
    try:
        watched.begun.set_result(watched.begin())
    except Exception as error:  # the worker's refusal, or a bug of ours: it costs this request and none beside it
        watched.begun.set_exception(error)
