"""What cutters trip over: sequences, optionals, strings, chance, what is there in training only."""

from __future__ import annotations

import numpy as np
from onnx import helper

from scripts.fuzzing.families.nodes import cast
from scripts.fuzzing.graphs import BOOL, FLOAT, STRING, Draft


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
