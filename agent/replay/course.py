"""A trace that can be asked: the moment at a time, and when bytes are through the link.

Rates are constant between moments, so what is carried until a time is piecewise linear, and everything here is exact: a
transfer that spans a step of the rate, one that an outage stops.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from agent.replay.world import Moment, SlowStart

BYTES_PER_MBIT: Final = 125_000.0


class Course:
    """A trace to be asked: the moment at a time, and when bytes are through the link. Piecewise linear, so exact."""

    def __init__(self, trace: Sequence[Moment]) -> None:
        self._moments = tuple(trace)
        self._starts = [moment.at_s for moment in trace]
        self._rates = tuple(
            [rate * BYTES_PER_MBIT if moment.connected else 0.0 for rate, moment in zip(rates, trace, strict=True)]
            for rates in ([m.up_mbit_s for m in trace], [m.down_mbit_s for m in trace])
        )
        self._carried = tuple(self._sums(rates) for rates in self._rates)
        self.least_edge_ratio = min(moment.edge_ratio for moment in trace)
        self.outages = self._outages()
        """(from, to) of every span in which nothing passes; to is inf where it lasts."""

    def _sums(self, rates: Sequence[float]) -> list[float]:
        """Bytes that the link could have carried until each moment begins."""
        sums = [0.0]
        for i in range(1, len(self._starts)):
            sums.append(sums[-1] + rates[i - 1] * (self._starts[i] - self._starts[i - 1]))
        return sums

    def at(self, now_s: float) -> Moment:
        return self._moments[max(bisect_right(self._starts, now_s) - 1, 0)]

    def carried_bytes(self, from_s: float, to_s: float, *, down: bool = False) -> float:
        """What the link carries between two times at most."""
        return self._until(to_s, down) - self._until(from_s, down)

    def _until(self, now_s: float, down: bool) -> float:
        i = max(bisect_right(self._starts, now_s) - 1, 0)
        return self._carried[down][i] + self._rates[down][i] * (now_s - self._starts[i])

    def through_at_s(self, from_s: float, size: float, *, down: bool = False) -> float:
        """When the last of so many bytes has entered the link, which carries nothing else; inf where it never does."""
        if size <= 0.0:
            return from_s
        rates, sums, starts = self._rates[down], self._carried[down], self._starts
        i = max(bisect_right(starts, from_s) - 1, 0)
        rate = rates[i]
        if rate > 0.0:  # mostly within one moment
            at_s = from_s + size / rate
            if i + 1 == len(starts) or at_s <= starts[i + 1]:
                return at_s
        goal = sums[i] + rate * (from_s - starts[i]) + size
        i = bisect_left(sums, goal) - 1  # the moment in which the sum passes the goal
        return starts[i] + (goal - sums[i]) / rates[i] if rates[i] > 0.0 else math.inf

    def slowly_through_at_s(self, from_s: float, size: float, start: SlowStart) -> float:
        """The same up the link after a pause: window by window, each acknowledged before the next one twice as large,
        while the link is not full."""
        at_s, window = from_s, float(start.window_bytes)
        while size > window:
            moment = self.at(at_s)
            if not moment.connected or window >= moment.up_mbit_s * BYTES_PER_MBIT * moment.rtt_ms / 1000.0:
                break
            size, at_s, window = size - window, at_s + moment.rtt_ms / 1000.0, 2.0 * window
        return self.through_at_s(at_s, size)

    def passes_from_s(self, now_s: float) -> float:
        """From when on something passes: now, or at the end of the outage that is on."""
        for from_s, to_s in self.outages:
            if from_s <= now_s < to_s:
                return to_s
        return now_s

    def _outages(self) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for i, moment in enumerate(self._moments):
            if moment.connected:
                continue
            to_s = self._starts[i + 1] if i + 1 < len(self._starts) else math.inf
            if found and found[-1][1] == moment.at_s:
                found[-1] = (found[-1][0], to_s)
            else:
                found.append((moment.at_s, to_s))
        return found
