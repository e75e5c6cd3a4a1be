"""Golden inputs: the same bits on every machine and numpy version, so that two sides can compare what they compute.

Not natural data: they show that two engines agree, and stress more of the range than a picture does. The generator is
SplitMix64 (Steele, Lea, Flood 2014), written out, since numpy promises no stable random streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from split.tensor import NUMPY_DTYPES, Array, Tensors, TensorSpec, relative_difference

SAMPLE_ELEMENTS: Final = 4096
"""Of one tensor, where all samples fit in `SAMPLES_BYTES`."""
SAMPLES_BYTES: Final = 896 * 1024
"""All samples of one run together: they travel in a message's metadata, which has 1 MiB."""
_TENSOR_BYTES: Final = 128
"""Of a tensor beside its name and its values."""
_TEXT_BYTES: Final = 16
"""Of a BYTES element, about."""
SAME: Final = 1e-5
"""Largest relative difference of two computations that count as the same (DESIGN §8, I2)."""
SELF_DIFFERENCE_MAX: Final = 1e-3
"""A model that differs more from itself is not reproducible: what saturates may differ by no more."""


def golden_inputs(specs: Sequence[TensorSpec], dims: Mapping[str, int]) -> Tensors:
    """One tensor for each spec, decided by its name, element type and shape alone.

    `dims`: symbolic dim → size; missing ones and -1 count 1. Floats are multiples of 2⁻²³ in [−1, 1) (FP16: rounded),
    integers and booleans 0 or 1 (a valid token, index and mask in most models), BYTES elements b"0" or b"1".
    """
    return {spec.name: _golden(spec, dims) for spec in specs}


def _golden(spec: TensorSpec, dims: Mapping[str, int]) -> Array:
    shape = tuple(dims.get(d, 1) if isinstance(d, str) else 1 if d == -1 else d for d in spec.shape)
    words = _splitmix64(spec.name, int(np.prod(shape, dtype=np.int64)))
    dtype = NUMPY_DTYPES[spec.dtype]
    if dtype.kind == "f":
        # 24 bits are exact in FP32 and FP64, the division by a power of two too.
        return ((words >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(dtype).reshape(shape)
    bits = (words >> np.uint64(63)).astype(np.uint8)
    if spec.dtype == "BYTES":
        return np.array([b"0", b"1"], dtype=object)[bits].reshape(shape)
    return bits.astype(dtype).reshape(shape)


def _splitmix64(name: str, count: int) -> Array:
    """The first `count` 64-bit words of the stream that belongs to `name` (UINT64)."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    z = seed + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # arrays wrap modulo 2⁶⁴
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def sample(tensors: Mapping[str, Array]) -> Tensors:
    """At most `SAMPLE_ELEMENTS` elements of each tensor, at a fixed stride from the first, as one flat array each.

    Of many tensors fewer each, so that all fit in `SAMPLES_BYTES`; at least one. How many is decided by the names and
    element types alone, so two sides take the same ones.
    """
    sizes = [_TEXT_BYTES if array.dtype.kind == "O" else array.dtype.itemsize for array in tensors.values()]
    room = SAMPLES_BYTES - sum(_TENSOR_BYTES + len(name.encode()) for name in tensors)
    most = max(1, min(SAMPLE_ELEMENTS, room // max(1, sum(sizes))))
    flat = {name: array.reshape(-1) for name, array in tensors.items()}
    return {name: values[:: max(1, -(-values.size // most))].copy() for name, values in flat.items()}


def bound_of(self_difference: float) -> float:
    """How far two honest sides may be apart on a model that differs so far from itself when only the order of its sums
    changes: twice that, at least `SAME`; nothing at all where the model is not reproducible."""
    return max(SAME, 2 * self_difference) if self_difference <= SELF_DIFFERENCE_MAX else 0.0


def differs(found: Mapping[str, Array], expected: Mapping[str, Array], bound: float = SAME) -> str | None:
    """Why two sets of golden outputs are not the same computation, as a sentence; None when they are.

    Floats may have a `relative_difference` up to `bound`, everything else must be equal.
    """
    if found.keys() != expected.keys():
        return f"expected golden tensors {sorted(expected)}, got {sorted(found)}"
    for name, wanted in expected.items():
        got = found[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return (
                f"golden tensor {name!r} is {got.dtype} {list(got.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            )
        difference = relative_difference(got, wanted)
        if not difference <= bound:
            return f"golden tensor {name!r} has a relative difference of {difference:.3g}, allowed is {bound:g}"
    return None
