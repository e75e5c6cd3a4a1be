"""What is believed of a link: (rtt, ms per byte up, ms per byte down) as a normal distribution, and what one more
measurement makes of it (the Kalman update, for a measurement that is linear in the three). Values only.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

Covariance = tuple[float, float, float, float, float, float]
"""Of (rtt, up, down): rr, ru, rd, uu, ud, dd."""

RTT_MIN_MS: Final = 0.01
FASTEST_MS_PER_BYTE: Final = 0.008 / 40_000.0
"""40 Gbit/s: above any link; keeps the estimate positive."""
LONGEST_MS: Final = 3.6e6
"""An hour: no request waits for so long, so that no exchange, no round trip and no byte takes it."""
LARGEST_BYTES: Final = float(1 << 40)
"""No message is larger: sums of such and of single bytes are still told apart."""
FALL_MAX: Final = 0.01
"""What one measurement leaves of each at least: a straight line through one time leads below zero soon."""

DOWN_FALL_MAX: Final = 0.3
"""The same of the rate down, which replies of a few hundred bytes hardly show."""


HARDLY_SHOWS_BYTES: Final = 2048
"""Up to here the rate hardly shows: 1.6 ms at 10 Mbit/s."""


class Measured(NamedTuple):
    """One exchange: it took `ms` = rounds · rtt + up_bytes · up + down_bytes · down."""

    rounds: float
    """1, and more where it waited for TCP's window (`slow_start.py`)."""
    up_bytes: float
    down_bytes: float
    ms: float
    at_least: bool = False
    """It was given up then: it would have taken longer."""

    @property
    def size(self) -> float:
        """Bytes in both directions."""
        return self.up_bytes + self.down_bytes

    def ms_of_bytes(self, belief: Belief) -> float:
        """What of it is expected to be due to its bytes."""
        return self.up_bytes * belief.up + self.down_bytes * belief.down


class Surprise(NamedTuple):
    """How far a measurement was from what was believed."""

    ms: float
    """Measured less expected."""
    variance: float
    """Of the expectation, ms²."""

    @property
    def sigmas(self) -> float:
        """How many standard deviations off."""
        return self.ms / math.sqrt(self.variance)


class Belief(NamedTuple):
    """Mean and covariance."""

    rtt: float
    up: float
    down: float
    covariance: Covariance

    def expected_ms(self, measured: Measured) -> float:
        """What this much over the link is expected to take, in the mean."""
        return measured.rounds * self.rtt + measured.ms_of_bytes(self)

    def surprise(self, measured: Measured, noise: float) -> Surprise:
        """`noise`: variance of the measurement itself, ms²."""
        h, u, d = measured.rounds, measured.up_bytes, measured.down_bytes
        pr, pu, pd = self._with(h, u, d)
        # After megabytes what is left of the covariance may be less than it was rounded by, and below zero.
        return Surprise(measured.ms - self.expected_ms(measured), max(h * pr + u * pu + d * pd, 0.0) + noise)

    def updated(self, measured: Measured, noise: float, innovation_ms: float) -> Belief:
        """Believing that the measurement was `innovation_ms` off what was expected."""
        h, u, d = measured.rounds, measured.up_bytes, measured.down_bytes
        pr, pu, pd = self._with(h, u, d)
        total = max(h * pr + u * pu + d * pd, 0.0) + noise
        step = innovation_ms / total
        rr, ru, rd, uu, ud, dd = self.covariance
        down = max(self.down + pd * step, DOWN_FALL_MAX * self.down, FASTEST_MS_PER_BYTE)
        rr, ru, rd = max(rr - pr * pr / total, 0.0), ru - pr * pu / total, rd - pr * pd / total
        uu, ud, dd = max(uu - pu * pu / total, 0.0), ud - pu * pd / total, max(dd - pd * pd / total, 0.0)
        if d <= HARDLY_SHOWS_BYTES and down < self.down and (det := rr * uu - ru * ru) > 0.0:
            # Only the others have told it: what they leave open is a ratio to up, and shrinks with it.
            told = min((uu * rd * rd - 2.0 * ru * rd * ud + rr * ud * ud) / det, dd)
            dd = told + (dd - told) * (down / self.down) ** 2
        return Belief(
            max(self.rtt + pr * step, FALL_MAX * self.rtt, RTT_MIN_MS),
            max(self.up + pu * step, FALL_MAX * self.up, FASTEST_MS_PER_BYTE),
            down,
            (rr, ru, rd, uu, ud, dd),
        )

    def _with(self, h: float, u: float, d: float) -> tuple[float, float, float]:
        """Covariance · (h, u, d)."""
        rr, ru, rd, uu, ud, dd = self.covariance
        return h * rr + u * ru + d * rd, h * ru + u * uu + d * ud, h * rd + u * ud + d * dd
