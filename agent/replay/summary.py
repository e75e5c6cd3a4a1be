"""Outcomes of one policy in figures, against those of an oracle in the same world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.replay.world import Outcome

WITHIN: Final = 1.10
IN_A_ROW: Final = 3
"""One request within 10 % of the best after a step may be luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Per request where nothing else is said."""

    requests: int
    mean_ms: float
    regret: float
    """Mean latency over the oracle's; 1 is as good, less is better than a greedy one."""
    p95_ms: float
    missed: int
    """Of all."""
    bytes: float
    joules: float
    money: float
    switches: int
    """How often in all a model's plan was another one than for its request before."""

    @staticmethod
    def of(outcomes: Sequence[Outcome], best: Sequence[Outcome]) -> Summary:
        """`best`: the oracle's, in the same order."""
        assert len(outcomes) == len(best), (len(outcomes), len(best))
        total_ms = np.array([outcome.total_ms for outcome in outcomes])
        return Summary(
            requests=len(outcomes),
            mean_ms=float(total_ms.mean()),
            regret=float(total_ms.mean() / np.mean([outcome.total_ms for outcome in best])),
            p95_ms=float(np.quantile(total_ms, 0.95)),
            missed=sum(outcome.missed for outcome in outcomes),
            bytes=float(np.mean([outcome.bytes for outcome in outcomes])),
            joules=float(np.mean([outcome.joules for outcome in outcomes])),
            money=float(np.mean([outcome.money for outcome in outcomes])),
            switches=switches(outcomes),
        )


def switches(outcomes: Sequence[Outcome]) -> int:
    last: dict[str, object] = {}
    count = 0
    for outcome in outcomes:
        model = outcome.arrival.model
        count += last.get(model, outcome.plan) != outcome.plan
        last[model] = outcome.plan
    return count


def requests_to_recover(outcomes: Sequence[Outcome], best: Sequence[Outcome], step_s: float) -> int:
    """How many of the requests that come after a step of the trace are over before the first of three in a row within
    10 % of the oracle's; all of them where there is none."""
    after = [(one, other) for one, other in zip(outcomes, best, strict=True) if one.arrival.at_s >= step_s]
    row = 0
    for number, (one, other) in enumerate(after):
        row = row + 1 if one.total_ms <= WITHIN * other.total_ms else 0
        if row == IN_A_ROW:
            return number + 1 - IN_A_ROW
    return len(after)
