"""Two networks of the usual size with seeded random weights: ResNet-50 (102 MB) and a ViT (12 layers of 384, 87 MB).

What they compute means nothing; how much memory and time they take is that of the real ones (He et al.,
arXiv:1512.03385; Dosovitskiy et al., arXiv:2010.11929, the small variant with 16 × 16 patches).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from split.tensor import Array

STAGES: Final = ((64, 3), (128, 4), (256, 6), (512, 3))
"""ResNet-50: (width, blocks)."""
LAYERS: Final = 12
WIDTH: Final = 384
HEADS: Final = 6
PATCH: Final = 16
SIDE: Final = 224


class _Net:
    """A graph that grows node by node; every method returns the name of the tensor it made."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        made = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [made], name=f"node_{made}", **attributes))
        return made

    def constant(self, value: Array) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        return self.constant((self._random.standard_normal(shape) * (2 / fan_in) ** 0.5).astype(np.float32))

    def vector(self, size: int, value: float) -> str:
        return self.constant((value + 0.1 * self._random.standard_normal(size)).astype(np.float32))

    def conv(self, x: str, channels: int, filters: int, kernel: int, stride: int = 1) -> str:
        """Convolution and batch normalisation."""
        weight = self.weight(filters, channels, kernel, kernel, fan_in=channels * kernel * kernel)
        pads = [kernel // 2] * 4
        made = self.add("Conv", x, weight, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
        variance = self.constant(self._random.uniform(0.8, 1.2, filters).astype(np.float32))
        scale, shift, mean = self.vector(filters, 0.7), self.vector(filters, 0.0), self.vector(filters, 0.0)
        return self.add("BatchNormalization", made, scale, shift, mean, variance)

    def linear(self, x: str, inside: int, outside: int) -> str:
        weight = self.constant((self._random.standard_normal((inside, outside)) * inside**-0.5).astype(np.float32))
        return self.add("Add", self.add("MatMul", x, weight), self.vector(outside, 0.0))

    def normalised(self, x: str) -> str:
        return self.add("LayerNormalization", x, self.vector(WIDTH, 1.0), self.vector(WIDTH, 0.0), axis=-1)

    def shaped(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.constant(np.asarray(shape, np.int64)))

    def save(self, path: Path, output: str) -> None:
        self.nodes.append(helper.make_node("Identity", [output], ["logits"], name="node_logits"))
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 1000])
        graph = helper.make_graph(self.nodes, path.parent.name, [image], [logits], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, path)


def resnet50(path: Path) -> None:
    net = _Net(50)
    x = net.add("Relu", net.conv("image", 3, 64, 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            y = net.add("Relu", net.conv(x, channels, width, 1))
            y = net.add("Relu", net.conv(y, width, width, 3, stride))
            y = net.conv(y, width, 4 * width, 1)
            beside = net.conv(x, channels, 4 * width, 1, stride) if block == 0 else x
            x = net.add("Relu", net.add("Add", y, beside))
            channels = 4 * width
    x = net.add("Flatten", net.add("GlobalAveragePool", x))
    net.save(path, net.linear(x, channels, 1000))


def vit(path: Path) -> None:
    net = _Net(16)
    tokens, depth = (SIDE // PATCH) ** 2, WIDTH // HEADS
    patches = net.add(
        "Conv",
        "image",
        net.weight(WIDTH, 3, PATCH, PATCH, fan_in=3 * PATCH**2),
        kernel_shape=[PATCH] * 2,
        strides=[PATCH] * 2,
    )
    x = net.add("Transpose", net.shaped(patches, 1, WIDTH, tokens), perm=[0, 2, 1])
    x = net.add("Add", x, net.weight(1, tokens, WIDTH, fan_in=WIDTH))
    scale = net.constant(np.asarray(depth**-0.5, np.float32))
    half, one, root = (net.constant(np.asarray(v, np.float32)) for v in (0.5, 1.0, 2**0.5))
    for _ in range(LAYERS):
        inside = net.normalised(x)
        q, k, v = (net.shaped(net.linear(inside, WIDTH, WIDTH), 1, tokens, HEADS, depth) for _ in range(3))
        q, v = (net.add("Transpose", t, perm=[0, 2, 1, 3]) for t in (q, v))
        k = net.add("Transpose", k, perm=[0, 2, 3, 1])
        seen = net.add("Softmax", net.add("Mul", net.add("MatMul", q, k), scale), axis=-1)
        mixed = net.add("Transpose", net.add("MatMul", seen, v), perm=[0, 2, 1, 3])
        x = net.add("Add", x, net.linear(net.shaped(mixed, 1, tokens, WIDTH), WIDTH, WIDTH))
        wide = net.linear(net.normalised(x), WIDTH, 4 * WIDTH)
        gate = net.add("Add", net.add("Erf", net.add("Div", wide, root)), one)
        x = net.add("Add", x, net.linear(net.add("Mul", net.add("Mul", wide, gate), half), 4 * WIDTH, WIDTH))
    x = net.add("ReduceMean", net.normalised(x), axes=[1], keepdims=0)
    net.save(path, net.linear(x, WIDTH, 1000))


NETS: Final = {"resnet50": resnet50, "vit": vit}


def net_path(name: str, folder: Path) -> Path:
    """The model file of that name below `folder`, written at the first call."""
    path = folder / name / "1" / "model.onnx"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name("fresh.onnx")
        NETS[name](fresh)
        fresh.replace(path)
    return path
