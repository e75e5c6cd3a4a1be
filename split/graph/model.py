"""The graph as cutting sees it: activations flow between nodes, constants are on both sides.

A *constant* is an initializer or a value computed from constants alone (Constant, Identity or Cast of weights, shape
arithmetic that depends on no input): never an activation, each side of a cut gets its own copy. Names captured by the
bodies of If, Loop and Scan are inputs of the node. Nodes that no output needs do not exist here. An initializer that is
also listed as an input is a constant: overriding it is not offered. No costs, no cuts (`cost.py`, `cuts.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from split.errors import InvalidModel
from split.graph.shapes import fill_in, is_unknown, is_weight
from split.ids import ModelDigest
from split.tensor import Dim, TensorSpec

DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FLOAT16": "FP16",
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "STRING": "BYTES",
}
"""ONNX element type → the protocol's; what is not here cannot leave a segment."""

_ONNX_NAMES: Final = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BYTES": "STRING"}

_RANDOM: Final = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout")
)
_PURE_DOMAINS: Final = frozenset(("", "ai.onnx", "ai.onnx.ml", "com.microsoft"))
"""Operators of other domains may keep state: their outputs are never constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """One node that computes with activations."""

    key: str
    """Its first non-empty output name, unique in the graph."""
    op: str
    reads: tuple[str, ...]
    """Activations and model inputs it needs, captured ones included, each once; constants are not listed."""
    makes: tuple[str, ...]
    bit: int
    """Its place among these nodes in file order: its bit in a cut's mask."""
    source: ir.Node


@dataclass(slots=True, kw_only=True)
class Model:
    """A loaded model. Frozen but for what is learnt by running it (`learn`, `shapes`)."""

    path: Path
    digest: ModelDigest
    files: tuple[tuple[str, int, str], ...]
    source: ir.Model
    inputs: tuple[TensorSpec, ...]
    """What a request must bring, in the declared order."""
    output_names: tuple[str, ...]
    """What a reply brings, in the declared order; one that is listed twice, which the runtime allows, once."""
    nodes: tuple[GraphNode, ...]
    """In topological order: depth first from the outputs, so that what is computed is soon used."""
    constants: dict[str, ir.Value]
    constant_nodes: tuple[ir.Node, ...]
    """Nodes that compute constants, in topological order."""
    values: dict[str, ir.Value]
    """Model inputs and what the nodes make, by name."""
    no_cuts_reason: str = ""
    note: str = ""
    """What the one who made the model should know of how it was read, as a sentence; "" where there is nothing."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Real shapes at the dims one works with, by name; filled by the workbench."""
    _specs: dict[str, TensorSpec | str] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """Version of the default operator set; 1 where the file imports none."""
        imports = self.source.graph.opset_imports
        return imports.get("", imports.get("ai.onnx", 1))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the outputs in the declared order; InvalidModel when one is not known (`unknown` names them)."""
        return tuple(self._public(name, "output") for name in self.output_names)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Activations and outputs whose element type or rank shape inference does not tell: learn them by running."""
        names = dict.fromkeys((*(name for node in self.nodes for name in node.makes), *self.output_names))
        return tuple(name for name in names if name in self.values and is_unknown(self.values[name]))

    def spec(self, name: str) -> TensorSpec | str:
        """The spec of a value, or why it has none that can cross a boundary, as the end of a sentence."""
        known = self._specs.get(name)
        if known is None:
            known = self._specs[name] = _spec(self.constants.get(name) or self.values[name])
        return known

    def crossing(self, name: str) -> TensorSpec | str:
        """The spec under which a value travels: its own, but FP32 for a FLOAT16 one that a node makes (`half.py`)."""
        spec = self.spec(name)
        if isinstance(spec, str) or spec.dtype != "FP16" or any(name == given.name for given in self.inputs):
            return spec
        return TensorSpec(name=name, dtype="FP32", shape=spec.shape)

    def learn(self, name: str, dtype: str, dims: Sequence[int], declared: Sequence[Dim]) -> None:
        """Note what a run showed of a value: what shape inference did not tell of its type and shape.

        `dims`: of this run. `declared`: the shape as the runtime infers it, -1 for what it does not know; parts declare
        as much, or the runtime would make an empty tensor of another shape in a part than in the whole.
        """
        value = self.values[name]
        known = {dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str)}  # others it made up
        told = [dim if dim in known or (isinstance(dim, int) and dim >= 0) else None for dim in declared]
        if is_unknown(value):
            if value.dtype is None:
                value.dtype = ir.DataType[_ONNX_NAMES.get(dtype, dtype)]
            if value.shape is None:
                value.shape = ir.Shape(told if len(told) == len(dims) else [None] * len(dims))
            # The dims of the run may vary with the data; where the inputs cannot vary they are the best there is.
            fixed = all(isinstance(dim, int) and dim >= 0 for spec in self.inputs for dim in spec.shape)
            shape: tuple[Dim, ...] = tuple(dims) if fixed else (-1,) * len(dims)
            self._specs[name] = TensorSpec(name=name, dtype=dtype, shape=shape)
        elif value.shape is not None and len(value.shape) == len(told):
            found = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
            kept = [
                old if new is None or isinstance(old, int) or old in known else new
                for old, new in zip(found, told, strict=True)
            ]
            value.shape = ir.Shape(kept)
            self._specs.pop(name, None)

    def nbytes(self, name: str) -> int:
        """Bytes of a value as it crosses, at the dims one works with; 0 for one that is no dense tensor."""
        spec = self.crossing(name)
        if isinstance(spec, str):
            return 0
        shape = self.shapes.get(name, spec.shape)
        return TensorSpec(name=name, dtype=spec.dtype, shape=shape).nbytes()

    def _public(self, name: str, role: str) -> TensorSpec:
        spec = self.spec(name)
        if isinstance(spec, str):
            raise InvalidModel(f"{self.path}: {role} {name!r} {spec}")
        return spec


def build_model(
    source: ir.Model,
    *,
    path: Path,
    digest: ModelDigest,
    files: tuple[tuple[str, int, str], ...],
    note: str,
) -> Model:
    """Look through a deserialised model; see `load.load_model`, which is the way in."""
    for graph in [source.graph, *(g for g in source.graphs() if g is not source.graph)]:
        _hoist_constants(graph)
        _take_in(graph, path)
    in_file_order = list(source.graph)
    ordered = _ordered(source.graph, path)
    blank = fill_in(source, path)  # on sorted nodes: of a constant that comes later it knows no value
    constants: dict[str, ir.Value] = {name: v for name, v in source.graph.initializers.items() if v.const_value}
    constant_nodes: list[ir.Node] = []
    inputs = {str(v.name): v for v in source.graph.inputs if v.name not in constants}
    working: list[ir.Node] = []
    for node in ordered:
        if _is_pure(node) and all(str(v.name) in constants for v in read_values(node)):
            constants.update((str(v.name), v) for v in node.outputs if v.name)
            constant_nodes.append(node)
        else:
            working.append(node)
    place = {id(node): at for at, node in enumerate(in_file_order)}
    bits = {id(node): bit for bit, node in enumerate(sorted(working, key=lambda node: place[id(node)]))}
    nodes = tuple(_graph_node(node, constants, bits[id(node)]) for node in working)
    values = inputs | {str(v.name): v for node in working for v in node.outputs if v.name}
    model = Model(
        path=path,
        digest=digest,
        files=files,
        source=source,
        inputs=(),
        output_names=tuple(dict.fromkeys(str(v.name) for v in source.graph.outputs)),
        nodes=nodes,
        constants=constants,
        constant_nodes=tuple(constant_nodes),
        values=values,
        no_cuts_reason=blank or ("" if len(nodes) > 1 else "the model has fewer than two nodes"),
        note=note,
    )
    model.inputs = tuple(model._public(name, "input") for name in inputs)
    for name in model.output_names:
        value = values.get(name) or constants[name]
        if not is_unknown(value):
            model._public(name, "output")
    return model


def read_values(node: ir.Node) -> list[ir.Value]:
    """Values of the node's own graph that it needs: its inputs and what its bodies capture, each once."""
    read = {id(v): v for v in node.inputs if v is not None and v.name}
    for body in bodies(node):
        read.update((id(v), v) for v in captured_by(body) if v.name)
    return list(read.values())


def bodies(node: ir.Node) -> list[ir.Graph]:
    """Graphs that are attributes of the node."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def _hoist_constants(graph: ir.Graph) -> None:
    """Turn Constant nodes that hold weights into initializers of the same name."""
    outputs = {id(v) for v in graph.outputs}
    for node in list(graph):
        tensor = node.attributes.get("value")
        if node.op_type != "Constant" or node.domain not in {"", "ai.onnx"} or tensor is None or tensor.is_ref():
            continue
        made = node.outputs[0]
        if not is_weight(tensor.as_tensor()) or id(made) in outputs or not made.name or made.name in graph.initializers:
            continue
        weight = ir.Value(name=made.name, const_value=tensor.as_tensor(), type=ir.TensorType(tensor.as_tensor().dtype))
        weight.shape = ir.Shape(tensor.as_tensor().shape.numpy())
        ir.convenience.replace_all_uses_with(made, weight)
        graph.remove(node, safe=True)
        graph.register_initializer(weight)


def _take_in(graph: ir.Graph, path: Path) -> None:
    """What is no weight and lies in a file beside the model (exporters may put every tensor there) goes into the graph:
    its values are looked at, and parts of the model lie in other folders."""
    for value in graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor) and not is_weight(value.const_value):
            value.const_value = _taken_in(value.const_value, path)
    for node in graph:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[name] = ir.AttrTensor(name, _taken_in(attribute.value, path))


def _taken_in(tensor: ir.ExternalTensor, path: Path) -> ir.TensorProtocol:
    try:
        data = tensor.tobytes()
    except (OSError, ValueError, TypeError) as error:
        raise InvalidModel(f"{path}: tensor {tensor.name!r} cannot be read: {error}") from error
    if len(data) != tensor.nbytes:
        raise InvalidModel(
            f"{path}: tensor {tensor.name!r} has {len(data)} bytes, its type and shape ask for {tensor.nbytes}"
        )
    dims = tensor.shape.numpy()
    return ir.serde.TensorProtoTensor(
        onnx.TensorProto(name=tensor.name, data_type=int(tensor.dtype), dims=dims, raw_data=data)
    )


def _ordered(graph: ir.Graph, path: Path) -> list[ir.Node]:
    """Nodes that the outputs need, each after those it needs (also inside bodies); InvalidModel on a cycle or on a name
    that nothing makes."""
    try:
        graph.sort()
    except ValueError:
        raise InvalidModel(f"{path}: the graph has a cycle; ONNX graphs must not") from None
    sources = {id(v) for v in (*graph.inputs, *graph.initializers.values())}
    order: list[ir.Node] = []
    seen: set[int] = set()
    # Values the nodes already on the stack wait for; a node is put out when all it reads has been.
    stack: list[tuple[ir.Node | None, list[ir.Value]]] = [(None, list(reversed(graph.outputs)))]
    while stack:
        node, waiting = stack[-1]
        if not waiting:
            stack.pop()
            if node is not None:
                order.append(node)
            continue
        value = waiting.pop()
        if id(value) in sources:
            continue
        producer = value.producer()
        if producer is None or producer.graph is not graph:
            user = "the graph's outputs" if node is None else f"node {node.name or node.op_type!r}"
            raise InvalidModel(f"{path}: {user} needs {value.name!r}, which nothing makes")
        if id(producer) not in seen:
            seen.add(id(producer))
            stack.append((producer, list(reversed(read_values(producer)))))
    return order


def captured_by(body: ir.Graph) -> Iterable[ir.Value]:
    """Values that a body takes from the graphs around it."""
    inner = {id(v) for v in (*body.inputs, *body.initializers.values())}
    inner.update(id(v) for node in body for v in node.outputs)
    read = [v for node in body for v in read_values(node)]
    return [v for v in (*read, *body.outputs) if id(v) not in inner]


def _is_pure(node: ir.Node) -> bool:
    return node.domain in _PURE_DOMAINS and node.op_type not in _RANDOM and not bodies(node)


def _graph_node(node: ir.Node, constants: Mapping[str, ir.Value], bit: int) -> GraphNode:
    makes = tuple(str(v.name) for v in node.outputs if v.name)
    reads = tuple(str(v.name) for v in read_values(node) if v.name not in constants)
    op = f"{node.domain}.{node.op_type}" if node.domain not in {"", "ai.onnx"} else node.op_type
    return GraphNode(key=makes[0], op=op, reads=reads, makes=makes, bit=bit, source=node)


def _spec(value: ir.Value) -> TensorSpec | str:
    name = str(value.name)
    if value.const_value is not None and value.shape is None:
        value.shape = ir.Shape(value.const_value.shape.numpy())
    if value.type is None:
        return "has a type that neither shape inference nor a run tells"
    dtype = DTYPES.get(value.dtype.name) if isinstance(value.type, ir.TensorType) and value.dtype else None
    if dtype is None:
        return f"has the unsupported type {type_text(value.type)}"
    if value.shape is None:
        return "has no known rank; export the model with shapes"
    return TensorSpec(name=name, dtype=dtype, shape=tuple(_dim(d) for d in value.shape))


def _dim(dim: int | ir.SymbolicDim) -> Dim:
    size = dim if isinstance(dim, int) else dim.value
    if size is None or size == "" or (isinstance(size, int) and size < 0):
        return -1
    return size


def type_text(kind: ir.TypeProtocol) -> str:
    """The type as ONNX writes it: `seq(tensor(float))`."""
    if isinstance(kind, ir.SequenceType):
        return f"seq({type_text(kind.elem_type)})"
    if isinstance(kind, ir.OptionalType):
        return f"optional({type_text(kind.elem_type)})"
    word = "sparse_tensor" if isinstance(kind, ir.SparseTensorType) else "tensor"
    return f"{word}({kind.dtype.name.lower()})"
