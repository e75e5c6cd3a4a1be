"""One request from admitted to answered, by whichever road; what a companion may do to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from agent import stages, waiting
from agent.heartbeat import SILENCE_S
from agent.intake import InferenceRequest, Intake
from agent.outcome import Outcome
from agent.room import Room
from split.codec.payload import decode, encode
from split.errors import DeadlineExceeded, Overloaded
from split.ids import CutId
from split.oip.options import RequestOptions
from split.plan.plan import LOCAL, Placement, Plan
from split.profiles.contract import Behaviour, Contract
from split.runtime.engine import Segment
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.limits import DEFAULT_LIMITS
from split.wire.messages import Infer, ModelChunk, Priority
from tests.agent.serve_lab import (
    BRONZE,
    HEAD_MS,
    MUST_COME,
    SENT_ONCE,
    TAIL_MS,
    WHOLE_MS,
    Behaviour_,
    Lab,
    SteadyPlanner,
    X,
    answer,
    assert_right,
    dies,
    dies_mid_reply,
    refuses,
    replies_after,
    says_nothing,
)


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


def test_a_bug_in_what_is_learned_of_an_answer_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006)) as lab:
            monkeypatch.setattr(lab.serve._lessons, "answered", lambda *_: 1 / 0)
            assert_right(await lab.ask())
        assert "nothing was learned from a finished request" in caplog.text

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
