"""Random ONNX models, each decided by its seed alone: graphs as exporters never write them and runtimes still take.

A `Draft` grows node by node; what a node may be stands in `families/`. Shapes are tracked as they are at the main
size, so that most drafts are valid; the runtime has the last word, a draft it refuses is no graph (`cuts.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSETS: Final = range(7, onnx.defs.onnx_opset_version() + 1)
NODES_MIN, NODES_MAX = 8, 40
ODD_NAMES: Final = ("a/b:0", "値", "x y", "0", "::", "très long " * 9, "If_body", "weights.bin", "'", '"', "-1", "y")
SIZES: Final = (2, 3)
"""Sizes of the symbolic dim: the one a draft is made at, and another that its segments must serve, too."""

FLOAT, FLOAT16, DOUBLE = "FLOAT", "FLOAT16", "DOUBLE"
INT64, INT32, INT8, UINT8, BOOL, STRING = "INT64", "INT32", "INT8", "UINT8", "BOOL", "STRING"

NUMPY: Final = {
    FLOAT: np.float32,
    FLOAT16: np.float16,
    DOUBLE: np.float64,
    INT64: np.int64,
    INT32: np.int32,
    INT8: np.int8,
    UINT8: np.uint8,
    BOOL: np.bool_,
    STRING: np.object_,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the draft: its shape is the one at the main size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Shape = Sequence[int]
Made = tuple[str, Shape]
"""Element type and shape of what a node makes."""


@dataclass(slots=True)
class Draft:
    """A graph that grows. `outer` is the draft around it when this one is the body of an If, Loop or Scan."""

    dice: random.Random
    noise: np.random.Generator
    opset: int
    symbolic: bool
    """Whether the first dim of the inputs is symbolic."""
    outer: Draft | None = None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    overridable: list[str] = field(default_factory=list)
    """Initializers that are listed as inputs, too."""
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    feeds: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    # -- names and values --------------------------------------------------------------------------------------------

    def fresh(self) -> str:
        """A tensor name that was not used yet, one in eight an odd one."""
        if self.dice.random() < 0.125:
            odd = self.dice.choice(ODD_NAMES)
            if odd not in self.names:
                self.names.add(odd)
                return odd
        name = f"t{len(self.names)}"
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def visible(self) -> list[Value]:
        """What a node here may read: this graph's values, those of the graphs around it as well."""
        return [*(self.outer.visible() if self.outer else ()), *self.values]

    def pick(self, fits: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A value that fits, mostly a recent one (a chain), at times any (a skip link)."""
        known = [value for value in self.visible() if fits(value)]
        if not known:
            return None
        recent = known[-3:] if self.dice.random() < 0.6 else known
        return self.dice.choice(recent)

    def floats(self, *ranks: int, size_max: int = 4096) -> Value | None:
        """A FLOAT value of one of these ranks (any when none is given)."""
        return self.pick(
            lambda v: v.dtype == FLOAT and (not ranks or len(v.shape) in ranks) and int(np.prod(v.shape)) <= size_max
        )

    # -- growing -----------------------------------------------------------------------------------------------------

    def node(
        self, op: str, inputs: Sequence[str | Value], *made: Made | None, domain: str = "", **attributes: Any
    ) -> list[Value]:
        """Add a node; each of `made` is an output (None: an optional one that is left out), all are values from now."""
        outputs = [None if kind is None else Value(self.fresh(), kind[0], tuple(kind[1])) for kind in made]
        names = ["" if value is None else value.name for value in outputs]
        proto = helper.make_node(
            op,
            [value if isinstance(value, str) else value.name for value in inputs],
            names,
            name=self._node_name(op, names),
            domain=domain,
            **attributes,
        )
        self.nodes.append(proto)
        kept = [value for value in outputs if value is not None]
        self.values += [value for value in kept if value.dtype in NUMPY]
        return kept

    def _node_name(self, op: str, outputs: Sequence[str]) -> str:
        """Empty, as a tensor, odd, or what exporters write; the same only in another graph (the runtime insists)."""
        name = self.dice.choice(("", "", "twin", outputs[0], f"/model/{op}", self.dice.choice(ODD_NAMES)))
        return "" if any(node.name == name for node in self.nodes) else name

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """A constant in one of its disguises; returns its name."""
        name = self.fresh()
        disguise = self.dice.random()
        if self.outer is not None and self.opset < 9:  # where every initializer must be an input, a body can have none
            disguise = 0.5
        if disguise < 0.35:
            self.initializers.append(numpy_helper.from_array(array, name))
            if self.outer is None and self.dice.random() < 0.15:
                self.overridable.append(name)
            return name
        if disguise < 0.6 or array.dtype == np.object_:
            self._plain("Constant", [], name, value=numpy_helper.from_array(array, "value"))
            return name
        hidden = self.fresh()
        if array.dtype == np.float32 and disguise < 0.8:
            wide = numpy_helper.from_array(array.astype(np.float64), hidden)
            self.initializers.append(wide)
            self._plain("Cast", [hidden], name, to=TensorProto.FLOAT)
        else:
            self.initializers.append(numpy_helper.from_array(array, hidden))
            self._plain("Identity", [hidden], name)
        return name

    def weights(self, *shape: int, scale: float = 0.5) -> str:
        """A FLOAT constant of normal noise."""
        return self.constant((self.noise.standard_normal(shape) * scale).astype(np.float32))

    def ints(self, *numbers: int) -> str:
        """An INT64 constant vector."""
        return self.constant(np.array(numbers, dtype=np.int64))

    def _plain(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], name=self._node_name(op, [output]), **attributes))

    def body(self) -> Draft:
        """A draft inside this one: sees its values, shares its names."""
        return Draft(self.dice, self.noise, self.opset, self.symbolic, outer=self, names=self.names)

    def graph(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> onnx.GraphProto:
        return helper.make_graph(self.nodes, "g", inputs, outputs, initializer=self.initializers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGraph:
    """A model and requests for it, one for each size it may be asked at."""

    seed: int
    proto: onnx.ModelProto
    feeds: tuple[dict[str, np.ndarray[Any, Any]], ...]


def info(value: Value, *, dims: Sequence[int | str] | None = None) -> onnx.ValueInfoProto:
    """The value as a graph's input or output declares it."""
    kind = TensorProto.DataType.Value(value.dtype)
    return helper.make_tensor_value_info(value.name, kind, value.shape if dims is None else dims)


def random_graph(seed: int) -> RandomGraph:
    """The model of this seed: the same one always, for the installed onnx."""
    from scripts.fuzzing.operators import grow

    dice = random.Random(seed)
    draft = Draft(dice, np.random.default_rng(seed), dice.choice(OPSETS), dice.random() < 0.4)
    _add_inputs(draft)
    wanted = dice.randint(NODES_MIN, NODES_MAX)
    while len(draft.nodes) < wanted:
        grow(draft)
    return RandomGraph(seed=seed, proto=_model(draft), feeds=_requests(draft))


def _add_inputs(draft: Draft) -> None:
    dice = draft.dice
    first = SIZES[0] if draft.symbolic else dice.choice((1, 2, 3))
    shapes: list[Made] = [(FLOAT, (first, *dice.choice(((4,), (3, 8, 8), (3, 4), (6,)))))]
    others: tuple[Made, ...] = (
        *((FLOAT, (first, 4)), (FLOAT, ()), (FLOAT, (0, 4)), (FLOAT, (first, 3, 8, 8)), (FLOAT16, (first, 4))),
        *((INT64, (first,)), (INT32, (2, 3)), (UINT8, (first, 4)), (BOOL, ()), (STRING, (2,))),
    )
    shapes += [dice.choice(others) for _ in range(dice.randint(0, 3))]
    for dtype, shape in shapes:
        value = Value(draft.fresh(), dtype, tuple(shape))
        draft.inputs.append(value)
        draft.values.append(value)


def _dims(draft: Draft, value: Value) -> list[int | str]:
    grows = draft.symbolic and value.shape[:1] == SIZES[:1] and value.dtype not in {INT32, STRING}
    return ["N", *value.shape[1:]] if grows else list(value.shape)


def _requests(draft: Draft) -> tuple[dict[str, np.ndarray[Any, Any]], ...]:
    requests = []
    for size in SIZES if draft.symbolic else SIZES[:1]:
        feeds: dict[str, np.ndarray[Any, Any]] = {}
        for value in draft.inputs:
            shape = tuple(size if dim == "N" else int(dim) for dim in _dims(draft, value))
            feeds[value.name] = _noise(draft, value.dtype, shape)
        requests.append(feeds)
    return tuple(requests)


def _noise(draft: Draft, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if dtype in {FLOAT, FLOAT16, DOUBLE}:
        array: np.ndarray[Any, Any] = np.asarray(draft.noise.standard_normal(shape)).astype(NUMPY[dtype])
        if array.size and draft.dice.random() < 0.1:
            array.reshape(-1)[0] = draft.dice.choice((np.nan, np.inf, -np.inf, -0.0))
        return array
    whole = np.asarray(draft.noise.integers(0, 256 if dtype == UINT8 else 2, shape))
    if dtype == STRING:
        return np.asarray(np.vectorize(str, otypes=[object])(whole))
    return whole.astype(NUMPY[dtype])


def needed_nodes(nodes: Sequence[onnx.NodeProto], names: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that these names need, in their order."""
    makers = {name: node for node in nodes for name in node.output if name}
    kept: set[int] = set()
    waiting = list(names)
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and id(node) not in kept:
            kept.add(id(node))
            waiting += reads(node)
    return [node for node in nodes if id(node) in kept]


def reads(node: onnx.NodeProto) -> set[str]:
    """Names the node reads, in its bodies, too."""
    inner = [other for attribute in node.attribute if attribute.HasField("g") for other in attribute.g.node]
    results = [made.name for attribute in node.attribute if attribute.HasField("g") for made in attribute.g.output]
    return {*node.input, *results}.union(*(reads(other) for other in inner))


def _model(draft: Draft) -> onnx.ModelProto:
    dice = draft.dice
    read = {name for node in draft.nodes for name in node.input}
    loose = [value for value in draft.values if value.name not in read and value not in draft.inputs]
    others = [value for value in draft.values if value not in loose]
    chosen = dice.sample(loose, min(len(loose), dice.randint(1, 4)))
    chosen += [value for value in dice.sample(others, min(len(others), 2)) if dice.random() < 0.4]
    if not chosen:
        chosen = [draft.values[-1]]
    if any(value.dtype == FLOAT16 for value in draft.values) or any("Quantize" in n.op_type for n in draft.nodes):
        # There a node that nobody needs can change what the runtime makes of the others, and parts have none.
        draft.nodes = needed_nodes(draft.nodes, [value.name for value in chosen])
    inputs = [info(value, dims=_dims(draft, value)) for value in draft.inputs]
    weights = {tensor.name: tensor for tensor in draft.initializers}
    old = draft.opset < 9
    inputs += [
        helper.make_tensor_value_info(name, weights[name].data_type, weights[name].dims)
        for name in (weights if old else draft.overridable)
    ]
    outputs = [info(value, dims=_loose_dims(draft, value)) for value in chosen]
    graph = helper.make_graph(
        draft.nodes, dice.choice(("g", "", "値")), inputs, outputs, initializer=draft.initializers
    )
    if dice.random() < 0.3:
        order = list(graph.node)
        dice.shuffle(order)
        del graph.node[:]
        graph.node.extend(order)
    imports = [helper.make_opsetid("", draft.opset), helper.make_opsetid("com.microsoft", 1)]
    if draft.functions:
        imports.append(helper.make_opsetid("local", 1))
    model = helper.make_model(graph, opset_imports=imports, functions=draft.functions, producer_name="fuzz")
    # Before version 4 every initializer is an input, too; local functions came with 8.
    model.ir_version = 3 if old else max(helper.find_min_ir_version_for(imports[:1]), 8 if draft.functions else 4)
    return model


def _loose_dims(draft: Draft, value: Value) -> list[int | str]:
    """Nothing is claimed of an output's dims: where they are symbolic they follow from the input's."""
    return [f"{value.name}_{axis}" for axis in range(len(value.shape))]
