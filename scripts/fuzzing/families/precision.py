"""Element types: casts, 16 bits, quantised pairs, dynamic int8."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from scripts.fuzzing.families.nodes import cast
from scripts.fuzzing.graphs import BOOL, DOUBLE, FLOAT, FLOAT16, INT8, INT32, UINT8, Draft


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
