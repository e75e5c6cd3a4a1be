"""Bodies: If, Loop and Scan with what they capture, and calls of model-local functions."""

from __future__ import annotations

import numpy as np
from onnx import helper, numpy_helper

from scripts.fuzzing.families.dense import binary, matmul, unary
from scripts.fuzzing.families.nodes import axes_of, broadcasts, cast, ranked
from scripts.fuzzing.families.precision import casts
from scripts.fuzzing.graphs import BOOL, FLOAT, INT64, Draft, Value, info


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
        last = inner.pick(lambda v: v.dtype == FLOAT and broadcasts(v.shape, x.shape) and v.name != x.name)
        same = last is not None and np.broadcast_shapes(last.shape, x.shape) == x.shape
        [y] = inner.node("Add", [x, last if last is not None and same else x], (FLOAT, x.shape))
        branches.append(inner.graph([], [info(y)] if not draft.symbolic else [ranked(y)]))
    draft.node("If", [flag], (FLOAT, x.shape), then_branch=branches[0], else_branch=branches[1])
    return True


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
    shown = ranked if draft.symbolic else info
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
    shown = ranked if draft.symbolic else info
    graph = inner.graph([shown(state), shown(item)], [shown(added), shown(scaled)])
    if draft.opset >= 13:
        [start] = draft.node("ReduceSum", [x, draft.ints(0)], (FLOAT, state.shape), keepdims=0)
    else:
        [start] = draft.node("ReduceSum", [x], (FLOAT, state.shape), axes=[0], keepdims=0)
    draft.node("Scan", [start, x], (FLOAT, state.shape), (FLOAT, x.shape), body=graph, num_scan_inputs=1)
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
