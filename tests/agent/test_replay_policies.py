"""Each policy in a world where what it does follows from its paper by hand. 1 Mbit/s carries 125 bytes in a
millisecond."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from agent.replay.known import Known
from agent.replay.policies import fixed
from agent.replay.policies.ans import Ans
from agent.replay.policies.field import FIELD
from agent.replay.policies.fixed import Fixed, Offload, best_static
from agent.replay.policies.monitor import EVERY_S, PROBE_BYTES
from agent.replay.policies.oracle import Oracle
from agent.replay.policies.surgeons import Dads, Neurosurgeon
from agent.replay.policies.threshold import UPGRADE_AFTER, Threshold
from agent.replay.policies.two_way import TwoWay
from agent.replay.simulate import Simulation, simulate
from agent.replay.world import Arrival, Moment, Outcome, Policy, Stages, World
from split.ids import CutId
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.probing import PING_COST_BYTES

EARLY, MIDDLE = CutId("00000000000a"), CutId("00000000000b")


def split(cut: CutId, codec: str = "raw") -> Plan:
    return Plan(placement=Placement.SPLIT, cut=cut, codec=codec)


RAW = Plan(placement=Placement.OFFLOAD, codec="raw")
INT8 = Plan(placement=Placement.OFFLOAD, codec="int8")
ENCODED = Plan(placement=Placement.OFFLOAD, codec="encoded")
# The companion is ten times as fast. Half of the work is done at MIDDLE, where little travels.
PLANS = {
    LOCAL: Stages(head_ms=100.0, image_ms=2.0),
    split(EARLY): Stages(head_ms=10.0, up_bytes=200_000, tail_ms=9.0, down_bytes=100, finish_ms=90.0, image_ms=2.0),
    split(EARLY, "int8"): Stages(
        head_ms=10.0, up_bytes=50_000, tail_ms=9.0, down_bytes=100, finish_ms=90.0, image_ms=2.0
    ),
    split(MIDDLE): Stages(head_ms=50.0, up_bytes=20_000, tail_ms=5.0, down_bytes=100, finish_ms=50.0, image_ms=2.0),
    split(MIDDLE, "int8"): Stages(
        head_ms=50.0, up_bytes=5_000, tail_ms=5.0, down_bytes=100, finish_ms=50.0, image_ms=2.0
    ),
    RAW: Stages(up_bytes=400_000, tail_ms=10.0, down_bytes=100, finish_ms=100.0, image_ms=2.0),
    INT8: Stages(up_bytes=100_000, tail_ms=10.0, down_bytes=100, finish_ms=100.0, image_ms=2.0),
    ENCODED: Stages(up_bytes=25_000, cloud_decode_ms=0.2, tail_ms=10.0, down_bytes=100, finish_ms=102.0),
}
KNOWN = {"m": Known.of(PLANS)}


def steady(mbit_s: float, *, rtt_ms: float = 2.0, requests: int = 40, encoded_bytes: int = 0) -> World:
    asked = tuple(
        Arrival(at_s=1.0 + 0.5 * number, model="m", deadline_ms=5_000.0, encoded_bytes=encoded_bytes)
        for number in range(requests)
    )
    moment = Moment(at_s=0.0, up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=rtt_ms)
    return World(models={"m": PLANS}, trace=(moment,), arrivals=asked)


def last_plan(world: World, policy: Policy) -> Plan:
    return simulate(world, policy)[-1].plan


@pytest.mark.parametrize("policy", [Neurosurgeon, Dads])
@pytest.mark.parametrize(
    ("mbit_s", "plan"),
    [
        (1000.0, RAW),  # 3.2 + 10; at EARLY 10 + 1.6 + 9
        (80.0, split(EARLY)),  # 10 + 20 + 9 = 39; offload 40 + 10 = 50; MIDDLE 50 + 2 + 5 = 57
        (16.0, split(MIDDLE)),  # 50 + 10 + 5 = 65; EARLY 119; local 100
        (1.0, LOCAL),  # MIDDLE 50 + 160 + 5
    ],
)
def test_the_surgeons_take_the_least_sum_at_the_rate_they_see(
    policy: type[Neurosurgeon | Dads], mbit_s: float, plan: Plan
) -> None:
    assert last_plan(steady(mbit_s), policy(KNOWN)) == plan


def test_neurosurgeon_does_not_know_cuts_of_two_tensors_and_dads_does() -> None:
    known = KNOWN["m"]
    two = tuple(msgspec.structs.replace(cut, boundary=(*cut.boundary, *cut.boundary)) for cut in known.card.cuts)
    card = msgspec.structs.replace(known.card, cuts=two)
    skips = {"m": Known(card=card, profile=known.profile, contract=known.contract)}
    assert last_plan(steady(16.0), Neurosurgeon(skips)) == LOCAL
    assert last_plan(steady(16.0), Dads(skips)) == split(MIDDLE)


def test_neurosurgeon_believes_its_regression_where_dads_believes_its_measurements() -> None:
    # the head of MIDDLE takes 50 ms for a tenth of the operations; a line through (0.05, 10), (0.1, 50), (1, 100):
    # slope 73.3, level 25.2, so that MIDDLE is predicted at 32.5 ms: 32.5 + 10 + 6.75 beats EARLY, 28.8 + 100 + 7.1
    shares = {EARLY: 0.05, MIDDLE: 0.10}
    odd = {"m": Known.of(PLANS, shares)}
    # at 5.5 Mbit/s: MIDDLE 29.1 ms; by the line 32.5 + 29.1 + 6.8 = 68, measured 50 + 29.1 + 5 = 84; both under 100
    # at 3.4 Mbit/s: 47.1 ms; by the line 86, measured 102
    assert last_plan(steady(3.4, requests=10), Neurosurgeon(odd)) == split(MIDDLE)
    assert last_plan(steady(3.4, requests=10), Dads(odd)) == LOCAL


def test_a_surgeon_that_stays_here_looks_at_the_link_every_five_seconds() -> None:
    simulation = Simulation(steady(1.0, requests=20), Dads(KNOWN))
    outcomes = simulation.run()
    assert all(outcome.plan == LOCAL for outcome in outcomes)
    # one takes 262 ms there, the next is due a second after it has come back, and sent at the next quarter second
    assert simulation.probe_bytes / (PROBE_BYTES + PING_COST_BYTES) == pytest.approx(10.5 / (EVERY_S + 0.5), abs=1.0)


@pytest.mark.parametrize("policy", [Neurosurgeon, Dads])
def test_the_surgeons_stay_here_while_the_companion_is_loaded_and_go_back_after(
    policy: type[Neurosurgeon | Dads],
) -> None:
    """RAW takes 3.2 + 10 ms; with the companion fifty times slower 503, where local takes 100."""
    world = steady(1000.0)
    calm = world.trace[0]
    loaded = (calm, replace(calm, at_s=8.2, cloud_ratio=50.0), replace(calm, at_s=14.2))
    plans = {one.arrival.at_s: one.plan for one in simulate(replace(world, trace=loaded), policy(KNOWN))}
    assert plans[8.0] == RAW
    assert {plans[at_s] for at_s in (10.0, 11.0, 12.0, 13.0, 14.0)} == {LOCAL}
    assert plans[16.0] == plans[20.0] == RAW


def test_the_two_way_rule_keeps_the_faster_arm_and_tries_the_other_every_twentieth_time() -> None:
    fast = simulate(steady(100.0, requests=62, encoded_bytes=25_000), TwoWay())
    # first each arm once, local first; then offload, with local as every 20th
    assert [one.plan for one in fast[:2]] == [LOCAL, ENCODED]
    assert [number for number, one in enumerate(fast) if one.plan == LOCAL] == [0, 21, 41, 61]
    slow = simulate(steady(1.0, requests=62, encoded_bytes=25_000), TwoWay())
    assert [number for number, one in enumerate(slow) if one.plan == ENCODED] == [1, 21, 41, 61]


def test_the_two_way_rule_follows_a_change_as_its_mean_does() -> None:
    world = steady(100.0, requests=20, encoded_bytes=25_000)
    [fast] = world.trace
    changed = replace(world, trace=(fast, replace(fast, at_s=5.9, up_mbit_s=1.0)))
    outcomes = simulate(changed, TwoWay())
    # away takes 2 + 2 + 10.2 ms, then 212; 14.2 + 0.3 · 198 = 74, then 74 + 0.3 · 138 = 115 > 102: two requests late
    assert [one.plan for one in outcomes[10:14]] == [ENCODED, ENCODED, LOCAL, LOCAL]


def test_tensors_go_raw_by_the_two_way_rule() -> None:
    assert simulate(steady(1000.0, requests=5), TwoWay())[2].plan == RAW


def test_the_threshold_takes_the_least_head_that_fits_and_climbs_after_three() -> None:
    # 20 Mbit/s: 2,500 bytes/ms, 125,000 in 50 ms: the whole input as int8 fits; 5 Mbit/s: 31,250, only MIDDLE
    world = steady(5.0, rtt_ms=0.1, requests=30)
    [slow] = world.trace
    changed = replace(world, trace=(slow, replace(slow, at_s=5.0, up_mbit_s=20.0, down_mbit_s=20.0)))
    outcomes = simulate(changed, Threshold())
    plans = [one.plan for one in outcomes]
    assert plans[:UPGRADE_AFTER] == [LOCAL, LOCAL, split(MIDDLE, "int8")]
    assert plans[7] == split(MIDDLE, "int8")
    assert plans[-1] == INT8
    # and down at once: 20 → 5 Mbit/s, the mean of the rate falls by 0.3 of the difference with each transfer
    down = replace(world, trace=(replace(slow, up_mbit_s=20.0), replace(slow, at_s=5.9)))
    plans = [one.plan for one in simulate(down, Threshold())]
    assert plans[8] == INT8
    # 2,500 → 0.7 · 2,500 + 0.3 · 625 = 1,937 bytes/ms: 96,900 in 50 ms, too few for 100,000
    assert plans[11] == split(EARLY, "int8")


def test_ans_leaves_the_device_by_force_where_staying_is_best_and_learns_the_way_where_it_is_not() -> None:
    world = steady(1.0, requests=256)
    outcomes = simulate(world, Ans(KNOWN))
    every = round(256**0.25)
    forced = [number for number, one in enumerate(outcomes) if one.plan != LOCAL]
    assert every == 4
    assert set(range(every - 1, 256, every)) <= set(forced)
    assert len(forced) < 256 / every + 12  # beside those, what optimism tries at first
    fast = simulate(steady(1000.0, requests=256), Ans(KNOWN))
    assert sum(one.plan != LOCAL for one in fast[128:]) > 120
    assert {one.plan for one in outcomes} <= {LOCAL, RAW, split(EARLY), split(MIDDLE)}  # no codec but raw


def test_ans_learns_from_a_reply_that_was_overtaken_how_long_it_took_at_least() -> None:
    """A hundredth of the rate from 60 s on: no reply is in time, every plan's finish here overtakes it."""
    world = steady(1000.0, requests=400)
    asked = tuple(replace(arrival, deadline_ms=300.0) for arrival in world.arrivals)
    fast = world.trace[0]
    slow = replace(fast, at_s=60.0, up_mbit_s=0.4, down_mbit_s=0.4)
    outcomes = simulate(replace(world, arrivals=asked, trace=(fast, slow)), Ans(KNOWN))
    assert {one.plan for one in outcomes[80:110]} == {RAW}
    every = round(400**0.25)
    assert sum(one.plan != LOCAL for one in outcomes[200:]) < 200 / every + 10


def test_the_best_static_plan_is_the_best_of_all_afterwards() -> None:
    world = steady(16.0, requests=10)
    means = {
        plan: sum(one.total_ms for one in simulate(world, Fixed("", {"m": plan}))) for plan in PLANS if plan != ENCODED
    }
    assert last_plan(world, best_static(world)) == min(means, key=means.__getitem__) == split(EARLY, "int8")


def test_the_best_static_plan_of_a_hundred_replays_a_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut n takes 40 ms + (n − 63)² / 100; one more takes 2 ms and 28 KB, which are 28 ms of the uplink."""
    plans = {LOCAL: Stages(head_ms=300.0)}
    for n in range(1, 100):
        plans[split(CutId(f"{n:012x}"))] = Stages(head_ms=40.0 + (n - 63) ** 2 / 100, up_bytes=100, finish_ms=200.0)
    plans[split(CutId("ffffffffffff"))] = Stages(head_ms=2.0, up_bytes=28_000, finish_ms=200.0)  # 28 ms alone
    runs: list[str] = []

    def counted(world: World, policy: Policy) -> list[Outcome]:
        runs.append(policy.name)
        return simulate(world, policy)

    monkeypatch.setattr(fixed, "simulate", counted)
    asked = [Arrival(at_s=0.02 * n, model="m", deadline_ms=60_000.0) for n in range(400)]
    crowd = [replace(one, at_s=3.0 * one.at_s) for one in asked]  # 60 ms apart
    moment = Moment(at_s=0.0, up_mbit_s=8.0, down_mbit_s=8.0, rtt_ms=0.0)
    world = World(models={"m": plans}, trace=(moment,), arrivals=crowd)
    assert last_plan(world, best_static(world)) == split(CutId("ffffffffffff"))
    assert len(runs) == fixed.TRIED
    # 20 ms apart that uplink is behind by 8 ms more with each request, and the heads by 20 ms and more
    faster = replace(world, arrivals=[replace(one, at_s=0.02 * n) for n, one in enumerate(crowd)])
    assert last_plan(faster, best_static(faster)) == split(CutId("ffffffffffff"))
    slow = replace(faster, trace=(replace(moment, up_mbit_s=4.0),))  # 56 ms a payload, 36 ms behind
    assert last_plan(slow, best_static(slow)) == split(CutId(f"{63:012x}"))


def test_an_encoded_offload_needs_an_encoded_input() -> None:
    assert last_plan(steady(100.0, requests=2), Offload("encoded")) == LOCAL
    assert last_plan(steady(100.0, requests=2, encoded_bytes=9_000), Offload("encoded")) == ENCODED
    assert last_plan(steady(100.0, requests=2), Offload("nothing of the kind")) == LOCAL


@pytest.mark.parametrize("mbit_s", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("encoded_bytes", [0, 25_000])
def test_the_oracle_is_as_good_as_the_best_of_all_fixed_plans_request_by_request(
    mbit_s: float, encoded_bytes: int
) -> None:
    world = replace(steady(mbit_s, requests=12, encoded_bytes=encoded_bytes), jitter=0.3, seed=3)
    best = simulate(world, Oracle())
    plans = [plan for plan in PLANS if plan != ENCODED or encoded_bytes]
    each = [simulate(world, Fixed("", {"m": plan})) for plan in plans]
    for number, outcome in enumerate(best):  # requests half a second apart do not meet
        assert outcome.total_ms == pytest.approx(min(one[number].total_ms for one in each))


@pytest.mark.parametrize("name", FIELD)
def test_every_policy_of_the_field_answers_every_request_and_the_same_way_again(name: str) -> None:
    world = steady(20.0, requests=30, encoded_bytes=25_000)
    [moment] = world.trace
    world = replace(
        world, trace=(moment, replace(moment, at_s=6.0, connected=False), replace(moment, at_s=8.0)), jitter=0.1
    )
    runs = [simulate(world, FIELD[name](world, KNOWN)) for _ in range(2)]
    assert len(runs[0]) == 30
    assert [one.total_ms for one in runs[0]] == [one.total_ms for one in runs[1]]
    assert not any(one.missed for one in runs[0])
