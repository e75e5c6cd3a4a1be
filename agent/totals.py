"""Sums over the requests of one model, and its last latencies: what the journal adds up and metrics show."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate

from agent.quality import Ratios

RECENT = 256
"""Latencies behind the medians of `status`."""
BUCKETS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
"""Upper edges of the latency histogram."""


@dataclass(slots=True)
class Times:
    """Latencies of one model and placement."""

    count: int = 0
    sum_ms: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_MS) + 1))

    def add(self, ms: float) -> None:
        """One more request took so long."""
        self.count += 1
        self.sum_ms += ms
        self.buckets[bisect_left(BUCKETS_MS, ms)] += 1

    def cumulative(self) -> list[int]:
        """Requests up to each edge, the last without edge."""
        return list(accumulate(self.buckets))


@dataclass(slots=True)
class Totals:
    """Of one model since the daemon started."""

    placements: dict[str, Times] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    """By error code."""
    failures_ms: float = 0.0
    fallbacks: int = 0
    finishes: Counter[str] = field(default_factory=Counter)
    """Of requests that the companion was asked for: what had begun here beside it, by who answered first ("companion",
    "device")."""
    shadows: Counter[bool] = field(default_factory=Counter)
    """Answers of the companion's that the device compared with its own, by whether they agreed."""
    checks: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Codec → spot checks of the model that is loaded: how many, how many beyond the bound, mean distance / bound."""
    unchecked: dict[str, int] = field(default_factory=dict)
    """Lossy codec → answers since the last spot check, or since the first of them."""
    explored: int = 0
    """Requests whose plan was run to learn something."""
    predicted: dict[str, Ratios] = field(default_factory=dict)
    """By stage, and `total`."""
    stages_ms: dict[str, float] = field(default_factory=dict)
    last_at_ms: int = 0
    """Wall clock, for Triton's statistics."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Of answers."""
    recent_all_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Of all requests; inf: it got no answer."""
    up_ms: float = 0.0
    """While bytes of answered requests left; round trips apart, in which others may send."""
    down_ms: float = 0.0
    joules: dict[bool, float] = field(default_factory=dict)
    """Of answered requests, by whether the power behind them was measured."""
    recent_j: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
