"""The universal tables of codec `klt`: 64 Laplace scales, and how a quantised coefficient of each is cut into symbols.

All of it follows from one list of small integers by exact integer arithmetic (`_power`, `_exp`), so that every platform
has the same tables: whoever reads a stream must have the frequencies of whoever wrote it. No file holds them.

A coefficient y ~ Laplace of mean magnitude b, quantised with step Δ, depends on β = b / Δ alone: table k is for
β_k = 2^((4k − 45) / 16), four an octave. Scales and steps are indices of one grid of eight an octave
(`calibration.py`), so the table is a shift of the scale's index: k = (scale − level + 23) >> 1.

Quantiser (uniform thresholds, dead zone: Sullivan 1996, "Efficient scalar quantization of exponential and Laplacian
random variables"): |q| = ⌊|y| / Δ + 1 − t_k⌋, so that zero is |y| < t_k·Δ; |q| ≥ 1 is read as the centroid of its
interval, (|q| − 1 + t_k + c_k)·Δ, c = β − 1 / (e^(1/β) − 1), the same for all intervals: the exponential has no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from split.tensor import Array

TABLES: Final = 64
SHIFT: Final = 23
"""k = (scale − level + SHIFT) >> 1: the differences 2k − 23 and 2k − 22 lie symmetric about β_k. What comes out below 0
is non-zero less often than once in 2^14 and not coded."""
FREQUENCY_BITS: Final = 14
TOTAL: Final = 1 << FREQUENCY_BITS
SYMBOLS_MAX: Final = 32
"""Zero, up to 30 groups of magnitudes, escape."""
GROUP_SCALE_MAX: Final = 5
"""Magnitudes are grouped by 2^s so that β / 2^s is at most this; the s low bits travel as they are, which costs below
0.01 bit a coefficient (slope² / 24 · log2 e with slope = 2^s / β ≤ 0.4)."""
ESCAPE_LENGTH_BITS: Final = 5
LARGEST: Final = 1 << 20
"""Greatest magnitude of a quantised coefficient. A tensor with a greater one, NaN or infinity travels as it is."""

DEAD_ZONES: Final = (82, 71, 63, 56, 51, 47, 44, 42, 40, 39, 37, 37, 36, 35, 35, 34, 34, 34, *(33,) * 6, *(32,) * 40)
"""t_k × 64. A magnitude on the border costs the same as zero and as one: t² + λ·bits(0) = c² + λ·bits(1), with the
slope λ = −dD/dR = ln 2 / 6 (in Δ² a bit) of fine quantisation, D = Δ² / 12."""

_ONE: Final = 1 << 64


def _power(sixteenths: int) -> int:
    """⌊2^(64 + sixteenths / 16)⌋, exact."""
    return math.isqrt(math.isqrt(math.isqrt(math.isqrt(1 << (64 * 16 + sixteenths)))))


def _exp_negative(x: int) -> int:
    """e^(−x / 2^64) × 2^64 for x ≥ 0, to a few units: 1 over the series of e^x, whose terms are all positive."""
    term = total = _ONE
    n = 0
    while term:
        n += 1
        term = term * x // (n << 64)
        total += term
    return (_ONE << 64) // total


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """All 64 tables; arrays are C-contiguous, read-only, and what the compiled core reads.

    Symbols: 0 is q = 0; 1 + m is |q| − 1 in m·2^s … (m + 1)·2^s − 1, followed by its s low bits and the sign; the last
    one, `groups` + 1, is escape: |q| − 1 − groups·2^s follows as its bit length less one and the bits below the first.
    """

    starts: Array
    """UINT16 [64, 33]: cumulated frequencies; from the end of a table's symbols on 2^14."""
    groups: Array
    """UINT8 [64]: how many groups of magnitudes, ≥ 1."""
    low_bits: Array
    """UINT8 [64]: s."""
    rounding: Array
    """FP32 [64]: 1 − t."""
    bias: Array
    """FP32 [64]: t + c − 1, what is added to |q| ≥ 1 before it is multiplied by the step."""
    bits: Array
    """FP64 [64, 32]: cost of each symbol, sign and low bits included, an escape's remainder not; inf where none."""


@cache
def tables() -> Tables:
    """Made once, in about 5 ms."""
    starts = np.full((TABLES, SYMBOLS_MAX + 1), TOTAL, np.uint16)
    groups = np.zeros(TABLES, np.uint8)
    low_bits = np.zeros(TABLES, np.uint8)
    bias = np.zeros(TABLES, np.float32)
    bits = np.full((TABLES, SYMBOLS_MAX), np.inf)
    for k, dead_zone in enumerate(DEAD_ZONES):
        frequencies, shift = _frequencies(k)
        starts[k, : len(frequencies) + 1] = np.cumsum([0, *frequencies])
        groups[k] = len(frequencies) - 2
        low_bits[k] = shift
        theta = _exp_negative(_power(45 - 4 * k))
        centroid = (_power(4 * k - 45) - (theta << 64) // (_ONE - theta)) / _ONE
        bias[k] = dead_zone / 64 + centroid - 1
        bits[k, : len(frequencies)] = FREQUENCY_BITS - np.log2(frequencies)
        bits[k, 1 : len(frequencies)] += 1 + shift
        bits[k, len(frequencies) - 1] += ESCAPE_LENGTH_BITS - shift
    rounding = (1 - np.array(DEAD_ZONES) / 64).astype(np.float32)
    found = Tables(starts, groups, low_bits, rounding, bias, bits)
    for array in (starts, groups, low_bits, rounding, bias, bits):
        array.flags.writeable = False
    return found


def _frequencies(k: int) -> tuple[list[int], int]:
    """Frequencies of table k's symbols, ≥ 1 each, 2^14 together, and s."""
    inverse = _power(45 - 4 * k)  # 1 / β
    shift = 0
    while _power(4 * k - 45) > GROUP_SCALE_MAX * _ONE << shift:
        shift += 1

    one_group = _exp_negative(inverse << shift)
    above = [_ONE, _exp_negative(inverse * DEAD_ZONES[k] // 64)]  # P(symbol ≥ n) × 2^64
    while len(above) < SYMBOLS_MAX and (len(above) < 3 or above[-1] * TOTAL >= 2 * _ONE):
        above.append(above[-1] * one_group >> 64)
    shares = [more - less for more, less in zip(above, [*above[1:], 0], strict=True)]
    frequencies = [max(1, (share * TOTAL + _ONE // 2) >> 64) for share in shares]
    frequencies[frequencies.index(max(frequencies))] += TOTAL - sum(frequencies)
    return frequencies, shift
