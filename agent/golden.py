"""Golden inputs run on this device, for the comparison with a companion (I10) and to warm a model up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from agent.compute import Compute
from agent.repository import ServedModel
from split.codec.golden import golden_inputs, sample
from split.errors import EngineFailed, InvalidRequest
from split.ids import CutId
from split.tensor import Tensors

T = TypeVar("T")

BACKGROUND_S = 3600.0
"""Deadline of work nobody waits for: every request goes first."""


async def golden_on_device(compute: Compute, model: ServedModel, cut: CutId | None) -> Tensors:
    """Sampled golden outputs of the whole (cut None), or sampled boundary and outputs of head ∘ tail."""

    def work() -> Tensors:
        inputs = _inputs(model)
        if cut is None:
            return sample(model.whole().run(inputs))
        card = model.card.cut(cut)
        made = model.head(cut).run({name: inputs[name] for name in card.head_inputs})
        feeds = {spec.name: made[spec.name] for spec in card.boundary}
        feeds |= {name: inputs[name] for name in card.tail_inputs}
        return sample(made | model.tail(cut).run(feeds))

    return await _in_background(compute, work, model)


async def warm_up(compute: Compute, model: ServedModel) -> None:
    """Open the whole and run it once; InvalidModel when it cannot be opened. Inputs it refuses are no reason."""

    def work() -> None:
        segment = model.whole()
        try:
            segment.run(_inputs(model))
        except (EngineFailed, InvalidRequest):
            return

    await _in_background(compute, work, model)


def _inputs(model: ServedModel) -> Tensors:
    return golden_inputs(model.card.inputs, model.profile.dims if model.profile is not None else {})


async def _in_background(compute: Compute, work: Callable[[], T], model: ServedModel) -> T:
    deadline_at_s = asyncio.get_running_loop().time() + BACKGROUND_S
    expected_ms = model.profile.whole_ms if model.profile is not None else 0.0
    return (await compute.run(work, deadline_at_s=deadline_at_s, expected_ms=expected_ms)).value
