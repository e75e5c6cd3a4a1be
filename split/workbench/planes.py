"""A tensor as planes of channels and back, by its layout; which layout a tensor has; planes as blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from split.codec.calibration import CHANNELS_MAX, LAYOUTS
from split.codec.transform import Shape, blocks_of, dct
from split.tensor import Array, TensorSpec

BLOCK: Final = 8
"""Largest side of a DCT block that is chosen: JPEG's; on small maps larger ones gain nothing."""


def planes(array: Array, layout: str) -> Array:
    """FP64 [batch, channels, rows, columns]; axes that the layout does not have are one long."""
    axes = LAYOUTS[layout]
    present = array.transpose([axis for axis in axes if axis >= 0])
    return present.reshape(_shape(array.shape, layout)).astype(np.float64)


def unplaned(x: Array, layout: str, like: Array) -> Array:
    """What `planes` undoes: shape and element type of `like`."""
    axes = [axis for axis in LAYOUTS[layout] if axis >= 0]
    present = x.reshape([like.shape[axis] for axis in axes]).transpose(np.argsort(axes))
    return np.ascontiguousarray(present, like.dtype)


def _shape(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    return tuple(1 if axis < 0 else shape[axis] for axis in LAYOUTS[layout])


def layouts_of(spec: TensorSpec, shape: Sequence[int], *, channels_max: int = CHANNELS_MAX) -> list[str]:
    """Layouts that a float tensor of this spec may have, seen once at `shape`; the likeliest first, none for what is
    not transformed. Its channels are a fixed dim; a square beside it is a picture."""
    if spec.dtype not in ("FP16", "FP32", "FP64") or not all(shape):
        return []
    fitting = [
        layout
        for layout, axes in LAYOUTS.items()
        if len(layout) == len(shape)
        and isinstance(spec.shape[axes[1]], int)
        and spec.shape[axes[1]] == shape[axes[1]]
        and 1 < shape[axes[1]] <= channels_max
    ]
    if len(fitting) > 1 and len(shape) == 4:
        square = [layout for layout in fitting if shape[LAYOUTS[layout][2]] == shape[LAYOUTS[layout][3]]]
        fitting = square or fitting
    return fitting


def block_of(rows: int, columns: int) -> tuple[int, int]:
    """Block sides for planes of this size: the largest that divide them without a rest, up to `BLOCK`; where only small
    ones do, `BLOCK` with a rest. A line has no rows."""
    return _side(rows), _side(columns)


def block_for(sizes: Collection[tuple[int, int]]) -> tuple[int, int]:
    """Block sides for planes of all these sizes: where a side is not always the same one, up to `BLOCK` with a rest."""
    rows, columns = ({size[axis] for size in sizes} for axis in (0, 1))
    return _side_for(rows), _side_for(columns)


def _side_for(sizes: Collection[int]) -> int:
    return _side(max(sizes)) if len(sizes) == 1 else min(BLOCK, max(sizes))


def _side(size: int) -> int:
    fitting = next((side for side in range(min(BLOCK, size), 0, -1) if size % side == 0), 1)
    return fitting if fitting > BLOCK // 2 or size <= BLOCK else BLOCK


def coefficients(y: Array, block: tuple[int, int]) -> Array:
    """FP64 [components, block rows, block columns, blocks] of planes [batch, components, rows, columns], in the blocks
    of the codec (`blocks_of`)."""
    n, components, rows, columns = y.shape
    blocks = blocks_of(Shape(n, rows, columns, components, *block), y.transpose(0, 2, 3, 1))
    down, across = (dct(side).astype(np.float64) for side in block)
    return np.asarray(np.einsum("ai,bj,ijnc->cabn", down, across, blocks, optimize=True))
