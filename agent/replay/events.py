"""What happens in a simulation and when; what is for the same time happens in the order in which it was said."""

from __future__ import annotations

import copy
import heapq
import math
from enum import IntEnum


class Event(IntEnum):
    """The rest of an event is the number of its request and a token that makes it void."""

    WORKED = 0
    SENT = 1
    REACHED = 2
    COMPUTED = 3
    RETURNED = 4
    BACK_HERE = 5
    DECODED = 6
    DUE = 7
    PONG = 8
    LOST = 9
    BACK = 10
    TICK = 11
    GIVE_UP = 12
    PACED = 13
    LOOK = 14


class Events:
    """To come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event, int, int]] = []
        self._order = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_at_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def at(self, at_s: float, event: Event, number: int = 0, token: int = 0) -> None:
        """inf: it never happens."""
        if at_s < math.inf:
            self._order += 1
            heapq.heappush(self._heap, (at_s, self._order, event, number, token))

    def take(self) -> tuple[float, Event, int, int]:
        """The next one: when, what, number, token."""
        at_s, _, event, number, token = heapq.heappop(self._heap)
        return at_s, event, number, token

    def branch(self) -> Events:
        other = copy.copy(self)
        other._heap = list(self._heap)
        return other
