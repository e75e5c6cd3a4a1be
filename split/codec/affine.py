"""INT8 coding of one float tensor: x ≈ zero + scale × code, code in 0…255, one (scale, zero) per channel.

Asymmetric min–max quantisation (Jacob et al. 2018, eq. 1) without calibration: the range is the tensor's own, so
nothing is clipped and the error is at most half a step. NaN, infinity and huge values: such a tensor travels as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from split.tensor import Array

WHOLE: Final = 255
"""Stands for the axis where one (scale, zero) serves the whole tensor."""
LARGEST: Final = 1e30
"""Above it the range may overflow FP32, and such a value is a mask, not an activation."""
SMALLEST_RANGE: Final = 1e-30
"""A channel whose max − min is below it counts as constant: 255 / range would overflow FP32."""
CHANNEL_ELEMENTS_MIN: Final = 32
"""Elements a channel needs to earn parameters of its own: they take 8 bytes, a quarter of its codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """One coded tensor."""

    axis: int
    """Channel axis, or `WHOLE`."""
    parameters: Array
    """[2, channels]: scales, then zeros; FP64 for FP64 tensors, else FP32."""
    codes: Array
    """UINT8, flat, in the tensor's C order."""


def channel_axis(dims: tuple[int, ...]) -> int:
    """Axis 1 for rank ≥ 3 with at least `CHANNEL_ELEMENTS_MIN` elements a channel, else `WHOLE`."""
    if len(dims) >= 3 and dims[1] and math.prod(dims) // dims[1] >= CHANNEL_ELEMENTS_MIN:
        return 1
    return WHOLE


def parameter_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Element type of scales and zeros for tensors of `dtype`; the arithmetic is done in it too."""
    return np.dtype("<f8") if dtype.itemsize == 8 else np.dtype("<f4")


def channels(dims: tuple[int, ...], axis: int) -> int:
    """How many (scale, zero) pairs a tensor of `dims` has."""
    return 1 if axis == WHOLE else dims[axis]


def _by_channel(array: Array, dims: tuple[int, ...], axis: int) -> Array:
    """View as [outer, channels, inner]."""
    if axis == WHOLE:
        return array.reshape(1, 1, -1)
    return array.reshape(math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :]))


def encode_affine(array: Array) -> Affine | None:
    """`array` (C-contiguous FP16, FP32 or FP64) quantised with rounding half up; None where it must travel as it is.

    None: not a float, empty, any NaN or infinity, any magnitude above 1e30. A constant channel is exact.
    """
    if array.dtype.kind != "f" or array.size == 0:
        return None
    axis = channel_axis(array.shape)
    blocks = _by_channel(array, array.shape, axis)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        work = parameter_dtype(array.dtype)
        low = blocks.min(axis=(0, 2)).astype(work)
        high = blocks.max(axis=(0, 2)).astype(work)  # NaN spreads into both
        if not (low.min() >= -LARGEST and high.max() <= LARGEST):
            return None
        span = high - low
        varies = span >= SMALLEST_RANGE
        scale = np.where(varies, span / 255, 0).astype(work)
        inverse = np.where(varies, 255 / np.where(varies, span, 1), 0).astype(work)
        scaled = np.subtract(blocks, low[:, None], dtype=work)  # before scaling: no cancellation when |low| ≫ span
        scaled *= inverse[:, None]
        scaled += 0.5
        np.minimum(scaled, 255, out=scaled)
        codes = scaled.astype(np.uint8).reshape(-1)
    return Affine(axis=axis, parameters=np.stack([scale, low]), codes=codes)


def decode_affine(parameters: Array, codes: Array, *, dtype: np.dtype[Any], dims: tuple[int, ...], axis: int) -> Array:
    """Tensor of `dims` and `dtype`; the sizes of `parameters` and `codes` were checked by the caller."""
    with np.errstate(over="ignore", invalid="ignore"):  # hostile parameters give inf or NaN, not a crash
        values = _by_channel(codes, dims, axis) * parameters[0][:, None]
        values += parameters[1][:, None]
        tensor: Array = values.astype(dtype, copy=False).reshape(dims)
    return tensor
