"""The bound of mixed plans against hand calculation, a grid of mixes, and its dual."""

from __future__ import annotations

import numpy as np
import pytest

from agent.replay.bound import best_mix, best_single, demands_ms
from agent.replay.policies.fixed import Fixed
from agent.replay.simulate import simulate
from agent.replay.world import Arrival, Moment, Stages, World
from split.ids import CutId
from split.plan.observation import Floats
from split.plan.plan import LOCAL, Placement, Plan

PLANS = [LOCAL, Plan(placement=Placement.OFFLOAD, codec="raw")] + [
    Plan(placement=Placement.SPLIT, cut=CutId(f"{n:012x}"), codec="raw") for n in range(10)
]


def test_two_plans_that_each_keep_one_station_busy_are_mixed_until_both_are() -> None:
    # p · 10 = (1 − p) · 6: p = 3/8, z = 3.75
    mix = best_mix({PLANS[0]: (10.0, 0.0, 0.0), PLANS[1]: (0.0, 6.0, 1.0)})
    assert mix.ms_per_request == pytest.approx(3.75)
    assert mix.shares == pytest.approx({PLANS[0]: 0.375, PLANS[1]: 0.625})
    assert mix.rate_per_s == pytest.approx(1000.0 / 3.75)


def test_three_stations_may_need_three_plans() -> None:
    # by symmetry a third each
    mix = best_mix({PLANS[0]: (9.0, 0.0, 0.0), PLANS[1]: (0.0, 9.0, 0.0), PLANS[2]: (0.0, 0.0, 9.0)})
    assert mix.ms_per_request == pytest.approx(3.0)
    assert len(mix.shares) == 3


def test_a_plan_that_is_better_in_everything_is_not_mixed() -> None:
    mix = best_mix({PLANS[0]: (5.0, 5.0, 5.0), PLANS[1]: (2.0, 4.0, 3.0), PLANS[2]: (6.0, 6.0, 4.0)})
    assert mix.shares == {PLANS[1]: 1.0}
    assert mix.ms_per_request == 4.0


def random_demands(seed: int, plans: int, stations: int) -> dict[Plan, list[float]]:
    draw = np.random.default_rng(seed)
    costs = draw.exponential(size=(plans, stations)) * (draw.random((plans, stations)) > 0.2)
    costs[:, 0] += 0.01
    return {plan: row.tolist() for plan, row in zip(PLANS, costs, strict=False)}


def simplex(sides: int, steps: int) -> Floats:
    """Every point with coordinates that are multiples of 1 / steps: [points, sides]."""
    axes = np.meshgrid(*[np.arange(steps + 1)] * (sides - 1), indexing="ij")
    points = np.stack([axis.ravel() for axis in axes], axis=1)
    points = points[points.sum(axis=1) <= steps]
    return np.column_stack([points, steps - points.sum(axis=1)]) / steps


@pytest.mark.parametrize("seed", range(10))
def test_no_mix_of_a_grid_is_better_and_one_is_nearly_as_good(seed: int) -> None:
    demands = random_demands(seed, 4, 3)
    costs = np.array(list(demands.values()))
    best = (simplex(4, 40) @ costs).max(axis=1).min()
    found = best_mix(demands).ms_per_request
    assert found <= best + 1e-9
    assert found >= best - costs.max() * 2.0 / 40


@pytest.mark.parametrize(("plans", "stations", "steps"), [(6, 3, 200), (12, 3, 200), (12, 4, 60)])
@pytest.mark.parametrize("seed", range(5))
def test_the_dual_is_as_high(seed: int, plans: int, stations: int, steps: int) -> None:
    demands = random_demands(seed, plans, stations)
    costs = np.array(list(demands.values()))
    mix = best_mix(demands)
    used = sum(share * np.array(demands[plan]) for plan, share in mix.shares.items())
    assert max(used) == pytest.approx(mix.ms_per_request)
    assert sum(mix.shares.values()) == pytest.approx(1.0)
    # every weighing of the stations bounds z from below, and one of a fine grid nearly reaches it
    best = (simplex(stations, steps) @ costs.T).min(axis=1).max()
    assert mix.ms_per_request - costs.max() * 2.0 / steps <= best <= mix.ms_per_request + 1e-9
    assert mix.ms_per_request <= best_single(demands).ms_per_request


def test_a_single_plan_in_a_full_simulation_reaches_its_bound_and_no_more() -> None:
    stages = Stages(head_ms=5.0, encode_ms=1.0, up_bytes=12_500, tail_ms=7.0, down_bytes=100, finish_ms=50.0)
    moment = Moment(at_s=0.0, up_mbit_s=10.0, down_mbit_s=10.0, rtt_ms=20.0)
    demands = demands_ms(stages, moment)
    assert demands == pytest.approx([6.0, 10.0, 7.0, 0.08])
    plan = PLANS[2]
    asked = tuple(Arrival(at_s=0.0, model="m") for _ in range(200))
    world = World(models={"m": {LOCAL: Stages(head_ms=60.0), plan: stages}}, trace=(moment,), arrivals=asked)
    last_s = max(outcome.done_at_s for outcome in simulate(world, Fixed("split", {"m": plan})))
    rate = 200 / last_s
    bound = best_single({plan: demands}).rate_per_s
    assert 0.97 * bound < rate < bound
