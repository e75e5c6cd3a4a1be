"""The device's worker in a simulation: one job at a time, the earliest deadline first. What is known of a job before it
is done is what it is expected to take, as in `agent/compute.py`."""

from __future__ import annotations

import copy
import heapq
from enum import IntEnum


class Work(IntEnum):
    """What the worker does for a request."""

    PREPARE = 0
    """Picture, head, encoding; the whole of a local plan."""
    FINISH = 1
    """What is missing, from what is there."""


class Worker:
    """Jobs by the numbers of their requests. Who takes one says when it is through (`done`)."""

    def __init__(self) -> None:
        self.running: tuple[int, Work] | None = None
        self._free_at_s = 0.0
        """When the job under way is expected to be through."""
        self._jobs: list[tuple[float, int, int, Work, float]] = []
        self._order = 0
        self._waiting_ms = 0.0

    def __bool__(self) -> bool:
        """Whether a job waits."""
        return bool(self._jobs)

    def branch(self) -> Worker:
        other = copy.copy(self)
        other._jobs = list(self._jobs)
        return other

    def enter(self, number: int, work: Work, *, deadline_at_s: float, expected_ms: float) -> None:
        self._order += 1
        heapq.heappush(self._jobs, (deadline_at_s, self._order, number, work, expected_ms))
        self._waiting_ms += expected_ms

    def withdraw(self, expected_ms: float) -> None:
        """A job that waits will not be run: it takes no time, whoever takes it passes it over."""
        self._waiting_ms = max(self._waiting_ms - expected_ms, 0.0)

    def take(self) -> tuple[int, Work, float]:
        """The next job, and what it is expected to take; `begin` it, or pass it over where it was withdrawn."""
        _, _, number, work, expected_ms = heapq.heappop(self._jobs)
        return number, work, expected_ms

    def begin(self, number: int, work: Work, expected_ms: float, now_s: float) -> None:
        self.running, self._free_at_s = (number, work), now_s + expected_ms / 1000.0
        self._waiting_ms = max(self._waiting_ms - expected_ms, 0.0) if self._jobs else 0.0

    def done(self) -> tuple[int, Work]:
        """The job under way is through."""
        assert self.running is not None, "nothing runs"
        job, self.running = self.running, None
        return job

    def queue_ms(self, now_s: float) -> float:
        """Until a job that comes now and has the latest deadline is expected to start."""
        runs_ms = max(self._free_at_s - now_s, 0.0) * 1000.0 if self.running is not None else 0.0
        return self._waiting_ms + runs_ms
