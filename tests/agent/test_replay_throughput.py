"""The daemon's planner under backlog, in the full simulation (it learns link and companion from replies, it hedges),
against the linear program of the best mix of plans and against the best single plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from agent.replay.bound import best_mix, best_single, demands_ms
from agent.replay.known import Known
from agent.replay.policies.ours import Ours
from agent.replay.simulate import simulate
from agent.replay.world import Arrival, Moment, Outcome, Stages, World
from split.ids import CutId
from split.plan.observation import Floats
from split.plan.plan import LOCAL, Placement, Plan

BYTES_PER_MS = 2_500.0
STEADY = Moment(at_s=0.0, up_mbit_s=20.0, down_mbit_s=1_000.0, rtt_ms=10.0)
OUTSTANDING = 10
REQUESTS = 300


def chain(dice: np.random.Generator) -> Floats:
    """[plan, (E, b, C)] ms of device, link and companion: local, eight cuts, offload. A network of layers: the later
    the cut, the more runs here; bytes as they come."""
    whole, speed = dice.uniform(40.0, 200.0), dice.uniform(0.3, 1.0)
    splits = [
        [whole * x, dice.lognormal(np.log(0.4 * whole), 0.8), whole * speed * (1.0 - x)]
        for x in np.sort(dice.random(8))
    ]
    return np.array([[whole, 0.0, 0.0], *splits, [0.0, dice.lognormal(np.log(0.9 * whole), 0.5), whole * speed]])


def unrelated(dice: np.random.Generator) -> Floats:
    """The same without any order: cuts whose stages have nothing to do with each other."""
    splits = np.sort(dice.uniform(5.0, 100.0, (3, 3)), axis=0)
    for station in (1, 2):
        dice.shuffle(splits[:, station])
    return np.vstack([[100.0, 0.0, 0.0], splits, [0.0, *dice.uniform(20.0, 200.0, 2)]])


def stages_of(table: Floats) -> dict[Plan, Stages]:
    whole_ms, plans = float(table[0, 0]), {LOCAL: Stages(head_ms=float(table[0, 0]))}
    for n, (here_ms, link_ms, there_ms) in enumerate(table[1:].tolist()):
        plan = Plan(placement=Placement.SPLIT, cut=CutId(f"{n:012x}"), codec="raw")
        if n == len(table) - 2:
            plan = Plan(placement=Placement.OFFLOAD, codec="raw")
        plans[plan] = Stages(
            head_ms=here_ms,
            up_bytes=round(link_ms * BYTES_PER_MS),
            tail_ms=there_ms,
            down_bytes=400,
            finish_ms=max(whole_ms - here_ms, 1.0),
        )
    return plans


def demands(plans: dict[Plan, Stages]) -> dict[Plan, list[float]]:
    return {plan: demands_ms(stages, STEADY) for plan, stages in plans.items()}


def backlogged(plans: dict[Plan, Stages], seed: int) -> list[Outcome]:
    """Ten requests at once, then one whenever the best mix would have answered one: the backlog stays as long as the
    choices are as good, and grows by what they lose."""
    every_s = best_mix(demands(plans)).ms_per_request / 1000.0
    asked = tuple(Arrival(at_s=max(n - OUTSTANDING, 0) * every_s, model="m") for n in range(REQUESTS))
    world = World(models={"m": plans}, trace=(STEADY,), arrivals=asked, jitter=0.05, seed=seed)
    return simulate(world, Ours({"m": Known.of(plans)}))


def between_ms(outcomes: list[Outcome]) -> float:
    """Mean time between two answers while requests came, the first quarter of it left out."""
    end_s = outcomes[-1].arrival.at_s
    steady = sorted(one.done_at_s for one in outcomes if end_s / 4.0 <= one.done_at_s <= end_s)
    return 1000.0 * (steady[-1] - steady[0]) / (len(steady) - 1)


@pytest.mark.parametrize("make", [chain, unrelated])
def test_under_backlog_it_reaches_the_best_mix_and_passes_every_single_plan_where_mixing_gains(
    make: Callable[[np.random.Generator], Floats],
) -> None:
    of_mix, over_single, mixed = [], [], []
    for seed in range(12):
        plans = stages_of(make(np.random.default_rng(seed)))
        mix, single = best_mix(demands(plans)), best_single(demands(plans))
        outcomes = backlogged(plans, seed)
        of_mix.append(mix.ms_per_request / between_ms(outcomes))
        if single.ms_per_request > 1.15 * mix.ms_per_request:
            over_single.append(single.ms_per_request / between_ms(outcomes))
            mixed.append(sorted(Counter(one.plan for one in outcomes).values())[-2])
    assert min(of_mix) >= 0.95, of_mix
    assert np.mean(of_mix) >= 0.98, of_mix
    assert len(over_single) >= 5
    assert min(over_single) > 1.1, over_single
    assert min(mixed) > REQUESTS / 20, mixed


def test_requests_that_come_one_at_a_time_all_take_the_fastest_plan() -> None:
    plans = stages_of(chain(np.random.default_rng(1)))
    fastest = min(plans, key=lambda plan: sum(demands(plans)[plan]) + (0.0 if plan is LOCAL else STEADY.rtt_ms))
    asked = tuple(Arrival(at_s=2.0 * n, model="m") for n in range(40))
    outcomes = simulate(World(models={"m": plans}, trace=(STEADY,), arrivals=asked), Ours({"m": Known.of(plans)}))
    taken = Counter(one.plan for one in outcomes)
    assert taken[fastest] >= 38, taken  # the rest was tried
