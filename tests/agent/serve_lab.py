"""Requests under a fake clock: the real serve, planner and uplink, a scripted companion on an in-memory channel.

Expected outputs come from a formula of the tiny model, never from the code under test.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from agent import stages
from agent.compute import Timed
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
from split.errors import ChannelError, IsthmusError
from split.ids import ModelName
from split.oip.options import RequestOptions
from split.plan.plan import Decision, Placement, Plan, RequestFacts
from split.profiles.contract import Behaviour, Contract, Fallback, Retry
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.engine import Stop
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.wire.messages import (
    Cancel,
    Hello,
    Infer,
    Message,
    ModelNeed,
    ModelOffer,
    ModelReady,
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


def finishes_in(lab: Lab, ms: float) -> None:
    """What is left of a request takes the device so long. The companion is back after 50 ms, the pause of the back-off,
    and expected to need 6 ms."""
    lab.planner.finish_ms = lambda *request: ms  # type: ignore[method-assign]
