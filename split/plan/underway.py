"""The work that this device's own requests bring to link and companion, from their decision on: the virtual queues of
drift-plus-penalty (Neely 2010, Stochastic Network Optimization, §4.4). `score.py` shares the stations out by them.

A virtual queue takes a request's work at once and does it without a pause, whatever station the request is really at.
So a station that runs dry because the one before holds its work becomes cheap, and more is sent through it. Queues as
they really are reach 0.98 of the bound with sixteen requests under way where these reach 1.00, 0.96 with eight where
these reach 1.00 (17 networks of three stations in tandem, as in tests/split/test_plan_throughput.py), and to count all
work in the system 0.94 and 0.91.

No clock: `now_s` is passed in, monotonic seconds. The device's own queue is known exactly and not counted here.
"""

from __future__ import annotations

from collections.abc import Hashable


class _Queue:
    """One station's."""

    __slots__ = ("_free_at_s", "_total_ms")

    def __init__(self) -> None:
        self._free_at_s = 0.0
        self._total_ms = 0.0
        """Of the requests under way."""

    def take(self, ms: float, now_s: float) -> None:
        self._free_at_s = max(self._free_at_s, now_s) + ms / 1000.0
        self._total_ms += ms

    def drop(self, ms: float) -> None:
        self._total_ms -= ms

    def empty(self) -> None:
        """Nothing is under way: predictions that were too long end here, and rounding."""
        self._free_at_s = self._total_ms = 0.0

    def left_ms(self, now_s: float) -> float:
        return max(min((self._free_at_s - now_s) * 1000.0, self._total_ms), 0.0)


class Underway:
    """Bounded by the requests in flight, in memory and in milliseconds: no more waits than belongs to them."""

    __slots__ = ("_began", "_companion", "_link")

    def __init__(self) -> None:
        self._began: dict[Hashable, tuple[float, float]] = {}
        self._link = _Queue()
        self._companion = _Queue()

    def began(self, key: Hashable, *, link_ms: float, companion_ms: float, now_s: float) -> None:
        """A request was decided; what it will take of each, as predicted."""
        self.done(key)
        self._began[key] = link_ms, companion_ms
        self._link.take(link_ms, now_s)
        self._companion.take(companion_ms, now_s)

    def done(self, key: Hashable) -> None:
        """It is answered, failed or given up; unknown keys are ignored."""
        if (one := self._began.pop(key, None)) is None:
            return
        self._link.drop(one[0])
        self._companion.drop(one[1])
        if not self._began:
            self._link.empty()
            self._companion.empty()

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._began

    def link_ms(self, now_s: float) -> float:
        """Work of requests under way that the link has still to do."""
        return self._link.left_ms(now_s)

    def companion_ms(self, now_s: float) -> float:
        """The same of the companion."""
        return self._companion.left_ms(now_s)
