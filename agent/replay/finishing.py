"""Which local finishes begin now: the rule of `agent/lateness.py`, of which this is the simulated twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from agent.replay.flight import Flight
from agent.replay.world import Fate
from split.plan.slack import MARGIN_RATIO, latest_starts

EARLY_S: Final = 1e-6
"""What is due so soon is due."""


def due_finishes(
    watched: Sequence[Flight], *, now_s: float, free_at_s: float, behind_at_s: float, deadline_at_s: float
) -> tuple[list[tuple[Flight, Fate]], float]:
    """Those that could not start in time any more, earliest deadline first; without such, the one that may begin early
    where the worker is free and no other is late by it; and when the next is due, where none is.

    `free_at_s`: when the worker is through with what it has; `behind_at_s`: with a job, too, that is about to enter
    with this deadline, which goes before those with a later one.
    """
    starts = latest_starts(now_s, [(one.number, one.deadline_at_s, one.reserved_ms) for one in watched])
    due: list[Flight] = []
    hedged: list[Flight] = []
    next_at_s = math.inf
    for one in watched:
        could_at_s = behind_at_s if one.deadline_at_s <= deadline_at_s else free_at_s
        start_at_s, hedge_at_s = starts[one.number], max(one.hedge_at_s, behind_at_s)
        if start_at_s < could_at_s or start_at_s <= now_s + EARLY_S:
            due.append(one)
        elif hedge_at_s <= now_s + EARLY_S:
            hedged.append(one)
            next_at_s = min(next_at_s, start_at_s)
        else:
            next_at_s = min(next_at_s, start_at_s, hedge_at_s)
    if due:
        return [(one, Fate.LATE) for one in sorted(due, key=lambda one: one.deadline_at_s)], next_at_s
    first = min(hedged, key=lambda one: one.deadline_at_s, default=None)
    if first is None or not _has_room(watched, first, now_s, free_at_s):
        return [], next_at_s
    return [(first, Fate.HEDGED)], next_at_s


def _has_room(watched: Sequence[Flight], own: Flight, now_s: float, free_at_s: float) -> bool:
    """Whether the others could still start in time behind a finish that need not begin yet."""
    through_s = free_at_s + own.expected_finish_ms * (1 + MARGIN_RATIO) / 1000.0
    others = [(one.number, one.deadline_at_s, one.reserved_ms) for one in watched if one is not own]
    return all(start_at_s >= through_s for start_at_s in latest_starts(now_s, others).values())
