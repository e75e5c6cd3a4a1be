"""Upper confidence limits of means: against published quantiles, and how often they hold on drawn samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from split.workbench.upper_mean import upper_mean, upper_share


@pytest.mark.parametrize(
    ("count", "t"), [(2, 6.3138), (3, 2.9200), (6, 2.0150), (8, 1.8946), (11, 1.8125), (21, 1.7247), (61, 1.6706)]
)
def test_of_values_that_lie_evenly_it_is_the_limit_of_student(count: int, t: float) -> None:
    """Quantiles from any printed table of t."""
    values = np.linspace(1.0, 2.0, count)
    expected = 1.5 + t * values.std(ddof=1) / math.sqrt(count)
    assert upper_mean(values.tolist()) == pytest.approx(expected, rel=2e-4)
    assert upper_mean((5.0 * values).tolist()) == pytest.approx(5 * expected, rel=2e-4)


def test_of_skewed_values_it_is_what_undoes_the_cubic() -> None:
    """Hall 1992: W = T + g·T²/3 + g²·T³/27 + g/6 with g = skewness / √n; at the limit W is −t."""
    values = np.array([0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.9, 2.1])
    count, mean, deviation = 8, values.mean(), values.std(ddof=1)
    cubes = float(((values - mean) ** 3).sum()) / deviation**3
    g = cubes * count / ((count - 1) * (count - 2)) / math.sqrt(count)
    statistic = (mean - upper_mean(values.tolist())) / (deviation / math.sqrt(count))
    w = statistic + g * statistic**2 / 3 + g**2 * statistic**3 / 27 + g / 6
    assert w == pytest.approx(-1.8946, abs=5e-4)


def test_of_one_value_nothing_is_known_and_of_equal_ones_everything() -> None:
    assert upper_mean([0.3]) == math.inf
    assert upper_mean([0.25] * 5) == 0.25
    assert upper_mean([0.0] * 5) == 0.0


@pytest.mark.parametrize(("count", "least"), [(8, 0.85), (16, 0.88), (32, 0.89)])
def test_of_log_normal_samples_it_holds_as_often_as_said_and_student_less(count: int, least: float) -> None:
    dice = np.random.default_rng(11)
    samples = dice.lognormal(0.0, 1.0, (3000, count))
    true = math.exp(0.5)
    t = {8: 1.8946, 16: 1.7531, 32: 1.6955}[count]
    student = samples.mean(axis=1) + t * samples.std(axis=1, ddof=1) / math.sqrt(count)
    held = float(np.mean([upper_mean(sample) >= true for sample in samples.tolist()]))
    assert held >= least
    assert held >= float((student >= true).mean()) + 0.05


@pytest.mark.parametrize(
    ("hits", "count", "limit"), [(0, 20, 0.1391), (1, 20, 0.2161), (5, 10, 0.7776), (0, 1, 0.95), (4, 4, 1.0)]
)
def test_a_share_is_at_most_what_clopper_and_pearson_tabulate(hits: int, count: int, limit: float) -> None:
    assert upper_share(hits, count) == pytest.approx(limit, abs=1e-4)
