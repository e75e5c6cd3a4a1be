"""What the runtime makes of some values at the start of a model: such cuts are refused, those after it right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.graph.cuts import all_prefix_cuts, cut_at
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, write_parts
from split.runtime.segment import OrtEngine
from split.tensor import Tensors, TensorSpec
from split.workbench.check import run_halves
from split.workbench.cut import settle

Load = Callable[[str], Model]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def from_text(text: str) -> Model:
        head = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>'
        onnx.save(onnx.parser.parse_model(head + text), tmp_path / "model.onnx")
        model = load_model(tmp_path / "model.onnx")
        share_weights(model, tmp_path)
        settle(model, tmp_path)
        return model

    return from_text


def assert_legal_cuts_are_right(model: Model, feeds: Tensors) -> None:
    expected = OrtEngine().open(model.path, threads=1).run(feeds)
    for cut in all_prefix_cuts(model):
        if cut.legal:
            found = run_halves(model, cut, OrtEngine(), model.path.parent, feeds)
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name], strict=True)


def test_what_goes_into_a_dropout_does_not_cross(load: Load) -> None:
    model = load("""g (float[3] x) => (float[3] y) <double r = {0.3}>
        { a = Neg(x)  ratio = Cast<to = 1>(r)  b = Dropout(a, ratio)  y = Abs(b) }""")
    assert cut_at(model, ["a"]).reason.startswith("tensor 'a' goes into a Dropout")
    assert cut_at(model, ["b"]).legal
    assert_legal_cuts_are_right(model, {"x": np.float32([1, -2, 3])})


def test_what_goes_into_a_dropout_of_a_plain_ratio_crosses(load: Load) -> None:
    model = load("""g (float[3] x) => (float[3] y) <float ratio = {0.3}>
        { a = Neg(x)  b = Dropout(a, ratio)  c = Dropout(b)  y = Abs(c) }""")
    assert [cut.legal for cut in all_prefix_cuts(model)] == [True] * 3
    assert_legal_cuts_are_right(model, {"x": np.float32([1, -2, 3])})


def test_16_bits_that_a_body_captures_through_a_cast_do_not_cross(load: Load) -> None:
    model = load("""g (float[3] x) => (float[3] y) <int64 rounds = {2}, bool go = {1}>
        {
          h = Cast<to = 10>(x)  m = Sigmoid(h)  w = Cast<to = 1>(m)  s = Neg(x)
          y = Loop(rounds, go, s) <body = b (int64 i, bool c, float[3] u) => (bool d, float[3] v) {
            d = Identity(c)  v = Add(u, w)
          }>
        }""")
    assert cut_at(model, ["m"]).reason.startswith("tensor 'm' goes through a Cast into the body")
    assert cut_at(model, ["w"]).legal
    assert_legal_cuts_are_right(model, {"x": np.float32([1, -2, 3])})


def test_unnamed_outputs_at_the_end_of_a_node_are_kept(load: Load, tmp_path: Path) -> None:
    model = load("""g (float[1, 1, 2, 2] x) => (float[1, 1, 1, 1] y)
        { a = Neg(x)  y, "" = MaxPool<kernel_shape = [2, 2]>(a) }""")
    write_parts(model, cut_at(model, ["a"]), tmp_path / "head.onnx", tmp_path / "tail.onnx")
    assert [list(node.output) for node in onnx.load(tmp_path / "tail.onnx").graph.node] == [["y", ""]]
    x = np.float32([[[[1, np.nan], [-2, 3]]]])
    assert_legal_cuts_are_right(model, {"x": x})


def test_an_empty_output_has_the_shape_it_has_in_the_whole(load: Load) -> None:
    """Rows of a loop of no rounds: the runtime gives them the dims it infers, and 0 where it infers none."""
    model = load("""g (float[N, 6] x) => (float[R, N, 4] rows)
        <int64[2] parts = {2, 4}, int64 none = {0}, bool go = {1}>
        {
          sizes = Identity(parts)  a, b = Split<axis = 1>(x, sizes)
          last, rows = Loop(none, go, b) <body = f (int64 i, bool c, float[n, m] u)
            => (bool d, float[p, q] v, float[r, s] w) { d = Identity(c)  v = Add(u, b)  w = Identity(v) }>
        }""")
    feeds = {"x": np.ones((3, 6), np.float32)}
    assert_legal_cuts_are_right(model, feeds)


def test_dims_that_only_the_runtime_infers_are_declared_by_the_parts(load: Load, tmp_path: Path) -> None:
    model = load("g (float[N, 3] x) => (float[N, 3] y) { a = com.microsoft.Gelu(x)  y = Neg(a) }")
    write_parts(model, cut_at(model, ["a"]), tmp_path / "head.onnx", tmp_path / "tail.onnx")
    assert OrtEngine().open(tmp_path / "tail.onnx", threads=1).input_specs == (
        TensorSpec(name="a", dtype="FP32", shape=("N", 3)),
    )
