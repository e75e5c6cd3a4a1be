"""What a record says of each request, on one clock, and when the parts of it were."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from agent.record import STAGES, BadRecord, Record, Request, Table
from split.ids import CutId
from split.plan.plan import LOCAL, Placement, Plan

SCALE_STEPS: Final = 8
"""Requests whose work is within 5 % of each other are of one size, as `agent/recorder.py` has it."""
LEAST_MS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One recorded request and what it stands for."""

    request: Request
    table: Table
    """Of its costs as they were thought."""
    at_s: float
    weight: float
    """Requests that it stands for."""
    model: str
    """In the world: requests of one size that the same plans may serve."""
    chosen: Plan
    ran: Plan | None
    """None: it was not answered."""

    @property
    def missed(self) -> bool:
        return self.ran is None or self.request.total_ms > self.request.deadline_ms

    @property
    def scale(self) -> float:
        """Its work over that of its table, as its model in the world has it."""
        return float(2.0 ** (_step(self.request) / SCALE_STEPS))

    @property
    def answered_there(self) -> bool:
        """Whether the companion made the answer."""
        return self.ran is not None and self.ran != LOCAL and not self.request.fallback

    @property
    def gave_up(self) -> bool:
        """Whether the device made the answer after the companion had been asked."""
        return self.ran is not None and self.chosen != LOCAL and self.request.fallback

    @property
    def as_chosen(self) -> bool:
        """Whether what was measured is that of the plan chosen, as one piece."""
        return self.ran == self.chosen and not self.gave_up and self.request.parts == 1

    @property
    def stages_ms(self) -> dict[str, float]:
        """Measured, each of `STAGES`."""
        return dict.fromkeys(STAGES, 0.0) | dict(zip(STAGES, self.request.stages_ms, strict=False))

    def payload_bytes(self, up_bytes: int) -> int:
        """What went up, of a plan that sends `up_bytes` of tensors."""
        return self.request.encoded_bytes if self.chosen.codec == "encoded" else up_bytes


def happened_in(record: Record) -> list[Happened]:
    """Every recorded request, in the order of their arrival; 0 s is that of the wall clock."""
    found = []
    for head, batch in record.batches:
        tables = [record.tables[row.table] for row in batch.rows]
        kept = Counter(table.model for table in tables)
        for row, table in zip(batch.rows, tables, strict=True):
            plans = plans_of(table)
            found.append(
                Happened(
                    request=row,
                    table=table,
                    at_s=record.heads[head].started_s + row.at_s,
                    weight=batch.seen.get(table.model, 0) / kept[table.model],
                    model=_world_name(table, row),
                    chosen=plans[row.plan],
                    ran=None if row.ran < 0 else plans[row.ran],
                )
            )
    return sorted(found, key=lambda one: one.at_s)


def plans_of(table: Table) -> list[Plan]:
    """BadRecord where one is no plan."""
    return [_plan(costs.plan) for costs in table.plans]


def local_ms(one: Happened) -> float:
    """Of a local answer: all that is no waiting."""
    ms = one.stages_ms
    return max(one.request.total_ms - ms["queue"] - ms["activate"], LEAST_MS)


def _world_name(table: Table, row: Request) -> str:
    size = "×".join(map(str, table.sizes))
    step = _step(row)
    parts = [table.model, f"at {size}" if size else "", f"scaled {step}" if step else ""]
    parts.append(("", "no-raw-input", "local-only")[min(row.privacy, 2)])
    return " ".join(filter(None, parts))


def _step(row: Request) -> int:
    return round(math.log2(max(row.scale, 1e-6)) * SCALE_STEPS)


def _plan(label: str) -> Plan:
    """As `Plan.__str__` writes it; BadRecord for anything else."""
    match label.split():
        case ["local"]:
            return LOCAL
        case ["split", cut, codec]:
            return Plan(placement=Placement.SPLIT, cut=CutId(cut), codec=codec)
        case ["offload", codec]:
            return Plan(placement=Placement.OFFLOAD, codec=codec)
        case _:
            raise BadRecord(f"the record has a plan {label!r}; expected local, split CUT CODEC or offload CODEC")
