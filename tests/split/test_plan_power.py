"""split/plan/power.py: watts × time, by hand."""

from __future__ import annotations

import math

import pytest

from split.plan.power import NO_POWER, Power, PowerModel, modelled, used_joules
from split.profiles.device import load_device
from split.profiles.radio import RADIOS, LinkKind

LTE_PHONE = Power(compute_w=4.0, send_w=2.5, receive_w=1.5, wait_w=1.0, measured=False, source="by hand")


def test_the_energy_of_a_request_is_the_sum_of_watts_times_seconds() -> None:
    # 4 W × 0.1 s + 2.5 W × 0.2 s + 1.5 W × 0.04 s + 1 W × 0.3 s
    joules = LTE_PHONE.joules(compute_ms=100.0, send_ms=200.0, receive_ms=40.0, wait_ms=300.0)
    assert joules == pytest.approx(0.4 + 0.5 + 0.06 + 0.3)


def test_a_device_of_which_nothing_is_known_costs_nothing_and_says_so() -> None:
    assert NO_POWER.joules(compute_ms=1e6, send_ms=1e6, receive_ms=1e6, wait_ms=1e6) == 0.0
    assert not NO_POWER.measured
    assert NO_POWER.source == ""


@pytest.mark.parametrize("watts", [-0.1, math.nan, math.inf])
def test_watts_that_are_no_watts_cannot_be_built(watts: float) -> None:
    with pytest.raises(AssertionError, match="send_w must be watts"):
        Power(compute_w=0.0, send_w=watts, receive_w=0.0, wait_w=0.0, measured=False, source="x")


def test_sending_over_lte_draws_what_the_paper_says() -> None:
    # Huang et al. 2012, table 4: 438.39 mW × 5 Mbit/s + 1288.04 mW up, 51.97 mW × 13 Mbit/s + 1288.04 mW down.
    power = PowerModel(compute_w=3.0, radio=RADIOS[LinkKind.LTE], measured=True, source="x").at(5.0, 13.0)
    assert power.send_w == pytest.approx(3.47999)
    assert power.receive_w == pytest.approx(1.96365)
    assert power.wait_w == pytest.approx(1.06)
    assert (power.compute_w, power.measured, power.source) == (3.0, True, "x; the radio is modelled")


def test_beyond_what_was_measured_the_radio_draws_no_more() -> None:
    model = PowerModel(compute_w=0.0, radio=RADIOS[LinkKind.WIFI], measured=False, source="x")
    assert model.at(1000.0, 1000.0) == model.at(20.0, 20.0)
    assert model.at(1000.0, 0.0).send_w == pytest.approx(0.13286 + 20 * 0.28317)


def test_without_a_radio_only_computing_costs() -> None:
    power = PowerModel(compute_w=3.0, radio=None, measured=False, source="x").at(5.0, 5.0)
    assert (power.send_w, power.receive_w, power.wait_w) == (0.0, 0.0, 0.0)


def test_a_profile_gives_the_share_of_the_cores_that_compute() -> None:
    # Raspberry Pi 5: 11 W busy, 3 W idle, three of four cores.
    model = modelled(load_device("raspberry-pi-5"), 3, None)
    assert model.compute_w == pytest.approx(8.0 * 3 / 4)
    assert not model.measured
    assert model.source.startswith("modelled: raspberry-pi-5")


def test_a_device_without_a_profile_has_no_power() -> None:
    assert modelled(None, 4, RADIOS[LinkKind.LTE]).at(5.0, 5.0) == NO_POWER


def test_what_a_request_used_is_its_measured_stages_times_watts() -> None:
    measured_ms = {"queue": 30.0, "head": 40.0, "encode": 10.0, "network": 100.0, "tail": 15.0, "decode": 5.0}
    joules = used_joules(LTE_PHONE, measured_ms, {"up": 60.0, "down": 20.0}, 20.0, 220.0)
    # The network took 1.25 times what was predicted: 62.5 ms up, 12.5 ms down, 25 ms round trip. 55 ms of work; the
    # other 90 ms it waited, 30 of them for its turn here, which costs nothing.
    assert joules == pytest.approx(0.055 * 4.0 + 0.0625 * 2.5 + 0.0125 * 1.5 + 0.06 * 1.0)


def test_a_request_that_stayed_here_sends_nothing() -> None:
    measured_ms = {"queue": 10.0, "activate": 5.0, "image": 5.0, "whole": 90.0}
    joules = used_joules(LTE_PHONE, measured_ms, {"up": 40.0, "down": 20.0}, 0.0, 115.0)
    assert joules == pytest.approx(0.1 * 4.0)


def test_a_request_whose_payload_left_and_that_was_finished_here_has_sent_it() -> None:
    # 600 KB at 5 Mbit/s: 960 ms up, and half a round trip of 60 ms. Head 20 ms, tail 100 ms here, queues of 15 ms.
    measured_ms = {"queue": 15.0, "head": 20.0, "local_tail": 100.0}
    joules = used_joules(LTE_PHONE, measured_ms, {"up": 990.0, "down": 40.0}, 60.0, 1235.0, sent=True)
    assert joules == pytest.approx(0.12 * 4.0 + 0.96 * 2.5 + 0.14 * 1.0)
    # Answered after 535 ms, it cannot have sent for longer than the 400 ms that were left.
    joules = used_joules(LTE_PHONE, measured_ms, {"up": 990.0, "down": 40.0}, 60.0, 535.0, sent=True)
    assert joules == pytest.approx(0.12 * 4.0 + 0.4 * 2.5)


def test_a_batch_in_parts_has_sent_all_of_them_though_only_the_first_was_timed() -> None:
    # 200 ms up and 20 down beside a round trip of 20, in four parts: the first was to take 20 + 55 ms and took twice
    # that, so that they were sent in 400 ms and came in 40. 80 ms of work; the other 80 it waited.
    measured_ms = {"head": 80.0, "network": 150.0, "tail": 60.0}
    joules = used_joules(LTE_PHONE, measured_ms, {"up": 210.0, "down": 30.0}, 20.0, 600.0, parts=4)
    assert joules == pytest.approx(0.08 * 4.0 + 0.4 * 2.5 + 0.04 * 1.5 + 0.08 * 1.0)


def test_what_the_device_computed_for_an_answer_that_came_second_was_used() -> None:
    measured_ms = {"head": 40.0, "network": 100.0, "tail": 15.0, "decode": 5.0}
    alone = used_joules(LTE_PHONE, measured_ms, {"up": 60.0, "down": 40.0}, 20.0, 160.0)
    both = used_joules(LTE_PHONE, measured_ms, {"up": 60.0, "down": 40.0}, 20.0, 160.0, doubled_ms=70.0)
    assert both - alone == pytest.approx(0.07 * 4.0)


def test_a_request_that_goes_as_predicted_uses_what_was_predicted() -> None:
    predicted_ms = {"head": 40.0, "encode": 5.0, "up": 70.0, "tail": 8.0, "down": 30.0, "decode": 2.0}
    measured_ms = {"head": 40.0, "encode": 5.0, "network": 100.0, "tail": 8.0, "decode": 2.0}
    predicted = LTE_PHONE.joules(compute_ms=47.0, send_ms=50.0, receive_ms=10.0, wait_ms=40.0 + 8.0)
    assert used_joules(LTE_PHONE, measured_ms, predicted_ms, 40.0, 155.0) == pytest.approx(predicted)
