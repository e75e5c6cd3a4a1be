"""Tiny worlds whose outcomes are worked out by hand in the comments; 1 Mbit/s carries 125 bytes in a millisecond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.replay.course import Course
from agent.replay.policies.fixed import Fixed, Local, Offload
from agent.replay.policies.oracle import Oracle
from agent.replay.simulate import Simulation, simulate
from agent.replay.world import Arrival, Fate, Moment, Outcome, Policy, SlowStart, Stages, World
from split.ids import CutId
from split.plan.objective import Prices
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.power import Power

SPLIT = Plan(placement=Placement.SPLIT, cut=CutId("aaaaaaaaaaaa"), codec="raw")
OFFLOAD = Plan(placement=Placement.OFFLOAD, codec="raw")
ENCODED = Plan(placement=Placement.OFFLOAD, codec="encoded")
PLANS = {
    LOCAL: Stages(head_ms=100.0, image_ms=5.0),
    SPLIT: Stages(
        head_ms=20.0, encode_ms=1.0, up_bytes=12_500, cloud_decode_ms=0.5, tail_ms=7.0, down_bytes=1_250, finish_ms=80.0
    ),
    OFFLOAD: Stages(up_bytes=125_000, tail_ms=10.0, down_bytes=1_250, decode_ms=0.5, finish_ms=100.0),
    ENCODED: Stages(up_bytes=10_000, cloud_decode_ms=2.0, tail_ms=10.0, down_bytes=1_250, finish_ms=105.0),
}
STEADY = Moment(at_s=0.0, up_mbit_s=10.0, down_mbit_s=10.0, rtt_ms=20.0)
BY_CUT = Fixed("split", {"m": SPLIT})


def world(arrivals: Sequence[float], *, trace: Sequence[Moment] = (STEADY,), deadline_ms: float = 10_000.0) -> World:
    asked = tuple(Arrival(at_s=at_s, model="m", deadline_ms=deadline_ms) for at_s in arrivals)
    return World(models={"m": PLANS}, trace=trace, arrivals=asked)


def test_a_split_takes_the_sum_of_its_stages() -> None:
    [outcome] = simulate(world([0.0]), BY_CUT)
    # 12,500 bytes at 10 Mbit/s: 10 ms; 1,250 back: 1 ms; half a round trip each: 10 ms
    assert dict(outcome.stages_ms) == pytest.approx(
        {
            "queue": 0.0,
            "head": 20.0,
            "encode": 1.0,
            "up": 20.0,
            "cloud_queue": 0.0,
            "cloud_decode": 0.5,
            "tail": 7.0,
            "down": 11.0,
            "decode": 0.0,
        }
    )
    assert outcome.total_ms == pytest.approx(59.5)
    assert (outcome.fate, outcome.missed, outcome.bytes) == (Fate.PLANNED, False, 13_750)
    assert outcome.waited_ms == pytest.approx(38.5)
    assert outcome.network_ms == pytest.approx(31.0)


def test_slowdown_and_load_stretch_what_computes_and_nothing_else() -> None:
    loaded = replace(STEADY, edge_ratio=1.5, cloud_ratio=4.0)
    [outcome] = simulate(replace(world([0.0], trace=(loaded,)), slowdown=2.0), BY_CUT)
    # (20 + 1) · 2 · 1.5 + 20 + 7.5 · 4 + 11
    assert outcome.total_ms == pytest.approx(63.0 + 20.0 + 30.0 + 11.0)


def test_a_transfer_across_a_step_of_the_rate_is_carried_at_both_rates() -> None:
    step = (STEADY, replace(STEADY, at_s=0.05, up_mbit_s=5.0))
    [outcome] = simulate(world([0.0], trace=step), Offload("raw"))
    # 50 ms · 1,250 bytes/ms = 62,500 bytes; the other 62,500 at 625 bytes/ms: 100 ms; 10 + 10 + 1 + 10 + 0.5
    assert outcome.total_ms == pytest.approx(150.0 + 31.5)


def test_an_outage_stops_a_transfer_which_goes_on_where_it_was() -> None:
    outage = (STEADY, replace(STEADY, at_s=0.05, connected=False), replace(STEADY, at_s=0.35))
    [outcome] = simulate(world([0.0], trace=outage), Offload("raw"))
    assert outcome.total_ms == pytest.approx(100.0 + 300.0 + 31.5)
    assert outcome.fate is Fate.PLANNED


def test_an_outage_past_the_latest_start_is_finished_here_from_the_boundary() -> None:
    outage = (STEADY, replace(STEADY, at_s=0.025, connected=False), replace(STEADY, at_s=4.0))
    [outcome] = simulate(world([0.0], trace=outage, deadline_ms=500.0), BY_CUT)
    # sent at 21 ms with 479 left; reserved 80 · 1.05 + 8 + (479 − 80) · 0.05 = 111.95: starts at 388.05, takes 80
    assert outcome.total_ms == pytest.approx(500.0 - 111.95 + 80.0)
    assert (outcome.fate, outcome.missed) == (Fate.LATE, False)
    assert outcome.bytes == 5_000  # 4 ms at 1,250 bytes/ms were carried
    assert outcome.waited_ms == pytest.approx(468.05 - 21.0)


def test_a_connection_that_is_lost_begins_the_finish_at_once_and_nothing_is_sent_until_it_is_back() -> None:
    outage = (STEADY, replace(STEADY, at_s=0.025, connected=False), replace(STEADY, at_s=7.025))
    run = world([0.0, 5.5, 7.9, 8.1], trace=outage)  # lost at 5.025 s, back at 8.025 s
    first, during, dialling, after = simulate(run, BY_CUT)
    assert (first.fate, first.total_ms) == (Fate.LOST, pytest.approx(5_025.0 + 80.0))
    assert (during.fate, during.total_ms) == (Fate.UNSENT, pytest.approx(100.0))
    assert dialling.fate is Fate.UNSENT
    assert (after.fate, after.total_ms) == (Fate.PLANNED, pytest.approx(59.5))


def test_a_reply_that_is_overdue_while_the_link_is_down_keeps_others_here_until_something_is_heard() -> None:
    outage = (STEADY, replace(STEADY, at_s=0.025, connected=False), replace(STEADY, at_s=2.0))
    run = world([0.0, 1.0, 2.015, 2.1], trace=outage, deadline_ms=500.0)
    fates = [outcome.fate for outcome in simulate(run, BY_CUT)]
    assert fates == [Fate.LATE, Fate.UNSENT, Fate.UNSENT, Fate.PLANNED]  # heard one round trip after 2.0 s


def test_two_requests_at_once_take_turns_at_each_station() -> None:
    first, second = simulate(world([0.0, 0.0]), BY_CUT)
    assert first.total_ms == pytest.approx(59.5)
    # the head waits 21 ms; the uplink (10 ms each) and the companion (7.5 ms) are free again by then
    assert second.stages_ms["queue"] == pytest.approx(21.0)
    assert second.total_ms == pytest.approx(80.5)
    run = world([0.0, 0.0])
    first, second = simulate(run, Offload("raw"))
    # the second payload waits for the first: 100 + 100 + 10 up, 10 there, 1 + 10 down, 0.5
    assert second.stages_ms["up"] == pytest.approx(210.0)
    assert (first.ahead_bytes, second.ahead_bytes) == (0, 125_000)
    assert second.total_ms == pytest.approx(231.5)


def test_the_companion_serves_one_at_a_time() -> None:
    busy = replace(STEADY, cloud_ratio=10.0)
    first, second = simulate(world([0.0, 0.0], trace=(busy,)), BY_CUT)
    # there at 41 and 62 ms; the first is computed until 116
    assert first.stages_ms["cloud_queue"] == 0.0
    assert second.stages_ms["cloud_queue"] == pytest.approx(116.0 - 62.0)
    assert second.total_ms == pytest.approx(116.0 + 75.0 + 11.0)


def test_the_worker_takes_the_earliest_deadline_first() -> None:
    asked = (
        Arrival(at_s=0.0, model="m", deadline_ms=1_000.0),
        Arrival(at_s=0.001, model="m", deadline_ms=2_000.0),
        Arrival(at_s=0.002, model="m", deadline_ms=500.0),
    )
    outcomes = simulate(replace(world([]), arrivals=asked), Local())
    assert [outcome.total_ms for outcome in outcomes] == pytest.approx([100.0, 299.0, 198.0])


def test_a_reply_during_the_finish_wins_and_the_worker_is_through_with_it_all_the_same() -> None:
    outage = (STEADY, replace(STEADY, at_s=0.025, connected=False), replace(STEADY, at_s=0.400))
    run = world([0.0, 0.43], trace=outage, deadline_ms=500.0)
    first, second = simulate(run, BY_CUT)
    # the finish starts at 388.05; sending goes on at 400 with 7,500 bytes, 6 ms: 406 + 10 + 7.5 + 11 = 434.5
    assert (first.fate, first.total_ms) == (Fate.PLANNED, pytest.approx(434.5))
    assert "finish" not in first.stages_ms
    assert second.fate is Fate.PLANNED  # heard at 420 ms
    assert second.stages_ms["queue"] == pytest.approx(388.05 + 80.0 - 430.0)


def test_an_encoded_input_travels_in_its_own_size_and_is_decoded_where_it_is_used() -> None:
    asked = (Arrival(at_s=0.0, model="m", encoded_bytes=25_000, deadline_ms=10_000.0),)
    [there] = simulate(replace(world([]), arrivals=asked), Offload("encoded"))
    assert there.total_ms == pytest.approx(20.0 + 10.0 + 12.0 + 11.0)
    [here] = simulate(replace(world([]), arrivals=asked), Local())
    assert here.total_ms == pytest.approx(105.0)


def test_slow_start_after_a_pause_takes_the_round_trips_that_were_measured() -> None:
    """400 KB at 50 Mbit/s and 40 ms: 234 ms after idle, 107 back to back, measured with cubic on the lab link."""
    course = Course([Moment(at_s=0.0, up_mbit_s=50.0, down_mbit_s=50.0, rtt_ms=40.0)])
    half_ms = 20.0
    after_idle_ms = 1000.0 * course.slowly_through_at_s(0.0, 400_000, SlowStart()) + 2 * half_ms
    assert after_idle_ms == pytest.approx(234.0, rel=0.05)
    assert 1000.0 * course.through_at_s(0.0, 400_000) + 2 * half_ms == pytest.approx(107.0, rel=0.05)
    fast = Moment(at_s=0.0, up_mbit_s=50.0, down_mbit_s=50.0, rtt_ms=40.0)
    run = replace(world([0.0, 0.2, 2.0], trace=(fast,)), slow_start=SlowStart())
    up = [outcome.stages_ms["up"] for outcome in simulate(run, Offload("raw"))]
    # 14,480 + 28,960 + 57,920 bytes in three round trips, the rest of 125,000 at 6,250 bytes/ms
    slow = 120.0 + (125_000 - 101_360) / 6_250 + 20.0
    assert up == pytest.approx([slow, 20.0 + 20.0, slow])


def test_energy_and_money_follow_from_what_was_done() -> None:
    power = Power(compute_w=3.0, send_w=2.0, receive_w=1.0, wait_w=0.5, measured=False, source="")
    run = replace(world([0.0]), power=power, prices=Prices(per_byte=1e-6, per_companion_ms=1e-3))
    [outcome] = simulate(run, BY_CUT)
    # 21 ms compute, 10 sending, 1 receiving, the other 27.5 waiting
    assert outcome.joules == pytest.approx(0.021 * 3 + 0.010 * 2 + 0.001 * 1 + 0.0275 * 0.5)
    assert outcome.money == pytest.approx(13_750e-6 + 7.5e-3)


def jittered() -> World:
    rough = (
        STEADY,
        replace(STEADY, at_s=2.0, up_mbit_s=1.0, rtt_ms=90.0),
        replace(STEADY, at_s=4.0, connected=False),
        replace(STEADY, at_s=5.5, cloud_ratio=3.0, edge_ratio=2.0),
    )
    return replace(world([n * 0.11 for n in range(80)], trace=rough, deadline_ms=900.0), jitter=0.2, seed=7)


@pytest.mark.parametrize("policy", [Local(), BY_CUT, Offload("raw"), Oracle()], ids=lambda policy: policy.name)
def test_every_request_is_answered_once_and_its_stages_add_up(policy: Policy) -> None:
    run = jittered()
    outcomes = simulate(run, policy)
    assert [outcome.number for outcome in outcomes] == list(range(len(run.arrivals)))
    for outcome in outcomes:
        if outcome.fate in (Fate.PLANNED, Fate.UNSENT):
            assert sum(outcome.stages_ms.values()) == pytest.approx(outcome.total_ms), outcome
        assert outcome.missed == (outcome.total_ms > 900.0 + 1e-6)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    def totals(run: World) -> list[float]:
        return [outcome.total_ms for outcome in simulate(run, BY_CUT)]

    assert totals(jittered()) == totals(jittered())
    assert totals(jittered()) != totals(replace(jittered(), seed=8))


def test_what_an_oracle_foresees_is_what_happens_where_nothing_comes_after() -> None:
    foreseen: dict[Plan, Outcome] = {}

    class Looking(Oracle):
        def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
            if arrival == run.arrivals[-1]:
                for plan in PLANS:
                    if plan != ENCODED:
                        foreseen[plan] = self._view.foresee(plan)
                        assert self._view.least_ms(plan) <= foreseen[plan].total_ms + 1e-9
            return SPLIT if arrival != run.arrivals[-1] else last

    for last in (LOCAL, SPLIT, OFFLOAD):
        run = replace(jittered(), arrivals=jittered().arrivals[:37])
        assert simulate(run, Looking())[-1].total_ms == pytest.approx(foreseen[last].total_ms)


def test_a_probe_weighs_on_the_link_and_comes_back_with_its_time() -> None:
    heard: list[tuple[float, int]] = []

    class Probing(Local):
        def probe(self, now_s: float) -> int:
            return 12_500 if not heard else 0

        def ponged(self, rtt_ms: float, padding_bytes: int, pong_bytes: int, now_s: float) -> None:
            heard.append((rtt_ms, padding_bytes))

    simulation = Simulation(world([0.0, 1.0]), Probing())
    simulation.run()
    assert heard == [(pytest.approx(30.0), 12_500)]
    assert simulation.probe_bytes == 12_756


def test_the_pong_of_a_ping_weighs_on_the_link_down_and_comes_back_with_its_time() -> None:
    """A round trip of 20 ms and 12,500 bytes at 5 Mbit/s."""
    heard: list[tuple[float, int, int]] = []

    class Probing(Local):
        def probe(self, now_s: float) -> int:
            return 0

        def pong(self, now_s: float) -> int:
            return 12_500 if not heard else 0

        def ponged(self, rtt_ms: float, padding_bytes: int, pong_bytes: int, now_s: float) -> None:
            heard.append((rtt_ms, padding_bytes, pong_bytes))

    simulation = Simulation(world([0.0, 1.0], trace=(replace(STEADY, down_mbit_s=5.0),)), Probing())
    simulation.run()
    assert heard == [(pytest.approx(40.0), 64, 12_500)]
    assert simulation.probe_bytes == 12_820


def test_a_finish_that_would_be_too_late_does_not_begin_while_there_is_a_companion() -> None:
    """80 ms are missing when 12,500 bytes leave at 21 ms, the deadline is at 90: a reply may come, an answer of the
    device's could not. The reply comes at 59.5 ms on the first link, at 159.5 on one with 100 ms more."""
    for rtt_ms in (20.0, 120.0):
        [outcome] = simulate(world([0.0], trace=(replace(STEADY, rtt_ms=rtt_ms),), deadline_ms=90.0), BY_CUT)
        assert (outcome.fate, outcome.total_ms) == (Fate.PLANNED, pytest.approx(39.5 + rtt_ms))


@pytest.mark.parametrize(
    ("deadline_ms", "first_ms", "second_ms"),
    [
        (500.0, 51.0 + 80.0, 500.0 - 110.9 + 80.0),
        (220.0, 220.0 - 96.9 + 80.0 + 80.0, 220.0 - 96.9 + 80.0),
    ],
)
def test_a_finish_begins_early_only_where_no_other_is_late_by_it(
    deadline_ms: float, first_ms: float, second_ms: float
) -> None:
    """Two splits, sent at 21 and 42 ms, of which nothing is heard; the finish of the first may begin at 51 and keeps
    the worker until 51 + 80 · 1.05 = 135. The second must start 80 · 1.05 + 8 + (left − 80) · 0.05 before its deadline:
    at 389.1 ms of 500 (458 are left), or at 123.1 of 220 (178 are left), and then goes first."""
    outage = (STEADY, replace(STEADY, at_s=0.022, connected=False), replace(STEADY, at_s=0.9))

    class Early(Fixed):
        def sent(self, number: int, plan: Plan, now_s: float, finish_ms: float) -> float:
            return 30.0 if number == 0 else math.inf

    asked = tuple(Arrival(at_s=0.0, model="m", deadline_ms=ms) for ms in (2_000.0, deadline_ms))
    first, second = simulate(replace(world([], trace=outage), arrivals=asked), Early("split", {"m": SPLIT}))
    assert (first.fate, first.total_ms) == (Fate.HEDGED, pytest.approx(first_ms))
    assert (second.fate, second.total_ms) == (Fate.LATE, pytest.approx(second_ms))


def test_what_the_worker_has_to_do_is_known_as_it_is_expected_not_as_it_turns_out() -> None:
    """Everything takes three times as long, and what each request draws. One who knows of the load says so."""
    loaded = replace(STEADY, edge_ratio=3.0)
    run = replace(world([0.0, 0.01], trace=(loaded,), deadline_ms=400.0), jitter=0.3)
    queues_ms: list[float] = []
    finishes_ms: list[float] = []

    class Watching(Fixed):
        def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
            queues_ms.append(edge_queue_ms)
            return super().choose(arrival, now_s, edge_queue_ms)

        def sent(self, number: int, plan: Plan, now_s: float, finish_ms: float) -> float:
            finishes_ms.append(finish_ms)
            return math.inf

    class Knowing(Watching):
        def expected_ms(self, arrival: Arrival, plan: Plan, *, finishes: bool) -> float:
            return 3.0 * super().expected_ms(arrival, plan, finishes=finishes)

    simulate(run, Watching("split", {"m": SPLIT}))
    simulate(run, Knowing("split", {"m": SPLIT}))
    assert queues_ms == pytest.approx([0.0, 21.0 - 10.0, 0.0, 63.0 - 10.0])
    assert finishes_ms == pytest.approx([80.0, 80.0, 240.0, 240.0])


@pytest.mark.parametrize("gap_s", [2e5, 1.7e9])
def test_a_pause_of_days_takes_no_time_to_simulate(gap_s: float) -> None:
    asked_at_s: list[float] = []

    class Probing(Local):
        def probe(self, now_s: float) -> int:
            asked_at_s.append(now_s)
            return 0

    run = world([0.0, 1.0, gap_s, gap_s + 1.0])
    assert len(simulate(run, Probing())) == len(simulate(run, Local())) == 4
    assert len(asked_at_s) < 300
    assert max(at_s for at_s in asked_at_s if at_s < 1e5) == pytest.approx(61.0, abs=0.5)
    assert sum(at_s >= gap_s for at_s in asked_at_s) >= 4  # from the next request on as before


def test_a_link_that_never_comes_back_ends_requests_by_their_deadline() -> None:
    gone = (STEADY, replace(STEADY, at_s=0.025, connected=False))
    [outcome] = simulate(world([0.0], trace=gone, deadline_ms=math.inf), BY_CUT)
    assert (outcome.fate, outcome.total_ms) == (Fate.LOST, pytest.approx(5_025.0 + 80.0))
