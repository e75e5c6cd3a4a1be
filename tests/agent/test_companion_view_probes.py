"""agent/companion_view.py through the planner: when a link is asked, with how much, at what cost."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from agent.planner import Planner
from split.plan.observation import Metered
from split.plan.probing import PING_BYTES, PROBE_BYTES
from tests.agent.planner_world import TENSOR, choose, connected_planner, knowing_planner
from tests.agent.tiny_card import OFFLOAD


def test_a_link_of_which_a_transfer_has_just_surprised_is_weighed_at_once() -> None:
    planner = connected_planner()
    for n in range(6):
        choose(planner, now_s=2.0 + n / 4)
        planner.observe_transfer(50_000, 40, 5.0, 2.1 + n / 4)
    assert planner.probe_wanted(3.4) == 0  # transfers inform
    planner.observe_transfer(50_000, 40, 420.0, 3.9)
    assert planner.probe_wanted(3.9) == PROBE_BYTES
    assert planner.probe_wanted(3.95) == 0
    planner.observe_ping(20.0 + PROBE_BYTES * 0.0008, 3.95, padding_bytes=PROBE_BYTES)  # 10 Mbit/s
    up_mbit_s = planner.snapshot(4.0)["link"]["up_mbit_s"]
    assert 5.0 < up_mbit_s < 20.0


def test_without_traffic_a_ping_every_fifteen_seconds_keeps_the_link_known() -> None:
    planner = connected_planner()
    assert planner.probe_wanted(1.0) == 0  # a transfer has just informed
    wanted = [(second, planner.probe_wanted(float(second))) for second in range(2, 62)]
    sent = [second for second, size in wanted if size]
    assert sent
    assert all(later - earlier >= 15 for earlier, later in itertools.pairwise(sent))


@pytest.mark.parametrize(("moved_bytes", "least", "most"), [(0, 15, 21), (100_000_000, 35, 40)])
def test_under_traffic_that_stays_local_the_link_is_asked_twice_a_second_and_four_times_where_requests_earned_it(
    moved_bytes: int, least: int, most: int
) -> None:
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.observe_ping(1.0, 1.0)
    if moved_bytes:
        planner.observe_transfer(moved_bytes, 40, 1.0 + moved_bytes * 0.00008, 1.1)
    sent = 0
    for tick in range(40):  # ten seconds
        now_s = 2.0 + tick * 0.25
        planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
        if size := planner.probe_wanted(now_s):
            sent += 1
            planner.observe_ping(1.0, now_s, padding_bytes=size)
    assert least <= sent <= most


def test_a_caller_that_waits_seconds_for_each_answer_is_traffic_too() -> None:
    """A request every 5 s, as a slow device serves them one after the other: two pings a second in between; a minute
    after the last one none but every fifteen seconds."""
    planner = connected_planner()
    sent: list[float] = []
    for tick in range(480):  # two minutes
        now_s = 2.0 + tick * 0.25
        if tick % 20 == 0 and now_s < 30.0:
            planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
        if size := planner.probe_wanted(now_s):
            sent.append(now_s)
            planner.observe_ping(1.0, now_s, padding_bytes=size)
    # from the second request on; at most four a second, as long as the first transfers' share lasts
    assert 30 <= sum(7.0 <= at_s < 27.0 for at_s in sent) <= 80
    assert sum(60.0 <= at_s < 120.0 for at_s in sent) <= 4


def test_the_rate_is_looked_at_again_soon_after_the_first_look_of_a_connection() -> None:
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    weighed: list[float] = []
    for tick in range(40):
        now_s = tick * 0.25
        planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
        if size := planner.probe_wanted(now_s):
            planner.observe_ping(20.0, now_s, padding_bytes=size)
            if size > PING_BYTES:
                weighed.append(now_s)
    assert weighed[:2] == [0.5, 1.5]
    assert all(later - earlier >= 3.0 for earlier, later in itertools.pairwise(weighed[1:]))


@pytest.mark.parametrize("per_hour", [math.inf, 60_000.0, 5_000.0, 0.0])
def test_on_a_metered_link_probes_cost_no_more_than_their_share_of_the_cap(per_hour: float) -> None:
    """Ten hours of traffic that stays local: the rooms are full once at the beginning, the rest trickles in."""
    planner = connected_planner(metered=lambda: Metered(left_bytes=1e12, probe_bytes_per_hour=per_hour))
    spent = 0
    for tick in range(4 * 36_000 // 10):
        now_s = 2.0 + tick * 2.5
        planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
        if size := planner.probe_wanted(now_s):
            spent += size + 192  # PING_COST_BYTES without its own padding
            planner.observe_ping(1.0, now_s, padding_bytes=size)
    bound = min(per_hour, 2_000_000.0)  # the default of `link.probe_bytes_per_hour`
    burst = min(bound, 4 * 32 * 1024 + 128 * 256)
    assert spent <= 10 * bound + burst
    assert spent >= 3 * bound


def test_a_rate_that_is_unsure_is_worth_a_probe_of_weight() -> None:
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    assert planner.probe_wanted(0.0) == PING_BYTES
    planner.observe_ping(20.0, 0.02)
    planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=1.0)
    assert planner.probe_wanted(1.0) == PROBE_BYTES


def test_a_link_that_recovers_is_found_again_while_everything_runs_here() -> None:
    """Requests stay local at 1 Mbit/s and 4 a second; then the link is as fast as before, and only probes can tell."""
    planner, now_s = connected_planner(), 1.0
    for n in range(3):
        planner.observe_transfer(50_000, 40, 400.0, now_s + n)
    now_s += 3.0
    assert choose(planner, now_s=now_s).chosen.plan != OFFLOAD
    for _ in range(80):
        now_s += 0.25
        if size := planner.probe_wanted(now_s):
            planner.observe_ping(1.0 + size * 0.00008, now_s, padding_bytes=size)
        if choose(planner, now_s=now_s).chosen.plan == OFFLOAD:
            break
    assert choose(planner, now_s=now_s).chosen.plan == OFFLOAD


def test_probes_never_cost_more_than_their_budget() -> None:
    budget = 100_000
    planner = connected_planner(probe_bytes_per_hour=budget)
    spent = 0
    for tick in range(4 * 3600):
        now_s = 2.0 + tick * 0.25
        if tick % 4 == 0:
            planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
        spent += planner.probe_wanted(now_s)
    assert 0 < spent <= 2 * budget  # one hour's worth, and the room that was full at the start


def test_requests_earn_two_percent_of_their_bytes_for_probes_beside_the_budget() -> None:
    budget, moved = 1_000, 20_000_000
    spent = []
    for earned in (0, moved):
        planner = knowing_planner(probe_bytes_per_hour=budget)
        planner.connected(max_message_bytes=1 << 28)
        planner.companion_ready("m", 10.0, 0.5)
        planner.observe_ping(1.0, 0.0)
        for n in range(20):
            planner.observe_transfer(earned // 20, 40, 1.0 + earned // 20 * 0.00008, 0.1 + n / 10)
        total = 0
        for tick in range(4 * 3600):
            now_s = 3.0 + tick * 0.25
            planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=now_s)
            if size := planner.probe_wanted(now_s):
                total += size + 192  # PING_COST_BYTES without its own padding
                planner.observe_ping(1.0 + size * 0.00008, now_s, padding_bytes=size)
        spent.append(total)
    assert spent[0] <= 2 * budget
    assert 0.015 * moved <= spent[1] <= 2 * budget + 0.02 * (moved + 20 * 40) + 20 * 64


@pytest.mark.parametrize(
    "options", [{"probe_bytes_per_hour": 0}, {"metered": lambda: Metered(left_bytes=1e12, probe_bytes_per_hour=0.0)}]
)
def test_requests_earn_no_probes_where_those_are_off_or_bytes_are_scarce(options: dict[str, Any]) -> None:
    planner = connected_planner(**options)
    for n in range(20):
        planner.observe_transfer(1_000_000, 40, 81.0, 2.0 + n)
    for tick in range(400):
        planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=30.0 + tick)
        assert planner.probe_wanted(30.0 + tick) == 0


def test_no_probe_goes_out_without_a_companion_or_a_model() -> None:
    assert Planner().probe_wanted(0.0) == 0
    planner = connected_planner()
    planner.companion_lost("gone")
    assert planner.probe_wanted(99.0) == 0
