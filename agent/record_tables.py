"""What plans cost, as a record says it (`record.Table`): one table for requests of a model at about the same sizes, a
new one where the costs have become others. Requests refer to them by number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.planner import Known
from agent.record import TABLES_PER_HEAD, Behaviour, DevicePower, PlanCosts, Table, pack
from agent.record_rows import fine
from split.plan.observation import Floats
from split.plan.power import Power
from split.plan.table import Column, PlanTable

TABLES_MAX: Final = 64
"""In one hour; then a request is recorded by the nearest of its model, with the work it has of that."""
FINE: Final = 8
"""Steps in which sizes double: sizes within 5 % share a table."""
LOOK_S: Final = 1.0
"""Between two looks at whether a table is still right."""
OTHER_RATIO: Final = 0.1
"""It is not if a cost is off by more, and it is a minute old, or off by `ANEW_RATIO`: the companion has told its own
times."""
ANEW_RATIO: Final = 0.5
SAME_S: Final = 60.0

_COMPARED: Final = [Column.HEAD, Column.TAIL]


@dataclass(slots=True, kw_only=True)
class Written:
    """A table as it was written."""

    number: int
    table: PlanTable
    cloud_ms: Floats
    """As the planner had them."""
    costs: Floats
    """Of these, at the table's sizes, those that are compared."""
    work: float
    at_s: float
    looked_at_s: float


@dataclass(slots=True)
class Tables:
    """Of one head."""

    frames: list[bytes] = field(default_factory=list)
    """By their numbers."""
    _written: dict[tuple[str, tuple[int, ...]], Written] = field(default_factory=dict)

    def of(
        self, model: str, sizes: tuple[int, ...], known: Known, power: Callable[[], Power], now_s: float
    ) -> tuple[Written | None, bytes]:
        """The table for a request of these sizes, None where there is no room; and its frame where it is a new one."""
        key = (model, tuple(map(_near, sizes)))
        written = self._written.get(key)
        if written is not None:
            if written.cloud_ms is known.cloud_ms or now_s < written.looked_at_s + LOOK_S:
                return written, b""
            written.looked_at_s = now_s
            if not _became_other(written, known, _costs(known, key[1]), now_s):
                return written, b""
        frame = b""
        if len(self.frames) < TABLES_MAX:
            table = _costs(known, key[1])
            number = len(self.frames)
            assert number < TABLES_PER_HEAD
            frame = pack([_as_written(number, model, key[1], table, known, power())])
            self.frames.append(frame)
            written = self._written[key] = Written(
                number=number,
                table=known.table,
                cloud_ms=known.cloud_ms,
                costs=table.costs[_COMPARED],
                work=max(math.prod(key[1]), 1),  # of an empty batch
                at_s=now_s,
                looked_at_s=now_s,
            )
        return written or self._nearest(model, sizes), frame

    def _nearest(self, model: str, sizes: tuple[int, ...]) -> Written | None:
        work = math.prod(sizes)
        known = [one for (name, _), one in self._written.items() if name == model]
        return min(known, key=lambda one: abs(math.log(max(work, 1) / one.work)), default=None)


def _as_written(number: int, model: str, sizes: tuple[int, ...], table: PlanTable, known: Known, power: Power) -> Table:
    return Table(
        table=number,
        model=model,
        sizes=sizes,
        image_ms=fine(known.image_ms),
        plans=tuple(
            PlanCosts(
                table.labels[row],
                fine(costs[Column.HEAD]),
                fine(costs[Column.ENCODE]),
                round(costs[Column.UP]),
                fine(costs[Column.CLOUD_DECODE] * known.speed_ratio + costs[Column.ENCODED] * known.cloud_image_ms),
                fine(costs[Column.TAIL]),
                round(costs[Column.DOWN]),
                fine(costs[Column.REPLY]),
                fine(costs[Column.FINISH]),
                sum(bool(level[row]) for level in table.allowed),
                table.fidelity(row)[0],
            )
            for row, costs in enumerate(table.costs.T.tolist())
        ),
        power=DevicePower(
            compute_w=fine(power.compute_w),
            send_w=fine(power.send_w),
            receive_w=fine(power.receive_w),
            wait_w=fine(power.wait_w),
            measured=power.measured,
            source=power.source,
        ),
        behaviour=_behaviour(known),
    )


def _behaviour(known: Known) -> Behaviour:
    asked = known.behaviour
    weights = asked.weights
    return Behaviour(
        weights=(weights.latency, weights.throughput, weights.energy, weights.cost),
        service_class=asked.service_class,
        strategy=asked.fallback.strategy,
        rate_min_per_s=asked.throughput_min_per_s,
    )


def _costs(known: Known, sizes: tuple[int, ...]) -> PlanTable:
    return known.table.with_compute(tail_ms=known.cloud_ms).at(sizes)


def _became_other(written: Written, known: Known, table: PlanTable, now_s: float) -> bool:
    """Whether requests are to be held against other costs from now on."""
    if written.table is not known.table:
        return True
    written.cloud_ms = known.cloud_ms
    off = float(np.max(np.abs(table.costs[_COMPARED] - written.costs) / np.maximum(written.costs, 1e-3)))
    return off > ANEW_RATIO or (off > OTHER_RATIO and now_s >= written.at_s + SAME_S)


def _near(size: int) -> int:
    """The size whose table stands for this one: 8 in each octave, small ones as they are."""
    return size if size <= FINE else round(2.0 ** (round(math.log2(size) * FINE) / FINE))
