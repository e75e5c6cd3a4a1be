"""The two-way rule: what a careful engineer would write in an afternoon, and therefore the rival that counts."""

from __future__ import annotations

from typing import Final

from agent.replay.world import Arrival, Outcome, Policy
from split.plan.plan import LOCAL, Placement, Plan

GAIN: Final = 0.3
PROBE_EVERY: Final = 20
"""Requests; each probe costs what the worse arm costs more."""
ENCODED: Final = Plan(placement=Placement.OFFLOAD, codec="encoded")
RAW: Final = Plan(placement=Placement.OFFLOAD, codec="raw")


class TwoWay(Policy):
    """{local, offload}: per model an exponentially weighted mean of each arm's measured latency; the lesser one is
    taken, and every N-th request tries the other. Offload is the input as it came, or raw where it came as tensors.

    Knows nothing but latencies it has measured, whoever answered.
    """

    def __init__(self, *, gain: float = GAIN, probe_every: int = PROBE_EVERY) -> None:
        self.name = "two-way rule"
        self._gain = gain
        self._probe_every = probe_every
        self._mean_ms: dict[tuple[str, bool], float] = {}
        self._since: dict[str, int] = {}
        """Requests of this model since the other arm was tried."""

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        away = ENCODED if arrival.encoded_bytes else RAW
        if away not in self._view.world.plans(arrival):
            return LOCAL
        model = arrival.model
        here_ms, away_ms = (self._mean_ms.get((model, is_away)) for is_away in (False, True))
        if here_ms is None or away_ms is None:
            return LOCAL if here_ms is None else away
        is_away = away_ms < here_ms
        self._since[model] = self._since.get(model, 0) + 1
        if self._since[model] >= self._probe_every:
            self._since[model], is_away = 0, not is_away
        return away if is_away else LOCAL

    def observe(self, outcome: Outcome) -> None:
        arm = (outcome.arrival.model, outcome.plan != LOCAL)
        known_ms = self._mean_ms.get(arm, outcome.total_ms)
        self._mean_ms[arm] = known_ms + self._gain * (outcome.total_ms - known_ms)
