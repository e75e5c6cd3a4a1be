"""When the device must start finishing remote requests itself, so that all meet their deadlines on its one worker; and
which of the jobs that wait for the worker goes first.

Earliest deadline first, walked backwards: the last one ends at its deadline, each one before it ends at its own
deadline or when the next must start, whichever comes first (Liu and Layland 1973: no order does better on one machine).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

from split.plan.estimate import Drift

Key = TypeVar("Key", bound=Hashable)

MARGIN_MS: Final = 8.0
"""Between the planned end of a local finish and the deadline: queue hop, encoding of the reply, timer slack. D ≥ local
time + 20 ms is what must hold (I3), so the margin has to stay well below 20."""
MARGIN_RATIO: Final = 0.05
"""Of the local finish: one run varies by a few percent."""
MARGIN_RATIO_MAX: Final = 10.0
"""Of it at most, however far runs scatter."""
SLACK_RATIO: Final = 0.05
"""Of the time that is there beyond the local finish: who can wait a second loses nothing by giving up 50 ms earlier,
and a busy machine then still meets the deadline."""


def margin_ratio(scatter: float, sigmas: float) -> float:
    """Of a local finish whose runs scatter by `scatter` (σ of the logarithm, `Drift.scatter`): what to keep beside it,
    so that the quantile `sigmas` above the median, exp(sigmas · σ) of a log-normal, is in time.

    `MARGIN_RATIO` covers what every run scatters by (`Drift.NOISE`); only what goes beyond, in quadrature, is added."""
    beyond = math.sqrt(max(scatter * scatter - Drift.NOISE * Drift.NOISE, 0.0))
    return min(MARGIN_RATIO + math.expm1(min(sigmas * beyond, MARGIN_RATIO_MAX)), MARGIN_RATIO_MAX)


def reserved_ms(local_ms: float, left_ms: float, ratio: float = MARGIN_RATIO) -> float:
    """How long before its deadline, `left_ms` away, a finish that takes `local_ms` is to start: with its margins.
    `ratio`: of the finish, as `margin_ratio`."""
    return local_ms * (1 + ratio) + MARGIN_MS + max(left_ms - local_ms, 0.0) * SLACK_RATIO


def latest_starts(now_s: float, pending: Sequence[tuple[Key, float, float]]) -> dict[Key, float]:
    """Latest start of each pending local finish, in monotonic seconds, never before `now_s`.

    `pending`: (key, deadline_at_s, local_ms) of every remote request that still waits. Where not all can be met, the
    starts that lie in the past come out as `now_s`: begin at once, in the order of deadlines.
    """
    starts: dict[Key, float] = {}
    free_until_s = float("inf")
    for key, deadline_at_s, local_ms in sorted(pending, key=lambda item: item[1], reverse=True):
        free_until_s = min(deadline_at_s, free_until_s) - local_ms / 1000.0
        starts[key] = max(free_until_s, now_s)
    return starts


def first_to_run(now_s: float, waiting: Sequence[tuple[float, float, int]]) -> int:
    """Index of the job that a free worker takes: the earliest deadline, unless one of a better rank can go before it.

    `waiting`: (deadline_at_s, expected_ms, rank) in the order of deadlines, at least one; a smaller rank is better.
    The best rank goes first (of equals the earliest deadline) where every job that it passes still meets its deadline,
    margins in, or would have missed it anyway.
    """
    ranks = [rank for _, _, rank in waiting]
    best = ranks.index(min(ranks))
    passing_s = waiting[best][1] / 1000.0
    end_s = now_s
    for deadline_at_s, expected_ms, _ in waiting[:best]:
        end_s += expected_ms * (1 + MARGIN_RATIO) / 1000.0
        left_s = deadline_at_s - MARGIN_MS / 1000.0 - end_s
        if 0.0 <= left_s < passing_s:
            return 0
    return best
