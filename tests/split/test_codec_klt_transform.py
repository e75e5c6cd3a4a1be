"""Transform and quantiser of codec klt: against formulas in double precision, and one core against the other."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.codec_bits import digest
from split.codec import laplace
from split.codec.calibration import Klt, grid_of
from split.codec.core import Native
from split.codec.fallback import Fallback
from split.codec.transform import Core, Level, Shape, from_map, level_of, shape_of, to_map
from tests.split.klt_vectors import klt_with
from tests.split.klt_world import klt_of, tensor_of

PLAIN = Fallback()
Floats = np.ndarray[Any, Any]


def cosines(n: int) -> Floats:
    """Row u of the orthonormal DCT-II, element by element from its definition."""
    return np.array(
        [
            [math.sqrt((1 if u == 0 else 2) / n) * math.cos(math.pi * (2 * k + 1) * u / (2 * n)) for k in range(n)]
            for u in range(n)
        ]
    )


def coefficients_by_hand(found: Floats, rows: int, columns: int, offset: Floats) -> Floats:
    """FP64 [positions, blocks, components] of a map, block by block, pixel by pixel; edges repeated."""
    batch, height, width, components = found.shape
    blocks = []
    for image in range(batch):
        for top in range(0, height, rows):
            for left in range(0, width, columns):
                down = np.minimum(np.arange(top, top + rows), height - 1)
                across = np.minimum(np.arange(left, left + columns), width - 1)
                pixels = found[image][np.ix_(down, across)].astype(np.float64) - offset
                blocks.append(np.einsum("ur,vs,rsc->uvc", cosines(rows), cosines(columns), pixels))
    return np.stack(blocks).reshape(len(blocks), rows * columns, components).transpose(1, 0, 2)


SHAPES = [
    Shape(1, 14, 14, 80, 7, 7),
    Shape(1, 9, 5, 70, 8, 8),
    Shape(1, 1, 27, 70, 1, 1),
    Shape(3, 1, 30, 12, 1, 8),
    Shape(1, 33, 40, 6, 32, 32),
    Shape(1, 5, 6, 4, 5, 3),
    Shape(2, 10, 7, 11, 2, 7),
]


def level_for(shape: Shape, index: int = 128) -> tuple[Klt, Level]:
    klt = klt_of("NHWC", shape.components, (shape.rows, shape.columns))
    return klt, level_of(klt, index)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coefficients_are_those_of_the_formula_within_one_rounding(shape: Shape, either_core: Core) -> None:
    klt, level = level_for(shape, 112)
    found = tensor_of(klt, (shape.batch, shape.height, shape.width, shape.components), seed=3)
    quantised, _, unfit = either_core.forward(shape, level, found)
    assert not unfit
    y = coefficients_by_hand(found, shape.rows, shape.columns, level.offset) * level.inverse_step
    exact = np.abs(y) + level.rounding[:, None]
    near = np.abs(exact - np.rint(exact)) < 1e-3  # there FP32 may round to either side
    expected = np.sign(y) * np.maximum(np.floor(exact), 0)
    assert near.mean() < 0.05
    assert np.array_equal(quantised[~near], expected[~near])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_inverse_undoes_the_transform(shape: Shape, either_core: Core) -> None:
    klt, level = level_for(shape, 40)  # steps of 2^-11: next to nothing is lost
    found = tensor_of(klt, (shape.batch, shape.height, shape.width, shape.components), seed=4)
    quantised, _, unfit = either_core.forward(shape, level, found)
    assert not unfit
    again = either_core.inverse(shape, level, quantised) + level.offset
    assert np.sqrt(np.mean((again - found) ** 2)) < 2**-11


@st.composite
def maps(draw: st.DrawFn) -> tuple[Shape, Level, Floats]:
    shape = Shape(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 10)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )
    scales = draw(hnp.arrays(np.uint8, (shape.components, shape.rows, shape.columns), elements=st.integers(0, 255)))
    level = level_of(klt_with(scales), draw(st.integers(0, 255)))
    size = draw(st.sampled_from([2.0**-10, 1.0, 1024.0, 2.0**127]))
    elements = st.floats(-size, size, width=32) | st.sampled_from([0.0, math.nan, math.inf, -(2.0**127)])
    found = draw(
        hnp.arrays(
            np.float32,
            (shape.batch, shape.height, shape.width, shape.components),
            elements=draw(st.sampled_from([elements, st.floats(-1, 1, width=32)])),
        )
    )
    return shape, level, found


@given(case=maps())
@settings(max_examples=250)
def test_both_cores_quantise_to_the_same_whole_numbers_and_say_the_same_of_them(
    native: Native, case: tuple[Shape, Level, Floats]
) -> None:
    shape, level, found = case
    by_native, spilled, unfit = native.forward(shape, level, found)
    by_plain, plain_spilled, plain_unfit = PLAIN.forward(shape, level, found)
    assert unfit == plain_unfit
    if not unfit:
        assert np.array_equal(by_native, by_plain)
        assert spilled == plain_spilled
        assert np.abs(by_native).max() <= laplace.LARGEST
        assert native.inverse(shape, level, by_native).tobytes() == PLAIN.inverse(shape, level, by_native).tobytes()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -3.4e38, 3e7])
def test_a_value_that_no_coefficient_can_carry_is_found(bad: float, either_core: Core) -> None:
    shape = Shape(1, 14, 14, 8, 7, 7)
    _, level = level_for(shape)
    found = np.zeros((1, 14, 14, 8), np.float32)
    found[0, 13, 0, 5] = bad
    assert either_core.forward(shape, level, found)[2]


def test_a_coefficient_that_is_all_but_never_is_seen_when_it_is(either_core: Core) -> None:
    scales = np.full((2, 1, 1), 128, np.uint8)
    scales[1] = 128 - 30  # 2^(-30/8) of a step: below the first table
    level = level_of(klt_with(scales), 128)
    shape = Shape(1, 1, 4, 2, 1, 1)
    found = np.zeros((1, 1, 4, 2), np.float32)
    found[..., 0] = [3, -2, 0, 1]
    assert level.usual.coded.tolist() == [[True, False]]
    assert either_core.forward(shape, level, found)[1:] == (False, False)
    found[0, 0, 2, 1] = 5.5  # ⌊5.5 + 1 − 82/64⌋ = 5
    quantised, spilled, unfit = either_core.forward(shape, level, found)
    assert (spilled, unfit) == (True, False)
    assert quantised[0, :, 1].tolist() == [0, 0, 5, 0]


def test_a_coefficient_of_scale_0_is_always_0(either_core: Core) -> None:
    level = level_of(klt_with(np.array([[[0]], [[140]]], np.uint8)), 128)
    found = np.full((1, 1, 3, 2), 9, np.float32)
    quantised, spilled, unfit = either_core.forward(Shape(1, 1, 3, 2, 1, 1), level, found)
    assert (spilled, unfit) == (False, False)
    assert quantised[0, :, 0].tolist() == [0, 0, 0]
    assert (quantised[0, :, 1] == 9).all()


@pytest.mark.parametrize("index", [96, 128, 150])
def test_each_coefficient_is_read_within_a_step_of_what_it_was(index: int, either_core: Core) -> None:
    """Zero: below its dead zone, 82/64 of a step at most; else within its interval, which is one step long."""
    shape = Shape(1, 16, 16, 24, 1, 1)
    klt, level = level_for(shape, index)
    found = tensor_of(klt, (1, 16, 16, 24), seed=6)
    quantised, _, _ = either_core.forward(shape, level, found)
    again = either_core.inverse(shape, level, quantised)
    wide = np.where(quantised == 0, 1 - level.rounding[:, None], 1)
    difference = np.abs((found - level.offset).reshape(1, -1, 24) - again.reshape(1, -1, 24))
    assert (difference <= level.step * (wide + 1e-4)).all()


@pytest.mark.parametrize(
    ("layout", "dims"),
    [("NCHW", (2, 6, 5, 4)), ("NHWC", (2, 5, 4, 6)), ("NCT", (2, 6, 9)), ("NTC", (2, 9, 6)), ("NC", (7, 6))],
)
def test_every_layout_becomes_components_innermost_and_back(layout: str, dims: tuple[int, ...]) -> None:
    klt = klt_of(layout, 6, (1, 1), seed=8)
    tensor = np.random.default_rng(9).normal(size=dims).astype(np.float32)
    shape = shape_of(klt, dims)
    found = to_map(klt, tensor).reshape(shape.batch, shape.height, shape.width, 6)
    axis = layout.index("C")
    others = [i for i in range(len(dims)) if i != axis]
    for place in np.ndindex(*(dims[i] for i in others)):
        index: list[Any] = list(place)
        index.insert(axis, slice(None))
        expected = klt.transform.astype(np.float64) @ tensor[tuple(index)]
        at = (place[0], *(0,) * (3 - len(place)), *place[1:])
        assert found[at] == pytest.approx(expected, abs=1e-5)
    offset = level_of(klt, 128).offset
    assert offset == pytest.approx(klt.transform.astype(np.float64) @ klt.mean, abs=1e-6)
    again = from_map(klt, np.ascontiguousarray(found - offset), dims)
    assert np.abs(again - tensor).max() < 1e-5


def test_components_that_were_left_out_come_back_as_the_mean() -> None:
    klt = klt_of("NC", 6, (1, 1), components=2, seed=1)
    found = np.zeros((3, 2), np.float32)
    assert np.abs(from_map(klt, found, (3, 6)) - klt.mean).max() == 0


def test_coefficients_streams_and_what_is_read_back_have_these_bits_on_every_platform(either_core: Core) -> None:
    """Seen on x86-64 and, emulated, on Cortex-A53, -A72, -A76 and `max` (`scripts/arm --only codec`)."""
    assert digest(either_core) == "c40eb4d7244988d49c7e06a6c387f417403c020fe75291f5098ae2a033a72c44"


def test_a_level_is_a_step_on_the_grid_of_eight_an_octave() -> None:
    klt = klt_with(grid_of(np.full((1, 1, 1), 1.0)))
    assert [level_of(klt, index).step for index in (120, 128, 144)] == [0.5, 1.0, 4.0]
