"""`check_cuts` tells a right cut from a wrong one, on models as they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.errors import CutRefused, EngineFailed, InvalidModel, InvalidRequest
from split.graph.cuts import Cut
from split.graph.model import Model
from split.profiles.contract import Contract, Data, default_contract
from split.workbench import check
from split.workbench.check import check_cuts, write_npz
from split.workbench.cut import list_cuts, prepare
from split.workbench.inputs import read_inputs

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 2] x) => (float[n, 2] y, float[m, 2] z)
    { a = Neg(x)  s = SplitToSequence(a)  b = ConcatFromSequence<axis = 0>(s)  y = Abs(b)  z = Relu(b) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_every_boundary_is_listed_and_refused_ones_say_why(model: Path, tmp_path: Path) -> None:
    x = np.float32([[1, -2], [3, -4]])
    found = check_cuts(model, "all", inputs={"x": x}, outputs_dir=tmp_path / "out")
    assert [cut["boundary"] for cut in found] == [["a"], ["s"], ["b"], ["b"]]
    assert [cut["legal"] for cut in found] == [True, False, True, True]
    assert [cut["max_rel"] for cut in found] == [0.0, None, 0.0, 0.0]
    assert found[1]["reason"] == "tensor 's' has the unsupported type seq(tensor(float))"
    kept = read_inputs(tmp_path / "out" / f"{found[0]['id']}.npz")
    assert kept is not None
    np.testing.assert_array_equal(kept["y"], np.abs(x))
    np.testing.assert_array_equal(kept["z"], [[0, 2], [0, 4]])


def test_chosen_ids_are_checked_and_unknown_ones_refused(model: Path) -> None:
    wanted = check_cuts(model, "all")[2]["id"]
    assert [cut["id"] for cut in check_cuts(model, [wanted])] == [wanted]
    with pytest.raises(CutRefused, match=r"cut nonsense is none of model\.onnx"):
        check_cuts(model, ["nonsense"])


GATHERED = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1, n, 64] x) => (float[1, 64, 1] y)
    <float[64, 2048] W, float[2048, 2] A, float[2, 64] B, float[64, 64] C>
    {
      w = MatMul(x, W)  a = MatMul(w, A)  b = MatMul(a, B)  t = Transpose<perm = [0, 2, 1]>(b)
      m = GlobalMaxPool(t)  y = MatMul(C, m)
    }"""
"""Narrow at once, but as long as the text; gathered over it in the end, which is narrower only where it is long."""


def test_the_candidates_are_those_that_are_listed_of_other_sizes_and_for_the_contract_too(tmp_path: Path) -> None:
    path, random = tmp_path / "model.onnx", np.random.default_rng(1)
    proto = onnx.parser.parse_model(GATHERED)
    for value in proto.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = random.normal(0, 0.1, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
    del proto.graph.value_info[:]
    onnx.save(proto, path)
    for contract in (None, Contract(data=Data(depth_min_ratio=0.99))):
        listed = list_cuts(path, contract=contract)["cuts"]
        found = check_cuts(path, contract=contract)
        assert [cut["id"] for cut in found] == [cut["id"] for cut in listed]
        assert all(cut["legal"] and cut["max_rel"] <= 1e-5 for cut in found)
        assert (["a"] in [cut["boundary"] for cut in found]) == (contract is None)
        assert ["m"] in [cut["boundary"] for cut in found]


def test_a_half_that_computes_something_else_is_found_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., None] = check.write_parts

    def wrong(model: Model, cut: Cut, head: Path, tail: Path) -> None:
        right(model, cut, head, tail)
        proto = onnx.load(head)
        for node in proto.graph.node:
            node.op_type = "Identity" if node.op_type == "Neg" else node.op_type
        onnx.save(proto, head)

    monkeypatch.setattr(check, "write_parts", wrong)
    [first, *_] = check_cuts(model, "all", inputs={"x": np.float32([[1, 2]])})
    assert first["max_rel"] == 2.0
    assert first["max_abs"] == 2.0


def test_an_output_that_is_listed_twice_is_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(TEXT)
    model.graph.output.append(model.graph.output[0])
    onnx.save(model, tmp_path / "m.onnx")
    card = prepare(tmp_path / "m.onnx", tmp_path / "parts")
    assert [spec.name for spec in card.outputs] == ["y", "z"]
    assert [one.name for one in default_contract(card).data.outputs] == ["y", "z"]
    assert [cut["max_rel"] for cut in check_cuts(tmp_path / "m.onnx", "all") if cut["legal"]] == [0.0] * 3


def test_a_model_that_draws_lots_is_blamed_and_not_its_cuts(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[n, 9] x) => (float[n, 9] y)
        { a = Neg(x)  r = RandomNormalLike(a)  b = Add(a, r)  y = Neg(b) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    apart = [cut for cut in check_cuts(tmp_path / "m.onnx", "all") if cut["max_rel"] > 1e-3]
    assert apart
    for cut in apart:
        assert "from one run to the next: it draws random numbers" in cut["reason"]


def test_a_whole_that_the_runtime_refuses_is_an_invalid_model(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "no.such" : 1]>
        g (float[2] x) => (float[2] y) { a = no.such.Op(x)  y = Neg(a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(InvalidModel, match="Op"):
        check_cuts(tmp_path / "model.onnx")


def test_an_npz_holds_any_names_and_strings(tmp_path: Path) -> None:
    tensors = {
        "file": np.float32(3),
        "/a/b:0": np.arange(4, dtype=np.int64).reshape(2, 2)[:, ::-1],
        "s": np.array([b"x", b"long"], dtype=object),
    }
    write_npz(tmp_path / "out.npz", tensors)
    found = read_inputs(tmp_path / "out.npz")
    assert found is not None
    assert found["file"].shape == ()
    assert found["/a/b:0"].tolist() == [[1, 0], [3, 2]]
    assert found["s"].tolist() == [b"x", b"long"]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_what_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.npz").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"in\.npz"):
        read_inputs(tmp_path / "in.npz")


def test_pickles_and_single_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    np.save(tmp_path / "single.npy", np.zeros(2))
    for name in ("pickled.npz", "single.npy", "missing.npz"):
        with pytest.raises(InvalidRequest, match=name):
            read_inputs(tmp_path / name)


def test_every_boundary_of_a_real_network_keeps_its_answer(real_model: Callable[[str], Path]) -> None:
    path = real_model("efficientnet-lite0")
    found = check_cuts(path, "all")
    assert len(found) == len(onnx.load(path).graph.node) - 1
    assert all(cut["legal"] for cut in found)
    assert max(cut["max_rel"] for cut in found) <= 1e-5


def test_made_up_inputs_that_the_model_does_not_take_say_how_to_give_real_ones(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (float[m] y) <int64[2] two = {2, 2}> { a = Neg(x)  y = Pad<mode = "reflect">(a, two) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "pad.onnx")
    with pytest.raises(EngineFailed, match=r"made-up inputs with 1 for every open dim, give real ones: --inputs"):
        check_cuts(tmp_path / "pad.onnx")
    [found] = check_cuts(tmp_path / "pad.onnx", inputs={"x": np.float32([1, 2, 3])})
    assert found["max_rel"] == 0.0
