"""`fallback.strategy: shadow`: behind an answer of the companion's, an idle device runs the whole itself and compares.

Nobody waits for it; what is found says only whether later requests go to the companion (`split/plan/shadow.py`).
One at a time over all models, never where a request that waits, or one like the last that comes meanwhile, would be
late by it. Not a check of golden outputs: those are compared before a model is shared, these are the users' inputs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

from agent.compute import Compute, Timed
from agent.intake import InferenceRequest, bytes_of
from agent.journal import Journal, Outcome
from agent.lateness import Lateness
from agent.planner import Planner
from agent.room import Holding
from agent.served_model import ServedModel
from agent.stages import Prepared, whole
from split.codec.fidelity import divergence
from split.codec.golden import bound_of
from split.errors import IsthmusError
from split.plan.plan import LOSSLESS_CODECS, Placement, Plan
from split.plan.shadow import Agreement
from split.profiles.contract import Contract
from split.tensor import Tensors

log = logging.getLogger(__name__)

MARGIN_MS: Final = 20.0
"""What a request has beyond its local time, as in I3, when a comparison has just begun before it."""


class Shadowing:
    """Lives on the event loop, as long as the daemon."""

    def __init__(self, *, planner: Planner, compute: Compute, lateness: Lateness, journal: Journal) -> None:
        self._planner = planner
        self._compute = compute
        self._lateness = lateness
        self._journal = journal
        self._agreements: WeakKeyDictionary[ServedModel, tuple[Contract, Agreement]] = WeakKeyDictionary()
        """With the contract that they are counted under; gone with the model."""
        self._running = False

    def answered(self, request: InferenceRequest, outcome: Outcome, whole_ms: Callable[[], float]) -> None:
        """A request is answered, and its answer on its way; `whole_ms`: what the whole would take here, opening in."""
        if outcome.ran.placement is Placement.LOCAL or self._running:
            return
        agreement, now_s = self._agreement(request), asyncio.get_running_loop().time()
        if not agreement.due(now_s):
            return
        local_ms, deadline_ms = whole_ms(), (request.deadline_at_s - request.received_at_s) * 1000
        if 2 * local_ms + MARGIN_MS > deadline_ms or not self._idle_for(local_ms):
            return
        holding = request.holding.beside()
        try:
            holding.made(sum(map(bytes_of, [*request.inputs.values(), *outcome.outputs.values()])))
            job = self._compute.run(
                lambda: _differs(request, outcome.ran, outcome.outputs, whole(request, Prepared.nothing(request))[0]),
                deadline_at_s=math.inf,
                expected_ms=local_ms,
            )
        except IsthmusError:  # no room for it now
            holding.release()
            return
        self._running = True
        agreement.begun(local_ms, now_s)
        job.add_done_callback(lambda job: self._compared(request, agreement, holding, job))

    def _agreement(self, request: InferenceRequest) -> Agreement:
        model = request.model
        contract, agreement = self._agreements.get(model, (None, None))
        # A request has gone to the companion: where that was over, another connection or contract has begun.
        if agreement is None or contract is not model.contract or agreement.failed:
            agreement = Agreement(model.contract.behaviour.fallback.agreement_min)
            self._agreements[model] = model.contract, agreement
        return agreement

    def _idle_for(self, ms: float) -> bool:
        return self._compute.queue_ms == 0.0 and self._lateness.has_room(ms)

    def _compared(
        self, request: InferenceRequest, agreement: Agreement, holding: Holding, job: asyncio.Future[Timed[str]]
    ) -> None:
        self._running = False
        holding.release()
        if (
            job.cancelled() or job.exception() is not None
        ):  # the daemon stops, or the whole fails here: nothing is known
            return
        name, why_not = request.model.name, job.result().value
        self._journal.compared(name, agrees=not why_not)
        if agreement.compared(why_not):
            log.warning("model=%s %s", name, agreement.failed)
            self._planner.forbid_remote(name, agreement.failed)


def _differs(request: InferenceRequest, plan: Plan, found: Tensors, expected: Tensors) -> str:
    """Why the companion's outputs are not the device's, as a sentence; "" where they agree.

    Bit-exact plans: as far as two honest sides may be apart, or as the contract allows; lossy plans: as it allows.
    """
    model = request.model
    fidelity = model.contract.data.fidelity
    profile = model.profile
    same = bound_of(profile.self_difference if profile is not None else 0.0)
    for name, wanted in expected.items():
        if plan.codec in LOSSLESS_CODECS and divergence("relative", found[name], wanted) <= same:
            continue
        far = divergence(fidelity.measure, found[name], wanted)
        if not far <= fidelity.bound:
            return f"output {name!r} of {plan} is off by {far:.3g} ({fidelity.measure}), allowed is {fidelity.bound:g}"
    return ""
