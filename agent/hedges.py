"""When the finish of a request that waits for the companion begins though it need not yet, and when a reply is overdue:
what `split/plan/hedging.py` is told of requests, and learns of replies. `agent/lateness.py` is the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from agent.intake import InferenceRequest
from split.plan.hedging import HEDGING, Replies, expected_reply_ms, hedge_after_ms, turn_ms
from split.plan.plan import Decision
from split.plan.slack import MARGIN_MS

QUICK: Final = 0.9
"""Of its expected time, what a finish takes that is quick: one run varies by a few percent (`slack.MARGIN_RATIO`)."""

NEXT_MARGIN_MS: Final = 20.0
"""What a request has beyond its local time (I3), behind a finish that has just begun before it had to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedge:
    """Of one request, from when its bytes have left."""

    finish_ms: float
    """What the device would need for what is missing."""
    after_ms: float
    """From then on its finish begins while the worker has nothing else to do; inf: not before it must."""
    overdue_at_s: float
    """A reply that has not come by then says something about the companion: it is later than it may be, and a hedge
    would have the answer by now. Before, a device may be early because it is busy, or because it is not."""
    replies: Replies
    sent_at_s: float
    expected_ms: float
    sigma_ms: float

    def came(self, now_s: float) -> None:
        """The reply was there first."""
        self.replies.came((now_s - self.sent_at_s) * 1000, self.expected_ms, self.sigma_ms)

    def overtaken(self, now_s: float) -> None:
        """The device's own answer was."""
        self.replies.overtaken((now_s - self.sent_at_s) * 1000, self.expected_ms, self.sigma_ms)


class Hedges:
    """Lives as long as the daemon."""

    def __init__(self, *, battery_low: Callable[[], bool]) -> None:
        self._battery_low = battery_low
        self._replies = Replies()
        self._turns_ms: dict[str, float] = {}
        """By request that waits for the companion: how much longer one behind it waits."""

    @contextmanager
    def hedge(
        self, request: InferenceRequest, decision: Decision, *, finish_ms: float, whole_ms: float, now_s: float
    ) -> Iterator[Hedge]:
        """While a request waits whose bytes have just left. `whole_ms`: what the next one like it needs here; where
        that would be late behind a finish that need not begin yet, none does. Nor does one where the caller asked for
        the companion: it is waited for as long as the deadline allows."""
        chosen, behaviour = decision.chosen, request.model.contract.behaviour
        expected_ms = expected_reply_ms(chosen.stages_ms, self._turns_ms.values())
        after_ms = hedge_after_ms(
            self._replies,
            HEDGING[behaviour.service_class],
            expected_ms=expected_ms,
            sigma_ms=chosen.sigma_ms,  # of the whole prediction, whose device stages are over: a little too large
            finish_ms=finish_ms,
            late_after_ms=(request.deadline_at_s - now_s) * 1000 - MARGIN_MS,
            may_gain_time=behaviour.weights.energy <= behaviour.weights.latency and not self._battery_low(),
        )
        overdue_at_s = request.received_at_s + chosen.risk_ms / 1000
        if after_ms < math.inf:
            overdue_at_s = max(overdue_at_s, now_s + (after_ms + QUICK * finish_ms) / 1000)
        forced = request.facts.mode is not None or request.facts.cut is not None
        if forced or finish_ms + whole_ms + NEXT_MARGIN_MS > (request.deadline_at_s - request.received_at_s) * 1000:
            after_ms = math.inf
        self._turns_ms[request.id] = turn_ms(chosen.stages_ms, decision.link["rtt_ms"])
        try:
            yield Hedge(
                finish_ms=finish_ms,
                after_ms=after_ms,
                overdue_at_s=overdue_at_s,
                replies=self._replies,
                sent_at_s=now_s,
                expected_ms=expected_ms,
                sigma_ms=chosen.sigma_ms,
            )
        finally:
            del self._turns_ms[request.id]
