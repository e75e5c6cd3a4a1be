"""A finished request as a row of a record (`record.Request`): numbers of its journal entry and of what was known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from agent.journal import Entry
from agent.planner import Known
from agent.record import STAGES, Request
from split.profiles.contract import PRIVACY_ORDER

LEAST_MBIT_S: Final = 1e-4
ENDLESS_MS: Final = 1e9
"""What stands for more, eleven days."""
_HEAD: Final = STAGES.index("head")


def is_known(entry: Entry, known: Known) -> bool:
    """Whether its plans are in the model's table: not where the model was replaced in the meantime."""
    rows, ran = known.table.row_of, entry.ran
    return entry.decision.chosen.plan in rows and (ran is None or ran in rows)


def row_of(entry: Entry, known: Known, *, table: int, work: float, zero_s: float) -> Request:
    """`table`: number of its costs, `work`: that table's sizes, multiplied; `zero_s`: monotonic seconds at the head."""
    facts, chosen, ran, rows = entry.facts, entry.decision.chosen, entry.ran, known.table.row_of
    return Request(
        fine(entry.received_at_s - zero_s),
        table,
        fine(math.prod(facts.sizes) / work),
        _rough(entry.deadline_ms),
        facts.encoded_bytes,
        PRIVACY_ORDER.index(facts.privacy),
        facts.mode is not None or facts.cut is not None or facts.codec is not None,
        rows[chosen.plan],
        -1 if ran is None else rows[ran],
        bool(entry.fallback),
        chosen.parts,
        _rough(chosen.predicted_ms),
        _rough(entry.total_ms),
        _rough(chosen.stages_ms.get("queue", 0.0)),
        _rough(known.cloud_queue_ms),
        fine(known.alpha),
        fine(known.beta),
        _link(entry.decision.link),
        _stages(entry),
    )


def _stages(entry: Entry) -> tuple[float, ...]:
    measured = entry.stages_ms
    found = [_rough(measured.get(stage, 0.0)) for stage in STAGES]
    found[_HEAD] += _rough(measured.get("whole", 0.0))
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _link(estimate: Mapping[str, float]) -> tuple[float, ...]:
    if not estimate:
        return ()
    up_mbit_s, down_mbit_s = (max(fine(estimate[name]), LEAST_MBIT_S) for name in ("up_mbit_s", "down_mbit_s"))
    return _rough(estimate["rtt_ms"]), up_mbit_s, down_mbit_s


def _rough(ms: float) -> float:
    """To 10 µs; `round` takes twice as long."""
    return int(min(ms, ENDLESS_MS) * 100 + 0.5) / 100


def fine(value: float) -> float:
    """To 1e-4."""
    return int(value * 10_000 + 0.5) / 10_000
