"""When the device must start finishing remote requests itself, so that all meet their deadlines on its one worker.

Earliest deadline first, walked backwards: the last one ends at its deadline, each one before it ends at its own
deadline or when the next must start, whichever comes first (Liu and Layland 1973: no order does better on one machine).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, TypeVar

Key = TypeVar("Key", bound=Hashable)

MARGIN_MS: Final = 8.0
"""Between the planned end of a local finish and the deadline: queue hop, encoding of the reply, timer slack. D ≥ local
time + 20 ms is what must hold (I3), so the margin has to stay well below 20."""
MARGIN_RATIO: Final = 0.05
"""Of the local finish: one run varies by a few percent."""
SLACK_RATIO: Final = 0.05
"""Of the time that is there beyond the local finish: who can wait a second loses nothing by giving up 50 ms earlier,
and a busy machine then still meets the deadline."""


def reserved_ms(local_ms: float, left_ms: float) -> float:
    """How long before its deadline, `left_ms` away, a finish that takes `local_ms` is to start: with its margins."""
    return local_ms * (1 + MARGIN_RATIO) + MARGIN_MS + max(left_ms - local_ms, 0.0) * SLACK_RATIO


def latest_starts(now_s: float, pending: Sequence[tuple[Key, float, float]]) -> dict[Key, float]:
    """Latest start of each pending local finish, in monotonic seconds, never before `now_s`.

    `pending`: (key, deadline_at_s, local_ms) of every remote request that still waits. Where not all can be met, the
    starts that lie in the past come out as `now_s`: begin at once, in the order of deadlines.
    """
    starts: dict[Key, float] = {}
    free_until_s = float("inf")
    for key, deadline_at_s, local_ms in sorted(pending, key=lambda item: item[1], reverse=True):
        free_until_s = min(deadline_at_s, free_until_s) - local_ms / 1000.0
        starts[key] = max(free_until_s, now_s)
    return starts
