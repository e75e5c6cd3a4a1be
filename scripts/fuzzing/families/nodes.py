"""Nodes that several families are made of, and what the versions of the standard differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from scripts.fuzzing.graphs import Draft, Value, info


def cast(draft: Draft, value: str | Value, to: str, shape: Sequence[int]) -> Value:
    return draft.node("Cast", [value], (to, shape), to=TensorProto.DataType.Value(to))[0]


def axes_of(draft: Draft, axes: Sequence[int], since: int) -> tuple[list[str], dict[str, Any]]:
    """Axes as an input from opset `since` on, before that as an attribute."""
    return ([draft.ints(*axes)], {}) if draft.opset >= since else ([], {"axes": list(axes)})


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether they do, to a shape of at most four dims."""
    try:
        return len(np.broadcast_shapes(tuple(a), tuple(b))) <= 4
    except ValueError:
        return False


def ranked(value: Value) -> Any:
    """The value as a graph declares it whose dims are not known."""
    return info(value, dims=[f"{value.name}_{axis}" for axis in range(len(value.shape))])
