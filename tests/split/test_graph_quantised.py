"""Quantised groups stay whole: the oracle is onnxruntime on the whole, which fuses them into integer kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.graph.cuts import all_prefix_cuts
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights
from split.graph.quantised import computes_in_integers
from split.runtime.segment import OrtEngine
from split.workbench.check import run_halves
from split.workbench.cut import describe, settle

Load = Callable[[str], Model]

WEIGHTS = ", ".join(str(int(number)) for number in np.random.default_rng(5).integers(-128, 128, 64 * 16))
MATMUL = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[8, 64] x) => (float[8, 16] y)
    <float s = {{0.031}}, uint8 z = {{128}}, float ws = {{0.0123}}, int8[64, 16] W = {{{WEIGHTS}}}, float os = {{0.21}}>
    {{
      q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  w = DequantizeLinear(W, ws)
      m = MatMul(d, w)  mq = QuantizeLinear(m, os, z)  y = DequantizeLinear(mq, os, z)
    }}"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def from_text(text: str) -> Model:
        onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
        model = load_model(tmp_path / "model.onnx")
        share_weights(model, tmp_path)
        settle(model, tmp_path)
        return model

    return from_text


def test_a_group_is_cut_before_and_after_and_not_inside(load: Load) -> None:
    cuts = {cut.boundary: cut for cut in all_prefix_cuts(load(MATMUL))}
    assert {names: cut.legal for names, cut in cuts.items()} == {
        ("q",): True,
        ("d",): False,
        ("m",): False,
        ("mq",): True,
    }
    assert cuts["m",].reason == "tensor 'm' lies between MatMul and its quantisation; cut at a quantised tensor"


def test_legal_cuts_give_the_bits_of_the_fused_whole(load: Load) -> None:
    model = load(MATMUL)
    feeds = {"x": np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)}
    expected = OrtEngine().open(model.path, threads=1).run(feeds)["y"]
    for cut in all_prefix_cuts(model):
        if cut.legal:
            found = run_halves(model, cut, OrtEngine(), model.path.parent, feeds)["y"]
            np.testing.assert_array_equal(found, expected)


def test_a_dequantised_tensor_that_nothing_fuses_with_may_cross(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x) => (float[3] y) <float s = {0.5}, int8 z = {3}, float two = {2}>
        { q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  y = Mul(two, d) }""")
    assert [cut.legal for cut in all_prefix_cuts(model)] == [True, True]


DYNAMIC = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3] x) => (float[2, 2] y) <int8[3, 2] W = {1, 2, 3, 4, 5, 6}>
    { q, s, z = DynamicQuantizeLinear(x)  m = MatMulInteger(q, W, z)  f = Cast<to = 1>(m)  y = Mul(f, s) }"""
INSIDE = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2, 3] x, bool c) => (float[2, 2] y) <int8[3, 2] W = {1, 2, 3, 4, 5, 6}, float s = {1}>
    {
      y = If(c) <
        then_branch = a () => (float[2, 2] t) { w = DequantizeLinear(W, s)  t = MatMul(x, w) },
        else_branch = b () => (float[2, 2] e) { v = DequantizeLinear(W, s)  e = Gemm(x, v) }
      >
    }"""


@pytest.mark.parametrize("text", [MATMUL, DYNAMIC, INSIDE])
def test_a_model_that_multiplies_integers_says_so(load: Load, text: str) -> None:
    assert computes_in_integers(load(text))
    assert describe(load(text), []).integer


def test_a_model_of_floats_and_indices_does_not(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 3] x) => (float[6] y) <int64[1] flat = {-1}> { a = MatMul(x, x1) x1 = Transpose(x)
        s = Shape(a)  r = ReduceSum<keepdims = 0>(s)  f = Cast<to = 1>(r)  b = Reshape(x, flat)  y = Mul(b, f) }""")
    assert not computes_in_integers(model)


def test_integers_in_a_function_that_stays_whole_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
        g (uint8[1, 2] x, int8[2, 2] w) => (float[1, 2] y) { i = local.Product(x, w)  y = Cast<to = 1>(i) }
        <domain: "local", opset_import: ["" : 18]> Product (a, b) => (c) { c = MatMulInteger(a, b) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")

    monkeypatch.setattr("split.graph.load.INLINE", "raise RuntimeError")
    assert computes_in_integers(load_model(tmp_path / "model.onnx"))
