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
    """Of one codec of one model: mean and variance of sent / expected bytes over the last fifty payloads or so.

    What it says keeps its codec from being chosen, and then nothing is learned any more. So one payload that is off by
    much (a tensor that fell back to lossless is 25 times as large) counts as `CLIP` sigmas, and only a row of them is
    believed, as in `MessageCost`; and what was learned fades while the codec is not used (`rest`).
    """

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
    PRIOR: Final = 5.0
    """As if so many payloads had been just as calibrated,"""
    PRIOR_SIGMA: Final = 0.3
    """with this scatter: of photographs it was 0.15 to 0.35."""
    CLIP: Final = 2.0
    ROW_MAX: Final = 10
    """A thousandfold change is believed after so many."""
    IDLE_S: Final = 30.0
    """A codec that sent nothing for so long is one that is not chosen;"""
    REST_S: Final = 60.0
    """then what was learned fades with this time constant: it is tried again within minutes."""

    __slots__ = ("_idle_s", "_row", "_square", "_told", "_weight", "misfit", "ratio", "seen")

    def __init__(self) -> None:
        self.ratio = 1.0
        self._square = 1.0 + self.PRIOR_SIGMA**2
        self._weight = self.PRIOR
        self._told = 1.0
        self._row = 0
        """Surprises in a row, negative where payloads were smaller than expected."""
        self._idle_s = 0.0
        self.seen = 0
        self.misfit = False
        """Whether the live inputs do not fit the calibration."""

    def observe(self, sent_bytes: float, expected_bytes: float) -> bool:
        """One payload, and what the curve says it has on average; whether `misfit` has changed."""
        if expected_bytes <= 0.0:
            return False
        ratio = self._clipped(sent_bytes / expected_bytes)
        self.seen, self._idle_s = self.seen + 1, 0.0
        self._weight = min(self._weight + 1.0, self.KEPT)
        share = 1.0 / self._weight
        self.ratio += share * (ratio - self.ratio)
        self._square += share * (ratio * ratio - self._square)
        if self.seen < self.SEEN_MIN:
            return False
        half = self.SIGMAS * self._sigma / math.sqrt(self._weight)
        misfit = self.ratio - half > self.FAR or (self.misfit and self.ratio + half >= self.FAR)
        if misfit == self.misfit:
            return False
        self.misfit = misfit
        return True

    def rest(self, seconds: float) -> None:
        """So much time has passed."""
        self._idle_s += seconds
        if self._idle_s < self.IDLE_S:
            return
        variance, kept = self._sigma**2, math.exp(-seconds / self.REST_S)
        self.ratio = 1.0 + kept * (self.ratio - 1.0)
        self._square = self.ratio * self.ratio + variance
        self._weight = self.PRIOR + kept * (self._weight - self.PRIOR)

    @property
    def _sigma(self) -> float:
        return math.sqrt(max(self._square - self.ratio * self.ratio, 0.0))

    def _clipped(self, ratio: float) -> float:
        """Not further from what is expected than can be believed of one payload, the sixth in a row 32 times as far."""
        off, sigma = ratio - self.ratio, max(self._sigma, self.WORTH * self.ratio)
        if abs(off) <= self.CLIP * sigma:
            self._row = 0
            return ratio
        way = 1 if off > 0.0 else -1
        self._row = min(max(self._row + way, -self.ROW_MAX), self.ROW_MAX) if self._row * way > 0 else way
        limit = self.CLIP * sigma * 2.0 ** (abs(self._row) - 1)
        return self.ratio + min(max(off, -limit), limit)

    def moved(self) -> bool:
        """Whether it has changed by enough to be told; then it counts as told."""
        if abs(self.ratio - self._told) <= self.WORTH * self._told:
            return False
        self._told = self.ratio
        return True
