"""A network whose batch is open and whose rows do not depend on each other: convolutions with two narrow waists.

Seeded random weights; what it computes means nothing, how long its halves take and what crosses between them do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE: Final = 64
WIDTH: Final = 32
WAIST: Final = 8
"""Channels at half the side: 32 KB a row."""
DEPTHS: Final = (20, 70, 20)
"""Convolutions before the first waist, between the two, after the second: each 38 million multiply-adds a row. Cut at
the first the tail is the longer half, at the second the head."""


def write_tower(path: Path, *, width: int = WIDTH) -> None:
    """`width`: channels at full side, twice as many at half; the time goes with its square, the waists stay."""
    dice = np.random.default_rng(17)
    nodes: list[Any] = []
    weights: list[Any] = []

    def conv(x: str, inside: int, outside: int, stride: int = 1) -> str:
        made, weight = f"conv_{len(nodes)}", f"weight_{len(weights)}"
        values = dice.standard_normal((outside, inside, 3, 3)) * (2 / (9 * inside)) ** 0.5
        weights.append(numpy_helper.from_array(values.astype(np.float32), weight))
        nodes.append(helper.make_node("Conv", [x, weight], [made], strides=[stride] * 2, pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [made], [f"{made}_relu"]))
        return f"{made}_relu"

    def wide(x: str, depth: int) -> str:
        x = conv(x, WAIST, 2 * width)
        for _ in range(depth):
            x = conv(x, 2 * width, 2 * width)
        return x

    x = conv("image", 3, width)
    for _ in range(DEPTHS[0]):
        x = conv(x, width, width)
    x = conv(x, width, WAIST, stride=2)
    x = wide(x, DEPTHS[1])
    x = conv(x, 2 * width, WAIST)
    x = wide(x, DEPTHS[2])
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["scores"]))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 2 * width])
    graph = helper.make_graph(nodes, "tower", [image], [scores], weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
