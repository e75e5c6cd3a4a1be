"""head ∘ tail = whole for every cut of random graphs, and what the parts look like on disk."""

from __future__ import annotations

import errno
import io
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from split.errors import CutRefused, InvalidModel, ModelUnavailable
from split.graph import partition
from split.graph.cuts import all_prefix_cuts, cut_at, cut_from_mask
from split.graph.load import load_model
from split.graph.partition import WEIGHTS_FILE, share_weights, write_parts
from split.runtime.segment import OrtEngine
from split.tensor import worst_difference
from split.workbench.check import run_halves
from split.workbench.cut import settle

WEIGHT = np.linspace(-1, 1, 512, dtype=np.float32)


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Graphs over float[n, 512]: skips, shared weights, disguised constants, captures, several outputs, any order."""
    values, constants = ["x", "x2"], ["W", "small"]
    nodes: list[onnx.NodeProto] = []
    kinds = ("unary", "binary", "weighted", "constant", "disguised", "random", "if")
    for at in range(draw(st.integers(4, 12))):
        name = f"v/{at}:0" if draw(st.booleans()) else f"v{at}"
        one, two = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        constant = draw(st.sampled_from(constants))
        match draw(st.sampled_from(kinds)):
            case "unary":
                nodes.append(helper.make_node(draw(st.sampled_from(["Relu", "Neg", "Tanh"])), [one], [name]))
            case "binary":
                nodes.append(helper.make_node(draw(st.sampled_from(["Add", "Sub", "Max"])), [one, two], [name]))
            case "weighted":
                operands = [one, constant] if draw(st.booleans()) else [constant, one]
                nodes.append(helper.make_node("Mul", operands, [name]))
            case "constant":
                value = numpy_helper.from_array(WEIGHT * at if draw(st.booleans()) else np.float32([at]))
                nodes.append(helper.make_node("Constant", [], [name], value=value))
                constants.append(name)
                continue
            case "disguised":
                nodes.append(helper.make_node("Identity", [constant], [name]))
                constants.append(name)
                continue
            case "random":
                # A range of no width: a value that is drawn, and yet known.
                nodes.append(helper.make_node("RandomUniformLike", [one], [name], low=0.5, high=0.5))
            case _:
                nodes.append(helper.make_node("ReduceMax", [one], [f"max{at}"], keepdims=0))
                nodes.append(helper.make_node("Greater", [f"max{at}", "zero"], [f"cond{at}"]))
                out = [helper.make_tensor_value_info(f"{side}{at}", TensorProto.FLOAT, ["n", 512]) for side in "te"]
                yes = helper.make_graph([helper.make_node("Mul", [two, constant], [f"t{at}"])], "yes", [], out[:1])
                inner = [
                    helper.make_node("Constant", [], [f"k{at}"], value=numpy_helper.from_array(WEIGHT + at)),
                    helper.make_node("Add", [one, f"k{at}"], [f"e{at}"]),
                ]
                no = helper.make_graph(inner, "no", [], out[1:])
                nodes.append(helper.make_node("If", [f"cond{at}"], [name], then_branch=yes, else_branch=no))
        values.append(name)
    made = [name for name in values if name not in {"x", "x2"}] or ["x"]
    outputs = draw(st.lists(st.sampled_from([*made, made[-1]]), min_size=1, max_size=3, unique=True))
    graph = helper.make_graph(
        draw(st.permutations(nodes)),
        "random",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 512]) for name in ("x", "x2")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 512]) for name in outputs],
        [
            numpy_helper.from_array(WEIGHT, "W"),
            numpy_helper.from_array(np.float32([0.5]), "small"),
            numpy_helper.from_array(np.float32(0), "zero"),
        ],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(proto=models(), seed=st.integers(0, 2**32 - 1))
def test_head_then_tail_is_the_whole_at_every_cut(proto: onnx.ModelProto, seed: int) -> None:
    random = np.random.default_rng(seed)
    feeds = {name: random.standard_normal((2, 512), dtype=np.float32) for name in ("x", "x2")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(proto, folder / "model.onnx")
        engine = OrtEngine()
        expected = engine.open(folder / "model.onnx", threads=1).run(feeds)
        model = load_model(folder / "model.onnx")
        feeds = {spec.name: feeds[spec.name] for spec in model.inputs}
        share_weights(model, folder)
        settle(model, folder, inputs=feeds)
        for cut in all_prefix_cuts(model):
            assert cut == cut_from_mask(model, cut.mask)
            if model.no_cuts_reason:
                continue
            assert cut.legal, cut.reason
            found = run_halves(model, cut, engine, folder, feeds)
            assert worst_difference(found, expected, list(expected)) <= 1e-5


def save(folder: Path, text: str, **weights: np.ndarray) -> Path:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx"


TWO_WEIGHTS = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 512] x) => (float[n, 512] y) { a = Mul(x, A)  b = Add(a, B)  y = Mul(b, C) }"""


def test_equal_weights_lie_in_the_shared_file_once_and_on_page_borders(tmp_path: Path) -> None:
    model = load_model(save(tmp_path, TWO_WEIGHTS, A=WEIGHT, B=WEIGHT + 1, C=WEIGHT))
    share_weights(model, tmp_path)
    stored = (tmp_path / WEIGHTS_FILE).read_bytes()
    assert stored[:2048] == WEIGHT.tobytes()
    assert stored[4096:] == (WEIGHT + 1).tobytes()
    write_parts(model, cut_at(model, ["a"]), tmp_path / "head.onnx", tmp_path / "tail.onnx")
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}["offset"]
        for part in ("head.onnx", "tail.onnx")
        for tensor in onnx.load(tmp_path / part, load_external_data=False).graph.initializer
    }
    assert places == {"A": "0", "B": "4096", "C": "0"}


def test_a_damaged_weights_file_is_written_anew_and_a_right_one_is_kept(tmp_path: Path) -> None:
    path = save(tmp_path, TWO_WEIGHTS, A=WEIGHT, B=WEIGHT + 1, C=WEIGHT)
    share_weights(load_model(path), tmp_path)
    weights = tmp_path / WEIGHTS_FILE
    right, kept = weights.read_bytes(), weights.stat().st_ino
    share_weights(load_model(path), tmp_path)
    assert weights.stat().st_ino == kept
    weights.write_bytes(right[:100] + b"?" + right[101:])
    share_weights(load_model(path), tmp_path)
    assert weights.read_bytes() == right


def test_a_full_disk_is_a_typed_error_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(save(tmp_path, TWO_WEIGHTS, A=WEIGHT, B=WEIGHT + 1, C=WEIGHT))

    def full(stream: io.BufferedWriter, **_: object) -> None:
        stream.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partition, "_write_weights", full)
    with pytest.raises(ModelUnavailable, match="disk is full"):
        share_weights(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_weight_whose_bytes_do_not_fit_its_shape_is_an_invalid_model(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TWO_WEIGHTS)
    weights = [numpy_helper.from_array(WEIGHT, name) for name in "ABC"]
    weights[1].raw_data = weights[1].raw_data[:-4]
    proto.graph.initializer.extend(weights)
    onnx.save(proto, tmp_path / "model.onnx")
    model = load_model(tmp_path / "model.onnx")
    with pytest.raises(InvalidModel, match="weight 'B'"):
        share_weights(model, tmp_path)


def test_an_illegal_cut_is_not_written(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x) => (float[3] y) { s = SplitToSequence(x)  y = ConcatFromSequence<axis = 0>(s) }"""
    model = load_model(save(tmp_path, text))
    with pytest.raises(CutRefused, match=r"tensor 's' has the unsupported type seq\(tensor\(float\)\)"):
        write_parts(model, cut_at(model, ["s"]), tmp_path / "head.onnx", tmp_path / "tail.onnx")


def test_outputs_that_no_node_makes_are_kept_by_the_device(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x, float[3] z) => (float[3] z, float[3] k, float[3] y)
        <float[3] W = {1, 2, 3}> { k = Identity(W)  a = Neg(x)  y = Add(a, W) }"""
    model = load_model(save(tmp_path, text))
    [cut] = all_prefix_cuts(model)
    assert (cut.head_inputs, cut.head_outputs, cut.tail_outputs) == (("x", "z"), ("z", "k"), ("y",))
    feeds = {"x": np.float32([1, 1, 1]), "z": np.float32([7, 8, 9])}
    found = run_halves(model, cut, OrtEngine(), tmp_path, feeds)
    assert {name: array.tolist() for name, array in found.items()} == {"z": [7, 8, 9], "k": [1, 2, 3], "y": [0, 1, 2]}


def test_weights_listed_as_inputs_are_constants_of_both_parts(tmp_path: Path) -> None:
    text = """<ir_version: 3, opset_import: ["" : 8]>
        g (float[2] x, float[2] W) => (float[2] y) <float[2] W = {1, 2}> { a = Mul(x, W)  y = Add(a, W) }"""
    model = load_model(save(tmp_path, text))
    assert [spec.name for spec in model.inputs] == ["x"]
    [cut] = all_prefix_cuts(model)
    assert (cut.boundary, cut.tail_inputs) == (("a",), ())
    assert run_halves(model, cut, OrtEngine(), tmp_path, {"x": np.float32([3, 4])})["y"].tolist() == [4, 10]


@pytest.mark.parametrize("constant", [False, True], ids=["initializer", "Constant node"])
def test_small_tensors_in_a_file_beside_the_model_are_in_the_parts_and_in_the_shapes(
    tmp_path: Path, constant: bool
) -> None:
    """The parts lie in another folder; a shape that is read from such a tensor is known without a run."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x) => (float[3, 1] y) { a = Neg(x)  b = Add(a, W)  c = Reshape(b, s)  y = Neg(c) }""")
    for name, array in {"W": np.float32([10, 20, 30]), "s": np.array([3, 1])}.items():
        tensor = numpy_helper.from_array(array, name)
        if constant:
            proto.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
        else:
            proto.graph.initializer.append(tensor)
    path = tmp_path / "model.onnx"
    aside = {"location": "w.data", "size_threshold": 0, "convert_attribute": True}
    onnx.save(proto, path, save_as_external_data=True, **aside)
    assert (tmp_path / "w.data").stat().st_size >= 12 + 16
    model = load_model(path)
    assert model.spec("c").shape == (3, 1)
    parts = tmp_path / "parts"
    parts.mkdir()
    share_weights(model, parts)
    for name in ("a", "b", "c"):
        head, tail = parts / "head.onnx", parts / "tail.onnx"
        write_parts(model, cut_at(model, [name]), head, tail)
        made = OrtEngine().open(head, threads=1).run({"x": np.float32([1, 2, 3])})
        assert OrtEngine().open(tail, threads=1).run(made)["y"].tolist() == [[-9], [-18], [-27]]
