"""When the device must start finishing remote requests itself, so that all meet their deadlines on its one worker.

Earliest deadline first, walked backwards: the last one ends at its deadline, each one before it ends at its own
deadline or when the next must start, whichever comes first (Liu and Layland 1973: no order does better on one machine).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


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
