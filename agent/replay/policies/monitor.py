"""What the papers' policies measure of a link: one number, bytes over time of a transfer that is large enough."""

from __future__ import annotations

import math
from typing import Final

from agent.replay.world import Outcome, Policy

EVERY_S: Final = 5.0
"""A look at the link where nothing was sent for so long."""
PROBE_BYTES: Final = 32_768
LARGE_BYTES: Final = 16_384


class Monitoring(Policy):
    """Keeps a mean of the observed rate: `gain` 1 is the last observation, less is an exponentially weighted mean.

    Round trips are in it, as in the papers; of a small transfer they are nearly all, so those are not counted. Where no
    large one is sent, it sends 32 KB every five seconds to see the rate. The papers leave open how it is known then;
    implementations of them send a tensor every few seconds.
    """

    def __init__(self, gain: float = 1.0) -> None:
        self._gain = gain
        self._rate_bytes_per_ms = math.nan
        self._seen_at_s = -math.inf

    @property
    def rate_bytes_per_ms(self) -> float:
        """nan before the first observation."""
        return self._rate_bytes_per_ms

    def observe(self, outcome: Outcome) -> None:
        if "down" in outcome.stages_ms and outcome.bytes >= LARGE_BYTES:
            self._saw(outcome.bytes, outcome.network_ms, outcome.done_at_s)

    def ponged(self, rtt_ms: float, padding_bytes: int, pong_bytes: int, now_s: float) -> None:
        if padding_bytes == PROBE_BYTES:
            self._saw(padding_bytes, rtt_ms, now_s)

    def probe(self, now_s: float) -> int:
        if now_s - self._seen_at_s < EVERY_S:
            return 0
        self._seen_at_s = now_s
        return PROBE_BYTES

    def _saw(self, size: int, took_ms: float, now_s: float) -> None:
        rate = size / max(took_ms, 1e-3)
        known = rate if math.isnan(self._rate_bytes_per_ms) else self._rate_bytes_per_ms
        self._rate_bytes_per_ms = known + self._gain * (rate - known)
        self._seen_at_s = now_s
