"""What crosses a cut still shows the input until something has mixed it; expectations are argued by hand per graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

from split.graph.exposure import shown_inputs
from split.graph.load import load_model
from split.workbench.cut import prepare


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}'), path)
    return path


@pytest.mark.parametrize(
    "steps",
    [
        "t = Identity(x)",
        "t = Transpose<perm = [1, 0]>(x)",
        "t = Flatten(x)",
        "t = Cast<to = 10>(x)",
        "c = Constant<value_float = 2.0>() t = Mul(x, c)",
        "t = Relu(x)",
        "a = Neg(x) t = Concat<axis = 0>(a, x)",
        "n = ReduceMean<keepdims = 1>(x) t = Sub(x, n)",
    ],
)
def test_rearranged_and_pointwise_changed_inputs_are_still_shown(tmp_path: Path, steps: str) -> None:
    cast = "f = Cast<to = 1>(t)"
    path = written(tmp_path, f"g (float[4, 4] x) => (float y) {{ {steps} {cast} y = ReduceSum<keepdims = 0>(f) }}")
    assert shown_inputs(load_model(path))["t"] == {"x"}


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ("t = MatMul(x, w)", set()),
        ("m = MatMul(x, w) t = Add(m, z)", {"z"}),
        ("m = MatMul(x, w) t = Add(m, x)", {"x"}),
        ("t = Shape(x)", set()),
    ],
)
def test_what_was_mixed_is_shown_no_more_unless_a_skip_brings_it_back(
    tmp_path: Path, steps: str, shown: set[str]
) -> None:
    path = written(
        tmp_path,
        "g (float[2, 2] x, float[2, 2] z) => (float y)"
        f" <float[2, 2] w = {{1, 2, 3, 4}}> {{ {steps} f = Cast<to = 1>(t) y = ReduceSum<keepdims = 0>(f) }}",
    )
    assert shown_inputs(load_model(path)).get("t", frozenset()) == shown


def test_an_unknown_operator_is_taken_to_show_what_it_read(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "somebody" : 1]>'
        "g (float[2] x) => (float[2] y) { t = somebody.Secret(x) y = Relu(t) }"
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert shown_inputs(load_model(path))["t"] == {"x"}


def test_the_card_names_the_inputs_that_a_cut_shows(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "g (float[4, 4] x) => (float[16, 4] y) <float[1, 4] w = {1, 2, 3, 4}>"
        " { t = Transpose<perm = [1, 0]>(x) s = Constant<value_ints = [16, 1]>() r = Reshape(t, s) m = MatMul(r, w)"
        " e = Exp(m) y = Neg(e) }",
    )
    card = prepare(path, tmp_path / "out")
    by_boundary = {cut.boundary[0].name: cut.shown_inputs for cut in card.cuts}
    assert by_boundary
    for name, shown in by_boundary.items():
        assert shown == (("x",) if name in ("t", "r") else ()), name


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        ('t = Einsum <equation = "ij->ji"> (x)', {"x"}),
        ('t = Einsum <equation = "ij,ij->ij"> (x, w)', {"x"}),
        ('t = Einsum <equation = "ij->i"> (x)', {"x"}),
        ('t = Einsum <equation = "ij,jk->ik"> (x, w)', set()),
        ('t = Einsum <equation = "...ij , jk"> (x, w)', set()),
        ("t = com.microsoft.FusedMatMul (x, w)", set()),
        ("t = somebody.MatMul (x, w)", {"x"}),
    ],
)
def test_what_sums_over_values_mixes_and_what_only_carries_such_a_name_does_not(
    tmp_path: Path, step: str, shown: set[str]
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1, "somebody" : 1]>'
        f"g (float[2, 2] x) => (float y) <float[2, 2] w = {{1, 2, 3, 4}}>"
        f" {{ {step} f = Relu(t) y = ReduceSum<keepdims = 0>(f) }}"
    )
    onnx.save(model, tmp_path / "model.onnx")
    assert shown_inputs(load_model(tmp_path / "model.onnx"))["t"] == shown


@pytest.mark.parametrize(
    ("weight", "groups", "shown"), [("3, 1, 1, 1", 3, {"x"}), ("3, 3, 1, 1", 1, set()), ("3, 1, 1, 2", 3, set())]
)
def test_a_convolution_that_scales_each_channel_by_itself_hides_nothing(
    tmp_path: Path, weight: str, groups: int, shown: set[str]
) -> None:
    path = written(
        tmp_path,
        f"g (float[1, 3, 4, 4] x, float[{weight}] w) => (float y)"
        f" {{ t = Conv <group = {groups}> (x, w) s = Relu(t) y = ReduceSum<keepdims = 0>(s) }}",
    )
    proto = onnx.load(path)
    shape = [int(dim) for dim in weight.split(", ")]
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w"))
    onnx.save(proto, path)
    assert shown_inputs(load_model(path))["t"] == shown
