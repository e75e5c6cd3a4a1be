"""Made-up tables of codec klt and tensors that fit them, for tests: transforms, scales and values from a seed."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from split.codec.calibration import LAYOUTS, CutTables, Klt, TensorTables, grid_of
from split.codec.klt import BoundaryTables
from split.tensor import Array, TensorSpec

DIGEST: Final = "0123456789abcdef" * 4


def orthogonal(size: int, seed: int) -> Array:
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    return q


def klt_of(layout: str, channels: int, block: tuple[int, int], *, components: int = 0, seed: int = 0) -> Klt:
    """An orthogonal transform, kept to its first components; scales that fall from 4 with component and frequency."""
    components = components or channels
    transform = orthogonal(channels, seed)[:components].astype(np.float32)
    fall = (
        np.arange(components)[:, None, None] * 6 / components
        + np.arange(block[0])[:, None] * 0.4
        + np.arange(block[1]) * 0.4
    )
    return Klt(
        layout=layout,
        transform=transform,
        inverse=np.linalg.pinv(transform.astype(np.float64)).astype(np.float32),
        mean=np.random.default_rng(seed + 1).normal(size=channels).astype(np.float32),
        block=block,
        scales=np.ascontiguousarray(grid_of(4 * np.exp(-fall))),
    )


def tensor_of(klt: Klt, dims: tuple[int, ...], *, seed: int = 0) -> Array:
    """FP32: Laplace values, each component as wide as its scales are on average, turned back, plus the mean."""
    _, channel_axis, _, _ = LAYOUTS[klt.layout]
    others = math.prod(dims) // max(dims[channel_axis], 1)
    widths = 2.0 ** ((klt.scales.reshape(klt.components, -1).mean(axis=1) - 128) / 8)
    values = np.random.default_rng(seed + 2).laplace(size=(others, klt.components)) * widths
    rows = values @ klt.inverse.T.astype(np.float64) + klt.mean
    moved = [size for axis, size in enumerate(dims) if axis != channel_axis]
    return np.ascontiguousarray(np.moveaxis(rows.reshape(*moved, dims[channel_axis]), -1, channel_axis), np.float32)


def boundary_of(**tensors: tuple[TensorSpec, Klt | None] | TensorSpec) -> BoundaryTables:
    """Tables of one cut; a spec alone travels lossless."""
    made = [one if isinstance(one, tuple) else (one, None) for one in tensors.values()]
    return BoundaryTables(
        CutTables(tensors=tuple(TensorTables(spec=spec, klt=klt) for spec, klt in made), node_bitmap=""), DIGEST
    )


def one_map(
    layout: str, dims: tuple[int, ...], block: tuple[int, int], *, seed: int = 0
) -> tuple[BoundaryTables, Array]:
    """Tables of a boundary of one tensor `x`, and a tensor."""
    klt = klt_of(layout, dims[LAYOUTS[layout][1]], block, seed=seed)
    tables = boundary_of(x=(TensorSpec(name="x", dtype="FP32", shape=dims), klt))
    return tables, tensor_of(klt, dims, seed=seed)
