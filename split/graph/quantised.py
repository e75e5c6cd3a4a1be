"""Where a quantised model stays whole: between a DequantizeLinear, the operator that reads it, and its QuantizeLinear.

A runtime fuses such a group into one integer kernel. Parted, each side computes in floats, and what lies near the
middle of two steps is rounded the other way: a whole step off, a hundredth of the range. The quantised tensors at both
ends of a group are four times smaller and exact: that is where to cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from split.graph.model import Model

_QUANTISE: Final = frozenset(("QuantizeLinear", "com.microsoft.QuantizeLinear"))
_DEQUANTISE: Final = frozenset(("DequantizeLinear", "com.microsoft.DequantizeLinear"))


_INTEGER: Final = ("Integer", "QLinear", "uantize", "QGemm", "QAttention", "MatMulNBits")
"""Parts of the names of operators that multiply integers, or that the runtime fuses into one that does."""


def computes_in_integers(model: Model) -> bool:
    """Whether any operator, in bodies and functions too, multiplies integers: kernels for that need not agree between
    machines."""
    graphs = (*model.source.graphs(), *model.source.functions.values())
    return any(part in node.op_type for graph in graphs for node in graph for part in _INTEGER)


def inside_groups(model: Model) -> Mapping[str, str]:
    """Tensor inside of a group → why it may not cross a boundary, as a sentence."""
    dequantised = {
        str(v.name) for node in model.constant_nodes if node.op_type == "DequantizeLinear" for v in node.outputs
    }
    dequantised.update(name for node in model.nodes if node.op in _DEQUANTISE for name in node.makes)
    quantised = {name for node in model.nodes if node.op in _QUANTISE for name in node.reads}
    found: dict[str, str] = {}
    for node in model.nodes:
        if node.op in _QUANTISE | _DEQUANTISE:
            continue
        given = [str(v.name) for v in node.source.inputs if v is not None and v.name in dequantised]
        requantised = [name for name in node.makes if name in quantised]
        if given and (len(given) > 1 or requantised):
            for name in (*given, *requantised):
                found[name] = f"tensor {name!r} lies between {node.op} and its quantisation; cut at a quantised tensor"
    return found
