"""One request, from admitted to answered. Open this file first.

    decide ─┬─ local    whole model on the worker
            ├─ split    head on the worker → encode → companion runs the tail → reply (a batch: in parts, parts.py)
            └─ offload  the input travels  → companion runs it all          → reply
                   └─ late, failed or overdue: what is missing runs here, from the boundary that is already there

Exactly one answer leaves, by the deadline or as a typed error. Deciding lives in the planner, running in compute,
sending in the uplink, the device's own finish in local_finish.py; this file only says in which order, and what happens
when something does not come.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial

from agent.afterwards import Afterwards
from agent.compute import Compute
from agent.hedges import Hedge, Hedges
from agent.intake import InferenceRequest
from agent.journal import Journal, answered_entry
from agent.lateness import Lateness
from agent.lessons import Lessons
from agent.local_finish import LocalFinish, clocked_opening, running_ms
from agent.outcome import Outcome, outcome_of
from agent.parts import in_parts
from agent.planner import Planner
from agent.reruns import Reruns
from agent.shadowing import Shadowing
from agent.spot_checks import OnBroken, SpotChecks
from agent.stages import Prepared, prepare
from agent.uplink import Uplink
from agent.waiting import Asked, RemoteReply
from split.errors import DeadlineExceeded, IsthmusError, ModelUnavailable, UnknownModel
from split.ids import OFFLOAD_CUT, CutId
from split.plan.plan import LOCAL, Decision, Placement, Plan, PlanEstimate
from split.plan.slack import reserved_ms
from split.runtime.engine import Segment, Stop
from split.wire.messages import Infer

log = logging.getLogger(__name__)

UNPROFILED = Decision(
    chosen=PlanEstimate(plan=LOCAL, predicted_ms=0.0, risk_ms=0.0, stages_ms={}, bytes=0, fidelity=None, allowed=True),
    runners_up=(),
    reason_of=lambda: "this model is not measured yet: until it is, it runs here",
    candidates=1,
)


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
        on_broken: OnBroken = lambda model, codec, why: None,
    ) -> None:
        """`spot_check_every`: of the configuration. `on_broken`: as of `SpotChecks`."""
        self._planner = planner
        self._compute = compute
        self._uplink = uplink
        self._lateness = lateness
        self._journal = journal
        self._afterwards = Afterwards()
        self._lessons = Lessons(planner, self._afterwards)
        self._finish = LocalFinish(planner=planner, compute=compute, lessons=self._lessons)
        reruns = Reruns(compute=compute, lateness=lateness, battery_low=lambda: planner.battery_low)
        self._shadowing = Shadowing(planner=planner, journal=journal, reruns=reruns, peer=lambda: uplink.peer)
        self._spot_checks = SpotChecks(
            every=spot_check_every, planner=planner, journal=journal, reruns=reruns, on_broken=on_broken
        )
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
                whole_ms = partial(self._finish.expected_ms, request, Prepared.nothing(request))
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

    async def _carry_out(self, request: InferenceRequest, decision: Decision) -> Outcome:
        if decision.chosen.parts > 1:
            return await in_parts(request, decision, self._carry_out)
        plan, prepared = decision.chosen.plan, Prepared.nothing(request)
        if plan.placement is Placement.LOCAL:
            wished = request.facts.mode
            unmet = decision.reason if wished not in (None, Placement.LOCAL) else ""
            return await self._finish.answer(request, decision, prepared, fallback=unmet)
        must_come = request.model.contract.behaviour.fallback.strategy == "fail"
        try:
            if not must_come:
                self._refuse_cold(request, plan)
            await self._prepare(request, decision, prepared)
            asked = self._send(request, decision, prepared)
        except IsthmusError as error:  # a head that fails, no room, a companion that is gone: it still runs here
            if must_come:
                raise
            return await self._finish.answer(request, decision, prepared, fallback=str(error))
        try:
            if must_come:
                return self._remotely(request, decision, prepared, await self._reply(request, decision, asked.reply))
            finish_ms = self._finish.expected_ms(request, prepared)
            whole_ms = (
                finish_ms if prepared.cut is None else self._finish.expected_ms(request, Prepared.nothing(request))
            )
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
        if self._finish.expected_ms(request, Prepared.nothing(request)) <= left_ms < there_ms:
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
                rank=request.rank,
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
        return await clocked_opening(request.model.opened_head(cut), opening_ms, stages_ms)

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
            priority=request.link_priority,
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
            begin=lambda: self._finish.begin(request, prepared),
            hedge_after_ms=hedge.after_ms,
            margin_ratio=self._finish.margin_ratio(request),
        )
        remote = asked.reply
        local: asyncio.Future[Outcome] | None = None
        try:
            await asyncio.wait((remote, asked.lost, late), return_when=asyncio.FIRST_COMPLETED)
            if not _succeeded(remote):
                why = self._why_here(request, decision, asked, hedge)
                self._lateness.hurry(request.id)
                asked.here_at_s = _now() + self._compute.queue_ms / 1000
                local = asyncio.ensure_future(
                    self._finish.answer(request, decision, prepared, fallback=why, begun=late)
                )
                while not _over(local, remote):
                    running = [one for one in (local, remote) if not one.done()]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if local is None or _succeeded(remote):
                hedge.came(_now())
                outcome = self._remotely(request, decision, prepared, remote.result())
                return replace(outcome, doubled_ms=running_ms(late))
            if not remote.done() or asked.lost.done():  # a refusal is no reply that is late
                hedge.overtaken(_now())
            if not (remote.done() or asked.lost.done()):
                self._blame(hedge.overdue_at_s)
            return replace(local.result(), sent=True)
        finally:
            self._lateness.forget(request.id)
            if local is not None:
                if not local.done():
                    self._finish.cut_off(request, decision, prepared, running_ms(late), hedge.finish_ms)
                local.cancel()
            if not late.cancelled() and late.exception() is None:
                late.result().cancel()

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
        return outcome_of(request, decision, outputs, ran=plan, fallback="", stages_ms=stages_ms, now_s=_now())

    def _scale(self, stages_ms: dict[str, float], *stages: str) -> None:
        """Emulation: a stage took as long as the worker held it."""
        for stage in stages:
            if stage in stages_ms:
                stages_ms[stage] *= self._compute.slowdown


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since_ms(request: InferenceRequest) -> float:
    return (_now() - request.received_at_s) * 1000


def _succeeded(remote: asyncio.Future[RemoteReply]) -> bool:
    return remote.done() and not remote.cancelled() and remote.exception() is None


def _over(local: asyncio.Future[Outcome], remote: asyncio.Future[RemoteReply]) -> bool:
    """There is an answer, or none will come any more."""
    return _succeeded(remote) or (local.done() and (remote.done() or local.exception() is None))
