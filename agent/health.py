"""Is the daemon alive: the event loop turns and the compute worker is not stuck. Says nothing about the companion,
whose absence is an ordinary state.
"""

from __future__ import annotations

import asyncio

from agent.compute import Compute
from agent.systemd import notify, watchdog_period_s

STUCK_MS = 120_000.0
"""One stage running longer than this hangs: the slowest model of the zoo needs 15 s on a slow core."""


class Health:
    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def live(self) -> bool:
        return self._compute.alive and self._compute.running_ms < STUCK_MS

    async def keep_watchdog_fed(self) -> None:
        """Tell the service manager so, as often as it asked to hear it; ends at once where it did not ask."""
        period_s = watchdog_period_s()
        while period_s is not None:
            if self.live():
                notify("WATCHDOG=1")
            await asyncio.sleep(period_s)
