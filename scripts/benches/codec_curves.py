"""Bytes at equal fidelity out of what was measured, and how sure they are: arithmetic alone.

A codec is run at several settings on the same inputs, so that each setting has a mean of bytes and a mean of a measure
(0: as the unsplit model, higher: farther off). Between two settings log(bytes) is a straight line over log(measure):
at usual rates the divergence falls by a fixed factor for each further bit of every coefficient. Beyond the settings
that were measured nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ROUNDS: Final = 1000
"""Resamples of a bootstrap: the ends of a 90 % interval are then good to a percentile or two (Efron & Tibshirani 1993,
§13.3)."""
SHARE: Final = 0.90


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurements:
    """One codec on one set of inputs, which come from fewer sources (several crops of one photograph)."""

    settings: tuple[str, ...]
    bytes: Floats
    """[setting, input]"""
    fidelity: Floats
    """[setting, input]; inf where the outputs were not finite."""
    sources: Ints
    """[input]: which source each is of."""

    def __post_init__(self) -> None:
        assert self.bytes.shape == self.fidelity.shape == (len(self.settings), len(self.sources)), self.settings

    def curve(self) -> Curve:
        return Curve.of(self.bytes.mean(axis=1), self.fidelity.mean(axis=1))

    def curves_resampled(self, seed: int, rounds: int = ROUNDS) -> list[Curve]:
        """What it would be for other sources like these: as many drawn with replacement, so often, each with all of its
        inputs. The same `seed` draws the same sources for every codec, so that ratios are of pairs."""
        which = np.unique(self.sources)
        belongs = (self.sources[:, None] == which[None, :]).astype(np.float64)
        bytes_of, off_of, inputs_of = self.bytes @ belongs, self.fidelity @ belongs, belongs.sum(axis=0)
        drawn = np.random.default_rng(seed).integers(len(which), size=(rounds, len(which)))
        return [
            Curve.of(bytes_of[:, some].sum(axis=1) / n, off_of[:, some].sum(axis=1) / n)
            for some in drawn
            for n in (inputs_of[some].sum(),)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Mean bytes and mean measure of those settings that no other one beats in both, cheapest first."""

    bytes: tuple[float, ...]
    fidelity: tuple[float, ...]
    """Descending."""

    @staticmethod
    def of(mean_bytes: Floats, mean_fidelity: Floats) -> Curve:
        kept: list[tuple[float, float]] = []
        for size, off in sorted(zip(mean_bytes.tolist(), mean_fidelity.tolist(), strict=True)):
            if math.isfinite(off) and (not kept or off < kept[-1][1]):
                kept.append((size, off))
        return Curve(bytes=tuple(size for size, _ in kept), fidelity=tuple(off for _, off in kept))

    def bytes_at(self, target: float) -> float:
        """Bytes where the measure is `target`; inf where no setting comes as close; the cheapest setting's where even
        that is closer (an upper bound: see `is_bound`)."""
        reached = next((at for at, off in enumerate(self.fidelity) if off <= target), None)
        if reached is None:
            return math.inf
        if reached == 0 or self.fidelity[reached] == target:
            return self.bytes[reached]
        above, below = self.fidelity[reached - 1], max(self.fidelity[reached], np.finfo(float).tiny)
        share = (math.log(above) - math.log(target)) / (math.log(above) - math.log(below))
        first, second = math.log(self.bytes[reached - 1]), math.log(self.bytes[reached])
        return math.exp(first + share * (second - first))

    def is_bound(self, target: float) -> bool:
        """Whether its cheapest setting is closer than `target` already, so that less would have done."""
        return bool(self.fidelity) and self.fidelity[0] < target


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, and the interval of `SHARE` that other sources would give."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g}–{self.high:.4g})"


def bytes_at(measured: Measurements, target: float, *, seed: int = 0, rounds: int = ROUNDS) -> Estimate:
    """Bytes at this mean of the measure."""
    found = [curve.bytes_at(target) for curve in measured.curves_resampled(seed, rounds)]
    return _estimate(measured.curve().bytes_at(target), found)


def ratio_at(
    rival: Measurements, ours: Measurements, target: float, *, seed: int = 0, rounds: int = ROUNDS
) -> Estimate:
    """The rival's bytes / ours where both have this mean of the measure, on the same inputs."""
    assert np.array_equal(rival.sources, ours.sources), "codecs are compared on the same inputs"
    pairs = zip(rival.curves_resampled(seed, rounds), ours.curves_resampled(seed, rounds), strict=True)
    return _estimate(
        _ratio(rival.curve(), ours.curve(), target), [_ratio(theirs, own, target) for theirs, own in pairs]
    )


def cheapest(measured: Mapping[str, Measurements], target: float) -> tuple[str, float]:
    """Which of them takes fewest bytes at this mean of the measure, and how many; ("", inf) where none comes close."""
    sizes = {name: one.curve().bytes_at(target) for name, one in measured.items()}
    name = min(sizes, key=lambda one: sizes[one], default="")
    return (name, sizes[name]) if name and math.isfinite(sizes[name]) else ("", math.inf)


def _ratio(theirs: Curve, ours: Curve, target: float) -> float:
    """inf where only the rival does not come as close, nan where neither does."""
    above, below = theirs.bytes_at(target), ours.bytes_at(target)
    return above / below if math.isfinite(below) else math.nan if math.isinf(above) else 0.0


def _estimate(value: float, resampled: Sequence[float]) -> Estimate:
    found = sorted(one for one in resampled if not math.isnan(one))
    if not found:
        return Estimate(value=value, low=math.nan, high=math.nan)
    tail = (1 - SHARE) / 2
    return Estimate(
        value=value,
        low=found[int(tail * (len(found) - 1))],
        high=found[math.ceil((1 - tail) * (len(found) - 1))],
    )
