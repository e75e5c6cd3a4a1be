"""What a calibrated codec really sends, over what its curve says: learned payload by payload, and told apart from
chance where it shows that the live inputs are not like those of the calibration. Pure.
"""

from __future__ import annotations

import math
from typing import Final


def misfit_text(codec: str, ratio: float) -> str:
    """What is said of a codec whose `Rate.misfit` is set."""
    return (
        f"live inputs do not fit the calibration: codec {codec} sends {ratio:.2f} times the bytes of its curve; run "
        "isthmus calibrate with inputs like the live ones"
    )


class Rate:
    """Of one codec of one model: mean and variance of sent / expected bytes over the last fifty payloads or so."""

    KEPT: Final = 50.0
    """An exponential window as long: a scene that changes shows within seconds of a busy camera."""
    SEEN_MIN: Final = 20
    """Before so many nothing is judged."""
    FAR: Final = 1.5
    """Calibrated on inputs of another kind, a photograph's payload was 1.13 (text) to 1.64 times as large (noise): up
    to here it costs bytes, above it the tables are of no use."""
    SIGMAS: Final = 2.33
    """One-sided 99 % of a normal distribution, either way: a state that chance does not flip."""
    WORTH: Final = 0.02
    """A change by less is not worth a new table (30 µs)."""

    __slots__ = ("_square", "_told", "_weight", "misfit", "ratio", "seen")

    def __init__(self) -> None:
        self.ratio = 1.0
        self._square = 1.0
        self._weight = 5.0
        """As if five payloads had been just as calibrated."""
        self._told = 1.0
        self.seen = 0
        self.misfit = False
        """Whether the live inputs do not fit the calibration."""

    def observe(self, sent_bytes: float, expected_bytes: float) -> bool:
        """One payload, and what the curve says it has on average; whether `misfit` has changed."""
        if expected_bytes <= 0.0:
            return False
        ratio = sent_bytes / expected_bytes
        self.seen += 1
        self._weight = min(self._weight + 1.0, self.KEPT)
        share = 1.0 / self._weight
        self.ratio += share * (ratio - self.ratio)
        self._square += share * (ratio * ratio - self._square)
        if self.seen < self.SEEN_MIN:
            return False
        half = self.SIGMAS * math.sqrt(max(self._square - self.ratio * self.ratio, 0.0) / self._weight)
        misfit = self.ratio - half > self.FAR or (self.misfit and self.ratio + half >= self.FAR)
        if misfit == self.misfit:
            return False
        self.misfit = misfit
        return True

    def moved(self) -> bool:
        """Whether it has changed by enough to be told; then it counts as told."""
        if abs(self.ratio - self._told) <= self.WORTH * self._told:
            return False
        self._told = self.ratio
        return True
