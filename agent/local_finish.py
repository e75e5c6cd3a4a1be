"""What of a request is missing, run on the device: the whole model, or the tail from the boundary that its head made.
What that is expected to take, how it begins, the answer it makes, what it teaches. When it begins is `serve.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from agent.compute import Compute, Job
from agent.intake import InferenceRequest
from agent.lessons import Lessons
from agent.outcome import Outcome, outcome_of
from agent.planner import Planner
from agent.stages import Finished, Prepared, finish, whole
from split.errors import IsthmusError, UnknownModel
from split.plan.plan import LOCAL, Decision
from split.plan.slack import MARGIN_RATIO
from split.runtime.engine import Segment, Stop


class LocalFinish:
    """Lives as long as the daemon; no state of its own."""

    def __init__(self, *, planner: Planner, compute: Compute, lessons: Lessons) -> None:
        self._planner = planner
        self._compute = compute
        self._lessons = lessons

    def expected_ms(self, request: InferenceRequest, prepared: Prepared) -> float:
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

    def margin_ratio(self, request: InferenceRequest) -> float:
        """Of a finish, as `Planner.finish_margin_ratio`."""
        try:
            return self._planner.finish_margin_ratio(request.model.name)
        except UnknownModel:
            return MARGIN_RATIO

    def begin(self, request: InferenceRequest, prepared: Prepared) -> Job[Finished]:
        """Hand to the worker what is missing: the whole model, or the tail from the boundary that is there."""
        work, stop = whole if prepared.cut is None else finish, Stop()
        return self._compute.run(
            lambda: work(request, prepared, stop),
            deadline_at_s=request.deadline_at_s,
            expected_ms=self.expected_ms(request, prepared),
            rank=request.rank,
            stop=stop,
        )

    async def answer(
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
                segment = await clocked_opening(request.model.opened_finish(cut), opening_ms, prepared.stages_ms)
                timed = await self.begin(request, prepared)
                del segment
            else:
                timed = await (await begun)
        except IsthmusError as error:
            if cut is None:
                raise
            whole_again = Prepared.nothing(request)  # the tail does not open or run: the whole may
            return await self.answer(request, decision, whole_again, fallback=f"{fallback}; then: {error}")
        outputs, clocked_ms = timed.value
        measured = {stage: ms * self._compute.slowdown for stage, ms in clocked_ms.items()}
        for stage, ms in measured.items() if request.model.profile is not None else ():
            if stage != "activate":  # the store knows what opening takes
                self._lessons.stage(request, LOCAL if cut is None else decision.chosen.plan, stage, ms)
        stages_ms = {**prepared.stages_ms, **measured}
        stages_ms["queue"] = prepared.stages_ms.get("queue", 0.0) + timed.queue_ms
        if "activate" in stages_ms:
            stages_ms["activate"] = prepared.stages_ms.get("activate", 0.0) + measured.get("activate", 0.0)
        return outcome_of(request, decision, outputs, ran=LOCAL, fallback=fallback, stages_ms=stages_ms, now_s=_now())

    def cut_off(
        self, request: InferenceRequest, decision: Decision, prepared: Prepared, ran_ms: float, expected_ms: float
    ) -> None:
        """A finish that nobody waits for any more takes at least as long as it has run: were only those learned from
        that ended in time, a device would never be found to be slow."""
        if ran_ms <= expected_ms or request.model.profile is None:
            return
        try:
            image_ms = self._planner.image_ms(request.model.name) if prepared.encoded else 0.0
        except UnknownModel:  # unloaded meanwhile; the reply that came is the answer all the same
            return
        plan, stage = (LOCAL, "whole") if prepared.cut is None else (decision.chosen.plan, "local_tail")
        self._lessons.stage(request, plan, stage, ran_ms - image_ms)


async def clocked_opening(opening: Awaitable[Segment], expected_ms: float, stages_ms: dict[str, float]) -> Segment:
    """The segment; where it was not open (something was expected), what it took becomes a stage."""
    started_s = _now()
    segment = await opening
    if expected_ms > 0.0:
        stages_ms["activate"] = stages_ms.get("activate", 0.0) + (_now() - started_s) * 1000
    return segment


def running_ms(late: asyncio.Future[Any]) -> float:
    """How long the worker has had a finish (`Lateness.watch`) that nobody needs any more; 0 where it has not."""
    begun: Job[Finished] | None = None
    if late.done() and not late.cancelled() and late.exception() is None:
        begun = late.result()
    return 0.0 if begun is None else begun.running_ms


def _now() -> float:
    return asyncio.get_running_loop().time()
