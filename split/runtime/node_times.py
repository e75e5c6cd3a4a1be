"""What the runtime's own profile says of each node: the shape of a model's times, not their level.

Profiling costs about 10 µs a node and run, so that sums are too large for many small nodes, and a part of the model
pays for its call and for layouts at its ends besides: `split/plan/costs.py` says what becomes of these numbers. Reads
the runtime's trace (Chrome trace format); runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from split.errors import EngineFailed

_SUFFIX: Final = "_kernel_time"
_KEPT: Final = 0.5
"""Of a node's times the lower half counts: what is above is mostly the rest of the machine."""


class _Event(msgspec.Struct, frozen=True):
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0


def node_times(trace: bytes) -> list[tuple[str, float]]:
    """(node as the runtime names it, ms of one run) in the order of execution.

    Nodes in the bodies of If, Loop and Scan are part of the node they belong to. EngineFailed for no such trace.
    """
    try:
        events = msgspec.json.decode(trace, type=list[_Event])
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"the runtime's profile cannot be read ({error}); expected a list of trace events") from None
    taken: dict[str, list[float]] = {}
    for event in _outermost(event for event in events if event.cat == "Node" and event.name.endswith(_SUFFIX)):
        taken.setdefault(event.name.removesuffix(_SUFFIX), []).append(event.dur)
    # Two nodes of one name come as one, with twice the runs: their sum is what one run takes.
    runs = min((len(times) for times in taken.values()), default=1)
    return [(name, _typical(times) * max(len(times) // runs, 1) / 1e3) for name, times in taken.items()]


def _outermost(events: Iterable[Any]) -> Iterable[Any]:
    end = float("-inf")
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        # A body's nodes lie within their node, whose span is rounded to microseconds like theirs.
        if event.ts < end - 1.0:
            continue
        end = max(end, event.ts + event.dur)
        yield event


def _typical(times: list[float]) -> float:
    kept = sorted(times)[: max(round(len(times) * _KEPT), 1)]
    return sum(kept) / len(kept)
