"""From a file to a `Model`: reads it, refuses what cannot be served with a sentence, follows external data safely.

Nothing of the file is trusted: locations of external data must be plain names beside it, sizes must fit, public
inputs and outputs must be tensors that numpy has. Weights are mapped, never copied into the graph.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # ships no stubs

from split.errors import InvalidModel
from split.graph.card import digest_of_files
from split.graph.model import Model, build_model
from split.graph.sparse import make_dense
from split.graph.step import INLINE, STEP_S, StepFailed, attempt
from split.ids import ModelDigest

log = logging.getLogger(__name__)

EXPANDED_NODES_MAX: Final = 1_000_000
"""Nodes that local functions may become when each call is replaced by its body, as the runtime does: thousands of times
what models have, and what nesting in 20 levels of two calls each asks for."""
FILE_BYTES_MAX: Final = 2**31 - 1
"""protobuf's limit for one message; bigger models keep their weights as external data."""

File = tuple[str, int, str]
"""(name, bytes, sha256 hex)"""


def load_model(path: Path, *, step_limit_s: float = STEP_S) -> Model:
    """Read an ONNX file (its external data beside it) and look through it.

    Model-local functions are inlined, large Constant nodes become initializers, sparse constants dense ones, nodes may
    come in any order. Inlining
    is given `step_limit_s` seconds; where it does not succeed, the model is used as it stands in the file, with a
    warning and a note.
    InvalidModel when the file is missing, empty, truncated or no ONNX model, when external data is missing, too short
    or outside of the folder, when the graph is cyclic or names what nothing makes, and when a public input or output
    is not a tensor of a supported type.
    """
    proto = _read(path)
    digest, files = _digest(path, proto)
    _refuse_maps(proto, path)
    make_dense(proto, path)
    note = ""
    if proto.functions:
        _check_expansion(proto, path)
        proto, note = _inlined(proto, step_limit_s)
        if note:
            log.warning("%s: %s", path, note)
    try:
        model = ir.serde.deserialize_model(proto)
    except Exception as error:  # onnx-ir raises whatever its parsing meets
        raise InvalidModel(f"{path} is no usable ONNX model: {_root_cause(error)}") from error
    for tensor in _external_tensors(model):
        tensor.base_dir = path.parent
    return build_model(model, path=path, digest=digest, files=files, note=note)


def model_digest(path: Path) -> tuple[ModelDigest, tuple[File, ...]]:
    """Digest of the model (`digest_of_files`) and (name, bytes, sha256 hex) of its file and its external data files."""
    return _digest(path, _read(path))


def _read(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise InvalidModel(f"{path} is not a file; expected an ONNX model there")
    size = path.stat().st_size
    if size == 0:
        raise InvalidModel(f"{path} is empty; expected an ONNX model there")
    if size > FILE_BYTES_MAX:
        raise InvalidModel(
            f"{path} has {size} bytes, more than protobuf's {FILE_BYTES_MAX}; save its weights as external data"
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        raise InvalidModel(f"{path} is damaged or no ONNX model: its {size} bytes cannot be decoded") from None
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        missing = "graph" if not proto.HasField("graph") else "opset import"
        raise InvalidModel(f"{path} is damaged or no ONNX model: it holds no {missing}")
    return proto


def _digest(path: Path, proto: onnx.ModelProto) -> tuple[ModelDigest, tuple[File, ...]]:
    names = sorted({_checked_location(tensor, path) for tensor in _external_protos(proto)})
    files = tuple(_hashed(path.parent / name) for name in (path.name, *names))
    return digest_of_files(files), files


def _hashed(path: Path) -> File:
    with path.open("rb") as stream:
        return path.name, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()


def _checked_location(tensor: onnx.TensorProto, path: Path) -> str:
    """Name of the tensor's data file; InvalidModel when it is no plain file beside the model or too short."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = str(entries.get("location", ""))
    what = f"{path}: weight {tensor.name!r} has its data in {name!r}"
    if not name or name in {".", ".."} or any(mark in name for mark in "/\\\0") or name == path.name:
        raise InvalidModel(f"{what}; expected the plain name of a file beside the model")
    data = path.parent / name
    if data.is_symlink() or not data.is_file():
        raise InvalidModel(f"{what}, which is {'a link' if data.is_symlink() else 'not there'}; put the file there")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0"))
    except ValueError:
        raise InvalidModel(f"{what}, at an offset that is no number") from None
    if offset < 0 or length < 0 or offset + length > data.stat().st_size:
        raise InvalidModel(f"{what}, bytes {offset} to {offset + length}, but the file has {data.stat().st_size}")
    return name


def _external_protos(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor with external data, in graphs at any depth, attributes and functions."""
    graphs, nodes = [proto.graph], [node for function in proto.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            nodes.extend(graph.node)
            yield from filter(_is_external, graph.initializer)
            for sparse in graph.sparse_initializer:
                yield from filter(_is_external, (sparse.values, sparse.indices))
            continue
        for attribute in nodes.pop().attribute:
            sparse = attribute.sparse_tensor
            yield from filter(_is_external, (attribute.t, *attribute.tensors, sparse.values, sparse.indices))
            if attribute.HasField("g"):
                graphs.append(attribute.g)
            graphs.extend(attribute.graphs)


def _is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    yield attribute.value


def _refuse_maps(proto: onnx.ModelProto, path: Path) -> None:
    """InvalidModel when an input or output holds maps, as those of classifiers from scikit-learn do: onnx-ir cannot
    read them, and no request could carry them."""
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.HasField("map_type") or value.type.sequence_type.elem_type.HasField("map_type"):
            raise InvalidModel(
                f"{path}: {value.name!r} holds maps, expected a tensor; export the model without ZipMap "
                "(skl2onnx: options={'zipmap': False})"
            )


def _check_expansion(proto: onnx.ModelProto, path: Path) -> None:
    """InvalidModel when local functions call themselves, or call each other so often that nothing could hold them."""
    functions = {(one.domain, one.name, one.overload): one for one in proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    called: list[tuple[str, str, str]] = []

    def size(nodes: Iterable[onnx.NodeProto]) -> int:
        total = 0
        for node in nodes:
            total += expanded(key) if (key := (node.domain, node.op_type, node.overload)) in functions else 1
            for attribute in node.attribute:
                total += sum(size(graph.node) for graph in (attribute.g, *attribute.graphs))
        return total

    def expanded(key: tuple[str, str, str]) -> int:
        if key in called:
            raise InvalidModel(f"{path}: its local function {key[1]!r} calls itself; ONNX functions must not")
        if key not in sizes:
            called.append(key)
            sizes[key] = size(functions[key].node)
            called.pop()
        return sizes[key]

    if (nodes := size(proto.graph.node)) > EXPANDED_NODES_MAX:
        raise InvalidModel(
            f"{path}: its local functions call each other so often that it has {nodes} nodes without them, more than "
            f"{EXPANDED_NODES_MAX}; export it with fewer levels of functions"
        )


def _inlined(proto: onnx.ModelProto, limit_s: float) -> tuple[onnx.ModelProto, str]:
    """Without model-local functions; where they cannot be inlined, as it is, each call one node, and why."""
    inlined = onnx.ModelProto()
    try:
        inlined.ParseFromString(attempt(INLINE, proto.SerializeToString(), limit_s=limit_s))
    except StepFailed as why:
        return proto, f"its local functions stay whole, they cannot be inlined: {why}"
    except DecodeError:
        return proto, "its local functions stay whole, what inlining made of it cannot be read"
    if _public_names(inlined) != _public_names(proto):
        return proto, "its local functions stay whole, inlining changed its inputs or outputs"
    return inlined, ""


def _public_names(proto: onnx.ModelProto) -> list[str]:
    return [value.name for value in (*proto.graph.input, *proto.graph.output)]


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__
