"""FLOAT16 at a boundary: how it crosses without a rounding that the whole does not have.

A runtime that lacks a 16-bit kernel computes in 32 bits, between a Cast it puts before and one it puts after the node,
and then leaves out every pair of such Casts it may: in onnxruntime most values of a 16-bit model are never rounded to
16 bits. A boundary would round them (off by up to 2⁻¹¹, a hundred times what head ∘ tail may differ), so they cross as
FP32 (`Model.crossing`): the head ends with a Cast to 32 bits, the tail begins with one back, both named as the runtime
names its own, and so left out wherever the whole has none. The head's is followed by a Max of one tensor, which copies:
a Cast that makes an output stays. The same goes for an FP32 value that the model itself casts from FLOAT16.

A node that has a 16-bit kernel is computed in 32 bits all the same where no neighbour has one, and a cut takes a
neighbour away. Such cuts come out a rounding off: one of EfficientNet-Lite0's fifteen on an x86 (behind a Clip), more
on an ARM with half-precision arithmetic (asimdhp), where most nodes have kernels. The profile leaves out what is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import onnx_ir as ir

from split.graph.cuts import Cut
from split.graph.model import Model

_FREE: Final = "InsertedPrecisionFreeCast_"
"""How onnxruntime's insert_cast_transformer.cc knows its own Casts, those it may leave out."""


def wide_in_head(model: Model, cut: Cut) -> list[str]:
    """The boundary tensors that need an end of their own in the head."""
    values = {name: model.values[name] for name in cut.boundary if name not in model.output_names}
    return [name for name, value in values.items() if _is_half(value) or _was_half(value)]


def wide_in_tail(model: Model, cut: Cut) -> list[str]:
    """The boundary tensors that need a beginning of their own in the tail."""
    return [name for name in cut.boundary if _is_half(model.values[name])]


@contextlib.contextmanager
def inner_names(model: Model, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """While it lasts, these values have other names in the graph: their own belong to what crosses.

    Yields name → name inside. Not for several threads on one model.
    """
    inner: dict[str, str] = {}
    for name in names:
        inner[name] = f"{name}::half"
        while inner[name] in model.values or inner[name] in model.constants:
            inner[name] += "_"
        model.values[name].name = inner[name]
    try:
        yield inner
    finally:
        for name in inner:
            model.values[name].name = name


def widen(model: Model, inner: Mapping[str, str]) -> dict[str, list[ir.Node]]:
    """For each name, the nodes that end the head: the last one makes what crosses."""
    nodes: dict[str, list[ir.Node]] = {}
    for name, hidden in inner.items():
        value = model.values[name]
        last = _value(hidden, ir.DataType.FLOAT16 if _is_half(value) else ir.DataType.FLOAT, value)
        nodes[name] = []
        if _is_half(value):
            wide = _value(f"{hidden}::wide", ir.DataType.FLOAT, value)
            nodes[name].append(_cast(last, wide))
            last = wide
        nodes[name].append(ir.Node("", "Max", [last], outputs=[_value(name, ir.DataType.FLOAT, value)]))
    return nodes


def narrow(model: Model, inner: Mapping[str, str]) -> dict[str, ir.Node]:
    """For each name, the Cast that begins the tail: its input is what crosses."""
    values = {name: model.values[name] for name in inner}
    return {
        name: _cast(_value(name, ir.DataType.FLOAT, value), _value(inner[name], ir.DataType.FLOAT16, value))
        for name, value in values.items()
    }


def _is_half(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT16


def _was_half(value: ir.Value) -> bool:
    maker = value.producer()
    source = maker.inputs[0] if maker is not None and maker.op_type == "Cast" else None
    return source is not None and _is_half(source) and value.dtype == ir.DataType.FLOAT


def _cast(given: ir.Value, made: ir.Value) -> ir.Node:
    to = ir.AttrInt64("to", int(made.dtype or ir.DataType.FLOAT))
    return ir.Node("", "Cast", [given], [to], outputs=[made], name=f"{_FREE}{made.name}")


def _value(name: str, dtype: ir.DataType, like: ir.Value) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=like.shape)
