"""What a served request teaches the planner: what it measured, brought to the sizes that were profiled. What the device
did is told some time after the answer (`afterwards.py`); no lesson is worth a failed request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agent.afterwards import Afterwards
from agent.intake import InferenceRequest
from agent.outcome import Outcome
from agent.planner import Planner
from agent.served_model import ServedModel
from split.errors import UnknownModel
from split.plan.plan import Plan, PlanEstimate, RequestFacts
from split.plan.rate import misfit_text
from split.plan.score import spreads
from split.transport.channel import Buffer
from split.wire.messages import Reply

log = logging.getLogger(__name__)


class Lessons:
    """Between `Serve`, which measures, and the planner."""

    def __init__(self, planner: Planner, afterwards: Afterwards) -> None:
        self._planner = planner
        self._afterwards = afterwards

    def stage(self, request: InferenceRequest, plan: Plan, stage: str, measured_ms: float) -> None:
        """A stage of the device, as of `Planner.observe_edge`."""
        if (ms := self._as_profiled_ms(request, plan, stage, measured_ms)) is not None:
            self._afterwards.note(self._planner.observe_edge, request.model.name, plan, stage, ms)

    def sent(self, request: InferenceRequest, chosen: PlanEstimate, payload: Sequence[Buffer]) -> None:
        """A codec with settings has made this of a request."""
        if chosen.level is not None:
            sent_bytes = sum(memoryview(part).nbytes for part in payload)
            self._afterwards.note(self._rate, request.model, request.facts, chosen, sent_bytes)

    def replied(self, request: InferenceRequest, plan: Plan, reply: Reply, down_bytes: int) -> None:
        """The companion's own times, at once, since the transfer before it says when; and what its reply weighs."""
        tail_ms = self._as_profiled_ms(request, plan, "tail", reply.tail_ms)
        queue_ms = reply.queue_ms if request.part == 0 else None
        decode_ms = self._as_profiled_ms(request, plan, "cloud_decode", reply.decode_ms)
        self._planner.observe_cloud(request.model.name, plan, queue_ms, tail_ms, decode_ms)
        self._afterwards.note(self._planner.observe_reply_bytes, request.model.name, request.facts, plan, down_bytes)

    def answered(self, request: InferenceRequest, outcome: Outcome) -> None:
        """What the whole took, and beside its stages, where it ran as planned and waited for nobody."""
        chosen, loaded = outcome.decision.chosen, spreads(outcome.decision.objective.get("throughput", 0.0))
        if outcome.ran != chosen.plan or outcome.fallback or loaded:
            return
        name, plan, since_ms = request.model.name, chosen.plan, outcome.total_ms - request.came_in_ms
        self._afterwards.note(self._planner.observe_total, name, plan, since_ms, chosen.predicted_ms)
        if (rest_ms := outcome.stages_ms.get("rest")) is not None:
            self._afterwards.note(self._planner.observe_rest, name, plan, rest_ms)

    def _rate(self, model: ServedModel, facts: RequestFacts, chosen: PlanEstimate, sent_bytes: int) -> None:
        """Said when the bytes show that the codec's calibration does not fit what is asked, or fits again."""
        name, plan = model.name, chosen.plan
        if not self._planner.plans_with(name, model.profile):  # another calibration was taken up meanwhile
            return
        if not self._planner.observe_sent(name, facts, plan, chosen.level, sent_bytes):
            return
        assert plan.codec is not None
        if (ratio := self._planner.misfit(name, plan.codec)) is not None:
            log.warning("model=%s %s", name, misfit_text(plan.codec, ratio))
        else:
            log.info("model=%s live inputs fit the calibration of codec %s again", name, plan.codec)

    def _as_profiled_ms(self, request: InferenceRequest, plan: Plan, stage: str, measured_ms: float) -> float | None:
        try:
            return self._planner.as_profiled_ms(request.model.name, request.facts, plan, stage, measured_ms)
        except UnknownModel:  # unloaded meanwhile
            return None
