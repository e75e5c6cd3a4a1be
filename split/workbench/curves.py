"""Rate against fidelity, measured: a codec's settings tried on held-out requests, more of them near the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from split.codec.calibration import Curve
from split.codec.fidelity import MEASURES, farthest
from split.profiles.measured import Point
from split.tensor import Tensors

COARSER: Final = 4.0
FINER: Final = 1 / 8
"""A curve reaches from four times the contract's bound to an eighth: a request may ask for closer, and a contract may
be changed."""
STRIDE: Final = 4
"""Levels between two points far from the bound: half an octave of the step, a third of the bytes."""
WORTH: Final = 0.01
"""Bytes that half an octave must save for a curve to go on."""

Evaluate = Callable[[int], Point]


def point(
    level: int, sizes: Sequence[int], outputs: Sequence[Tensors], expected: Sequence[Tensors], items: Sequence[int] = ()
) -> Point:
    """What one level did to these requests: `sizes` of their payloads in bytes, the model's `outputs` from them and
    those `expected` of the unsplit run, `items` in each (none given: one). Each measure is the worst output's, then
    the mean over items, then over requests."""
    fidelity = {}
    for measure in MEASURES:
        worst = [
            farthest(measure, found, wanted, count)
            for found, wanted, count in zip(outputs, expected, items or [1] * len(outputs), strict=True)
        ]
        mean = math.fsum(worst) / len(worst)
        if math.isfinite(mean):
            fidelity[measure] = mean
    return Point(
        level=level,
        mean_bytes=float(np.mean(sizes)),
        p95_bytes=float(np.percentile(sizes, 95)),
        fidelity=fidelity,
    )


def trace(
    evaluate: Evaluate,
    *,
    start: int,
    coarsest: int,
    finest: int,
    measure: str,
    bound: float,
    bytes_max: float = math.inf,
) -> list[Point]:
    """Points from `COARSER` × `bound` to `FINER` × `bound` of `measure`, as far as levels between `coarsest` and
    `finest` (either may be the greater number) reach, in no order: `STRIDE` apart, two apart within a quarter to
    twice the bound, and all between the two that have the bound between them. Not beyond `bytes_max`."""
    towards_finer = 1 if finest > coarsest else -1
    span = abs(finest - coarsest)
    found: dict[int, Point] = {}

    def at(place: int) -> Point:
        """`place`: 0 (coarsest) … span."""
        if place not in found:
            found[place] = evaluate(coarsest + towards_finer * place)
        return found[place]

    def off(place: int) -> float:
        return at(place).fidelity.get(measure, math.inf)

    place = min(max(abs(start - coarsest), 0), span)
    while off(place) < COARSER * bound and place > 0:
        coarser = max(place - STRIDE, 0)
        if at(coarser).mean_bytes > (1 - WORTH) * at(place).mean_bytes:  # nothing is left to be saved
            break
        place = coarser
    while place < span and off(place) > FINER * bound and at(place).mean_bytes < bytes_max:
        place = min(place + STRIDE, span)
    for gap in (2, 1):
        for low, high in pairwise(sorted(found)):
            coarse, fine = off(low), off(high)
            near = fine < 2 * bound and coarse > bound / 4 if gap == 2 else fine <= bound < coarse
            if near and high - low > gap:
                for between in range(low + gap, high, gap):
                    at(between)
    return list(found.values())


def curve(points: Iterable[Point], inputs: int) -> Curve:
    """Of these points, measured on `inputs` requests, without those that cost no less than another one and are nowhere
    better."""
    kept: list[Point] = []
    for one in sorted(points, key=lambda one: (one.mean_bytes, one.level)):
        if not any(_as_good(other, one) for other in kept):
            kept.append(one)
    return Curve(points=tuple(kept), inputs=inputs)


def _as_good(one: Point, other: Point) -> bool:
    """Whether `one` is at least as good as `other` by each measure."""
    return all(one.fidelity.get(measure, math.inf) <= value for measure, value in other.fidelity.items())
