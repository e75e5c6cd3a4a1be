"""What calibrated codecs really send: the ratio that is learned, and when it counts as a misfit."""

from __future__ import annotations

import numpy as np
import pytest

from split.plan.rate import Rate


def test_the_ratio_follows_what_is_sent_within_a_hundred_payloads() -> None:
    rate = Rate()
    for _ in range(100):
        rate.observe(1300.0, 1000.0)
    assert rate.ratio == pytest.approx(1.3, abs=0.03)
    for _ in range(150):
        rate.observe(800.0, 1000.0)
    assert rate.ratio == pytest.approx(0.8, abs=0.04)


def test_one_large_payload_is_no_misfit_and_moves_the_ratio_little() -> None:
    rate = Rate()
    for _ in range(60):
        assert not rate.observe(1000.0, 1000.0)
    assert not rate.observe(10_000.0, 1000.0)
    assert not rate.misfit
    assert rate.ratio < 1.2


def test_inputs_of_another_kind_are_a_misfit_once_said_and_once_taken_back() -> None:
    dice, rate, said = np.random.default_rng(1), Rate(), []
    for number in range(400):
        kind = 1.7 if number < 200 else 1.05  # noise for photographs, then photographs again
        if rate.observe(1000.0 * kind * dice.normal(1.0, 0.1), 1000.0):
            said.append((number, rate.misfit))
    assert [misfit for _, misfit in said] == [True, False]
    assert said[0][0] >= Rate.SEEN_MIN - 1
    assert said[1][0] > 200


def test_inputs_that_take_a_little_more_than_the_curve_are_none() -> None:
    dice, rate = np.random.default_rng(2), Rate()
    for _ in range(2000):
        rate.observe(1000.0 * dice.normal(1.4, 0.3), 1000.0)  # text for photographs took 1.13 times as much
        assert not rate.misfit


def test_a_change_is_told_once() -> None:
    rate = Rate()
    assert not rate.moved()
    rate.observe(3000.0, 1000.0)
    assert rate.moved()
    assert not rate.moved()


def test_what_is_expected_to_be_empty_teaches_nothing() -> None:
    rate = Rate()
    rate.observe(100.0, 0.0)
    assert (rate.ratio, rate.seen) == (1.0, 0)
