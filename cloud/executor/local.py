"""Runs segments in this process: one worker thread, since a session already uses every core it was given.

Whose turn it is: the device that got the least compute so far (start-time fair queueing: a device that was idle starts
at the present virtual time, so that it cannot save up), and of that device the request with the earliest deadline.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cloud.executor import Done, Work
from split.errors import DeadlineExceeded, InvalidModel, ModelUnavailable
from split.runtime.store import SegmentStore

CLOSE_S = 10.0
"""For the run under way when the companion closes; one that hangs dies with the process (the thread is a daemon)."""

OPEN_S: Final = 60.0
"""For opening a segment: a child opened it before, in milliseconds to seconds; what takes a minute hangs."""


@dataclass(slots=True)
class _Line:
    """One device's waiting work."""

    served_ms: float
    """Virtual time: compute it got, or the least of all at the moment it came back from being idle."""
    heap: list[tuple[float, int, _Job]] = field(default_factory=list)
    waiting_ms: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    work: Work
    entered_at_s: float
    future: Future[Done] = field(default_factory=Future)


class LocalExecutor:
    """`TailExecutor` over the segment store of this process."""

    def __init__(self, segments: SegmentStore, *, open_timeout_s: float = OPEN_S) -> None:
        self._segments = segments
        self._open_timeout_s = open_timeout_s
        self._ready = threading.Condition()
        self._lines: dict[str, _Line] = {}
        """Only devices with waiting or running work: the table is bounded by what admission lets in."""
        self._order = itertools.count()
        self._virtual_ms = 0.0
        self._running: tuple[str, float, float] | None = None  # device, started_at_s, expected_ms
        self._closed = False
        self._opening = asyncio.Lock()
        """One segment at a time: opening takes every core."""
        self._thread = threading.Thread(target=self._serve, name="isthmus-tails", daemon=True)
        self._thread.start()

    def wait_ms(self, device: str) -> float:
        """As `TailExecutor.wait_ms`."""
        with self._ready:
            rest_ms = 0.0
            if self._running is not None:
                _, started_at_s, expected_ms = self._running
                rest_ms = max(expected_ms - (time.monotonic() - started_at_s) * 1000, 0.0)
            own = self._lines.get(device)
            own_ms = own.waiting_ms if own is not None else 0.0
            # Each of the others gets at most as much as this device before its turn comes.
            others_ms = sum(min(line.waiting_ms, own_ms) for name, line in self._lines.items() if name != device)
            return rest_ms + own_ms + others_ms

    async def open(self, path: Path) -> None:
        """As `TailExecutor.open`."""
        async with self._opening:
            try:
                async with asyncio.timeout(self._open_timeout_s):
                    await asyncio.wrap_future(self._segments.opening(path))
            except TimeoutError:
                self._segments.forget(path)
                raise InvalidModel(
                    f"load timeout: the companion's runtime did not open {path.name} within "
                    f"{self._open_timeout_s:g} s, though it did in a child process; restart the companion"
                ) from None

    def forget(self, place: Path) -> None:
        """As `TailExecutor.forget`."""
        self._segments.forget(place)

    @property
    def running_s(self) -> float:
        """How long the present run has lasted; 0.0 when none is under way."""
        running = self._running
        return 0.0 if running is None else time.monotonic() - running[1]

    async def run(self, work: Work) -> Done:
        """As `TailExecutor.run`."""
        job = _Job(work=work, entered_at_s=time.monotonic())
        with self._ready:
            if self._closed:
                raise ModelUnavailable("the companion is closing and starts nothing new")
            line = self._lines.setdefault(work.device, _Line(served_ms=self._virtual_ms))
            line.waiting_ms += work.expected_ms
            heapq.heappush(line.heap, (work.deadline_at_s, next(self._order), job))
            self._ready.notify()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._take_out(job)
            raise

    def close(self) -> None:
        """No new work begins; what runs has `CLOSE_S` to end."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            device, expected_ms = job.work.device, job.work.expected_ms
            run_ms = self._do(job)
            del job  # nothing of a request is kept after its reply
            with self._ready:
                self._running = None
                self._lines[device].served_ms += run_ms - expected_ms
                self._leave(device)

    def _next(self) -> _Job | None:
        """The next job to start, waiting for one; None when closed. Late jobs are answered here."""
        with self._ready:
            while True:
                busy = [(line.served_ms, name) for name, line in self._lines.items() if line.heap]
                if self._closed:
                    for line in self._lines.values():
                        for _, _, job in line.heap:
                            _fail(job, ModelUnavailable("the companion is closing and did not start this request"))
                    return None
                if not busy:
                    self._ready.wait()
                    continue
                self._virtual_ms, device = min(busy)
                line = self._lines[device]
                _, _, job = heapq.heappop(line.heap)
                line.waiting_ms -= job.work.expected_ms
                now_s = time.monotonic()
                if now_s >= job.work.deadline_at_s:
                    waited_ms = (now_s - job.entered_at_s) * 1000
                    _fail(job, DeadlineExceeded(f"the deadline passed after {waited_ms:.0f} ms in the queue here"))
                elif job.future.set_running_or_notify_cancel():
                    line.served_ms += job.work.expected_ms
                    self._running = (device, now_s, job.work.expected_ms)
                    return job
                self._leave(device)

    def _do(self, job: _Job) -> float:
        """Run one job and answer it; milliseconds it took."""
        started_at_s = time.monotonic()
        try:
            segment = self._segments.get(job.work.path)
            opened_at_s = time.monotonic()
            outputs = segment.run(job.work.feeds, job.work.outputs)
        except BaseException as error:  # an assertion too must reach its session, not end the worker
            job.future.set_exception(error)
            return (time.monotonic() - started_at_s) * 1000
        ended_at_s = time.monotonic()
        job.future.set_result(
            Done(
                outputs=outputs,
                queue_ms=(opened_at_s - job.entered_at_s) * 1000,
                run_ms=(ended_at_s - opened_at_s) * 1000,
            )
        )
        return (ended_at_s - started_at_s) * 1000

    def _take_out(self, job: _Job) -> None:
        """A cancelled job leaves the queue at once: its payload may be large."""
        with self._ready:
            line = self._lines.get(job.work.device)
            kept = [entry for entry in line.heap if entry[2] is not job] if line is not None else []
            if line is None or len(kept) == len(line.heap):
                return
            heapq.heapify(kept)
            line.heap = kept
            line.waiting_ms -= job.work.expected_ms
            self._leave(job.work.device)

    def _leave(self, device: str) -> None:
        """Forget a device that has nothing here any more."""
        running = self._running is not None and self._running[0] == device
        if not running and not self._lines[device].heap:
            del self._lines[device]


def _fail(job: _Job, error: Exception) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(error)
