"""Maps as large as real boundaries, with values far outside their tables: both cores make the same bits of them, and
each reads what the other wrote. Such values travel as escapes, of which small maps have few or none."""

from __future__ import annotations

import numpy as np
import pytest

from split.codec import laplace
from split.codec.core import Native
from split.codec.fallback import Fallback
from split.codec.transform import level_of, shape_of, to_map
from tests.split.klt_world import klt_of, tensor_of

PLAIN = Fallback()


@pytest.mark.parametrize(
    ("layout", "dims", "block", "level"),
    [
        ("NCHW", (1, 16, 112, 112), (8, 8), 112),
        ("NCHW", (2, 24, 28, 28), (8, 8), 96),
        ("NCHW", (1, 7, 113, 97), (7, 5), 124),
        ("NTC", (1, 128, 384), (1, 1), 104),
    ],
)
def test_large_maps_with_heavy_tails_cross_between_either_core_bit_for_bit(
    layout: str, dims: tuple[int, ...], block: tuple[int, int], level: int, native: Native
) -> None:
    dice = np.random.default_rng(level)
    klt = klt_of(layout, dims[1] if layout == "NCHW" else dims[2], block)
    tensor = tensor_of(klt, dims)
    tensor += np.where(dice.random(dims) < 0.002, dice.standard_cauchy(dims).clip(-1e3, 1e3), 0).astype(np.float32)
    made, shape, found = level_of(klt, level), shape_of(klt, dims), to_map(klt, tensor)
    quantised, spilled, unfit = native.forward(shape, made, found)
    assert not unfit
    again, *flags = PLAIN.forward(shape, made, found)
    assert (flags, np.array_equal(again, quantised)) == ([spilled, unfit], True)

    order = made.full if spilled else made.usual
    tables = laplace.tables()
    past = (np.abs(quantised) - 1) >> tables.low_bits[order.tables][:, None] >= tables.groups[order.tables][:, None]
    assert (past & order.coded[:, None]).any(), "nothing here is an escape"
    stream = native.pack(order, quantised)
    assert PLAIN.pack(order, quantised) == stream
    for core in (native, PLAIN):
        back = core.unpack(order, memoryview(stream), shape.blocks)
        assert back is not None, core.name
        assert np.array_equal(back, quantised), core.name
    assert native.inverse(shape, made, quantised).tobytes() == PLAIN.inverse(shape, made, quantised).tobytes()
