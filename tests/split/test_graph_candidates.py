"""Which cuts are offered, and that each demand is met."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from split.errors import CutRefused
from split.graph.candidates import candidates, find_candidates, find_candidates_at_both
from split.graph.cost import node_flops
from split.graph.cuts import Cut, crossing_bytes, cut_at
from split.graph.demands import Demands
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.shapes import concrete_shapes
from split.graph.weighing import in_units, weigh

# Convolutions of 16, 64 and 4 channels: the cut at 64 is later and wider than the one at 16, so never the best.
THREE = """g (float[1, 3, 32, 32] x) => (float[1, 4, 26, 26] y)
    { a = Conv(x, A)  ra = Relu(a)  b = Conv(ra, B)  rb = Relu(b)  c = Conv(rb, C)  rc = Relu(c)  y = Neg(rc) }"""
THREE_WEIGHTS = {"A": (16, 3, 3, 3), "B": (64, 16, 3, 3), "C": (4, 64, 3, 3)}

# Two narrow branches out of one wide tensor: the best cut has both.
BRANCHES = """g (float[1, 8, 32, 32] x) => (float[1, 8, 32, 32] y)
    {
      w = Conv<pads = [1, 1, 1, 1]>(x, W)
      l = Conv<strides = [4, 4]>(w, L)  r = Conv<strides = [4, 4]>(w, R)
      s = Add(l, r)  t = Mul(l, s)  y = ConvTranspose<strides = [4, 4]>(t, T)
    }"""
BRANCHES_WEIGHTS = {"W": (32, 8, 3, 3), "L": (2, 32, 4, 4), "R": (2, 32, 4, 4), "T": (2, 8, 4, 4)}


def load(folder: Path, text: str, **weights: tuple[int, ...]) -> Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    for name, shape in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, dtype=np.float32), name))
    onnx.save(proto, folder / "model.onnx")
    model = load_model(folder / "model.onnx")
    model.shapes = concrete_shapes(model.source, {})
    return model


def keys(model: Model, cut: Cut) -> set[str]:
    return {node.key for node in model.nodes if cut.mask >> node.bit & 1}


def test_the_best_candidates_are_narrow_early_and_behind_what_fuses(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    assert [cut.boundary for cut in candidates(model, limit=2)] == [("ra",), ("rc",)]


def test_candidates_stay_within_their_number_and_in_order(tmp_path: Path) -> None:
    steps = "  ".join(f"v{at + 1} = Neg(v{at})" for at in range(40))
    model = load(tmp_path, f"g (float[2] v0) => (float[2] v40) {{ {steps} }}")
    for limit in (1, 3, 12):
        cuts = candidates(model, limit=limit)
        assert 0 < len(cuts) <= limit
        assert [cut.nodes for cut in cuts] == sorted(cut.nodes for cut in cuts)
        assert all(cut.legal for cut in cuts)


def test_a_model_of_one_node_has_no_candidates_and_says_why(tmp_path: Path) -> None:
    model = load(tmp_path, "g (float[2] x) => (float[2] y) { y = Neg(x) }")
    assert candidates(model) == []
    assert model.no_cuts_reason == "the model has fewer than two nodes"


def test_a_cut_of_two_tensors_is_found_where_it_is_the_narrowest(tmp_path: Path) -> None:
    model = load(tmp_path, BRANCHES, **BRANCHES_WEIGHTS)
    found = find_candidates(model)
    by_boundary = {cut.boundary: cut for cut in found.cuts}
    # w: 32 × 32 × 32 floats; l and r: 2 × 8 × 8 floats each; l and s as many.
    assert crossing_bytes(model, cut_at(model, ["w"])) == 131072
    assert min(crossing_bytes(model, cut) for cut in found.cuts) == 512
    two = [cut for boundary, cut in by_boundary.items() if len(boundary) == 2]
    assert {crossing_bytes(model, cut) for cut in two} <= {1024}
    assert ("t",) in by_boundary
    assert found.dropped == 0


def test_a_tensor_that_does_not_shrink_in_a_codec_is_weighed_both_ways(tmp_path: Path) -> None:
    # Raw, the float of 800 bytes is wider than the integers of 600; in int8 it is the narrower one: 200.
    model = load(
        tmp_path,
        """g (float[300] x) => (float[1] y)
        {
          f = MatMul(x, A)  s = Sigmoid(f)
          i = Cast<to = 6>(s)  c = Cast<to = 1>(i)  b = MatMul(c, B)  y = MatMul(b, C)
        }""",
        A=(300, 200),
        B=(200, 150),
        C=(150, 1),
    )
    device = in_units(node_flops(model))
    raw, coded = weigh(model, device, device), weigh(model, device, device, coded=True)
    sizes = {
        name: (one.nbytes, two.nbytes)
        for name, one, two in zip(("x", "f", "s", "i", "c", "b"), raw.tensors, coded.tensors, strict=True)
    }
    assert sizes == {
        "x": (1200, 300),
        "f": (800, 200),
        "s": (800, 200),
        "i": (800, 800),
        "c": (800, 200),
        "b": (600, 150),
    }
    offered = [cut.boundary for cut in candidates(model)]
    assert ("b",) in offered
    assert ("i",) not in offered


def test_operators_the_device_lacks_stay_in_the_tail_with_all_that_needs_them(tmp_path: Path) -> None:
    model = load(tmp_path, BRANCHES, **BRANCHES_WEIGHTS)
    found = find_candidates(model, demands=Demands(ops_missing=frozenset(("Add",))))
    assert found.cuts
    for cut in found.cuts:
        assert not keys(model, cut) & {"s", "t", "y"}
    assert ("l", "r") in [cut.boundary for cut in found.cuts]


def test_pinned_nodes_are_where_they_shall_be(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    found = find_candidates(model, demands=Demands(on_device=frozenset(("b",)), on_cloud=frozenset(("c",))))
    assert {cut.boundary for cut in found.cuts} <= {("b",), ("rb",)}
    assert found.cuts


def test_pins_that_contradict_each_other_leave_no_candidate(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    assert find_candidates(model, demands=Demands(on_device=frozenset("c"), on_cloud=frozenset("b"))).cuts == ()


def test_a_private_input_is_mixed_before_anything_leaves(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        """g (float[1, 64] x, float[1, 64] z) => (float[1, 4] y)
        { n = Neg(x)  h = Abs(n)  a = MatMul(h, A)  b = Add(a, z)  c = MatMul(b, B)  y = Neg(c) }""",
        A=(64, 64),
        B=(64, 4),
    )
    found = find_candidates(model, demands=Demands(private=frozenset("x")))
    assert found.cuts
    assert all("a" in keys(model, cut) for cut in found.cuts)
    assert any(cut.tail_inputs == ("z",) for cut in found.cuts)  # the other one may travel


def test_no_candidate_is_shallower_than_the_depth(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    flops = dict(zip((node.key for node in model.nodes), node_flops(model), strict=True))
    found = find_candidates(model, demands=Demands(depth_min_ratio=0.5))
    assert found.cuts
    for cut in found.cuts:
        assert sum(flops[key] for key in keys(model, cut)) >= 0.5 * sum(flops.values())


def test_the_weights_of_a_head_stay_within_their_bytes(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    # A: 16·3·9 floats, B: 64·16·9, C: 4·64·9.
    for most, convolutions in ((1727, set()), (1728, {"a"}), (1728 + 36864, {"a", "b"})):
        found = find_candidates(model, demands=Demands(weight_bytes_max=most))
        assert set[str]().union(*(keys(model, cut) & {"a", "b", "c"} for cut in found.cuts)) == convolutions


def test_demands_that_name_nothing_of_the_model_are_refused(tmp_path: Path) -> None:
    model = load(tmp_path, THREE, **THREE_WEIGHTS)
    with pytest.raises(CutRefused, match="'q' is not the key"):
        find_candidates(model, demands=Demands(on_cloud=frozenset("q")))
    with pytest.raises(CutRefused, match=r"'q' is no input of model\.onnx; it has x"):
        find_candidates(model, demands=Demands(private=frozenset("q")))


# Narrow at once, but as long as the text; what is gathered over it in the end is narrow only where the text is long.
GATHERED = """g (float[1, n, 64] x) => (float[1, 64, 1] y)
    {
      w = MatMul(x, W)  a = MatMul(w, A)  b = MatMul(a, B)  t = Transpose<perm = [0, 2, 1]>(b)
      m = GlobalMaxPool(t)  y = MatMul(C, m)
    }"""
GATHERED_WEIGHTS = {"W": (64, 2048), "A": (2048, 2), "B": (2, 64), "C": (64, 64)}


def test_a_cut_that_is_good_at_other_sizes_only_is_a_candidate_too(tmp_path: Path) -> None:
    model = load(tmp_path, GATHERED, **GATHERED_WEIGHTS)
    short, long = ({"x": (1, n, 64)} for n in (2, 500))
    model.shapes = concrete_shapes(model.source, short)
    here = model.shapes
    found = {cut.boundary for cut in find_candidates(model, limit=4).cuts}
    assert ("a",) in found
    assert ("m",) not in found
    both = find_candidates_at_both(model, concrete_shapes(model.source, long), limit=4)
    assert model.shapes is here
    assert len(both.cuts) <= 4
    assert {cut.boundary for cut in both.cuts} == found | {("m",)}
    assert [cut.nodes for cut in both.cuts] == sorted(cut.nodes for cut in both.cuts)
    assert find_candidates_at_both(model, here, limit=4) == find_candidates(model, limit=4)


def test_a_front_that_was_cut_short_is_reported_and_still_gives_narrow_cuts(tmp_path: Path) -> None:
    # Twelve branches from one wide tensor, each narrowing; thousands of sets between.
    branches = "  ".join(f"b{at} = Conv<strides = [4, 4]>(w, B{at})  c{at} = Relu(b{at})" for at in range(12))
    names = ", ".join(f"c{at}" for at in range(12))
    model = load(
        tmp_path,
        f"""g (float[1, 8, 32, 32] x) => (float[1, 2, 8, 8] y)
        {{ w = Conv<pads = [1, 1, 1, 1]>(x, W)  {branches}  s = Sum({names})  y = Conv(s, Y) }}""",
        W=(32, 8, 3, 3),
        Y=(2, 1, 1, 1),
        **{f"B{at}": (1, 32, 4, 4) for at in range(12)},
    )
    found = find_candidates(model)
    assert found.dropped > 0
    widths = {cut.boundary: crossing_bytes(model, cut) for cut in found.cuts}
    assert widths["s",] == 256  # one channel of 8 × 8


def test_efficientnet_is_offered_at_its_narrow_bottlenecks(real_model: Callable[[str], Path]) -> None:
    model = load_model(real_model("efficientnet-lite0"))
    model.shapes = concrete_shapes(model.source, {"input": (1, 3, 224, 224)})
    # Where the published architecture is narrow: channels and side after each stage of linear bottlenecks.
    stages = ((24, 56), (40, 28), (80, 14), (112, 14), (192, 7))
    offered = {crossing_bytes(model, cut) for cut in candidates(model) if len(cut.boundary) == 1}
    assert {4 * channels * side * side for channels, side in stages} <= offered
