"""What is true comes from simulated messages: a call of so many ms, a multiple of the profiled time, and scatter."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from split.plan.message_cost import MessageCost

SMALL_MS, LARGE_MS = 0.02, 6.0
"""As profiled: 16 KB and 600 KB of int8."""


def served(rng: np.random.Generator, profiled_ms: float, call_ms: float = 0.3, ratio: float = 1.0) -> float:
    """3 % of scatter and, a tenth of the time, a few tens of µs more: what a busy event loop adds."""
    late_ms = float(rng.exponential(0.05)) if rng.random() < 0.1 else 0.0
    return (call_ms + ratio * profiled_ms) * float(rng.normal(1.0, 0.03)) + late_ms


@pytest.mark.parametrize("seed", range(5))
def test_a_fixed_cost_is_learned_within_ten_messages_of_both_sizes(seed: int) -> None:
    rng, cost = np.random.default_rng(seed), MessageCost()
    for n in range(10):
        profiled_ms = (SMALL_MS, LARGE_MS)[n % 2]
        cost.observe(served(rng, profiled_ms), profiled_ms)
    assert cost.ms(SMALL_MS) == pytest.approx(0.3 + SMALL_MS, rel=0.1)
    assert cost.ms(LARGE_MS) == pytest.approx(0.3 + LARGE_MS, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_small_messages_alone_do_not_tell_large_ones_to_take_longer_by_a_factor(seed: int) -> None:
    rng, cost = np.random.default_rng(seed), MessageCost()
    for _ in range(10):
        cost.observe(served(rng, SMALL_MS), SMALL_MS)
    assert cost.ms(SMALL_MS) == pytest.approx(0.3 + SMALL_MS, rel=0.1)
    assert cost.ms(LARGE_MS) == pytest.approx(0.3 + LARGE_MS, rel=0.1)  # a ratio would say 16 times as much


@pytest.mark.parametrize("seed", range(5))
def test_a_codec_that_is_slower_than_profiled_is_told_from_one_whose_calls_cost(seed: int) -> None:
    rng, cost = np.random.default_rng(seed), MessageCost()
    for n in range(20):
        profiled_ms = (SMALL_MS, LARGE_MS)[n % 2]
        cost.observe(served(rng, profiled_ms, ratio=2.0), profiled_ms)
    assert cost.ms(LARGE_MS) == pytest.approx(0.3 + 2.0 * LARGE_MS, rel=0.1)
    assert cost.call_ms == pytest.approx(0.3, abs=0.1)


def test_what_costs_nothing_as_profiled_is_all_call() -> None:
    cost = MessageCost()
    for _ in range(5):
        cost.observe(0.25, 0.0)
    assert cost.call_ms == pytest.approx(0.25, rel=0.1)
    assert cost.ratio == 1.0


def test_stalls_even_two_in_a_row_hardly_count() -> None:
    cost = MessageCost()
    for n in range(60):
        cost.observe(8.0 if n % 7 in (5, 6) else 0.32, SMALL_MS)
        if n > 10:
            assert cost.ms(SMALL_MS) < 1.0  # two of seven take 25 times as long
    for _ in range(5):
        cost.observe(0.32, SMALL_MS)
    assert cost.ms(SMALL_MS) == pytest.approx(0.32, rel=0.1)


@pytest.mark.parametrize("became_ms", [0.05, 1.0, 5.0])
def test_messages_that_stay_as_surprising_are_believed_after_a_handful(became_ms: float) -> None:
    cost = MessageCost()
    for _ in range(20):
        cost.observe(0.32, SMALL_MS)
    for _ in range(8):
        cost.observe(became_ms, SMALL_MS)
    assert cost.ms(SMALL_MS) == pytest.approx(became_ms, rel=0.2)


def test_messages_that_are_quicker_than_profiled_leave_the_call_at_nothing() -> None:
    cost = MessageCost()
    for _ in range(20):
        cost.observe(3.0, LARGE_MS)
    assert cost.call_ms == 0.0
    assert cost.ms(LARGE_MS) == pytest.approx(3.0, rel=0.05)
    assert cost.ms(0.0) == 0.0


def test_of_another_size_only_the_part_beyond_the_call_is_brought_to_the_profiled_one() -> None:
    cost = MessageCost()
    for _ in range(20):
        cost.observe(0.3, 0.0)
    # Four times the payload, by hand: 0.3 + 4 · 0.5 = 2.3 becomes 0.3 + 0.5.
    assert cost.at_profiled(2.3, 4.0) == pytest.approx(0.8, rel=0.05)
    assert cost.at_profiled(0.2, 4.0) == pytest.approx(0.2)


def test_a_small_change_is_not_told_again() -> None:
    cost = MessageCost()
    assert not cost.moved(1.0)
    cost.observe(1.3, 1.0)
    assert cost.moved(1.0)
    assert not cost.moved(1.0)


def test_no_row_of_surprises_leaves_anything_but_numbers() -> None:
    """Ten surprises in a row widen what is believed possible 4^45-fold; rounding then took more than there was."""
    for seed in range(60):
        dice, cost = random.Random(seed), MessageCost()
        profiled_ms = 10.0 ** dice.uniform(-3.0, 1.0)
        for _ in range(400):
            took_ms = profiled_ms * 10.0 ** dice.choice((dice.uniform(-3.0, 0.0), dice.uniform(0.0, 4.0), 0.0))
            cost.observe(took_ms, profiled_ms * dice.choice((1.0, 1.0, 30.0)))
            assert math.isfinite(cost.call_ms)
            assert math.isfinite(cost.ratio)
            assert cost.call_ms >= 0.0
            assert cost.ratio >= 0.0
