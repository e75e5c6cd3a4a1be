"""What became of a link that changed: another rate, another round trip, or both, whichever explains best what was seen.

A link may become a thousand times slower or faster, and neither rtt nor rate becomes negative: so it is solved for
their logarithms, against the logarithm of the measured times, where ten times more and ten times less are alike. Least
squares with a prior (Gauss-Newton; two unknowns, a handful of measurements), compared by Laplace's approximation of the
evidence (MacKay 1992), which charges for every freedom that was not needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from split.plan.belief import (
    FASTEST_MS_PER_BYTE,
    HARDLY_SHOWS_BYTES,
    LONGEST_MS,
    RTT_MIN_MS,
    Belief,
    Measured,
)

OPEN_SIGMA: Final = math.log(10.0)
"""Of the logarithm of what may have changed: a factor of ten either way, of a hundred is two sigmas."""
KEPT_SIGMA: Final = 0.1
"""Of what is explained as unchanged."""
DOWN_SIGMA: Final = 0.5
"""How well the rate down is known by the rate up after a change, relative: replies are small and hardly show it."""
SHOWS_DOWN_BYTES: Final = 8192
SHOWS_DOWN_RATIO: Final = 0.1
"""A reply from here on, and of what went up: its rate may be what changed. What is less (a thousand classes are 4 KB)
cannot be told from the way up: on a link that walks, simulated, 2 % of latency were lost by it. A pong has as much."""
TELLS_APART: Final = 1.0
"""Evidences (logarithms) that are nearer to each other say nothing."""
AGREE_SIGMAS: Final = 2.5
"""An explanation holds when no measurement is further from it."""
STEPS_MAX: Final = 24
"""Of Gauss-Newton, halved ones included; four are usual."""
CONVERGED: Final = 1e-3
"""Relative change of rtt and rate."""


class Explanation(NamedTuple):
    """One way to see it."""

    evidence: float
    """Logarithm."""
    worst: float
    """Sigmas of the measurement that is furthest from it."""
    holds: bool
    belief: Belief


def explain(before: Belief, measured: Sequence[tuple[Measured, float]]) -> Explanation:
    """The best explanation of measurements (with the relative sigma of each) that `before` does not explain.

    It does not hold where they have nothing in common: two stalls of different length are no change. (With rtt and rate
    both free, any two measurements agree, so that this takes three.)
    """
    down_shows = any(shows_down(one) for one, _ in measured)
    # What weighs nothing on its way up says nothing of that rate, which probes of its own look at.
    seen = _Ways.BOTH if not down_shows or any(one.up_bytes > HARDLY_SHOWS_BYTES for one, _ in measured) else _Ways.DOWN
    by_rate = _solved(before, measured, KEPT_SIGMA, OPEN_SIGMA, seen)
    by_rtt = _solved(before, measured, OPEN_SIGMA, KEPT_SIGMA, seen)
    by_both = _solved(before, measured, OPEN_SIGMA, OPEN_SIGMA, seen)
    ways = [by_rate, by_rtt]
    if seen is _Ways.BOTH:
        # Of equals the first: where no reply tells the two apart, both directions have changed.
        ways.insert(1, _solved(before, measured, KEPT_SIGMA, OPEN_SIGMA, _Ways.UP))
        if down_shows:
            ways.append(_solved(before, measured, KEPT_SIGMA, OPEN_SIGMA, _Ways.DOWN))
    alone = max(ways, key=lambda one: one.evidence)
    if by_both.evidence > alone.evidence - TELLS_APART:
        # Measurements of one size do not tell which it was, and the next one of another size shall be free to.
        return by_both._replace(holds=by_both.holds and (alone.holds or len(measured) > 2))
    return alone


class _Ways(Enum):
    """Which rate became another one."""

    BOTH = (True, True)
    UP = (True, False)
    DOWN = (False, True)


def shows_down(one: Measured) -> bool:
    """Whether it says something of the way down beside the way up."""
    return one.down_bytes >= max(SHOWS_DOWN_BYTES, SHOWS_DOWN_RATIO * one.up_bytes)


def _solved(
    before: Belief,
    measured: Sequence[tuple[Measured, float]],
    rtt_sigma: float,
    rate_sigma: float,
    ways: _Ways = _Ways.BOTH,
) -> Explanation:
    """Maximum a posteriori of (log rtt, log rate); the rate is that of `ways`, by the same factor where it is both."""
    ups, downs = ways.value
    if before.covariance[-1] > (DOWN_SIGMA * before.down) ** 2:
        before = before._replace(down=before.up)  # it never showed: as fast as the other way
    rate = before.up if ups else before.down
    least = (math.log(RTT_MIN_MS / before.rtt), math.log(FASTEST_MS_PER_BYTE / rate))
    most = (math.log(LONGEST_MS / before.rtt), math.log(LONGEST_MS / rate))
    terms = [
        (
            one.rounds * before.rtt,
            ups * one.up_bytes * before.up + downs * one.down_bytes * before.down,
            (not ups) * one.up_bytes * before.up + (not downs) * one.down_bytes * before.down,
            math.log(max(one.ms, 1e-3)),
            sigma,
            one.at_least,
        )
        for one, sigma in measured
    ]
    prior = (1.0 / rtt_sigma**2, 1.0 / rate_sigma**2)
    at, here, length = (0.0, 0.0), _Normal.at((0.0, 0.0), prior, terms), 1.0
    for _ in range(STEPS_MAX):
        step = here.step
        to = (
            min(max(at[0] + length * step[0], least[0]), most[0]),
            min(max(at[1] + length * step[1], least[1]), most[1]),
        )
        if max(abs(to[0] - at[0]), abs(to[1] - at[1])) < CONVERGED:
            break
        there = _Normal.at(to, prior, terms)
        if there.cost < here.cost:
            at, here, length = to, there, 1.0
        else:
            length /= 2.0
    evidence = -0.5 * (here.cost + math.log(here.det)) - math.log(rtt_sigma * rate_sigma)
    r, u, d = (
        before.rtt * math.exp(at[0]),
        before.up * math.exp(at[1] if ups else 0.0),
        before.down * math.exp(at[1] if downs else 0.0),
    )
    vr, vru, vu = here.bb / here.det, -here.ab / here.det, here.aa / here.det
    if ups:
        covariance = (r * r * vr, r * u * vru, r * d * vru, u * u * vu, u * d * vu, d * d * (vu + DOWN_SIGMA**2))
    else:
        covariance = (r * r * vr, 0.0, r * d * vru, u * u * KEPT_SIGMA**2, 0.0, d * d * vu)
    return Explanation(evidence, here.worst, here.worst <= AGREE_SIGMAS, Belief(r, u, d, covariance))


_Term = tuple[float, float, float, float, float, bool]
"""One measurement: ms of round trips, of bytes, of what stays as it was; logarithm of the measured ms, its sigma;
whether it is a bound, which what takes longer keeps."""


class _Normal(NamedTuple):
    """The normal equations at one point."""

    cost: float
    """Squares of what is unexplained, in sigmas, the prior's included."""
    worst: float
    """The largest of the measurements' deviations, in sigmas."""
    aa: float
    ab: float
    bb: float
    ya: float
    yb: float

    @classmethod
    def at(cls, at: tuple[float, float], prior: tuple[float, float], terms: Sequence[_Term]) -> _Normal:
        (rtt, rate), (aa, bb), ab, worst = at, prior, 0.0, 0.0
        ya, yb = -aa * rtt, -bb * rate
        cost = aa * rtt * rtt + bb * rate * rate
        factors = math.exp(rtt), math.exp(rate)
        for rtt_ms, bytes_ms, known_ms, log_ms, sigma, at_least in terms:
            a, b = rtt_ms * factors[0], bytes_ms * factors[1]
            total = a + b + known_ms
            off = (log_ms - math.log(total)) / sigma
            if at_least:
                off = max(off, 0.0)  # its weight stays: explanations are compared by what they leave open, too
            ja, jb = a / (total * sigma), b / (total * sigma)
            aa, ab, bb = aa + ja * ja, ab + ja * jb, bb + jb * jb
            ya, yb = ya + ja * off, yb + jb * off
            cost, worst = cost + off * off, max(worst, abs(off))
        return cls(cost, worst, aa, ab, bb, ya, yb)

    @property
    def det(self) -> float:
        return self.aa * self.bb - self.ab * self.ab

    @property
    def step(self) -> tuple[float, float]:
        det = self.det
        return (self.bb * self.ya - self.ab * self.yb) / det, (self.aa * self.yb - self.ab * self.ya) / det
