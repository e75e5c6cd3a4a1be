"""Our planner over simulated time, against the oracle and the rule that counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.replay.example import ENCODED_BYTES, example, known_example
from agent.replay.known import Known
from agent.replay.policies.oracle import Oracle
from agent.replay.policies.ours import Ours
from agent.replay.policies.two_way import TwoWay
from agent.replay.simulate import Simulation, simulate
from agent.replay.summary import Summary, requests_to_recover
from agent.replay.traces import STEADY, TRACES, lasts_s
from agent.replay.world import Arrival, Fate, Moment, Stages, World
from split.ids import CutId
from split.plan.plan import LOCAL, Placement, Plan

KNOWN = {"m": known_example()}
LAST = CutId("bbbbbbbbbbbb")


def world(trace: tuple[Moment, ...], slowdown: float, *, until_s: float, encoded: bool = True) -> World:
    asked = tuple(
        Arrival(at_s=0.2 * n, model="m", deadline_ms=1_000.0, encoded_bytes=ENCODED_BYTES if encoded else 0)
        for n in range(int(5 * until_s))
    )
    return World(models={"m": example()}, trace=trace, arrivals=asked, slowdown=slowdown, jitter=0.05, seed=1)


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("slowdown", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("mbit_s", [2.0, 50.0])
def test_on_a_steady_link_it_is_within_a_twentieth_of_the_oracle(slowdown: float, mbit_s: float, encoded: bool) -> None:
    run = world((replace(STEADY, up_mbit_s=mbit_s),), slowdown, until_s=20.0, encoded=encoded)
    assert Summary.of(simulate(run, Ours(KNOWN)), simulate(run, Oracle())).regret < 1.05


def test_on_rate_steps_it_is_ahead_of_the_two_way_rule_and_back_within_five_requests() -> None:
    trace = TRACES["rate steps"]()
    run = world(trace, 5.0, until_s=lasts_s(trace))
    best = simulate(run, Oracle())
    ours, rule = simulate(run, Ours(KNOWN)), simulate(run, TwoWay())
    assert Summary.of(ours, best).regret < 1.05
    assert Summary.of(ours, best).mean_ms < Summary.of(rule, best).mean_ms
    assert requests_to_recover(ours, best, 20.0) <= 5
    assert requests_to_recover(ours, best, 40.0) <= 5


@pytest.mark.parametrize("seed", range(8))
def test_whenever_a_slow_link_is_quick_again_it_is_back_within_five_requests(seed: int) -> None:
    """Ten a second; the link takes 10 s at 5 Mbit/s, or a little more, at which offload takes 81 ms, local 65. The last
    split shows little of the link."""
    plans = {
        LOCAL: Stages(image_ms=15.0, head_ms=50.0),
        Plan(placement=Placement.OFFLOAD, codec="encoded"): Stages(
            up_bytes=35_000, cloud_decode_ms=4.5, tail_ms=10.5, down_bytes=4_064, finish_ms=65.0
        ),
        Plan(placement=Placement.SPLIT, cut=LAST, codec="int8"): Stages(
            image_ms=15.0, head_ms=49.0, encode_ms=2.0, up_bytes=680, tail_ms=0.2, down_bytes=4_064, finish_ms=3.0
        ),
    }
    slow = replace(STEADY, at_s=10.0, up_mbit_s=5.0, down_mbit_s=5.0)
    back_s = 20.0 + 0.061 * seed
    asked = [Arrival(at_s=0.1 * n, model="m", deadline_ms=400.0, encoded_bytes=35_000) for n in range(250)]
    trace = STEADY, slow, replace(STEADY, at_s=back_s)
    run = World(models={"m": plans}, trace=trace, arrivals=asked, jitter=0.05, seed=seed)
    ours = simulate(run, Ours({"m": Known.of(plans)}))
    assert requests_to_recover(ours, simulate(run, Oracle()), back_s) <= 5


@pytest.mark.parametrize("seed", range(4))
def test_it_leaves_a_companion_that_becomes_slow_and_goes_back_when_it_says_that_it_is_slow_no_more(seed: int) -> None:
    """Offload takes 10 + 5.6 + 2 · 0.1 + 13 = 29 ms, local 75; with the companion five times slower 81: nothing but
    its word and an occasional try tell of the end."""
    offload = Stages(up_bytes=35_000, cloud_decode_ms=3.5, tail_ms=9.5, down_bytes=4_064, finish_ms=75.0)
    plans = {LOCAL: Stages(image_ms=15.0, head_ms=60.0), Plan(placement=Placement.OFFLOAD, codec="encoded"): offload}
    trace = TRACES["cloud slowdown"]()
    asked = [Arrival(at_s=0.2 * n, model="m", deadline_ms=400.0, encoded_bytes=35_000) for n in range(300)]
    run = World(models={"m": plans}, trace=trace, arrivals=asked, jitter=0.05, seed=seed)
    known = {"m": Known.of(plans)}
    best, ours = simulate(run, Oracle()), simulate(run, Ours(known))
    assert [requests_to_recover(ours, best, step_s) <= 5 for step_s in (20.0, 40.0)] == [True, True]
    assert Summary.of(ours, best).regret < 1.03
    silent = simulate(replace(run, paced_after_s=None), Ours(known))
    assert Summary.of(silent, best).regret > Summary.of(ours, best).regret


def test_in_an_outage_it_hedges_stays_here_and_goes_back() -> None:
    trace = TRACES["outage"]()
    run = world(trace, 20.0, until_s=40.0)
    outcomes = simulate(run, Ours(KNOWN))
    during = [one for one in outcomes if 20.0 <= one.arrival.at_s < 25.0]
    assert during[0].fate is Fate.HEDGED
    assert all(one.plan == LOCAL for one in during[5:])
    assert outcomes[-1].plan.placement is Placement.OFFLOAD
    assert not any(one.missed for one in outcomes)


def test_a_policy_begun_again_knows_nothing_of_the_run_before() -> None:
    run = world(TRACES["rtt spike"](), 5.0, until_s=30.0)
    policy = Ours(KNOWN)
    first = [one.total_ms for one in simulate(run, policy)]
    assert [one.total_ms for one in simulate(run, policy)] == first


def test_what_it_spends_on_looking_is_within_its_budget() -> None:
    run = world(TRACES["rate steps"](), 1.0, until_s=60.0)  # local is best throughout
    simulation = Simulation(run, Ours(KNOWN))
    away = [one for one in simulation.run()[10:] if one.plan != LOCAL]
    assert len(away) <= 300 / 50  # the companion is asked now and then
    bursts = 4 * 32_768 + 6 * 32_768 + 128 * 256
    assert 0 < simulation.probe_bytes < 2_000_000 / 60 + bursts  # a minute's share, and what was saved
