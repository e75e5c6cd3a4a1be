"""One request, from admitted to answered. Open this file first.

    decide ─┬─ local    whole model on the worker
            ├─ split    head on the worker → encode → companion runs the tail → reply (a batch: in parts, parts.py)
            └─ offload  the input travels  → companion runs it all          → reply
                   └─ late, failed or overdue: what is missing runs here, from the boundary that is already there

Exactly one answer leaves, by the deadline or as a typed error. Deciding lives in the planner, running in compute,
sending in the uplink; this file only says in which order, and what happens when something does not come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from agent.afterwards import Afterwards
from agent.compute import Compute, Job
from agent.hedges import Hedge, Hedges
from agent.intake import InferenceRequest
from agent.journal import Journal, Outcome, answered_entry
from agent.lateness import Lateness
from agent.lessons import Lessons
from agent.parts import in_parts
from agent.planner import Planner
from agent.reruns import Reruns
from agent.shadowing import Shadowing
from agent.spot_checks import SpotChecks
from agent.stages import Finished, Prepared, finish, prepare, whole
from agent.uplink import Uplink
from agent.waiting import Asked, RemoteReply
from split.errors import DeadlineExceeded, EngineFailed, IsthmusError, ModelUnavailable, UnknownModel
from split.ids import OFFLOAD_CUT, CutId
from split.plan.plan import LOCAL, Decision, Placement, Plan, PlanEstimate
from split.plan.slack import MARGIN_RATIO, reserved_ms
from split.runtime.engine import Segment, Stop
from split.tensor import Tensors
from split.wire.messages import Infer, Priority

log = logging.getLogger(__name__)

UNPROFILED = Decision(
    chosen=PlanEstimate(plan=LOCAL, predicted_ms=0.0, risk_ms=0.0, stages_ms={}, bytes=0, fidelity=None, allowed=True),
    runners_up=(),
    reason_of=lambda: "this model is not measured yet: until it is, it runs here",
    candidates=1,
)

_CLASSES: Final = ("gold", "silver", "bronze")


class Serve:
    """The way of every request through the daemon."""

    def __init__(
        self,
        *,
        planner: Planner,
        compute: Compute,
        uplink: Uplink,
        lateness: Lateness,
        journal: Journal,
        spot_check_every: int = 0,
    ) -> None:
        """`spot_check_every`: of the configuration."""
        self._planner = planner
        self._compute = compute
        self._uplink = uplink
        self._lateness = lateness
        self._journal = journal
        self._afterwards = Afterwards()
        self._lessons = Lessons(planner, self._afterwards)
        reruns = Reruns(compute=compute, lateness=lateness, battery_low=lambda: planner.battery_low)
        self._shadowing = Shadowing(planner=planner, journal=journal, reruns=reruns, peer=lambda: uplink.peer)
        self._spot_checks = SpotChecks(every=spot_check_every, planner=planner, journal=journal, reruns=reruns)
        self._hedges = Hedges(battery_low=lambda: planner.battery_low)

    def settle_books(self) -> None:
        """Before journal or planner are read: what was answered until now is in them."""
        self._afterwards.settle()

    async def infer(self, request: InferenceRequest) -> Outcome:
        """Answer one admitted request. DeadlineExceeded at its deadline, EngineFailed when the model itself fails."""
        decision = self._decide(request)
        if decision.worth_opening is not None:
            self._afterwards.note(request.model.warm, decision.worth_opening)
        self._planner.began(request.id, decision, now_s=_now())
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
        finally:
            self._planner.done(request.id)
        if outcome.ran == decision.chosen.plan and not outcome.fallback and decision.chosen.parts == 1:
            clocked_ms = request.came_in_ms + sum(outcome.stages_ms.values())
            outcome.stages_ms["rest"] = max(outcome.total_ms - clocked_ms, 0.0)
        self._afterwards.note(self._journal.answered, request.id, answered_entry(request, outcome))
        try:
            self._lessons.answered(request, outcome)
            if outcome.ran.placement is not Placement.LOCAL:
                whole_ms = partial(self._finish_ms, request, Prepared.nothing(request))
                if request.model.contract.behaviour.fallback.strategy == "shadow":
                    self._shadowing.answered(request, outcome, whole_ms)
                self._spot_checks.answered(request, outcome, whole_ms)
        except Exception:  # a bug of ours; the answer is right, and leaves
            log.exception("nothing was learned from a finished request")
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

    def _finish_ms(self, request: InferenceRequest, prepared: Prepared) -> float:
        """What the device is expected to need for what is missing, opening its segment included."""
        model, cut = request.model, prepared.cut
        if model.profile is None:
            return 0.0
        try:
            image_ms = self._planner.image_ms(model.name) if prepared.encoded else 0.0
            compute_ms = self._planner.finish_ms(model.name, cut, request.facts)
        except UnknownModel:  # unloaded meanwhile; its last requests are still answered
            image_ms = model.profile.image_ms * self._compute.slowdown
            compute_ms = model.profile.whole_ms * self._compute.slowdown
        return image_ms + compute_ms + model.activation_ms(cut) * self._compute.slowdown

    def _margin_ratio(self, request: InferenceRequest) -> float:
        """Of a finish, as `Planner.finish_margin_ratio`."""
        try:
            return self._planner.finish_margin_ratio(request.model.name)
        except UnknownModel:
            return MARGIN_RATIO

    async def _carry_out(self, request: InferenceRequest, decision: Decision) -> Outcome:
        if decision.chosen.parts > 1:
            return await in_parts(request, decision, self._carry_out)
        plan, prepared = decision.chosen.plan, Prepared.nothing(request)
        if plan.placement is Placement.LOCAL:
            wished = request.facts.mode
            unmet = decision.reason if wished not in (None, Placement.LOCAL) else ""
            return await self._locally(request, decision, prepared, fallback=unmet)
        must_come = request.model.contract.behaviour.fallback.strategy == "fail"
        try:
            if not must_come:
                self._refuse_cold(request, plan)
            await self._prepare(request, decision, prepared)
            asked = self._send(request, decision, prepared)
        except IsthmusError as error:  # a head that fails, no room, a companion that is gone: it still runs here
            if must_come:
                raise
            return await self._locally(request, decision, prepared, fallback=str(error))
        try:
            if must_come:
                return self._remotely(request, decision, prepared, await self._reply(request, decision, asked.reply))
            finish_ms = self._finish_ms(request, prepared)
            whole_ms = finish_ms if prepared.cut is None else self._finish_ms(request, Prepared.nothing(request))
            with (
                request.model.way_out(prepared.cut),
                self._hedges.hedge(request, decision, finish_ms=finish_ms, whole_ms=whole_ms, now_s=_now()) as hedge,
            ):
                return await self._first_answer(request, decision, prepared, asked, hedge)
        finally:
            self._uplink.abandon(request.id)

    def _refuse_cold(self, request: InferenceRequest, plan: Plan) -> None:
        """ModelUnavailable where opening this plan's halves would cost the deadline that the whole meets; the next
        request finds them open."""
        model, cut = request.model, plan.cut
        opening_ms = 0.0 if cut is None else model.halves_activation_ms(cut) * self._compute.slowdown
        if cut is None or opening_ms == 0.0:
            return
        planner, facts = self._planner, request.facts
        image_ms = planner.image_ms(model.name) if request.encoded else 0.0
        compute_ms = planner.prepare_ms(model.name, plan, facts) + planner.finish_ms(model.name, cut, facts)
        there_ms = reserved_ms(opening_ms + image_ms + compute_ms, 0.0)
        left_ms = (request.deadline_at_s - _now()) * 1000 - self._compute.queue_ms
        if self._finish_ms(request, Prepared.nothing(request)) <= left_ms < there_ms:
            model.warm(cut)
            raise ModelUnavailable(f"the halves of {cut} are not open, and there is no time to open them")

    async def _prepare(self, request: InferenceRequest, decision: Decision, prepared: Prepared) -> None:
        """Image, head and encoding, in one go on the worker."""
        name, plan = request.model.name, decision.chosen.plan
        image_ms = self._planner.image_ms(name) if request.encoded and plan.codec != "encoded" else 0.0
        expected_ms = image_ms + self._planner.prepare_ms(name, plan, request.facts)
        request.holding.made(decision.chosen.bytes)
        stages_ms = prepared.stages_ms
        # Held so that nobody closes it meanwhile.
        head = None if plan.cut is None else await self._opened_head(request, plan.cut, stages_ms)
        try:
            stop = Stop()
            timed = await self._compute.run(
                lambda: prepare(request, plan, prepared, stop, level=decision.chosen.level),
                deadline_at_s=request.deadline_at_s,
                expected_ms=expected_ms,
                rank=_rank(request),
                stop=stop,
            )
        finally:
            self._scale(stages_ms, "image", "head", "encode")
            del head
        stages_ms["queue"] = timed.queue_ms
        try:
            request.holding.made(prepared.made_bytes)
        except IsthmusError:
            prepared.start_again(request)
            raise
        for stage in ("image", "head", "encode"):
            if stage in stages_ms:
                self._lessons.stage(request, plan, stage, stages_ms[stage])
        self._lessons.sent(request, decision.chosen, prepared.payload)

    async def _opened_head(self, request: InferenceRequest, cut: CutId, stages_ms: dict[str, float]) -> Segment:
        opening_ms = request.model.head_activation_ms(cut)
        return await _clocked_opening(request.model.opened_head(cut), opening_ms, stages_ms)

    def _send(self, request: InferenceRequest, decision: Decision, prepared: Prepared) -> Asked:
        plan, expected_ms = decision.chosen.plan, decision.chosen.stages_ms
        assert plan.codec is not None
        made_there = None if plan.cut is None else request.model.card.cut(plan.cut).tail_outputs
        message = Infer(
            request_id=request.id,
            attempt=1,
            digest=request.model.digest,
            cut=plan.cut or OFFLOAD_CUT,
            codec=plan.codec,
            budget_ms=(request.deadline_at_s - _now()) * 1000,
            outputs=tuple(name for name in request.outputs if made_there is None or name in made_there),
            encoded=request.model.image_rules() if plan.codec == "encoded" else {},
        )
        cloud_ms = expected_ms["cloud_queue"] + expected_ms["cloud_decode"] + expected_ms["tail"]
        return self._uplink.infer(
            message,
            prepared.payload,
            priority=_on_the_link(request.priority),
            network_ms=expected_ms["up"] + expected_ms["down"],
            cloud_ms=cloud_ms,
            reply_bytes=self._planner.reply_bytes(request.model.name, plan, request.facts),
            attempts=request.model.contract.behaviour.retry.attempts,
            made={spec.name: spec.dtype for spec in request.model.card.outputs},
        )

    async def _reply(
        self, request: InferenceRequest, decision: Decision, remote: asyncio.Future[RemoteReply]
    ) -> RemoteReply:
        """The companion's reply, or a typed error by the deadline: the contract wants no other answer."""
        wait_s = request.deadline_at_s - _now()
        if (timeout_ms := request.model.contract.behaviour.fallback.timeout_ms) is not None:
            wait_s = min(wait_s, timeout_ms / 1000)
        await asyncio.wait((remote,), timeout=max(wait_s, 0.0))
        if not remote.done():
            overdue_at_s = request.received_at_s + decision.chosen.risk_ms / 1000
            raise DeadlineExceeded(f"{self._silence(request, decision, overdue_at_s)}, and fallback.strategy is fail")
        return remote.result()

    async def _first_answer(
        self,
        request: InferenceRequest,
        decision: Decision,
        prepared: Prepared,
        asked: Asked,
        hedge: Hedge,
    ) -> Outcome:
        """The companion's reply if it comes in time; otherwise whichever of it and the local finish is first. A
        connection that is lost begins the finish, and beside it the uplink may send the request again."""
        late = self._lateness.watch(
            request.id,
            deadline_at_s=request.deadline_at_s,
            local_ms=hedge.finish_ms,
            timeout_ms=request.model.contract.behaviour.fallback.timeout_ms,
            begin=lambda: self._begin(request, prepared),
            hedge_after_ms=hedge.after_ms,
            margin_ratio=self._margin_ratio(request),
        )
        remote = asked.reply
        local: asyncio.Future[Outcome] | None = None
        try:
            await asyncio.wait((remote, asked.lost, late), return_when=asyncio.FIRST_COMPLETED)
            if not _succeeded(remote):
                why = self._why_here(request, decision, asked, hedge)
                self._lateness.hurry(request.id)
                asked.here_at_s = _now() + self._compute.queue_ms / 1000
                local = asyncio.ensure_future(self._locally(request, decision, prepared, fallback=why, begun=late))
                while not _over(local, remote):
                    running = [one for one in (local, remote) if not one.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if local is None or _succeeded(remote):
                hedge.came(_now())
                outcome = self._remotely(request, decision, prepared, remote.result())
                return replace(outcome, doubled_ms=_running_ms(late))
            if not remote.done() or asked.lost.done():  # a refusal is no reply that is late
                hedge.overtaken(_now())
            if not (remote.done() or asked.lost.done()):
                self._blame(hedge.overdue_at_s)
            return replace(local.result(), sent=True)
        finally:
            self._lateness.forget(request.id)
            if local is not None:
                if not local.done():
                    self._learn_cut_off(request, decision, prepared, _running_ms(late), hedge.finish_ms)
                local.cancel()
            if not late.cancelled() and late.exception() is None:
                late.result().cancel()

    def _learn_cut_off(
        self, request: InferenceRequest, decision: Decision, prepared: Prepared, ran_ms: float, expected_ms: float
    ) -> None:
        """A finish that nobody waits for any more takes at least as long as it has run: were only those learned from
        that ended in time, a device would never be found to be slow."""
        if ran_ms <= expected_ms or request.model.profile is None:
            return
        image_ms = self._planner.image_ms(request.model.name) if prepared.encoded else 0.0
        plan, stage = (LOCAL, "whole") if prepared.cut is None else (decision.chosen.plan, "local_tail")
        self._lessons.stage(request, plan, stage, ran_ms - image_ms)

    def _why_here(self, request: InferenceRequest, decision: Decision, asked: Asked, hedge: Hedge) -> str:
        if asked.lost.done():
            return asked.lost.result()
        if asked.reply.done():
            return str(asked.reply.exception())
        return self._silence(request, decision, hedge.overdue_at_s)

    def _blame(self, overdue_at_s: float) -> None:
        if _now() >= overdue_at_s:
            self._uplink.suspect()

    def _silence(self, request: InferenceRequest, decision: Decision, overdue_at_s: float) -> str:
        self._blame(overdue_at_s)
        return f"no reply from the companion in time for {decision.chosen.plan} (after {_since_ms(request):.0f} ms)"

    def _begin(self, request: InferenceRequest, prepared: Prepared) -> Job[Finished]:
        """Hand to the worker what is missing: the whole model, or the tail from the boundary that is there."""
        work, stop = whole if prepared.cut is None else finish, Stop()
        return self._compute.run(
            lambda: work(request, prepared, stop),
            deadline_at_s=request.deadline_at_s,
            expected_ms=self._finish_ms(request, prepared),
            rank=_rank(request),
            stop=stop,
        )

    async def _locally(
        self,
        request: InferenceRequest,
        decision: Decision,
        prepared: Prepared,
        *,
        fallback: str,
        begun: asyncio.Future[Any] | None = None,
    ) -> Outcome:
        """What is missing runs here (`begun`: gives the job that is under way already)."""
        cut = prepared.cut
        try:
            if begun is None:
                opening_ms = request.model.activation_ms(cut)
                # Held so that nobody closes it meanwhile.
                segment = await _clocked_opening(request.model.opened_finish(cut), opening_ms, prepared.stages_ms)
                timed = await self._begin(request, prepared)
                del segment
            else:
                timed = await (await begun)
        except IsthmusError as error:
            if cut is None:
                raise
            whole_again = Prepared.nothing(request)  # the tail does not open or run: the whole may
            return await self._locally(request, decision, whole_again, fallback=f"{fallback}; then: {error}")
        outputs, measured = timed.value
        self._scale(measured, *measured)
        for stage, ms in measured.items() if request.model.profile is not None else ():
            if stage != "activate":  # the store knows what opening takes
                self._lessons.stage(request, LOCAL if cut is None else decision.chosen.plan, stage, ms)
        stages_ms = {**prepared.stages_ms, **measured}
        stages_ms["queue"] = prepared.stages_ms.get("queue", 0.0) + timed.queue_ms
        if "activate" in stages_ms:
            stages_ms["activate"] = prepared.stages_ms.get("activate", 0.0) + measured.get("activate", 0.0)
        return _outcome(request, decision, outputs, ran=LOCAL, fallback=fallback, stages_ms=stages_ms)

    def _remotely(
        self, request: InferenceRequest, decision: Decision, prepared: Prepared, remote: RemoteReply
    ) -> Outcome:
        plan, reply = decision.chosen.plan, remote.reply
        self._lessons.replied(request, plan, reply, remote.down_bytes)
        stages_ms = prepared.stages_ms | {
            "network": remote.network_ms,
            "cloud_queue": reply.queue_ms,
            "cloud_decode": reply.decode_ms,
            "tail": reply.tail_ms,
            "decode": remote.decode_ms,
        }
        outputs = {**remote.outputs, **prepared.outputs}
        return _outcome(request, decision, outputs, ran=plan, fallback="", stages_ms=stages_ms)

    def _scale(self, stages_ms: dict[str, float], *stages: str) -> None:
        """Emulation: a stage took as long as the worker held it."""
        for stage in stages:
            if stage in stages_ms:
                stages_ms[stage] *= self._compute.slowdown


async def _clocked_opening(opening: Awaitable[Segment], expected_ms: float, stages_ms: dict[str, float]) -> Segment:
    """The segment; where it was not open (something was expected), what it took becomes a stage."""
    started_s = _now()
    segment = await opening
    if expected_ms > 0.0:
        stages_ms["activate"] = stages_ms.get("activate", 0.0) + (_now() - started_s) * 1000
    return segment


def _on_the_link(priority: int) -> Priority:
    """0, the default, lies with 2 between the highest (1) and all the others (3 and more)."""
    return {0: Priority.NORMAL, 1: Priority.URGENT, 2: Priority.NORMAL}.get(priority, Priority.BULK)


def _rank(request: InferenceRequest) -> int:
    """On the worker: by class, and within it by priority, as on the link."""
    service_class = request.model.contract.behaviour.service_class
    return len(Priority) * _CLASSES.index(service_class) + _on_the_link(request.priority)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since_ms(request: InferenceRequest) -> float:
    return (_now() - request.received_at_s) * 1000


def _running_ms(late: asyncio.Future[Any]) -> float:
    """How long the worker has had a finish (`Lateness.watch`) that nobody needs any more; 0 where it has not."""
    begun: Job[Finished] | None = None
    if late.done() and not late.cancelled() and late.exception() is None:
        begun = late.result()
    return 0.0 if begun is None else begun.running_ms


def _succeeded(remote: asyncio.Future[RemoteReply]) -> bool:
    return remote.done() and not remote.cancelled() and remote.exception() is None


def _over(local: asyncio.Future[Outcome], remote: asyncio.Future[RemoteReply]) -> bool:
    """There is an answer, or none will come any more."""
    return _succeeded(remote) or (local.done() and (remote.done() or local.exception() is None))


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
