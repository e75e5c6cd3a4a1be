"""The device's one compute worker: all stages of all requests pass through this thread, earliest deadline first.

One thread, because sessions already use every core that helps and two at once only take turns. The event loop hands
work in and is called back; it never waits. `emulation.slowdown` is kept here and nowhere else. Not a thread pool, and
no judge of requests: `agent/serve.py` decides what runs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from split.errors import EngineFailed, ModelUnavailable, Overloaded

T = TypeVar("T")

MAX_WAITING: Final = 256
"""Jobs waiting at once. At 4 ms each the last one starts after a second; a longer queue serves nobody in time."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the job under way: a run inside the runtime cannot be interrupted, only outlived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Generic[T]):
    """A result, how long it waited for the worker and how long it took; `run_ms` includes the emulated hold."""

    value: T
    queue_ms: float
    run_ms: float


@dataclass(slots=True, eq=False, kw_only=True)
class _Job:
    work: Callable[[], Any]
    expected_ms: float
    entered_at_s: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Timed[Any]]
    hold_ratio: float
    """Held afterwards, as a multiple of the time the work took."""


class Compute:
    """One worker thread with a queue ordered by deadline: `await run(…)` on the event loop, `close()` once.

    `slowdown` ≥ 1: after every job the worker sleeps (slowdown − 1) × the time the job took, so that each stage lasts
    as long as on a device that many times slower, while the core stays free for others on this machine.
    """

    def __init__(self, slowdown: float = 1.0, *, max_waiting: int = MAX_WAITING) -> None:
        assert slowdown >= 1.0, slowdown
        self._hold_ratio = slowdown - 1.0
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, _Job]] = []  # heap, under the lock
        self._waiting_ms = 0.0
        self._order = itertools.count()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # at least one for each waiting job
        self._running: _Job | None = None
        self._started_at_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="isthmus-compute", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T], *, deadline_at_s: float, expected_ms: float) -> Timed[T]:
        """Run `work` on the worker thread; among those waiting, the earliest deadline goes first.

        `deadline_at_s`: monotonic seconds, only for the order: a late job is still run. `expected_ms`: what it will
        take, hold included, for `queue_ms`. Raises what `work` raises; Overloaded when too many wait; ModelUnavailable
        while closing. A waiter that is cancelled before its turn is never run; once running it runs to its end.
        """
        return await self._enter(work, deadline_at_s, expected_ms, self._hold_ratio)

    async def hold(self, measured_ms: float) -> None:
        """Emulate a device stage of `measured_ms` that ran elsewhere: hold the worker for the rest, before others."""
        held_ms = measured_ms * self._hold_ratio
        if held_ms > 0.0:
            await self._enter(lambda: self._closing.wait(held_ms / 1e3), -math.inf, held_ms, 0.0)

    async def _enter(
        self, work: Callable[[], T], deadline_at_s: float, expected_ms: float, hold_ratio: float
    ) -> Timed[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Timed[Any]] = loop.create_future()
        job = _Job(
            work=work,
            expected_ms=expected_ms,
            entered_at_s=time.monotonic(),
            loop=loop,
            future=future,
            hold_ratio=hold_ratio,
        )
        entry = (deadline_at_s, next(self._order), job)
        with self._lock:
            if self._closing.is_set() or not self._thread.is_alive():
                raise ModelUnavailable("the compute worker has stopped; the daemon is shutting down")
            if len(self._waiting) >= self._max_waiting:
                raise Overloaded(f"{len(self._waiting)} jobs wait for the compute worker, no more fit; try again later")
            heapq.heappush(self._waiting, entry)
            self._waiting_ms += expected_ms
        self._tokens.put(None)
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    @property
    def slowdown(self) -> float:
        return self._hold_ratio + 1.0

    @property
    def queue_ms(self) -> float:
        """Expected ms until a job that comes now would start: those waiting and the rest of the running one."""
        with self._lock:
            running, waiting_ms = self._running, self._waiting_ms
            if running is None:
                return waiting_ms
            elapsed_ms = (time.monotonic() - self._started_at_s) * 1e3
            return waiting_ms + max(0.0, running.expected_ms - elapsed_ms)

    @property
    def waiting(self) -> int:
        """Jobs that wait for the worker."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """False once the worker thread has ended: nothing will be computed any more."""
        return self._thread.is_alive()

    @property
    def running_ms(self) -> float:
        """How long the job under way has been running, 0.0 when idle: the watchdog sees a stuck worker by it."""
        with self._lock:
            return 0.0 if self._running is None else (time.monotonic() - self._started_at_s) * 1e3

    def close(self) -> None:
        """Refuse what waits, let the job under way end (at most `CLOSE_TIMEOUT_S`), end the thread. Blocking."""
        with self._lock:
            self._closing.set()
            refused = [job for _, _, job in self._waiting]
            self._waiting.clear()
            self._waiting_ms = 0.0
        self._tokens.put(None)
        for job in refused:
            _deliver(job, ModelUnavailable("the daemon is shutting down; the request was not run"))
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            stuck = self._running
        if stuck is not None:
            _deliver(stuck, EngineFailed(f"the job under way did not end within {CLOSE_TIMEOUT_S} s of the shutdown"))

    def _withdraw(self, entry: tuple[float, int, _Job]) -> None:
        with self._lock:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                self._waiting_ms = max(0.0, self._waiting_ms - entry[2].expected_ms) if self._waiting else 0.0

    def _serve(self) -> None:
        while True:
            self._tokens.get()
            with self._lock:
                if self._closing.is_set():
                    return
                if not self._waiting:  # its job was withdrawn
                    continue
                _, _, job = heapq.heappop(self._waiting)
                self._waiting_ms = max(0.0, self._waiting_ms - job.expected_ms) if self._waiting else 0.0
                self._running = job
                self._started_at_s = time.monotonic()
            outcome = self._perform(job)
            with self._lock:
                self._running = None
            _deliver(job, outcome)
            del job, outcome  # an idle worker must not keep the last request's tensors

    def _perform(self, job: _Job) -> Timed[Any] | BaseException:
        started_at_s = self._started_at_s
        try:
            value = job.work()
        except BaseException as error:  # whatever it is belongs to the one who waits; the worker lives
            return error
        finally:
            if job.hold_ratio > 0.0:
                self._closing.wait((time.monotonic() - started_at_s) * job.hold_ratio)
        return Timed(
            value=value,
            queue_ms=(started_at_s - job.entered_at_s) * 1e3,
            run_ms=(time.monotonic() - started_at_s) * 1e3,
        )


def _deliver(job: _Job, outcome: Timed[Any] | BaseException) -> None:
    try:
        job.loop.call_soon_threadsafe(_settle, job.future, outcome)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _settle(future: asyncio.Future[Timed[Any]], outcome: Timed[Any] | BaseException) -> None:
    if future.done():  # cancelled meanwhile
        return
    if isinstance(outcome, StopIteration):  # a future cannot carry it
        future.set_exception(RuntimeError(f"the job raised {outcome!r}"))
    elif isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
