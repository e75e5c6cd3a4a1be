"""Which plan is tried although another one is expected first, so that a wrong estimate is found; of one model.

A discounted Thompson sampler (Raj and Kalyani 2017, arXiv:1707.09727; Thompson 1933) on what the prediction leaves: the
logarithm of measured / predicted, one arm for each plan. Thompson rather than LinUCB (μLinUCB of ANS, WWW'21): the
features that plans share (drift of both sides, link) are in the prediction already, so that what is left has none; and
a sample tries a plan as often as it may be the best one, where an upper bound tries the same one until it gives in.
Only plans near the best are arms, and what trying costs is an account: a share of all latency, never more.

    log(measured / predicted) = common + residual of the plan + noise

`common` is what has changed for all plans and the prediction has not followed yet; it fades by itself. Knows rows of
values, no requests: what must not be explored (`decide.py`, the planner) does not come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from split.plan.observation import Flags, Floats

Rows = npt.NDArray[np.intp]

NEAR: Final = 1.10
"""A plan so many times slower than the best is an arm: residuals are of a few percent, what is farther off does not
become the best by one."""
COST_SHARE: Final = 0.01
"""Of the value of all requests (latency, where nothing else counts), what trying may cost."""
START_SHARE: Final = 0.5
"""Of one request, what it may cost before anything is earned."""
SAVED_MAX: Final = 3.0
"""Times a request's latency, what the account holds at most: what a long day has earned is not spent in a minute, and a
companion that is expected to be so much slower than the device is not asked to find out."""

FADE: Final = 0.995
"""Per measured request: the last 200 count."""
PRIOR_SIGMA: Final = 0.05
"""Of a plan never measured, about its prediction: what sums of measured stages are off (3–6 %)."""
NOISE: Final = 0.05
NOISE_MIN: Final = 0.02
NOISE_GAIN: Final = 0.02
"""Scatter of one measured total about its prediction: before any was seen, at least, and the weight of one."""
COMMON_GAIN: Final = 0.3
COMMON_FADE: Final = 0.9
CLIP: Final = 3.0
"""Standard deviations that one measurement may count: a stall teaches nothing about a plan."""
GAINS: Final = 0.02
"""A plan is taken for its residual where that makes it so much faster."""
FELT: Final = GAINS / 2
"""Residuals below it change no choice: two of them are less than `GAINS` apart."""
EVERY: Final = 3
"""Requests from one draw to the next: a draw takes 20 µs of a decision, none 1 µs, residuals that are felt 3."""

UNHEARD_REQUESTS: Final = 50
UNHEARD_MAX: Final = 400
USED_WITHIN: Final = 1000
"""After so many that the device served alone, the companion is worth a request: pings tell about the link only. Where
it was not the best within so many, twice as many each time, since it may be so for good (ANS samples by force at
growing intervals, too: what runs here teaches nothing about there), and where asking was too dear. 50 was the best of
10, 20 and 50 in `scripts/simulate`."""
AWAY_REQUESTS: Final = 10
"""The device, where it was slower than usual when it ran last, is worth a request after so many that left it: what goes
away teaches nothing about it. Twice as many after each try, unless it brings news."""
NEWS: Final = 0.1
"""What was so much faster than predicted, companion or device, is asked again at once: two surprises are a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """Another row than the one that was chosen by prediction."""

    row: int
    cost_ms: float
    """What it is expected to take longer than the best; 0.0 where it is expected to be the best, residuals in."""
    why: str
    """A clause: what for, and what it costs."""


class Explorer:
    """`plans` rows, `remote`: those that the companion takes part in. Deterministic by its seed."""

    def __init__(self, remote: Flags, *, seed: int = 0) -> None:
        plans = len(remote)
        self._remote = remote
        self._random = np.random.default_rng(seed)
        self._weight = np.zeros(plans)
        self._sum = np.zeros(plans)
        self._ratio: Floats | None = None
        """exp of the residuals where they are felt, None where none is."""
        self._common = 0.0
        self._noise2 = NOISE * NOISE
        self._saved_ms = math.nan
        self._asked = 0
        self._unheard, self._patience, self._unused = 0, UNHEARD_REQUESTS, USED_WITHIN
        self.device_doubted = False
        """Whether the device was slower than usual when it ran last; set by who knows, before each `choose`."""
        self._away, self._away_patience = 0, AWAY_REQUESTS
        self.earned_ms = self.spent_ms = 0.0
        """Expected value of all requests so far (`Score.value_ms`), and what was spent on trying."""

    def choose(self, row: int, value_ms: Floats, may_try: Callable[[], Flags]) -> Explored | None:
        """The row to run instead of `row`, the best by prediction; None where that is the one to run.

        `value_ms`: what is compared, less is better, inf for what may not run; `may_try`: what would be in time even if
        it is slower than expected, asked only where it is needed. Called for each
        request that leaves the choice and may try something (`decide.py`, the planner).
        """
        self._asked += 1
        if self._remote[row]:
            self._patience, self._unused = UNHEARD_REQUESTS, 0
            self._away += 1
        else:
            self._unheard, self._unused = self._unheard + 1, self._unused + 1
            self._away, self._away_patience = 0, AWAY_REQUESTS
        draws, unheard = self._asked % EVERY == 0, self._unheard >= self._patience
        unseen = self.device_doubted and self._away >= self._away_patience
        predicted_ms, ratio = float(value_ms[row]), self._ratio
        seen_ms = value_ms if ratio is None else value_ms * ratio
        enough_ms = float(seen_ms[row]) * (1.0 - GAINS)
        if not draws and not unheard and not unseen and (ratio is None or float(seen_ms.min()) >= enough_ms):
            self._earn(min(float(seen_ms[row]), predicted_ms))
            return None
        if unheard:
            self._unheard = 0  # this was the companion's turn, whatever comes of it
        if unseen:
            self._away, self._away_patience = 0, min(2 * self._away_patience, UNHEARD_MAX)
        fits = may_try()
        if not fits[row]:
            return None
        arms: Rows = (fits & (value_ms <= NEAR * predicted_ms)).nonzero()[0]
        best, by_residual = row, None
        other = int(arms[seen_ms[arms].argmin()])
        if ratio is not None and float(seen_ms[other]) < enough_ms:
            best, by_residual = (
                other,
                Explored(row=other, cost_ms=0.0, why=_measured(float(ratio[row]), float(ratio[other]))),
            )
        best_ms = float(seen_ms[best])
        self._earn(min(best_ms, predicted_ms))
        tried = self._sample(arms, seen_ms) if draws else None
        if tried in (None, best) and unheard:
            there = (fits & self._remote).nonzero()[0]
            tried = int(there[seen_ms[there].argmin()]) if there.size else None
        if tried in (None, best) and unseen:
            here = (fits & ~self._remote).nonzero()[0]
            tried = int(here[seen_ms[here].argmin()]) if here.size else None
        if tried is None or tried == best:
            return by_residual
        cost_ms = max(float(seen_ms[tried]) - best_ms, 0.0)
        affordable = cost_ms <= self._saved_ms
        if self._remote[tried] and unheard:
            in_vain = self._unused >= USED_WITHIN or not affordable
            self._patience = min(2 * self._patience, UNHEARD_MAX) if in_vain else UNHEARD_REQUESTS
        if not affordable:
            return by_residual
        self._saved_ms -= cost_ms
        self.spent_ms += cost_ms
        share = self.spent_ms / self.earned_ms if self.earned_ms > 0.0 else 0.0
        return Explored(
            row=tried,
            cost_ms=cost_ms,
            why=(
                f"to see whether it is as slow as predicted, {cost_ms:.1f} ms over the best (tries took {share:.1%} of "
                "what all requests took so far)"
            ),
        )

    def observe(self, row: int, measured_ms: float, predicted_ms: float) -> None:
        """A request that ran as this row took `measured_ms` in all."""
        if predicted_ms <= 0.0 or measured_ms <= 0.0:
            return
        if self._remote[row]:
            self._unheard = 0
        off = math.log(measured_ms / predicted_ms)
        if off < -NEWS and self._remote[row]:
            self._patience = 1
        elif off < -NEWS:
            self._away_patience = 1
        noise = math.sqrt(self._noise2)
        innovation = off - self._common - self._mean(row)
        limit = CLIP * math.hypot(noise, PRIOR_SIGMA)
        innovation = min(max(innovation, -limit), limit)
        believed = self._common + self._mean(row) + innovation
        self._weight *= FADE
        self._sum *= FADE
        self._weight[row] += 1.0
        self._sum[row] += believed - self._common
        self._common = COMMON_FADE * (self._common + COMMON_GAIN * innovation)
        self._noise2 += NOISE_GAIN * (innovation * innovation - self._noise2)
        self._noise2 = max(self._noise2, NOISE_MIN * NOISE_MIN)
        self._feel()

    def rearrange(self, remote: Flags, former: Sequence[int | None]) -> None:
        """The plans lie in other rows now; `former`: where each lay, None for one that is new."""
        known, rows = np.array([row is not None for row in former]), np.array([row or 0 for row in former])
        self._remote = remote
        self._weight = np.where(known, self._weight[rows], 0.0)
        self._sum = np.where(known, self._sum[rows], 0.0)
        self._feel()

    def forget_remote(self) -> None:
        """Another companion, or another way to it: what its plans were off by, and how often it was asked in vain."""
        self._weight[self._remote] = self._sum[self._remote] = 0.0
        self._unheard, self._patience, self._unused = 0, UNHEARD_REQUESTS, USED_WITHIN
        self._feel()

    def as_mapping(self) -> Mapping[str, float]:
        """For `isthmus status`: what trying was expected to cost, and its share of what all requests took."""
        share = self.spent_ms / self.earned_ms if self.earned_ms > 0.0 else 0.0
        return {"cost_ms": round(self.spent_ms, 3), "share": round(share, 5)}

    def _earn(self, best_ms: float) -> None:
        if math.isnan(self._saved_ms):
            self._saved_ms = START_SHARE * best_ms
        self.earned_ms += best_ms
        self._saved_ms = min(self._saved_ms + COST_SHARE * best_ms, SAVED_MAX * best_ms)

    def _feel(self) -> None:
        means = self._sum / (self._weight + self._prior_weight)
        self._ratio = np.exp(means) if np.abs(means).max() > FELT else None

    def _sample(self, arms: Rows, value_ms: Floats) -> int | None:
        """The arm that a draw from what is known of each makes the best; None where there is nothing to choose from."""
        if arms.size < 2:
            return None
        sigma = np.sqrt(self._noise2 / (self._weight[arms] + self._prior_weight))
        drawn = value_ms[arms] * np.exp(sigma * self._random.standard_normal(arms.size))
        return int(arms[drawn.argmin()])

    @property
    def _prior_weight(self) -> float:
        """How many measurements the prediction is worth."""
        return self._noise2 / (PRIOR_SIGMA * PRIOR_SIGMA)

    def _mean(self, row: int) -> float:
        return float(self._sum[row] / (self._weight[row] + self._prior_weight))


def _measured(ratio: float, other_ratio: float) -> str:
    """Why another row runs than the one with `ratio` (measured / predicted), as a clause behind both their names."""
    slower, faster = ratio - 1.0, 1.0 - other_ratio
    if slower > faster:
        return f"which has been {slower:.1%} slower than predicted"
    return f"it has been {faster:.1%} faster than predicted" if faster > 0.0 else "it is still the faster as measured"
