"""From a cut to two model files: head and tail of the ORIGINAL graph, each with its own constants, weights in one file.

Names, layouts and operators stay those of the model both sides hold. The tail declares exactly what is live at the cut;
the head puts out the boundary and the outputs made there, each once (FLOAT16 crosses as `half.py` says). Weights of
1 KiB and more lie in `weights.bin` beside the parts, once for all of them. Files appear whole or not at all, also on a
full disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, cast

import onnx
import onnx_ir as ir

from split.errors import CutRefused, InvalidModel, ModelUnavailable
from split.graph.cuts import Cut
from split.graph.half import inner_names, narrow, wide_in_head, wide_in_tail, widen
from split.graph.model import Model, bodies, read_values
from split.graph.shapes import is_weight

WEIGHTS_FILE: Final = "weights.bin"
PAGE_BYTES: Final = 4096
"""Weights start on page borders, so that a runtime can map them."""


def share_weights(model: Model, folder: Path) -> None:
    """Put the model's weights into `folder/weights.bin` (once for equal contents) and let the graph refer to them.

    Parts of this model can be written to `folder` alone from then on. A file that is there is compared byte by byte and
    kept when it is right. ModelUnavailable when the disk is full, InvalidModel when weights cannot be read.
    """
    offsets: dict[bytes, int] = {}
    places: list[tuple[ir.Value, int]] = []
    order: list[tuple[int, ir.Value]] = []
    end = 0
    for value in _weights(model):
        digest = hashlib.sha256(_content(value, model)).digest()
        if digest not in offsets:
            offsets[digest] = end
            order.append((end, value))
            end = -(-(end + _nbytes(value)) // PAGE_BYTES) * PAGE_BYTES
        places.append((value, offsets[digest]))
    path = folder / WEIGHTS_FILE
    if order and not _holds(path, order, model):
        write_whole(path, partial(_write_weights, order=order, model=model))
    for value, offset in places:
        tensor = value.const_value
        assert tensor is not None
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, offset, tensor.nbytes, tensor.dtype, shape=shape, name=str(value.name), base_dir=folder
        )


def write_parts(model: Model, cut: Cut, head: Path, tail: Path) -> None:
    """Write both parts of a legal cut beside the shared weights (`share_weights` comes first).

    The head of the cut that keeps nothing and the tail of the one that keeps everything do not exist: nothing is
    written for them. CutRefused for an illegal cut, ModelUnavailable when the disk is full.
    """
    if cut.reason:
        raise CutRefused(f"cut {cut.id}: {cut.reason}")
    if cut.nodes:
        with inner_names(model, wide_in_head(model, cut)) as inner:
            data = _serialised(_head(model, cut, inner), f"{model.path.stem}.{cut.id}.head", model)
        write_whole(head, data)
    if cut.nodes < len(model.nodes):
        with inner_names(model, wide_in_tail(model, cut)) as inner:
            data = _serialised(_tail(model, cut, inner), f"{model.path.stem}.{cut.id}.tail", model)
        write_whole(tail, data)


def _head(model: Model, cut: Cut, inner: Mapping[str, str]) -> ir.GraphView:
    """The device's part: model inputs → boundary and the outputs made there."""
    last = widen(model, inner)
    outputs = dict.fromkeys((*cut.boundary, *cut.head_outputs))
    return _part(
        model,
        cut.mask,
        [model.values[name] for name in cut.head_inputs],
        [last[name][-1].outputs[0] if name in last else _output(model, name) for name in outputs],
        after=[node for nodes in last.values() for node in nodes],
    )


def _tail(model: Model, cut: Cut, inner: Mapping[str, str]) -> ir.GraphView:
    """The companion's part: boundary and model inputs → the other outputs."""
    first = narrow(model, inner)
    everything = (1 << len(model.nodes)) - 1
    inputs = []
    for name in cut.boundary:
        given = first[name].inputs[0] if name in first else model.values[name]
        assert given is not None
        inputs.append(given)
    return _part(
        model,
        everything & ~cut.mask,
        [*inputs, *(model.values[name] for name in cut.tail_inputs)],
        [_output(model, name) for name in cut.tail_outputs],
        before=list(first.values()),
    )


def whole_with(model: Model, outputs: Sequence[str]) -> bytes:
    """The whole model with other outputs, serialised: what a dry run opens to see the values within."""
    everything = (1 << len(model.nodes)) - 1
    view = _part(
        model,
        everything,
        [model.values[spec.name] for spec in model.inputs],
        [_output(model, name) for name in outputs],
    )
    return _serialised(view, f"{model.path.stem}.seen", model)


def _output(model: Model, name: str) -> ir.Value:
    return model.constants.get(name) or model.values[name]


def _part(
    model: Model,
    mask: int,
    inputs: Sequence[ir.Value],
    outputs: Sequence[ir.Value],
    *,
    before: Sequence[ir.Node] = (),
    after: Sequence[ir.Node] = (),
) -> ir.GraphView:
    """The nodes of the mask with the constants they and the outputs need, and more nodes around them."""
    nodes = [*before, *(node.source for node in model.nodes if mask >> node.bit & 1), *after]
    needed = {str(v.name) for node in nodes for v in read_values(node)} | {str(v.name) for v in outputs}
    constant_nodes: list[ir.Node] = []
    for node in reversed(model.constant_nodes):
        if any(v.name in needed for v in node.outputs):
            constant_nodes.insert(0, node)
            needed.update(str(v.name) for v in read_values(node))
    graph = model.source.graph
    return ir.GraphView(
        inputs,
        outputs,
        nodes=[*constant_nodes, *nodes],
        initializers=[value for name, value in graph.initializers.items() if name in needed],
        opset_imports=graph.opset_imports,
    )


def _serialised(view: ir.GraphView, name: str, model: Model) -> bytes:
    view.name = name
    source = model.source
    # Before version 4 every initializer had to be an input too; the parts declare live activations only.
    graph = cast(ir.Graph, view)  # onnx-ir documents that a Model may hold a view
    part = ir.Model(graph, ir_version=max(source.ir_version, 4), functions=list(source.functions.values()))
    proto = ir.serde.serialize_model(part)
    _restore_outputs(proto.graph, view)
    del proto.graph.value_info[:]  # the runtime infers types itself; what the file claims of inner values may be stale
    data = proto.SerializeToString()
    assert isinstance(data, bytes)
    return data


def _restore_outputs(proto: onnx.GraphProto, graph: ir.GraphView | ir.Graph) -> None:
    """Put back the unnamed outputs at the end of nodes, which onnx-ir leaves out: some kernels look at their number (a
    MaxPool that could tell indices compares NaN otherwise)."""
    for written, node in zip(proto.node, graph, strict=True):
        written.output.extend([""] * (len(node.outputs) - len(written.output)))
        inner = [a.g for a in written.attribute if a.HasField("g")]
        for body, source in zip(inner, bodies(node), strict=True):
            _restore_outputs(body, source)


def _weights(model: Model) -> Iterator[ir.Value]:
    for graph in model.source.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and is_weight(value.const_value):
                yield value


def _nbytes(value: ir.Value) -> int:
    assert value.const_value is not None
    return int(value.const_value.nbytes)


def _content(value: ir.Value, model: Model) -> bytes:
    assert value.const_value is not None
    try:
        data = value.const_value.tobytes()
    except (OSError, ValueError, TypeError) as error:
        raise InvalidModel(f"{model.path}: weight {value.name!r} cannot be read: {error}") from error
    if len(data) != _nbytes(value):
        raise InvalidModel(
            f"{model.path}: weight {value.name!r} has {len(data)} bytes, its type and shape ask for {_nbytes(value)}"
        )
    return data


def _holds(path: Path, order: Iterable[tuple[int, ir.Value]], model: Model) -> bool:
    """True when the file has all these weights in their places."""
    try:
        with path.open("rb") as stream:
            for offset, value in order:
                stream.seek(offset)
                if stream.read(_nbytes(value)) != _content(value, model):
                    return False
    except FileNotFoundError:
        return False
    return True


def _write_weights(stream: BinaryIO, order: Iterable[tuple[int, ir.Value]], model: Model) -> None:
    for offset, value in order:
        stream.seek(offset)
        stream.write(_content(value, model))


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file in one step: readers see the old or the new one, and nothing half-written stays.

    ModelUnavailable when the disk is full or read-only.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as stream:
            stream.write(content) if isinstance(content, bytes) else content(stream)
        fresh.replace(path)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "the disk is full; free some space" if full else f"{error.strerror}; make it writable"
        raise ModelUnavailable(f"{path} cannot be written: {what}") from error
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
