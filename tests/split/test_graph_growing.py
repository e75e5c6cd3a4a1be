"""How models written as text grow: sizes are held against what the runtime makes there, work against closed forms."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.codec.golden import golden_inputs
from split.graph.card import ModelCard, read_card, write_card
from split.graph.growth import Growth, OpenDim, open_dims, shapes_at, sizes_of
from split.graph.products import Products
from split.runtime.segment import OrtEngine
from split.tensor import TensorSpec
from split.workbench.cut import prepare

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'

DETECTOR = f"""{HEADER} g (float[N, 3, H, W] x) => (float[N, 1, P, Q] y)
<float[8, 3, 3, 3] w1, float[8, 8, 5, 5] w2, float[4, 8, 3, 3] w3, float[4, 1, 2, 2] w4>
{{
  a = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)
  b = Relu(a)
  c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
  d = Conv <kernel_shape = [5, 5], strides = [2, 2], pads = [2, 2, 2, 2]> (c, w2)
  e = Conv <kernel_shape = [3, 3]> (d, w3)
  f = Sigmoid(e)
  y = ConvTranspose <kernel_shape = [2, 2], strides = [2, 2]> (f, w4)
}}"""
"""As a text detector has them: strides with and without padding, one valid convolution, one that doubles."""

ATTENTION = f"""{HEADER} g (float[N, S, 32] x) => (float[N, S, 32] y)
<float[32, 32] wq, float[32, 32] wk, float[32, 32] wv, float[32, 32] wo>
{{
  q = MatMul(x, wq)
  k = MatMul(x, wk)
  v = MatMul(x, wv)
  t = Transpose <perm = [0, 2, 1]> (k)
  s = MatMul(q, t)
  p = Softmax <axis = -1> (s)
  o = MatMul(p, v)
  y = MatMul(o, wo)
}}"""


def cut_up(folder: Path, text: str, sizes: Sequence[int] = ()) -> ModelCard:
    """Cut into every candidate, weighed at these sizes of the open dims; what the text only declares are weights."""
    path = folder / "m.onnx"
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(3)
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = random.normal(0, 0.1, shape).astype("f4")
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
    del model.graph.value_info[:]
    onnx.save(model, path)
    inputs = None
    if sizes:
        specs = OrtEngine().open(path, threads=1).input_specs
        shapes = shapes_at(specs, open_dims(specs), sizes)
        inputs = golden_inputs([TensorSpec(name=s.name, dtype=s.dtype, shape=shapes[s.name]) for s in specs], {})
    return prepare(path, folder / "parts", inputs=inputs)


def growth_of(card: ModelCard) -> Growth:
    assert card.growth is not None
    return card.growth


def require_right_sizes(card: ModelCard, folder: Path, sizes: Sequence[int]) -> int:
    """Every boundary at these sizes has as many elements as its head makes; how many were looked at."""
    found, dims = growth_of(card), open_dims(card.inputs)
    shapes = shapes_at(card.inputs, dims, sizes)
    feeds = golden_inputs([TensorSpec(name=s.name, dtype=s.dtype, shape=shapes[s.name]) for s in card.inputs], {})
    assert sizes_of(dims, feeds) == tuple(sizes)
    products = Products(found, card.inputs)
    looked_at = 0
    for cut in card.cuts:
        head = OrtEngine().open(folder / f"parts/{cut.id}.head.onnx", threads=1)
        made = feeds | head.run({name: feeds[name] for name in cut.head_inputs})
        names = (*(spec.name for spec in cut.boundary), *cut.tail_inputs)
        assert all(elements.exact for elements in found.cuts[cut.id].crossing), cut.id
        products.want([products.of_elements(elements)[0] for elements in found.cuts[cut.id].crossing])
        for name, elements in zip(names, products.at(sizes), strict=True):
            assert elements == made[name].size, (name, sizes)
            looked_at += 1
    return looked_at


def work_of(card: ModelCard, sizes: Sequence[int]) -> float:
    return growth_of(card).work(card.inputs, sizes)


def test_sizes_of_a_detectors_boundaries_are_exact_at_any_height_and_width(tmp_path: Path) -> None:
    card = cut_up(tmp_path, DETECTOR, (1, 64, 64))
    assert card.cuts
    for sizes in ((1, 64, 96), (2, 37, 53), (1, 41, 128), (3, 100, 79), (1, 95, 63), (1, 33, 640)):
        assert require_right_sizes(card, tmp_path, sizes) >= len(card.cuts)


@pytest.mark.parametrize("at", [(), (1, 48, 100)])
def test_the_sizes_at_which_it_is_looked_at_do_not_matter(tmp_path: Path, at: tuple[int, ...]) -> None:
    text = f"""{HEADER} g (float[N, 3, H, W] x) => (float[N, 8, P, Q] y) <float[8, 3, 3, 3] w1, float[8, 8, 3, 3] w2>
    {{
      a = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)
      b = Relu(a)
      c = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (b)
      y = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (c, w2)
    }}"""
    card = cut_up(tmp_path, text, at)
    assert card.cuts
    for sizes in ((1, 50, 51), (2, 128, 31)):
        require_right_sizes(card, tmp_path, sizes)


def test_what_a_reshape_joins_is_the_product_of_both(tmp_path: Path) -> None:
    text = f"""{HEADER} g (float[1, 3, H, W] x) => (float[1, L, 8] y)
    <float[8, 3, 3, 3] w, int64[3] to = {{1, 8, -1}}>
    {{
      a = Conv <kernel_shape = [3, 3], strides = [4, 4], pads = [1, 1, 1, 1]> (x, w)
      b = Reshape(a, to)
      c = Transpose <perm = [0, 2, 1]> (b)
      d = Relu(c)
      y = Softmax(d)
    }}"""
    card = cut_up(tmp_path, text, (32, 32))
    for sizes in ((32, 64), (61, 47), (30, 129)):
        assert require_right_sizes(card, tmp_path, sizes)


def test_a_cache_and_what_is_new_add_up(tmp_path: Path) -> None:
    text = f"""{HEADER} g (float[1, P, 4] past, float[1, S, 4] x) => (float[1, T, 4] y)
    {{ n = Neg(x)  a = Concat <axis = 1> (past, n)  b = Exp(a)  y = Neg(b) }}"""
    card = cut_up(tmp_path, text, (6, 2))
    for sizes in ((5, 1), (130, 7)):
        assert require_right_sizes(card, tmp_path, sizes)


def test_what_inference_does_not_tell_is_seen_in_runs(tmp_path: Path) -> None:
    text = f"""{HEADER} g (float[1, S, 4] x) => (float[1, T, 4] y)
    <int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] zero = {{0}}, float[4, 4] w>
    {{
      n = Shape(x)
      l = Gather(n, one)
      h = Div(l, two)
      a = Slice(x, zero, h, one)
      b = MatMul(a, w)
      y = Relu(b)
    }}"""
    card = cut_up(tmp_path, text, (12,))
    assert card.cuts
    for sizes in ((8,), (31,), (200,)):
        assert require_right_sizes(card, tmp_path, sizes)


def test_dims_without_a_name_are_each_their_own_and_named_ones_are_one(tmp_path: Path) -> None:
    specs = (
        TensorSpec(name="ids", dtype="INT64", shape=("N", -1)),
        TensorSpec(name="mask", dtype="INT64", shape=("N", -1)),
        TensorSpec(name="scale", dtype="FP32", shape=(1,)),
    )
    dims = open_dims(specs)
    assert dims == (OpenDim(input="ids", axis=0), OpenDim(input="ids", axis=1), OpenDim(input="mask", axis=1))
    assert shapes_at(specs, dims, (2, 5, 7)) == {"ids": (2, 5), "mask": (2, 7), "scale": (1,)}


def test_dims_without_a_name_that_only_vary_together_are_varied_together(tmp_path: Path) -> None:
    text = f"""{HEADER} g (float[1, ?, 4] x, float[1, ?, 4] mask) => (float[1, ?, 4] y)
    <float[4, 4] w> {{ a = Mul(x, mask)  b = MatMul(a, w)  c = Relu(b)  y = Neg(c) }}"""
    card = cut_up(tmp_path, text, (6, 6))
    assert require_right_sizes(card, tmp_path, (9, 9))


def test_work_of_a_convolution_is_linear_in_height_and_in_width(tmp_path: Path) -> None:
    text = f"""{HEADER} g (float[N, 16, H, W] x) => (float[N, 16, H, W] y)
    <float[16, 16, 3, 3] w, float[16, 16, 3, 3] v>
    {{
      a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
      y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a, v)
    }}"""
    card = cut_up(tmp_path, text, (1, 32, 32))
    for n, h, w in ((1, 32, 32), (2, 48, 100), (1, 7, 640)):
        assert work_of(card, (n, h, w)) == pytest.approx(2 * 2 * n * h * w * 16 * 16 * 9)
    [cut] = card.cuts
    head = growth_of(card).powers((2, 48, 100, 2 * 16 * 48 * 100)) @ np.array(growth_of(card).cuts[cut.id].head_work)
    assert head == pytest.approx(work_of(card, (2, 48, 100)) / 2)


def test_work_of_attention_lies_between_linear_and_quadratic_in_the_length(tmp_path: Path) -> None:
    card = cut_up(tmp_path, ATTENTION, (1, 16))
    for n, s in ((1, 16), (1, 100), (3, 512)):
        matrices = 4 * 2 * n * s * 32 * 32 + 2 * 2 * n * s * s * 32
        moved = 4 * (2 * n * s * 32 + 2 * n * s * s)  # transpose and softmax, read and written
        assert work_of(card, (n, s)) == pytest.approx(matrices + moved)
    assert 2.0 < work_of(card, (1, 256)) / work_of(card, (1, 128)) < 4.0


def test_a_model_of_fixed_sizes_does_not_grow(tmp_path: Path) -> None:
    text = f"{HEADER} g (float[1, 4] x) => (float[1, 4] y) {{ a = Neg(x) y = Exp(a) }}"
    assert cut_up(tmp_path, text).growth is None


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER} g (float[N, 8] x) => (float[N, 8] x) {{}}",
        f"{HEADER} g (float[N, 8] x) => (float[1, 8] y) <float[1, 8] w> {{ y = Exp(w) }}",
    ],
    ids=["an input put out", "a constant put out"],
)
def test_a_model_that_computes_nothing_with_its_inputs_does_not_grow(tmp_path: Path, text: str) -> None:
    card = cut_up(tmp_path, text)
    assert card.growth is None
    assert card.no_cuts_reason == "the model has fewer than two nodes"


def test_the_card_on_disk_holds_the_growth(tmp_path: Path) -> None:
    card = cut_up(tmp_path, ATTENTION, (1, 16))
    write_card(card, tmp_path)
    assert read_card(tmp_path).growth == card.growth
    assert math.isfinite(work_of(read_card(tmp_path), (1, 1)))
