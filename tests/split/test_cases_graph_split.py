"""The graph-split cases of the case list, each by its id, with the exact values it names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.codec.payload import decode, encode
from split.errors import CutRefused, InvalidModel
from split.graph.candidates import candidates
from split.graph.cuts import Cut, all_prefix_cuts, crossing_bytes, cut_at, cut_from_mask
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, write_parts
from split.graph.step import STEP_S
from split.runtime.segment import OrtEngine, runtime
from split.tensor import Array, Tensors, TensorSpec
from split.workbench.check import run_halves
from split.workbench.cut import describe, prepare, settle

Load = Callable[[str], Model]

M_IF = """<ir_version: 8, opset_import: ["" : 18]>
m_if (float[3] x) => (float[3] y)
<float[3] W = {2, 3, 4}, float[3] one = {1, 1, 1}, float zero = {0}>
{
  mid = Add(x, one)
  cut = Identity(mid)
  sum = ReduceSum<keepdims = 0>(cut)
  cond = Greater(sum, zero)
  y = If(cond) <
    then_branch = yes () => (float[3] t) { t = Mul(mid, W) },
    else_branch = no () => (float[3] e) { e = Neg(mid) }
  >
}"""

M_SKIP = """<ir_version: 8, opset_import: ["" : 18]>
m_skip (float[3] x) => (float[3] y) { a = Relu(x)  b = Exp(a)  y = Add(a, b) }"""

M_QDQ = """<ir_version: 8, opset_import: ["" : 18]>
m_qdq (float[3] x) => (float[3] y)
<float scale = {0.5}, int8 zero = {3}, float two = {2}>
{ q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)  y = Mul(two, d) }"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """ONNX text → a loaded model whose weights are shared and whose shapes are settled, parts going to tmp_path."""

    def from_text(text: str) -> Model:
        path = tmp_path / "model.onnx"
        onnx.save(onnx.parser.parse_model(text), path)
        model = load_model(path)
        share_weights(model, tmp_path)
        settle(model, tmp_path)
        return model

    return from_text


def floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def split(model: Model, cut: Cut, feeds: Tensors) -> Tensors:
    return run_halves(model, cut, OrtEngine(), model.path.parent, feeds)


@pytest.mark.parametrize("name", ["t", "e"])
def test_o_gs_01_a_name_inside_a_branch_is_refused_as_a_cut_by_name(load: Load, name: str) -> None:
    with pytest.raises(CutRefused, match=rf"'{name}' is not a top-level tensor"):
        cut_at(load(M_IF), [name])


def test_o_gs_01_names_inside_a_branch_are_never_cut_points(load: Load) -> None:
    model = load(M_IF)
    cuts = all_prefix_cuts(model)
    assert not {"t", "e"} & {name for cut in cuts for name in cut.boundary}
    assert [cut.legal for cut in cuts] == [True] * 4
    for cut in cuts:
        np.testing.assert_array_equal(split(model, cut, {"x": floats(1, 2, 3)})["y"], floats(4, 9, 16))
        np.testing.assert_array_equal(split(model, cut, {"x": floats(-5, -5, -5)})["y"], floats(4, 4, 4))


def test_o_gs_02_a_tensor_captured_by_a_branch_crosses_with_the_others(load: Load) -> None:
    model = load(M_IF)
    cut = cut_at(model, ["cut"])
    assert set(cut.boundary) == {"cut", "mid"}
    np.testing.assert_array_equal(split(model, cut, {"x": floats(1, 2, 3)})["y"], floats(4, 9, 16))


def test_o_gs_03_a_model_local_function_is_inlined_before_cutting(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
        g (uint8[H, W, C] x) => (uint8[H, W, C] y) { x1 = local.func(x)  y = Identity(x1) }
        <domain: "local", opset_import: ["" : 18]> func (a) => (b) { c = Identity(a)  b = Identity(c) }""")
    cut = cut_at(model, ["x1"])
    assert cut.boundary == ("x1",)
    x = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    assert split(model, cut, {"x": x})["y"].tobytes() == x.tobytes()


def test_o_gs_04_an_input_only_the_tail_needs_travels_beside_the_boundary(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x, float[3] z) => (float[3] y) { a = Relu(x)  y = Add(a, z) }""")
    cut = cut_at(model, ["a"])
    assert (cut.head_inputs, cut.boundary, cut.tail_inputs) == (("x",), ("a",), ("z",))
    assert [spec.name for spec in model.inputs] == ["x", "z"]
    np.testing.assert_array_equal(split(model, cut, {"x": floats(1, 2, 3), "z": floats(4, 3, 2)})["y"], floats(5, 5, 5))


def test_o_gs_05_a_cut_across_a_skip_connection_carries_both_tensors(load: Load) -> None:
    model = load(M_SKIP)
    cut = cut_at(model, ["b"])
    assert cut.boundary == ("a", "b")
    assert crossing_bytes(model, cut) == 24
    np.testing.assert_allclose(split(model, cut, {"x": floats(0, 1, -1)})["y"], floats(1, 3.7182817, 1), rtol=1e-6)


def test_o_gs_06_an_output_that_the_tail_also_reads_is_not_sent_back(load: Load, tmp_path: Path) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x) => (float[3] y1, float[3] y2) { y1 = Relu(x)  y2 = Neg(y1) }""")
    cut = cut_at(model, ["y1"])
    assert (cut.boundary, cut.head_outputs, cut.tail_outputs) == (("y1",), ("y1",), ("y2",))
    write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
    assert OrtEngine().open(tmp_path / "head.onnx", threads=1).outputs == ("y1",)
    assert OrtEngine().open(tmp_path / "tail.onnx", threads=1).outputs == ("y2",)
    found = split(model, cut, {"x": floats(1, 2, 3)})
    assert list(found) == ["y1", "y2"]
    np.testing.assert_array_equal(found["y1"], floats(1, 2, 3))
    np.testing.assert_array_equal(found["y2"], floats(-1, -2, -3))


def test_o_gs_07_constants_are_never_candidates_and_both_sides_have_equal_copies(load: Load, tmp_path: Path) -> None:
    weight = ", ".join(str(value) for value in range(300))
    model = load(f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[300] x) => (float[300] y) <float[300] W = {{{weight}}}>
        {{
          a = Relu(x)  c = Constant<value_floats = [1.0]> ()
          b = Mul(W, a)  d = Add(b, c)  e = Mul(W, d)  y = Add(e, c)
        }}""")
    names = {name for cut in all_prefix_cuts(model) for name in cut.boundary}
    assert names == {"a", "b", "d", "e"}
    for name in ("W", "c"):
        with pytest.raises(CutRefused, match=rf"'{name}' is a constant"):
            cut_at(model, [name])
    write_parts(model, cut_at(model, ["b"]), tmp_path / "head.onnx", tmp_path / "tail.onnx")
    copies = []
    for part in ("head.onnx", "tail.onnx"):
        [tensor] = [t for t in onnx.load(tmp_path / part).graph.initializer if t.name == "W"]
        copies.append(hashlib.sha256(onnx.numpy_helper.to_array(tensor).tobytes()).hexdigest())
    assert copies == [hashlib.sha256(np.arange(300, dtype=np.float32).tobytes()).hexdigest()] * 2


@pytest.mark.parametrize("text", [M_IF, M_SKIP, M_QDQ])
def test_o_gs_08_cutting_nothing_off_and_everything_off_gives_the_whole(load: Load, text: str) -> None:
    model = load(text)
    feeds = {"x": floats(0.3, 1, -1)}
    expected = OrtEngine().open(model.path, threads=1).run(feeds)["y"]
    nothing = cut_from_mask(model, 0)
    assert (nothing.boundary, nothing.tail_inputs, nothing.head_outputs) == ((), ("x",), ())
    everything = cut_from_mask(model, (1 << len(model.nodes)) - 1)
    assert (everything.boundary, everything.tail_inputs, everything.tail_outputs) == ((), (), ())
    for cut in (nothing, everything):
        assert split(model, cut, feeds)["y"].tobytes() == expected.tobytes()


def test_o_gs_09_every_cut_of_a_small_cnn_keeps_the_answers_of_fifty_inputs(tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    text = """<ir_version: 8, opset_import: ["" : 18]>
        lenet (float[1, 1, 12, 12] x) => (float[1, 10] y)
        {
          c1 = Conv<pads = [1, 1, 1, 1]>(x, W1, B1)  r1 = Relu(c1)
          p1 = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r1)
          c2 = Conv<pads = [1, 1, 1, 1]>(p1, W2, B2)  r2 = Relu(c2)
          p2 = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r2)
          f = Flatten(p2)  g1 = Gemm<transB = 1>(f, W3, B3)  r3 = Relu(g1)  y = Gemm<transB = 1>(r3, W4, B4)
        }"""
    proto = onnx.parser.parse_model(text)
    shapes = {
        "W1": (4, 1, 3, 3),
        "W2": (8, 4, 3, 3),
        "W3": (16, 72),
        "W4": (10, 16),
        "B1": 4,
        "B2": 8,
        "B3": 16,
        "B4": 10,
    }
    for name, shape in shapes.items():
        value = random.standard_normal(shape).astype(np.float32) / 3
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(proto, tmp_path / "lenet.onnx")
    model = load_model(tmp_path / "lenet.onnx")
    share_weights(model, tmp_path)
    engine = OrtEngine()
    whole = engine.open(model.path, threads=1)
    inputs = random.standard_normal((50, 1, 1, 12, 12)).astype(np.float32)
    cuts = all_prefix_cuts(model)
    assert len(cuts) == 9
    for cut in cuts:
        write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
        head, tail = (engine.open(tmp_path / f"{part}.onnx", threads=1) for part in ("head", "tail"))
        for x in inputs:
            expected = whole.run({"x": x})["y"]
            found = tail.run(head.run({"x": x}))["y"]
            assert np.abs(found - expected).max() <= 1e-5
            assert found.argmax() == expected.argmax()


def test_o_gs_09_without_optimisations_the_bits_are_the_same(tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        lenet (float[1, 1, 12, 12] x) => (float[1, 10] y)
        {
          c = Conv<pads = [1, 1, 1, 1]>(x, W1)  r = Relu(c)  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
          f = Flatten(p)  y = Gemm<transB = 1>(f, W2)
        }""")
    for name, shape in {"W1": (4, 1, 3, 3), "W2": (10, 144)}.items():
        value = random.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(proto, tmp_path / "lenet.onnx")
    model = load_model(tmp_path / "lenet.onnx")
    share_weights(model, tmp_path)
    ort = runtime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL

    def opened(path: Path) -> Callable[[Tensors], Tensors]:
        session = ort.InferenceSession(str(path), options)
        names = [value.name for value in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))

    whole = opened(model.path)
    for cut in all_prefix_cuts(model):
        write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
        head, tail = opened(tmp_path / "head.onnx"), opened(tmp_path / "tail.onnx")
        for x in random.standard_normal((50, 1, 1, 12, 12)).astype(np.float32):
            assert tail(head({"x": x}))["y"].tobytes() == whole({"x": x})["y"].tobytes()


def test_o_gs_10_thirty_constant_nodes_of_the_tail_do_not_travel(load: Load, tmp_path: Path) -> None:
    steps = []
    for at in range(10):
        steps.append(f"s{at} = Constant<value_ints = [2, 3]>()  r{at} = Reshape(v{at}, s{at})")
        steps.append(f"i{at} = Constant<value_ints = [2, 1, 0]>()  g{at} = Gather<axis = 1>(r{at}, i{at})")
        steps.append(f"t{at} = Constant<value_ints = [3, 2]>()  v{at + 1} = Reshape(g{at}, t{at})")
    model = load(f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[3, 2] x) => (float[3, 2] y) {{ v0 = Relu(x)  {" ".join(steps)}  y = Neg(v10) }}""")
    cut = cut_at(model, ["v0"])
    assert (cut.boundary, cut.tail_inputs) == (("v0",), ())
    write_parts(model, cut, tmp_path / "head.onnx", tmp_path / "tail.onnx")
    tail = OrtEngine().open(tmp_path / "tail.onnx", threads=1)
    assert tail.inputs == ("v0",)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    frame = b"".join(encode(dict.fromkeys((*cut.boundary, *cut.tail_inputs), x), "raw"))
    assert list(decode(frame, max_bytes=4096)) == ["v0"]
    np.testing.assert_array_equal(split(model, cut, {"x": x})["y"], -x)


def test_o_gs_11_a_graph_lost_by_shape_inference_is_kept_and_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    onnx.save(onnx.parser.parse_model(M_SKIP), tmp_path / "model.onnx")
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *args, **kwargs: onnx.ModelProto())
    card = prepare(tmp_path / "model.onnx", tmp_path / "parts")
    assert card.cuts == ()
    assert card.no_cuts_reason == "shape inference turned 3 nodes into 0"
    assert card.nodes == 3
    assert card.no_cuts_reason in caplog.text
    found = OrtEngine().open(Path(card.path), threads=1).run({"x": floats(0, 1, -1)})  # whole it is served
    np.testing.assert_allclose(found["y"], floats(1, 3.7182817, 1), rtol=1e-6)


CONTRIB = """<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
    g (float[3] x) => (float[3] y) { g = com.microsoft.QuickGelu<alpha = 1000.0>(x)  mid = Relu(g)  y = Neg(mid) }"""
"""QuickGelu is x · sigmoid(1000 x): x itself from 1 on."""


def test_o_gs_12_a_type_that_inference_cannot_tell_is_had_from_a_dry_run(load: Load, tmp_path: Path) -> None:
    model = load(CONTRIB)
    assert model.spec("mid") == TensorSpec(name="mid", dtype="FP32", shape=(3,))
    cut = cut_at(model, ["mid"])
    assert cut.legal
    np.testing.assert_array_equal(split(model, cut, {"x": floats(1, 2, 3)})["y"], floats(-1, -2, -3))


def test_o_gs_12_without_a_dry_run_such_a_cut_is_not_offered(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(CONTRIB), tmp_path / "model.onnx")
    model = load_model(tmp_path / "model.onnx")
    assert not cut_at(model, ["mid"]).legal
    assert candidates(model) == []


WITH_FUNCTION = """<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
    g (float[3] x) => (float[3] y) { a = local.Twice(x)  y = Neg(a) }
    <domain: "local", opset_import: ["" : 18]> Twice (u) => (v) { v = Add(u, u) }"""


FAILING = """raise RuntimeError("cannot")"""
HANGING = """
import signal
signal.sigwait([signal.SIGUSR1])  # which nobody sends"""
CRASHING = """
import os, signal
os.kill(os.getpid(), signal.SIGKILL)"""
RENAMING = """
from onnx import ModelProto
model = ModelProto.FromString(data)
model.graph.output[0].name = model.graph.node[-1].output[0] = "z"
result = model.SerializeToString()"""
BROKEN = """result = b"no model" """


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (FAILING, "they cannot be inlined: RuntimeError: cannot"),
        (HANGING, "they cannot be inlined: that did not end within 0.1 s"),
        (RENAMING, "inlining changed its inputs or outputs"),
        (CRASHING, "they cannot be inlined: the process that tried it ended with SIGKILL"),
        (BROKEN, "what inlining made of it cannot be read"),
    ],
)
def test_o_gs_13_an_optional_step_that_fails_hangs_or_changes_the_names_leaves_the_model_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
    reason: str,
) -> None:
    monkeypatch.setattr("split.graph.load.INLINE", step)
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(WITH_FUNCTION), path)
    model = load_model(path, step_limit_s=0.1 if step is HANGING else STEP_S)
    share_weights(model, tmp_path)
    settle(model, tmp_path)
    assert caplog.messages == [f"{path}: its local functions stay whole, {reason}"]
    assert describe(model, []).note == f"its local functions stay whole, {reason}"
    assert STEP_S < 10.0  # seconds, of which the rest of a load needs some
    assert (model.output_names, len(model.nodes)) == (("y",), 2)
    legal = [cut for cut in all_prefix_cuts(model) if cut.legal]
    assert legal
    for cut in legal:
        np.testing.assert_array_equal(split(model, cut, {"x": floats(1, 2, 3)})["y"], floats(-2, -4, -6))


def test_o_gs_14_an_empty_name_is_never_an_edge(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[1] x, float[1, 1, 4, 4] p) => (float[n, 1] rows, float[1] last, float[1, 1, 2, 2] q)
        <bool yes = {1}, float[1] limit = {3}, float[1] one = {1}>
        {
          start = Neg(x)
          r = Relu(p)
          q, "" = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
          last, rows = Loop("", yes, start) <
            body = b (int64 i, bool c, float[1] v) => (bool go, float[1] w, float[1] row) {
              w = Add(v, one)  row = Identity(w)  less = Less(w, limit)  go = Squeeze(less)
          }>
        }""")
    feeds = {"x": floats(0), "p": np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)}
    assert "" not in model.values
    for cut in all_prefix_cuts(model):
        assert "" not in (*cut.boundary, *cut.head_inputs, *cut.tail_inputs)
        found = split(model, cut, feeds)
        np.testing.assert_array_equal(found["rows"], [[1], [2], [3]])
        np.testing.assert_array_equal(found["q"].ravel(), [5, 7, 13, 15])


def test_o_gs_17_sequences_are_never_cut_points_and_cuts_around_them_are_fine(load: Load) -> None:
    model = load("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[3] x) => (float[3] y)
        { a = Neg(x)  s = SplitToSequence(a)  b = ConcatFromSequence<axis = 0>(s)  y = Neg(b) }""")
    by_boundary = {cut.boundary: cut for cut in all_prefix_cuts(model)}
    assert by_boundary["s",].reason == "tensor 's' has the unsupported type seq(tensor(float))"
    for name in ("a", "b"):
        np.testing.assert_array_equal(split(model, by_boundary[name,], {"x": floats(1, 2, 3)})["y"], floats(1, 2, 3))


def test_o_gs_17_a_public_sequence_is_refused_at_load(load: Load) -> None:
    with pytest.raises(InvalidModel, match=r"unsupported type seq\(tensor\(float\)\)"):
        load("""<ir_version: 8, opset_import: ["" : 18]>
            g (float[3] x) => (seq(float[3]) y) { y = SplitToSequence(x) }""")


def test_o_gs_18_the_quantised_side_of_a_pair_is_preferred(load: Load, tmp_path: Path) -> None:
    model = load(M_QDQ)
    feeds = {"x": floats(-1, 0.3, 100)}
    at_q, at_d = cut_at(model, ["q"]), cut_at(model, ["d"])
    assert (crossing_bytes(model, at_q), crossing_bytes(model, at_d)) == (3, 12)
    assert [cut.id for cut in candidates(model, limit=1)] == [at_q.id]
    write_parts(model, at_q, tmp_path / "head.onnx", tmp_path / "tail.onnx")
    q = OrtEngine().open(tmp_path / "head.onnx", threads=1).run(feeds)["q"]
    assert q.dtype == np.int8
    assert q.tolist() == [1, 4, 127]
    assert split(model, at_q, feeds)["y"].tolist() == [-2, 1, 124]


def test_o_gs_18_a_four_bit_input_is_refused_at_load(load: Load) -> None:
    with pytest.raises(InvalidModel, match=r"input 'x' has the unsupported type tensor\(uint4\)"):
        load("""<ir_version: 10, opset_import: ["" : 21]>
            g (uint4[3] x) => (float[3] y) { y = Cast<to = 1>(x) }""")
