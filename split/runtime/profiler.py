"""Measuring how long things take on a machine that does other things too: quartiles, interleaved, bounded in time.

Names and callables in, milliseconds out. What to measure is the workbench's business (`split/workbench/profile.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from split.runtime.engine import Segment
from split.tensor import Array

ROUNDS_MIN: Final = 3
ROUNDS_MAX: Final = 25
"""A quartile of 25 has a standard error of a quarter of the spread: more rounds only cost time."""

QUICK_S: Final = 0.1
"""From here on, filling the caches anew (tens of MB, a few ms) is lost in the run itself."""


def measure(segment: Segment, feeds: Mapping[str, Array], *, budget_s: float = 1.0) -> float:
    """Milliseconds of one run of `segment` on `feeds`, warm."""
    return measure_interleaved({"": lambda: segment.run(feeds)}, budget_s)[""]


def measure_interleaved(work: Mapping[str, Callable[[], Any]], budget_s: float) -> dict[str, float]:
    """Milliseconds of each callable, measured in turns so that a slow moment of the machine hits all alike: of its runs
    the lower quartile.

    Not the median: others on the machine only make a run longer, and a long one more often than a short one, which fits
    between two of their turns. Where they are busy half of the time, the median of a whole model is a disturbed run and
    that of a short head is not, so that the head would seem a third of what it is beside its whole.

    What is quick runs twice in a turn and the second run counts: the first one brings its data back into the caches, as
    in a stream of requests. Every other round goes backwards. After `ROUNDS_MIN` rounds the budget (seconds, all
    callables together, without their first calls) ends the measurement, after one round when it is overdrawn fivefold.
    """
    names = list(work)
    taken: dict[str, list[float]] = {name: [] for name in names}
    quick = {name for name in names if _seconds(work[name]) < QUICK_S}
    end_at_s = time.perf_counter() + budget_s
    overdrawn_at_s = end_at_s + 4 * budget_s
    for number in range(ROUNDS_MAX):
        now_s = time.perf_counter()
        if (number >= ROUNDS_MIN and now_s >= end_at_s) or (number >= 1 and now_s >= overdrawn_at_s):
            break
        for name in reversed(names) if number % 2 else names:
            if name in quick:
                work[name]()
            taken[name].append(_seconds(work[name]) * 1e3)
    return {name: sorted(times)[(len(times) - 1) // 4] for name, times in taken.items()}


def _seconds(call: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
