"""What every bench is made of: figures held against a bound, and medians measured in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from split.graph.card import CARD_VERSION
from split.profiles.measured import PROFILE_VERSION

_FORMATS: Final = f"card-{CARD_VERSION}-profile-{PROFILE_VERSION}"

CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "bench" / _FORMATS
"""What another version of the formats left behind is not read: it is made anew."""

PAUSE_S: Final = 0.005
"""Longer than a runtime's threads spin after a run (ONNX Runtime: about a millisecond)."""


PACE_S: Final = 0.008
"""Between requests of a hundred a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of DESIGN §9, and what it shall reach: exactly one of the two bounds."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        assert (self.at_most is None) != (self.at_least is None), self.name

    @property
    def met(self) -> bool:
        if self.at_most is not None:
            return self.value <= self.at_most
        return self.at_least is not None and self.value >= self.at_least

    def as_json(self) -> dict[str, Any]:
        reach = f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"
        return {
            "name": self.name,
            "value": round(self.value, 5),
            "unit": self.unit,
            "reach": reach,
            "met": self.met,
        }


def interleaved(work: Mapping[str, Callable[[], object]], rounds: int, *, burst: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each callable, `rounds` times in turns, each turn in another order, after two unmeasured turns.

    In another order, since what runs after a session that spins, or that filled the caches, runs differently.
    `burst`: calls in a row per turn, of which the last one counts, after a pause: so that a neighbour's spinning
    threads and cold caches are not charged to the one that comes next.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(-2, rounds):
        for name in _shuffled(work, turn):
            if burst > 1:
                time.sleep(PAUSE_S)
                for _ in range(burst - 1):
                    work[name]()
            started_s = time.perf_counter()
            work[name]()
            took_ms = (time.perf_counter() - started_s) * 1e3
            if turn >= 0:
                taken[name].append(took_ms)
    return taken


def paced(
    work: Mapping[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds of each callable (wall, processor time of this process), `rounds` times in turns in changing order.

    Paced as requests are: each run comes after a pause of `PACE_S`, and what goes on spinning until the next pause is
    over is its own. One unmeasured run goes before, so that its caches are its own, too.
    """
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds):
        for name in _shuffled(work, turn):
            work[name]()
            time.sleep(PACE_S)
            cpu_at_s, started_s = time.process_time(), time.perf_counter()
            work[name]()
            wall[name].append((time.perf_counter() - started_s) * 1e3)
            time.sleep(PACE_S)
            cpu[name].append((time.process_time() - cpu_at_s) * 1e3)
    return wall, cpu


def _shuffled(work: Mapping[str, object], turn: int) -> list[str]:
    names = list(work)
    random.Random(turn).shuffle(names)
    return names


def median_difference(taken: Mapping[str, list[float]], longer: str, shorter: str) -> float:
    """Median over the turns of `longer` − `shorter`: what the machine did to a whole turn cancels out."""
    return statistics.median(a - b for a, b in zip(taken[longer], taken[shorter], strict=True))


def median_ratio(taken: Mapping[str, list[float]], above: str, below: str) -> float:
    """Median over the turns of `above` / `below`."""
    return statistics.median(a / b for a, b in zip(taken[above], taken[below], strict=True))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0…1) of the values lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
