"""split/plan/power.py: watts × time, by hand."""

from __future__ import annotations

import math

import pytest

from split.plan.power import NO_POWER, Power

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
