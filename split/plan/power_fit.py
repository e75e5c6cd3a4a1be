"""What computing draws on this very device, from what its energy counter says over busy and idle time. No I/O."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 1800.0
"""What was seen so long ago counts 1/e: half an hour spans busy and idle times; a fan plugged in since is learned."""
WINDOW_S_MIN: Final = 120.0
"""Seen in all before anything is said: a dozen looks."""
SPREAD_MIN: Final = 0.05
"""Standard deviation of the busy ratio below which there is no slope to be seen."""
ERROR_MAX: Final = 0.25
"""Of the slope: two standard errors. A profile's figure is not better known than that."""


class PowerFit:
    """Weighted least squares of watts = idle + compute · busy over windows, with exponential forgetting.

    Other processes' load is noise in it: as long as it does not come and go with ours, the slope is ours.
    """

    def __init__(self) -> None:
        self._seconds = self._busy = self._watts = self._busy2 = self._busy_watts = self._watts2 = 0.0
        self._windows = 0.0
        self.compute_w: float | None = None
        """Watts above idle while the worker computes, as last known well enough; None before."""

    def observe(self, seconds: float, joules: float, busy_s: float) -> None:
        """A window of so many seconds (> 0), in which the device used `joules` and the worker computed for `busy_s`."""
        assert seconds > 0.0, seconds
        busy, watts = min(max(busy_s / seconds, 0.0), 1.0), joules / seconds
        if not (math.isfinite(watts) and watts >= 0.0):
            return
        kept = math.exp(-seconds / MEMORY_S)
        self._windows = kept * self._windows + 1.0
        self._seconds = kept * self._seconds + seconds
        self._busy = kept * self._busy + seconds * busy
        self._watts = kept * self._watts + seconds * watts
        self._busy2 = kept * self._busy2 + seconds * busy * busy
        self._busy_watts = kept * self._busy_watts + seconds * busy * watts
        self._watts2 = kept * self._watts2 + seconds * watts * watts
        self._refit()

    def _refit(self) -> None:
        if self._seconds < WINDOW_S_MIN or self._windows <= 2.0:
            return
        mean_busy, mean_watts = self._busy / self._seconds, self._watts / self._seconds
        busy_variance = self._busy2 / self._seconds - mean_busy * mean_busy
        if busy_variance < SPREAD_MIN * SPREAD_MIN:
            return
        covariance = self._busy_watts / self._seconds - mean_busy * mean_watts
        slope = covariance / busy_variance
        left = max(self._watts2 / self._seconds - mean_watts * mean_watts - slope * covariance, 0.0)
        error = math.sqrt(left / busy_variance / (self._windows - 2.0))
        if slope > 0.0 and 2.0 * error <= ERROR_MAX * slope:
            self.compute_w = slope
