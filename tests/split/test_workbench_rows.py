"""Models written as text: that rows mix, or not, is read off each text."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.codec.golden import golden_inputs
from split.runtime.segment import OrtEngine
from split.tensor import Tensors
from split.workbench.cut import prepare
from split.workbench.rows import rows_apart

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
APART = {
    "value by value": "g (float[N, 8] x) => (float[N, 8] y) { a = Exp(x) y = Neg(a) }",
    "over the other axis": "g (float[N, 8] x) => (float[N, 8] y) { y = Softmax <axis = 1> (x) }",
    "back to where it was": "g (float[N, 8] x) => (float[N, 8] y) { a = Transpose(x) b = Relu(a) y = Transpose(b) }",
    "tokens": "g (int64[N, 8] x) => (float[N, 8] y) { y = Cast <to = 1> (x) }",
}
MIXED = {
    "softmax over the batch": "g (float[N, 8] x) => (float[N, 8] y) { y = Softmax <axis = 0> (x) }",
    "mean over the batch": """g (float[N, 8] x) => (float[N, 8] y)
        { m = ReduceMean <axes = [0]> (x) y = Sub(x, m) }""",
    "largest of the batch": """g (float[N, 8] x) => (float[N, 8] y)
        { m = ReduceMax <axes = [0, 1]> (x) y = Div(x, m) }""",
    "one scale for all rows": """g (float[N, 8] x) => (float[N, 8] y)
        { q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }""",
    "tokens of others": """g (int64[N, 8] x) => (int64[N, 8] y) { m = ReduceSum <keepdims = 1> (x) y = Add(x, m) }""",
}
NO_BATCH = {
    "fixed": "g (float[2, 8] x) => (float[2, 8] y) { y = Neg(x) }",
    "two names": "g (float[N, 8] x, float[M, 8] z) => (float[N, 8] y) { m = ReduceSum(z) y = Add(x, m) }",
    "output of another shape": """g (float[N, 8] x) => (float[8] y) <int64[1] axes = {0}>
        { y = ReduceSum <keepdims = 0> (x, axes) }""",
    "the name stands twice": "g (float[N, N] x) => (float[N, N] y) { y = Neg(x) }",
}


def found(tmp_path: Path, text: str, feeds: Tensors | None = None) -> bool:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f"{HEADER} {text}"), path)
    card = prepare(path, tmp_path / "cache")
    return rows_apart(card, OrtEngine().open(path, threads=1), feeds or golden_inputs(card.inputs, {}))


@pytest.mark.parametrize("name", APART)
def test_rows_that_do_not_depend_on_each_other_are_found_apart(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, APART[name])


@pytest.mark.parametrize("name", MIXED)
def test_a_model_that_mixes_the_rows_of_a_batch_is_found_out(tmp_path: Path, name: str) -> None:
    assert not found(tmp_path, MIXED[name])


@pytest.mark.parametrize("name", NO_BATCH)
def test_without_a_batch_that_leads_everything_nothing_is_parted(tmp_path: Path, name: str) -> None:
    assert not found(tmp_path, NO_BATCH[name])


def test_rows_that_cannot_be_made_to_differ_prove_nothing(tmp_path: Path) -> None:
    assert not found(tmp_path, APART["tokens"], {"x": np.ones((1, 8), np.int64)})


def test_a_request_of_several_rows_is_judged_by_its_first(tmp_path: Path) -> None:
    assert found(tmp_path, APART["value by value"], {"x": np.arange(16, dtype=np.float32).reshape(2, 8)})
