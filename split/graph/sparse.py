"""Sparse constants made dense, as the runtime does when it opens a model: onnx-ir has no words for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from split.errors import InvalidModel


def make_dense(proto: onnx.ModelProto, path: Path) -> None:
    """Replace sparse initializers and sparse values of Constant nodes by dense ones, at any depth and in functions.

    InvalidModel when one names places that it does not have.
    """
    graphs, nodes = [proto.graph], [node for function in proto.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            graph.initializer.extend(_dense(sparse, path) for sparse in graph.sparse_initializer)
            del graph.sparse_initializer[:]
            nodes.extend(graph.node)
            continue
        for attribute in nodes.pop().attribute:
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
                attribute.t.CopyFrom(_dense(attribute.sparse_tensor, path))
                attribute.ClearField("sparse_tensor")
                attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
            if attribute.HasField("g"):
                graphs.append(attribute.g)
            graphs.extend(attribute.graphs)


def _dense(sparse: onnx.SparseTensorProto, path: Path) -> onnx.TensorProto:
    """Indices are places in the flattened tensor, or a row of coordinates for each value (ONNX, SparseTensorProto)."""
    values = numpy_helper.to_array(sparse.values, str(path.parent))
    indices = numpy_helper.to_array(sparse.indices, str(path.parent))
    dense = np.zeros(tuple(sparse.dims), dtype=values.dtype)
    try:
        if indices.ndim == 2:
            dense[tuple(indices.T)] = values
        else:
            dense.reshape(-1)[indices] = values
    except (IndexError, ValueError) as error:
        raise InvalidModel(f"{path}: the sparse constant {sparse.values.name!r} is damaged: {error}") from None
    return numpy_helper.from_array(dense, sparse.values.name)
