"""How well requests were predicted, stage by stage: the sums behind `isthmus_prediction_*`. Pure.

Only what ran as it was chosen tells: after a fallback other stages ran than those that were predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from split.plan.plan import PlanEstimate

EDGES: Final = (0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2.0)
"""Upper edges of measured / predicted, close around 1."""
LEAST_MS: Final = 0.1
"""Of a stage that is predicted and measured: below it is the clock's business."""


@dataclass(slots=True)
class Ratios:
    """measured / predicted of one stage."""

    count: int = 0
    sum: float = 0.0
    error_sum: float = 0.0
    """Of |measured − predicted| / measured: over `count` it is the MAPE."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))

    def add(self, measured_ms: float, predicted_ms: float) -> None:
        """Both at least `LEAST_MS`."""
        ratio = measured_ms / predicted_ms
        self.count += 1
        self.sum += ratio
        self.error_sum += abs(measured_ms - predicted_ms) / measured_ms
        self.buckets[bisect_left(EDGES, ratio)] += 1

    def edges(self) -> Iterator[tuple[float | None, int]]:
        """Upper edge, None for the last, and how many lie below it."""
        yield from zip((*EDGES, None), accumulate(self.buckets), strict=True)


def compared(
    measured_ms: Mapping[str, float], total_ms: float, chosen: PlanEstimate
) -> Iterator[tuple[str, float, float]]:
    """(stage, measured, predicted) where both say enough; `total` is all of the request.

    What is measured as `whole` is predicted as the head of local; what the link takes both ways is measured as one, of
    a request in several parts for the first of them only, which nothing was predicted of.
    """
    predicted_ms = chosen.stages_ms
    yield from _enough("total", total_ms, chosen.predicted_ms)
    for stage, ms in measured_ms.items():
        match stage:
            case "whole":
                told_ms = predicted_ms.get("head", 0.0)
            case "network" if chosen.parts > 1:
                continue
            case "network":
                told_ms = predicted_ms.get("up", 0.0) + predicted_ms.get("down", 0.0)
            case _:
                told_ms = predicted_ms.get(stage, 0.0)
        yield from _enough(stage, ms, told_ms)


def _enough(stage: str, measured_ms: float, predicted_ms: float) -> Iterator[tuple[str, float, float]]:
    if measured_ms >= LEAST_MS and predicted_ms >= LEAST_MS:
        yield stage, measured_ms, predicted_ms
