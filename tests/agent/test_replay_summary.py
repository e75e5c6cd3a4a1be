"""Figures of a few outcomes, by hand."""

from __future__ import annotations

import pytest

from agent.replay.summary import Summary, requests_to_recover, switches
from agent.replay.world import Arrival, Fate, Outcome
from split.plan.plan import LOCAL, Placement, Plan

OFFLOAD = Plan(placement=Placement.OFFLOAD, codec="raw")


def outcome(number: int, total_ms: float, plan: Plan = LOCAL, *, missed: bool = False, model: str = "m") -> Outcome:
    return Outcome(
        number=number,
        arrival=Arrival(at_s=float(number), model=model),
        plan=plan,
        fate=Fate.PLANNED,
        total_ms=total_ms,
        stages_ms={},
        missed=missed,
        joules=0.25 * number,
        bytes=100,
        money=0.5,
    )


def test_figures_are_means_over_requests_and_regret_is_latency_over_the_oracles() -> None:
    mine = [outcome(0, 10.0), outcome(1, 30.0, OFFLOAD, missed=True), outcome(2, 20.0)]
    best = [outcome(0, 10.0), outcome(1, 20.0), outcome(2, 10.0)]
    summary = Summary.of(mine, best)
    assert (summary.requests, summary.mean_ms, summary.missed, summary.bytes, summary.money) == (3, 20.0, 1, 100.0, 0.5)
    assert summary.regret == pytest.approx(60.0 / 40.0)
    assert summary.joules == pytest.approx(0.25)
    assert summary.switches == 2


def test_a_switch_is_another_plan_for_the_same_model() -> None:
    mixed = [outcome(0, 1.0), outcome(1, 1.0, OFFLOAD, model="other"), outcome(2, 1.0), outcome(3, 1.0, OFFLOAD)]
    assert switches(mixed) == 1


def test_recovery_is_counted_until_three_in_a_row_are_within_a_tenth_of_the_best() -> None:
    best = [outcome(number, 10.0) for number in range(10)]
    totals = (10.0, 10.0, 50.0, 11.0, 10.9, 30.0, 10.0, 11.0, 10.0, 10.0)
    mine = [outcome(number, total_ms) for number, total_ms in enumerate(totals)]
    assert requests_to_recover(mine, best, 2.0) == 4  # 50, 11, 10.9, 30
    assert requests_to_recover(mine, best, 0.0) == 6
    assert requests_to_recover(mine, best, 6.0) == 0
    assert requests_to_recover(mine[:6], best[:6], 2.0) == 4  # never
