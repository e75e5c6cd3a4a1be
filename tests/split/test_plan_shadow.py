"""When a companion whose answers disagree loses a model. The expected bounds are from the binomial distribution itself,
not from Wilson's formula."""

from __future__ import annotations

import random
from math import comb

import pytest

from split.plan.shadow import Agreement


def compared(minimum: float, agreeing: list[bool]) -> tuple[Agreement, int | None]:
    """And after how many comparisons it was over."""
    agreement = Agreement(minimum)
    over = None
    for number, agrees in enumerate(agreeing, start=1):
        if agreement.compared("" if agrees else "it is off by 0.1"):
            assert over is None
            over = number
    return agreement, over


def at_most(agreed: int, runs: int, share: float) -> float:
    """P(so few agree, or fewer, of so many), where this share does."""
    return sum(comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(agreed + 1))


def test_a_companion_that_never_agrees_is_found_out_after_five_comparisons() -> None:
    agreement, over = compared(0.9, [False] * 10)
    assert over == 5
    assert "0%" in agreement.failed
    assert "90%" in agreement.failed
    assert "off by 0.1" in agreement.failed


@pytest.mark.parametrize("minimum", [0.5, 0.9, 0.92])
@pytest.mark.parametrize("agreed", range(0, 22, 3))
def test_it_is_over_only_where_chance_hardly_explains_it(minimum: float, agreed: int) -> None:
    # agreeing ones first, so that the share falls from above
    _, over = compared(minimum, [True] * agreed + [False] * 60)
    assert over is not None
    runs = max(over, 5)
    assert at_most(agreed, runs, minimum) < 0.06  # 1 % by Wilson's interval, which is narrow for shares near 1
    if over > 5:
        assert at_most(agreed, over - 1, minimum) > 0.001


def test_a_companion_that_agrees_as_often_as_demanded_and_more_is_kept() -> None:
    source = random.Random(3)
    for _ in range(20):
        _, over = compared(0.9, [source.random() < 0.97 for _ in range(1000)])
        assert over is None


def test_one_that_agreed_for_long_and_then_does_not_is_found_out() -> None:
    _, over = compared(0.9, [True] * 1000 + [False] * 50)
    assert over is not None
    assert over <= 1000 + 25


def test_comparing_takes_a_fifth_of_the_worker_and_a_twentieth_once_all_agree() -> None:
    agreement = Agreement(0.9)
    assert agreement.due(0.0)
    now_s, busy_s, times_s = 0.0, 0.0, []
    for _ in range(40):
        agreement.begun(100.0, now_s)
        agreement.compared("")
        busy_s += 0.1
        began_s = now_s
        while not agreement.due(now_s):
            now_s += 0.01
        times_s.append(now_s - began_s)
    assert times_s[:20] == pytest.approx([0.5] * 20, abs=0.02)
    assert times_s[21:] == pytest.approx([2.0] * 19, abs=0.02)
    assert busy_s / now_s < 0.2
    agreement.begun(100.0, now_s)
    agreement.compared("it is off by 0.1")
    agreement.begun(100.0, now_s)
    assert agreement.due(now_s + 0.51)  # closer again
