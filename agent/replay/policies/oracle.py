"""The best that could have been done request by request, with the trace known: what regret is measured against."""

from __future__ import annotations

import math

from agent.replay.world import Arrival, Policy
from split.plan.plan import LOCAL, Plan


class Oracle(Policy):
    """Knows the trace, every draw and all that is under way, and replays each plan of each request in it.

    Greedy: it takes the plan whose own answer comes first, one in time before one that is late, whatever that does to
    requests to come; under a backlog that mixes plans a policy can beat it. Plans whose answer on an idle link and an
    idle device would already come later than the best one found are not replayed.
    """

    name = "oracle"

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        view = self._view
        least_ms = {plan: view.least_ms(plan) for plan in view.world.plans(arrival) if _may_travel(plan, arrival)}
        best, best_ms = LOCAL, math.inf
        for plan in sorted(least_ms, key=least_ms.__getitem__):
            if least_ms[plan] >= best_ms:
                break
            if (total_ms := view.foresee(plan).total_ms) < best_ms:
                best, best_ms = plan, total_ms
        return best


def _may_travel(plan: Plan, arrival: Arrival) -> bool:
    return plan.codec != "encoded" or arrival.encoded_bytes > 0
