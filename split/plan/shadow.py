"""`fallback.strategy: shadow`: whether a companion's answers agree with the device's own, and how many are compared.

Only counts and times; `agent/shadowing.py` runs and compares. Judged is the upper end of what the share of agreeing
answers may be, seen what was seen (Wilson 1927, J. Am. Stat. Assoc. 22): a model is taken from the companion when even
that is below `agreement_min`, so that chance does not do it. That holds for this companion, by the name in its
certificate, however often it connects, until the model is loaded anew (another file, contract or calibration): while
the device alone answers, nothing is left that could be compared.
"""

from __future__ import annotations

import math
from typing import Final

FADE: Final = 0.99
"""Per comparison: the last hundred count."""
SIGMAS: Final = 2.33
"""One-sided 99 % of a normal distribution; near a share of 1, where the binomial one is skewed, some 95 %."""
RUNS_MIN: Final = 5
"""Before so many nothing is judged."""
SURE_RUNS: Final = 20
"""So many agreeing ones in a row, and fewer are compared."""
BUSY_SHARE: Final = 0.2
BUSY_SHARE_SURE: Final = 0.05
"""Of the worker's time, what comparing may take: heat and energy, and a request that comes meanwhile waits for it."""


class Agreement:
    """Of one model with the companion there is."""

    __slots__ = ("_agreed", "_counted", "_in_a_row", "_min", "_next_at_s", "_runs", "failed")

    def __init__(self, agreement_min: float) -> None:
        self._min = agreement_min
        self._runs = self._agreed = self._next_at_s = 0.0
        self._counted = self._in_a_row = 0
        self.failed = ""
        """Why the device alone answers now; "" while it does not."""

    @property
    def share(self) -> float:
        """Of the last hundred comparisons, those that agreed; 1 before the first."""
        return self._agreed / self._runs if self._runs else 1.0

    def due(self, now_s: float) -> bool:
        """Whether the worker's time allows another comparison."""
        return now_s >= self._next_at_s

    def begun(self, expected_ms: float, now_s: float) -> None:
        """A comparison takes so long from now on."""
        share = BUSY_SHARE_SURE if self._in_a_row >= SURE_RUNS else BUSY_SHARE
        self._next_at_s = now_s + expected_ms / 1000.0 / share

    def compared(self, why_not: str) -> bool:
        """One more; `why_not`: "" where both agreed, else a sentence. True once, when `failed` has become one: it never
        does by an answer that agrees."""
        self._runs = self._runs * FADE + 1.0
        self._agreed = self._agreed * FADE + (not why_not)
        self._counted += 1
        self._in_a_row = 0 if why_not else self._in_a_row + 1
        if self.failed or self._counted < RUNS_MIN or self._at_most() >= self._min:
            return False
        self.failed = (
            f"{self.share:.0%} of the companion's last answers agree with this device's own, the contract wants "
            f"{self._min:.0%} ({why_not}); until the model is loaded anew it runs here"
        )
        return True

    def _at_most(self) -> float:
        """Upper end of Wilson's interval."""
        n, z2 = self._runs, SIGMAS * SIGMAS
        p = self.share
        middle = p + z2 / (2.0 * n)
        half = SIGMAS * math.sqrt(p * (1.0 - p) / n + z2 / (4.0 * n * n))
        return (middle + half) / (1.0 + z2 / n)
