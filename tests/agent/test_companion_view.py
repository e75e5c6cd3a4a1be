"""agent/companion_view.py through the planner: what late requests and silences say of the link."""

from __future__ import annotations

import pytest

from split.plan.probing import PROBE_BYTES
from tests.agent.planner_world import choose, connected_planner
from tests.agent.tiny_card import OFFLOAD


def test_a_link_too_slow_to_answer_in_time_is_left_after_two_late_requests() -> None:
    planner = connected_planner()
    for n in range(2):
        assert choose(planner, now_s=1.0 + n).chosen.plan == OFFLOAD
        planner.observe_late(50_000, 40, 900.0, 1.9 + n)
    assert choose(planner, now_s=3.0).chosen.plan != OFFLOAD


def test_a_large_reply_that_did_not_come_in_time_is_not_put_down_to_the_round_trip() -> None:
    planner = connected_planner()  # 1 ms, 100 Mbit/s
    for n in range(4):
        planner.observe_late(50_000, 1_000_000, 900.0, 1.9 + n)
        planner.observe_ping(1.0, 2.0 + n)
    link = planner.snapshot(5.1)["link"]
    assert link["rtt_ms"] < 10.0
    assert link["down_mbit_s"] < 15.0  # a megabyte in 0.9 s


def test_a_request_given_up_early_says_nothing_about_the_link() -> None:
    planner = connected_planner()
    before = planner.snapshot(1.0)["link"]
    planner.observe_late(50_000, 40, 2.0, 1.0)
    assert planner.snapshot(1.0)["link"] == before


def test_an_outage_is_no_slow_link_when_it_is_over() -> None:
    planner = connected_planner()
    before = choose(planner).link
    planner.companion_silent("nothing is heard")
    for n in range(3):
        planner.observe_late(50_000, 40, 900.0, 1.9 + n)
    planner.companion_back(6.0)
    for n in range(4):  # sent while nothing passed
        planner.observe_ping(4_000.0 - 250.0 * n, 6.0)
    after = choose(planner, now_s=6.0)
    assert {**after.link, "age_s": 0.0} == {**before, "age_s": 0.0}
    assert after.chosen.plan == OFFLOAD


def test_a_connection_lost_in_an_outage_leaves_the_link_as_it_was() -> None:
    planner = connected_planner()
    before = planner.snapshot(1.0)["link"]["up_mbit_s"]
    planner.companion_lost("nothing was heard")
    planner.observe_late(50_000, 40, 900.0, 1.9)
    planner.connected(max_message_bytes=1 << 28)
    assert planner.snapshot(8.0)["link"]["up_mbit_s"] == before


def test_silences_that_follow_one_another_without_a_reply_are_a_slow_link() -> None:
    planner = connected_planner()
    for n in range(4):
        planner.companion_silent("does not answer in time")
        planner.observe_late(50_000, 40, 900.0, 1.9 + n)
        planner.companion_back(1.95 + n)
    assert choose(planner, now_s=5.0).chosen.plan != OFFLOAD


def test_after_a_silence_the_rate_is_looked_at() -> None:
    planner = connected_planner()
    planner.companion_silent("nothing is heard")
    assert planner.probe_wanted(3.0) == 0
    planner.companion_back(6.0)
    assert planner.probe_wanted(6.0) == PROBE_BYTES


def test_what_was_late_before_the_silence_was_known_is_forgiven_with_it() -> None:
    """A broken way looks like a slow one until it is known to be silent."""
    planner = connected_planner()
    before = planner.snapshot(1.0)["link"]
    for n in range(2):
        planner.observe_late(50_000, 40, 900.0, 1.1 + n / 10)
    assert planner.snapshot(1.3)["link"]["up_mbit_s"] < 10.0  # of 100
    planner.companion_silent("it acknowledges nothing")
    planner.companion_back(4.0)
    after = planner.snapshot(4.0)["link"]
    assert after["rtt_ms"] == pytest.approx(before["rtt_ms"])
    assert after["up_mbit_s"] == pytest.approx(before["up_mbit_s"])
    for n in range(2):  # and again, without a reply between: then it is the link
        planner.observe_late(50_000, 40, 900.0, 4.1 + n / 10)
    planner.companion_silent("it acknowledges nothing")
    planner.companion_back(6.0)
    assert planner.snapshot(6.0)["link"]["up_mbit_s"] < 10.0


def test_what_was_late_on_a_link_that_answers_is_believed() -> None:
    planner = connected_planner()
    for n in range(2):
        planner.observe_late(50_000, 40, 900.0, 1.1 + n / 10)
    planner.observe_ping(850.0, 2.5)
    planner.companion_silent("a reply is late")
    planner.companion_back(3.0)
    assert planner.snapshot(3.0)["link"]["rtt_ms"] > 50.0
