"""Drift: how much slower or faster a side computes than its profile says. One multiplicative ratio moves all plans at
once, so that every request teaches about every plan; a small residual per cut holds what the ratio cannot.

Robustness in one place (`ChangeDetector`): one surprising measurement is a stall and is mostly ignored, two in the same
direction are a change and are believed at once.
"""

from __future__ import annotations

import math
from typing import Final


class ChangeDetector:
    """CUSUM over normalised innovations (Page 1954), each clipped so that one alone can never alarm.

    Three sums: up, down, and of either sign (a link that got slower to answer and faster to carry surprises both
    ways in turn). With slack 0.5 and threshold 5 a shift of one standard deviation is found after about ten
    observations, of three or more after two; on pure noise it alarms about once in 465 (Montgomery, Statistical Quality
    Control, table 9.3), and a false alarm only costs a few observations of wider uncertainty.
    """

    CLIP: Final = 3.0
    SLACK: Final = 0.5
    THRESHOLD: Final = 5.0
    assert CLIP - SLACK < THRESHOLD <= 2 * (CLIP - SLACK)
    SIZE_SLACK: Final = 1.5
    """|N(0, 1)| is 0.8 on average and above 1.5 once in seven."""
    SIZE_THRESHOLD: Final = 3.0
    assert CLIP - SIZE_SLACK < SIZE_THRESHOLD <= 2 * (CLIP - SIZE_SLACK)

    __slots__ = ("_above", "_below", "_size")

    def __init__(self) -> None:
        self._above = self._below = self._size = 0.0

    @property
    def surprised(self) -> bool:
        """A surprise has just been seen that would be a change if the next one confirms it."""
        return self._size > 0.0 and max(self._above, self._below, self._size) >= self.SIZE_SLACK

    def changed(self, normalised: float) -> bool:
        """Feed (measured − expected) / expected standard deviation; True when it has changed (and start afresh)."""
        clipped = min(max(normalised, -self.CLIP), self.CLIP)
        self._above = max(0.0, self._above + clipped - self.SLACK)
        self._below = max(0.0, self._below - clipped - self.SLACK)
        self._size = max(0.0, self._size + abs(clipped) - self.SIZE_SLACK)
        if max(self._above, self._below) < self.THRESHOLD and self._size < self.SIZE_THRESHOLD:
            return False
        self._above = self._below = self._size = 0.0
        return True


class Drift:
    """Kalman filter on log(measured / expected) as a slow random walk, and on what a pause adds to it.

    Starts at ratio 1 with `prior_sigma` (relative). Not for stages that run zero times: expected must be positive.

    Between measurements it returns to what is usual (an Ornstein–Uhlenbeck process, so that it does not matter how
    often somebody looks): whatever made the last runs slow has probably passed. Whoever asks at points of time says so
    by `rest`; without that, time stands still.
    """

    NOISE: Final = 0.05
    """Relative scatter of one measurement on an otherwise idle device (onnxruntime, medians of 20: 2–6 %)."""
    FLOOR_MS: Final = 0.05
    """Scatter that does not shrink with the stage: thread wake-up and timer."""
    WALK: Final = 0.02
    """Relative change of speed from one request to the next (heat, frequency)."""
    RETURN_S: Final = 30.0
    """Time constant of the return: most busy neighbours are gone by then. Of one that is not, a run or two in so long
    tell again."""
    USUAL_GAIN: Final = 0.02
    """Usual is the average of about the last fifty."""
    SLOW: Final = math.log(1.1)
    PAUSE_FROM_S: Final = 0.1
    PAUSE_S: Final = 1.0
    """A pause of so long has its whole effect (caches taken by others, clocks down), a shorter one in proportion."""
    PAUSE_SIGMA: Final = 0.04
    """What a pause may add, relative, before any was seen: less than one run scatters, so that it stays 0 until many
    agree."""
    PAUSE_MAX: Final = math.log(2.0)
    SCATTER_GAIN: Final = 0.05
    """Weight of one run in how far runs scatter; one that is further off than `ChangeDetector.CLIP` of it counts no
    more than that, so that it takes some seven stalls to be believed eight times as far."""

    __slots__ = (
        "_across",
        "_asked_at_s",
        "_call_ms",
        "_detector",
        "_log",
        "_pause",
        "_pause_variance",
        "_paused",
        "_prior_variance",
        "_ran_at_s",
        "_scatter_variance",
        "_usual",
        "_variance",
        "count",
    )

    def __init__(self, *, prior_sigma: float = 0.1, call_ms: float = 0.0) -> None:
        """`call_ms`: a call may take so much longer than is expected, or less, on a side that is as fast as ever."""
        self._call_ms = call_ms
        self._detector = ChangeDetector()
        self._log = self._usual = 0.0
        self._prior_variance = prior_sigma * prior_sigma
        self._variance = self._prior_variance
        self._pause = 0.0
        """What a whole pause adds to the logarithm."""
        self._pause_variance, self._across = self.PAUSE_SIGMA**2, 0.0
        """Its variance, and its covariance with the logarithm."""
        self._paused = 0.0
        """How much of a pause there was before now, 0…1."""
        self._asked_at_s = self._ran_at_s = math.inf
        self._scatter_variance = self.NOISE * self.NOISE
        self.count = 0

    @property
    def ratio(self) -> float:
        """Of a run now."""
        return math.exp(self._log + self._paused * self._pause)

    @property
    def is_slow(self) -> bool:
        """Slower than it usually is, by more than runs scatter."""
        return self._log - self._usual > self.SLOW

    @property
    def sigma(self) -> float:
        """Relative standard deviation of the next measurement around `ratio`."""
        return math.sqrt(self._spread() + self.NOISE * self.NOISE)

    @property
    def scatter(self) -> float:
        """Standard deviation of log(measured / what was believed before), upwards, as runs have shown it; at least
        `NOISE`. Not in `sigma`: that is how well the mean is known, this how late a single run may be."""
        return math.sqrt(self._scatter_variance)

    def rest(self, now_s: float) -> None:
        """It is `now_s`, and a run may follow: what was measured last has aged, and there may have been a pause."""
        since_s = now_s - self._asked_at_s
        if since_s > 0.0 and self.count:
            left = math.exp(-since_s / self.RETURN_S)
            self._log = self._usual + (self._log - self._usual) * left
            self._variance = self._prior_variance + (self._variance - self._prior_variance) * left * left
            self._across *= left
        self._asked_at_s = now_s
        self._paused = min(max((now_s - self._ran_at_s - self.PAUSE_FROM_S) / self.PAUSE_S, 0.0), 1.0)

    def unsettle(self, sigma: float, *, factor: float = 1.0) -> None:
        """It is known that the speed changed for as long as nothing else is said, probably by `factor`: what is usual
        moves along, and two measurements teach the rest."""
        self._log += math.log(factor)
        self._usual += math.log(factor)
        self._variance, self._across = max(self._variance, sigma * sigma), 0.0

    def correct(self, factor: float) -> None:
        """So much of what was learned last belongs elsewhere; what is usual, and how much is known, stays."""
        self._log += math.log(factor)

    def observe(self, measured_ms: float, expected_ms: float) -> float:
        """Learn from one measured stage; `expected_ms` is what ratio 1 would have taken.

        Returns the ratio as it is now believed to have been for this run, the pause before it included: what is left
        beyond that is no matter of the device (`Residual`). `ratio` is by then one of a run right after it.
        """
        if expected_ms <= 0.0:
            return self.ratio
        paused = self._paused
        # A measurement below the timer's resolution says "fast", not "infinitely fast".
        innovation = math.log(max(measured_ms, 1e-3) / expected_ms) - self._log - paused * self._pause
        noise = math.hypot(self.NOISE + self.FLOOR_MS / expected_ms, self._call_ms / expected_ms)
        self._variance += self.WALK * self.WALK
        total = self._spread() + noise * noise
        normalised = innovation / math.sqrt(total)
        self._learn_scatter(innovation * self.NOISE / noise)
        if self._detector.changed(normalised):
            self._variance, self._across = max(self._prior_variance, innovation * innovation), 0.0
            total = self._spread() + noise * noise
        else:
            limit = ChangeDetector.CLIP * math.sqrt(total)
            innovation = min(max(innovation, -limit), limit)
        with_log = self._variance + paused * self._across
        with_pause = self._across + paused * self._pause_variance
        self._log += with_log / total * innovation
        self._pause = min(max(self._pause + with_pause / total * innovation, 0.0), self.PAUSE_MAX)
        self._variance -= with_log * with_log / total
        self._across -= with_log * with_pause / total
        self._pause_variance -= with_pause * with_pause / total
        self.count += 1
        self._usual += max(1.0 / self.count, self.USUAL_GAIN) * (self._log - self._usual)
        self._paused = 0.0
        if self._asked_at_s < math.inf:
            self._ran_at_s = self._asked_at_s + measured_ms / 1000.0
        return math.exp(self._log + paused * self._pause)

    def _learn_scatter(self, innovation: float) -> None:
        # Twice those above, none of those below: the upper half's variance. Who is early is late for nothing.
        above = min(max(innovation, 0.0), ChangeDetector.CLIP * self.scatter)
        seen = self._scatter_variance + self.SCATTER_GAIN * (2.0 * above * above - self._scatter_variance)
        self._scatter_variance = max(seen, self.NOISE * self.NOISE)

    def _spread(self) -> float:
        """Variance of the logarithm of the next run's ratio."""
        return self._variance + self._paused * (2.0 * self._across + self._paused * self._pause_variance)


class Residual:
    """What is left of one cut's measurements after the drift of its side: a bounded ratio, learned slowly.

    `estimated`: what is expected was never measured, so that the first observations count as much as it does: they
    are averaged with it until their weight is that of `GAIN`.

    Like the drift it returns to what is usual while nothing is measured (`rest`): a plan that is left after slow runs
    is not measured again, so that they would be held against it for good. Usual is the average of the last `REMEMBERED`
    observations and of the profile, which counts as `PROFILE_RUNS` more.
    """

    GAIN: Final = 0.2
    PROVEN_AFTER: Final = 3
    """Observations after which an estimate is one no more: it has a quarter of the weight left."""
    PROFILE_RUNS: Final = 10
    REMEMBERED: Final = 40
    """The profile keeps a fifth of the weight: it alone tells a residual from the drift of its side."""
    BOUND: Final = math.log(1.5)
    """A stage that is off by more than half was measured wrongly or is another stage."""
    CALL_MS: Final = 0.2
    """But for so much that a call may take longer when served than in the profile's loop, whose caches are warm: heads
    of 0.03 ms took 0.12 (Silero-VAD), of 0.07 ms 0.25 (MiniLM)."""

    __slots__ = ("_average", "_gain", "_log", "_profile_runs", "count")

    def __init__(self, *, estimated: bool = False) -> None:
        self._log = self._average = 0.0
        self._profile_runs = 1 if estimated else self.PROFILE_RUNS
        self._gain = 0.5 if estimated else self.GAIN
        self.count = 0

    @property
    def ratio(self) -> float:
        return math.exp(self._log)

    @property
    def proven(self) -> bool:
        """Whether so much was observed that it does not matter whether the profile was measured."""
        return self.count >= self.PROVEN_AFTER

    def observe(self, measured_ms: float, expected_ms: float) -> None:
        """`expected_ms`: with the drift that held for this run (`Drift.observe`), without this residual. Both without
        emulated slowdown."""
        if expected_ms <= 0.0:
            return
        most = max(self.BOUND, math.log1p(self.CALL_MS / expected_ms))
        error = math.log(max(measured_ms, 1e-3) / expected_ms) - self._log
        # Clip before averaging: a stall must not leave a trace of itself for twenty requests.
        clipped = min(max(error, -0.3), max(0.3, most / 2.0))
        step = self._gain * clipped
        self._gain = max(self._gain / (1.0 + self._gain), self.GAIN)  # 1/2, 1/3, 1/4, 1/5: an average
        self.count += 1
        seen = min(max(self._log + clipped, -self.BOUND), most)
        self._average += max(1.0 / self.count, 1.0 / self.REMEMBERED) * (seen - self._average)
        self._log = min(max(self._log + step, -self.BOUND), most)

    def rest(self, seconds: float) -> None:
        """So much time has passed since it was asked last."""
        count = min(self.count, self.REMEMBERED)
        usual = self._average * count / (self._profile_runs + count)
        self._log = usual + (self._log - usual) * math.exp(-seconds / Drift.RETURN_S)


class CloudQueue:
    """Waiting time at the companion, from its replies; what was true some seconds ago fades into "unknown".

    Unknown means: probably nothing (mean 0), perhaps `UNKNOWN_SIGMA_MS`.
    """

    FADE_S: Final = 5.0
    UNKNOWN_SIGMA_MS: Final = 3.0
    GAIN: Final = 0.4

    __slots__ = ("_mean", "_seen_at_s", "_variance")

    def __init__(self) -> None:
        self._mean = 0.0
        self._variance = 0.0
        self._seen_at_s = -math.inf

    def observe(self, queue_ms: float, now_s: float) -> None:
        """A reply had waited so long there."""
        error = queue_ms - self._mean
        self._mean += self.GAIN * error
        self._variance = (1.0 - self.GAIN) * (self._variance + self.GAIN * error * error)
        self._seen_at_s = now_s

    def at(self, now_s: float) -> tuple[float, float]:
        """(mean ms, standard deviation ms) now."""
        fresh = math.exp(-max(now_s - self._seen_at_s, 0.0) / self.FADE_S)
        unknown = self.UNKNOWN_SIGMA_MS * (1.0 - fresh)
        return self._mean * fresh, math.sqrt(self._variance * fresh + unknown * unknown)
