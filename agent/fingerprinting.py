"""The daemon's own fingerprint: the kept one, or a quick new one in a moment when nobody waits for the device.

Needs the runtime, so it waits for the first model: a daemon without any saves the runtime's memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.fingerprint import Fingerprint, take_fingerprint
from agent.fingerprint_file import fingerprint_key, keep, kept
from agent.sensors import throttled
from split.runtime.machine import Machine

log = logging.getLogger(__name__)

EVERY_S: Final = 2.0
"""Between two looks for an idle moment."""
SPEED_TEST_S: Final = 0.15
"""Of each of two tests: a request that comes meanwhile shares the cores for so long, once in the device's life."""


class Fingerprinting:
    """`run` ends when there is a fingerprint; `look` once for tests. On the event loop.

    `folder`: where it is kept. `idle`: whether a model is there and nothing waits for the device.
    """

    def __init__(self, *, machine: Machine, folder: Path, idle: Callable[[], bool], root: Path = Path("/")) -> None:
        self._machine = machine
        self._folder = folder
        self._idle = idle
        self._root = root
        self.fingerprint: Fingerprint | None = None

    async def run(self) -> None:
        while self.fingerprint is None:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Take it if this is a moment for it."""
        if not self._idle():
            return
        key = await asyncio.to_thread(fingerprint_key, self._machine, self._root)
        found, why = await asyncio.to_thread(kept, key, self._folder, self._root)
        if found is None:
            if await asyncio.to_thread(throttled, self._root):
                return  # it would tell of the heat, and be kept
            found = await asyncio.to_thread(take_fingerprint, self._root, speed_test_s=SPEED_TEST_S)
            note = await asyncio.to_thread(keep, found, key, self._folder)
            log.info("fingerprint taken (%s): %.0f GFLOP/s%s", why, found.gemm_gflops, f"; {note}" if note else "")
        for sentence in found.unusable:
            log.warning("%s", sentence)
        self.fingerprint = found

    def snapshot(self) -> dict[str, object] | None:
        """For `isthmus status`; None until there is one."""
        if (found := self.fingerprint) is None:
            return None
        return {
            "gemm_gflops": found.gemm_gflops,
            "memory_gb_per_s": found.memory_gb_per_s,
            "full": found.rates is not None,
            "providers": list(found.providers),
            "unusable": list(found.unusable),
        }
