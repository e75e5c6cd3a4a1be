"""Arithmetic: what networks spend their time in, element by element and in matrices."""

from __future__ import annotations

from typing import Final

import numpy as np

from scripts.fuzzing.families.nodes import axes_of, broadcasts
from scripts.fuzzing.graphs import FLOAT, INT64, Draft

UNARY: Final = (
    *(("Relu", 7), ("Neg", 7), ("Abs", 7), ("Tanh", 7), ("Sigmoid", 7), ("Exp", 7), ("Sqrt", 7), ("Softplus", 7)),
    *(("Erf", 9), ("Elu", 7), ("LeakyRelu", 7), ("Identity", 7), ("Sin", 7), ("HardSwish", 14), ("Celu", 12)),
    *(("Reciprocal", 7), ("Softsign", 7), ("Gelu", 20)),
)
BINARY: Final = ("Add", "Sub", "Mul", "Div", "Max", "Min")


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
    b = draft.pick(lambda v: v.dtype == FLOAT and broadcasts(a.shape, v.shape))
    op = draft.dice.choice(BINARY if draft.opset >= 8 else BINARY[:4])
    if b is None or draft.dice.random() < 0.3:
        shape = a.shape[-1:] if draft.dice.random() < 0.5 else ()
        draft.node(op, [a, draft.weights(*shape)], (FLOAT, a.shape))
        return True
    draft.node(op, [a, b], (FLOAT, np.broadcast_shapes(a.shape, b.shape)))
    return True


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
