"""What weights tell of the channels they read, against sums made by hand; graphs are written out as text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.graph.cuts import Cut, all_prefix_cuts, boundary_specs
from split.graph.load import load_model
from split.graph.model import Model
from split.runtime.engine import Stop
from split.tensor import Array, Tensors
from split.workbench.coded_cut import CodedCut, Halves
from split.workbench.cut import settle
from split.workbench.next_weights import weights_gram


def graph(body: str, weights: Mapping[str, Any], *, x: str = "1, 3, 4, 4", y: str = "1, 2, 4, 4") -> tuple[Model, Cut]:
    """A model that makes `b` of its input and `y` of that by `body`, and the cut at `b`."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{x}] x) => (float[{y}] y) {{ b = Neg(x) {body} }}'
    proto = onnx.parser.parse_model(text)
    for name, value in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        onnx.save(proto, path)
        model = load_model(path)
        settle(model, Path(name), inputs={"x": np.ones([int(dim) for dim in x.split(",")], np.float32)})
    return model, next(cut for cut in all_prefix_cuts(model) if cut.boundary == ("b",))


def gram(
    body: str, weights: Mapping[str, Any], axis: int = 1, *, x: str = "1, 3, 4, 4", y: str = "1, 2, 4, 4"
) -> Array | None:
    return weights_gram(*graph(body, weights, x=x, y=y), "b", axis)


W: Array = np.array([[1, 2, 0], [0, 1, 3]], np.float32)
G = [[1, 2, 0], [2, 5, 3], [0, 3, 9]]
"""WᵀW of it."""
POINTWISE = {"W": W[:, :, None, None]}


def test_of_a_convolution_it_is_the_sum_over_its_kernels_positions() -> None:
    kernel = np.zeros((2, 3, 1, 2), np.float32)
    kernel[:, :, 0, 0] = W
    kernel[0, :, 0, 1] = [1, 1, -1]
    found = gram("y = Conv(b, W)", {"W": kernel}, y="1, 2, 4, 3")
    # [1, 1, -1]ᵀ[1, 1, -1] is added to the first position's.
    np.testing.assert_array_equal(found, [[2, 3, -1], [3, 6, 2], [-1, 2, 10]])


def test_a_convolution_by_channels_keeps_them_apart_and_groups_see_their_own() -> None:
    kernel = np.array([[1, 2], [3, 0], [0, 1]], np.float32).reshape(3, 1, 1, 2)
    found = gram("y = Conv<group = 3>(b, W)", {"W": kernel}, y="1, 3, 4, 3")
    np.testing.assert_array_equal(found, np.diag([5, 9, 1]))
    paired = np.array([[1, 2], [1, 0], [3, 1], [0, 1]], np.float32).reshape(4, 2, 1, 1)
    found = gram("y = Conv<group = 2>(b, W)", {"W": paired}, x="1, 4, 4, 4", y="1, 4, 4, 4")
    np.testing.assert_array_equal(found, [[2, 2, 0, 0], [2, 4, 0, 0], [0, 0, 9, 3], [0, 0, 3, 2]])


def test_all_layers_that_read_it_add_up_one_with_strides_by_the_places_it_reads() -> None:
    body = "c = Conv(b, W) d = Conv<strides = [2, 2]>(b, V) e = Resize(d, , s) y = Add(c, e)"
    weights = POINTWISE | {"V": np.array([[0, 0, 2], [0, 0, 0]]).reshape(2, 3, 1, 1), "s": [1, 1, 2, 2]}
    np.testing.assert_array_equal(gram(body, weights), np.array(G) + np.diag([0, 0, 4 / 4]))


@pytest.mark.parametrize(
    ("body", "factor"),
    [
        ("r = Relu(b) y = Conv(r, W)", [1, 1, 1]),
        ("l = Constant<value = float {0.0}>() r = Clip(b, l) y = Conv(r, W)", [1, 1, 1]),
        ("h = HardSwish(b) y = Conv(h, W)", [1, 1, 1]),
        ("s = Sigmoid(b) m = Mul(s, b) y = Conv(m, W)", [1, 1, 1]),
        ("m = Mul(b, f) y = Conv(m, W)", [2, -1, 4]),
        ("m = Mul(f, b) a = Add(m, f) y = Conv(a, W)", [2, -1, 4]),
        # gain / √(variance + 0): 2/2, -1/1, 4/4
        ("n = BatchNormalization<epsilon = 0.0>(b, g, g, g, v) y = Conv(n, W)", [1, -1, 1]),
        ("t = Transpose<perm = [0, 2, 3, 1]>(b) m = MatMul(t, M) y = Transpose<perm = [0, 3, 1, 2]>(m)", [1, 1, 1]),
    ],
)
def test_it_sees_through_what_keeps_channels_apart(body: str, factor: list[float]) -> None:
    weights = POINTWISE | {"M": W.T, "f": np.array([2, -1, 4]).reshape(3, 1, 1), "g": [2, -1, 4], "v": [4, 1, 16]}
    np.testing.assert_array_equal(gram(body, weights), G * np.outer(factor, factor))


def test_a_product_with_a_constant_is_a_layer() -> None:
    shapes = {"x": "5, 3", "y": "5, 2"}
    np.testing.assert_array_equal(gram("y = MatMul(b, W)", {"W": W.T}, **shapes), G)
    np.testing.assert_array_equal(gram("y = Gemm<transB = 1>(b, W)", {"W": W}, **shapes), G)
    np.testing.assert_array_equal(gram("y = Gemm<alpha = 2.0>(b, W)", {"W": W.T}, **shapes), 4 * np.array(G))
    tokens = gram("y = MatMul(b, W)", {"W": W.T}, 2, x="1, 7, 3", y="1, 7, 2")
    np.testing.assert_array_equal(tokens, G)


def test_the_way_round_a_residual_block_leads_to_what_reads_the_sum() -> None:
    """b → narrow → a, and b + a → y: both read the boundary."""
    back = np.eye(3, dtype=np.float32)[:, :2, None, None]
    body = "n = Conv(b, W) a = Conv(n, V) s = Add(a, b) y = Conv(s, U)"
    found = gram(body, POINTWISE | {"V": back, "U": 2 * W[:, :, None, None]})
    np.testing.assert_array_equal(found, 5 * np.array(G))


def test_of_a_concatenation_the_layer_behind_is_asked_for_its_own_channels() -> None:
    """Channels 2, 3 and 4 of six are the boundary's."""
    kernel = np.concatenate([np.full((2, 2), 7), W, [[5], [6]]], axis=1).astype(np.float32)
    body = "u = Concat<axis = 1>(k, b, l) y = Conv(u, W)"
    constants = {"W": kernel[:, :, None, None], "k": np.ones((1, 2, 4, 4)), "l": np.ones((1, 1, 4, 4))}
    np.testing.assert_array_equal(gram(body, constants), G)


@pytest.mark.parametrize(
    "body",
    [
        "s = Sigmoid(b) y = Conv(s, W)",
        "s = Sigmoid(b) m = Mul(b, s) p = Conv(m, W) q = Conv(s, W) y = Add(p, q)",
        "r = Relu(b) s = Sigmoid(r) m = Mul(b, s) y = Conv(m, W)",
        "p = Conv(b, W) m = GlobalAveragePool(b) q = Conv(m, W) y = Add(p, q)",
        "p = Conv(b, W) m = ReduceMean<keepdims = 1>(b) y = Add(p, m)",
        "m = ReduceMean<keepdims = 1>(b) c = Add(b, b) y = Conv(c, W)",
    ],
)
def test_where_one_reader_is_something_else_nothing_is_told(body: str) -> None:
    assert gram(body, POINTWISE) is None


def test_of_a_tensor_that_is_an_output_as_well_nothing_is_told() -> None:
    body = "r = Relu(b) y = Identity(r) z = Conv(r, W)"
    assert gram(body, POINTWISE, y="1, 3, 4, 4] y, float[1, 2, 4, 4") is None


def test_weights_that_are_computed_tell_nothing() -> None:
    assert gram("V = Reshape(F, s) y = Conv(b, V)", {"F": W.reshape(-1), "s": [0]}) is None


class Handed:
    """A half that hands on what comes in."""

    inputs, outputs = ("b",), ("b",)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        return dict(feeds)

    def close(self) -> None:
        pass


def learnt(
    model: Model, cut: Cut, rows: Sequence[Array], weights: Callable[[str, int], Array | None]
) -> BoundaryTables:
    """Tables of requests that were not asked how the outputs move."""
    cut = replace(cut, head_inputs=("b",))
    specs = tuple(boundary_specs(model, cut))
    halves = Halves(cut=cut, specs=specs, node_bitmap="01", head=Handed(), tail=Handed(), weights=weights)
    coded = CodedCut(halves, 3)
    coded.learn(
        [(number, partial(dict, b=row)) for number, row in enumerate(rows)],
        measure="",
        probes=0,
        has_time=lambda: True,
    )
    return BoundaryTables(coded.tables(), "0" * 64)


def test_a_direction_that_the_weights_ignore_gets_nearly_no_bits() -> None:
    """y = x₁ + x₂: their difference, which varies twice as much, is sent with a tenth of the precision; by variance
    alone it takes more bits than the sum."""
    total, difference = np.random.default_rng(5).normal(0, [[[[[1]]]], [[[[2]]]]], (2, 6, 1, 32, 32))
    rows = list(np.stack([total + difference, total - difference], axis=2).astype(np.float32))
    blind = list(np.stack([total, total], axis=2).astype(np.float32))
    model, cut = graph("y = Conv(b, W)", {"W": np.ones((1, 2, 1, 1))}, x="1, 2, 32, 32", y="1, 1, 32, 32")
    by_weights = learnt(model, cut, rows, partial(weights_gram, model, cut))
    by_variance = learnt(model, cut, rows, lambda *_: None)
    assert [by_weights.tensors[0].weighed_by, by_variance.tensors[0].weighed_by] == ["weights", "variance"]

    def coded(coder: BoundaryTables, arrays: Sequence[Array], level: int) -> tuple[int, float]:
        """Bytes, and the mean square of what y is off."""
        size, off = 0, 0.0
        for array in arrays:
            payload = b"".join(encode_klt({"b": array}, coder, level))
            size += len(payload)
            back = decode_klt(payload, coder, max_bytes=1 << 20)["b"]
            off += float(np.square((back - array).sum(axis=1)).mean()) / len(arrays)
        return size, off

    size, off = coded(by_weights, rows, 120)  # a step of half of what the sum varies
    assert size < 1.1 * coded(by_weights, blind, 120)[0]
    assert off < 4 * 0.5**2 / 12
    assert (
        min(found for level in range(96, 136) for found, more in [coded(by_variance, rows, level)] if more <= off)
        > 2 * size
    )
