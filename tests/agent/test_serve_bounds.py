"""Bytes in flight and deadlines: whatever becomes of a request, both are kept."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

import pytest

from agent.intake import Intake
from agent.room import Room
from split.errors import DeadlineExceeded
from split.plan.plan import Placement
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Infer
from tests.agent.serve_lab import (
    Behaviour_,
    Lab,
    X,
    assert_right,
    dies,
    dies_mid_reply,
    finishes_in,
    refuses,
    replies_after,
    says_nothing,
)


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
