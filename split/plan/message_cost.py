"""What coding a payload takes while requests are served: a call that costs the same whatever its size, and so many
times what was profiled, which was measured in a loop that does nothing else.

    ms = call + ratio · profiled

A payload of some KB is decoded in 20 µs by that loop and in 0.4 ms by a companion that is asked now and then: caches
are another's by then, and a thread must be woken. As a ratio of the profiled time that would be 20, and a payload of a
megabyte would be told to take as many times as long.
"""

from __future__ import annotations

import math
from typing import Final

from split.plan.rate import Rate
from split.plan.reply_bytes import ReplyBytes


class MessageCost:
    """Kalman filter over (call, ratio), both slow random walks, call never below 0. Times without emulated slowdown.

    Of small payloads it learns the call, of large ones the ratio, since the prior of each says what it may be; payloads
    of several sizes tell them apart.

    Not a `Drift`, which believes two surprises alike: these are short, so that one that is taken off the processor
    meanwhile took twenty times as long, and where others are busy that happens often. A surprise counts `CLIP` sigmas;
    only a row of them in one direction widens what is believed possible, twice as far each time.
    """

    CALL_SIGMA_MS: Final = 0.3
    """What a call may cost before one was seen: to wake a thread of a busy Python process takes 0.05 to 0.5 ms."""
    RATIO_SIGMA: Final = 0.3
    NOISE: Final = 0.05
    """Relative scatter of one measurement, as of every stage (`Drift.NOISE`)."""
    FLOOR_MS: Final = 0.05
    """Scatter that does not shrink with the payload."""
    CLIP: Final = 2.0
    ROW_MAX: Final = 10
    """A thousandfold change is believed after so many."""
    WIDEST: Final = 1e6
    """Of both variances together, what a row of surprises may make of them: a thousand milliseconds or a thousandfold.
    Without it a row of twenty leaves only rounding errors."""
    LEAST: Final = 1e-12
    """Of a variance: rounding takes it all where much has gone."""
    WALK: Final = 0.02
    """Relative change from one message to the next."""
    WORTH: Final = 0.02
    """A change by less than this share is not worth a new table (30 µs)."""
    WORTH_MS: Final = 0.005

    __slots__ = ("_cc", "_cr", "_row", "_rr", "_told", "call_ms", "ratio")

    def __init__(self) -> None:
        self.call_ms, self.ratio = 0.0, 1.0
        self._cc, self._cr, self._rr = self.CALL_SIGMA_MS**2, 0.0, self.RATIO_SIGMA**2
        """Covariance."""
        self._row = 0
        """Surprises in a row, negative where messages were quicker than expected."""
        self._told = (0.0, 1.0)
        """Call and ratio as `moved` has last said that they are worth telling."""

    def ms(self, profiled_ms: float) -> float:
        """Expected of a payload that the profile gives so many ms."""
        return self.call_ms + self.ratio * profiled_ms

    def at_profiled(self, measured_ms: float, size_ratio: float) -> float:
        """What a payload of the profiled size would have taken, where one of `size_ratio` times it took so long: the
        call is the same for both."""
        call_ms = min(self.call_ms, measured_ms)
        return call_ms + (measured_ms - call_ms) / size_ratio

    def observe(self, measured_ms: float, profiled_ms: float) -> None:
        """One payload took so long."""
        expected_ms = self.ms(profiled_ms)
        noise_ms = self.NOISE * min(expected_ms, measured_ms) + self.FLOOR_MS
        self._cc += (self.WALK * self.call_ms) ** 2
        self._rr += (self.WALK * self.ratio) ** 2
        innovation = measured_ms - expected_ms
        total = self._predicted(profiled_ms) + noise_ms * noise_ms
        if abs(innovation) > self.CLIP * math.sqrt(total):
            way = 1 if innovation > 0.0 else -1
            self._row = min(max(self._row + way, -self.ROW_MAX), self.ROW_MAX) if self._row * way > 0 else way
            wider = max(min(4.0 ** (abs(self._row) - 1), self.WIDEST / (self._cc + self._rr)), 1.0)
            self._cc, self._cr, self._rr = self._cc * wider, self._cr * wider, self._rr * wider
            total = self._predicted(profiled_ms) + noise_ms * noise_ms
            limit_ms = self.CLIP * math.sqrt(total)
            innovation = min(max(innovation, -limit_ms), limit_ms)
        else:
            self._row = 0
        with_call = self._cc + profiled_ms * self._cr
        with_ratio = self._cr + profiled_ms * self._rr
        self.call_ms += with_call / total * innovation
        self.ratio += with_ratio / total * innovation
        self._cc = max(self._cc - with_call * with_call / total, self.LEAST)
        self._rr = max(self._rr - with_ratio * with_ratio / total, self.LEAST)
        most = math.sqrt(self._cc * self._rr)
        self._cr = min(max(self._cr - with_call * with_ratio / total, -most), most)
        if self.call_ms < 0.0:
            # The most likely ratio of a call that costs nothing.
            self.ratio -= self._cr / self._cc * self.call_ms
            self.call_ms = 0.0
        self.ratio = max(self.ratio, 0.0)

    def moved(self, profiled_ms: float) -> bool:
        """Whether what is expected of such a payload has changed by enough to be told; then it counts as told."""
        call_ms, ratio = self._told
        told_ms, now_ms = call_ms + ratio * profiled_ms, self.ms(profiled_ms)
        if abs(now_ms - told_ms) <= self.WORTH * now_ms + self.WORTH_MS:
            return False
        self._told = (self.call_ms, self.ratio)
        return True

    def _predicted(self, profiled_ms: float) -> float:
        """Variance of what is expected; where it is the small difference of large numbers, rounding may make it less
        than nothing."""
        return max(self._cc + profiled_ms * (2.0 * self._cr + profiled_ms * self._rr), 0.0)


class MessageCosts:
    """Of one model: encoding here and decoding there for each codec, decoding replies here; what calibrated codecs
    send, what replies weigh."""

    __slots__ = ("decode", "encode", "rates", "reply", "reply_bytes")

    def __init__(self) -> None:
        self.encode: dict[str, MessageCost] = {}
        self.decode: dict[str, MessageCost] = {}
        """The companion's, against what this device would take at its speed. Of pictures it is not: `image`."""
        self.reply = MessageCost()
        self.reply_bytes = ReplyBytes()
        self.rates: dict[str, Rate] = {}
        """Of codecs whose bytes the inputs decide."""
