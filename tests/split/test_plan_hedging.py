"""When the local finish begins beside the companion: probabilities from a numeric integration of the density, which
knows neither the error function nor its inverse."""

from __future__ import annotations

import math

import numpy as np
import pytest

from split.plan.hedging import HEDGING, STALL_MS, Replies, expected_reply_ms, hedge_after_ms, turn_ms

PRIOR_STALLED = 0.01
"""What one in a hundred is expected to be, before any reply is seen."""
SCATTER = 0.1


def later_than(ms: float, mean_ms: float, sigma_ms: float) -> float:
    """∫ of the log-normal density with this mean and standard deviation from `ms` on, by the trapezoid rule."""
    variance = math.log(1 + (sigma_ms / mean_ms) ** 2)
    centre = math.log(mean_ms) - variance / 2
    x = np.geomspace(ms, mean_ms * 1e4, 400_001)
    density = np.exp(-((np.log(x) - centre) ** 2) / (2 * variance)) / (x * math.sqrt(2 * math.pi * variance))
    return float(((density[1:] + density[:-1]) / 2 * np.diff(x)).sum())


def hedge(
    service_class: str = "silver",
    *,
    expected_ms: float = 100.0,
    sigma_ms: float = 40.0,
    finish_ms: float = 60.0,
    late_after_ms: float = 1000.0,
    may_gain_time: bool = True,
    replies: Replies | None = None,
) -> float:
    return hedge_after_ms(
        replies or Replies(),
        HEDGING[service_class],
        expected_ms=expected_ms,
        sigma_ms=sigma_ms,
        finish_ms=finish_ms,
        late_after_ms=late_after_ms,
        may_gain_time=may_gain_time,
    )


@pytest.mark.parametrize(("service_class", "bound"), [("gold", 0.05), ("silver", 0.10)])
@pytest.mark.parametrize(
    ("expected_ms", "sigma_ms", "late_after_ms"),
    [(100.0, 40.0, 250.0), (100.0, 40.0, 200.0), (20.0, 10.0, 40.0), (300.0, 60.0, 450.0)],
)
def test_at_the_hedge_time_the_reply_is_late_with_the_probability_that_the_class_allows(
    service_class: str, bound: float, expected_ms: float, sigma_ms: float, late_after_ms: float
) -> None:
    ms = hedge(
        service_class,
        expected_ms=expected_ms,
        sigma_ms=sigma_ms,
        late_after_ms=late_after_ms,
        may_gain_time=False,
    )
    # the deadline is nearer than a stall is long: a stalled one is late
    assert late_after_ms < expected_ms + STALL_MS
    late = PRIOR_STALLED + (1 - PRIOR_STALLED) * later_than(late_after_ms, expected_ms, sigma_ms)
    not_there = PRIOR_STALLED + (1 - PRIOR_STALLED) * later_than(max(ms, 1e-3), expected_ms, sigma_ms)
    assert late / not_there == pytest.approx(bound, rel=1e-3) or (ms == 0.0 and late / not_there > bound)


def test_a_deadline_that_leaves_time_for_a_stall_makes_nobody_hurry_for_its_sake() -> None:
    # P(late) is that of the log-normal alone: 0.99 · 3e-10 here, and grows to 10 % only when the deadline has come
    assert hedge(late_after_ms=1000.0, may_gain_time=False) == math.inf


def test_a_reply_that_is_late_more_often_than_allowed_from_the_start_is_hedged_at_once() -> None:
    assert later_than(110.0, 100.0, 40.0) > 0.10
    assert hedge(late_after_ms=110.0) == 0.0


@pytest.mark.parametrize("finish_ms", [40.0, 60.0, 100.0, 150.0])
def test_an_idle_device_begins_when_the_stall_that_is_to_be_expected_outlasts_its_own_finish(finish_ms: float) -> None:
    ms = hedge(finish_ms=finish_ms)
    not_there = PRIOR_STALLED + (1 - PRIOR_STALLED) * later_than(ms, 100.0, 40.0)
    to_come_ms = PRIOR_STALLED / not_there * 200.0  # the least retransmission time-out of Linux
    assert to_come_ms == pytest.approx(1.2 * finish_ms + 2.0, rel=1e-3)


def test_only_to_gain_time_no_more_than_one_in_twenty_healthy_replies_is_hedged() -> None:
    ms = hedge(finish_ms=1.0)  # by itself worth it far earlier
    assert later_than(ms, 100.0, 40.0) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    "why",
    [
        {"finish_ms": 170.0},  # 1.2 · 170 + 2 > 200: waiting for the stall to end is quicker
        {"may_gain_time": False},
        {"service_class": "bronze"},
        {"service_class": "bronze", "late_after_ms": 110.0},
        {"expected_ms": 0.0},
    ],
)
def test_otherwise_it_waits_for_its_latest_start(why: dict[str, float]) -> None:
    assert hedge(**why) == math.inf  # type: ignore[arg-type]  # the values are of several types


def test_a_gold_request_never_begins_after_a_silver_one() -> None:
    for late_after_ms in np.geomspace(50.0, 2000.0, 200):
        for sigma_ms in (1.0, 20.0, 100.0):
            gold, silver = (hedge(each, sigma_ms=sigma_ms, late_after_ms=late_after_ms) for each in ("gold", "silver"))
            assert gold <= silver


def test_what_replies_have_shown_counts_where_the_prediction_is_surer_of_itself() -> None:
    replies = Replies()
    random = np.random.default_rng(5)
    for _ in range(2000):
        replies.came(100.0 * math.exp(random.normal(0.0, 0.3)), 100.0, 1.0)
    assert replies.scatter == pytest.approx(0.3, rel=0.3)
    assert replies.stalled_share < 0.02  # scatter is none
    assert hedge(sigma_ms=1.0, replies=replies) > hedge(sigma_ms=1.0)


def test_stalls_are_counted_and_fade() -> None:
    replies = Replies()
    for number in range(1000):
        replies.came(100.0 + (400.0 if number % 20 == 0 else 0.0), 100.0, 10.0)
    assert replies.stalled_share == pytest.approx(0.05, abs=0.02)
    assert replies.scatter == pytest.approx(SCATTER)  # a stall is not scatter
    eager_ms = hedge(replies=replies)
    for _ in range(1000):
        replies.came(100.0, 100.0, 10.0)
    assert replies.stalled_share < 0.005
    assert hedge(replies=replies) > eager_ms


def test_a_reply_that_was_overtaken_counts_as_stalled_only_once_it_would_have_been() -> None:
    soon, late = Replies(), Replies()
    for _ in range(50):
        soon.overtaken(110.0, 100.0, 10.0)
        late.overtaken(200.0, 100.0, 10.0)
    assert soon.stalled_share == PRIOR_STALLED
    assert late.stalled_share > 0.3


def test_behind_others_a_reply_is_expected_later_by_what_each_occupies_and_not_by_the_way_there() -> None:
    """A round trip of 10 ms; the link up is taken for 15, the companion for 2 + 6, the link down for 1."""
    stages_ms = {"head": 30.0, "up": 20.0, "cloud_queue": 1.0, "cloud_decode": 2.0, "tail": 6.0, "down": 6.0}
    stages_ms |= {"decode": 0.5}
    assert turn_ms(stages_ms, 10.0) == 15.0
    assert turn_ms(stages_ms | {"tail": 20.0}, 10.0) == 22.0
    assert expected_reply_ms(stages_ms, []) == 35.5
    assert expected_reply_ms(stages_ms, [15.0, 22.0]) == 35.5 + 37.0
