"""Whether the bound of fidelity is kept by what is really answered: the mean over spot checks against the bound. Pure.

The bound holds for the mean over requests, and only some of them are looked at: a codec is taken from a model when even
the lower end of what the mean may be (one-sided normal interval) is above the bound, so that chance does not do it.
"""

from __future__ import annotations

import math
from typing import Final

SEEN_MIN: Final = 8
"""Before so many nothing is judged: distances are skewed, and of a few the interval is no interval."""
KEPT: Final = 200.0
"""An exponential window as long: inputs change."""
SIGMAS: Final = 2.33
"""One-sided 99 % of a normal distribution."""
RATIO_MAX: Final = 1e6
"""An answer that is not finite counts as this far: sums stay numbers."""


class Kept:
    """Of one codec of one model. Distances are counted as shares of the bound, since requests may ask for closer."""

    __slots__ = ("_square", "_weight", "broken", "mean_ratio", "over", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.over = 0
        """Answers farther off than the bound: some are, where the mean is below it."""
        self.mean_ratio = 0.0
        """Mean of distance / bound."""
        self._square = self._weight = 0.0
        self.broken = False

    def checked(self, distance: float, bound: float) -> bool:
        """One more answer was compared. True once, when the bound is found to be broken."""
        ratio = distance / bound if bound > 0.0 else (math.inf if distance > 0.0 else 0.0)
        ratio = min(ratio, RATIO_MAX)
        self.seen += 1
        self.over += ratio > 1.0
        self._weight = min(self._weight + 1.0, KEPT)
        share = 1.0 / self._weight
        self.mean_ratio += share * (ratio - self.mean_ratio)
        self._square += share * (ratio * ratio - self._square)
        if self.broken or self.seen < SEEN_MIN or self.least_ratio <= 1.0:
            return False
        self.broken = True
        return True

    @property
    def least_ratio(self) -> float:
        """Lower end of what `mean_ratio` may be."""
        variance = max(self._square - self.mean_ratio * self.mean_ratio, 0.0)
        return self.mean_ratio - SIGMAS * math.sqrt(variance / max(self._weight - 1.0, 1.0))
