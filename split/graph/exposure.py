"""Which model inputs a tensor still shows: what `no-raw-input` must keep on the device.

A tensor shows an input until an operator has *mixed* it: a convolution, a matrix product, a recurrence, an attention, a
global pooling. Whatever else happens on the way (transposed, reshaped, cut, cast, scaled, quantised, looked up in a
table) can be undone with the model at hand. Operators that are not known here count as not mixing: a wrong guess then
costs a cut, never a secret. This is no promise that a mixed tensor cannot be inverted; that is what depth is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir

from split.graph.model import GraphNode, Model

_WEIGHT_AT: Final[Mapping[str, int]] = {"Conv": 1, "ConvInteger": 1, "FusedConv": 1, "NhwcConv": 1, "QLinearConv": 3}
_MIXING: Final = frozenset(
    (
        *(*_WEIGHT_AT, "ConvTranspose", "DeformConv"),
        *("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm", "FusedMatMul", "FusedGemm"),
        *("MatMulNBits", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
        *("RNN", "GRU", "LSTM", "DynamicQuantizeLSTM"),
        *("Attention", "QAttention", "MultiHeadAttention", "GroupQueryAttention"),
        *("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"),
    )
)
_SIZES_ONLY: Final = frozenset(("Shape", "Size"))
"""Their outputs tell an input's dims, which every frame tells anyway, and nothing of its values."""


def shown_inputs(model: Model) -> Mapping[str, frozenset[str]]:
    """Activation or model input → the model inputs it shows."""
    shown = {spec.name: frozenset((spec.name,)) for spec in model.inputs}
    for node in model.nodes:
        hidden = node.op in _SIZES_ONLY or _mixes(node)
        seen = frozenset() if hidden else frozenset[str]().union(*(shown.get(name, ()) for name in node.reads))
        for name in node.makes:
            shown[name] = seen
    return shown


def _mixes(node: GraphNode) -> bool:
    """Whether each value it makes is a sum over several that it reads."""
    op = node.op.removeprefix("com.microsoft.")
    if op == "Einsum":
        return _sums_products(node.source.attributes.get_string("equation", ""))
    return op in _MIXING and not (op in _WEIGHT_AT and _scales(node.source.inputs[_WEIGHT_AT[op] :]))


def _sums_products(equation: str) -> bool:
    """Whether an Einsum is a product of matrices, and not a transpose, a diagonal, a scaling or a plain sum."""
    given, arrow, made = equation.replace(" ", "").replace(".", "").partition("->")
    labels = given.replace(",", "")
    kept = made if arrow else [label for label in labels if labels.count(label) == 1]
    return "," in given and not set(labels) <= set(kept)


def _scales(weights: Sequence[ir.Value | None]) -> bool:
    """Whether a convolution takes each value alone, its first weight being [outputs, inputs of each, *kernel]."""
    shape = weights[0].shape if weights and weights[0] is not None else None
    return shape is None or all(dim == 1 for dim in list(shape)[1:])
