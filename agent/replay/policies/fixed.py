"""Policies that know nothing and learn nothing: always the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agent.replay.simulate import simulate
from agent.replay.world import Arrival, Policy, World
from split.plan.plan import LOCAL, Placement, Plan


class Fixed(Policy):
    """One plan per model for every request; local for models that are not named."""

    def __init__(self, name: str, plans: Mapping[str, Plan]) -> None:
        self.name = name
        self._plans = plans

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        return self._plans.get(arrival.model, LOCAL)


class Local(Policy):
    """Do nothing: the whole model on the device."""

    name = "local"

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        return LOCAL


class Offload(Policy):
    """Everything to the companion, with one codec; local for what cannot travel so."""

    def __init__(self, codec: str) -> None:
        self.name = f"offload {codec}"
        self._plan = Plan(placement=Placement.OFFLOAD, codec=codec)

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        if self._plan.codec == "encoded" and not arrival.encoded_bytes:
            return LOCAL
        return self._plan if self._plan in self._view.world.plans(arrival) else LOCAL


def best_static(world: World) -> Fixed:
    """The best single plan per model, known only afterwards: each plan is replayed over all requests of its model
    (without those of others), the one with the least mean latency is kept."""
    plans = {}
    for model in world.models:
        asked = tuple(arrival for arrival in world.arrivals if arrival.model == model)
        alone, with_pictures = replace(world, arrivals=asked), all(arrival.encoded_bytes for arrival in asked)

        def total_ms(plan: Plan, alone: World = alone, model: str = model) -> float:
            return sum(outcome.total_ms for outcome in simulate(alone, Fixed("", {model: plan})))

        candidates = [plan for plan in world.models[model] if plan.codec != "encoded" or with_pictures]
        plans[model] = min(candidates, key=total_ms) if asked else LOCAL
    return Fixed("best static plan", plans)
