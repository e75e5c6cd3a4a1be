"""Types and shapes of a graph's values, as far as ONNX shape inference tells them.

Inference runs on a copy without weights, so it costs the same for a model of any size; the file's own claims about
inner values are believed only where inference has none (they may be stale). What it does not tell, a dry run shows:
that is the business of the workbench.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

log = logging.getLogger(__name__)

WEIGHT_BYTES_MIN: Final = 1024
"""From here on a constant tensor is a weight: stored once, shared by all parts."""


def fill_in(source: ir.Model, path: Path) -> str:
    """Fill in types and shapes; returns why there can be no cuts when inference lost the graph, else ''."""
    before = len(source.graph)
    given = {str(v.name): (v.type, v.shape) for node in source.graph for v in node.outputs if v.name}
    public = {str(v.name) for v in source.graph.outputs}
    for hints in (False, True):
        try:
            proto = infer_shapes(source, hints=hints)
        except Exception as error:  # the C++ inference raises whatever it meets
            log.info("%s: shape inference gave up: %s", path, error)
            continue
        if len(proto.graph.node) != before:
            reason = f"shape inference turned {before} nodes into {len(proto.graph.node)}"
            log.warning("%s: %s; the original graph is kept and not cut", path, reason)
            return reason
        found = {info.name: info.type for info in (*proto.graph.value_info, *proto.graph.output)}
        missing = False
        for node in source.graph:
            for value in node.outputs:
                name = str(value.name)
                if name not in given or (hints and not is_unknown(value)):
                    continue
                kind = found.get(name)
                if kind is not None and kind.WhichOneof("value") is not None:
                    value.type = ir.serde.deserialize_type_proto_for_type(kind)
                    shape = ir.serde.deserialize_type_proto_for_shape(kind)
                    value.shape = _tidy(shape) if shape is not None else None
                elif name not in public and not hints:
                    value.type, value.shape = given[name]
                missing |= is_unknown(value)
        if not missing:
            break
    return ""


def infer_shapes(source: ir.Model, *, hints: bool) -> onnx.ModelProto:
    """ONNX shape inference on a copy without weights.

    `hints`: let the file's own value_info in (it may be stale). Raises whatever the C++ inference raises.
    """
    proto = _without_weights(source)
    if not hints:
        del proto.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(proto, data_prop=True)


def concrete_shapes(source: ir.Model, at: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Shapes of all values when the inputs have the shapes in `at`, as far as shape inference tells; what it does not
    tell is missing."""
    return shape_teller(source)(at)


def shape_teller(source: ir.Model) -> Callable[[Mapping[str, Sequence[int]]], dict[str, tuple[int, ...]]]:
    """`concrete_shapes` of a model that does not change meanwhile, for many sizes: it is serialised once, which takes
    several times as long as inference. Each call must name the same inputs."""
    proto = _without_weights(source)
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")

    def tell(at: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        for value in proto.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, at.get(value.name, ()), strict=False):
                dim.dim_value = size
        try:
            told = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        except Exception as error:  # the C++ inference raises whatever it meets
            log.info("no shapes at %s: %s", dict(at), error)
            return {}
        shapes: dict[str, tuple[int, ...]] = {}
        for info in (*told.graph.value_info, *told.graph.input, *told.graph.output):
            shape = info.type.tensor_type.shape
            if info.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in shape.dim):
                shapes[info.name] = tuple(dim.dim_value for dim in shape.dim)
        return shapes

    return tell


def is_weight(tensor: ir.TensorProtocol) -> bool:
    """True for tensors that are stored once for all parts of a model."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes >= WEIGHT_BYTES_MIN


def is_unknown(value: ir.Value) -> bool:
    """True when the element type or the rank of a value is not known."""
    if value.type is None:
        return True
    if not isinstance(value.type, ir.TensorType):
        return False
    return value.dtype in {None, ir.DataType.UNDEFINED} or value.shape is None


def _without_weights(source: ir.Model) -> onnx.ModelProto:
    """The model as a message whose weights are named but not there."""
    kept: list[tuple[ir.Value, ir.TensorProtocol]] = []
    try:
        for graph in source.graphs():
            for value in graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and is_weight(tensor):
                    kept.append((value, tensor))
                    value.const_value = ir.ExternalTensor(
                        "weights",
                        0,
                        tensor.nbytes,
                        tensor.dtype,
                        shape=ir.Shape(tensor.shape.numpy()),
                        name=str(value.name),
                    )
        return ir.serde.serialize_model(source)
    finally:
        for value, tensor in kept:
            value.const_value = tensor


def _tidy(shape: ir.Shape) -> ir.Shape:
    """Without the names that inference makes up for dims it does not know."""
    dims: list[int | str | None] = []
    for dim in shape:
        name = dim if isinstance(dim, int) else dim.value
        dims.append(None if isinstance(name, str) and name.startswith("unk__") else name)
    return ir.Shape(dims)
