"""Drift, residual and cloud queue against known truths."""

from __future__ import annotations

import numpy as np
import pytest

from split.plan.estimate import ChangeDetector, CloudQueue, Drift, Residual


@pytest.mark.parametrize("ratio", [0.2, 0.8, 1.0, 1.3, 5.0, 20.0])
def test_drift_finds_a_constant_ratio_within_five_requests(ratio: float) -> None:
    rng = np.random.default_rng(1)
    drift = Drift()
    for _ in range(5):
        drift.observe(40.0 * ratio * float(np.exp(rng.normal(0, 0.03))), 40.0)
    assert drift.ratio == pytest.approx(ratio, rel=0.1)


def test_drift_follows_a_throttled_device_within_five_requests() -> None:
    rng = np.random.default_rng(2)
    drift = Drift()
    for _ in range(50):
        drift.observe(40.0 * float(np.exp(rng.normal(0, 0.03))), 40.0)
    for _ in range(5):
        drift.observe(80.0 * float(np.exp(rng.normal(0, 0.03))), 40.0)
    assert drift.ratio == pytest.approx(2.0, rel=0.1)


def test_one_stalled_run_moves_drift_by_less_than_a_tenth() -> None:
    drift = Drift()
    for _ in range(50):
        drift.observe(40.0, 40.0)
    drift.observe(4_000.0, 40.0)
    assert drift.ratio == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("sigma", [0.2, 0.4])
def test_drift_learns_how_far_runs_scatter_around_what_it_believed(sigma: float) -> None:
    rng = np.random.default_rng(4)
    drift, off, told = Drift(), [], []
    for _ in range(1000):
        took_ms, before_ms = 40.0 * float(np.exp(rng.normal(0, sigma))), 40.0 * drift.ratio
        off.append(np.log(took_ms / before_ms))
        told.append(drift.scatter)
        drift.observe(took_ms, 40.0)
    above = np.maximum(off[100:], 0.0)
    assert np.mean(told[100:]) == pytest.approx(np.sqrt(2.0 * np.mean(above**2)), rel=0.15)


def test_a_steady_device_does_not_scatter_and_one_stall_hardly_makes_it() -> None:
    drift = Drift()
    for _ in range(50):
        drift.observe(40.0, 40.0)
    assert drift.scatter == pytest.approx(0.05)
    drift.observe(4_000.0, 40.0)
    assert drift.scatter == pytest.approx(0.05 * np.sqrt(1.0 + 0.05 * 17.0))  # as if it were three σ off


def test_a_stage_that_takes_no_time_teaches_nothing() -> None:
    drift, residual = Drift(), Residual()
    drift.observe(3.0, 0.0)
    residual.observe(3.0, 0.0)
    assert (drift.ratio, drift.count, residual.ratio) == (1.0, 0, 1.0)


def test_residual_learns_a_small_error_and_is_bounded() -> None:
    residual = Residual()
    for _ in range(40):
        residual.observe(11.0, 10.0)
    assert residual.ratio == pytest.approx(1.1, rel=0.01)
    for _ in range(100):
        residual.observe(1_000.0, 10.0)
    assert residual.ratio == pytest.approx(1.5)


def test_a_residual_returns_to_what_is_usual_while_nothing_is_measured() -> None:
    stalled, slower, estimated = Residual(), Residual(), Residual(estimated=True)
    stalled.observe(13.0, 10.0)
    assert stalled.ratio == pytest.approx(1.3**0.2)
    stalled.rest(0.0)
    assert stalled.ratio == pytest.approx(1.3**0.2)
    for _ in range(30):
        stalled.rest(20.0)
    assert stalled.ratio == pytest.approx(1.3 ** (1 / 11))  # ten profiled runs and this one
    for _ in range(40):
        slower.observe(11.0, 10.0)
    for _ in range(3):
        estimated.observe(12.0, 10.0)
    for residual in (slower, estimated):
        residual.rest(600.0)
    assert slower.ratio == pytest.approx(1.1**0.8, rel=0.005)  # forty of fifty: what all runs say is no stall
    assert estimated.ratio == pytest.approx(1.2**0.75)  # three of four


def test_no_single_surprise_alarms_and_two_in_one_direction_do() -> None:
    detector = ChangeDetector()
    assert not detector.changed(1e9)
    assert detector.changed(1e9)
    assert not detector.changed(-1e9)


def test_two_surprises_of_opposite_sign_are_a_change_too() -> None:
    detector = ChangeDetector()
    assert not detector.changed(1e9)
    assert detector.changed(-1e9)


def test_the_detector_seldom_alarms_on_noise() -> None:
    rng = np.random.default_rng(4)
    detector = ChangeDetector()
    alarms = sum(detector.changed(z) for z in rng.normal(size=20_000).tolist())
    assert alarms < 20_000 / 100


def test_the_cloud_queue_fades_into_unknown() -> None:
    queue = CloudQueue()
    unknown = queue.at(0.0)
    assert unknown == (0.0, CloudQueue.UNKNOWN_SIGMA_MS)
    for n in range(20):
        queue.observe(50.0, n * 0.1)
    mean_ms, sigma_ms = queue.at(1.9)
    assert mean_ms == pytest.approx(50.0, rel=0.01)
    assert sigma_ms < 2.0
    mean_ms, _ = queue.at(1.9 + CloudQueue.FADE_S)
    assert mean_ms == pytest.approx(50.0 / np.e, rel=0.01)
    assert queue.at(1_000.0) == pytest.approx(unknown)


def test_an_estimate_is_corrected_at_once_and_proven_after_three_observations() -> None:
    measured, estimated = Residual(), Residual(estimated=True)
    proven = []
    for _ in range(3):
        measured.observe(12.0, 10.0)
        estimated.observe(12.0, 10.0)
        proven.append(estimated.proven)
    assert proven == [False, False, True]
    # An average of the estimate and three observations: 1.2 to the power of three quarters.
    assert estimated.ratio == pytest.approx(1.2**0.75)
    assert measured.ratio < 1.11
    for _ in range(30):
        estimated.observe(12.0, 10.0)
    assert estimated.ratio == pytest.approx(1.2, rel=0.001)


def run(drift: Drift, rng: np.random.Generator, ratio: float, at_s: float) -> None:
    """One run of a stage of 40 ms at `at_s`, 3 % scatter."""
    drift.rest(at_s)
    drift.observe(40.0 * ratio * float(np.exp(rng.normal(0, 0.03))), 40.0)


def test_what_was_slow_for_a_while_is_expected_as_usual_some_minutes_later() -> None:
    rng = np.random.default_rng(5)
    drift = Drift()
    for n in range(200):
        run(drift, rng, 1.0, n * 0.2)
    for n in range(10):
        run(drift, rng, 3.0, 40.0 + n * 0.2)
    drift.rest(42.0)
    busy, narrow = drift.ratio, drift.sigma
    assert busy == pytest.approx(3.0, rel=0.1)
    drift.rest(43.0)
    assert drift.ratio == pytest.approx(busy, rel=0.05)  # a second later it is still busy
    drift.rest(42.0 + Drift.RETURN_S)
    # The logarithm has e⁻¹ of the way left; usual has taken in a tenth of the busy spell.
    assert drift.ratio == pytest.approx(3.0 ** (1 / np.e), rel=0.15)
    drift.rest(42.0 + 10 * Drift.RETURN_S)
    assert drift.ratio == pytest.approx(1.0, rel=0.25)
    assert drift.sigma > 1.3 * narrow
    run(drift, rng, 1.0, 700.0)
    run(drift, rng, 1.0, 700.2)
    assert drift.ratio == pytest.approx(1.0, rel=0.1)


def test_it_does_not_matter_how_often_somebody_asks_while_nothing_runs() -> None:
    rng = np.random.default_rng(6)
    often, once = Drift(), Drift()
    for n in range(30):
        for drift in (often, once):
            drift.rest(n * 0.2)
            drift.observe(40.0 if n < 20 else 90.0, 40.0)
    for at_s in np.sort(rng.uniform(6.0, 60.0, 50)).tolist():
        often.rest(at_s)
    for drift in (often, once):
        drift.rest(60.0)
    assert often.ratio == pytest.approx(once.ratio)
    assert often.sigma == pytest.approx(once.sigma)


def test_a_device_that_is_always_slower_than_profiled_is_not_taken_for_faster_after_a_pause() -> None:
    rng = np.random.default_rng(7)
    drift = Drift()
    for n in range(60):
        run(drift, rng, 1.6, n * 120.0)
    drift.rest(60 * 120.0)
    assert drift.ratio == pytest.approx(1.6, rel=0.05)


def test_what_a_pause_costs_is_told_apart_from_what_the_device_is() -> None:
    """Every fourth run comes after two seconds of nothing and takes 25 % longer."""
    rng = np.random.default_rng(8)
    drift, now_s = Drift(), 0.0
    for n in range(80):
        after_a_pause = n % 4 == 0
        now_s += 2.0 if after_a_pause else 0.05
        run(drift, rng, 1.25 * 1.1 if after_a_pause and n else 1.1, now_s)
    drift.rest(now_s + 0.05)
    assert drift.ratio == pytest.approx(1.1, rel=0.05)
    drift.rest(now_s + 2.0)
    assert drift.ratio == pytest.approx(1.1 * 1.25, rel=0.07)


def test_without_evidence_a_pause_costs_nothing() -> None:
    rng = np.random.default_rng(9)
    drift, now_s = Drift(), 0.0
    for n in range(80):
        now_s += 2.0 if n % 4 == 0 else 0.05
        run(drift, rng, 1.0, now_s)
    drift.rest(now_s + 3.0)
    assert drift.ratio == pytest.approx(1.0, rel=0.04)


def test_a_change_that_is_announced_is_learned_by_two_runs() -> None:
    rng = np.random.default_rng(10)
    drift = Drift()
    for _ in range(50):
        drift.observe(40.0 * float(np.exp(rng.normal(0, 0.03))), 40.0)
    drift.unsettle(0.5)
    for _ in range(2):
        drift.observe(72.0 * float(np.exp(rng.normal(0, 0.03))), 40.0)
    assert drift.ratio == pytest.approx(1.8, rel=0.06)
