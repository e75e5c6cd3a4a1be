"""`fallback.strategy: shadow`: behind an answer of the companion's, an idle device runs the whole itself and compares
(`reruns.py`).

What is found says only whether later requests go to the companion (`split/plan/shadow.py`). Not a check of golden
outputs: those are compared before a model is shared, these are the users' inputs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from agent.intake import InferenceRequest
from agent.journal import Journal
from agent.outcome import Outcome
from agent.planner import Planner
from agent.reruns import Reruns
from agent.served_model import ServedModel
from split.codec.fidelity import divergence, farthest
from split.codec.golden import bound_of
from split.plan.plan import LOSSLESS_CODECS, Placement
from split.plan.shadow import Agreement
from split.profiles.boxes import Boxes
from split.profiles.contract import Contract
from split.tensor import Tensors

log = logging.getLogger(__name__)

FAR_RATIO: Final = 10.0
"""Codecs with settings keep the bound in the mean (`spot_checks.py` watches that): one answer may be farther off. Of
exponentially distributed distances one in 22,000 is ten times the mean."""
FAR_SHARE: Final = 0.9
"""Where the bound is on a share of detections, ten times as far may be all of them: an answer of which more are others
differs."""


class Shadowing:
    """Lives on the event loop, as long as the daemon."""

    def __init__(self, *, planner: Planner, journal: Journal, reruns: Reruns, peer: Callable[[], str]) -> None:
        """`peer`: the name of the companion that is connected, by its certificate."""
        self._planner = planner
        self._journal = journal
        self._reruns = reruns
        self._peer = peer
        self._agreements: WeakKeyDictionary[ServedModel, tuple[Contract, str, Agreement]] = WeakKeyDictionary()
        """With the contract and the companion that they are counted under; gone with the model."""

    def answered(self, request: InferenceRequest, outcome: Outcome, whole_ms: Callable[[], float]) -> None:
        """A request is answered, and its answer on its way; `whole_ms`: what the whole would take here, opening in."""
        if outcome.ran.placement is Placement.LOCAL or outcome.fallback or self._reruns.running:
            return
        peer = self._peer()
        agreement, now_s = self._agreement(request, peer), asyncio.get_running_loop().time()
        if not agreement.due(now_s):
            return
        local_ms = whole_ms()
        then = partial(self._compared, request.model.name, peer, agreement)
        if self._reruns.begin(request, outcome, local_ms, partial(_differs, request, outcome), then):
            agreement.begun(local_ms, now_s)

    def _agreement(self, request: InferenceRequest, peer: str) -> Agreement:
        model = request.model
        contract, counted, agreement = self._agreements.get(model, (None, "", None))
        # A request has gone to the companion: where that was over, the model is known anew.
        if agreement is None or contract is not model.contract or counted != peer or agreement.failed:
            agreement = Agreement(model.contract.behaviour.fallback.agreement_min)
            self._agreements[model] = model.contract, peer, agreement
        return agreement

    def _compared(self, name: str, peer: str, agreement: Agreement, why_not: str | None) -> None:
        if why_not is None:
            return
        self._journal.compared(name, agrees=not why_not)
        if agreement.compared(why_not):
            log.warning("model=%s %s", name, agreement.failed)
            self._planner.distrust(name, peer, agreement.failed)


def _differs(request: InferenceRequest, outcome: Outcome, expected: Tensors) -> str | None:
    """Why the companion's outputs are not the device's, as a sentence; "" where they agree, None where the contract
    looks at outputs that were not asked for.

    Bit-exact plans: as far as two honest sides may be apart, or as the contract allows; lossy plans: as it allows.
    """
    model, plan = request.model, outcome.ran
    fidelity = model.contract.data.fidelity
    bound = fidelity.bound if outcome.decision.chosen.level is None else FAR_RATIO * fidelity.bound
    profile = model.profile
    same = bound_of(profile.self_difference if profile is not None else 0.0)
    found = {name: outcome.outputs[name] for name in expected}
    exact = plan.codec in LOSSLESS_CODECS
    apart = [name for name in expected if not (exact and divergence("relative", found[name], expected[name]) <= same)]
    if isinstance(fidelity.by, Boxes) and apart:
        if not fidelity.by.outputs <= expected.keys():
            return None
        far = farthest(fidelity.by, found, expected, request.items)
        allowed = max(min(bound, FAR_SHARE), fidelity.bound)
        return "" if far <= allowed else f"{far:.3g} of {plan}'s detections are others, allowed is {allowed:g}"
    for name in apart:
        far = farthest(fidelity.measure, {name: found[name]}, {name: expected[name]}, request.items)
        if not far <= bound:
            return f"output {name!r} of {plan} is off by {far:.3g} ({fidelity.measure}), allowed is {bound:g}"
    return ""
