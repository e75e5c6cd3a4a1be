"""head ∘ tail = whole on random models; `scripts/fuzz cuts` is the same with any number of them and any seed."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest

from scripts.fuzzing import cuts
from scripts.fuzzing.cuts import Tally, judge
from scripts.fuzzing.graphs import NODES_MIN, RandomGraph, random_graph
from scripts.fuzzing.run import fuzz_cuts
from scripts.fuzzing.shrink import smaller
from split.graph.cuts import Cut
from split.graph.model import Model

SEED = 20261130
GRAPHS = 300


def test_the_halves_of_random_models_are_their_whole() -> None:
    tally = fuzz_cuts(SEED, graphs=GRAPHS, cuts_max=8)
    wrong = "\n\n".join(
        f"scripts/fuzz cuts --graphs 1 --seed {failure.seed}: cut {failure.cut} at {failure.boundary}: {failure.why}\n"
        f"{failure.text}"
        for failure in tally.wrong[:3]
    )
    assert not tally.wrong, wrong
    assert tally.graphs == GRAPHS
    assert tally.cuts >= 5 * GRAPHS
    assert tally.usable_ratio >= 0.85
    assert tally.sensitive <= 0.02 * GRAPHS
    assert tally.rounded + tally.unopened <= 0.005 * tally.cuts
    assert tally.refusals


def test_a_seed_always_gives_the_same_model() -> None:
    for seed in (1, 2, 3):
        first, second = random_graph(seed), random_graph(seed)
        assert first.proto.SerializeToString(deterministic=True) == second.proto.SerializeToString(deterministic=True)
        assert len(first.proto.graph.node) >= NODES_MIN
        for mine, yours in zip(first.feeds, second.feeds, strict=True):
            assert mine.keys() == yours.keys()
            for name, array in mine.items():
                np.testing.assert_array_equal(array, yours[name], strict=True)


def test_the_models_are_of_every_kind_the_standard_knows() -> None:
    protos = [random_graph(seed).proto for seed in range(400)]
    ops = {f"{node.domain}{node.op_type}" for proto in protos for node in proto.graph.node}
    assert ops >= {
        *("If", "Loop", "Scan", "LSTM", "Shape", "NonZero", "Reshape", "Split", "TopK", "Optional", "SplitToSequence"),
        *("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "RandomUniformLike", "localBend"),
        *("Constant", "Identity", "Cast", "Dropout", "com.microsoftGelu"),
    }
    opsets = {entry.version for proto in protos for entry in proto.opset_import if not entry.domain}
    assert opsets == set(range(7, onnx.defs.onnx_opset_version() + 1))
    inputs = [[value.name for value in proto.graph.input] for proto in protos]
    weights = [{tensor.name for tensor in proto.graph.initializer} for proto in protos]
    assert any(set(names) & known for names, known in zip(inputs, weights, strict=True))
    assert any("N" in {dim.dim_param for dim in p.graph.input[0].type.tensor_type.shape.dim} for p in protos)


def test_a_loop_of_no_rounds_whose_rows_have_other_dims_without_optimisations_is_cut_right_with_them(
    tmp_path: Path,
) -> None:
    judge(random_graph(501019), tmp_path, tally := Tally(), cuts_max=20)
    assert (tally.graphs, tally.reshaped, tally.sensitive, tally.rejected) == (1, 1, 0, 0)
    assert tally.cuts >= 10
    assert not tally.wrong


def test_a_graph_that_the_runtimes_optimiser_misreads_is_no_graph(tmp_path: Path) -> None:
    judge(random_graph(900918), tmp_path, tally := Tally(), cuts_max=20)  # a Dropout replaced by its ratio
    assert (tally.graphs, tally.rejected) == (0, 1)


def test_a_cut_that_loses_something_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = cuts.write_parts

    def forgetful(model: Model, cut: Cut, head: Path, tail: Path) -> None:
        right(model, cut, head, tail)
        if tail.exists():
            proto = onnx.load(tail)
            for node in proto.graph.node:
                node.op_type = "Identity" if node.op_type == "Neg" else node.op_type
            onnx.save(proto, tail)

    monkeypatch.setattr(cuts, "write_parts", forgetful)
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { a = Abs(x) y = Neg(a) }'
    graph = RandomGraph(seed=0, proto=onnx.parser.parse_model(text), feeds=({"x": np.float32([1, 2])},))
    tally = Tally()
    judge(graph, tmp_path, tally, cuts_max=8)
    assert any("relative difference of 2" in failure.why for failure in tally.wrong)

    for seed in itertools.count(1):
        judge(random_graph(seed), tmp_path, tally := Tally(), cuts_max=20)
        if any("relative difference" in failure.why for failure in tally.wrong):
            break
    failure = next(failure for failure in tally.wrong if "relative difference" in failure.why)
    assert len(smaller(failure).text) <= len(failure.text)
    assert smaller(failure).seed == failure.seed
