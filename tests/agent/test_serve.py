"""Requests under a fake clock: the real serve, planner and uplink, a scripted companion on an in-memory channel.

Expected outputs come from a formula of the tiny model, never from the code under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest

from agent import stages, waiting
from agent.compute import Timed
from agent.heartbeat import SILENCE_S
from agent.intake import InferenceRequest, Intake
from agent.journal import Journal
from agent.lateness import Lateness
from agent.outcome import Outcome
from agent.planner import Planner
from agent.room import Room
from agent.serve import Serve
from agent.served_model import ServedModel
from agent.uplink import Uplink
from split.codec.golden import golden_inputs, sample
from split.codec.payload import decode, encode
from split.errors import (
    ChannelError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    IsthmusError,
    NotReached,
    Overloaded,
    TooLarge,
)
from split.ids import CutId, ModelName
from split.oip.options import RequestOptions
from split.plan.hedging import Replies
from split.plan.plan import LOCAL, Decision, Placement, Plan, RequestFacts
from split.profiles.contract import Behaviour, Contract, Data, Fallback, Fidelity, Retry, Weights
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.accelerators import Choice
from split.runtime.engine import Segment, Stop
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.transport.virtual_time import run_in_virtual_time
from split.wire.limits import DEFAULT_LIMITS
from split.wire.messages import (
    Cancel,
    Hello,
    Infer,
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Priority,
    Refused,
    Reply,
    SegmentOpen,
    SegmentReady,
)
from split.workbench.cut import prepare

TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[3] x) => (float[3] y)
{
  a = Relu(x)
  b = Exp(a)
  y = Add(a, b)
}
"""
X = np.array([0.0, 1.0, -1.0], np.float32)
Y = np.maximum(X, 0) + np.exp(np.maximum(X, 0))  # the model, as a formula

HEAD_MS, TAIL_MS, WHOLE_MS = 40.0, 60.0, 100.0
ROW_MS = 30.0
"""The companion's time for a row, where requests are batches."""
MUST_COME = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail")))
BRONZE = Contract(behaviour=Behaviour(service_class="bronze"))
"""Never finished here before the latest start."""
SENT_ONCE = Contract(behaviour=Behaviour(retry=Retry(attempts=1)))
HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 20, codecs=("raw",))

Behaviour_ = Callable[["Lab", MemoryChannel, Infer, memoryview], Awaitable[None]]


class SlowJob(asyncio.Future[Timed[Any]]):
    started_at_s: float | None = None
    yields = False
    ends: asyncio.TimerHandle | None = None

    @property
    def running_ms(self) -> float:
        return 0.0 if self.started_at_s is None else (self.get_loop().time() - self.started_at_s) * 1000


class SlowCompute:
    """Stands for `agent.compute.Compute`: one job at a time, earliest deadline first, each taking what it was expected
    to (`takes_ms`: or other than that), in virtual time."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.on_load: Callable[[float, float], None] = lambda *load: None
        self.takes_ms: Callable[[float], float] = lambda expected_ms: expected_ms
        self.took_ms: list[float] = []
        self.ranks: list[int] = []
        self._waiting: list[tuple[float, int, float, float, Callable[[], Any], SlowJob]] = []
        self._entered = itertools.count()
        self._busy_until_s = 0.0
        self._busy = False
        self._running: SlowJob | None = None

    @property
    def queue_ms(self) -> float:
        if self._busy and self._running is not None and self._running.yields:
            return 0.0
        rest_ms = max(self._busy_until_s - asyncio.get_running_loop().time(), 0.0) * 1000
        return rest_ms + sum(job[3] for job in self._waiting if not job[5].cancelled())

    def run(
        self,
        work: Callable[[], Any],
        *,
        deadline_at_s: float,
        expected_ms: float,
        rank: int = 99,
        stop: Stop | None = None,
        yields: bool = False,
    ) -> asyncio.Future[Timed[Any]]:
        """`stop`: not asked, what runs here runs to its end; but one that `yields` ends at once."""
        self.ranks.append(rank)
        self.on_load(expected_ms, deadline_at_s)
        loop = asyncio.get_running_loop()
        future = SlowJob(loop=loop)
        future.yields = yields
        if self._busy and self._running is not None and self._running.yields:
            assert self._running.ends is not None
            self._running.ends.cancel()
            self._running.cancel()
            self._busy = False
        heapq.heappush(self._waiting, (deadline_at_s, next(self._entered), loop.time(), expected_ms, work, future))
        if not self._busy:
            self._next()
        self.on_load(0.0, math.inf)
        return future

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._busy = False
        while self._waiting and not self._busy:
            _, _, entered_at_s, expected_ms, work, future = heapq.heappop(self._waiting)
            if not future.cancelled():
                future.started_at_s, self._running = loop.time(), future
                self._busy, self._busy_until_s = True, loop.time() + expected_ms / 1000
                queue_ms = (loop.time() - entered_at_s) * 1000
                run_ms = self.takes_ms(expected_ms)
                future.ends = loop.call_later(run_ms / 1000, self._done, work, future, queue_ms, run_ms)

    def _done(self, work: Callable[[], Any], future: SlowJob, queue_ms: float, run_ms: float) -> None:
        self.took_ms.append(run_ms)
        self._running = future.ends = None
        try:
            timed = Timed(work(), queue_ms, run_ms)
        except IsthmusError as error:
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(timed)
        self._next()


class SteadyPlanner(Planner):
    """Does not learn from how long the tiny model really takes: here it takes what the profile says. Decides as `wish`
    asks for requests that leave it free."""

    wish: Mapping[str, Any] | None = None

    def decide(self, name: str, facts: RequestFacts, **now: Any) -> Decision:
        return super().decide(name, replace(facts, **(self.wish or {})), **now)

    def observe_edge(self, name: str, plan: Plan, stage: str, measured_ms: float) -> None:
        return None

    def observe_rest(self, name: str, plan: Plan, measured_ms: float) -> None:
        """Here it is the time of the virtual worker, which no stage has clocked."""


class Lab:
    """A daemon's middle and a companion that does as it is told. `rows`: None, or the batch of its requests, which the
    profile calls `apart` or not."""

    def __init__(
        self,
        folder: Path,
        *,
        behave: Behaviour_,
        contract: Contract | None = None,
        rows: int | None = None,
        apart: bool = True,
        slowdown: float = 1.0,
        battery_low: bool = False,
        probe_bytes_per_hour: int = 2_000_000,
    ) -> None:
        path = folder / "model.onnx"
        onnx.save(onnx.parser.parse_model(TINY if rows is None else TINY.replace("float[3]", "float[N, 3]")), path)
        self.x = X if rows is None else X + np.arange(rows, dtype=np.float32)[:, None]
        self.tail_ms = 6.0 if rows is None else ROW_MS
        card = prepare(path, folder / "cache")
        self.cut = card.cuts[-1].id
        profile = ModelProfile(
            digest=card.digest,
            runtime="test",
            fingerprint="test",
            dims={} if rows is None else {"N": 1},
            sizes=() if rows is None else (1,),
            rows_apart=rows is not None and apart,
            threads=1,
            whole_ms=WHOLE_MS,
            image_ms=0.0,
            input_codecs=(CodecCosts(codec="raw", bytes=12, encode_ms=0.0, decode_ms=0.0),),
            encoded_bytes=0,
            output_bytes=12,
            cuts=tuple(
                CutCosts(
                    cut=cut.id,
                    head_ms=HEAD_MS,
                    tail_ms=TAIL_MS,
                    codecs=(CodecCosts(codec="raw", bytes=24, encode_ms=0.0, decode_ms=0.0),),
                )
                for cut in card.cuts
            ),
        )
        self.model = ServedModel(
            name=ModelName("tiny"),
            version="1",
            card=card,
            contract=contract or Contract(),
            images={},
            labels={},
            folder=folder / "cache",
            profile=profile,
            store=SegmentStore(OrtEngine(), threads=1, budget_bytes=1 << 20),
        )
        self.behave = behave
        self.shift = 0.0
        """What the companion's golden outputs are off by."""
        self.planner = SteadyPlanner(
            battery_low=lambda: battery_low, slowdown=slowdown, probe_bytes_per_hour=probe_bytes_per_hour
        )
        self.know_model_anew()
        self.compute = SlowCompute(slowdown)
        lateness = self.lateness = Lateness(queue_ms=lambda: self.compute.queue_ms)
        self.compute.on_load = lateness.make_room
        self.uplink = Uplink(
            companions=["companion:1"],
            dial=self._dial,
            planner=self.planner,
            golden=self,  # type: ignore[arg-type]  # the same methods, without a worker
            backoff=Backoff(draw=lambda: 0.5),
        )
        self.uplink.on_silence = lateness.hurry_all
        self.journal = Journal()
        self.serve = Serve(
            planner=self.planner,
            compute=self.compute,  # type: ignore[arg-type]  # the same methods, in virtual time
            uplink=self.uplink,
            lateness=lateness,
            journal=self.journal,
        )
        self.intake = Intake(default_deadline_ms=10_000, room=Room(1 << 20))
        self.seen: list[Infer] = []
        self.cancelled: list[str] = []
        self.dials = 0
        self.companions: list[asyncio.Task[None]] = []

    def know_model_anew(self) -> None:
        """As when it is loaded again."""
        assert self.model.profile is not None
        self.planner.add_model("tiny", self.model.card, self.model.profile, self.model.contract)

    async def __aenter__(self) -> Lab:
        self.uplink.serve_model(self.model)
        self.uplink.start()
        await self.until(lambda: not self.planner.local_only_reason("tiny"))
        await asyncio.sleep(0.1)  # virtual: the cuts are opened one after the other
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.uplink.close()
        for task in self.companions:
            task.cancel()
        await asyncio.gather(*self.companions, return_exceptions=True)

    @staticmethod
    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():  # noqa: ASYNC110 - virtual time, costs nothing
                await asyncio.sleep(0.01)

    async def _dial(self, address: str, timeout_s: float, first: Sequence[Message]) -> MemoryChannel:
        self.dials += 1
        device, companion = memory_pair(HELLO, HELLO)
        for message in first:
            device.send(message)
        self.companions.append(asyncio.create_task(self._companion(companion)))
        return device

    async def offered(self, model: ServedModel) -> bytes:
        return b""

    async def run(self, model: ServedModel, cut: Any) -> Any:
        inputs = golden_inputs(model.card.inputs, {})
        if cut is None:
            return sample(model.whole().run(inputs))
        made = model.head(cut).run(inputs)
        return sample(made | model.tail(cut).run({n: made[n] for n in model.tail(cut).inputs}))

    def forget(self, model: ServedModel) -> None:
        pass

    async def _companion(self, channel: MemoryChannel) -> None:
        try:
            while True:
                incoming = await channel.receive()
                match incoming.message:
                    case ModelOffer(digest=digest):
                        golden = {n: v + self.shift for n, v in (await self.run(self.model, None)).items()}
                        channel.send(ModelNeed(digest=digest, missing=()))
                        channel.send(ModelReady(digest=digest, golden=joined(golden), whole_ms=10.0))
                    case SegmentOpen(digest=digest, cut=cut):
                        golden = await self.run(self.model, cut)
                        channel.send(SegmentReady(digest=digest, cut=cut, golden=joined(golden), tail_ms=self.tail_ms))
                    case Infer() as infer:
                        self.seen.append(infer)
                        await self.behave(self, channel, infer, incoming.payload)
                    case Cancel(request_id=request_id):
                        self.cancelled.append(request_id)
                    case _:
                        pass
        except ChannelError:
            return

    def break_stage(self, monkeypatch: pytest.MonkeyPatch, stage: str, error: IsthmusError) -> None:
        """From now on this stage (head, whole, encode, send) raises."""

        def fail(*_: object, **__: object) -> Any:
            raise error

        match stage:
            case "head" | "whole":
                monkeypatch.setattr(self.model, stage, fail)
            case "encode":
                monkeypatch.setattr(stages, "encode", fail)
            case "send":
                channel = self.uplink._channel
                send = channel.send  # type: ignore[union-attr]  # it is connected

                def refuse(message: Any, *rest: Any, **more: Any) -> None:
                    (fail if isinstance(message, Infer) else send)(message, *rest, **more)

                monkeypatch.setattr(channel, "send", refuse)

    async def ask(
        self, *, deadline_ms: float | None = 1000.0, mode: str = "split", free: bool = False, **options: Any
    ) -> Outcome:
        """By the plan that `mode` says; `free`: the planner's choice, not the caller's."""
        loop = asyncio.get_running_loop()
        cut = self.cut if mode == "split" else None
        self.planner.wish = {"mode": Placement(mode), "cut": cut} if free else None
        with self.intake.admit(
            self.model,
            {"x": self.x},
            (),
            RequestOptions(deadline_ms=deadline_ms, **({} if free else {"mode": mode, "cut": cut}), **options),
            received_at_s=loop.time(),
            now_s=loop.time(),
        ) as request:
            self.request: InferenceRequest = request
            return await self.serve.infer(request)


def joined(tensors: Any) -> bytes:
    return b"".join(bytes(part) for part in encode(tensors, "raw"))


def answer(lab: Lab, infer: Infer, payload: memoryview, *, wrong: bool = False) -> tuple[Reply, list[Any]]:
    """The right reply (or, to prove that it is never used, a wrong one)."""
    feeds = decode(payload, max_bytes=1 << 20)
    outputs = (lab.model.whole() if infer.cut == "offload" else lab.model.tail(infer.cut)).run(feeds)  # type: ignore[arg-type]
    if wrong:
        outputs = {name: value + 1 for name, value in outputs.items()}
    reply = Reply(
        request_id=infer.request_id,
        attempt=infer.attempt,
        cut=infer.cut,
        codec=infer.codec,
        queue_ms=0.0,
        decode_ms=0.0,
        tail_ms=6.0,
        encode_ms=0.0,
        cloud_ms=6.0,
    )
    return reply, encode(outputs, "raw")


def replies_after(seconds: float) -> Behaviour_:
    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(seconds)
        reply, parts = answer(lab, infer, payload)
        channel.send(reply, parts)

    return behave


async def says_nothing(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    return None


async def dies(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    channel.kill()


async def dies_mid_reply(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    channel.kill(after_bytes=20)
    reply, parts = answer(lab, infer, payload, wrong=True)
    channel.send(reply, parts)


async def refuses(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    channel.send(
        Refused(code="PLAN_MISMATCH", message="no such cut here", request_id=infer.request_id, attempt=infer.attempt)
    )


def assert_right(outcome: Outcome) -> None:
    np.testing.assert_allclose(outcome.outputs["y"], Y, rtol=1e-6)


@pytest.mark.parametrize("mode", ["split", "offload"])
def test_a_companion_that_answers_in_time_makes_the_answer(tmp_path: Path, mode: str) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.02)) as lab:
            outcome = await lab.ask(mode=mode)
            assert_right(outcome)
            assert outcome.ran.placement is Placement(mode)
            assert outcome.fallback == ""
            assert outcome.stages_ms["tail"] == 6.0

    run_in_virtual_time(story())


def unclocked(cloud_ms: float) -> Behaviour_:
    """A companion that had the request for so long, 6 ms of it in the tail, and its reply comes after 20 ms."""

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(0.02)
        reply, parts = answer(lab, infer, payload)
        channel.send(msgspec.structs.replace(reply, cloud_ms=cloud_ms), parts)

    return behave


def test_what_no_stage_has_is_the_rest_and_teaches_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 ms more at the companion beside its stages are 7 ms less of the network and 7 ms more of the rest; the body,
    which was 5 ms behind its header, had come before anything was decided."""
    learned: list[tuple[str, float]] = []
    for module in (stages, waiting):  # the real clock stands still: what it clocks is no virtual time
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(SteadyPlanner, "observe_rest", lambda _, name, plan, ms: learned.append((str(plan), ms)))

    async def asked(behave: Behaviour_, mode: str, came_in_ms: float = 0.0) -> Outcome:
        async with Lab(tmp_path, behave=behave) as lab:
            now_s = asyncio.get_running_loop().time()
            with lab.intake.admit(
                lab.model,
                {"x": lab.x},
                (),
                RequestOptions(deadline_ms=1000.0, mode=mode, cut=lab.cut if mode == "split" else None),
                received_at_s=now_s - came_in_ms / 1000,
                now_s=now_s,
            ) as request:
                outcome = await lab.serve.infer(request)
            lab.serve.settle_books()
            return outcome

    async def story() -> None:
        quick, slow = await asked(unclocked(6.0), "offload"), await asked(unclocked(13.0), "offload", came_in_ms=5.0)
        assert quick.stages_ms["network"] - slow.stages_ms["network"] == pytest.approx(7.0)
        assert slow.stages_ms["rest"] - quick.stages_ms["rest"] == pytest.approx(7.0)
        assert sum(quick.stages_ms.values()) == pytest.approx(quick.total_ms)
        assert sum(slow.stages_ms.values()) + 5.0 == pytest.approx(slow.total_ms)
        here = await asked(unclocked(6.0), "local")
        assert sum(here.stages_ms.values()) == pytest.approx(here.total_ms)
        assert learned == [(str(one.ran), pytest.approx(one.stages_ms["rest"])) for one in (quick, slow, here)]
        failed = await asked(refuses, "split")
        assert failed.fallback
        assert "rest" not in failed.stages_ms
        assert len(learned) == 3

    run_in_virtual_time(story())


def test_a_requests_priority_is_that_of_its_frames(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.02)) as lab:
            sent: list[Priority] = []
            channel = lab.uplink._channel
            assert channel is not None
            send = channel.send

            def watched(message: Any, *rest: Any, priority: Priority = Priority.NORMAL) -> None:
                sent.extend([priority] if isinstance(message, Infer) else [])
                send(message, *rest, priority=priority)

            channel.send = watched  # type: ignore[method-assign]  # seen on its way
            for priority in (0, 1, 2, 3, 2**32 - 1):
                assert_right(await lab.ask(priority=priority))
            assert sent == [Priority.NORMAL, Priority.URGENT, Priority.NORMAL, Priority.BULK, Priority.BULK]

    run_in_virtual_time(story())


@pytest.mark.parametrize("fault", [dies, dies_mid_reply, refuses])
@pytest.mark.parametrize("mode", ["split", "offload"])
def test_a_companion_that_fails_loses_no_request(tmp_path: Path, fault: Behaviour_, mode: str) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=fault) as lab:
            outcome = await lab.ask(mode=mode)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert outcome.fallback
            # head, then what is missing: 40 + 60; offload: all of it. No waiting for a deadline.
            assert outcome.total_ms == pytest.approx(HEAD_MS + TAIL_MS if mode == "split" else WHOLE_MS, abs=0.5)

    run_in_virtual_time(story())


def test_a_silent_companion_is_overtaken_early_enough_for_the_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            outcome = await lab.ask(deadline_ms=500.0)
            assert_right(outcome)
            assert "no reply" in outcome.fallback
            # started at D − tail − margin: 8 ms, 5 % of the tail, 5 % of the 400 ms beyond; not right after the head
            assert outcome.total_ms == pytest.approx(500.0 - 8.0 - 3.0 - 20.0, abs=0.5)
            await lab.until(lambda: lab.cancelled == [lab.request.id])

    run_in_virtual_time(story())


def test_a_reply_that_is_overdue_is_overtaken_by_an_idle_device_long_before_it_must(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            outcome = await lab.ask(deadline_ms=10_000.0, free=True)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert "no reply" in outcome.fallback
            # not before it is expected, and not after a stall would have passed
            chosen = outcome.decision.chosen
            assert outcome.total_ms > chosen.risk_ms + TAIL_MS
            assert outcome.total_ms < chosen.predicted_ms + 200.0
            await lab.until(lambda: lab.cancelled == [lab.request.id])

    run_in_virtual_time(story())


def test_a_companion_that_the_caller_asked_for_is_waited_for_as_long_as_the_deadline_allows(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(5.0)) as lab:
            outcome = await lab.ask(deadline_ms=10_000.0)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.SPLIT
            assert lab.compute.took_ms == [HEAD_MS]

    run_in_virtual_time(story())


def test_a_companion_that_refuses_is_not_taken_for_one_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        stalls: list[float] = []
        monkeypatch.setattr(Replies, "overtaken", lambda _, after_ms, *rest: stalls.append(after_ms))
        async with Lab(tmp_path, behave=refuses) as lab:
            outcome = await lab.ask(free=True)
            assert outcome.ran.placement is Placement.LOCAL
        assert stalls == []
        async with Lab(tmp_path, behave=says_nothing) as lab:
            await lab.ask(free=True)
        assert len(stalls) == 1

    run_in_virtual_time(story())


def test_a_bug_in_what_is_learned_of_an_answer_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006)) as lab:
            monkeypatch.setattr(lab.serve._lessons, "answered", lambda *_: 1 / 0)
            assert_right(await lab.ask())
        assert "nothing was learned from a finished request" in caplog.text

    run_in_virtual_time(story())


def test_a_companion_that_answers_as_expected_is_not_overtaken(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006)) as lab:
            for _ in range(20):
                outcome = await lab.ask(free=True)
                assert outcome.ran.placement is Placement.SPLIT
            assert lab.compute.took_ms == [HEAD_MS] * 20

    run_in_virtual_time(story())


def test_an_overdue_reply_that_comes_first_all_the_same_is_the_one_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            overtaken = await lab.ask(deadline_ms=10_000.0, free=True)
        begins_ms = overtaken.total_ms - TAIL_MS - HEAD_MS
        async with Lab(tmp_path, behave=replies_after((begins_ms + TAIL_MS / 2) / 1000)) as lab:
            outcome = await lab.ask(deadline_ms=10_000.0, free=True)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.SPLIT
            assert outcome.fallback == ""
            await asyncio.sleep(1.0)
            assert lab.compute.took_ms == [HEAD_MS, TAIL_MS]  # the loser had begun, and nobody got its answer
            assert lab.journal.counts() == {"requests": 1, "failures": 0, "fallbacks": 0}

    run_in_virtual_time(story())


def test_a_model_that_is_unloaded_while_its_finish_takes_too_long_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture's finish that is cut off by the reply, for which the planner has no times any more."""

    def as_a_picture(request: InferenceRequest, plan: Plan, prepared: stages.Prepared, *rest: Any, **more: Any) -> None:
        stages.prepare(request, plan, prepared, *rest, **more)
        prepared.encoded = ("x",)

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            overtaken = await lab.ask(deadline_ms=10_000.0, mode="offload", free=True)
        begins_ms = overtaken.total_ms - WHOLE_MS
        async with Lab(tmp_path, behave=replies_after((begins_ms + 2 * WHOLE_MS) / 1000)) as lab:
            monkeypatch.setattr("agent.serve.prepare", as_a_picture)
            monkeypatch.setattr("agent.local_finish.whole", lambda *_: ({}, {}))
            lab.compute.takes_ms = lambda expected_ms: 4 * expected_ms
            asking = asyncio.create_task(lab.ask(deadline_ms=10_000.0, mode="offload", free=True))
            await asyncio.sleep((begins_ms + WHOLE_MS / 2) / 1000)
            lab.planner.remove_model("tiny")
            outcome = await asking
            assert_right(outcome)
            assert outcome.ran.placement is Placement.OFFLOAD
            assert outcome.doubled_ms > WHOLE_MS  # the finish was under way for longer than expected

    run_in_virtual_time(story())


@pytest.mark.parametrize(("energy", "battery_low"), [(2.0, False), (0.0, True)])
def test_where_energy_counts_most_or_is_short_nothing_is_done_twice_to_be_faster(
    tmp_path: Path, energy: float, battery_low: bool
) -> None:
    contract = Contract(behaviour=Behaviour(weights=Weights(latency=1.0, energy=energy)))

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=contract, battery_low=battery_low) as lab:
            outcome = await lab.ask(deadline_ms=1000.0, free=True)
            assert outcome.total_ms == pytest.approx(1000.0 - 8.0 - 3.0 - 45.0, abs=0.5)

    run_in_virtual_time(story())


def test_ten_overdue_requests_are_overtaken_one_at_a_time_when_no_head_waits(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            outcomes = await asyncio.gather(*(lab.ask(deadline_ms=10_000.0, free=True) for _ in range(10)))
            for outcome in outcomes:
                assert_right(outcome)
                assert outcome.ran.placement is Placement.LOCAL
            assert lab.compute.took_ms == [HEAD_MS] * 10 + [TAIL_MS] * 10
            # a line of heads, one of tails, and what the last one was given time for beside the nine before it
            assert max(one.total_ms for one in outcomes) < 10 * HEAD_MS + 10 * TAIL_MS + 1000.0

    run_in_virtual_time(story())


def test_a_hedge_that_is_early_does_not_blame_the_companion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            blamed: list[float] = []
            monkeypatch.setattr(lab.uplink, "suspect", lambda: blamed.append(asyncio.get_running_loop().time()))
            started_s = asyncio.get_running_loop().time()
            outcome = await lab.ask(deadline_ms=10_000.0, free=True)
            # only once the device has the answer and the companion has not
            assert [(at_s - started_s) * 1000 for at_s in blamed] == pytest.approx([outcome.total_ms])

    run_in_virtual_time(story())


def test_many_requests_before_a_silent_companion_all_meet_their_deadlines(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            outcomes = await asyncio.gather(*(lab.ask(deadline_ms=1000.0) for _ in range(6)))
            for outcome in outcomes:
                assert_right(outcome)
                assert outcome.total_ms <= 1000.0
            assert len(lab.compute.took_ms) == 12  # six heads, six tails, nothing twice

    run_in_virtual_time(story())


def scatters(lab: Lab) -> None:
    """Each run of the lab takes a log-normal time, σ = 0.4, and the planner learns from it: what the tiny model really
    takes is no matter."""
    rng = np.random.default_rng(5)
    lab.compute.takes_ms = lambda expected_ms: float(np.exp(rng.normal(0.0, 0.4))) * (WHOLE_MS if expected_ms else 0.0)

    def observe(name: str, plan: Plan, stage: str, measured_ms: float) -> None:
        if stage == "whole":
            Planner.observe_edge(lab.planner, name, plan, stage, max(lab.compute.took_ms[-1], measured_ms))

    lab.planner.observe_edge = observe  # type: ignore[method-assign]  # this one does learn


@pytest.mark.parametrize(("service_class", "quantile"), [("gold", 0.999), ("silver", 0.977), ("bronze", 0.90)])
def test_before_a_silent_companion_a_device_whose_times_scatter_keeps_the_quantile_of_the_class(
    tmp_path: Path, service_class: Any, quantile: float
) -> None:
    async def story() -> None:
        contract = Contract(behaviour=Behaviour(service_class=service_class))
        async with Lab(tmp_path, behave=says_nothing, contract=contract) as lab:
            scatters(lab)

            async def waited_in_time() -> bool | None:
                """None: it did not wait for the companion."""
                sent = len(lab.seen)
                with contextlib.suppress(DeadlineExceeded):
                    outcome = await lab.ask(mode="offload", deadline_ms=700.0)
                    await asyncio.sleep(0.05)  # virtual: the lessons of an answer come after it
                    return outcome.total_ms <= 700.0 if len(lab.seen) > sent else None
                await asyncio.sleep(1.0)
                return False

            for _ in range(60):  # how far they scatter is learned
                await waited_in_time()
            met = [met for _ in range(400) if (met := await waited_in_time()) is not None]
            assert len(met) > 100
            # One standard deviation of the count beside the quantile.
            count = len(met)
            assert sum(met) >= count * quantile - math.sqrt(count * quantile * (1 - quantile))

    run_in_virtual_time(story())


def test_a_finish_that_the_deadline_cuts_off_teaches_that_it_takes_at_least_so_long(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            told: list[tuple[str, float]] = []
            lab.planner.observe_edge = lambda _, plan, stage, ms: told.append((stage, ms))  # type: ignore[method-assign]
            lab.compute.takes_ms = lambda expected_ms: 10 * expected_ms
            with pytest.raises(DeadlineExceeded):
                await lab.ask(mode="offload", deadline_ms=500.0)
            await asyncio.sleep(2.0)
            # It began 100 + 5 + 8 + 20 ms before the deadline: 5 % of itself, 8 ms, 5 % of the 400 ms beyond.
            assert dict(told)["whole"] == pytest.approx(133.0, abs=0.5)

    run_in_virtual_time(story())


def test_the_timeout_of_the_contract_bounds_the_wait_inside_the_deadline(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(service_class="bronze", fallback=Fallback(timeout_ms=50.0)))

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=contract) as lab:
            outcome = await lab.ask(deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.total_ms == pytest.approx(HEAD_MS + 50 + TAIL_MS, abs=0.5)
            assert (outcome.sent, outcome.doubled_ms) == (True, 0.0), "its payload cost energy, too"
            assert not (await lab.ask(mode="local")).sent

    run_in_virtual_time(story())


def test_a_reply_that_comes_while_the_device_finishes_wins_and_the_other_is_dropped(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(service_class="bronze", fallback=Fallback(timeout_ms=50.0)))

    async def story() -> None:
        # late (after 50 ms), but before the local tail (60 ms) is through
        async with Lab(tmp_path, behave=replies_after(0.08), contract=contract) as lab:
            outcome = await lab.ask(deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.SPLIT
            assert outcome.doubled_ms == pytest.approx(80 - 50, abs=1)
            assert outcome.total_ms == pytest.approx(HEAD_MS + 80, abs=2)
            await lab.until(lambda: lab.journal.counts()["requests"] == 1)

    run_in_virtual_time(story())


@pytest.mark.parametrize("fault", [dies, dies_mid_reply, refuses])
@pytest.mark.parametrize("mode", ["split", "offload"])
def test_without_local_fallback_the_loss_is_a_typed_error(tmp_path: Path, fault: Behaviour_, mode: str) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=fault, contract=MUST_COME) as lab:
            with pytest.raises(ChannelError):
                await lab.ask(mode=mode)
            assert lab.compute.took_ms == [HEAD_MS if mode == "split" else 0.0]
            assert lab.intake.room.held_bytes == 0

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    ("timeout_ms", "error_at_s"),
    [(None, 0.5), (100.0, HEAD_MS / 1000 + 0.1)],
)
def test_without_local_fallback_silence_is_a_typed_error_by_the_deadline(
    tmp_path: Path, timeout_ms: float | None, error_at_s: float
) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail", timeout_ms=timeout_ms)))

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=contract) as lab:
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await lab.ask(deadline_ms=500.0)
            assert asyncio.get_running_loop().time() - started_s == pytest.approx(error_at_s, abs=0.001)
            assert lab.compute.took_ms == [HEAD_MS]

    run_in_virtual_time(story())


@pytest.mark.parametrize("stage", ["head", "encode", "send"])
def test_without_local_fallback_a_failure_before_the_bytes_leave_is_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01), contract=MUST_COME) as lab:
            lab.break_stage(monkeypatch, stage, EngineFailed("it broke"))
            with pytest.raises(EngineFailed, match="it broke"):
                await lab.ask()
            assert lab.intake.room.held_bytes == 0

    run_in_virtual_time(story())


@pytest.mark.parametrize("contract", [Contract(), MUST_COME], ids=["local", "503"])
def test_o_wi_02_a_request_for_which_the_full_queue_has_no_room_runs_here_or_is_a_503_within_50_ms(
    tmp_path: Path, contract: Contract
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01), contract=contract) as lab:
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel.freeze()  # the companion stops reading, behind as much as the queue takes
            piece = ModelChunk(digest=lab.model.digest, file="another", offset=0)
            for size in (1 << 19, 1):
                with contextlib.suppress(Overloaded):
                    while True:
                        channel.send(piece, [bytes(size)], priority=Priority.BULK)
            began_s = asyncio.get_running_loop().time()
            if contract is MUST_COME:
                with pytest.raises(Overloaded) as error:  # no sooner known than when the head has run
                    await lab.ask()
                assert error.value.status == 503
                own_ms = HEAD_MS
            else:
                outcome = await lab.ask()
                assert_right(outcome)
                assert "does not fit" in outcome.fallback
                own_ms = HEAD_MS + TAIL_MS
            took_ms = (asyncio.get_running_loop().time() - began_s) * 1000
            assert took_ms - own_ms <= 50
            assert channel.queued_bytes <= DEFAULT_LIMITS.queue_bytes + 1000
            channel.thaw()

    run_in_virtual_time(story())


def test_without_local_fallback_a_plan_that_was_local_from_the_start_is_local(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=MUST_COME) as lab:
            lab.planner.companion_lost("the companion is on holiday")
            for mode in ("auto", "local", "split"):
                outcome = await lab.ask(mode=mode)
                assert outcome.ran.placement is Placement.LOCAL
                assert_right(outcome)

    run_in_virtual_time(story())


ERRORS = [EngineFailed("it broke"), InvalidRequest("it broke"), TooLarge("it broke"), Overloaded("it broke")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("stage", "took_ms"),
    [
        # what the worker did: the head's turn, then the whole; or the tail, where the head had made its boundary
        ("head", [HEAD_MS, WHOLE_MS]),
        ("encode", [HEAD_MS, TAIL_MS]),
        ("send", [HEAD_MS, TAIL_MS]),
    ],
)
def test_a_remote_road_that_breaks_before_the_bytes_leave_ends_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, took_ms: list[float], error: IsthmusError
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.break_stage(monkeypatch, stage, error)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert "it broke" in outcome.fallback
            assert lab.compute.took_ms == took_ms
            assert lab.seen == []

    run_in_virtual_time(story())


def test_a_request_that_the_whole_refuses_too_gets_the_error_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.break_stage(monkeypatch, "head", InvalidRequest("the head takes no such x"))
            lab.break_stage(monkeypatch, "whole", InvalidRequest("the model takes no such x"))
            with pytest.raises(InvalidRequest, match="the model takes"):
                await lab.ask()

    run_in_virtual_time(story())


def test_local_work_that_comes_while_a_request_waits_does_not_make_its_finish_late(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            waiting = asyncio.create_task(lab.ask(deadline_ms=1000.0))
            # The finish could wait until 1 s − (63 + 8 + 5 % of 900) ms = 0.884; from 0.88 on the worker would be
            # busy for 100 ms.
            await asyncio.sleep(0.880)
            local = await lab.ask(deadline_ms=5000.0, mode="local")
            split = await waiting
            assert_right(split)
            assert split.total_ms == pytest.approx(880 + TAIL_MS, abs=0.5)
            assert_right(local)
            assert local.total_ms == pytest.approx(TAIL_MS + WHOLE_MS, abs=0.5)

    run_in_virtual_time(story())


def test_local_work_with_little_time_goes_before_the_finishes_of_those_that_have_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            waiting = [asyncio.create_task(lab.ask(deadline_ms=1000.0)) for _ in range(6)]
            # Six tails, with their margins, are to begin 85 ms from now; without margins there is time for all seven.
            await asyncio.sleep(0.280)
            local = await lab.ask(deadline_ms=WHOLE_MS + 20.0, mode="local")
            assert_right(local)
            for split in await asyncio.gather(*waiting):
                assert_right(split)
                assert split.total_ms <= 1000.0

    run_in_virtual_time(story())


def test_a_companion_is_not_blamed_for_what_the_device_finished_early_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.1)) as lab:
            blamed: list[None] = []
            monkeypatch.setattr(lab.uplink, "suspect", lambda: blamed.append(None))
            waiting = asyncio.create_task(lab.ask(deadline_ms=140.0))
            await asyncio.sleep(0.041)  # the head is done, the bytes have left a moment ago
            local = asyncio.create_task(lab.ask(deadline_ms=5000.0, mode="local"))
            outcome = await waiting
            assert outcome.ran.placement is Placement.LOCAL
            assert outcome.total_ms <= 140.0
            assert blamed == []
            await local

    run_in_virtual_time(story())


def test_a_tail_that_is_not_open_any_more_is_given_time_to_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            monkeypatch.setattr(lab.model.store, "activation_ms", lambda path: 300.0)
            outcome = await lab.ask(deadline_ms=1000.0)
            # local finish 360 ms; started 5 % of it, 8 ms and 5 % of the other 600 ms before it had to
            assert outcome.total_ms == pytest.approx(1000.0 - 18 - 8 - 30, abs=0.5)

    run_in_virtual_time(story())


def test_what_the_worker_has_to_open_for_a_finish_is_a_stage_beside_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            await lab.ask()
            store, request = lab.model.store, lab.request
            prepared = stages.Prepared.nothing(request)
            plan = Plan(placement=Placement.SPLIT, cut=lab.cut, codec="raw")
            stages.prepare(request, plan, prepared)
            for work, finished in ((stages.whole, "whole"), (stages.finish, "local_tail")):
                work(request, prepared)  # opens it where it is not
                assert set(work(request, prepared)[1]) == {finished}
                store.forget(Path(lab.model.card.path))
                store.forget(lab.model.folder)
                assert set(work(request, prepared)[1]) == {"activate", finished}

    run_in_virtual_time(story())


def test_the_way_out_of_a_request_stays_open_while_it_waits_whatever_else_is_opened(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            store, whole = lab.model.store, Path(lab.model.card.path)
            head, tail = (lab.model.folder / f"{lab.cut}.{half}.onnx" for half in ("head", "tail"))
            asked = asyncio.ensure_future(lab.ask(deadline_ms=1000.0))
            await asyncio.sleep(0.5)
            assert lab.seen
            store._budget_bytes = 1  # everything that may be closed is
            store.forget(head)
            store.get(head)
            assert store.is_open(tail)
            assert not store.is_open(whole)
            assert_right(await asked)
            store.forget(head)
            store.get(head)
            assert not store.is_open(tail)

    run_in_virtual_time(story())


def test_a_cut_that_is_worth_opening_is_opened_after_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.0)) as lab:
            warmed: list[CutId] = []
            monkeypatch.setattr(lab.model, "warm", warmed.append)
            lab.planner.add_model(
                "tiny",
                lab.model.card,
                lab.model.profile,  # type: ignore[arg-type]  # it is there
                lab.model.contract,
                lambda: {lab.cut: (500.0, 500.0)},
            )
            lab.planner.companion_ready("tiny", 10_000.0, 0.0)
            lab.planner.segment_ready("tiny", lab.cut, TAIL_MS / 10)
            outcome = await lab.ask(deadline_ms=10_000.0, mode="auto")
            assert outcome.ran is LOCAL
            await asyncio.sleep(0.1)
            assert warmed == [lab.cut]

    run_in_virtual_time(story())


@pytest.mark.parametrize(("deadline_ms", "ran"), [(150.0, "local"), (1000.0, "split"), (60.0, "none")])
def test_halves_that_are_closed_never_cost_a_deadline_that_the_whole_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_ms: float, ran: str
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.0)) as lab:
            warmed: list[set[str]] = []
            opened_head = lab.model.opened_head

            async def opens_slowly(cut: CutId) -> Segment:
                await asyncio.sleep(0.3)
                return await opened_head(cut)

            monkeypatch.setattr(lab.model, "opened_head", opens_slowly)
            monkeypatch.setattr(lab.model.store, "activation_ms", lambda path: 0.0 if "model" in path.name else 150.0)
            monkeypatch.setattr(lab.model.store, "warm", lambda paths: warmed.append({path.name for path in paths}))
            if ran == "none":  # no plan is in time: what was chosen is tried
                with pytest.raises(DeadlineExceeded):
                    await lab.ask(deadline_ms=deadline_ms)
            else:
                outcome = await lab.ask(deadline_ms=deadline_ms)
                assert_right(outcome)
                assert outcome.ran.placement is Placement(ran)
                assert outcome.total_ms == pytest.approx(WHOLE_MS if ran == "local" else 300.0 + HEAD_MS, abs=1)
                opened_ms = None if ran == "local" else pytest.approx(300.0, abs=1)
                assert outcome.stages_ms.get("activate") == opened_ms
            halves = {f"{lab.cut}.head.onnx", f"{lab.cut}.tail.onnx"}
            assert warmed == ([halves] if ran == "local" else [])

    run_in_virtual_time(story())


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_what_the_device_has_made_of_a_waiting_request_counts_as_in_flight(tmp_path: Path) -> None:
    held: list[tuple[int, int]] = []

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(0)
        held.append((lab.intake.room.held_bytes, payload.nbytes))
        await replies_after(0.01)(lab, channel, infer, payload)

    async def story() -> None:
        async with Lab(tmp_path, behave=behave) as lab:
            boundary_bytes = sum(spec.nbytes() for spec in lab.model.card.cut(lab.cut).boundary)
            await lab.ask()
            [(held_bytes, payload_bytes)] = held
            assert held_bytes == X.nbytes + boundary_bytes + payload_bytes
            assert lab.intake.room.held_bytes == 0

    run_in_virtual_time(story())


@pytest.mark.parametrize("fault", [says_nothing, dies, dies_mid_reply, refuses])
@pytest.mark.parametrize("deadline_ms", [30.0, 50.0, 99.0, 1000.0])
def test_whatever_becomes_of_a_request_its_bytes_are_given_back_once(
    tmp_path: Path, fault: Behaviour_, deadline_ms: float
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=fault) as lab:
            for mode in ("split", "offload"):
                task = asyncio.create_task(lab.ask(mode=mode, deadline_ms=deadline_ms))
                cancelled = asyncio.create_task(lab.ask(mode=mode, deadline_ms=deadline_ms))
                await asyncio.sleep(0.045)
                cancelled.cancel()
                await asyncio.wait([task, cancelled])
                task.exception()  # an answer or a typed error
                assert lab.intake.room.held_bytes == 0

    run_in_virtual_time(story())


def test_no_tensor_outlives_its_answer_in_the_books(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            outcome = await lab.ask(mode="local")
            alive = weakref.ref(outcome.outputs["y"])
            del outcome
            await asyncio.sleep(0)  # the loop lets go of what woke us
            assert lab.journal.counts()["requests"] == 0  # still to be written down
            assert alive() is None
            lab.serve.settle_books()
            assert lab.journal.counts()["requests"] == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize("room_bytes", [13, 12 + 60])
def test_a_request_whose_boundary_has_no_room_is_answered_here(tmp_path: Path, room_bytes: int) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.intake = Intake(default_deadline_ms=10_000, room=Room(room_bytes))
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert "no room" in outcome.fallback
            assert lab.seen == []

    run_in_virtual_time(story())


def test_a_deadline_that_cannot_be_met_is_a_typed_error_at_the_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            started = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded, match="no answer within 30 ms"):
                await lab.ask(deadline_ms=30.0, mode="local")
            assert asyncio.get_running_loop().time() - started == pytest.approx(0.030, abs=0.002)

    run_in_virtual_time(story())


@pytest.mark.parametrize("late_s", [0.02, 0.2], ids=["on the worker", "at the companion"])
def test_o_wi_13_a_daemon_that_stops_finishes_here_what_waits_for_a_silent_companion(
    tmp_path: Path, late_s: float
) -> None:
    """Within what the device needs, not at the request's deadline."""

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            asked = asyncio.create_task(lab.ask(deadline_ms=20_000.0))
            await asyncio.sleep(late_s)
            lab.lateness.close()
            outcome = await asked
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms <= max(late_s * 1000, HEAD_MS) + TAIL_MS + 1.0

    run_in_virtual_time(story())


@pytest.mark.parametrize(("mode", "frames"), [("offload", 1), ("local", 0)])
def test_o_gs_08_all_remote_is_one_request_and_all_local_is_none(tmp_path: Path, mode: str, frames: int) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.005)) as lab:
            assert_right(await lab.ask(mode=mode))
            assert len(lab.seen) == frames
            assert lab.dials == 1

    run_in_virtual_time(story())


def test_o_oi_10_a_request_behind_a_busy_worker_ends_at_its_timeout_and_is_never_run(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            loop, ran = asyncio.get_running_loop(), []
            lab.compute.run(lambda: None, deadline_at_s=0.0, expected_ms=90_000.0)
            lab.model.whole = lambda: ran.append("whole")  # type: ignore[method-assign,assignment]  # never called
            started_s = loop.time()
            with pytest.raises(DeadlineExceeded, match="no answer within 500 ms"):
                await lab.ask(deadline_ms=500.0, mode="local")
            assert loop.time() - started_s == pytest.approx(0.5, abs=0.05)
            assert lab.compute.queue_ms <= 90_000.0
            await asyncio.sleep(120.0)
            assert (ran, lab.compute.took_ms) == ([], [90_000.0])

    run_in_virtual_time(story())


def test_o_oi_12_a_model_that_sleeps_two_seconds_is_late_for_all_who_gave_one_and_for_nobody_else(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            finishes_in(lab, 2000.0)
            loop = asyncio.get_running_loop()
            answered_s: list[float] = []

            async def worker(requests: int, deadline_ms: float | None) -> None:
                for _ in range(requests):
                    started_s = loop.time()
                    try:
                        assert_right(await lab.ask(deadline_ms=deadline_ms, mode="local"))
                    except DeadlineExceeded:
                        answered_s.append(loop.time() - started_s)

            await asyncio.gather(*(worker(4, 1000.0) for _ in range(5)))
            assert len(answered_s) == 20
            assert all(0.999 <= each <= 1.1 for each in answered_s), answered_s
            answered_s.clear()
            lab.intake = Intake(default_deadline_ms=3_600_000, room=Room(1 << 20))
            await asyncio.gather(*(worker(4, None) for _ in range(5)))
            assert answered_s == []
            lab.serve.settle_books()
            assert lab.journal.counts() == {"requests": 40, "failures": 20, "fallbacks": 0}

    run_in_virtual_time(story())


# -- sent again -------------------------------------------------------------------------------------------------------


def dies_first(then: Behaviour_, *, times: int = 1) -> Behaviour_:
    """The connection ends under the first requests; the companion that is reached next is another, with no memory."""

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await (dies if len(lab.seen) <= times else then)(lab, channel, infer, payload)

    return behave


def finishes_in(lab: Lab, ms: float) -> None:
    """What is left of a request takes the device so long. The companion is back after 50 ms, the pause of the back-off,
    and expected to need 6 ms."""
    lab.planner.finish_ms = lambda *request: ms  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", ["split", "offload"])
def test_o_wi_12_a_request_that_its_companion_took_with_it_is_answered_by_the_next_from_the_start(
    tmp_path: Path, mode: str
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.02))) as lab:
            finishes_in(lab, 2000.0)
            outcome = await lab.ask(mode=mode, deadline_ms=9_000.0)
            assert_right(outcome)
            assert outcome.ran.placement is Placement(mode)
            assert outcome.fallback == ""
            first, second = lab.seen
            assert (first.attempt, second.attempt) == (1, 2)
            assert msgspec.structs.replace(first, attempt=2, budget_ms=0.0) == msgspec.structs.replace(
                second, budget_ms=0.0
            )
            assert 0.0 < second.budget_ms < first.budget_ms
            assert outcome.total_ms < 1000.0
            lab.serve.settle_books()
            assert lab.journal.counts() == {"requests": 1, "failures": 0, "fallbacks": 0}
            assert lab.uplink.inflight == 0

    run_in_virtual_time(story())


def test_where_the_device_is_sooner_nothing_is_sent_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.5))) as lab:
            finishes_in(lab, 55.0)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(HEAD_MS + 55.0, abs=0.5)
            await asyncio.sleep(5)
            assert len(lab.seen) == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize(("attempts", "deaths", "answered"), [(1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True)])
def test_a_request_goes_to_a_companion_as_often_as_its_contract_says(
    tmp_path: Path, attempts: int, deaths: int, answered: bool
) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail"), retry=Retry(attempts=attempts)))

    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.02), times=deaths), contract=contract) as lab:
            if answered:
                assert_right(await lab.ask(deadline_ms=9_000.0))
            else:
                with pytest.raises(ChannelError):
                    await lab.ask(deadline_ms=9_000.0)
            assert [infer.attempt for infer in lab.seen] == list(range(1, min(attempts, deaths + 1) + 1))

    run_in_virtual_time(story())


def test_a_request_that_cannot_be_sent_again_in_time_is_an_error_by_its_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=MUST_COME) as lab:

            async def unreachable(address: str, timeout_s: float, first: object) -> MemoryChannel:
                raise NotReached("REFUSED", "nobody is there")

            lab.uplink._dialler._dial = unreachable
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await lab.ask(deadline_ms=500.0)
            assert asyncio.get_running_loop().time() - started_s == pytest.approx(0.5, abs=0.001)
            assert lab.uplink.inflight == 0

    run_in_virtual_time(story())


def test_the_device_that_is_through_before_the_second_answer_makes_the_only_one(tmp_path: Path) -> None:
    """The companion is expected sooner and is late: the finish that began with the loss goes on beside it."""

    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(60.0))) as lab:
            finishes_in(lab, 2000.0)
            outcome = await lab.ask(deadline_ms=9_000.0)
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(HEAD_MS + 2000.0, abs=0.5)
            assert [infer.attempt for infer in lab.seen] == [1, 2]
            await asyncio.sleep(100)  # its reply comes, and nobody is there
            assert lab.journal.counts()["requests"] == 1
            assert lab.cancelled == [lab.request.id]

    run_in_virtual_time(story())


def test_remote_use_comes_back_by_itself_after_a_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=SENT_ONCE) as lab:
            await lab.ask()
            lab.behave = replies_after(0.01)
            lost_at = asyncio.get_running_loop().time()
            await lab.until(lambda: not lab.planner.local_only_reason("tiny"))
            assert asyncio.get_running_loop().time() - lost_at < 5.0
            await asyncio.sleep(0.1)
            outcome = await lab.ask()
            assert outcome.ran.placement is Placement.SPLIT
            assert_right(outcome)
            assert lab.dials == 2

    run_in_virtual_time(story())


def test_a_silent_companion_is_not_asked_again_until_it_speaks(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel._other.freeze()
            await lab.ask(deadline_ms=300.0)
            outcome = await lab.ask(deadline_ms=300.0, mode="auto")
            assert outcome.ran.placement is Placement.LOCAL
            assert outcome.fallback == ""
            assert len(lab.seen) == 1
            channel._other.thaw()
            await lab.until(lambda: not lab.planner.local_only_reason("tiny"))

    run_in_virtual_time(story())


def test_what_waits_for_a_companion_of_which_nothing_is_heard_does_not_wait_for_its_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            lab.intake = Intake(default_deadline_ms=60_000, room=Room(1 << 20))
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            waiting = [asyncio.create_task(lab.ask(deadline_ms=deadline_ms)) for deadline_ms in (60_000.0, 50_000.0)]
            await lab.until(lambda: len(lab.seen) == 2)
            channel._other.freeze()
            later, sooner = await asyncio.gather(*waiting)
            for outcome in (later, sooner):
                assert_right(outcome)
                assert outcome.ran.placement is Placement.LOCAL
                assert outcome.total_ms < (SILENCE_S + 1.0) * 1000
            assert sooner.total_ms < later.total_ms

    run_in_virtual_time(story())


def test_a_companion_that_computes_differently_is_never_asked_and_the_reason_is_shown(tmp_path: Path) -> None:
    async def story() -> None:
        lab = Lab(tmp_path, behave=replies_after(0.01))
        lab.shift = 1e-3
        lab.uplink.serve_model(lab.model)
        lab.uplink.start()
        await lab.until(lambda: "differently" in lab.planner.local_only_reason("tiny"))
        for mode in ("auto", "split", "offload"):
            outcome = await lab.ask(mode=mode)
            assert outcome.ran.placement is Placement.LOCAL
            assert_right(outcome)
        assert lab.seen == []
        await lab.__aexit__()

    run_in_virtual_time(story())


async def replies_with_another_output(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    reply, _ = answer(lab, infer, payload)
    channel.send(reply, encode({"z": X}, "raw"))


async def replies_with_another_element_type(
    lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview
) -> None:
    reply, parts = answer(lab, infer, payload)
    outputs = decode(b"".join(bytes(part) for part in parts), max_bytes=1 << 20)
    channel.send(reply, encode({name: array.astype(np.float64) for name, array in outputs.items()}, "raw"))


async def replies_for_another_cut(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    reply, parts = answer(lab, infer, payload, wrong=True)
    channel.send(msgspec.structs.replace(reply, cut="0123456789ab"), parts)


@pytest.mark.parametrize(
    "fault", [replies_with_another_output, replies_with_another_element_type, replies_for_another_cut]
)
def test_a_reply_that_does_not_fit_its_request_is_never_an_answer(tmp_path: Path, fault: Behaviour_) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=fault) as lab:
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert "not usable" in outcome.fallback

    run_in_virtual_time(story())


def test_a_forced_placement_that_cannot_be_had_is_answered_here_and_says_why(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.planner.companion_lost("the companion is on holiday")
            outcome = await lab.ask(mode="offload")
            assert_right(outcome)
            assert "on holiday" in outcome.fallback

    run_in_virtual_time(story())


# -- in parts --------------------------------------------------------------------------------------------------------


def assert_right_rows(lab: Lab, outcome: Outcome) -> None:
    a = np.maximum(lab.x, 0)
    np.testing.assert_allclose(outcome.outputs["y"], a + np.exp(a), rtol=1e-6)
    lab.serve.settle_books()
    assert lab.journal.counts()["requests"] == 1
    assert lab.intake.room.held_bytes == 0


def takes_its_time(fault: Behaviour_ | None = None, *, at: int = -1) -> Behaviour_:
    """One after the other, `ROW_MS` a row; the request of number `at` meets the fault."""

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if fault is not None and len(lab.seen) == at + 1:
            await fault(lab, channel, infer, payload)
            return
        reply, parts = answer(lab, infer, payload)
        tail_ms = ROW_MS * len(decode(b"".join(bytes(part) for part in parts), max_bytes=1 << 20)["y"])
        await asyncio.sleep(tail_ms / 1000)
        channel.send(msgspec.structs.replace(reply, tail_ms=tail_ms, cloud_ms=tail_ms), parts)

    return behave


def test_a_batch_goes_in_parts_and_one_answer_comes_of_them(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=takes_its_time(), rows=4) as lab:
            outcome = await lab.ask()
            assert_right_rows(lab, outcome)
            assert (outcome.ran.placement, outcome.fallback) == (Placement.SPLIT, "")
            assert [infer.request_id for infer in lab.seen] == [f"{lab.request.id}/{k}" for k in range(4)]
            # each head of 40 ms runs while the part before is away; not (40 + 30) · 4
            assert outcome.total_ms == pytest.approx(4 * HEAD_MS + ROW_MS, abs=2)
            assert outcome.decision.chosen.predicted_ms == pytest.approx(outcome.total_ms, abs=10)
            explained = lab.journal.explain(lab.request.id)
            assert explained is not None
            assert explained["chosen"]["parts"] == 4
            assert explained["measured_ms"]["head"] > 0

    run_in_virtual_time(story())


@pytest.mark.parametrize("deadline_ms", [300.0, 450.0])
def test_a_part_is_expected_back_after_its_own_share_and_nothing_is_computed_twice(
    tmp_path: Path, deadline_ms: float
) -> None:
    """Its tail takes 30 ms there, not the 120 of the batch: by the batch's, the last would be late for sure."""

    async def story() -> None:
        async with Lab(tmp_path, behave=takes_its_time(), rows=4) as lab:
            outcome = await lab.ask(deadline_ms=deadline_ms)
            assert_right_rows(lab, outcome)
            assert (outcome.ran.placement, outcome.fallback) == (Placement.SPLIT, "")
            await asyncio.sleep(1.0)
            assert lab.compute.took_ms == pytest.approx([HEAD_MS] * 4)

    run_in_virtual_time(story())


def test_a_model_that_mixes_rows_is_never_parted(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=takes_its_time(), rows=4, apart=False) as lab:
            outcome = await lab.ask()
            assert_right_rows(lab, outcome)
            assert [infer.request_id for infer in lab.seen] == [lab.request.id]
            assert outcome.total_ms == pytest.approx(4 * (HEAD_MS + ROW_MS), abs=2)

    run_in_virtual_time(story())


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("fault", [dies, dies_mid_reply, refuses])
def test_a_companion_that_fails_between_two_parts_loses_none(tmp_path: Path, fault: Behaviour_, at: int) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=takes_its_time(fault, at=at), rows=4, contract=SENT_ONCE) as lab:
            outcome = await lab.ask(deadline_ms=5000.0)
            assert_right_rows(lab, outcome)
            assert "of 4 parts were finished here" in outcome.fallback
            assert outcome.sent
            heads = [ms for ms in lab.compute.took_ms if ms == pytest.approx(HEAD_MS)]
            assert len(heads) == 4  # what was computed is not computed again

    run_in_virtual_time(story())


def test_parts_of_a_silent_companion_are_finished_here_by_the_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, rows=4) as lab:
            outcome = await lab.ask(deadline_ms=500.0)
            assert_right_rows(lab, outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert outcome.total_ms <= 500.0
            assert len(lab.compute.took_ms) == 8  # four heads, four tails
            await lab.until(lambda: len(lab.cancelled) == 4)

    run_in_virtual_time(story())


def test_where_only_the_companion_may_answer_a_lost_part_is_the_requests_error(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail"), retry=Retry(attempts=1)))

    async def story() -> None:
        async with Lab(tmp_path, behave=takes_its_time(refuses, at=1), rows=4, contract=contract) as lab:
            with pytest.raises(ChannelError, match="no such cut"):
                await lab.ask()
            assert lab.intake.room.held_bytes == 0
            assert lab.uplink.inflight == 0

    run_in_virtual_time(story())


# -- several requests at once ----------------------------------------------------------------------------------------


def test_what_a_request_takes_behind_others_teaches_nothing_about_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            taught: list[float] = []
            monkeypatch.setattr(lab.planner, "observe_total", lambda name, plan, ms, predicted_ms: taught.append(ms))
            outcomes = await asyncio.gather(*(lab.ask(mode="local", deadline_ms=5000.0) for _ in range(6)))
            lab.serve.settle_books()
            assert taught == [min(outcome.total_ms for outcome in outcomes)]

    run_in_virtual_time(story())


@pytest.mark.parametrize(
    ("slowest", "link_ms", "companion_ms"), [("device", 10.0, 10.0), ("link", 70.0, 10.0), ("companion", 10.0, 70.0)]
)
def test_requests_follow_each_other_at_the_pace_of_the_slowest_stage(
    tmp_path: Path, slowest: str, link_ms: float, companion_ms: float
) -> None:
    async def story() -> None:
        behave = replies_after(companion_ms / 1000)
        # the emulated link carries 20 KB a second: a probe would be what most of the time goes to
        async with Lab(tmp_path, behave=behave, contract=BRONZE, probe_bytes_per_hour=0) as lab:
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            sent = [channel.sent_bytes]
            for _ in range(5):
                await lab.ask()
                sent.append(channel.sent_bytes)
            request_bytes = min(after - before for before, after in itertools.pairwise(sent))  # without a probe
            bytes_per_s = request_bytes / (link_ms / 1000)
            loop = asyncio.get_running_loop()

            def carry(size: int, deliver: Callable[[], None]) -> None:
                loop.call_later(size / bytes_per_s, deliver)

            channel._delay = carry
            started_s, count = loop.time(), 12
            outcomes = await asyncio.gather(*(lab.ask(deadline_ms=5000.0) for _ in range(count)))
            for outcome in outcomes:
                assert_right(outcome)
                assert outcome.ran.placement is Placement.SPLIT
            # the first passes all stages, each further one comes out after the slowest: a line without a gap
            stages_ms = {"device": HEAD_MS, "link": link_ms, "companion": companion_ms}
            line_ms = sum(stages_ms.values()) + (count - 1) * stages_ms[slowest]
            assert (loop.time() - started_s) * 1000 == pytest.approx(line_ms, rel=0.03)

    run_in_virtual_time(story())


SHADOW = Contract(behaviour=Behaviour(fallback=Fallback(strategy="shadow", agreement_min=0.9)))


def answers_off_by(ratio: float, seconds: float = 0.006) -> Behaviour_:
    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(seconds)
        reply, _ = answer(lab, infer, payload)
        outputs = lab.model.tail(infer.cut).run(decode(payload, max_bytes=1 << 20))  # type: ignore[arg-type]
        channel.send(reply, encode({name: value * np.float32(1 + ratio) for name, value in outputs.items()}, "raw"))

    return behave


def test_a_companion_whose_answers_agree_keeps_the_model_and_is_compared_on_an_idle_device_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            for _ in range(20):
                outcome = await lab.ask()
                assert outcome.ran.placement is Placement.SPLIT
                assert outcome.total_ms < WHOLE_MS  # nobody waits for a comparison
                await asyncio.sleep(0.5)
            compared = lab.journal.shadows("tiny")
            # one whole of 100 ms in a fifth of the time at most: every 500 ms
            assert compared == {"agreed": 20, "differed": 0}
            assert lab.intake.room.held_bytes == 0
            assert lab.planner.local_only_reason("tiny") == ""
            busy = [asyncio.create_task(lab.ask(mode="local", deadline_ms=9000.0)) for _ in range(20)]
            for _ in range(3):
                await lab.ask(deadline_ms=5000.0)
            await asyncio.gather(*busy)
            assert lab.journal.shadows("tiny") == compared

    run_in_virtual_time(story())


def test_a_companion_ten_percent_off_loses_the_model_however_often_it_connects_until_that_is_loaded_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=answers_off_by(0.1), contract=SHADOW) as lab:
            count = 0
            while not lab.planner.local_only_reason("tiny"):
                outcome = await lab.ask()
                np.testing.assert_allclose(outcome.outputs["y"], Y * 1.1, rtol=1e-6)  # returned by the usual rules
                count += 1
                await asyncio.sleep(0.6)
            assert count == 5
            assert lab.journal.shadows("tiny") == {"agreed": 0, "differed": 5}
            why = lab.planner.local_only_reason("tiny")
            assert "0% of the companion's last answers agree" in why
            assert "'y'" in why
            assert any(record.levelname == "WARNING" and why in record.getMessage() for record in caplog.records)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert why in outcome.fallback
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel.kill()
            await lab.until(lambda: lab.uplink.connects == 2)
            await asyncio.sleep(1.0)
            for _ in range(8):
                assert_right(await lab.ask())
                await asyncio.sleep(0.6)
            assert lab.planner.local_only_reason("tiny") == why
            assert lab.journal.shadows("tiny") == {"agreed": 0, "differed": 5}
            lab.planner.connected(max_message_bytes=1 << 20, peer="another")
            assert lab.planner.local_only_reason("tiny") != why, "of another companion nothing was found"
            lab.planner.connected(max_message_bytes=1 << 20, peer=channel.peer.name)
            assert lab.planner.local_only_reason("tiny") == why
            lab.know_model_anew()
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel.kill()
            await lab.until(lambda: lab.uplink.connects == 3 and not lab.planner.local_only_reason("tiny"))
            await asyncio.sleep(0.1)
            lab.behave = replies_after(0.006)  # it was mended meanwhile
            for _ in range(8):
                assert_right(await lab.ask())
                await asyncio.sleep(0.6)
            assert lab.planner.local_only_reason("tiny") == ""
            assert lab.journal.shadows("tiny") == {"agreed": 8, "differed": 5}

    run_in_virtual_time(story())


def test_what_the_contracts_fidelity_allows_of_a_lossy_plan_agrees(tmp_path: Path) -> None:
    contract = Contract(behaviour=SHADOW.behaviour, data=Data(fidelity=Fidelity(measure="relative", bound=0.11)))

    async def story() -> None:
        async with Lab(tmp_path, behave=answers_off_by(0.1), contract=contract) as lab:
            for _ in range(8):
                await lab.ask()
                await asyncio.sleep(0.6)
            assert lab.journal.shadows("tiny") == {"agreed": 8, "differed": 0}

    run_in_virtual_time(story())


def test_a_comparison_ends_for_a_request_that_comes_and_makes_none_that_waits_begin_its_finish(tmp_path: Path) -> None:
    """It takes 100 ms: after 50 the request comes, and finds the worker free."""

    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            await lab.ask(deadline_ms=2 * WHOLE_MS)
            waiting = lab.lateness.watch(
                "other",
                deadline_at_s=asyncio.get_running_loop().time() + 0.2,
                local_ms=50.0,
                timeout_ms=None,
                begin=asyncio.get_running_loop().create_future,
            )
            await asyncio.sleep(WHOLE_MS / 2000)
            assert not waiting.done()
            lab.lateness.forget("other")
            assert (await lab.ask(mode="local")).stages_ms["queue"] == 0.0
            assert lab.journal.shadows("tiny") == {}
            await asyncio.sleep(1.0)
            await lab.ask(deadline_ms=2 * WHOLE_MS)
            await asyncio.sleep(WHOLE_MS / 1000 + 0.001)
            assert lab.journal.shadows("tiny") == {"agreed": 1, "differed": 0}

    run_in_virtual_time(story())


def test_a_comparison_on_an_accelerator_makes_no_waiting_request_begin_its_finish_and_no_other_late(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            lab.model.choice = Choice(("cuda", "cpu"))
            await lab.ask(deadline_ms=2 * WHOLE_MS)  # the next one like it would be late behind a whole
            await asyncio.sleep(1.0)
            assert lab.journal.shadows("tiny") == {}
            waiting = lab.lateness.watch(
                "other",
                deadline_at_s=asyncio.get_running_loop().time() + 0.2,
                local_ms=50.0,
                timeout_ms=None,
                begin=asyncio.get_running_loop().create_future,
            )
            await lab.ask(deadline_ms=1000.0)
            assert not waiting.done()
            assert lab.journal.shadows("tiny") == {}

    run_in_virtual_time(story())


def test_the_worker_takes_class_before_priority_and_priority_as_the_link_does(tmp_path: Path) -> None:
    async def story() -> None:
        found: dict[str, list[int]] = {}
        for service_class in ("gold", "silver", "bronze"):
            contract = Contract(behaviour=Behaviour(service_class=service_class))  # type: ignore[arg-type]  # one of the three
            async with Lab(tmp_path, behave=replies_after(0.006), contract=contract) as lab:
                for priority in (1, 0, 2, 3, 7):
                    await lab.ask(mode="local", priority=priority)
                found[service_class] = lab.compute.ranks
        for ranks in found.values():
            highest, default, second, *rest = ranks
            assert highest < default == second < rest[0] == rest[1]
        assert max(found["gold"]) < min(found["silver"])
        assert max(found["silver"]) < min(found["bronze"]) < 99

    run_in_virtual_time(story())


# -- a slow device ----------------------------------------------------------------------------------------------------

SLOW = 6.0
"""The whole takes it 600 ms, a head 240, a tail 360."""
DECODED_MS = 4.0
HELD_MS = (SLOW - 1.0) * DECODED_MS
"""The decoding of a reply takes no virtual time, only what emulation adds to it."""


def decodes_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock before and after the decoding of a reply is `DECODED_MS` later than the last."""
    ticks = itertools.count()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * DECODED_MS / 1000))


@pytest.mark.parametrize("deadline_ms", [400.0, 590.0])
def test_a_reply_never_waits_for_a_finish_on_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_ms: float
) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.1), slowdown=SLOW) as lab:
            for _ in range(3):
                outcome = await lab.ask(mode="offload", deadline_ms=deadline_ms)
                assert_right(outcome)
                assert outcome.ran.placement is Placement.OFFLOAD
                assert outcome.total_ms == pytest.approx(100.0 + HELD_MS, abs=2)

    run_in_virtual_time(story())


def test_a_reply_never_waits_for_the_finish_of_another_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes_slowly(monkeypatch)
    silent: list[str] = []

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if infer.request_id not in silent and not silent:
            silent.append(infer.request_id)
            return
        await replies_after(0.1)(lab, channel, infer, payload)

    async def story() -> None:
        async with Lab(tmp_path, behave=behave, slowdown=SLOW, contract=BRONZE) as lab:
            unanswered = asyncio.create_task(lab.ask(mode="offload", deadline_ms=700.0))
            await asyncio.sleep(0.010)
            answered = await lab.ask(mode="offload", deadline_ms=400.0)
            assert answered.ran.placement is Placement.OFFLOAD
            assert answered.total_ms == pytest.approx(100.0 + HELD_MS, abs=2)
            finished = await unanswered
            assert finished.ran is LOCAL
            assert finished.total_ms <= 700.0

    run_in_virtual_time(story())


def test_a_device_that_is_through_before_a_slow_reply_is_decoded_makes_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        contract = Contract(behaviour=Behaviour(fallback=Fallback(timeout_ms=10.0)))
        async with Lab(tmp_path, behave=replies_after(0.5), slowdown=40 * SLOW, contract=contract) as lab:
            finishes_in(lab, 800.0)  # there at 810 ms; the reply, come after 500, is decoded at 500 + 239 · 4 = 1456
            outcome = await lab.ask(mode="offload", deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(810.0, abs=2)
            await asyncio.sleep(5.0)
            lab.serve.settle_books()
            assert lab.journal.counts()["requests"] == 1

    run_in_virtual_time(story())


def test_replies_are_decoded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, slowdown=SLOW, contract=BRONZE) as lab:

            async def at_once(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
                reply, parts = answer(lab, infer, payload)
                asyncio.get_running_loop().call_at(began_s + 0.1, channel.send, reply, parts)

            lab.behave = at_once
            began_s = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*(lab.ask(mode="offload", deadline_ms=5000.0) for _ in range(3)))
            assert sorted(outcome.total_ms for outcome in outcomes) == pytest.approx(
                [100.0 + HELD_MS, 100.0 + 2 * HELD_MS, 100.0 + 3 * HELD_MS], abs=2
            )
            assert [one.stages_ms["decode"] for one in outcomes] == pytest.approx([SLOW * DECODED_MS] * 3)

    run_in_virtual_time(story())


@pytest.mark.parametrize(("deadline_ms", "hedged"), [(335.0, False), (345.0, True), (10_000.0, True)])
def test_nothing_begins_early_that_would_make_the_next_request_late(
    tmp_path: Path, deadline_ms: float, hedged: bool
) -> None:
    """Here a finish takes 120 ms and a whole request 200: one like it that came just behind would end at 320."""

    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.07), slowdown=2.0) as lab:
            outcome = await lab.ask(deadline_ms=deadline_ms, free=True)
            assert outcome.ran.placement is Placement.SPLIT
            # expected after some 10 ms, and 70 late; a device with time to spare has begun
            await asyncio.sleep(1.0)
            assert (lab.compute.took_ms == [2 * HEAD_MS, 2 * TAIL_MS]) is hedged

    run_in_virtual_time(story())
