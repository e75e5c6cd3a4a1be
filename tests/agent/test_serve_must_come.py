"""Contracts whose `fallback.strategy` is `fail`: only the companion may answer a plan that went there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from split.errors import ChannelError, DeadlineExceeded, EngineFailed
from split.plan.plan import Placement
from split.profiles.contract import Behaviour, Contract, Fallback
from split.transport.virtual_time import run_in_virtual_time
from tests.agent.serve_lab import (
    HEAD_MS,
    MUST_COME,
    Behaviour_,
    Lab,
    assert_right,
    dies,
    dies_mid_reply,
    refuses,
    replies_after,
    says_nothing,
)


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


def test_without_local_fallback_a_plan_that_was_local_from_the_start_is_local(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=MUST_COME) as lab:
            lab.planner.companion_lost("the companion is on holiday")
            for mode in ("auto", "local", "split"):
                outcome = await lab.ask(mode=mode)
                assert outcome.ran.placement is Placement.LOCAL
                assert_right(outcome)

    run_in_virtual_time(story())
