"""What a request takes beside all stages that are clocked: the hand-over to the worker and back, the event loop between
them, decoding the wire's frames, what the companion does before and after the work it names. Pure.

    rest = here + travels · there      (travels: 0 for local, 1 for every plan that sends something)

Small, and most of what a tiny model takes: on loopback between two processes, Silero-VAD's half a millisecond came with
0.8 ms where it stayed and 2.5 where it travelled.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final


class Rest:
    """Of one model. Times as they were, emulated slowdown in.

    Medians of the last few, since an event loop that is busy for a moment makes one ten times as long: one stall
    moves nothing, a change is believed after five. Before either kind was seen nothing is expected, so that no plan is
    avoided for what it might turn out to take; of one kind, what the other takes.
    """

    KEPT: Final = 9
    SEEDS: Final = 3
    """What was expected before the first counts as so many: that one opens connections' and caches' ways."""

    __slots__ = ("_stayed", "_travelled", "here_ms", "there_ms")

    def __init__(self) -> None:
        self._stayed: deque[float] = deque(maxlen=self.KEPT)
        self._travelled: deque[float] = deque(maxlen=self.KEPT)
        self.here_ms = self.there_ms = 0.0
        """What every request takes, and what one that travels takes more: never less."""

    def observe(self, measured_ms: float, *, travelled: bool) -> None:
        """One request that ran as planned, alone, took so much longer than its stages."""
        kept = self._travelled if travelled else self._stayed
        if not kept:
            kept.extend([self.here_ms] * self.SEEDS)
        kept.append(measured_ms)
        self.here_ms = median(self._stayed or self._travelled)
        self.there_ms = max(median(self._travelled) - self.here_ms, 0.0) if self._travelled else 0.0
