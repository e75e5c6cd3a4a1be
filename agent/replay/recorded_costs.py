"""What plans cost, by the requests that were served by them.

A plan that served some costs what these took, stage by stage, in the median. Another one costs what its table says,
times what the others were off from theirs: those of the same segment, or of the same codec, or all of the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from agent.record import Table
from agent.replay.happened import LEAST_MS, Happened, local_ms, plans_of
from agent.replay.world import Stages
from split.plan.plan import LOCAL, Plan

Models = Mapping[str, Mapping[Plan, Stages]]

DEVICE: Final = ("head_ms", "encode_ms", "decode_ms")
COMPANION: Final = ("cloud_decode_ms", "tail_ms")
ENOUGH: Final = 3
"""Measurements that a factor is taken from; fewer are of the next wider kind."""


def thought_of(happened: Sequence[Happened]) -> Models:
    """Plans of each model of the world (those that the contract allows, and all that ran), with what the device took
    them to cost: as profiled and as the companion had told, in the model's last table."""
    used: dict[str, set[Plan]] = defaultdict(lambda: {LOCAL})
    encoded: dict[str, list[int]] = defaultdict(list)
    for one in happened:
        used[one.model].update((one.chosen, one.ran or LOCAL))
        if one.request.encoded_bytes:
            encoded[one.model].append(one.request.encoded_bytes)
    found: dict[str, dict[Plan, Stages]] = {}
    for one in {each.model: each for each in happened}.values():
        sizes = encoded[one.model] or [0]
        found[one.model] = {
            plan: _stages(one.table, number, one.scale, round(sum(sizes) / len(sizes)))
            for number, plan in enumerate(plans_of(one.table))
            if one.table.plans[number].allowed > one.request.privacy or plan in used[one.model]
        }
    return found


def models_of(happened: Sequence[Happened], thought: Models, slowdown: float) -> Models:
    """What the plans of each model cost. `thought`: what `thought_of` says of the same requests."""
    measured: dict[tuple[str, Plan], list[dict[str, float]]] = defaultdict(list)
    for one in happened:
        if one.as_chosen:
            measured[one.model, one.chosen].append(_stages_of(one, slowdown))
    bases = {one.model: one.table.model for one in happened}
    off = _Off()
    took: dict[tuple[str, Plan], dict[str, float]] = {}
    for (model, plan), several in measured.items():
        took[model, plan] = {name: median(each[name] for each in several) for name in several[0]}
        for each in several:
            off.note(bases[model], plan, each, thought[model][plan])
    return {
        model: {
            plan: _with(stages, took.get((model, plan)) or off.expected(bases[model], plan, stages))
            for plan, stages in plans.items()
        }
        for model, plans in thought.items()
    }


@dataclass(slots=True)
class _Off:
    """Measured / thought, as logarithms, by kind of stage: of one segment or codec of a model, and of the model."""

    logs: dict[tuple[str, str, str | None], list[float]] = field(default_factory=lambda: defaultdict(list))

    def note(self, base: str, plan: Plan, took: Mapping[str, float], thought: Stages) -> None:
        for name in (*DEVICE, *COMPANION):
            expected_ms = getattr(thought, name)
            if expected_ms > 0.0 and took[name] > 0.0:
                for kind in (_kind(name, plan), None):
                    self.logs[base, name, kind].append(math.log(took[name] / expected_ms))

    def expected(self, base: str, plan: Plan, thought: Stages) -> dict[str, float]:
        found = {}
        for name in (*DEVICE, *COMPANION):
            logs = self.logs.get((base, name, _kind(name, plan)), [])
            if len(logs) < ENOUGH:
                logs = self.logs.get((base, name, None), [])
            found[name] = getattr(thought, name) * (math.exp(median(logs)) if len(logs) >= ENOUGH else 1.0)
        return found


def _kind(name: str, plan: Plan) -> str:
    """What a stage's time hangs on: the segment that runs, or the codec."""
    return str(plan.cut or plan.placement) if name in ("head_ms", "tail_ms") else str(plan.codec)


def _stages_of(one: Happened, slowdown: float) -> dict[str, float]:
    """Of one request; device stages without the slowdown. What nothing accounts for is the device's where all ran
    there."""
    ms = one.stages_ms
    head_ms = ms["head"]
    if one.chosen == LOCAL:
        head_ms = max(local_ms(one) - ms["image"], LEAST_MS)
    return {
        "head_ms": head_ms / slowdown,
        "encode_ms": ms["encode"] / slowdown,
        "decode_ms": ms["decode"] / slowdown,
        "cloud_decode_ms": ms["cloud_decode"],
        "tail_ms": ms["tail"],
    }


def _with(thought: Stages, took: Mapping[str, float]) -> Stages:
    return replace(
        thought,
        head_ms=took["head_ms"],
        encode_ms=took["encode_ms"],
        decode_ms=took["decode_ms"],
        cloud_decode_ms=took["cloud_decode_ms"],
        tail_ms=took["tail_ms"],
    )


def _stages(table: Table, number: int, scale: float, encoded_bytes: int) -> Stages:
    costs = table.plans[number]
    plan = plans_of(table)[number]
    encoded, head_ms = plan.codec == "encoded", costs.head_ms * scale
    return Stages(
        image_ms=0.0 if encoded else table.image_ms,
        head_ms=max(head_ms, LEAST_MS) if plan == LOCAL else head_ms,
        encode_ms=costs.encode_ms * scale,
        up_bytes=encoded_bytes if encoded else round(costs.up_bytes * scale),
        cloud_decode_ms=costs.cloud_decode_ms * scale,
        tail_ms=costs.tail_ms * scale,
        down_bytes=round(costs.down_bytes * scale),
        decode_ms=costs.decode_ms * scale,
        finish_ms=costs.finish_ms * scale + (table.image_ms if encoded else 0.0),
    )
