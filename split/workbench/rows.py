"""Whether the rows of a batch depend on each other: the whole, run on a batch and on its rows one by one, must agree.

A softmax or a mean over the batch, a batch norm that was left in training mode, a scale taken over all rows: all show
as soon as the rows differ, so they are made to differ in every input.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from split.codec.golden import SAME
from split.errors import EngineFailed, InvalidRequest
from split.graph.card import ModelCard
from split.graph.growth import batch_dim
from split.runtime.engine import Segment
from split.tensor import Array, Tensors, worst_difference

log = logging.getLogger(__name__)

ROWS: Final = 4
PARTS: Final = ((0, 1), (1, 2), (2, 3), (3, 4), (1, 4))
"""Rows [from, to) that are run by themselves: each one, and several."""
_SCALES: Final = (1.0, -0.5, 0.25, 2.0)
"""Of the rows: a row that an operator weighs by another's size changes much."""


def rows_apart(card: ModelCard, whole: Segment, feeds: Tensors) -> bool:
    """Whether a batch may be served in parts. `feeds`: a request that fits the model; of it the first row is used.

    False where there is no batch (`batch_dim`), where the model does not run on one, and where rows cannot be made to
    differ: what was not seen is not assumed.
    """
    if batch_dim(card.inputs, card.outputs) is None:
        return False
    batch = {name: _different_rows(array) for name, array in feeds.items()}
    together: Tensors = {name: rows for name, rows in batch.items() if rows is not None}
    if len(together) < len(batch):
        return False
    try:
        expected = whole.run(together)
        apart = [(at, whole.run({name: rows[slice(*at)] for name, rows in together.items()})) for at in PARTS]
    except (InvalidRequest, EngineFailed) as error:
        log.info("%s does not run on batches of %d and less: %s", card.path, ROWS, error)
        return False
    if any(array.shape[:1] != (ROWS,) for array in expected.values()):
        return False
    for (first, end), found in apart:
        for row in range(first, end):
            one = {name: array[row - first : row - first + 1] for name, array in found.items()}
            same = {name: array[row : row + 1] for name, array in expected.items()}
            if worst_difference(one, same, list(same)) > SAME:
                return False
    return True


def _different_rows(array: Array) -> Array | None:
    """[ROWS, …], from the first row: its values moved around, of floats scaled, too; None where that gives equal ones.
    Values of integers stay, since they may be indices."""
    if array.dtype == object or array.shape[0] == 0:
        return None
    row = array[0]
    rows = [np.roll(row.reshape(-1), number * (row.size // ROWS + 1)).reshape(row.shape) for number in range(ROWS)]
    if row.dtype.kind == "f":
        rows = [(moved * scale).astype(row.dtype) for moved, scale in zip(rows, _SCALES, strict=True)]
    differ = all(not np.array_equal(rows[a], rows[b]) for a in range(ROWS) for b in range(a))
    return np.stack(rows) if differ else None
