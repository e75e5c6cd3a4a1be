"""split/codec/laplace.py against the formulas it stands for, in floating point; its bits, which no platform changes."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest

from split.codec import laplace
from split.codec.laplace import DEAD_ZONES, TABLES, TOTAL, tables
from tests.split import klt_reference


def beta(k: int) -> float:
    return 2.0 ** ((4 * k - 45) / 16)


def probabilities(k: int) -> list[float]:
    """Of the symbols of table k, from the Laplace distribution."""
    found, b, t = tables(), beta(k), DEAD_ZONES[k] / 64
    ends = [0.0, *(t + m * 2 ** int(found.low_bits[k]) for m in range(int(found.groups[k]) + 1))]
    above = [1.0, *(math.exp(-end / b) for end in ends[1:]), 0.0]
    return [more - less for more, less in pairwise(above)]


@pytest.mark.parametrize("k", range(TABLES))
def test_a_table_is_the_laplace_distribution_in_14_bits(k: int) -> None:
    symbols = int(tables().groups[k]) + 2
    frequencies = np.diff(tables().starts[k])[:symbols].astype(float)
    assert frequencies.sum() == TOTAL
    assert (np.diff(tables().starts[k])[symbols:] == 0).all()
    assert frequencies.min() >= 1
    expected = np.array(probabilities(k)) * TOTAL
    others = np.arange(symbols) != np.argmax(frequencies)
    assert np.abs(frequencies - expected)[others].max() <= 1
    assert abs(frequencies - expected).max() <= symbols  # the largest takes what rounding leaves


@pytest.mark.parametrize("k", range(TABLES))
def test_a_table_costs_less_than_a_hundredth_of_a_bit_over_the_entropy_of_what_it_codes(k: int) -> None:
    b, t = beta(k), DEAD_ZONES[k] / 64
    magnitudes = np.arange(1, math.ceil(40 * b) + 2)
    p = np.concatenate([[1 - math.exp(-t / b)], np.exp(-(t + magnitudes - 1) / b) * -math.expm1(-1 / b)])
    p = p[p > 1e-300]
    entropy = float(-(p * np.log2(p)).sum()) + math.exp(-t / b)  # and a sign
    assert p @ cost(k, np.arange(len(p))) - entropy < 0.01 + 0.001 * entropy


def cost(k: int, magnitudes: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]  # of ints
    """Bits of each magnitude, written out from PAYLOAD.md."""
    frequencies, s = klt_reference.table(k)
    bits = []
    for magnitude in magnitudes.tolist():
        group = (magnitude - 1) >> s
        if magnitude == 0:
            bits.append(14 - math.log2(frequencies[0]))
        elif group < len(frequencies) - 2:
            bits.append(14 - math.log2(frequencies[group + 1]) + s + 1)
        else:
            e = magnitude - ((len(frequencies) - 2) << s)
            bits.append(14 - math.log2(frequencies[-1]) + 6 + math.floor(math.log2(e)))
    return np.array(bits)


@pytest.mark.parametrize("k", range(TABLES))
def test_a_dead_zone_ends_where_zero_and_one_cost_the_same(k: int) -> None:
    b, slope = beta(k), math.log(2) / 6
    centroid = b - 1 / math.expm1(1 / b)

    def one_dearer_than_zero(t: float) -> float:
        p = math.exp(-t / b)
        bits_of_zero, bits_of_one = -math.log2(1 - p), 1 - math.log2(p * -math.expm1(-1 / b))
        return (centroid**2 + slope * bits_of_one) - (t**2 + slope * bits_of_zero)

    low, high = 0.01, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if one_dearer_than_zero(middle) > 0 else (low, middle)
    assert DEAD_ZONES[k] == round(64 * low)


@pytest.mark.parametrize("k", range(TABLES))
def test_a_magnitude_is_read_as_the_mean_of_what_is_quantised_to_it(k: int) -> None:
    b, t = beta(k), DEAD_ZONES[k] / 64
    y = t + (np.arange(100_000) + 0.5) / 100_000  # the interval of magnitude 1
    weights = np.exp(-(y - t) / b)
    assert 1 + tables().bias[k] == pytest.approx((y * weights).sum() / weights.sum(), abs=1e-4)
    assert tables().rounding[k] == 1 - t


def test_what_is_not_coded_is_not_zero_less_than_once_in_2_to_the_14() -> None:
    """A coefficient one grid index below table 0: β = 2^(−24/8), dead zone that of table 0."""
    assert math.exp(-DEAD_ZONES[0] / 64 / 2 ** (-24 / 8)) < 2**-14


def test_the_tables_are_those_that_the_format_describes() -> None:
    for k in range(TABLES):
        frequencies, s = klt_reference.table(k)
        assert np.diff(tables().starts[k])[: len(frequencies)].tolist() == frequencies
        assert (int(tables().groups[k]), int(tables().low_bits[k])) == (len(frequencies) - 2, s)


def test_the_tables_have_these_bits_on_every_platform() -> None:
    found = tables()
    data = found.starts.astype("<u2").tobytes() + found.groups.tobytes() + found.low_bits.tobytes()
    assert hashlib.sha256(data).hexdigest() == "616537e72c0f3bdea89a0a15b9199b5423e7f910f744f70af2355d1374aabe6f"


def test_integer_powers_and_exponentials_are_exact_to_their_last_digits() -> None:
    for j in (-207, -45, -1, 0, 1, 16, 45):
        assert laplace._power(j) / 2**64 == pytest.approx(2 ** (j / 16), rel=1e-15)
    for z in (0.0, 1e-6, 0.5, 7.0):
        assert laplace._exp_negative(int(z * 2**64)) / 2**64 == pytest.approx(math.exp(-z), rel=1e-14)
