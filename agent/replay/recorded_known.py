"""What the device knew of the models in a record before their requests came: costs as its profile had them, the
companion's times as it had told them, what the contract asks. Nothing of what was measured afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from agent import record
from agent.replay.happened import Happened
from agent.replay.known import Known
from agent.replay.recorded_costs import Models
from agent.replay.world import Stages
from split.plan.plan import LOCAL, Placement, Plan
from split.profiles.contract import Behaviour, Fallback, Weights


def known_of(happened: Sequence[Happened], thought: Models) -> dict[str, Known]:
    """Of each model of the world. `thought`: `recorded_costs.thought_of` of the same requests."""
    asked = {one.model: one.table.behaviour for one in happened}
    return {model: _known(plans, asked[model]) for model, plans in thought.items()}


def _known(plans: Mapping[Plan, Stages], asked: record.Behaviour) -> Known:
    known = Known.of(_as_profiled(plans))
    contract = msgspec.structs.replace(known.contract, behaviour=_behaviour(asked))
    return replace(known, contract=contract, told=plans)


def _as_profiled(plans: Mapping[Plan, Stages]) -> Mapping[Plan, Stages]:
    """Payloads decoded at the device's speed, which the planner scales to the companion's again."""
    there_ms = max((one.tail_ms for plan, one in plans.items() if plan.placement is Placement.OFFLOAD), default=0.0)
    here_ms = plans[LOCAL].head_ms
    speed = there_ms / here_ms if there_ms > 0.0 and here_ms > 0.0 else 1.0
    return {
        plan: one if plan.codec == "encoded" else replace(one, cloud_decode_ms=one.cloud_decode_ms / speed)
        for plan, one in plans.items()
    }


def _behaviour(asked: record.Behaviour) -> Behaviour:
    latency, throughput, energy, cost = asked.weights
    return Behaviour(
        throughput_min_per_s=asked.rate_min_per_s,
        service_class=asked.service_class,
        weights=Weights(latency=latency, throughput=throughput, energy=energy, cost=cost),
        fallback=Fallback(strategy=asked.strategy),
    )
