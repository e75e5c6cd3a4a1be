"""Rate against fidelity, measured: a codec's settings tried on held-out requests, more of them near the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from split.codec.boxes import count_detections
from split.codec.calibration import Curve
from split.codec.fidelity import farthest, measures_under
from split.profiles.boxes import Boxes
from split.profiles.contract import Fidelity
from split.profiles.measured import Point
from split.tensor import Tensors
from split.workbench.upper_mean import upper_mean, upper_share

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
    level: int,
    sizes: Sequence[int],
    outputs: Sequence[Tensors],
    expected: Sequence[Tensors],
    *,
    sources: Sequence[int],
    items: Sequence[int] = (),
    contract: Fidelity | None = None,
) -> Point:
    """What one level did to these requests, each of one of `sources`: `sizes` of their payloads in bytes, the model's
    `outputs` from them and those `expected` of the unsplit run, `items` in each (none given: one). Each measure is the
    worst output's, then the mean over items, over a source's requests, and over sources, with what that is at most.
    `contract`: names a measure beside the usual ones, maybe."""
    fidelity, high = {}, {}
    for name, measure in measures_under(contract).items():
        worst = [
            farthest(measure, found, wanted, count)
            for found, wanted, count in zip(outputs, expected, items or [1] * len(outputs), strict=True)
        ]
        if not all(map(math.isfinite, worst)):
            continue
        means = _by_source(sources, worst)
        fidelity[name] = math.fsum(means) / len(means)
        if isinstance(measure, Boxes):
            seen = _by_source(sources, [count_detections(measure, wanted) for wanted in expected])
            limit = _limit_of_detections(means, seen)
        else:
            limit = _limit(measure, means)
        if math.isfinite(limit):
            high[name] = limit
    return Point(
        level=level,
        mean_bytes=float(np.mean(sizes)),
        p95_bytes=float(np.percentile(sizes, 95)),
        fidelity=fidelity,
        fidelity_high=high,
    )


def _limit(measure: str, means: Sequence[float]) -> float:
    """What the mean over sources is at most; right and wrong answers, one a source, are counted."""
    if measure == "top1" and all(mean in (0.0, 1.0) for mean in means):
        return upper_share(round(math.fsum(means)), len(means))
    return upper_mean(means)


def _limit_of_detections(means: Sequence[float], seen: Sequence[float]) -> float:
    """The same of measure boxes, with how many detections each source has: no less than what is left open where none
    of so many was another; inf, which allows nothing, where there was none."""
    count = math.floor(math.fsum(seen))
    return min(max(upper_mean(means), upper_share(0, count)), 1.0) if count and len(means) > 1 else math.inf


def _by_source(sources: Sequence[int], values: Sequence[float]) -> list[float]:
    """The mean of each source's."""
    of_source: dict[int, list[float]] = {}
    for source, value in zip(sources, values, strict=True):
        of_source.setdefault(source, []).append(value)
    return [math.fsum(found) / len(found) for found in of_source.values()]


def trace(
    evaluate: Evaluate,
    *,
    start: int,
    coarsest: int,
    finest: int,
    measure: str,
    bound: float,
    bytes_max: float = math.inf,
    has_time: Callable[[], bool] = lambda: True,
) -> list[Point]:
    """Points from `COARSER` × `bound` to `FINER` × `bound` of `measure`, as far as levels between `coarsest` and
    `finest` (either may be the greater number) reach, in no order: `STRIDE` apart, two apart within a quarter to
    twice the bound, and all between the two that have the bound between them. Not beyond `bytes_max`,
    and one at least, but no more without `has_time`.

    What is compared is what the mean is at most, and no level is believed to do better than a finer one was seen to:
    which errors a step makes on these requests is chance, and the luckiest of many levels would be the cheapest."""
    towards_finer = 1 if finest > coarsest else -1
    span = abs(finest - coarsest)
    found: dict[int, Point] = {}

    def at(place: int) -> Point:
        """`place`: 0 (coarsest) … span."""
        if place not in found:
            found[place] = evaluate(coarsest + towards_finer * place)
        return found[place]

    def off(place: int) -> float:
        at(place)
        return max(one.fidelity_high.get(measure, math.inf) for there, one in found.items() if there >= place)

    place = min(max(abs(start - coarsest), 0), span)
    while off(place) < COARSER * bound and place > 0 and has_time():
        coarser = max(place - STRIDE, 0)
        if at(coarser).mean_bytes > (1 - WORTH) * at(place).mean_bytes:  # nothing is left to be saved
            break
        place = coarser
    perfect = 0  # shares may be 0 by luck, not twice running; what so few inputs leave open is no less at a finer level
    while place < span and has_time() and off(place) > FINER * bound and at(place).mean_bytes < bytes_max:
        perfect = perfect + 1 if at(place).fidelity.get(measure) == 0.0 else 0
        if perfect == 2:
            break
        place = min(place + STRIDE, span)
    for gap in (2, 1):
        for low, high in pairwise(sorted(found)):
            coarse, fine = off(low), off(high)
            near = fine < 2 * bound and coarse > bound / 4 if gap == 2 else fine <= bound < coarse
            if near and high - low > gap:
                for between in range(low + gap, high, gap):
                    if has_time():
                        at(between)
    return _humble([one for _, one in sorted(found.items())])


def _humble(coarse_to_fine: Sequence[Point]) -> list[Point]:
    """The same, each with what its mean is at most raised to that of every finer one."""
    kept: list[Point] = []
    high = dict.fromkeys((name for one in coarse_to_fine for name in one.fidelity_high), 0.0)
    for one in reversed(coarse_to_fine):
        high = {name: max(value, one.fidelity_high.get(name, math.inf)) for name, value in high.items()}
        finite = {name: value for name, value in high.items() if math.isfinite(value)}
        kept.append(msgspec.structs.replace(one, fidelity_high=finite))
    return kept


def curve(points: Iterable[Point], inputs: int) -> Curve:
    """Of these points, measured on `inputs` requests, without those that cost no less than another one and are nowhere
    better."""
    kept: list[Point] = []
    for one in sorted(points, key=lambda one: (one.mean_bytes, one.level)):
        if not any(_as_good(other, one) for other in kept):
            kept.append(one)
    return Curve(points=tuple(kept), inputs=inputs)


def _as_good(one: Point, other: Point) -> bool:
    """Whether `one` is at least as good as `other` by each measure, in the mean."""
    return all(one.fidelity.get(measure, math.inf) <= value for measure, value in other.fidelity.items())
