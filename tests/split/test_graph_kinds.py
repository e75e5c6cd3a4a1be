"""Kinds of models that must be cut right: every opset, with state, of any size, with dynamic dims, beyond 2 GB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from split.graph.cuts import all_prefix_cuts, cut_at
from split.graph.load import load_model
from split.graph.partition import share_weights, write_parts
from split.runtime.segment import OrtEngine
from split.tensor import TensorSpec, relative_difference
from split.workbench.check import check_cuts
from split.workbench.cut import settle


def write(folder: Path, text: str, *, opset: int = 18, ir: int = 8) -> Path:
    proto = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {text}')
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("opset", range(7, onnx.defs.onnx_opset_version() + 1))
def test_every_opset_from_7_to_the_newest_is_cut(tmp_path: Path, opset: int) -> None:
    ir = max(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]), 4)
    text = "g (float[2, 3] x) => (float[2, 3] y) { a = Relu(x)  s = Shape(a)  b = Reshape(a, s)  y = Add(a, b) }"
    found = check_cuts(write(tmp_path, text, opset=opset, ir=ir), "all")
    assert [(cut["legal"], cut["max_rel"]) for cut in found] == [(True, 0.0)] * 3


def test_state_that_goes_in_and_comes_out_takes_its_way_on_either_side(tmp_path: Path) -> None:
    """A counter of what was seen: the new state is made in the head, or in the tail, and is the same."""
    model = load_model(
        write(
            tmp_path,
            """g (float[2] x, float[2] state) => (float[2] y, float[2] next)
            { a = Relu(x)  next = Add(a, state)  y = Mul(a, next) }""",
        )
    )
    share_weights(model, tmp_path)
    settle(model, tmp_path)
    early, late = cut_at(model, ["a"]), cut_at(model, ["next"])
    assert (early.tail_inputs, early.tail_outputs) == (("state",), ("y", "next"))
    assert (late.tail_inputs, late.head_outputs, late.tail_outputs) == ((), ("next",), ("y",))
    engine = OrtEngine()
    x = np.float32([1, -2])
    for cut in (early, late):
        write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
        head, tail = (engine.open(tmp_path / f"{part}.onnx", threads=1) for part in ("head", "tail"))
        state = np.zeros(2, np.float32)
        for step in (1, 2, 3):
            known = {"x": x, "state": state}
            known |= head.run({name: known[name] for name in cut.head_inputs})
            known |= tail.run({name: known[name] for name in (*cut.boundary, *cut.tail_inputs)})
            state = known["next"]
            assert state.tolist() == [step, 0]
            assert known["y"].tolist() == [step, 0]


def test_one_pair_of_halves_serves_all_sizes(tmp_path: Path) -> None:
    model = load_model(
        write(
            tmp_path,
            """g (float[N, 3, H, W] x) => (float[N, D] y) <int64[1] rest = {-1}, int64[1] zero = {0}> {
              a = Relu(x)  s = Shape(x)  n = Gather(s, zero)  to = Concat<axis = 0>(n, rest)
              b = Reshape(a, to)  y = Neg(b)
            }""",
        )
    )
    share_weights(model, tmp_path)
    settle(model, tmp_path)
    engine = OrtEngine()
    whole = engine.open(model.path, threads=1)
    for cut in all_prefix_cuts(model):
        write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
        head, tail = (engine.open(tmp_path / f"{part}.onnx", threads=1) for part in ("head", "tail"))
        for shape in ((1, 3, 2, 2), (4, 3, 7, 5), (2, 3, 1, 64)):
            known = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
            known |= head.run({name: known[name] for name in cut.head_inputs})
            found = tail.run({name: known[name] for name in (*cut.boundary, *cut.tail_inputs)})
            expected = whole.run({"x": known["x"]})
            assert relative_difference(found["y"], expected["y"]) == 0.0


def test_all_cuts_of_a_model_of_5000_nodes_are_found(tmp_path: Path) -> None:
    ops = ("Relu", "Neg", "Abs", "Tanh")
    nodes = [helper.make_node(ops[at % 4], [f"v{at}"], [f"v{at + 1}"]) for at in range(4999)]
    nodes.append(helper.make_node("Add", ["v4999", "v10"], ["y"]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("v0", "y"))
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 8
    onnx.save(proto, tmp_path / "model.onnx")
    cuts = all_prefix_cuts(load_model(tmp_path / "model.onnx"))
    assert len(cuts) == 4999
    assert all(cut.legal for cut in cuts)
    assert cuts[8].boundary == ("v9",)
    assert set(cuts[4000].boundary) == {"v4001", "v10"}


def test_a_model_of_more_than_2_gb_is_loaded_and_cut(tmp_path: Path) -> None:
    """Its weights are a hole in a file: 2.2 GB of zeros that take no room on the disk."""
    rows, columns = 550_000, 1000
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (int64[2] x) => (float[2, 1000] y) { a = Gather(W, x)  y = Neg(a) }'
    )
    weight = proto.graph.initializer.add(name="W", data_type=TensorProto.FLOAT, dims=[rows, columns])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.data", "offset": "0", "length": str(rows * columns * 4)}.items():
        weight.external_data.add(key=key, value=value)
    with (tmp_path / "w.data").open("wb") as data:
        data.truncate(rows * columns * 4)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    model = load_model(tmp_path / "model.onnx")
    assert model.files[1][:2] == ("w.data", 2_200_000_000)
    [cut] = all_prefix_cuts(model)
    assert cut.legal
    write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
    made = OrtEngine().open(tmp_path / "head.onnx", threads=1).run({"x": np.int64([0, rows - 1])})
    assert OrtEngine().open(tmp_path / "tail.onnx", threads=1).run(made)["y"].tolist() == [[0.0] * columns] * 2


def test_in_a_file_in_any_order_shapes_follow_from_constants_that_come_later(tmp_path: Path) -> None:
    model = load_model(
        write(
            tmp_path,
            """g (float[2, 4] x) => (float[2, 3] y, float[2, 1] z)
            { y = Neg(a)  z = Neg(b)  a, b = Split<axis = 1>(x, parts)  parts = Constant<value_ints = [3, 1]>() }""",
        )
    )
    assert [model.spec(name) for name in ("a", "b")] == [
        TensorSpec(name="a", dtype="FP32", shape=(2, 3)),
        TensorSpec(name="b", dtype="FP32", shape=(2, 1)),
    ]
