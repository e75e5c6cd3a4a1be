"""split/codec/fidelity.py against closed forms."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from split.codec.fidelity import MEASURES, divergence, farthest
from split.errors import CodecError
from split.profiles.contract import Measure


def test_the_measures_are_those_a_contract_may_name() -> None:
    """Each of one tensor, but boxes."""
    assert {*MEASURES, "boxes"} == set(get_args(Measure))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)])
def test_equal_outputs_differ_by_zero(measure: str, shape: tuple[int, ...]) -> None:
    array = np.linspace(-1, 1, math.prod(shape), dtype="f4").reshape(shape)
    assert divergence(measure, array.copy(), array) == 0.0


@pytest.mark.parametrize("measure", MEASURES)
def test_nan_in_other_places_other_shapes_and_other_types_are_infinitely_far(measure: str) -> None:
    array = np.array([1.0, 2.0], "f4")
    assert divergence(measure, np.array([math.nan, 2.0], "f4"), array) == math.inf
    assert divergence(measure, array.reshape(1, 2), array) == math.inf
    assert divergence(measure, array.astype("f8"), array) == math.inf


def test_nan_in_the_same_places_is_the_same() -> None:
    array = np.array([math.nan, 2.0], "f4")
    assert divergence("kl", array.copy(), array) == 0.0


def test_kl_of_two_classes_is_the_textbook_value_in_nats() -> None:
    p, q = 0.8, 0.6
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    found, wanted = (np.array([[math.log(x), math.log(1 - x)]]) + 5.0 for x in (q, p))  # softmax ignores the offset
    assert divergence("kl", found, wanted) == pytest.approx(expected, rel=1e-9)


def test_kl_takes_probabilities_as_they_are() -> None:
    expected = 0.8 * math.log(0.8 / 0.6) + 0.2 * math.log(0.2 / 0.4)
    assert divergence("kl", np.array([[0.6, 0.4]]), np.array([[0.8, 0.2]])) == pytest.approx(expected, rel=1e-9)
    assert math.isfinite(divergence("kl", np.array([[1.0, 0.0]]), np.array([[0.8, 0.2]])))


def test_kl_survives_huge_logits() -> None:
    assert divergence("kl", np.array([[1e4, 0.0]]), np.array([[0.0, 1e4]])) == pytest.approx(1e4)


def test_the_worst_row_counts() -> None:
    expected = np.tile(np.array([1.0, 0.0, 0.0]), (100, 1)) * 9
    found = expected.copy()
    found[42] = [0.0, 9.0, 0.0]
    alone = divergence("kl", found[42:43], expected[42:43])
    assert divergence("kl", found, expected) == pytest.approx(alone)
    assert divergence("cosine", found, expected) == pytest.approx(1.0)
    assert divergence("top1", found, expected) == pytest.approx(0.01)


def test_rms_is_the_length_of_the_difference_over_that_of_what_was_expected() -> None:
    expected = np.array([[3.0, 0.0], [0.0, 4.0]])
    assert divergence("rms", np.array([[3.0, 0.3], [0.4, 4.0]]), expected) == pytest.approx(0.1)  # 0.5 of 5
    assert divergence("rms", np.zeros((2, 2)), expected) == pytest.approx(1.0)
    assert divergence("rms", np.array([[0.25]]), np.array([[0.0]])) == 0.25
    assert divergence("rms", expected, expected) == 0.0


def test_cosine_is_one_minus_the_cosine_of_the_angle() -> None:
    for degrees in (0.5, 30, 90, 180):
        angle = math.radians(degrees)
        found = np.array([[math.cos(angle), math.sin(angle)]]) * 7
        assert divergence("cosine", found, np.array([[1.0, 0.0]])) == pytest.approx(1 - math.cos(angle), abs=1e-12)


def test_a_zero_vector_has_no_direction_unless_both_are_zero() -> None:
    zero, one = np.zeros((2, 3)), np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert divergence("cosine", zero, one) == 1.0
    assert divergence("cosine", zero, zero) == 0.0


def test_top1_judges_integer_outputs_by_place_too() -> None:
    assert divergence("top1", np.array([[1, 2, 3]]), np.array([[1, 2, 4]])) == 0.0
    assert divergence("top1", np.array([[5, 2, 3]]), np.array([[1, 2, 4]])) == 1.0


def test_relative_is_the_largest_difference_over_the_largest_value() -> None:
    assert divergence("relative", np.array([1.0, -4.2]), np.array([1.1, -4.0])) == pytest.approx(0.05)


@pytest.mark.parametrize("measure", MEASURES)
def test_strings_and_booleans_are_equal_or_not(measure: str) -> None:
    assert divergence(measure, np.array([b"a"], object), np.array([b"a"], object)) == 0.0
    assert divergence(measure, np.array([b"a"], object), np.array([b"b"], object)) == math.inf
    assert divergence(measure, np.array([True]), np.array([False])) == math.inf


def test_an_unknown_measure_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="'psnr' is not known"):
        divergence("psnr", np.zeros(1), np.zeros(1))


@pytest.mark.parametrize("measure", ["kl", "cosine"])
def test_what_cannot_be_summed_is_infinitely_far(measure: str) -> None:
    expected = np.array([[1.7e308, -1.7e308]])
    assert divergence(measure, expected[:, ::-1].copy(), expected) == math.inf


@pytest.mark.parametrize("measure", MEASURES)
def test_a_batch_is_as_far_off_as_its_items_are_on_average_whatever_its_size(measure: str) -> None:
    """Heavy tails, as KL over real inputs has them: the worst of a batch grows with the batch, the mean does not."""
    rng = np.random.default_rng(5)
    expected = rng.normal(size=(64, 10))
    found = expected + rng.normal(size=(64, 10)) * rng.lognormal(-2, 1.5, size=(64, 1))
    alone = [divergence(measure, found[at : at + 1], expected[at : at + 1]) for at in range(64)]
    for items in (1, 2, 8, 32, 64):
        batches = [
            farthest(measure, {"y": found[at : at + items]}, {"y": expected[at : at + items]}, items)
            for at in range(0, 64, items)
        ]
        assert np.mean(batches) == pytest.approx(np.mean(alone), rel=1e-9)


def test_of_each_item_the_output_that_is_farthest_off_counts() -> None:
    expected = {"y": np.full((2, 1), 10.0), "z": np.full((2, 1), 10.0)}
    found = {"y": np.array([[11.0], [10.0]]), "z": np.array([[10.0], [13.0]])}
    assert farthest("relative", found, expected, 2) == pytest.approx((0.1 + 0.3) / 2)
    assert farthest("relative", found, expected) == pytest.approx(0.3)


def test_what_does_not_count_the_items_is_judged_whole() -> None:
    expected, found = {"y": np.full((3, 1), 10.0)}, {"y": np.array([[11.0], [10.0], [10.0]])}
    assert farthest("relative", found, expected, 2) == pytest.approx(0.1)
    assert farthest("relative", {"y": found["y"][:2]}, expected, 3) == math.inf
