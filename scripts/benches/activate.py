"""How long until a segment can be used: one that lies in the cache optimised, and one that was only cut.

Worst segment of two networks (the whole, four heads, four tails), median of the openings through the daemon's store;
the files are in the page cache. What was found sound at the start is not hashed again. The whole, open from the start,
does not count among those that were only cut.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Final

from scripts.benches.figure import Figure
from scripts.benches.memory import opened_store, prepare, prepared
from scripts.benches.nets import NETS
from split.runtime.optimised import WHOLE
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.store import SegmentStore

__all__ = ["prepare", "run"]

ROUNDS: Final = 9
ROUNDS_QUICK: Final = 3


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    OrtEngine().trim()  # importing the runtime belongs to no segment
    for name in NETS:
        card, folder, cuts = prepared(name)
        places = {WHOLE: Path(card.path)}
        places |= {f"{cut.id}.{half}": folder / f"{cut.id}.{half}.onnx" for cut in cuts for half in ("head", "tail")}
        for segment, path in places.items():
            cached, cold = [], []
            for _ in range(ROUNDS_QUICK if quick else ROUNDS):
                cached.append(_opening_ms(opened_store(card, folder), path))
                plain = SegmentStore(OrtEngine(), threads=usable_threads(), budget_bytes=1 << 33)
                cold.append(_opening_ms(plain, path))
            ms = {"cached_ms": statistics.median(cached), "cold_ms": statistics.median(cold)}
            rows.append({"model": name, "segment": segment, **ms})
    figures = [
        Figure(name="cached_ms", value=max(row["cached_ms"] for row in rows), unit="ms", at_most=20),
        Figure(
            name="cold_ms", value=max(row["cold_ms"] for row in rows if row["segment"] != WHOLE), unit="ms", at_most=600
        ),
    ]
    return figures, rows


def _opening_ms(store: SegmentStore, path: Path) -> float:
    started_s = time.perf_counter()
    store.get(path)
    took_ms = (time.perf_counter() - started_s) * 1e3
    store.close()
    return took_ms
