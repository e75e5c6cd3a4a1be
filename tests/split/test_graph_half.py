"""FLOAT16 at a boundary, held against the whole in onnxruntime, which leaves most 16-bit roundings out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.graph.cuts import all_prefix_cuts, boundary_specs, crossing_bytes, cut_at
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights
from split.runtime.machine import read_machine
from split.runtime.segment import OrtEngine
from split.tensor import TensorSpec, relative_difference
from split.workbench.check import run_halves
from split.workbench.cut import settle

Load = Callable[[str], Model]

CHAIN = """g (float16[4, 64] x) => (float16[4, 64] y) { a = Exp(x)  b = Mul(a, x)  c = Sigmoid(b)  y = Mul(c, a) }"""
"""No 16-bit kernels, and a value that skips ahead."""
BESIDE = """g (float[4, 64] x) => (float[4, 64] y, float16[4, 64] n)
    { h = Cast<to = 10>(x)  e = Exp(h)  n = Transpose<perm = [0, 1]>(e)  m = Mul(e, h)  y = Cast<to = 1>(m) }"""
"""One value read by a 16-bit kernel and by a 32-bit one; casts of the model's own."""
CAST_BACK = """g (float[4, 64] x) => (float[4, 64] y, float16[4, 64] m)
    { h = Cast<to = 10>(x)  r = Neg(h)  m = Mul(r, h)  w = Cast<to = 1>(m)  y = Erf(w) }"""
"""An FP32 value that is cast from a 16-bit output."""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def from_text(text: str) -> Model:
        onnx.save(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 18]>' + text), tmp_path / "model.onnx")
        model = load_model(tmp_path / "model.onnx")
        share_weights(model, tmp_path)
        settle(model, tmp_path)
        return model

    return from_text


HAS_KERNELS = "asimdhp" in read_machine().cpu_features
"""An ARM with half-precision arithmetic: there the runtime's choice of roundings depends on a node's neighbours."""
BOUND = 2 * 2**-10 if HAS_KERNELS else 1e-5


@pytest.mark.parametrize("text", [CHAIN, BESIDE, CAST_BACK])
def test_a_16_bit_model_is_cut_without_a_rounding_that_the_whole_does_not_have(load: Load, text: str) -> None:
    model = load(text)
    dtype = np.float16 if "float16[4, 64] x" in text else np.float32
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 64)).astype(dtype)}
    expected = OrtEngine().open(model.path, threads=1).run(feeds)
    cuts = [cut for cut in all_prefix_cuts(model) if cut.legal]
    assert len(cuts) >= 3
    for cut in cuts:
        found = run_halves(model, cut, OrtEngine(), model.path.parent, feeds)
        assert found.keys() == expected.keys()
        for name in expected:
            assert relative_difference(found[name], expected[name]) <= BOUND, (cut.boundary, name)


def test_a_16_bit_activation_travels_in_32_bits_and_counts_as_such(load: Load) -> None:
    model = load(CHAIN)
    cut = cut_at(model, ["b"])
    assert boundary_specs(model, cut) == tuple(
        TensorSpec(name=name, dtype="FP32", shape=(4, 64)) for name in ("a", "b")
    )
    assert crossing_bytes(model, cut) == 2 * 4 * 64 * 4
    assert crossing_bytes(model, cut_at(model, ["a"])) == 4 * 64 * 4 + 4 * 64 * 2  # `a`, and the input as it came


def test_a_16_bit_output_that_the_tail_reads_too_is_refused_by_name(load: Load) -> None:
    model = load("g (float16[4] x) => (float16[4] a, float16[4] y) { a = Exp(x)  y = Sigmoid(a) }")
    assert cut_at(model, ["a"]).reason == ("tensor 'a' is a 16-bit output that the tail needs unrounded; cut elsewhere")


def test_writing_parts_leaves_the_graph_as_it_was(load: Load) -> None:
    model = load(CHAIN)
    feeds = {"x": np.ones((4, 64), np.float16)}
    for _ in range(2):
        run_halves(model, cut_at(model, ["b"]), OrtEngine(), model.path.parent, feeds)
    assert [value.name for value in model.values.values()] == list(model.values)
