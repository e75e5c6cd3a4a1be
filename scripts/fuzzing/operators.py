"""What a random graph may grow by: one function for each family, which adds its nodes or finds that it cannot.

Versions of the standard differ in where a parameter stands (attribute or input); `axes_of` and the like know it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from scripts.fuzzing.graphs import (
    BOOL,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    STRING,
    UINT8,
    Draft,
    Value,
    info,
)

UNARY: Final = (
    *(("Relu", 7), ("Neg", 7), ("Abs", 7), ("Tanh", 7), ("Sigmoid", 7), ("Exp", 7), ("Sqrt", 7), ("Softplus", 7)),
    *(("Erf", 9), ("Elu", 7), ("LeakyRelu", 7), ("Identity", 7), ("Sin", 7), ("HardSwish", 14), ("Celu", 12)),
    *(("Reciprocal", 7), ("Softsign", 7), ("Gelu", 20)),
)
BINARY: Final = ("Add", "Sub", "Mul", "Div", "Max", "Min")


def cast(draft: Draft, value: str | Value, to: str, shape: Sequence[int]) -> Value:
    return draft.node("Cast", [value], (to, shape), to=TensorProto.DataType.Value(to))[0]


def axes_of(draft: Draft, axes: Sequence[int], since: int) -> tuple[list[str], dict[str, Any]]:
    """Axes as an input from opset `since` on, before that as an attribute."""
    return ([draft.ints(*axes)], {}) if draft.opset >= since else ([], {"axes": list(axes)})


def unary(draft: Draft) -> bool:
    x = draft.floats()
    if x is None:
        return False
    op, _ = draft.dice.choice([(op, since) for op, since in UNARY if since <= draft.opset])
    draft.node(op, [x], (FLOAT, x.shape))
    return True


def binary(draft: Draft) -> bool:
    a = draft.floats()
    if a is None:
        return False
    b = draft.pick(lambda v: v.dtype == FLOAT and _broadcasts(a.shape, v.shape))
    op = draft.dice.choice(BINARY if draft.opset >= 8 else BINARY[:4])
    if b is None or draft.dice.random() < 0.3:
        shape = a.shape[-1:] if draft.dice.random() < 0.5 else ()
        draft.node(op, [a, draft.weights(*shape)], (FLOAT, a.shape))
        return True
    draft.node(op, [a, b], (FLOAT, np.broadcast_shapes(a.shape, b.shape)))
    return True


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return len(np.broadcast_shapes(tuple(a), tuple(b))) <= 4
    except ValueError:
        return False


def matmul(draft: Draft) -> bool:
    x = draft.floats(2, 3)
    if x is None:
        return False
    inner, outer = x.shape[-1], draft.dice.choice((3, 4, 48))
    if len(x.shape) == 2 and draft.dice.random() < 0.4:
        draft.node(
            "Gemm", [x, draft.weights(outer, inner), draft.weights(outer)], (FLOAT, (x.shape[0], outer)), transB=1
        )
    else:
        draft.node("MatMul", [x, draft.weights(inner, outer)], (FLOAT, (*x.shape[:-1], outer)))
    return True


def conv(draft: Draft) -> bool:
    x = draft.pick(lambda v: v.dtype == FLOAT and len(v.shape) == 4 and min(v.shape[2:]) >= 2 and v.shape[0] > 0)
    if x is None:
        return False
    n, channels, high, wide = x.shape
    kind = draft.dice.random()
    if kind < 0.5:
        outer = draft.dice.choice((2, 4, 8))
        bias = [draft.weights(outer)] if draft.dice.random() < 0.5 else []
        [y] = draft.node(
            "Conv", [x, draft.weights(outer, channels, 3, 3), *bias], (FLOAT, (n, outer, high, wide)), pads=[1] * 4
        )
        draft.node("Relu", [y], (FLOAT, y.shape))
    elif kind < 0.65:
        scale = draft.constant(np.abs(draft.noise.standard_normal((4, channels))[0]).astype(np.float32))
        mean, var = draft.weights(channels), draft.constant(np.full(channels, 0.7, np.float32))
        draft.node("BatchNormalization", [x, scale, draft.weights(channels), mean, var], (FLOAT, x.shape))
    elif kind < 0.8:
        small = (n, channels, high // 2, wide // 2)
        indices = draft.dice.choice(((), (None,), ((INT64, small),)))
        draft.node("MaxPool", [x], (FLOAT, small), *indices, kernel_shape=[2, 2], strides=[2, 2])
    elif kind < 0.9:
        draft.node("GlobalAveragePool", [x], (FLOAT, (n, channels, 1, 1)))
    else:
        shape = (n, 2, high * 2, wide * 2)
        if np.prod(shape) > 4096:
            return False
        draft.node("ConvTranspose", [x, draft.weights(channels, 2, 2, 2)], (FLOAT, shape), strides=[2, 2])
    return True


def normalise(draft: Draft) -> bool:
    x = draft.floats(2, 3, 4)
    if x is None or 0 in x.shape:
        return False
    if draft.opset >= 17 and draft.dice.random() < 0.5:
        scale = draft.weights(x.shape[-1])
        draft.node("LayerNormalization", [x, scale], (FLOAT, x.shape), None, (FLOAT, (*x.shape[:-1], 1)), axis=-1)
    else:
        draft.node("Softmax", [x], (FLOAT, x.shape), axis=len(x.shape) - 1)
    return True


def reduce(draft: Draft) -> bool:
    x = draft.floats(1, 2, 3, 4)
    if x is None or 0 in x.shape:
        return False
    axis, keep = draft.dice.randrange(len(x.shape)), draft.dice.choice((0, 1))
    shape = [*x.shape[:axis], *([1] * keep), *x.shape[axis + 1 :]]
    if draft.dice.random() < 0.2:
        draft.node("ArgMax", [x], (INT64, shape), axis=axis, keepdims=keep)
        return True
    op = draft.dice.choice(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"))
    more, attributes = axes_of(draft, [axis], 13 if op == "ReduceSum" else 18)
    draft.node(op, [x, *more], (FLOAT, shape), keepdims=keep, **attributes)
    return True


def several(draft: Draft) -> bool:
    """Nodes with more than one output."""
    x = draft.pick(lambda v: v.dtype == FLOAT and len(v.shape) >= 1 and v.shape[-1] >= 2)
    if x is None:
        return False
    axis, size = len(x.shape) - 1, x.shape[-1]
    if draft.dice.random() < 0.5:
        left = draft.dice.randint(1, size - 1)
        made = [(FLOAT, (*x.shape[:-1], part)) for part in (left, size - left)]
        if draft.opset >= 13:
            draft.node("Split", [x, draft.ints(left, size - left)], *made, axis=axis)
        else:
            draft.node("Split", [x], *made, axis=axis, split=[left, size - left])
        return True
    made = [(FLOAT, (*x.shape[:-1], 2)), (INT64, (*x.shape[:-1], 2))]
    if draft.opset >= 10:
        draft.node("TopK", [x, draft.ints(2)], *made, axis=axis)
    else:
        draft.node("TopK", [x], *made, axis=axis, k=2)
    return True


def layout(draft: Draft) -> bool:
    x = draft.floats(2, 3, 4)
    if x is None:
        return False
    kind, rank = draft.dice.randrange(6), len(x.shape)
    if kind == 0:
        order = draft.dice.sample(range(rank), rank)
        draft.node("Transpose", [x], (FLOAT, [x.shape[axis] for axis in order]), perm=order)
    elif kind == 1:
        y = draft.pick(lambda v: v.dtype == FLOAT and v.shape[:-1] == x.shape[:-1] and len(v.shape) == rank)
        if y is None or x.shape[-1] + y.shape[-1] > 64:
            return False
        draft.node("Concat", [x, y], (FLOAT, (*x.shape[:-1], x.shape[-1] + y.shape[-1])), axis=rank - 1)
    elif kind == 2:
        stop = draft.dice.randint(0, x.shape[-1])
        shape = (*x.shape[:-1], stop)
        if draft.opset >= 10:
            draft.node("Slice", [x, draft.ints(0), draft.ints(stop), draft.ints(rank - 1)], (FLOAT, shape))
        else:
            draft.node("Slice", [x], (FLOAT, shape), starts=[0], ends=[stop], axes=[rank - 1])
    elif kind == 3:
        more, attributes = axes_of(draft, [0], 13)
        draft.node("Unsqueeze", [x, *more], (FLOAT, (1, *x.shape)), **attributes)
    elif kind == 4:
        if x.shape[0] != 1 or (draft.symbolic and rank == 4):
            return False
        more, attributes = axes_of(draft, [0], 13)
        draft.node("Squeeze", [x, *more], (FLOAT, x.shape[1:]), **attributes)
    else:
        low = draft.weights()
        if draft.opset < 11:
            draft.node("Clip", [x], (FLOAT, x.shape), min=-1.0)
        else:
            draft.node("Clip", [x, *draft.dice.choice(((low,), ("", draft.weights()), (low, "")))], (FLOAT, x.shape))
    return True


def shapes(draft: Draft) -> bool:
    """Shape arithmetic: Shape → Gather → Concat → Reshape, ConstantOfShape, Expand."""
    x = draft.floats(2, 3, 4)
    if x is None or 0 in x.shape:
        return False
    [shape] = draft.node("Shape", [x], (INT64, (len(x.shape),)))
    kind = draft.dice.random()
    if kind < 0.6 or draft.opset < 9:
        [first] = draft.node("Gather", [shape, draft.ints(0)], (INT64, (1,)))
        [wanted] = draft.node("Concat", [first, draft.ints(-1)], (INT64, (2,)), axis=0)
        draft.node("Reshape", [x, wanted], (FLOAT, (x.shape[0], int(np.prod(x.shape[1:])))))
    elif kind < 0.8:
        [zeros] = draft.node("ConstantOfShape", [shape], (FLOAT, x.shape))
        draft.node("Add", [zeros, x], (FLOAT, x.shape))
    else:
        draft.node("Expand", [draft.weights(1), shape], (FLOAT, x.shape))
    return True


def integers(draft: Draft) -> bool:
    x = draft.pick(lambda v: v.dtype == INT64)
    if x is None:
        return False
    kind = draft.dice.randrange(4)
    if kind == 0:
        draft.node(
            draft.dice.choice(("Add", "Mul", "Sub")), [x, draft.constant(np.array(3, np.int64))], (INT64, x.shape)
        )
    elif kind == 1:
        cast(draft, x, FLOAT, x.shape)
    elif kind == 2 and draft.opset >= 9:
        flag = cast(draft, x, BOOL, x.shape)
        draft.node("Where", [flag, x, draft.constant(np.array(7, np.int64))], (INT64, x.shape))
    else:
        y = draft.floats(2, 3)
        if y is None or y.shape[0] < 2 or len(x.shape) != 1:
            return False
        bit = cast(draft, cast(draft, x, BOOL, x.shape), INT64, x.shape)
        draft.node("Gather", [y, bit], (FLOAT, (*x.shape, *y.shape[1:])))
    return True


def varying(draft: Draft) -> bool:
    """Sizes that depend on values: NonZero."""
    x = draft.floats(1, 2)
    if x is None or draft.opset < 9 or 0 in x.shape:
        return False
    [flags] = draft.node("Greater", [x, draft.constant(np.array(0, np.float32))], (BOOL, x.shape))
    [found] = draft.node("NonZero", [flags], (INT64, (len(x.shape), 1)))
    draft.values.remove(found)  # its real size is anyone's guess: only what reduces it may follow
    numbers = cast(draft, found, FLOAT, found.shape)
    draft.values.remove(numbers)
    more, attributes = axes_of(draft, [1], 13)
    draft.node("ReduceSum", [numbers, *more], (FLOAT, (len(x.shape),)), keepdims=0, **attributes)
    return True


def casts(draft: Draft) -> bool:
    x = draft.floats()
    if x is None:
        return False
    kind = draft.dice.randrange(4)
    if kind == 0:
        half = cast(draft, x, FLOAT16, x.shape)
        [y] = draft.node(draft.dice.choice(("Relu", "Neg", "Sigmoid")), [half], (FLOAT16, x.shape))
        [z] = draft.node("Mul", [y, half], (FLOAT16, x.shape))
        cast(draft, z, FLOAT, x.shape)
    elif kind == 1:
        wide = cast(draft, x, DOUBLE, x.shape)
        [y] = draft.node("Add", [wide, draft.constant(np.array(0.1, np.float64))], (DOUBLE, x.shape))
        cast(draft, y, FLOAT, x.shape)
    elif kind == 2:
        flag = draft.node("Greater", [x, draft.constant(np.array(0.1, np.float32))], (BOOL, x.shape))[0]
        if draft.opset >= 9:
            draft.node("Where", [flag, x, draft.constant(np.array(2, np.float32))], (FLOAT, x.shape))
    elif draft.opset >= 13:
        odd = draft.fresh()
        kinds = {"BFLOAT16": 13, "FLOAT8E4M3FN": 19}
        wanted = draft.dice.choice([name for name, since in kinds.items() if since <= draft.opset])
        draft.nodes.append(helper.make_node("Cast", [x.name], [odd], to=TensorProto.DataType.Value(wanted)))
        cast(draft, odd, FLOAT, x.shape)
    else:
        return False
    return True


def half(draft: Draft) -> bool:
    """Operators on FLOAT16 that came as FLOAT16."""
    x = draft.pick(lambda v: v.dtype == FLOAT16)
    if x is None:
        return False
    if draft.dice.random() < 0.3:
        cast(draft, x, FLOAT, x.shape)
    else:
        draft.node(draft.dice.choice(("Relu", "Abs", "Tanh", "Neg")), [x], (FLOAT16, x.shape))
    return True


def quantised(draft: Draft) -> bool:
    """QuantizeLinear → DequantizeLinear, with a quantised weight where the rank allows."""
    x = draft.floats(1, 2, 3, 4)
    if x is None or draft.opset < 10:
        return False
    kind = draft.dice.choice((INT8, UINT8))
    scale = draft.constant(np.array(0.05, np.float32))
    zero = draft.constant(np.array(3, np.int8 if kind == INT8 else np.uint8))
    [q] = draft.node("QuantizeLinear", [x, scale, zero], (kind, x.shape))
    [d] = draft.node("DequantizeLinear", [q, scale, zero], (FLOAT, x.shape))
    if len(x.shape) == 2 and 0 not in x.shape:
        inner = x.shape[1]
        weight = draft.constant(draft.noise.integers(-128, 128, (inner, 3)).astype(np.int8))
        small = draft.constant(np.array(0.01, np.float32))
        [w] = draft.node("DequantizeLinear", [weight, small], (FLOAT, (inner, 3)))
        draft.node("MatMul", [d, w], (FLOAT, (x.shape[0], 3)))
    return True


def dynamic_int8(draft: Draft) -> bool:
    """DynamicQuantizeLinear → MatMulInteger or ConvInteger → Cast → Mul."""
    x = draft.floats(2, 4)
    if x is None or draft.opset < 11 or 0 in x.shape or min(x.shape[2:], default=9) < 3:
        return False
    q, scale, zero = draft.node("DynamicQuantizeLinear", [x], (UINT8, x.shape), (FLOAT, ()), (UINT8, ()))
    kind = draft.dice.choice((np.int8, np.uint8))
    weight_zero = draft.constant(np.array(0 if kind == np.int8 else 128, kind))
    low, high = (-128, 128) if kind == np.int8 else (0, 256)
    if len(x.shape) == 2:
        weight = draft.constant(draft.noise.integers(low, high, (x.shape[1], 5)).astype(kind))
        [y] = draft.node("MatMulInteger", [q, weight, zero, weight_zero], (INT32, (x.shape[0], 5)))
    else:
        weight = draft.constant(draft.noise.integers(0, 256, (4, x.shape[1], 3, 3)).astype(np.uint8))
        shape = (x.shape[0], 4, x.shape[2] - 2, x.shape[3] - 2)
        [y] = draft.node("ConvInteger", [q, weight, zero], (INT32, shape))
    z = cast(draft, y, FLOAT, y.shape)
    draft.node("Mul", [z, scale], (FLOAT, y.shape))
    return True


def branch(draft: Draft) -> bool:
    """If whose branches capture what is around them, nested at times."""
    x = draft.floats(0, 1, 2)
    if x is None or (draft.outer is not None and draft.outer.outer is not None):
        return False
    [total] = draft.node("Size", [x], (INT64, ()))
    flag = draft.pick(lambda v: v.dtype == BOOL and v.shape == ())
    if flag is None:
        flag = cast(draft, total, BOOL, ())
    branches = []
    for _ in range(2):
        inner = draft.body()
        inner.values.append(x)
        for _ in range(draft.dice.randint(1, 4)):
            draft.dice.choice((unary, binary, matmul, branch, casts))(inner)
        last = inner.pick(lambda v: v.dtype == FLOAT and _broadcasts(v.shape, x.shape) and v.name != x.name)
        same = last is not None and np.broadcast_shapes(last.shape, x.shape) == x.shape
        [y] = inner.node("Add", [x, last if last is not None and same else x], (FLOAT, x.shape))
        branches.append(inner.graph([], [info(y)] if not draft.symbolic else [_ranked(y)]))
    draft.node("If", [flag], (FLOAT, x.shape), then_branch=branches[0], else_branch=branches[1])
    return True


def _ranked(value: Value) -> Any:
    return info(value, dims=[f"{value.name}_{axis}" for axis in range(len(value.shape))])


def loop(draft: Draft) -> bool:
    """Loop over a carried value with a scan output and a captured value; its trip count may be 0 or left out."""
    x = draft.floats(1, 2)
    if x is None or draft.outer is not None:
        return False
    other = draft.pick(lambda v: v.dtype == FLOAT and v.shape == x.shape)
    inner = draft.body()
    turn, going, carried = (Value(draft.fresh(), *kind) for kind in ((INT64, ()), (BOOL, ()), (FLOAT, x.shape)))
    inner.values.append(carried)
    draft.dice.choice((unary, binary))(inner)
    [step] = inner.node("Add", [carried, other or x], (FLOAT, x.shape))
    if draft.opset >= 9 and (times := draft.dice.randint(0, 3)) and draft.dice.random() < 0.3:
        limit = inner.constant(np.array(times, np.int64))
        [more] = inner.node("Less", [turn, limit], (BOOL, ()))
        count = ""
    else:
        [more] = inner.node("Identity", [going], (BOOL, ()))
        count = draft.constant(np.array(draft.dice.randint(0, 3), np.int64))
    [row] = inner.node("Identity", [step], (FLOAT, x.shape))
    shown = _ranked if draft.symbolic else info
    graph = inner.graph([info(turn), info(going), shown(carried)], [info(more), shown(step), shown(row)])
    start = draft.constant(np.array(True))
    _, rows = draft.node("Loop", [count, start, x], (FLOAT, x.shape), (FLOAT, (3, *x.shape)), body=graph)
    draft.values.remove(rows)  # how many rows depends on the run
    more_axes, attributes = axes_of(draft, [0], 13)
    draft.node("ReduceSum", [rows, *more_axes], (FLOAT, x.shape), keepdims=0, **attributes)
    return True


def scan(draft: Draft) -> bool:
    """Scan over the first dim with a state and a captured weight."""
    x = draft.floats(2, 3)
    if x is None or draft.opset < 9 or 0 in x.shape or draft.outer is not None:
        return False
    inner = draft.body()
    state, item = (Value(draft.fresh(), FLOAT, x.shape[1:]) for _ in range(2))
    weight = draft.weights(x.shape[-1])
    [added] = inner.node("Add", [state, item], (FLOAT, state.shape))
    [scaled] = inner.node("Mul", [added, weight], (FLOAT, state.shape))
    shown = _ranked if draft.symbolic else info
    graph = inner.graph([shown(state), shown(item)], [shown(added), shown(scaled)])
    if draft.opset >= 13:
        [start] = draft.node("ReduceSum", [x, draft.ints(0)], (FLOAT, state.shape), keepdims=0)
    else:
        [start] = draft.node("ReduceSum", [x], (FLOAT, state.shape), axes=[0], keepdims=0)
    draft.node("Scan", [start, x], (FLOAT, state.shape), (FLOAT, x.shape), body=graph, num_scan_inputs=1)
    return True


def recurrent(draft: Draft) -> bool:
    """LSTM with inputs and outputs left out."""
    x = draft.floats(3)
    if x is None or 0 in x.shape or x.shape[2] > 64:
        return False
    steps, batch, size = x.shape
    inputs = [
        x,
        draft.weights(1, 8, size),
        draft.weights(1, 8, 2),
        *draft.dice.choice(((), ("", ""), (draft.weights(1, 16),))),
    ]
    every, last = (FLOAT, (steps, 1, batch, 2)), (FLOAT, (1, batch, 2))
    made = draft.dice.choice(((every,), (every, last, last), (None, last), (None, None, last)))
    draft.node("LSTM", inputs, *made, hidden_size=2)
    return True


def sequences(draft: Draft) -> bool:
    x = draft.pick(lambda v: v.dtype == FLOAT and len(v.shape) >= 1 and v.shape[-1] == 4)
    if x is None or draft.opset < 11:
        return False
    if draft.opset >= 16 and draft.dice.random() < 0.3:
        maybe = draft.fresh()
        draft.nodes.append(helper.make_node("Optional", [x.name], [maybe]))
        draft.node("OptionalGetElement", [maybe], (FLOAT, x.shape))
        return True
    parts = draft.fresh()
    draft.nodes.append(
        helper.make_node("SplitToSequence", [x.name, draft.constant(np.array(2, np.int64))], [parts], axis=-1)
    )
    if draft.dice.random() < 0.5:
        draft.node("ConcatFromSequence", [parts], (FLOAT, x.shape), axis=-1)
    else:
        draft.node("SequenceAt", [parts, draft.constant(np.array(1, np.int64))], (FLOAT, (*x.shape[:-1], 2)))
    return True


def strings(draft: Draft) -> bool:
    x = draft.pick(lambda v: v.dtype == STRING)
    if x is None or draft.opset < 10:
        return False
    if draft.dice.random() < 0.5:
        draft.node("Identity", [x], (STRING, x.shape))
    else:
        cast(draft, x, FLOAT, x.shape)
    return True


def chance(draft: Draft) -> bool:
    """Random operators: with a seed, or without one where the value cannot be seen."""
    x = draft.floats(1, 2, 3)
    if x is None or 0 in x.shape or draft.outer is not None:
        return False
    if draft.dice.random() < 0.5:
        [noise] = draft.node("RandomUniformLike", [x], (FLOAT, x.shape), seed=float(draft.dice.randint(1, 99)))
    else:
        [noise] = draft.node("RandomNormal", [], (FLOAT, x.shape[-1:]), shape=list(x.shape[-1:]), seed=7.0)
    if draft.dice.random() < 0.3:
        draft.values.remove(noise)
        draft.nodes[-1].attribute.remove(next(a for a in draft.nodes[-1].attribute if a.name == "seed"))
        [noise] = draft.node("Mul", [noise, draft.constant(np.array(0, np.float32))], (FLOAT, noise.shape))
    draft.node("Add", [x, noise], (FLOAT, x.shape))
    return True


def dropout(draft: Draft) -> bool:
    x = draft.floats(1, 2, 3)
    if x is None:
        return False
    mask = draft.dice.choice(((), (None,), ((BOOL if draft.opset >= 10 else FLOAT, x.shape),)))
    if draft.opset >= 12:
        draft.node("Dropout", [x, draft.constant(np.array(0.3, np.float32))], (FLOAT, x.shape), *mask)
    else:
        draft.node("Dropout", [x], (FLOAT, x.shape), *mask, ratio=0.3)
    return True


def contrib(draft: Draft) -> bool:
    """Operators whose types ONNX's own shape inference does not know."""
    x = draft.floats(2, 3)
    if x is None or 0 in x.shape:
        return False
    if draft.dice.random() < 0.5:
        draft.node("Gelu", [x], (FLOAT, x.shape), domain="com.microsoft")
    else:
        weight = draft.weights(x.shape[-1], 4)
        draft.node("FusedMatMul", [x, weight], (FLOAT, (*x.shape[:-1], 4)), domain="com.microsoft", alpha=0.5)
    return True


def function(draft: Draft) -> bool:
    """A call of a model-local function with an attribute."""
    x = draft.floats()
    if x is None or draft.opset < 15 or draft.outer is not None:
        return False
    if not draft.functions:
        leaky = helper.make_node("LeakyRelu", ["a"], ["b"])
        attribute = leaky.attribute.add(name="alpha", ref_attr_name="slope")
        attribute.type = 1
        half = helper.make_node("Constant", [], ["h"], value=numpy_helper.from_array(np.array(0.5, np.float32)))
        body = [leaky, half, helper.make_node("Mul", ["b", "h"], ["c"]), helper.make_node("Add", ["c", "a"], ["d"])]
        imports = [helper.make_opsetid("", draft.opset)]
        draft.functions.append(helper.make_function("local", "Bend", ["a"], ["d"], body, imports, ["slope"]))
    draft.node("Bend", [x], (FLOAT, x.shape), domain="local", slope=0.2)
    return True


Family = Callable[[Draft], bool]

FAMILIES: Final[tuple[tuple[int, Family], ...]] = (
    *((10, unary), (12, binary), (6, matmul), (8, conv), (4, normalise), (5, reduce), (4, several), (8, layout)),
    *((5, shapes), (3, integers), (2, varying), (4, casts), (2, half), (4, quantised), (4, dynamic_int8)),
    *((3, branch), (2, loop), (2, scan), (2, recurrent), (2, sequences), (1, strings), (2, chance), (2, dropout)),
    *((2, contrib), (3, function)),
)


def grow(draft: Draft) -> None:
    """Add one family's nodes, or none."""
    [family] = draft.dice.choices([f for _, f in FAMILIES], [weight for weight, _ in FAMILIES])
    family(draft)
