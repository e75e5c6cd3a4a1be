"""Which sets may be cut off, what crosses there, and which cuts are worth measuring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from split.errors import CutRefused
from split.graph.cuts import (
    all_prefix_cuts,
    bitmap_of,
    compute_shares,
    crossing_bytes,
    cut_card,
    cut_from_mask,
    cut_from_nodes,
    mask_of,
)
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.shapes import concrete_shapes
from split.ids import cut_id

TWO_WAYS = """g (float[2] x) => (float[2] y) { a = Neg(x)  b = Abs(x)  c = Relu(b)  y = Add(a, c) }"""


def load(folder: Path, text: str, **weights: tuple[int, ...]) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    for name, shape in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, dtype=np.float32), name))
    onnx.save(proto, folder / "model.onnx")
    model = load_model(folder / "model.onnx")
    model.shapes = concrete_shapes(model.source, {})
    return model


def test_a_cut_need_not_be_a_prefix_of_the_order(tmp_path: Path) -> None:
    model = load(tmp_path, TWO_WAYS)
    cut = cut_from_nodes(model, ["b"])
    assert (cut.boundary, cut.head_inputs, cut.tail_inputs) == (("b",), ("x",), ("x",))
    assert cut.id == cut_id(["b"])


def test_a_set_that_is_not_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CutRefused, match="keeps 'c' on the device but not 'b'"):
        cut_from_nodes(load(tmp_path, TWO_WAYS), ["c"])


def test_nodes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path, TWO_WAYS)
    with pytest.raises(CutRefused, match="'q' is not the key"):
        cut_from_nodes(model, ["q"])
    with pytest.raises(CutRefused, match="it has 4"):
        cut_from_mask(model, 1 << 4)
    with pytest.raises(CutRefused, match="not hexadecimal"):
        mask_of("0x")


def test_a_bitmap_says_the_mask_and_the_mask_the_bitmap(tmp_path: Path) -> None:
    assert bitmap_of(0b1_0000_0011, 9) == "0301"
    assert mask_of("0301") == 0b1_0000_0011
    model = load(tmp_path, TWO_WAYS)
    [card] = [cut_card(model, cut, 0.5) for cut in all_prefix_cuts(model) if cut.boundary == ("a", "b")]
    assert cut_from_mask(model, mask_of(card.node_bitmap)).id == card.id


def test_strings_do_not_cross(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[2] x, string[2] s) => (string[2] t, float[2] y)
        { a = Neg(x)  u = Identity(s)  t = Identity(u)  y = Neg(a) }""",
    )
    by_nodes = {frozenset(nodes): cut_from_nodes(model, nodes) for nodes in (["u"], ["u", "t"], ["a"])}
    assert by_nodes[frozenset(["u"])].reason == "tensor 'u' holds strings, which do not cross a boundary"
    assert by_nodes[frozenset(["a"])].reason == "tensor 's' holds strings, which do not cross a boundary"
    assert by_nodes[frozenset(["u", "t"])].legal


def test_what_a_payload_cannot_name_or_shape_does_not_cross(tmp_path: Path) -> None:
    """Split at such a tensor, a model would only learn from the codec that it does not travel."""
    name = "n" * 4097
    ones = ", ".join("1" * 17)
    shape = "int64[17] shape = {" + ones + "}"
    model = load(
        tmp_path,
        f"""g (float[1] x) => (float[{ones}] y) <{shape}>
        {{ {name} = Neg(x)  a = Relu({name})  b = Reshape(a, shape)  y = Neg(b) }}""",
    )
    by_nodes = [cut_from_nodes(model, nodes).reason for nodes in ([name], [name, "a"], [name, "a", "b"])]
    assert by_nodes == [
        f"tensor {'n' * 40!r}… has a name of 4097 bytes; what crosses has 4096 at most",
        "",
        "tensor 'b' has 17 dims; what crosses has 16 at most",
    ]


def test_a_tensor_with_many_readers_crosses_once(tmp_path: Path) -> None:
    model = load(tmp_path, "g (float[2] x) => (float[2] y) { a = Neg(x)  b = Abs(a)  c = Relu(a)  y = Add(b, c) }")
    cut = cut_from_nodes(model, ["a"])
    assert cut.boundary == ("a",)
    assert crossing_bytes(model, cut) == 8


def test_shares_grow_from_cut_to_cut_and_hold_for_any_set(tmp_path: Path) -> None:
    model = load(tmp_path, TWO_WAYS)
    # Relu, Neg and Abs read 2 and write 2 elements, Add reads 4 and writes 2: 4, 4, 4 and 6 of 18.
    assert compute_shares(model, all_prefix_cuts(model)) == pytest.approx([4 / 18, 8 / 18, 12 / 18])
    assert compute_shares(model, [cut_from_nodes(model, ["b", "c"]), cut_from_nodes(model, ["a"])]) == pytest.approx(
        [8 / 18, 4 / 18]
    )


def test_an_input_that_is_an_output_too_travels_when_nothing_is_kept(tmp_path: Path) -> None:
    model = load(tmp_path, "g (float[2] x, float[2] z) => (float[2] y, float[2] z) { a = Neg(x)  y = Abs(a) }")
    assert cut_from_mask(model, 0).tail_inputs == ("x", "z")
    assert cut_from_mask(model, 1).head_outputs == ("z",)
