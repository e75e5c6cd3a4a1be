"""Replies that are late, overdue or never come: when the device begins, whose answer counts, who is blamed."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.planner import Planner
from split.errors import DeadlineExceeded
from split.plan.hedging import Replies
from split.plan.plan import Placement, Plan
from split.profiles.contract import Behaviour, Contract, Fallback, Weights
from split.transport.virtual_time import run_in_virtual_time
from tests.agent.serve_lab import (
    BRONZE,
    HEAD_MS,
    TAIL_MS,
    WHOLE_MS,
    Lab,
    assert_right,
    refuses,
    replies_after,
    says_nothing,
)


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
