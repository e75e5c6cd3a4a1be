"""EfficientNet-Lite0 as ONNX, from the PyTorch checkpoint that a pinned package ships. Needs numpy and onnx, not torch.

The checkpoint is pickled, and a pickle can run anything: `read_checkpoint` lets it build ordered dicts and tensors, and
refuses every other name. Batch normalisation is folded into the convolutions; the padding is the `SAME` of the
original TensorFlow weights (Tan & Le, arXiv:1905.11946; the Lite variant has no squeeze-and-excite and uses ReLU6).
The file that comes out is the same byte for byte with the pinned onnx, so that its digest can be pinned too.
"""

from __future__ import annotations

import collections
import pickle
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Weights = dict[str, npt.NDArray[Any]]

LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
"""First object of a checkpoint in torch's format before 1.6: magic, protocol, system, state, storage keys, storages."""

STORAGE_DTYPES: Final[dict[str, np.dtype[Any]]] = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}
BATCH_NORM_EPSILON: Final = 1e-3
INPUT_SIDE: Final = 224


class Stage(NamedTuple):
    """One row of the network's table: `repeats` inverted residual blocks; only the first has the stride."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    channels_in: int
    channels_out: int


STAGES: Final = (
    Stage(1, 3, 1, 1, 32, 16),
    Stage(2, 3, 2, 6, 16, 24),
    Stage(2, 5, 2, 6, 24, 40),
    Stage(3, 3, 2, 6, 40, 80),
    Stage(3, 5, 1, 6, 80, 112),
    Stage(4, 5, 2, 6, 112, 192),
    Stage(1, 3, 1, 6, 192, 320),
)


class _Storage(NamedTuple):
    kind: str
    key: str


class _TensorView(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor_view(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
    return _TensorView(storage, offset, shape, strides)


class _CheckpointUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor_view
        if module == "torch" and name in STORAGE_DTYPES:
            return name
        raise pickle.UnpicklingError(f"the checkpoint asks for {module}.{name}, which a table of weights does not need")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        return _Storage(kind, key)


def read_checkpoint(path: Path) -> Weights:
    """All tensors of a checkpoint in torch's legacy format, by name; UnpicklingError for anything else in it."""
    with path.open("rb") as file:
        magic, _protocol, _system, state, keys = (_CheckpointUnpickler(file).load() for _ in range(5))
        if magic != LEGACY_MAGIC:
            raise pickle.UnpicklingError(f"{path.name} is no checkpoint in torch's legacy format")
        kinds = {view.storage.key: view.storage.kind for view in state.values()}
        storages = {key: _read_storage(file, STORAGE_DTYPES[kinds[key]]) for key in keys}
    return {name: _read_view(storages[view.storage.key], view) for name, view in state.items()}


def _read_storage(file: BinaryIO, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    (count,) = struct.unpack("<q", file.read(8))
    return np.frombuffer(file.read(count * dtype.itemsize), dtype)


def _read_view(storage: npt.NDArray[Any], view: _TensorView) -> npt.NDArray[Any]:
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    if min((view.offset, *view.strides), default=0) < 0 or last >= storage.size:
        raise pickle.UnpicklingError(f"a tensor of shape {view.shape} reaches past its storage of {storage.size}")
    strides = [stride * storage.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset :], view.shape, strides).copy()


class _Network:
    """The graph under construction. Nodes are named after what they make, numbered in order."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._count = 0

    def constant(self, name: str, value: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def numbered(self, op: str, inputs: list[str], kind: str, **attributes: Any) -> str:
        self._count += 1
        return self.node(op, inputs, f"{kind}_{self._count}", **attributes)

    def convolution(
        self, x: str, side: int, weight: str, norm: str, *, stride: int = 1, groups: int = 1, relu: bool = True
    ) -> tuple[str, int]:
        """Convolution with its batch normalisation folded in, then ReLU6; gives the output and its side in pixels."""
        kernel = self.weights[weight]
        gamma, beta, mean, variance = (
            self.weights[f"{norm}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
        folded = self.constant(weight, kernel * scale[:, None, None, None])
        bias = self.constant(f"{norm}.b", beta - mean * scale)

        size = kernel.shape[2]
        side_out = -(-side // stride)
        padding = max((side_out - 1) * stride + size - side, 0)
        before, after = padding // 2, padding - padding // 2
        y = self.numbered(
            "Conv",
            [x, folded, bias],
            "conv",
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=groups,
        )
        if relu:
            y = self.numbered("Clip", [y, "c0", "c6"], "relu6")
        return y, side_out

    def inverted_residual(self, x: str, side: int, prefix: str, stage: Stage, *, first: bool) -> tuple[str, int]:
        channels = stage.channels_in if first else stage.channels_out
        stride = stage.stride if first else 1
        y = x
        if stage.expansion != 1:
            y, side = self.convolution(y, side, f"{prefix}_expand_conv.weight", f"{prefix}_bn0")
        y, side = self.convolution(
            y,
            side,
            f"{prefix}_depthwise_conv.weight",
            f"{prefix}_bn1",
            stride=stride,
            groups=channels * stage.expansion,
        )
        y, side = self.convolution(y, side, f"{prefix}_project_conv.weight", f"{prefix}_bn2", relu=False)
        if stride == 1 and channels == stage.channels_out:
            y = self.numbered("Add", [y, x], "add")
        return y, side


def build(weights: Weights) -> onnx.ModelProto:
    """The network: input FP32 [N, 3, 224, 224], values (rgb − 127) / 128; output logits FP32 [N, 1000]."""
    net = _Network(weights)
    net.constant("c0", 0)
    net.constant("c6", 6)
    x, side = net.convolution("input", INPUT_SIDE, "_conv_stem.weight", "_bn0", stride=2)
    block = 0
    for stage in STAGES:
        for repeat in range(stage.repeats):
            x, side = net.inverted_residual(x, side, f"_blocks.{block}.", stage, first=repeat == 0)
            block += 1
    x, side = net.convolution(x, side, "_conv_head.weight", "_bn1")
    net.node("GlobalAveragePool", [x], "gap")
    # The nodes are called `gap`, `flat` and `fc` after the layers, their outputs `gap`, `feat` and `logits`.
    net.nodes.append(helper.make_node("Flatten", ["gap"], ["feat"], name="flat"))
    head = [net.constant("fc.w", weights["_fc.weight"]), net.constant("fc.b", weights["_fc.bias"])]
    net.nodes.append(helper.make_node("Gemm", ["feat", *head], ["logits"], name="fc", transB=1))
    graph = helper.make_graph(
        net.nodes,
        "efficientnet_lite0",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, INPUT_SIDE, INPUT_SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 1000])],
        net.initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def convert(checkpoint: Path, destination: Path) -> None:
    """Write the ONNX file for this checkpoint."""
    onnx.save(build(read_checkpoint(checkpoint)), destination)
