"""In how many parts a batch goes through a split plan: the head of one runs while the one before travels.

Only for models whose rows are independent (`ModelProfile.rows_apart`). Each part passes device, link, companion and
link again, each of which takes one part at a time; k parts of the same size take

    wait + Σ stages(part) + (k − 1) · max stage(part) + k · PART_MS

where `wait` is what is paid once (queues, round trip, opening). A smaller part costs more per row, since part of a
call's time does not depend on its size, so more parts are not always better. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from split.plan.observation import Floats, Observation
from split.plan.plan import RequestFacts
from split.plan.predict import STATIONS, Prediction
from split.plan.slack import MARGIN_MS
from split.plan.table import Column, PlanTable

PARTS: Final = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of parts that are compared. More than 16 gain under 6 % over them where all stages are alike."""
PART_MS: Final = 0.5
"""What a message more costs both event loops: two hops to a worker, framing, a reply."""
GAIN_RATIO: Final = 0.05
GAIN_MS: Final = 1.0
"""What a part more must gain, at least; less, and two predictions cannot be told apart."""

_STAGES: Final = STATIONS * [column is not Column.IMAGE for column in Column]
"""[stage, Column]: what passes one part at a time; the picture is prepared once, before them."""


def in_parts(table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction) -> Prediction:
    """`prediction` with every split plan served in as many parts as is fastest, one where that gains too little or its
    way out would no longer fit the budget.

    `table`: as built, not `at` the request's sizes; `prediction`: of the request as one part.
    """
    dim = table.batch_dim
    if dim is None or not facts.sizes or (rows := facts.sizes[dim]) < 2 or observation.remote is None:
        return prediction
    units: Floats = _STAGES * prediction.units
    wait_ms = prediction.mean_ms - (units @ table.at(facts.sizes).costs).sum(axis=0)
    best_ms, best = prediction.mean_ms.copy(), np.ones(len(table), dtype=np.int64)
    for parts, part_rows in part_sizes(rows):
        at_part = table.at((*facts.sizes[:dim], part_rows, *facts.sizes[dim + 1 :]))
        of_part = units @ at_part.costs
        mean_ms = wait_ms + of_part.sum(axis=0) + (parts - 1) * of_part.max(axis=0) + parts * PART_MS
        way_out_ms = prediction.way_out_ms + (parts - 1) * MARGIN_MS  # each part is finished here by itself
        lost = table.finishes_here & (way_out_ms > facts.budget_ms) & (prediction.way_out_ms <= facts.budget_ms)
        better = table.splits & ~lost & (best_ms - mean_ms >= np.maximum(GAIN_RATIO * best_ms, GAIN_MS))
        best_ms[better], best[better] = mean_ms[better], parts
    more = (best - 1) * MARGIN_MS if table.finishes_here else 0.0
    return replace(
        prediction,
        mean_ms=best_ms,
        risk_ms=prediction.risk_ms + best_ms - prediction.mean_ms,
        way_out_ms=prediction.way_out_ms + more,
        parts={int(row): int(best[row]) for row in np.flatnonzero(best > 1)},
    )


def part_sizes(rows: int) -> list[tuple[int, int]]:
    """(parts, rows of the largest) for each way to part `rows` that is compared: none has an empty part."""
    found = {}
    for parts in PARTS:
        if parts <= rows:
            part_rows = -(-rows // parts)
            found[-(-rows // part_rows)] = part_rows
    return list(found.items())
