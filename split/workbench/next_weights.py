"""How much each channel of what crosses a cut matters to the layers that read it, from their weights alone: nothing is
run. It stands for `sensitivity.py` where the tail is too slow to be asked.

A layer y = Σ W_k x over its kernel's positions k turns noise that is independent from place to place, of covariance N
across channels, into noise of the power tr(G N), summed over y: G = Σ W_kᵀ W_k. With G for M, a direction across
channels that no such layer looks at costs (nearly) no bits. What comes after these layers is not known: all that they
make counts alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from split.graph.cuts import Cut
from split.graph.model import GraphNode, Model
from split.tensor import Array, TensorSpec

_LIKE_IDENTITY: Final = frozenset(
    ("Identity", "Relu", "LeakyRelu", "PRelu", "Clip", "Elu", "HardSwish", "Gelu", "Mish", "Swish")
)
"""Of their first input, element by element: a slope near 1 where they are open, and counted as such everywhere."""

_GATES: Final = frozenset(("Sigmoid", "HardSigmoid"))
"""A value times one of these of itself is an activation, too."""


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    """A value that the boundary's channels are in."""

    name: str
    axis: int
    """Of channels."""
    places: Array
    """INT [channels]: where each of the boundary's is along it."""
    scale: Array
    """FP64 [channels]: what each was multiplied by."""


def weights_gram(model: Model, cut: Cut, name: str, axis: int) -> Array | None:
    """G of the tensor `name` at the boundary of `cut`, whose channels are on `axis`: FP64 [channels, channels], the sum
    over all layers of the tail that read it; None where one of them is none of these, or has no constant weights, or
    where it is one of the model's outputs.

    Layers: Conv (any kernel, groups, strides: fewer places read, less weight), Gemm and MatMul with a constant second
    operand. On the way to them, each as if its slope were 1: `_LIKE_IDENTITY`, Cast, Transpose, a sum with something of
    the same shape (the way round a residual block) or a constant, a product with a gate of itself (SiLU); with its own
    factors: BatchNormalization, and Mul by a constant for each channel; Concat. A value reached twice counts once.
    `model.shapes` must be known (`settle`).
    """
    readers: dict[str, list[GraphNode]] = {}
    gates: dict[str, str] = {}
    for node in model.nodes:
        if not cut.mask >> node.bit & 1:
            for read in node.reads:
                readers.setdefault(read, []).append(node)
            if node.op in _GATES and node.makes[0] not in model.output_names:
                gates[node.makes[0]] = node.reads[0]
    channels = model.shapes[name][axis]
    waiting = [_Reached(name, axis, np.arange(channels), np.ones(channels))]
    reached, total = {name}, np.zeros((channels, channels))
    while waiting:
        value = waiting.pop()
        if value.name in model.output_names:
            return None
        for node in readers.get(value.name, ()):
            if [given.name if given is not None else "" for given in node.source.inputs].count(value.name) != 1:
                return None
            if (found := _layer(model, node, value)) is not None:
                total += found * np.outer(value.scale, value.scale)
            elif gates.get(node.makes[0]) == value.name and all(
                value.name in reader.reads and reader.op == "Mul" for reader in readers[node.makes[0]]
            ):
                continue  # the product is asked
            elif (further := _through(model, node, value, gates)) is None:
                return None
            elif further.name not in reached:
                reached.add(further.name)
                waiting.append(further)
    return total if total.any() else None


# -- layers ------------------------------------------------------------------------------------------------------------


def _layer(model: Model, node: GraphNode, value: _Reached) -> Array | None:
    """Its G over the boundary's channels, or None where it is no such layer."""
    find = _LAYERS.get(node.op)
    weights = _constant(model, node, 1)
    if find is None or weights is None or _name(node, 0) != value.name:
        return None
    return find(model, node, value, weights)


def _of_conv(model: Model, node: GraphNode, value: _Reached, weights: Array) -> Array | None:
    if value.axis != 1:
        return None
    of_group = weights.shape[1]
    by_place = weights.reshape(node.source.attributes.get_int("group", 1), -1, of_group, weights[0, 0].size)
    found = np.zeros((len(value.places), len(value.places)))
    for group, kernels in enumerate(by_place):
        own = np.flatnonzero(value.places // of_group == group)
        inside = value.places[own] - group * of_group
        for k in range(kernels.shape[2] if own.size else 0):
            found[np.ix_(own, own)] += _gram(kernels[:, inside, k].T)
    return found / math.prod(_ints(node, "strides") or (1,))


def _of_gemm(model: Model, node: GraphNode, value: _Reached, weights: Array) -> Array | None:
    attributes = node.source.attributes
    if value.axis != 1 or attributes.get_int("transA"):
        return None
    rows = weights.T if attributes.get_int("transB", 0) else weights
    alpha = attributes.get_float("alpha", 1.0)
    return _gram(alpha * rows[value.places].astype(np.float64))


def _of_matmul(model: Model, node: GraphNode, value: _Reached, weights: Array) -> Array | None:
    if value.axis != len(model.shapes[value.name]) - 1 or weights.ndim != 2:
        return None
    return _gram(weights[value.places])


_LAYERS: Final[Mapping[str, Callable[[Model, GraphNode, _Reached, Array], Array | None]]] = {
    "Conv": _of_conv,
    "Gemm": _of_gemm,
    "MatMul": _of_matmul,
}


def _gram(rows: Array) -> Array:
    wide = rows.astype(np.float64)
    return np.asarray(wide @ wide.T)


# -- the way to them ---------------------------------------------------------------------------------------------------


def _through(model: Model, node: GraphNode, value: _Reached, gates: Mapping[str, str]) -> _Reached | None:
    """What the node makes, with the boundary's channels in it; None where that is not known. `gates`: what is one, by
    name, and of what."""
    there = replace(value, name=node.makes[0])
    shape, first = model.shapes.get(value.name, ()), _name(node, 0) == value.name
    same_shape = model.shapes.get(there.name) == shape
    if not shape:
        return None
    match node.op:
        case op if op in _LIKE_IDENTITY:
            return there if first else None
        case "Cast":
            spec = model.spec(there.name)
            return there if isinstance(spec, TensorSpec) and spec.dtype in ("FP16", "FP32", "FP64") else None
        case "Add" | "Sub" | "Sum":
            return there if same_shape else None
        case "Mul" if gates.get(_name(node, 1 if first else 0)) == value.name:
            return there
        case "Mul":
            factor = _constant(model, node, 1 if first else 0)
            scale = None if factor is None else _by_channel(value, factor, len(shape))
            return replace(there, scale=value.scale * scale) if scale is not None and same_shape else None
        case "BatchNormalization":
            gain, variance = _constant(model, node, 1), _constant(model, node, 4)
            if not first or gain is None or variance is None or value.axis != 1:
                return None
            epsilon = node.source.attributes.get_float("epsilon", 1e-5)
            scale = gain[value.places] / np.sqrt(variance[value.places].astype(np.float64) + epsilon)
            return replace(there, scale=value.scale * scale)
        case "Transpose":
            order = _ints(node, "perm") or tuple(range(len(shape)))[::-1]
            return replace(there, axis=order.index(value.axis))
        case "Concat":
            axis = node.source.attributes.get_int("axis", 1) % len(shape)
            if axis != value.axis:
                return there
            names = [str(given.name) for given in node.source.inputs if given is not None]
            before = [_width(model, name, axis) for name in names[: names.index(value.name)]]
            return replace(there, places=value.places + sum(before)) if 0 not in before else None
    return None


def _by_channel(value: _Reached, factor: Array, rank: int) -> Array | None:
    """`factor`, of each of the boundary's channels, where it is one for all places."""
    if factor.size == 1:
        return np.full(len(value.places), float(factor.reshape(-1)[0]))
    shape = (1,) * (rank - factor.ndim) + factor.shape
    if len(shape) != rank or factor.size != shape[value.axis]:
        return None
    return np.asarray(factor.reshape(-1)[value.places], np.float64)


def _width(model: Model, name: str, axis: int) -> int:
    """Of a value along an axis; 0 where it is not known."""
    constant = model.constants.get(name)
    tensor = None if constant is None else constant.const_value
    shape = model.shapes.get(name, ()) if tensor is None else tensor.shape.numpy()
    return int(shape[axis]) if shape else 0


def _ints(node: GraphNode, attribute: str) -> tuple[int, ...]:
    """() where it is not there."""
    found = node.source.attributes.get(attribute)
    return () if found is None else tuple(found.as_ints())


def _name(node: GraphNode, place: int) -> str:
    given = node.source.inputs[place] if place < len(node.source.inputs) else None
    return str(given.name) if given is not None else ""


def _constant(model: Model, node: GraphNode, place: int) -> Array | None:
    """The initializer that is this input; None where it is something else."""
    found = model.constants.get(_name(node, place))
    tensor = None if found is None else found.const_value
    return None if tensor is None else np.asarray(tensor.numpy())
