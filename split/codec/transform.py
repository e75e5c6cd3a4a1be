"""What codec `klt` does to one float tensor before the entropy coder, as values: its map, its blocks, which of its
coefficients travel at a level and with which table. The arithmetic on them is a `Core`'s (`core.py`, `fallback.py`).

A *map* is FP32 [batch, height, width, components]: the tensor after the transform across channels, whatever its layout.
That product is numpy's in either core, so that both quantise the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from split.codec import laplace
from split.codec.calibration import LAYOUTS, Klt, step_of
from split.tensor import Array

NEVER: Final = 0
"""In `Klt.scales`: a coefficient that is never coded, and 0."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one map and its blocks."""

    batch: int
    height: int
    width: int
    components: int
    rows: int
    """Of a block."""
    columns: int

    @property
    def positions(self) -> int:
        """Coefficients of one block of one component."""
        return self.rows * self.columns

    @property
    def blocks(self) -> int:
        """Blocks of one component: the last ones reach over the edge."""
        return self.batch * -(-self.height // self.rows) * -(-self.width // self.columns)

    @property
    def coefficients(self) -> int:
        """Of the whole tensor."""
        return self.positions * self.blocks * self.components


def shape_of(klt: Klt, dims: tuple[int, ...]) -> Shape:
    """The map of a tensor of these dims."""
    batch, _, rows, columns = LAYOUTS[klt.layout]
    height = 1 if rows < 0 else dims[rows]
    width = 1 if columns < 0 else dims[columns]
    return Shape(dims[batch], height, width, klt.components, *klt.block)


def to_map(klt: Klt, tensor: Array) -> Array:
    """`tensor` (any float type, of `klt.layout`) × transformᵀ; the mean is taken off later (`Level.offset`)."""
    values = np.ascontiguousarray(tensor, dtype=np.float32)
    batch = values.shape[0]
    if LAYOUTS[klt.layout][1] == 1 and values.ndim > 2:
        values = values.reshape(batch, klt.channels, -1).transpose(0, 2, 1)
    else:
        values = values.reshape(-1, klt.channels)
    found: Array = np.matmul(values, klt.transform.T)
    return np.ascontiguousarray(found)


def from_map(klt: Klt, found: Array, dims: tuple[int, ...]) -> Array:
    """The FP32 tensor of `dims`: inverse × map + mean."""
    tensor: Array
    if LAYOUTS[klt.layout][1] == 1 and len(dims) > 2:
        flat = found.reshape(dims[0], -1, klt.components)
        tensor = np.matmul(klt.inverse, flat.transpose(0, 2, 1))
        tensor += klt.mean[:, None]
    else:
        tensor = np.matmul(found.reshape(-1, klt.components), klt.inverse.T)
        tensor += klt.mean
    return tensor.reshape(dims)


def blocks_of(shape: Shape, found: Array) -> Array:
    """[rows, columns, blocks, components] of a map of any float type; where blocks reach over its edge, its last row
    and column again."""
    down, across = -(-shape.height // shape.rows), -(-shape.width // shape.columns)
    below, beside = down * shape.rows - shape.height, across * shape.columns - shape.width
    if below or beside:
        found = np.pad(found, ((0, 0), (0, below), (0, beside), (0, 0)), mode="edge")
    split = found.reshape(shape.batch, down, shape.rows, across, shape.columns, shape.components)
    tiles = split.transpose(2, 4, 0, 1, 3, 5)
    return np.ascontiguousarray(tiles).reshape(shape.rows, shape.columns, shape.blocks, shape.components)


@lru_cache(maxsize=64)
def dct(n: int) -> Array:
    """FP32 [n, n], read-only: the orthonormal DCT-II, √(2/n)·cos(π·(2k + 1)·u / 2n) for row u, sample k; row 0 / √2."""
    k = np.arange(n)
    matrix = np.cos(np.pi * (2 * k + 1) * k[:, None] / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    found: Array = matrix.astype(np.float32)
    found.flags.writeable = False
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Which coefficients travel, and with which Laplace table: position by position, in each block by block, in each by
    component. Arrays are C-contiguous."""

    coded: Array
    """BOOL [positions, components]."""
    tables: Array
    """UINT8 [positions, components], where coded."""
    first: Array
    """INT32 [positions + 1]: where each position's entries begin in the two that follow."""
    component: Array
    """UINT16, one entry for each coded (position, component)."""
    table: Array
    """UINT8, its table."""

    @property
    def count(self) -> int:
        """Coded coefficients of each block."""
        return len(self.component)

    @property
    def nbytes(self) -> int:
        """Of its arrays, but for `tables`, which several share."""
        return sum(array.nbytes for array in (self.coded, self.first, self.component, self.table))


def order_of(coded: Array, tables: Array) -> Order:
    """`coded` BOOL, `tables` UINT8, both [positions, components]."""
    first = np.concatenate([[0], np.cumsum(np.count_nonzero(coded, axis=1))]).astype(np.int32)
    return Order(coded, tables, first, np.nonzero(coded)[1].astype(np.uint16), tables[coded])


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One tensor's tables at one level. Arrays [positions, components], but for `offset`."""

    step: float
    """FP32-exact."""
    inverse_step: float
    """1 / step, rounded to FP32."""
    offset: Array
    """FP32 [components]: transform · mean."""
    rounding: Array
    """FP32: 1 − dead zone."""
    bias: Array
    """FP32: what reading adds to a magnitude."""
    kept: Array
    """INT32, all ones; 0 where a coefficient is always 0."""
    spilled: Array
    """INT32, all ones where a coefficient is not coded in `usual`, but may be in `full`."""
    usual: Order
    """Without what is all but always 0 at this level."""
    full: Order
    """The same with it: for the tensor that has one that is not."""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        own = (self.offset, self.rounding, self.bias, self.kept, self.spilled, self.usual.tables)
        return sum(array.nbytes for array in own) + self.usual.nbytes + self.full.nbytes


def level_of(klt: Klt, level: int) -> Level:
    """What `level` (grid index of the step) makes of the tables."""
    tables = laplace.tables()
    scales = np.ascontiguousarray(klt.scales.reshape(klt.components, -1).T, np.int64)  # [positions, components]
    kept = scales != NEVER
    index = (scales - level + laplace.SHIFT) >> 1
    table = np.ascontiguousarray(np.clip(index, 0, laplace.TABLES - 1).astype(np.uint8))
    usual = np.ascontiguousarray(kept & (index >= 0))
    step = np.float32(step_of(level))
    return Level(
        step=float(step),
        inverse_step=float(np.float32(1) / step),
        offset=(klt.transform.astype(np.float64) @ klt.mean.astype(np.float64)).astype(np.float32),
        rounding=tables.rounding[table],
        bias=tables.bias[table],
        kept=-kept.astype(np.int32),
        spilled=-(kept & ~usual).astype(np.int32),
        usual=order_of(usual, table),
        full=order_of(np.ascontiguousarray(kept), table),
    )


class Core(Protocol):
    """The arithmetic: the compiled core and its fallback give the same integers and the same streams."""

    name: str
    """For people: which it is."""
    working: int
    """Memory that decoding takes at most, in units of the decoded bytes in a payload's header: measured."""

    def forward(self, shape: Shape, level: Level, found: Array) -> tuple[Array, bool, bool]:
        """FP32 map [batch, height, width, components] → INT32 [positions, blocks, components]; whether one that is not
        coded in `usual` is not 0; whether one is above `laplace.LARGEST` or not a number, and the coefficients are of
        no use."""

    def inverse(self, shape: Shape, level: Level, quantised: Array) -> Array:
        """INT32 [positions, blocks, components] → FP32 map [batch, height, width, components]."""

    def pack(self, order: Order, quantised: Array) -> bytes:
        """The stream of INT32 [positions, blocks, components]; what is not in `order` is not looked at. CodecError for
        a magnitude above `laplace.LARGEST`."""

    def unpack(self, order: Order, stream: memoryview, blocks: int) -> Array | None:
        """INT32 [positions, blocks, components], 0 where not in `order`; None for a stream `pack` has not made."""
