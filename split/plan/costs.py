"""Times of heads and tails that were not measured, from the shape of the model's times and a handful of measured cuts.

For one side (head or tail) with share s of the runtime's node times and a boundary of b bytes:

    ms(s, b) = L(s) + β·b

L is piecewise linear through (s_i, ms_i − β·b_i) of the measured cuts, made monotone by pooling neighbours that are
not (isotonic regression, Ayer et al. 1955), and ends at (1, whole): a side that is everything is the whole. Below the
least measured share it keeps the first cut's distance to whole·s (what a call and its layouts cost), never under zero.
β, what a byte at the boundary costs (copying, changing to the blocked layout and back), is the regression of what
whole·s leaves over on b, drawn to a typical copy as far as few cuts tell little (Bayesian linear regression with a
normal prior; Bishop 2006, §3.3).

Sums alone are up to 30 % off on short heads, since a part pays for its call and the layouts at its ends; that is nearly
constant over a model, so that interpolating it from three cuts leaves a few per cent. The idea of a profile for the
shape and few measurements for the level is nn-Meter's (Zhang et al., MobiSys 2021), on segments instead of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

COPY_MS_PER_BYTE: Final = 1e-7
"""10 GB/s: once through memory."""
COPY_SIGMA: Final = 2e-7
"""ms per byte: some boundaries are copied once, some change their layout on both sides."""
SCATTER: Final = 0.02
"""Of the whole: what a measured segment is off by, repeated on the same machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCut:
    """One cut measured as two sessions."""

    share: float
    """Of the whole's node times, in the head; 0…1."""
    boundary_bytes: int
    head_ms: float
    tail_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTimes:
    """Head and tail of any cut of one model, where no measurement of it is at hand."""

    head: _Side
    tail: _Side

    @staticmethod
    def fit(whole_ms: float, cuts: Sequence[MeasuredCut]) -> CutTimes:
        """`cuts`: in any order, measured beside the whole; none: shares of the whole and a copy of the boundary."""
        return CutTimes(
            head=_fit(whole_ms, [(cut.share, cut.boundary_bytes, cut.head_ms) for cut in cuts]),
            tail=_fit(whole_ms, [(1.0 - cut.share, cut.boundary_bytes, cut.tail_ms) for cut in cuts]),
        )

    def head_ms(self, share: float, boundary_bytes: int) -> float:
        """`share`: of the whole's node times, in the head."""
        return self.head.ms(share, boundary_bytes)

    def tail_ms(self, share: float, boundary_bytes: int) -> float:
        """`share`: of the whole's node times, in the head."""
        return self.tail.ms(1.0 - share, boundary_bytes)


def spread_out(shares: Sequence[float]) -> list[int]:
    """All places in `shares`, in the order in which measuring them tells most: the least and the greatest, then always
    the one farthest from all before it."""
    if not shares:
        return []
    order = list(dict.fromkeys((int(np.argmin(shares)), int(np.argmax(shares)))))
    while len(order) < len(shares):
        rest = [place for place in range(len(shares)) if place not in order]
        order.append(max(rest, key=lambda place: min(abs(shares[place] - shares[taken]) for taken in order)))
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    shares: tuple[float, ...]
    """Growing, from 0 to 1."""
    levels_ms: tuple[float, ...]
    """Never falling."""
    ms_per_byte: float

    def ms(self, share: float, boundary_bytes: int) -> float:
        return float(np.interp(share, self.shares, self.levels_ms)) + self.ms_per_byte * boundary_bytes


def _fit(whole_ms: float, found: Sequence[tuple[float, int, float]]) -> _Side:
    """`found`: (share, boundary bytes, ms)."""
    per_byte = _ms_per_byte(whole_ms, found)
    levels: dict[float, list[float]] = {}
    for share, nbytes, ms in found:
        if share < 1.0:
            levels.setdefault(share, []).append(min(max(ms - per_byte * nbytes, 0.0), whole_ms))
    points = [(share, sum(several) / len(several)) for share, several in sorted(levels.items())]
    points.append((1.0, whole_ms))
    share, level = points[0]
    if share > 0.0:
        points.insert(0, (0.0, max(level - whole_ms * share, 0.0)))
    return _Side(
        shares=tuple(share for share, _ in points),
        levels_ms=tuple(_monotone([level for _, level in points])),
        ms_per_byte=per_byte,
    )


def _ms_per_byte(whole_ms: float, found: Sequence[tuple[float, int, float]]) -> float:
    if len(found) < 2 or whole_ms <= 0.0:
        return COPY_MS_PER_BYTE
    nbytes = np.array([nbytes for _, nbytes, _ in found], dtype=np.float64)
    left_over = np.array([ms - whole_ms * share for share, _, ms in found])
    nbytes -= nbytes.mean()
    prior = (SCATTER * whole_ms / COPY_SIGMA) ** 2
    slope = (nbytes @ left_over + prior * COPY_MS_PER_BYTE) / (nbytes @ nbytes + prior)
    return max(float(slope), 0.0)


def _monotone(levels: Sequence[float]) -> list[float]:
    """The nearest sequence (least squares) that never falls: neighbours that fall become their mean."""
    pools: list[tuple[float, int]] = []
    for level in levels:
        pools.append((level, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (above, many), (below, few) = pools[-2:]
            pools[-2:] = [((above * many + below * few) / (many + few), many + few)]
    made = [level for level, count in pools for _ in range(count)]
    assert all(a <= b for a, b in pairwise(made)), made
    return made
