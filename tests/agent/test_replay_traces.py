"""The traces are what their names say."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from agent.replay.example import example
from agent.replay.traces import STEPS_S, TRACES, WALK_MBIT_S, WALK_RTT_MS, lasts_s, lte_walk
from agent.replay.world import Moment, World


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_sound_and_lasts_one_to_two_minutes(name: str) -> None:
    trace = TRACES[name]()
    assert 60.0 <= lasts_s(trace) <= 120.0
    World(models={"m": example()}, trace=trace, arrivals=())  # which asserts their order
    assert TRACES[name]() == trace


def at(trace: tuple[Moment, ...], now_s: float) -> Moment:
    return [moment for moment in trace if moment.at_s <= now_s][-1]


def test_what_changes_is_what_the_name_says_and_when() -> None:
    def seen(name: str, pick: str) -> list[object]:
        return [getattr(at(TRACES[name](), now_s), pick) for now_s in (10.0, 24.0, 50.0)]

    assert seen("rate steps", "up_mbit_s") == [50.0, 5.0, 50.0]
    assert seen("rtt spike", "rtt_ms") == [10.0, 200.0, 10.0]
    assert seen("outage", "connected") == [True, False, True]
    assert seen("cloud slowdown", "cloud_ratio") == [1.0, 5.0, 1.0]
    assert at(TRACES["thermal throttle"](), 40.0).edge_ratio == 2.0
    assert at(TRACES["thermal throttle"](), 79.0).edge_ratio == 1.0
    for name, steps in STEPS_S.items():
        trace = TRACES[name]()
        changed = [after.at_s for before, after in pairwise(trace[:-1]) if _state(before) != _state(after)]
        assert changed == list(steps)


def _state(moment: Moment) -> tuple[object, ...]:
    return (moment.up_mbit_s, moment.rtt_ms, moment.connected, moment.edge_ratio, moment.cloud_ratio)


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_stays_within_its_bounds_and_belongs_to_its_seed(seed: int) -> None:
    walk = lte_walk(seed)
    assert lte_walk(seed) == walk
    assert lte_walk(seed + 1) != walk
    rates = [moment.up_mbit_s for moment in walk]
    assert min(rates) >= 0.5
    assert max(rates) <= WALK_MBIT_S[1] + 1e-9
    assert all(WALK_RTT_MS[0] - 1e-9 <= moment.rtt_ms <= WALK_RTT_MS[1] + 1e-9 for moment in walk)
    steps = [abs(math.log(after / before)) for before, after in pairwise(rates)]
    assert 0.1 < sum(steps) / len(steps) < 0.4  # a mean step of 0.25 · 0.8, and fades
