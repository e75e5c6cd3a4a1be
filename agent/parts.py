"""One request as several: its batch goes through a split plan in parts, so that one part's head runs while the one
before it travels, and the tail of one before that runs at the companion.

Each part is a request like any other on the worker, on the wire (its id is the request's and `/` and a number) and on
its way out: one that fails or is late is finished here from its own boundary, and costs the others nothing. Whether and
in how many is the decision's business (`split/plan/parting.py`); what leaves is one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from agent.intake import InferenceRequest
from agent.outcome import Outcome
from split.errors import EngineFailed
from split.ids import RequestId
from split.plan.plan import LOCAL, Decision

CarryOut = Callable[[InferenceRequest, Decision], Awaitable[Outcome]]

WAITS: Final = ("queue", "network", "cloud_queue")
"""Of the first part; the others wait for the parts before them, which is no time of its own. The rest adds up."""
OF_THE_WHOLE: Final = ("queue", "activate", "cloud_queue", "rest", "overlap")
"""Of a prediction: what does not depend on the rows, so that each part is expected to meet it as the whole would."""


async def in_parts(request: InferenceRequest, decision: Decision, carry_out: CarryOut) -> Outcome:
    """Carry out a decision of several parts. The first part that fails ends the others, and its error is raised."""
    parts = parts_of(request, decision.chosen.parts)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(part, request, decision, carry_out)) for part in parts]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return _joined(request, decision, [task.result() for task in tasks])


def parts_of(request: InferenceRequest, count: int) -> list[InferenceRequest]:
    """`count` parts at most, in the batch's order and as even as they can be but for the last; they share its inputs'
    memory."""
    dim = request.model.batch_dim
    assert dim is not None, "a model without a batch is not parted"
    rows = request.facts.sizes[dim]
    size = -(-rows // count)
    found = []
    for number, first in enumerate(range(0, rows, size)):
        inputs = {name: array[first : first + size] for name, array in request.inputs.items()}
        sizes = list(request.facts.sizes)
        sizes[dim] = min(size, rows - first)
        found.append(
            replace(
                request,
                id=RequestId(f"{request.id}/{number}"),
                inputs=inputs,
                facts=replace(request.facts, sizes=tuple(sizes)),
                holding=request.holding.beside(),
                part=number,
            )
        )
    return found


async def _one(part: InferenceRequest, request: InferenceRequest, decision: Decision, carry_out: CarryOut) -> Outcome:
    dim = request.model.batch_dim
    assert dim is not None
    share = part.facts.sizes[dim] / request.facts.sizes[dim]
    whole = decision.chosen
    stages_ms = _shared(whole.stages_ms, share, decision.link["rtt_ms"])
    chosen = replace(whole, parts=1, bytes=round(whole.bytes * share), stages_ms=stages_ms)
    with part:
        return await carry_out(part, replace(decision, chosen=chosen))


def _shared(stages_ms: Mapping[str, float], share: float, rtt_ms: float) -> dict[str, float]:
    """The stages of a part that has this share of the rows: half a round trip each way is in `up` and in `down`."""
    fixed_ms = {stage: stages_ms[stage] for stage in OF_THE_WHOLE} | {"up": rtt_ms / 2.0, "down": rtt_ms / 2.0}
    return {
        stage: fixed_ms.get(stage, 0.0) + share * (ms - fixed_ms.get(stage, 0.0)) for stage, ms in stages_ms.items()
    }


def _joined(request: InferenceRequest, decision: Decision, outcomes: Sequence[Outcome]) -> Outcome:
    outputs = {name: np.concatenate([one.outputs[name] for one in outcomes]) for name in request.outputs}
    dim, sizes = request.model.batch_dim, request.facts.sizes
    assert dim is not None
    if odd := [name for name, array in outputs.items() if array.shape[:1] != (sizes[dim],)]:
        raise EngineFailed(
            f"model {request.model.name!r} made {outputs[odd[0]].shape[:1]} rows of output {odd[0]!r} out of "
            f"{sizes[dim]}, in parts; it does not keep to its declared batch"
        )
    stages_ms: dict[str, float] = {}
    for number, one in enumerate(outcomes):
        for stage, ms in one.stages_ms.items():
            if number == 0 or stage not in WAITS:
                stages_ms[stage] = stages_ms.get(stage, 0.0) + ms
    here = [one.fallback for one in outcomes if one.ran == LOCAL]
    fallback = f"{len(here)} of {len(outcomes)} parts were finished here: {here[0]}" if here else ""
    return Outcome(
        outputs=outputs,
        decision=decision,
        ran=LOCAL if len(here) == len(outcomes) else decision.chosen.plan,
        fallback=fallback,
        stages_ms=stages_ms,
        total_ms=max(one.total_ms for one in outcomes),
        sent=any(one.sent for one in outcomes),
        doubled_ms=sum(one.doubled_ms for one in outcomes),
    )
