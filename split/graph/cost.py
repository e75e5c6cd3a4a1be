"""What a node costs, estimated: enough to say which share of a model's compute lies before a cut, and no more.

Counts are floating-point operations (a multiply and an add are two); measured times live in `split.profiles.measured`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import onnx_ir as ir

from split.graph.model import Model, bodies

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

FLOPS_PER_ELEMENT: Final = 4.0
"""For everything that only moves data, per element read or written: one operation per byte of a float. Most such nodes
fuse into their neighbours, so they must weigh little beside a convolution."""


def node_flops(model: Model, shapes: Shapes | None = None) -> tuple[float, ...]:
    """Estimated operations of each node of `model.nodes`, at `shapes` or `model.shapes` (unknown dims count 1)."""
    known = _AllShapes(model.shapes if shapes is None else shapes)
    return tuple(_flops(node.source, known) for node in model.nodes)


class _AllShapes(dict[str, Shape]):
    """Shapes by name, looked up as they are needed: real ones first, then declared ones with 1 for unknown dims."""

    def of(self, value: ir.Value | None) -> Shape:
        if value is None or not value.name:
            return ()
        known = self.get(value.name)
        if known is None:
            declared = value.shape if value.shape is not None else getattr(value.const_value, "shape", ())
            known = self[value.name] = tuple(d if isinstance(d, int) and d >= 0 else 1 for d in declared)
        return known


def _flops(node: ir.Node, shapes: _AllShapes) -> float:
    inner = sum(_flops(child, shapes) for body in bodies(node) for child in body)
    count = _COUNTS.get(node.op_type)
    try:
        return inner + (count or _moved)(node, shapes)
    except (IndexError, ZeroDivisionError):
        # Operands of unknown rank: what is known of their size must do.
        return inner + _moved(node, shapes)


def _moved(node: ir.Node, shapes: _AllShapes) -> float:
    values = (*node.inputs, *node.outputs)
    return FLOPS_PER_ELEMENT * sum(math.prod(shapes.of(v)) for v in values if v is not None and v.name)


def _conv(node: ir.Node, shapes: _AllShapes) -> float:
    """2 · |Y| · (C_in / group · kernel), the weight being [M, C_in / group, *kernel] (ONNX Conv)."""
    weight = shapes.of(node.inputs[_WEIGHT_AT.get(node.op_type, 1)])
    return 2.0 * math.prod(shapes.of(node.outputs[0])) * math.prod(weight[1:])


def _conv_transpose(node: ir.Node, shapes: _AllShapes) -> float:
    """2 · |X| · (M / group · kernel), the weight being [C, M / group, *kernel] (ONNX ConvTranspose)."""
    return 2.0 * math.prod(shapes.of(node.inputs[0])) * math.prod(shapes.of(node.inputs[1])[1:])


def _matmul(node: ir.Node, shapes: _AllShapes) -> float:
    """2 · |Y| · K, K the last dim of A (numpy.matmul)."""
    return 2.0 * math.prod(shapes.of(node.outputs[0])) * shapes.of(node.inputs[0])[-1]


def _gemm(node: ir.Node, shapes: _AllShapes) -> float:
    """2 · M · N · K (BLAS), K the dim of A that is not in Y."""
    transposed = node.attributes.get_int("transA", 0)
    return 2.0 * math.prod(shapes.of(node.outputs[0])) * shapes.of(node.inputs[0])[0 if transposed else 1]


def _recurrent(node: ir.Node, shapes: _AllShapes) -> float:
    """2 · steps · batch · (|W| + |R|), W and R holding all gates and directions (ONNX RNN, GRU, LSTM)."""
    steps_and_batch = math.prod(shapes.of(node.inputs[0])[:2])
    return 2.0 * steps_and_batch * (math.prod(shapes.of(node.inputs[1])) + math.prod(shapes.of(node.inputs[2])))


_WEIGHT_AT: Final[Mapping[str, int]] = {"QLinearConv": 3}

_COUNTS: Final[Mapping[str, Callable[[ir.Node, _AllShapes], float]]] = {
    "Conv": _conv,
    "ConvInteger": _conv,
    "FusedConv": _conv,
    "QLinearConv": _conv,
    "ConvTranspose": _conv_transpose,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "FusedMatMul": _matmul,
    "Gemm": _gemm,
    "RNN": _recurrent,
    "GRU": _recurrent,
    "LSTM": _recurrent,
}
