"""Real processes over TLS: companions are restarted one after the other while two dozen callers send. No request fails,
every answer is right (against numpy here), and with a second companion the remote answers go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from scripts.callers import Callers
from scripts.pair import Pair
from split.tensor import Tensors

WIDTH, LAYERS = 256, 6
WORKERS = 24
DICE = np.random.default_rng(11)
MATRICES = [(DICE.standard_normal((WIDTH, WIDTH)) * np.sqrt(2 / WIDTH)).astype(np.float32) for _ in range(LAYERS)]


def by_numpy(x: np.ndarray) -> np.ndarray:
    """The model, in double precision."""
    value = x.astype(np.float64)
    for matrix in MATRICES:
        value = np.maximum(value @ matrix, 0.0)
    return value


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("rolling")
    path = folder / "models" / "layers" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    nodes, value = [], "x"
    for n in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"m{n}"]))
        value = "y" if n == LAYERS - 1 else f"r{n}"
        nodes.append(helper.make_node("Relu", [f"m{n}"], [value]))
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(matrix, f"w{n}") for n, matrix in enumerate(MATRICES)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with Pair(folder, folder / "models", companions=2) as pair:
        pair.start_agent(slowdown=1.0)
        yield pair


def draw(dice: np.random.Generator) -> Tensors:
    return {"x": dice.standard_normal((4, WIDTH)).astype(np.float32)}


@contextmanager
def calling(pair: Pair) -> Iterator[Callers]:
    """Two dozen callers; at the end every one of them has had answers only, and all of them were right."""
    with Callers(pair, "layers", draw, workers=WORKERS) as callers:
        yield callers
    assert callers.failures == []
    assert min(callers.counts) > 0
    for answer, inputs in callers.answers:
        expected = by_numpy(inputs["x"])
        assert np.abs(answer.outputs["y"] - expected).max() <= 1e-4 * np.abs(expected).max(), answer.plan


def test_companions_that_are_restarted_in_turn_under_load_fail_no_request(pair: Pair) -> None:
    with calling(pair) as callers:
        for _ in range(2):
            callers.until_remote()
            used = pair.companion_in_use()
            pair.stop_companion(used)
            callers.until_remote()  # by the other one, while this one is away
            assert pair.companion_in_use() != used
            pair.start_companion(used)


def test_an_only_companion_that_is_restarted_under_load_fails_no_request(pair: Pair) -> None:
    pair.stop_companion(1)
    try:
        with calling(pair) as callers:
            for _ in range(2):
                callers.until_remote()
                pair.stop_companion(0)
                pair.start_companion(0)
            callers.until_remote()
    finally:
        pair.start_companion(1)
