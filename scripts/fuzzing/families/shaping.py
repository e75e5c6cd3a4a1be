"""Sizes and places: parts, layouts, shape arithmetic, integers that index, sizes that depend on values."""

from __future__ import annotations

import numpy as np

from scripts.fuzzing.families.nodes import axes_of, cast
from scripts.fuzzing.graphs import BOOL, FLOAT, INT64, Draft


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
