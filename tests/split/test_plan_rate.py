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


def test_one_payload_that_fell_back_to_lossless_is_not_believed_first_or_later() -> None:
    for before in (0, 3, 40):
        rate = Rate()
        for _ in range(before):
            rate.observe(1000.0, 1000.0)
        rate.observe(25_000.0, 1000.0)
        assert rate.ratio < 1.15


def test_a_row_of_them_is_believed() -> None:
    for before in (0, 100):
        rate = Rate()
        for _ in range(before):
            rate.observe(1000.0, 1000.0)
        for _ in range(100):
            rate.observe(25_000.0, 1000.0)
        assert rate.misfit
        assert rate.ratio > 15.0


def test_a_scatter_as_of_photographs_is_hardly_clipped() -> None:
    """Log-normal of sigma 0.3 has its mean at exp(0.045); what is cut off its tail is two per cent."""
    dice, rate = np.random.default_rng(3), Rate()
    found = []
    for _ in range(5000):
        rate.observe(1000.0 * dice.lognormal(0.0, 0.3), 1000.0)
        found.append(rate.ratio)
    assert np.mean(found[100:]) == pytest.approx(np.exp(0.045), rel=0.02)


def test_what_was_learned_fades_while_the_codec_is_not_used() -> None:
    rate = Rate()
    for _ in range(200):
        rate.observe(3000.0, 1000.0)
        rate.rest(1.0)
    assert rate.ratio == pytest.approx(3.0, rel=0.03)  # used each second: nothing fades
    before = rate.ratio
    for _ in range(28):
        rate.rest(1.0)
    assert rate.ratio == before
    for _ in range(60):
        rate.rest(1.0)
    assert rate.ratio == pytest.approx(1.0 + 2.0 / np.e, rel=0.05)
    assert rate.moved()
    for _ in range(20):
        rate.observe(3000.0, 1000.0)
    assert rate.ratio > 2.0  # and is learned again
