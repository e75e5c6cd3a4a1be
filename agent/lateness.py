"""When a request that waits for the companion must be finished here, so that every one of them meets its deadline.

Keeps one timer per waiting request; whenever a request comes or goes, `split.plan.slack.latest_starts` says anew by
when each local finish must start, given that they share one worker. Not a judgement on the companion: only a clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from split.plan.slack import latest_starts

MARGIN_MS = 8.0
"""Between the planned end of a local finish and the deadline: queue hop, encoding of the reply, timer slack. D ≥ local
time + 20 ms is what must hold (I3), so the margin has to stay well below 20."""
MARGIN_RATIO = 0.05
"""Of the local finish: one run varies by a few percent."""
SLACK_RATIO = 0.05
"""Of the time that is there beyond the local finish: who can wait a second loses nothing by giving up 50 ms earlier,
and a busy machine then still meets the deadline."""


@dataclass(slots=True, kw_only=True)
class _Watched:
    future: asyncio.Future[None]
    deadline_at_s: float
    local_ms: float
    give_up_at_s: float
    timer: asyncio.TimerHandle | None = None


class Lateness:
    """`watch` gives a future that is done when it is time to start the local finish."""

    def __init__(self, *, queue_ms: Callable[[], float]) -> None:
        self._queue_ms = queue_ms
        self._watched: dict[str, _Watched] = {}

    def watch(
        self, key: str, *, deadline_at_s: float, local_ms: float, timeout_ms: float | None
    ) -> asyncio.Future[None]:
        """`local_ms`: what the device would need; `timeout_ms`: bound on the wait inside the deadline (None: none)."""
        loop = asyncio.get_running_loop()
        slack_ms = max((deadline_at_s - loop.time()) * 1000 - local_ms, 0.0)
        watched = _Watched(
            future=loop.create_future(),
            deadline_at_s=deadline_at_s,
            local_ms=local_ms * (1 + MARGIN_RATIO) + MARGIN_MS + slack_ms * SLACK_RATIO,
            give_up_at_s=math.inf if timeout_ms is None else loop.time() + timeout_ms / 1000,
        )
        self._watched[key] = watched
        self._rearm()
        return watched.future

    def forget(self, key: str) -> None:
        """The request is answered, or its local finish has begun."""
        watched = self._watched.pop(key, None)
        if watched is None:
            return
        if watched.timer is not None:
            watched.timer.cancel()
        watched.future.cancel()
        self._rearm()

    def _rearm(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        busy_s = self._queue_ms() / 1000
        starts = latest_starts(now_s, [(k, w.deadline_at_s, w.local_ms) for k, w in self._watched.items()])
        for key, watched in self._watched.items():
            if watched.timer is not None:
                watched.timer.cancel()
            at_s = min(starts[key] - busy_s, watched.give_up_at_s)
            watched.timer = loop.call_at(max(at_s, now_s), _ring, watched.future)


def _ring(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
