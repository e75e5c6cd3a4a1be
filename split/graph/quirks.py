"""Values that must not become the input of a model, because of what onnxruntime's optimiser makes of their readers.

Found by `scripts/fuzz`, on onnxruntime 1.32; the tail would fail to open, or answer wrongly without a word.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from split.graph.model import Model, bodies, captured_by


def misread(model: Model) -> Mapping[str, str]:
    """Tensor → why it may not cross a boundary, as a sentence."""
    found: dict[str, str] = {}
    captured = {str(value.name) for node in model.nodes for value in _captured(node.source)}
    for node in model.nodes:
        source = node.source.inputs[0] if node.source.inputs else None
        if source is None or source.name not in model.values:
            continue
        name = str(source.name)
        if node.op == "Dropout" and any(_computed(value) for value in node.source.inputs[1:]):
            # Left out, it is replaced by its one input that a node makes: the ratio, where the data is a model input.
            found[name] = f"tensor {name!r} goes into a Dropout, which the runtime mistakes at the start of a model"
        elif node.op == "Cast" and source.dtype == ir.DataType.FLOAT16 and captured.intersection(node.makes):
            # Left out, it is forgotten in the bodies that capture what it makes.
            found[name] = f"tensor {name!r} goes through a Cast into the body of a node, where the runtime loses it"
    return {name: f"{why}; cut after it" for name, why in found.items()}


def _computed(value: ir.Value | None) -> bool:
    """Whether a node makes it while the model runs (what a Constant holds is an initializer to the runtime)."""
    maker = value.producer() if value is not None else None
    return maker is not None and maker.op_type != "Constant"


def _captured(node: ir.Node) -> list[ir.Value]:
    """What the bodies of a node read, whether or not it is an input of the node, too."""
    return [value for body in bodies(node) for value in captured_by(body)]
