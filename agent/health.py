"""Is the daemon alive: the event loop turns and the compute worker is not stuck. Says nothing about the companion,
whose absence is an ordinary state.
"""

from __future__ import annotations

from agent.compute import Compute

STUCK_MS = 120_000.0
"""One stage running longer than this hangs: the slowest model of the zoo needs 15 s on a slow core."""


class Health:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def live(self) -> bool:
        return self._compute.alive and self._compute.running_ms < STUCK_MS
