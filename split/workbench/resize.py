"""Requests of other sizes, made from one that the model takes: what a model's open dims do is seen by varying them.

Cut or repeated along the open dims, so that tokens stay tokens and pixels pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from split.graph.growth import OpenDim, shapes_at
from split.tensor import Array, Tensors, TensorSpec

STRIDE: Final = 32


def resized(inputs: Sequence[TensorSpec], dims: Sequence[OpenDim], feeds: Tensors, sizes: Sequence[int]) -> Tensors:
    """The inputs with these sizes of the open dims; `feeds` fits the model and has no empty dim."""
    shapes = shapes_at(inputs, dims, sizes)
    return {spec.name: _to_shape(feeds[spec.name], shapes[spec.name]) for spec in inputs}


def other_sizes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Sizes at which a model is worth trying to be timed, too, the best first: half of all, half of one, twice one.

    Halves of what looks like an image's side stay multiples of 32, as strides want them.
    """
    halves = [_half(size) for size in sizes]
    by_size = sorted(range(len(sizes)), key=lambda dim: -sizes[dim])
    found = [tuple(halves)]
    found += [
        tuple(half if dim == one else size for dim, (size, half) in enumerate(zip(sizes, halves, strict=True)))
        for one in by_size
    ]
    found += [tuple(2 * size if dim == one else size for dim, size in enumerate(sizes)) for one in by_size]
    return [other for other in dict.fromkeys(found) if other != tuple(sizes)]


def _half(size: int) -> int:
    if size >= 2 * STRIDE and size % STRIDE == 0:
        return size // 2 // STRIDE * STRIDE
    return max(size // 2, 1)


def _to_shape(array: Array, shape: Sequence[int]) -> Array:
    for axis, size in enumerate(shape):
        if array.shape[axis] != size:
            array = np.take(array, range(size), axis=axis, mode="wrap")
    return np.ascontiguousarray(array).reshape(tuple(shape))
