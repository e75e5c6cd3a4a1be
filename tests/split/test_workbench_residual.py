"""Tails that begin with a residual block: the sum goes into the convolution and nothing changes but the time."""

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from split.runtime.segment import OrtEngine, OrtSegment
from split.workbench.residual import fuse_sums

CHANNELS = 24
"""No whole blocks of 16."""
CONV = "Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"
BLOCK = f"c = {CONV} (t, w) a = Relu (c) d = {CONV} (a, w) u = Add (d, t) v = {CONV} (u, w)"


def optimised(folder: Path, body: str, outputs: str = "float[N,24,H,W] v") -> tuple[ModelProto, OrtSegment]:
    """The tail as this machine's runtime lays it down, and as it was; skips where nothing is blocked here."""
    text = f'<ir_version: 8, opset_import: ["" : 17]> tail (float[N,{CHANNELS},H,W] t) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(4).standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 15
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    onnx.save(model, folder / "tail.onnx")
    plain = OrtEngine().optimise(folder / "tail.onnx", folder / "made.onnx", weights="made.bin", threads=1)
    made = onnx.load(folder / "made.onnx", load_external_data=False)
    if not any(node.op_type == "ReorderInput" for node in made.graph.node):
        pytest.skip("this machine's runtime has no blocked layout")
    return made, plain


def kinds(made: ModelProto) -> list[str]:
    return [node.op_type for node in made.graph.node]


@pytest.mark.parametrize("add", ["Add (d, t)", "Add (t, d)"])
def test_the_sum_of_the_first_block_is_fused_and_changes_no_number_at_any_size(tmp_path: Path, add: str) -> None:
    made, plain = optimised(tmp_path, BLOCK.replace("Add (d, t)", add))
    assert kinds(made).count("Add") == 1
    reorders = sum(kind.startswith("Reorder") for kind in kinds(made))
    assert fuse_sums(made.graph) == 1
    assert kinds(made).count("Add") == 0
    assert sum(kind.startswith("Reorder") for kind in kinds(made)) == reorders - 2
    onnx.save(made, tmp_path / "fused.onnx")
    fused = OrtEngine().open_optimised(tmp_path / "fused.onnx", threads=1, prepack=False)
    random = np.random.default_rng(5)
    for shape in ((1, CHANNELS, 14, 14), (3, CHANNELS, 5, 9), (1, CHANNELS, 1, 1)):
        x = random.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(fused.run({"t": x})["v"], plain.run({"t": x})["v"], rtol=1e-5, atol=1e-5)
    x = random.standard_normal((1, CHANNELS, 14, 14)).astype(np.float32)
    x[0, 3, 2, :3] = [np.nan, np.inf, -np.inf]
    np.testing.assert_allclose(fused.run({"t": x})["v"], plain.run({"t": x})["v"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        # the sum, or what is summed, is an answer, too
        (BLOCK, "float[N,24,H,W] v, float[N,24,H,W] u"),
        (BLOCK, "float[N,24,H,W] v, float[N,24,H,W] d"),
        # what is summed is one pixel that is spread over the boundary
        (
            "c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (t, w) u = Add (c, t)"
            f" v = {CONV} (u, w)",
            "float[N,24,H,W] v",
        ),
        # something else is done to the sum first
        (BLOCK.replace("u = Add (d, t)", "s = Add (d, t) u = Sigmoid (s)"), "float[N,24,H,W] v"),
        # what is summed was bounded before
        (BLOCK.replace("u = Add (d, t)", "r = Relu (d) u = Add (r, t)"), "float[N,24,H,W] v"),
    ],
)
def test_no_other_sum_is_touched(tmp_path: Path, body: str, outputs: str) -> None:
    made, _ = optimised(tmp_path, body, outputs)
    before = made.SerializeToString()
    assert fuse_sums(made.graph) == 0
    assert made.SerializeToString() == before
