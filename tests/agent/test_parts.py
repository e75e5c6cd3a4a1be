"""Batches in parts: one answer comes of them, whatever becomes of a part."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.outcome import Outcome
from split.codec.payload import decode
from split.errors import ChannelError
from split.plan.plan import Placement
from split.profiles.contract import Behaviour, Contract, Fallback, Retry
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Infer
from tests.agent.serve_lab import (
    HEAD_MS,
    ROW_MS,
    SENT_ONCE,
    Behaviour_,
    Lab,
    answer,
    dies,
    dies_mid_reply,
    refuses,
    says_nothing,
)


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
