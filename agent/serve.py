"""One request, from admitted to answered. Open this file first.

    decide ─┬─ local    whole model on the worker
            ├─ split    head on the worker → encode → companion runs the tail → reply
            └─ offload  the input travels  → companion runs it all          → reply
                   └─ late or failed: what is missing runs here, from the boundary that is already there

Exactly one answer leaves, by the deadline or as a typed error. Deciding lives in the planner, running in compute,
sending in the uplink; this file only says in which order, and what happens when something does not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agent.compute import Compute
from agent.intake import InferenceRequest
from agent.journal import Journal, Outcome
from agent.lateness import Lateness
from agent.planner import Planner
from agent.stages import Prepared, finish, prepare, whole
from agent.uplink import RemoteReply, Uplink
from split.errors import DeadlineExceeded, EngineFailed, InvalidRequest, IsthmusError, UnknownModel
from split.ids import OFFLOAD_CUT
from split.plan.plan import LOCAL, Decision, Placement, Plan, PlanEstimate
from split.tensor import Tensors
from split.wire.messages import Infer, Priority

ATTEMPT = 1
"""A request is sent once; when it does not come back, the device finishes it itself."""

UNPROFILED = Decision(
    chosen=PlanEstimate(plan=LOCAL, predicted_ms=0.0, risk_ms=0.0, stages_ms={}, bytes=0, fidelity=None, allowed=True),
    runners_up=(),
    reason="this model is not measured yet: until it is, it runs here",
    candidates=1,
)


class Serve:
    """The way of every request through the daemon."""

    def __init__(
        self, *, planner: Planner, compute: Compute, uplink: Uplink, lateness: Lateness, journal: Journal
    ) -> None:
        self._planner = planner
        self._compute = compute
        self._uplink = uplink
        self._lateness = lateness
        self._journal = journal

    async def infer(self, request: InferenceRequest) -> Outcome:
        """Answer one admitted request. DeadlineExceeded at its deadline, EngineFailed when the model itself fails."""
        decision = self._decide(request)
        try:
            async with asyncio.timeout_at(request.deadline_at_s):
                outcome = await self._carry_out(request, decision)
        except TimeoutError:
            error = DeadlineExceeded(
                f"no answer within {(request.deadline_at_s - request.received_at_s) * 1000:.0f} ms: the plan was "
                f"{decision.chosen.plan} ({decision.chosen.predicted_ms:.0f} ms predicted); give it a later deadline"
            )
            self._journal.failed(request, decision, error, _since_ms(request))
            raise error from None
        except IsthmusError as error:
            self._journal.failed(request, decision, error, _since_ms(request))
            raise
        _later(self._journal.answered, request, outcome)
        return outcome

    def _decide(self, request: InferenceRequest) -> Decision:
        if request.model.profile is None:
            return UNPROFILED
        try:
            return self._planner.decide(
                request.model.name, request.facts, edge_queue_ms=self._compute.queue_ms, now_s=_now()
            )
        except UnknownModel:
            return UNPROFILED

    def _scale_of(self, request: InferenceRequest) -> float:
        try:
            return self._planner.scale(request.model.name, request.facts)
        except UnknownModel:  # unloaded meanwhile
            return 1.0

    def _learn(self, request: InferenceRequest, plan: Plan, stage: str, measured_ms: float) -> None:
        """Tell the planner, after the answer, what a stage took for a request of the profile's size."""
        if stage != "image":
            measured_ms /= self._scale_of(request)
        _later(self._planner.observe_edge, request.model.name, plan, stage, measured_ms)

    def _finish_ms(self, request: InferenceRequest, prepared: Prepared) -> float:
        """What the device is expected to need for what is missing."""
        if request.model.profile is None:
            return 0.0
        try:
            image_ms = self._planner.image_ms(request.model.name) if prepared.encoded else 0.0
            scale = self._planner.scale(request.model.name, request.facts)
            return image_ms + scale * self._planner.finish_ms(request.model.name, prepared.cut)
        except UnknownModel:  # unloaded meanwhile; its last requests are still answered
            return (request.model.profile.image_ms + request.model.profile.whole_ms) * self._compute.slowdown

    async def _carry_out(self, request: InferenceRequest, decision: Decision) -> Outcome:
        plan = decision.chosen.plan
        if plan.placement is Placement.LOCAL:
            asked = request.facts.mode
            unmet = decision.reason if asked not in (None, Placement.LOCAL) else ""
            return await self._locally(request, decision, Prepared.nothing(request), fallback=unmet)
        prepared = Prepared.nothing(request)
        try:
            prepared = await self._prepare(request, plan)
            remote = self._send(request, plan, prepared)
        except InvalidRequest:
            raise
        except IsthmusError as error:  # a head that does not open, a companion that is gone: it still runs here
            return await self._locally(request, decision, prepared, fallback=str(error))
        try:
            return await self._first_answer(request, decision, prepared, remote)
        finally:
            self._uplink.abandon(request.id, ATTEMPT)

    async def _prepare(self, request: InferenceRequest, plan: Plan) -> Prepared:
        """Image, head and encoding, in one go on the worker."""
        name, scale = request.model.name, self._scale_of(request)
        image_ms = self._planner.image_ms(name) if request.encoded and plan.codec != "encoded" else 0.0
        expected_ms = image_ms + scale * self._planner.prepare_ms(name, plan)
        timed = await self._compute.run(
            lambda: prepare(request, plan), deadline_at_s=request.deadline_at_s, expected_ms=expected_ms
        )
        prepared = timed.value
        prepared.stages_ms["queue"] = timed.queue_ms
        self._scale(prepared.stages_ms, "image", "head", "encode")
        for stage in ("image", "head", "encode"):
            if stage in prepared.stages_ms:
                self._learn(request, plan, stage, prepared.stages_ms[stage])
        return prepared

    def _send(self, request: InferenceRequest, plan: Plan, prepared: Prepared) -> asyncio.Future[RemoteReply]:
        assert plan.codec is not None
        made_there = None if plan.cut is None else request.model.card.cut(plan.cut).tail_outputs
        message = Infer(
            request_id=request.id,
            attempt=ATTEMPT,
            digest=request.model.digest,
            cut=plan.cut or OFFLOAD_CUT,
            codec=plan.codec,
            budget_ms=(request.deadline_at_s - _now()) * 1000,
            outputs=tuple(name for name in request.outputs if made_there is None or name in made_there),
            encoded=request.model.image_rules() if plan.codec == "encoded" else {},
        )
        return self._uplink.infer(message, prepared.payload, priority=Priority.NORMAL)

    async def _first_answer(
        self,
        request: InferenceRequest,
        decision: Decision,
        prepared: Prepared,
        remote: asyncio.Future[RemoteReply],
    ) -> Outcome:
        """The companion's reply if it comes in time; otherwise whichever of it and the local finish is first."""
        plan = decision.chosen.plan
        fallback = request.model.contract.behaviour.fallback
        local_ms = self._finish_ms(request, prepared)
        late = self._lateness.watch(
            request.id, deadline_at_s=request.deadline_at_s, local_ms=local_ms, timeout_ms=fallback.timeout_ms
        )
        try:
            await asyncio.wait((remote, late), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._lateness.forget(request.id)
        if _succeeded(remote):
            return await self._remotely(request, decision, prepared, remote.result())
        if fallback.strategy == "fail":
            return await self._remotely(request, decision, prepared, await remote)
        why = str(remote.exception()) if remote.done() else self._silence(plan)
        local = asyncio.ensure_future(self._locally(request, decision, prepared, fallback=why))
        try:
            while not local.done():
                pending: set[asyncio.Future[Any]] = {local} if remote.done() else {local, remote}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if _succeeded(remote):
                    return await self._remotely(request, decision, prepared, remote.result())
            if local.exception() is not None and not remote.done():
                return await self._remotely(request, decision, prepared, await remote)
            return local.result()
        finally:
            local.cancel()

    def _silence(self, plan: Plan) -> str:
        self._uplink.suspect()
        return f"no reply from the companion in time for {plan}"

    async def _locally(
        self, request: InferenceRequest, decision: Decision, prepared: Prepared, *, fallback: str
    ) -> Outcome:
        """The whole model, or the tail from the boundary that is there."""
        cut = prepared.cut
        work = (lambda: whole(request, prepared)) if cut is None else (lambda: finish(request, prepared))
        expected_ms = self._finish_ms(request, prepared)
        try:
            timed = await self._compute.run(work, deadline_at_s=request.deadline_at_s, expected_ms=expected_ms)
        except IsthmusError as error:
            if cut is None:
                raise
            whole_again = Prepared.nothing(request)  # the tail does not open or run: the whole may
            return await self._locally(request, decision, whole_again, fallback=f"{fallback}; then: {error}")
        outputs, measured = timed.value
        self._scale(measured, *measured)
        for stage, ms in measured.items() if request.model.profile is not None else ():
            self._learn(request, LOCAL if cut is None else decision.chosen.plan, stage, ms)
        stages_ms = {**prepared.stages_ms, **measured}
        stages_ms["queue"] = prepared.stages_ms.get("queue", 0.0) + timed.queue_ms
        return _outcome(request, decision, outputs, ran=LOCAL, fallback=fallback, stages_ms=stages_ms)

    async def _remotely(
        self, request: InferenceRequest, decision: Decision, prepared: Prepared, remote: RemoteReply
    ) -> Outcome:
        plan, reply = decision.chosen.plan, remote.reply
        self._planner.observe_cloud(request.model.name, plan, reply.queue_ms, reply.tail_ms / self._scale_of(request))
        await self._compute.hold(remote.decode_ms)
        stages_ms = prepared.stages_ms | {
            "network": remote.network_ms,
            "cloud_queue": reply.queue_ms,
            "cloud_decode": reply.decode_ms,
            "tail": reply.tail_ms,
            "decode": remote.decode_ms * self._compute.slowdown,
        }
        outputs = {**remote.outputs, **prepared.outputs}
        return _outcome(request, decision, outputs, ran=plan, fallback="", stages_ms=stages_ms)

    def _scale(self, stages_ms: dict[str, float], *stages: str) -> None:
        """Emulation: a stage took as long as the worker held it."""
        for stage in stages:
            if stage in stages_ms:
                stages_ms[stage] *= self._compute.slowdown


def _now() -> float:
    return asyncio.get_running_loop().time()


def _later(learn: Callable[..., None], *arguments: object) -> None:
    """Book-keeping comes after the answer: nobody waits for it."""
    asyncio.get_running_loop().call_soon(learn, *arguments)


def _since_ms(request: InferenceRequest) -> float:
    return (_now() - request.received_at_s) * 1000


def _succeeded(remote: asyncio.Future[RemoteReply]) -> bool:
    return remote.done() and not remote.cancelled() and remote.exception() is None


def _outcome(
    request: InferenceRequest,
    decision: Decision,
    outputs: Tensors,
    *,
    ran: Plan,
    fallback: str,
    stages_ms: dict[str, float],
) -> Outcome:
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        raise EngineFailed(f"{ran} of model {request.model.name!r} made no output {missing[0]!r}")
    return Outcome(
        outputs={name: outputs[name] for name in request.outputs},
        decision=decision,
        ran=ran,
        fallback=fallback,
        stages_ms=stages_ms,
        total_ms=_since_ms(request),
    )
