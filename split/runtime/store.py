"""Open segments, kept as long as the budget of bytes allows: what is used again is there at once.

Invariant: a segment that someone holds is never closed. The store only forgets; the engine gives the memory back when
the last holder lets go of it (reference counting, at once). Blocking: call `get` from worker threads.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from split.runtime.engine import Engine, Segment

WEIGHTS: Final = "weights.bin"
"""The workbench's one file of weights that all heads and tails in a folder share."""

ACTIVATION_MS: Final = 100.0
"""Opening the first segment: between a small head (5 ms) and a 50 MB model whose weights are packed anew (280 ms)."""

_DATA_SUFFIXES: Final = (".data", "_data", ".bin", ".weight", ".weights")
"""Names that exporters give to external data; only the budget depends on it."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One path: its lock makes the second asker wait for the first one's opening instead of opening too."""

    lock: threading.Lock
    segment: Segment | None = None
    files: dict[Path, int] | None = None


class SegmentStore:
    """Segments by path, least recently used forgotten first. Thread-safe.

    `threads`: intra-op threads of each. `budget_bytes`: sum over the files behind the open segments, a file that
    several share counted once; the segment asked for last stays open even when it is larger.
    """

    def __init__(self, engine: Engine, *, threads: int, budget_bytes: int) -> None:
        assert budget_bytes > 0, budget_bytes
        self._engine = engine
        self._threads = threads
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[Path, _Slot] = OrderedDict()
        self._opening_ms: dict[Path, float] = {}
        """What opening took the last time."""

    @property
    def threads(self) -> int:
        return self._threads

    def get(self, path: Path) -> Segment:
        """The segment of this file, opened if it is not open yet. InvalidModel when the engine refuses it."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None:
                slot = self._slots[path] = _Slot(threading.Lock())
            self._slots.move_to_end(path)
            if slot.segment is not None:
                return slot.segment
        with slot.lock:
            if slot.segment is None:
                self._open(path, slot)
            assert slot.segment is not None
            return slot.segment

    def opened(self, path: Path) -> Segment | None:
        """The segment of this file if it is open: never blocks."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.segment is None:
                return None
            self._slots.move_to_end(path)
            return slot.segment

    def is_open(self, path: Path) -> bool:
        """Whether `get` would return at once."""
        slot = self._slots.get(path)
        return slot is not None and slot.segment is not None

    def activation_ms(self, path: Path) -> float:
        """How long `get` is expected to take: 0.0 when it is open, else what it took last, else the longest so far."""
        if self.is_open(path):
            return 0.0
        with self._lock:
            return self._opening_ms.get(path) or max(self._opening_ms.values(), default=ACTIVATION_MS)

    def forget(self, place: Path) -> None:
        """Let go of the segment of this file, or of every segment whose file lies in this folder."""
        with self._lock:
            for path in [path for path in self._slots if place in (path, path.parent)]:
                del self._slots[path]
            for path in [path for path in self._opening_ms if place in (path, path.parent)]:
                del self._opening_ms[path]

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._slots.clear()

    @property
    def used_bytes(self) -> int:
        """What counts against the budget."""
        with self._lock:
            return self._used_bytes()

    def _open(self, path: Path, slot: _Slot) -> None:
        started_s = time.perf_counter()
        try:
            files = _files_behind(path)
            segment = self._engine.open(path, threads=self._threads)
        except BaseException:
            with self._lock:
                if self._slots.get(path) is slot:
                    del self._slots[path]
            raise
        with self._lock:
            slot.files, slot.segment = files, segment
            self._opening_ms[path] = (time.perf_counter() - started_s) * 1e3
            for oldest in list(self._slots):
                if self._used_bytes() <= self._budget_bytes:
                    break
                if oldest != path and self._slots[oldest].segment is not None:
                    del self._slots[oldest]

    def _used_bytes(self) -> int:
        files: dict[Path, int] = {}
        for slot in self._slots.values():
            files |= slot.files or {}
        return sum(files.values())


def _files_behind(path: Path) -> dict[Path, int]:
    """The model file and the external data beside it, with their sizes."""
    part = path.name.endswith((".head.onnx", ".tail.onnx"))
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    data = (file for file in beside if (file.name == WEIGHTS if part else file.name.endswith(_DATA_SUFFIXES)))
    return {file: file.stat().st_size for file in (path, *data) if file.is_file()}
