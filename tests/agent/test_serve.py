"""Requests under a fake clock: the real serve, planner and uplink, a scripted companion on an in-memory channel.

Expected outputs come from a formula of the tiny model, never from the code under test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest

from agent.compute import Timed
from agent.intake import InferenceRequest, Intake
from agent.journal import Journal, Outcome
from agent.lateness import Lateness
from agent.planner import Planner
from agent.repository import ServedModel
from agent.serve import Serve
from agent.uplink import Uplink
from split.codec.golden import golden_inputs, sample
from split.codec.payload import decode, encode
from split.errors import ChannelError, DeadlineExceeded
from split.ids import ModelName
from split.oip.options import RequestOptions
from split.plan.plan import Placement, Plan
from split.profiles.contract import Behaviour, Contract, Fallback
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.transport.memory import MemoryChannel, memory_pair
from split.transport.retry import Backoff
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import (
    Cancel,
    Hello,
    Infer,
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
HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 20, codecs=("raw",))

Behaviour_ = Callable[["Lab", MemoryChannel, Infer, memoryview], Awaitable[None]]


class SlowCompute:
    """Stands for `agent.compute.Compute`: one job at a time, each taking what it was expected to, in virtual time."""

    slowdown = 1.0

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.took_ms: list[float] = []

    @property
    def queue_ms(self) -> float:
        return 0.0

    async def run(self, work: Callable[[], Any], *, deadline_at_s: float, expected_ms: float) -> Timed[Any]:
        asked = asyncio.get_running_loop().time()
        async with self._lock:
            started = asyncio.get_running_loop().time()
            await asyncio.sleep(expected_ms / 1000)
            self.took_ms.append(expected_ms)
            return Timed(value=work(), queue_ms=(started - asked) * 1000, run_ms=expected_ms)

    async def hold(self, measured_ms: float) -> None:
        return None


class SteadyPlanner(Planner):
    """Does not learn from how long the tiny model really takes: here it takes what the profile says."""

    def observe_edge(self, name: str, plan: Plan, stage: str, measured_ms: float) -> None:
        return None


class Lab:
    """A daemon's middle and a companion that does as it is told."""

    def __init__(self, folder: Path, *, behave: Behaviour_, contract: Contract | None = None) -> None:
        path = folder / "model.onnx"
        onnx.save(onnx.parser.parse_model(TINY), path)
        card = prepare(path, folder / "cache")
        self.cut = card.cuts[-1].id
        profile = ModelProfile(
            digest=card.digest,
            runtime="test",
            fingerprint="test",
            dims={},
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
        self.planner = SteadyPlanner()
        self.planner.add_model("tiny", card, profile, self.model.contract)
        self.compute = SlowCompute()
        self.uplink = Uplink(
            companions=["companion:1"],
            dial=self._dial,
            planner=self.planner,
            golden=self,  # type: ignore[arg-type]  # the same methods, without a worker
            backoff=Backoff(draw=lambda: 0.5),
        )
        self.journal = Journal()
        self.serve = Serve(
            planner=self.planner,
            compute=self.compute,  # type: ignore[arg-type]  # the same methods, in virtual time
            uplink=self.uplink,
            lateness=Lateness(queue_ms=lambda: 0.0),
            journal=self.journal,
        )
        self.intake = Intake(default_deadline_ms=10_000, inflight_bytes=1 << 20)
        self.seen: list[Infer] = []
        self.cancelled: list[str] = []
        self.dials = 0
        self.companions: list[asyncio.Task[None]] = []

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

    async def _dial(self, address: str) -> MemoryChannel:
        self.dials += 1
        device, companion = memory_pair(HELLO, HELLO)
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
                        channel.send(SegmentReady(digest=digest, cut=cut, golden=joined(golden), tail_ms=6.0))
                    case Infer() as infer:
                        self.seen.append(infer)
                        await self.behave(self, channel, infer, incoming.payload)
                    case Cancel(request_id=request_id):
                        self.cancelled.append(request_id)
                    case _:
                        pass
        except ChannelError:
            return

    async def ask(self, *, deadline_ms: float = 1000.0, mode: str = "split", **options: Any) -> Outcome:
        loop = asyncio.get_running_loop()
        with self.intake.admit(
            self.model,
            {"x": X},
            (),
            RequestOptions(mode=mode, cut=self.cut if mode == "split" else None, deadline_ms=deadline_ms, **options),
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
        async with Lab(tmp_path, behave=says_nothing) as lab:
            outcome = await lab.ask(deadline_ms=500.0)
            assert_right(outcome)
            assert "no reply" in outcome.fallback
            # started at D − tail − margin: 8 ms, 5 % of the tail, 5 % of the 400 ms beyond; not right after the head
            assert outcome.total_ms == pytest.approx(500.0 - 8.0 - 3.0 - 20.0, abs=0.5)
            await lab.until(lambda: lab.cancelled == [lab.request.id])

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


def test_the_timeout_of_the_contract_bounds_the_wait_inside_the_deadline(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(timeout_ms=50.0)))

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=contract) as lab:
            outcome = await lab.ask(deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.total_ms == pytest.approx(HEAD_MS + 50 + TAIL_MS, abs=0.5)

    run_in_virtual_time(story())


def test_a_reply_that_comes_while_the_device_finishes_wins_and_the_other_is_dropped(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(timeout_ms=50.0)))

    async def story() -> None:
        # late (after 50 ms), but before the local tail (60 ms) is through
        async with Lab(tmp_path, behave=replies_after(0.08), contract=contract) as lab:
            outcome = await lab.ask(deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.ran.placement is Placement.SPLIT
            assert outcome.total_ms == pytest.approx(HEAD_MS + 80, abs=2)
            await lab.until(lambda: lab.journal.counts()["requests"] == 1)

    run_in_virtual_time(story())


def test_without_local_fallback_the_loss_is_a_typed_error(tmp_path: Path) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail")))

    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=contract) as lab:
            with pytest.raises(ChannelError):
                await lab.ask()

    run_in_virtual_time(story())


def test_a_deadline_that_cannot_be_met_is_a_typed_error_at_the_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            started = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded, match="no answer within 30 ms"):
                await lab.ask(deadline_ms=30.0, mode="local")
            assert asyncio.get_running_loop().time() - started == pytest.approx(0.030, abs=0.002)

    run_in_virtual_time(story())


def test_remote_use_comes_back_by_itself_after_a_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies) as lab:
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


async def replies_for_another_cut(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
    reply, parts = answer(lab, infer, payload, wrong=True)
    channel.send(msgspec.structs.replace(reply, cut="0123456789ab"), parts)


@pytest.mark.parametrize("fault", [replies_with_another_output, replies_for_another_cut])
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
            lab.planner.companion_lost("the companion is on holiday", 0.0)
            outcome = await lab.ask(mode="offload")
            assert_right(outcome)
            assert "on holiday" in outcome.fallback

    run_in_virtual_time(story())
