"""A side that says how fast it computes, and whose times show it, too: each change counts once."""

from __future__ import annotations

import math

import pytest

from split.plan.estimate import Drift
from split.plan.pace import PacedDrift

PROFILED_MS = 10.0


def told(replies: list[tuple[float, float]], drift: PacedDrift | None = None) -> PacedDrift:
    """`replies`: when, and how many times longer than profiled."""
    drift = drift or PacedDrift(prior_sigma=0.2)
    for at_s, slower in replies:
        drift.observe(slower * PROFILED_MS, PROFILED_MS, at_s)
    return drift


USUAL = [(0.1 * n, 1.0) for n in range(20)]  # until 1.9 s


def test_its_word_alone_makes_all_slower_and_faster_again() -> None:
    drift = told(USUAL)
    drift.paced(5.0, from_s=2.5)
    assert drift.ratio == pytest.approx(5.0, rel=0.02)
    drift.paced(1.0, from_s=9.0)
    assert drift.ratio == pytest.approx(1.0, rel=0.02)


def test_what_it_says_is_less_certain_than_what_its_times_showed() -> None:
    drift = told(USUAL)
    before = drift.sigma
    drift.paced(5.0, from_s=2.5)
    assert drift.sigma == pytest.approx(math.hypot(0.5 * math.log(5.0), Drift.NOISE), rel=0.05)
    told([(3.0, 5.0), (3.1, 5.0)], drift)
    assert drift.sigma < 2.0 * before


@pytest.mark.parametrize("slow", [2, 6])
def test_what_times_had_shown_before_it_said_so_counts_once_and_ends_with_its_word(slow: int) -> None:
    drift = told(USUAL + [(2.0 + 0.1 * n, 5.0) for n in range(slow)])
    assert drift.ratio == pytest.approx(5.0, rel=0.15)
    drift.paced(5.0, from_s=1.85)
    assert drift.ratio == pytest.approx(5.0, rel=0.15)
    drift.paced(1.0, from_s=8.0)  # nothing was sent there meanwhile
    assert drift.ratio == pytest.approx(1.0, rel=0.15)


def test_replies_of_before_the_change_are_no_evidence_against_it() -> None:
    drift = told(USUAL)
    drift.paced(5.0, from_s=1.55)  # the last four replies came since, and were quick: it became slow after them
    assert drift.ratio == pytest.approx(5.0, rel=0.02)


def test_slowness_that_it_says_lasts_is_waited_out_and_slowness_that_it_does_not_explain_is_not() -> None:
    """What is not explained returns with a time constant of 30 s."""
    explained, unexplained = (told([*USUAL, (2.0, 5.0), (2.1, 5.0)]) for _ in range(2))
    explained.paced(5.0, from_s=1.95)
    for drift in (explained, unexplained):
        drift.rest(2.2)
        drift.rest(62.2)
    assert explained.ratio == pytest.approx(5.0, rel=0.2)
    assert unexplained.ratio == pytest.approx(5.0 ** math.exp(-2.0), rel=0.2)


def test_before_anything_was_measured_its_word_is_all() -> None:
    drift = PacedDrift(prior_sigma=0.2)
    drift.paced(2.0, from_s=-math.inf)
    assert drift.ratio == 2.0


def test_tails_that_a_call_makes_several_times_longer_say_nothing_of_the_machine() -> None:
    """A last segment of 0.11 ms in a loop took 0.5 when served, on an idle machine that ran all others as before; at
    most ten of them in a row were tried."""
    drift = told(USUAL)
    for n in range(10):
        drift.observe(0.5, 0.11, 2.0 + 0.1 * n)
    assert drift.ratio == pytest.approx(1.0, rel=0.05)
    told([(3.0, 5.0), (3.1, 5.0)], drift)
    assert drift.ratio == pytest.approx(5.0, rel=0.15)
