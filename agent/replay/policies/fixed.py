"""Policies that know nothing and learn nothing: always the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from agent.replay.bound import demands_ms
from agent.replay.course import Course
from agent.replay.flight import Flight
from agent.replay.simulate import simulate
from agent.replay.world import Arrival, Policy, World
from split.plan.plan import LOCAL, Placement, Plan

TRIED: Final = 8
"""Plans that are replayed for the best of them; a table has up to a hundred."""
LOOKED_AT: Final = 200
"""Requests by which they are chosen."""


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
    """The best single plan per model, known only afterwards: over all requests of its model (without those of others),
    the one with the least mean latency. Replayed are those that would be the best without queues (`_about_ms`)."""
    plans = {}
    for model in world.models:
        asked = tuple(arrival for arrival in world.arrivals if arrival.model == model)
        alone, with_pictures = replace(world, arrivals=asked), all(arrival.encoded_bytes for arrival in asked)
        about_ms = _about_ms(alone, [plan for plan in world.models[model] if plan.codec != "encoded" or with_pictures])

        def total_ms(plan: Plan, alone: World = alone, model: str = model) -> float:
            return sum(outcome.total_ms for outcome in simulate(alone, Fixed("", {model: plan})))

        tried = sorted(about_ms, key=about_ms.__getitem__)[:TRIED]
        plans[model] = min(tried, key=total_ms) if asked else LOCAL
    return Fixed("best static plan", plans)


def _about_ms(world: World, plans: Sequence[Plan]) -> Mapping[Plan, float]:
    """What a request takes by each plan where nothing else is under way, in the mean over some of them that are evenly
    spread, and half of what the busiest station is behind at the end, where it cannot keep up."""
    course, arrivals, draws = Course(world.trace), world.arrivals, world.draws()
    numbers = range(0, len(arrivals), len(arrivals) // LOOKED_AT + 1)
    span_ms = (arrivals[-1].at_s - arrivals[0].at_s) * 1000.0 if arrivals else 0.0
    found = {}
    for plan in plans:
        alone_ms, demands = [], []
        for number in numbers:
            arrival, at_s = arrivals[number], arrivals[number].at_s
            alone_ms.append(Flight.of(world, number, plan, draws[number], sent=True).alone_ms(course, at_s))
            demands.append(
                demands_ms(
                    world.plans(arrival)[plan],
                    course.at(at_s),
                    slowdown=world.slowdown,
                    encoded_bytes=arrival.encoded_bytes,
                )
            )
        busiest_ms = len(arrivals) * max(map(fmean, zip(*demands, strict=True)), default=0.0)
        found[plan] = (fmean(alone_ms) if alone_ms else 0.0) + max(busiest_ms - span_ms, 0.0) / 2.0
    return found
