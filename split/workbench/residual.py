"""A residual sum beside the boundary of a tail, fused into its convolution as the runtime does it in the whole.

ONNX Runtime blocks from a convolution or pool on, so that the sum of a residual block whose input is the boundary stays
outside: out of the blocked layout, added, and back in. An identity pool (`optimise.hooked`) mends it only where the
channels fill whole blocks (24 or 40 channels do not, in blocks of 16). Here the optimised graph itself is edited: the
boundary lies there blocked already, for the convolution that begins the block.

    X → ReorderInput → x' → Conv … Conv → ReorderOutput → Add(·, X) → ReorderInput → o'
    X → ReorderInput → x' → Conv … Conv(·, sum = x') → o'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import onnx
from onnx import GraphProto, NodeProto

BLOCKED: Final = "com.microsoft.nchwc"
_SUM: Final = 3
"""Place among a blocked convolution's inputs: data, weights, bias, sum."""


def fuse_sums(graph: GraphProto) -> int:
    """Fuse every such sum in `graph`, an optimised tail, in place; how many there were."""
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[NodeProto]] = {value.name: [] for value in graph.output}
    outputs = set(readers)
    for node in graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            return 0  # a body may read any of it by name
        for name in node.input:
            readers.setdefault(name, []).append(node)
    channels = {
        value.name: value.type.tensor_type.shape.dim[1].dim_value
        for value in graph.input
        if len(value.type.tensor_type.shape.dim) == 4
    }
    fused = 0
    for add in [node for node in graph.node if node.op_type == "Add" and not node.domain]:
        for beside, boundary in (tuple(add.input), tuple(reversed(add.input))):
            out, back = makers.get(beside), readers.get(add.output[0], [])
            if boundary not in channels or out is None or len(back) != 1 or add.output[0] in outputs:
                continue
            blocked = next((node.output[0] for node in readers[boundary] if _is(node, "ReorderInput")), None)
            only = len(readers[beside]) == len(readers.get(out.input[0], [])) == 1 and beside not in outputs
            if blocked is None or not only or not _is(out, "ReorderOutput") or not _is(back[0], "ReorderInput"):
                continue
            last = makers[out.input[0]]
            same = _attributes(out).get("channels") == channels[boundary] > 0
            if same and _adds_nothing(last) and _keeps_size(last, blocked, makers):
                inputs = [*last.input, *[""] * (_SUM - len(last.input)), blocked]
                del last.input[:]
                last.input.extend(inputs)
                last.output[0] = back[0].output[0]
                for node in (out, add, back[0]):
                    graph.node.remove(node)
                fused += 1
                break
    return fused


def _is(node: NodeProto, op_type: str) -> bool:
    """One of the blocked layout, from or to NCHW."""
    return node.op_type == op_type and node.domain == BLOCKED and not _attributes(node).get("channels_last")


def _adds_nothing(node: NodeProto) -> bool:
    """A blocked convolution with nothing fused behind it yet."""
    return _is(node, "Conv") and len(node.input) <= _SUM and "activation" not in _attributes(node)


def _keeps_size(node: NodeProto, start: str, makers: Mapping[str, NodeProto]) -> bool:
    """Whether only blocked convolutions lie between `start` and what `node` makes, each as high and wide out as in: for
    every size of the input the sum is then one of equal shapes."""
    while True:
        if not _is(node, "Conv") or not _same_size(_attributes(node)):
            return False
        if node.input[0] == start:
            return True
        before = makers.get(node.input[0])
        if before is None:
            return False
        node = before


def _same_size(attributes: Mapping[str, Any]) -> bool:
    kernel, pads = attributes.get("kernel_shape"), attributes.get("pads")
    strides, dilations = attributes.get("strides", [1, 1]), attributes.get("dilations", [1, 1])
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or kernel is None or len(kernel) != 2:
        return False
    pads = pads or [0, 0, 0, 0]
    return list(strides) == [1, 1] and all(
        pads[axis] + pads[axis + 2] == dilations[axis] * (kernel[axis] - 1) for axis in (0, 1)
    )


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
