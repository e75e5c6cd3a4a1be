"""Pieces of `scripts/bench codec`: bytes at equal fidelity, their intervals, what it measures on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.benches.codec_curves import Curve, Measurements, bytes_at, cheapest, ratio_at


def curve(*points: tuple[float, float]) -> Curve:
    sizes, off = zip(*points, strict=True)
    return Curve.of(np.array(sizes, float), np.array(off, float))


def measured(sizes: list[list[float]], off: list[list[float]], sources: list[int]) -> Measurements:
    return Measurements(
        settings=tuple(map(str, range(len(sizes)))),
        bytes=np.array(sizes, float),
        fidelity=np.array(off, float),
        sources=np.array(sources),
    )


def test_between_two_settings_bytes_are_a_power_of_the_measure() -> None:
    # 1000 bytes at 0.1, 4000 at 0.001: two decades for two doublings, so halfway (0.01) lies one doubling.
    assert curve((1000, 0.1), (4000, 0.001)).bytes_at(0.01) == pytest.approx(2000)
    assert curve((1000, 0.1), (4000, 0.001)).bytes_at(0.001) == 4000


def test_what_was_not_measured_is_not_guessed() -> None:
    some = curve((1000, 0.1), (4000, 0.001))
    assert math.isinf(some.bytes_at(0.0009))
    assert some.bytes_at(0.5) == 1000
    assert some.is_bound(0.5)
    assert not some.is_bound(0.1)


def test_a_setting_that_another_one_beats_in_both_is_left_out() -> None:
    assert curve((1000, 0.1), (3000, 0.2), (2000, 0.05), (2500, math.inf)) == curve((1000, 0.1), (2000, 0.05))


def test_outputs_that_are_not_finite_reach_nothing() -> None:
    assert math.isinf(curve((1000, math.inf)).bytes_at(10))


def test_means_are_over_inputs_and_equal_sources_leave_no_doubt() -> None:
    same = measured([[900, 1100], [3900, 4100]], [[0.2, 0.0], [0.0015, 0.0005]], [0, 0])
    found = bytes_at(same, 0.01)
    assert found.value == pytest.approx(2000)
    assert (found.low, found.high) == pytest.approx((2000, 2000))  # one source: drawn again it is itself


def test_the_interval_is_that_of_the_sources_and_not_of_their_crops() -> None:
    # Two sources with 1000 and 3000 bytes, whatever is asked for; three crops of the one weigh as the crops they are.
    # Drawn twice: (a, a) and (b, b) have a probability of ¼ each, so that the ends of 90 % are 1000 and 3000.
    two = measured([[1000, 1000, 1000, 3000]], [[0.01] * 4], [7, 7, 7, 9])
    found = bytes_at(two, 0.01)
    assert found.value == 1500
    assert (found.low, found.high) == (1000, 3000)


def test_many_sources_give_the_interval_of_a_normal_distribution() -> None:
    sizes = np.random.default_rng(1).normal(1000, 100, 400)
    found = bytes_at(measured([sizes.tolist()], [[0.01] * 400], list(range(400))), 0.01)
    error = sizes.std() / 20  # σ / √n
    assert found.low == pytest.approx(sizes.mean() - 1.645 * error, abs=0.25 * error)
    assert found.high == pytest.approx(sizes.mean() + 1.645 * error, abs=0.25 * error)


def test_a_ratio_compares_the_same_sources() -> None:
    # The rival takes four times as much on each source: drawn as pairs, no doubt is left though the sources differ.
    ours = measured([[100, 900]], [[0.01, 0.01]], [0, 1])
    rival = measured([[400, 3600]], [[0.01, 0.01]], [0, 1])
    found = ratio_at(rival, ours, 0.01)
    assert (found.value, found.low, found.high) == (4, 4, 4)


def test_a_rival_that_never_comes_as_close_is_infinitely_larger() -> None:
    ours = measured([[100]], [[0.01]], [0])
    assert ratio_at(measured([[50]], [[0.5]], [0]), ours, 0.01).value == math.inf
    assert cheapest({"ours": ours, "rival": measured([[50]], [[0.5]], [0])}, 0.01) == ("ours", 100)
    assert cheapest({"ours": ours}, 0.001) == ("", math.inf)
