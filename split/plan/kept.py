"""Whether the bound of fidelity is kept by what is really answered: the mean over spot checks against the bound. Pure.

The bound holds for the mean over requests, and only some of them are looked at, one after the other, without end: a
test that is right at any one time is wrong at some time. So it is bet against the bound (Waudby-Smith & Ramdas 2023,
"Estimating means of bounded random variables by betting"): a stake that is multiplied by 1 + λ·(x − 1), x the distance
as a share of the bound, λ in (0, 1), is expected not to grow while the mean of x is at most 1, whatever else x is like:
it is never negative, and that is all that is asked of it. By Ville's inequality stakes of 1 in all reach 1 / α with
probability α at most, ever.

A share of the stakes is kept back for each later check, 1 / (n·(n + 1)) for the nth (together they are 1): what was
lost while all was well is not missing when inputs change.
"""

from __future__ import annotations

import math
from typing import Final

SEEN_MIN: Final = 8
"""Before so many nothing is judged: a few may be the same input."""
KEPT: Final = 200.0
"""An exponential window as long for the mean that is shown: inputs change."""
STAKES: Final = (0.05, 0.2, 0.5)
"""λ, a third of the stakes each: small ones find a mean a little over the bound and stand heavy tails, great ones find
what is far over it at once. Twice the bound takes some 30 checks (exponential, log-normal with σ = 1)."""
ALPHA: Final = 0.01
"""How likely a codec that keeps the bound is ever taken for one that does not: of one model, at most."""
RATIO_MAX: Final = 100.0
"""An answer farther off, or not finite, counts as this far: one alone breaks nothing."""


class Kept:
    """Of one codec of one model. Distances are counted as shares of the bound, since requests may ask for closer."""

    __slots__ = ("_stakes", "_weight", "broken", "mean_ratio", "over", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.over = 0
        """Answers farther off than the bound: some are, where the mean is below it."""
        self.mean_ratio = 0.0
        """Mean of distance / bound."""
        self._weight = 0.0
        self._stakes = [0.0] * len(STAKES)
        self.broken = False

    def checked(self, distance: float, bound: float) -> bool:
        """One more answer was compared. True once, when the bound is found to be broken."""
        ratio = distance / bound if bound > 0.0 else (math.inf if distance > 0.0 else 0.0)
        ratio = min(ratio, RATIO_MAX)
        self.seen += 1
        self.over += ratio > 1.0
        self._weight = min(self._weight + 1.0, KEPT)
        self.mean_ratio += (ratio - self.mean_ratio) / self._weight
        if self.broken:
            return False
        fresh = 1.0 / (self.seen * (self.seen + 1))
        self._stakes = [
            (stake + fresh) * (1.0 + share * (ratio - 1.0)) for stake, share in zip(self._stakes, STAKES, strict=True)
        ]
        self.broken = self.seen >= SEEN_MIN and sum(self._stakes) >= len(STAKES) / ALPHA
        return self.broken
