"""When the device begins to finish a request that the companion is expected to answer, before it must: one time for
each request, computed when its bytes have left.

A reply takes a log-normal time, whose mean and spread are those of the prediction, or it is stalled: a lost packet, a
connection that died, a companion that hangs. How many stall and how far the others scatter is learned (`Replies`).
Log-normal because delays are positive, skewed, and products of many factors (Limpert et al. 2001, BioScience 51); the
second part because its tail ends long before that of real replies does (Dean and Barroso 2013, CACM 56: hedged
requests). With S the share of the log-normal that comes later than t, and e the share of stalled ones:

    P(late | not there at t) = (e·[a stalled one is late] + (1 − e)·S(late)) / (e + (1 − e)·S(t))
    P(stalled | not there at t) = e / (e + (1 − e)·S(t))

Both grow with t, so that each bound gives one t, in closed form. Not the latest start (`slack.py`): that holds whatever
is expected of the companion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

STALL_MS: Final = 200.0
"""What a stalled reply is expected to take longer: the least retransmission time-out of Linux (TCP_RTO_MIN, HZ / 5)."""

EARLIEST_SHARE: Final = 0.05
"""Only to gain time, no more requests than these are hedged while nothing is stalled: Dean and Barroso wait for the
95th percentile, which bounds the additional work by 5 %."""

GAIN_RATIO: Final = 0.2
GAIN_MS: Final = 2.0
"""What the local finish must be expected to gain, of itself and in all: it takes energy, and the worker's next turn."""

REPLY_STAGES: Final = ("up", "cloud_queue", "cloud_decode", "tail", "down", "decode")
"""Of a prediction: what lies between a request's last byte handed over and its reply."""

_TURNS: Final = (("up",), ("cloud_decode", "tail"), ("down",))
"""Stages by station, each of which takes one request at a time: link up, companion, link down."""

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedging:
    """What a service class allows."""

    late_share: float
    """The finish begins where the companion is late in more cases than these; inf: never for that."""
    to_gain_time: bool
    """Whether an idle device may begin only because the reply is expected later than its own."""


HEDGING: Final[Mapping[str, Hedging]] = {
    "gold": Hedging(late_share=0.05, to_gain_time=True),
    "silver": Hedging(late_share=0.10, to_gain_time=True),
    "bronze": Hedging(late_share=math.inf, to_gain_time=False),
}
"""By `behaviour.class`. Bronze waits for its latest start: its work is never done twice to be faster."""


class Replies:
    """How replies come, compared with what was predicted; of one device, all models together: they share the link.

    Counts fade, so that a link which has become better is believed after some hundred replies.
    """

    FADE: Final = 0.995
    """Per reply: 200 of them are remembered."""
    PRIOR_STALLED: Final = 1.0
    PRIOR_REPLIES: Final = 100.0
    """Before any is seen, one in a hundred: what a link with 1 % loss does to a request of few packets."""
    SCATTER: Final = 0.1
    SCATTER_GAIN: Final = 0.05
    """Standard deviation of log(measured / predicted), at least and at first; and the weight of one reply."""
    STALLED_SIGMAS: Final = 3.0
    """So far beyond its log-normal a reply was stalled: 1.3 in a thousand are so without being it."""

    __slots__ = ("_replies", "_stalled", "_variance")

    def __init__(self) -> None:
        self._replies = self._stalled = 0.0
        self._variance = self.SCATTER * self.SCATTER

    @property
    def stalled_share(self) -> float:
        """0 < share < 1."""
        return (self.PRIOR_STALLED + self._stalled) / (self.PRIOR_REPLIES + self._replies)

    @property
    def scatter(self) -> float:
        """Standard deviation of log(measured / predicted) of those that were not stalled, upwards."""
        return max(math.sqrt(self._variance), self.SCATTER)

    def came(self, took_ms: float, expected_ms: float, sigma_ms: float) -> None:
        """A reply came `took_ms` after its request had left."""
        if expected_ms <= 0.0:
            return
        stalled = self._is_stalled(took_ms, expected_ms, sigma_ms)
        self._count(stalled)
        if not stalled:
            # Twice those above, none of those below: the upper half's variance. One that is early says nothing of them.
            above = max(math.log(max(took_ms, 1e-3) / expected_ms), 0.0)
            self._variance += self.SCATTER_GAIN * (2.0 * above * above - self._variance)

    def overtaken(self, waited_ms: float, expected_ms: float, sigma_ms: float) -> None:
        """After so long the device had the answer itself, or the connection was lost. Before a reply would count as
        stalled, that tells nothing of it."""
        if expected_ms > 0.0 and self._is_stalled(waited_ms, expected_ms, sigma_ms):
            self._count(True)

    def _is_stalled(self, ms: float, expected_ms: float, sigma_ms: float) -> bool:
        spread = self.spread(expected_ms, sigma_ms)
        return math.log(max(ms, 1e-3) / expected_ms) > self.STALLED_SIGMAS * spread

    def _count(self, stalled: bool) -> None:
        self._replies = self._replies * self.FADE + 1.0
        self._stalled = self._stalled * self.FADE + stalled

    def spread(self, expected_ms: float, sigma_ms: float) -> float:
        """σ of the logarithm: what the prediction says of itself, and no less than what replies have shown."""
        return max(math.sqrt(math.log1p((sigma_ms / expected_ms) ** 2)), self.scatter)


def turn_ms(stages_ms: Mapping[str, float], rtt_ms: float) -> float:
    """How much longer a request waits for its reply behind one of these predicted stages: the longest of what that
    occupies link or companion. Half a round trip each way is in `up` and in `down`, and occupies nothing."""
    travels_ms = {"up": rtt_ms / 2.0, "down": rtt_ms / 2.0}
    return max(sum(stages_ms[stage] - travels_ms.get(stage, 0.0) for stage in station) for station in _TURNS)


def expected_reply_ms(stages_ms: Mapping[str, float], turns_ms: Iterable[float]) -> float:
    """Mean time until the reply to a request of these predicted stages, from when its bytes are handed over, behind
    others that wait for theirs: the `turn_ms` of each."""
    return sum(stages_ms[stage] for stage in REPLY_STAGES) + sum(turns_ms)


def hedge_after_ms(
    replies: Replies,
    hedging: Hedging,
    *,
    expected_ms: float,
    sigma_ms: float,
    finish_ms: float,
    late_after_ms: float,
    may_gain_time: bool,
) -> float:
    """When to begin the local finish, in ms since the request left; inf: not before it must.

    `expected_ms`, `sigma_ms`: mean and standard deviation of the reply's time, from the same moment. `finish_ms`: what
    the device would need. `late_after_ms`: a reply that comes then comes too late. `may_gain_time`: whether the
    objective allows the energy of work that may be in vain.
    """
    if expected_ms <= 0.0 or math.isinf(hedging.late_share):
        return math.inf
    spread = replies.spread(expected_ms, sigma_ms)
    centre = math.log(expected_ms) - spread * spread / 2.0  # the mean of a log-normal is exp(μ + σ²/2)
    stalled = replies.stalled_share

    def later_than(ms: float) -> float:
        return 0.5 * math.erfc((math.log(ms) - centre) / (spread * math.sqrt(2.0))) if ms > 0.0 else 1.0

    def reached(share: float) -> float:
        """The time that so many of those that are not stalled take longer than."""
        if share >= 1.0:
            return 0.0
        return math.exp(centre - spread * _NORMAL.inv_cdf(share)) if share > 0.0 else math.inf

    late = (1.0 - stalled) * later_than(late_after_ms)
    if expected_ms + STALL_MS > late_after_ms:
        late += stalled
    after_ms = reached((late / hedging.late_share - stalled) / (1.0 - stalled))
    needed_ms = finish_ms * (1.0 + GAIN_RATIO) + GAIN_MS
    if may_gain_time and hedging.to_gain_time and needed_ms < STALL_MS:
        surely_stalled = needed_ms / STALL_MS
        share = stalled * (1.0 - surely_stalled) / (surely_stalled * (1.0 - stalled))
        after_ms = min(after_ms, reached(min(share, EARLIEST_SHARE)))
    return after_ms
