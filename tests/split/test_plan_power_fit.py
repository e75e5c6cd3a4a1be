"""split/plan/power_fit.py against least squares of numpy, and against devices whose power is known: we made it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from split.plan.power_fit import PowerFit


def test_the_slope_is_that_of_least_squares() -> None:
    rng = random.Random(7)
    windows = [(busy := rng.random(), 3.0 + 4.0 * busy + rng.gauss(0.0, 0.2)) for _ in range(30)]
    fit = PowerFit()
    for busy, watts in windows:
        fit.observe(10.0, 10.0 * watts, 10.0 * busy)
    weights = np.exp(-10.0 * np.arange(29, -1, -1) / 1800.0)
    matrix = np.array([[1.0, busy] for busy, _ in windows]) * np.sqrt(weights)[:, None]
    expected = np.linalg.lstsq(matrix, np.array([w for _, w in windows]) * np.sqrt(weights), rcond=None)[0][1]
    assert fit.compute_w == pytest.approx(expected, rel=1e-6)


def test_nothing_is_said_of_a_device_that_was_always_as_busy() -> None:
    fit = PowerFit()
    for n in range(100):
        fit.observe(10.0, 50.0 + n % 3, 5.0)
    assert fit.compute_w is None


def test_nothing_is_said_before_two_minutes_were_seen() -> None:
    fit = PowerFit()
    for n in range(11):
        fit.observe(10.0, 30.0 + 40.0 * (n % 2), 10.0 * (n % 2))
    assert fit.compute_w is None
    for busy in (1.0, 0.0):
        fit.observe(10.0, 30.0 + 40.0 * busy, 10.0 * busy)
    assert fit.compute_w == pytest.approx(4.0)


def test_noise_that_hides_the_slope_keeps_it_unsaid() -> None:
    rng = random.Random(3)
    fit = PowerFit()
    for _ in range(40):
        busy = rng.random()
        fit.observe(10.0, max(0.0, 10.0 * (40.0 + busy + rng.gauss(0.0, 8.0))), 10.0 * busy)
    assert fit.compute_w is None


def test_what_was_learned_stays_while_the_device_idles() -> None:
    fit = PowerFit()
    for n in range(40):
        fit.observe(10.0, 30.0 + 40.0 * (n % 2), 10.0 * (n % 2))
    for _ in range(2000):
        fit.observe(10.0, 30.0, 0.0)
    assert fit.compute_w == pytest.approx(4.0)


def test_a_device_that_draws_more_than_it_did_is_learned_anew() -> None:
    fit = PowerFit()
    for watts in (4.0, 6.0):
        for n in range(1500):  # four hours
            fit.observe(10.0, 30.0 + 10.0 * watts * (n % 2), 10.0 * (n % 2))
    assert fit.compute_w == pytest.approx(6.0, rel=0.01)


def test_a_reading_that_is_none_is_left_out() -> None:
    fit = PowerFit()
    for n in range(40):
        fit.observe(10.0, 30.0 + 40.0 * (n % 2), 10.0 * (n % 2))
        fit.observe(10.0, -5.0, 5.0)
        fit.observe(10.0, float("nan"), 5.0)
    assert fit.compute_w == pytest.approx(4.0)
