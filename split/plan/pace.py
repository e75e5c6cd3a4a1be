"""The drift of a side that says itself how fast it computes at the moment: the companion, which may be slow because
others use its machine, and quick again while nothing is sent there.

    measured / profiled = pace (as it says) × drift (as its times show)

Its word alone would not do: it knows how a piece of work of its own goes, not how this model does beside that load.
Nor would its times alone: they tell at once that it has become slow, and never that it is slow no more.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from split.plan.estimate import Drift, Residual


class PacedDrift:
    """As `Drift`, `ratio` with the pace in."""

    PACE_SIGMA: Final = 0.5
    """How well a change of the pace tells the change of a model's times, relative to it: as that of a clock, memory and
    threads keep their own."""
    REMEMBERED: Final = 16
    """Measurements that are held against a change that is said afterwards: more than come until it is."""

    __slots__ = ("_drift", "_seen", "pace")

    def __init__(self, *, prior_sigma: float) -> None:
        # A tail of 0.1 ms that takes 0.5 when served says what a call costs there, not that the machine is slow: taken
        # for that, a few of them kept a model from a companion that was as quick as ever for 20 to 50 requests.
        self._drift = Drift(prior_sigma=prior_sigma, call_ms=Residual.CALL_MS)
        self.pace = 1.0
        """As it says, over what it was when the times were measured that everything is compared with."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=self.REMEMBERED)
        """When it was measured, and the logarithm of the drift as it was believed then."""

    @property
    def ratio(self) -> float:
        """Of a run now."""
        return self.pace * self._drift.ratio

    @property
    def sigma(self) -> float:
        """As `Drift.sigma`."""
        return self._drift.sigma

    def rest(self, now_s: float) -> None:
        """As `Drift.rest`: what returns to what is usual is what the pace does not explain."""
        self._drift.rest(now_s)

    def observe(self, measured_ms: float, expected_ms: float, now_s: float) -> float:
        """As `Drift.observe`, of a run whose time was told at `now_s`."""
        drift = self._drift.observe(measured_ms, expected_ms * self.pace)
        self._seen.append((now_s, math.log(drift)))
        return self.pace * drift

    def paced(self, ratio: float, from_s: float) -> None:
        """It takes `ratio` times as long as when the times were measured, since some time after `from_s`; before, it
        was as it had said.

        Times that came meanwhile may have shown it already: then the drift has moved by about as much, and gives it
        back to the pace. Otherwise all that is known becomes so much slower or faster, and less certain.
        """
        change = math.log(ratio / self.pace)
        self.pace = ratio
        if abs(change) <= 2.0 * abs(change - self._moved_since(from_s)):
            self._drift.unsettle(self.PACE_SIGMA * abs(change))
        else:
            self._drift.correct(math.exp(-change))

    def _moved_since(self, from_s: float) -> float:
        if not self._seen:
            return 0.0
        before = next((log for at_s, log in reversed(self._seen) if at_s <= from_s), self._seen[0][1])
        return self._seen[-1][1] - before
