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
