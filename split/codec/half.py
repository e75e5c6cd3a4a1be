"""FP16 coding of one float tensor. Not for integers, mask values, NaN or infinity: those travel as they are."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from split.tensor import Array

LARGEST: Final = 65504.0
"""Largest finite half-precision number (IEEE 754 binary16: (2 − 2⁻¹⁰) × 2¹⁵)."""

_FP16: Final = np.dtype("<f2")


def encode_half(array: Array) -> Array | None:
    """FP32 or FP64 `array` as FP16, rounded to nearest, ties to even; None when a value would not survive.

    None: not FP32/FP64, empty, any NaN or infinity, any magnitude above 65504 (a mask of −3.4e38 would become −inf).
    Magnitudes below 3e-8 become zero; that is part of the codec's measured fidelity.
    """
    if array.dtype.kind != "f" or array.dtype.itemsize == 2 or array.size == 0:
        return None
    with np.errstate(invalid="ignore", under="ignore"):
        low, high = array.min(), array.max()  # NaN spreads into both, so one comparison covers it
        if not (low >= -LARGEST and high <= LARGEST):
            return None
        return array.astype(_FP16)


def decode_half(codes: Array, dtype: np.dtype[Any]) -> Array:
    """`codes` (FP16, any shape) as `dtype` (FP32 or FP64); exact."""
    return codes.astype(dtype)
