"""When spot checks say that the bound of fidelity is broken, and when they do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from split.plan.kept import SEEN_MIN, Kept


def test_distances_whose_mean_keeps_the_bound_break_it_in_none_of_a_thousand_models() -> None:
    dice, broken = np.random.default_rng(1), 0
    for _ in range(1000):
        kept = Kept()
        for distance in dice.exponential(0.03, 100):  # mean 0.83 of the bound, a quarter of them beyond it
            kept.checked(float(distance), 0.036)
        broken += kept.broken
        assert kept.over > 5
    assert broken <= 10


def test_distances_twice_the_bound_break_it_within_a_hundred_checks_and_that_is_said_once() -> None:
    dice, kept = np.random.default_rng(2), Kept()
    said = [kept.checked(float(distance), 0.036) for distance in dice.exponential(0.072, 100)]
    assert said.count(True) == 1
    assert kept.broken
    assert kept.mean_ratio == pytest.approx(2.0, rel=0.3)


def test_nothing_is_judged_before_so_many() -> None:
    kept = Kept()
    assert not any(kept.checked(1.0, 0.1) for _ in range(SEEN_MIN - 1))
    assert kept.checked(1.0, 0.1)


def test_answers_are_counted_against_the_bound_that_each_was_asked_for_with() -> None:
    kept = Kept()
    kept.checked(0.01, 0.02)
    kept.checked(0.03, 0.04)
    assert kept.mean_ratio == pytest.approx((0.5 + 0.75) / 2)
    assert kept.over == 0


def test_answers_that_are_not_finite_break_it_and_leave_numbers() -> None:
    kept = Kept()
    said = [kept.checked(math.inf, 0.1) for _ in range(SEEN_MIN)]
    assert said[-1]
    assert math.isfinite(kept.mean_ratio)


def test_a_bound_of_nothing_is_kept_by_nothing_alone() -> None:
    same, other = Kept(), Kept()
    assert not any(same.checked(0.0, 0.0) for _ in range(50))
    assert any(other.checked(1e-9, 0.0) for _ in range(50))
