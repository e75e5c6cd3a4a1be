"""A threshold with hysteresis: what axonmesh 0.9 does with its split toolkit, and many a product without saying so."""

from __future__ import annotations

import math
from typing import Final

from agent.replay.policies.monitor import Monitoring
from agent.replay.world import Arrival
from split.plan.plan import LOCAL, Placement, Plan

GAIN: Final = 0.3
UPGRADE_AFTER: Final = 3
BUDGET_MS: Final = 50.0
"""What a request may spend on the link."""


class Threshold(Monitoring):
    """The cheapest edge share whose bytes fit what the link carries in a budget, at the exponentially weighted mean of
    its rate; local where nothing fits. A plan with fewer bytes is taken at once, one with more after three requests in
    a row that would have had it. Boundaries travel as int8, as there."""

    name = "threshold with hysteresis"

    def __init__(self, *, budget_ms: float = BUDGET_MS) -> None:
        super().__init__(GAIN)
        self._budget_ms = budget_ms
        self._now: dict[str, Plan] = {}
        self._better: dict[str, int] = {}

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        plans, model, rate = self._view.world.plans(arrival), arrival.model, self.rate_bytes_per_ms
        if math.isnan(rate):
            return LOCAL
        fits = [
            plan for plan, stages in plans.items() if plan.codec == "int8" and stages.up_bytes <= rate * self._budget_ms
        ]
        wanted = min(fits, key=lambda plan: plans[plan].head_ms, default=LOCAL)
        current = self._now.get(model, LOCAL)
        if wanted == current:
            self._better[model] = 0
        elif _bytes(wanted, plans[wanted].up_bytes) < _bytes(current, plans[current].up_bytes):
            self._now[model], self._better[model] = wanted, 0
        else:
            self._better[model] = self._better.get(model, 0) + 1
            if self._better[model] >= UPGRADE_AFTER:
                self._now[model], self._better[model] = wanted, 0
        return self._now.get(model, LOCAL)


def _bytes(plan: Plan, up_bytes: int) -> int:
    return 0 if plan.placement is Placement.LOCAL else up_bytes
