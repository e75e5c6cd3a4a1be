"""What is a constant, what is an activation, in which order nodes come, and what they are thought to cost."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from split.graph.cost import node_flops
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.shapes import concrete_shapes


def load(folder: Path, text: str, *, backwards: bool = False) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    if backwards:
        nodes = list(proto.graph.node)[::-1]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    onnx.save(proto, folder / "model.onnx")
    return load_model(folder / "model.onnx")


def keys(model: Model) -> list[str]:
    return [node.key for node in model.nodes]


def test_constants_in_disguise_are_no_activations(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[4] x) => (float[2, 2] y) <float16[4] half = {1, 2, 3, 4}>
        {
          w = Cast<to = 1>(half)  same = Identity(w)
          two = Constant<value_ints = [2]>()  shape = Concat<axis = 0>(two, two)
          a = Mul(x, same)  y = Reshape(a, shape)
        }""",
    )
    assert keys(model) == ["a", "y"]
    assert [node.reads for node in model.nodes] == [("x",), ("a",)]
    assert {"half", "w", "same", "two", "shape"} <= set(model.constants)


def test_random_values_are_activations_though_they_depend_on_constants_alone(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        "g (float[2] x) => (float[2] y) <float[2] W = {1, 2}> { r = RandomNormalLike(W)  y = Add(x, r) }",
    )
    assert keys(model) == ["r", "y"]
    assert model.nodes[0].reads == ()


def test_names_captured_at_any_depth_are_read_by_the_outer_node(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[2] x, bool c) => (float[2] y) <float[2] W = {1, 2}>
        {
          deep = Neg(x)  low = Abs(x)
          y = If(c) <
            then_branch = t () => (float[2] ty) {
              ty = If(c) <
                then_branch = tt () => (float[2] tty) { k = Mul(deep, W)  tty = Neg(k) },
                else_branch = te () => (float[2] tey) { tey = Identity(low) }
              >
            },
            else_branch = e () => (float[2] ey) { ey = Neg(low) }
          >
        }""",
    )
    assert set(model.nodes[-1].reads) == {"c", "deep", "low"}


def test_nodes_that_no_output_needs_do_not_count(tmp_path: Path) -> None:
    model = load(tmp_path, "g (float[2] x, float[2] unused) => (float[2] y) { dead = Neg(unused)  y = Neg(x) }")
    assert keys(model) == ["y"]
    assert [spec.name for spec in model.inputs] == ["x", "unused"]


def test_an_unsorted_file_is_ordered_by_need_and_keeps_its_bits(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y) { a = Neg(x)  b = Abs(a)  c = Relu(b)  y = Add(c, a) }"
    model = load(tmp_path, text, backwards=True)
    assert keys(model) == ["a", "b", "c", "y"]
    assert [node.bit for node in model.nodes] == [3, 2, 1, 0]


def test_a_branch_is_computed_where_it_is_needed(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[2] x, float[2] z) => (float[2] y)
        { mask = Abs(z)  a = Neg(x)  b = Relu(a)  c = Exp(b)  y = Add(c, mask) }""",
    )
    assert keys(model) == ["a", "b", "c", "mask", "y"]


def test_symbolic_dims_keep_their_names_and_made_up_names_are_dropped(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[batch, 4] x) => (float[batch, 4] y)
        { a = Relu(x)  n = NonZero(a)  s = Cast<to = 1>(n)  t = ReduceSum<keepdims = 0>(s)  y = Add(a, t) }""",
    )
    shapes = {name: getattr(model.spec(name), "shape", None) for name in ("a", "s")}
    assert shapes == {"a": ("batch", 4), "s": (2, -1)}


def test_shapes_follow_the_inputs_sizes(tmp_path: Path) -> None:
    model = load(tmp_path, "g (float[b, c] x) => (float[c, b] y) { a = Neg(x)  y = Transpose(a) }")
    shapes = concrete_shapes(model.source, {"x": (3, 5)})
    assert (shapes["a"], shapes["y"]) == ((3, 5), (5, 3))


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        # 2 · (1·8·4·4 outputs) · (3/1 channels · 3·3 kernel)
        ("g (float[1, 3, 6, 6] x, float[8, 3, 3, 3] w) => (float[1, 8, 4, 4] y) { y = Conv(x, w) }", 2 * 128 * 27),
        ("g (float[1, 4, 6, 6] x, float[4, 1, 3, 3] w) => (y) { y = Conv<group = 4>(x, w) }", 2 * 64 * 9),
        ("g (float[5, 7, 3] x, float[3, 2] w) => (float[5, 7, 2] y) { y = MatMul(x, w) }", 2 * 70 * 3),
        ("g (float[3, 5] x, float[3, 2] w) => (float[5, 2] y) { y = Gemm<transA = 1>(x, w) }", 2 * 10 * 3),
        # 2 · (6 steps · 2 batch) · (4 gates · 8 hidden · (3 input + 8 hidden))
        (
            """g (float[6, 2, 3] x, float[1, 32, 3] w, float[1, 32, 8] r) => (float[6, 1, 2, 8] y)
            { y = LSTM<hidden_size = 8>(x, w, r) }""",
            2 * 12 * 32 * 11,
        ),
        # four operations for each of three elements read and three written
        ("g (float[3] x) => (float[3] y) { y = Relu(x) }", 4 * 6),
    ],
)
def test_costs_are_the_textbook_counts(tmp_path: Path, text: str, flops: int) -> None:
    model = load(tmp_path, text)
    model.shapes = concrete_shapes(model.source, {})
    assert node_flops(model) == (flops,)
