"""Which model inputs a tensor still shows: what `no-raw-input` must keep on the device.

A tensor shows an input until an operator has *mixed* it: a convolution, a matrix product, a recurrence, an attention, a
global pooling. Whatever else happens on the way (transposed, reshaped, cut, cast, scaled, quantised, looked up in a
table) can be undone with the model at hand. Operators that are not known here count as not mixing: a wrong guess then
costs a cut, never a secret. This is no promise that a mixed tensor cannot be inverted; that is what depth is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from split.graph.model import Model

_MIXING: Final = frozenset(
    (
        *("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv", "FusedConv", "NhwcConv"),
        *("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "Einsum", "QGemm", "FusedMatMul", "FusedGemm"),
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
        hidden = node.op in _MIXING or node.op in _SIZES_ONLY
        seen = frozenset() if hidden else frozenset[str]().union(*(shown.get(name, ()) for name in node.reads))
        for name in node.makes:
            shown[name] = seen
    return shown
