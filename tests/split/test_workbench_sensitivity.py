"""Sensitivity by forward runs against linear models, whose derivatives are their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from split.tensor import Array, Tensors
from split.workbench.sensitivity import SKETCH, Probed, gram, metric_of


def linear(weights: Array) -> Callable[[Tensors], Tensors]:
    """y = W · (mean of x over positions), x NCHW."""
    return lambda tensors: {"y": (tensors["x"].astype(np.float64).mean(axis=(2, 3)) @ weights.T + 1).astype(np.float64)}


def found(finish: Callable[[Tensors], Tensors], channels: int, measure: str, seed: int = 0) -> Array:
    x = np.random.default_rng(4).normal(0, 1, (1, channels, 5, 5))
    probed = [Probed(name="x", layout="NCHW", deviation=np.ones(channels))]
    *runs, last = gram({"x": x}, probed, finish, measure, seed)
    assert runs == [None] * channels
    assert last is not None
    return last["x"]


def test_of_a_linear_tail_it_is_the_gram_matrix_of_the_weights() -> None:
    weights = np.array([[1.0, 2.0, 0.0], [0.0, -3.0, 0.5]])
    m = found(linear(weights), 3, "relative")
    np.testing.assert_allclose(m / m[0, 0], weights.T @ weights, rtol=1e-4, atol=1e-6)


def test_a_channel_that_the_tail_does_not_look_at_has_none_at_all() -> None:
    m = found(linear(np.array([[1.0, 0.0, 3.0]])), 3, "relative")
    assert not m[1].any()
    assert not m[:, 1].any()


def test_a_channel_that_no_input_has_opened_yet_matters_a_little() -> None:
    """Behind a rectifier with a bias of -20: nothing at half a deviation, something at 128."""

    def finish(tensors: Tensors) -> Tensors:
        x = tensors["x"].astype(np.float64)
        return {"y": 1 + 10 * x[:, 0].mean(axis=(1, 2)) + np.maximum(x[:, 1] - 20, 0).mean(axis=(1, 2))}

    m = found(finish, 2, "relative")
    assert 0 < m[1, 1] < m[0, 0]


def test_a_probe_that_breaks_the_outputs_matters_most() -> None:
    def finish(tensors: Tensors) -> Tensors:
        x = tensors["x"].astype(np.float64)
        with np.errstate(invalid="ignore"):
            # Below 2 the root is none: the second channel has 4 in every position, and half a deviation is 3.
            return {"y": 5 * x[:, 0].sum(axis=(1, 2)) + np.sqrt(x[:, 1] - 2).sum(axis=(1, 2)) + x[:, 2, 0, 0]}

    x = np.random.default_rng(4).normal(0, 1, (1, 3, 5, 5))
    x[:, 1] = 4
    probed = [Probed(name="x", layout="NCHW", deviation=np.array([1.0, 6.0, 1.0]))]
    *_, last = gram({"x": x}, probed, finish, "relative", 0)
    assert last is not None
    m = last["x"]
    assert np.isfinite(m).all()
    assert m[1, 1] * 36 == pytest.approx(m[0, 0])  # for each deviation as much as the first channel
    assert m[0, 0] > m[2, 2] > 0
    assert m[0, 1] == m[1, 0] == 0


def test_signs_of_positions_cancel_on_average_so_that_positions_add_up() -> None:
    """y_p = w · x_p for each of 25 positions: Σ over positions of JᵀJ is 25 w wᵀ, for any signs."""

    def finish(tensors: Tensors) -> Tensors:
        return {"y": np.einsum("c,nchw->nhw", np.array([1.0, -2.0]), tensors["x"])}

    m = found(finish, 2, "relative")
    np.testing.assert_allclose(m / m[0, 0], [[1, -2], [-2, 4]], rtol=1e-6)
    x = np.random.default_rng(4).normal(0, 1, (1, 2, 5, 5))
    size = np.abs(finish({"x": x})["y"]).max()
    assert m[0, 0] == pytest.approx(25 / (25 * size**2))  # the mean square of changes relative to the largest


def test_a_channel_that_never_changes_is_not_asked() -> None:
    asked: list[Array] = []

    def finish(tensors: Tensors) -> Tensors:
        asked.append(tensors["x"])
        return {"y": tensors["x"].mean(axis=(2, 3))}

    x = np.ones((1, 3, 2, 2))
    probed = [Probed(name="x", layout="NCHW", deviation=np.array([1.0, 0.0, 1.0]))]
    [*_, last] = gram({"x": x}, probed, finish, "relative", 0)
    assert len(asked) == 3  # unmoved, first, third
    assert last is not None
    assert not last["x"][1].any()


def test_scores_of_classes_are_blind_to_what_all_of_them_share_and_count_by_their_probability() -> None:
    base = {"y": np.array([[4.0, 3.0, -20.0]])}
    metric = metric_of(base, "kl")
    np.testing.assert_allclose(metric({"y": base["y"] + 5}), metric(base), atol=1e-12)
    first, last = base["y"].copy(), base["y"].copy()
    first[0, 0] += 0.1
    last[0, 2] += 0.1
    moved = [float(np.linalg.norm(metric({"y": y}) - metric(base))) for y in (first, last)]
    assert moved[0] > 100 * moved[1]


def test_distributions_count_as_the_logits_they_are_the_softmax_of() -> None:
    logits = np.array([[1.0, 0.5, -1.0]])
    p = np.exp(logits) / np.exp(logits).sum()
    other = np.array([[1.1, 0.4, -1.0]])
    q = np.exp(other) / np.exp(other).sum()
    by_logits, by_p = metric_of({"y": logits}, "kl"), metric_of({"y": p}, "kl")
    np.testing.assert_allclose(by_p({"y": q}) - by_p({"y": p}), by_logits({"y": other}) - by_logits({"y": logits}))


def test_cosine_and_relative_do_not_depend_on_the_outputs_scale() -> None:
    base, moved = np.array([[3.0, 4.0]]), np.array([[3.0, 4.1]])
    for measure in ("cosine", "relative", "rms"):
        small, large = (
            np.linalg.norm(
                metric_of({"y": k * base}, measure)({"y": k * moved})
                - metric_of({"y": k * base}, measure)({"y": k * base})
            )
            for k in (1, 1000)
        )
        assert small == pytest.approx(large)


def test_large_outputs_are_sketched_and_keep_their_inner_products() -> None:
    random = np.random.default_rng(6)
    base = random.normal(0, 1, (1, 10 * SKETCH))
    a, b = random.normal(0, 1, (2, 1, 10 * SKETCH))
    metric = metric_of({"y": base}, "relative")
    at = metric({"y": base})
    assert at.shape == (SKETCH,)
    scale = np.abs(base).max() ** 2 * base.size
    da, db = metric({"y": base + a}) - at, metric({"y": base + 2 * a + b}) - at
    assert da @ da * scale == pytest.approx(float((a * a).sum()), rel=0.05)
    assert da @ db * scale == pytest.approx(float((a * (2 * a + b)).sum()), rel=0.05)


def test_integers_say_nothing() -> None:
    assert metric_of({"y": np.array([1, 2])}, "kl")({"y": np.array([2, 3])}).tolist() == [0.0]


def test_outputs_whose_shape_depends_on_what_comes_are_left_out() -> None:
    weights = np.array([[1.0, 2.0, 0.0], [0.0, -3.0, 0.5]])

    def finish(tensors: Tensors) -> Tensors:
        above = tensors["x"][tensors["x"] > 0.5]
        return linear(weights)(tensors) | {"found": above, "count": np.array([above.size])}

    x = np.random.default_rng(4).normal(0, 1, (1, 3, 5, 5))
    probed = [Probed(name="x", layout="NCHW", deviation=np.ones(3))]
    [*_, last] = gram({"x": x}, probed, finish, "relative", 0)
    [*_, wanted] = gram({"x": x}, probed, linear(weights), "relative", 0)
    assert last is not None
    assert wanted is not None
    np.testing.assert_array_equal(last["x"], wanted["x"])
    [*_, nothing] = gram({"x": x}, probed, lambda tensors: {"found": finish(tensors)["found"]}, "relative", 0)
    assert nothing is not None
    assert not nothing["x"].any()
