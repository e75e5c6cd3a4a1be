"""What all sessions of one companion share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from cloud.admission import Admission
from cloud.executor import TailExecutor
from cloud.metrics import Metrics
from cloud.pace import Pace
from cloud.pictures import DecodingRoom
from cloud.renewal import Renewals
from cloud.segments import Segments
from cloud.store import ModelStore

DISK_THREADS: Final = 4
"""For models that are hashed, written and removed: they may wait for each other and for the disk, and are not to keep
requests waiting, which are decoded in asyncio's own threads."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    store: ModelStore
    segments: Segments
    executor: TailExecutor
    admission: Admission
    metrics: Metrics
    decoded_bytes: int
    """Bound of one payload as decoded: a few compressed bytes must not become gigabytes."""
    renewals: Renewals | None = None
    """None: certificates are renewed elsewhere."""
    pictures: DecodingRoom = field(default_factory=DecodingRoom)
    pace: Pace | None = None
    """None: devices are not told how fast it computes."""
    disk: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(DISK_THREADS, "models"))

    async def on_disk(self, work: Callable[[], _T]) -> _T:
        """What the store is asked to do, off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.disk, work)
