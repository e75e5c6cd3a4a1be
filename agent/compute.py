"""The device's one compute worker: all stages of all requests pass through this thread, earliest deadline first, and a
better class before it where that makes nobody late (`split.plan.slack.first_to_run`).

One thread, because sessions already use every core that helps and two at once only take turns. The event loop hands
work in and is called back; it never waits. `emulation.slowdown` holds each job. Not a thread pool, and no judge of
requests: `agent/serve.py` decides what runs.
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
from typing import Any, Final, Generic, NamedTuple, TypeVar

from agent.handback import Handback
from split.errors import EngineFailed, ModelUnavailable, Overloaded
from split.plan.slack import first_to_run
from split.runtime.engine import Stop

T = TypeVar("T")

MAX_WAITING: Final = 256
"""Jobs waiting at once. At 4 ms each the last one starts after a second; a longer queue serves nobody in time."""

LAST_RANK: Final = 99
"""Of what no request waits for."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long `close` waits for the job under way: a run inside the runtime cannot be interrupted, only outlived."""


class Timed(NamedTuple, Generic[T]):
    """A result, how long it waited for other jobs (not for the worker to wake up), and how long it took; `run_ms`
    includes the emulated hold."""

    value: T
    queue_ms: float
    run_ms: float


class Job(asyncio.Future[Timed[T]]):
    """Work that has entered the worker, to be awaited. Cancelled before its turn it is never run and kept no longer;
    once running it is stopped where it may be, and else runs to its end."""

    def __init__(
        self,
        compute: Compute,
        work: Callable[[], T],
        deadline_at_s: float,
        expected_ms: float,
        rank: int,
        stop: Stop | None,
        yields: bool,
        handback: Handback,
    ) -> None:
        super().__init__(loop=handback.loop)
        self.handback = handback
        self._compute = compute
        self.work = work
        self.deadline_at_s = deadline_at_s
        self.expected_ms = expected_ms
        self.rank = rank
        self.stop = stop
        self.yields = yields
        self.entered_at_s = time.monotonic()
        self.next_is: int | None = None
        """Of a job that came to a worker with nothing to do: how many had begun until then."""
        self.started_at_s: float | None = None
        """When the worker took it."""

    @property
    def running_ms(self) -> float:
        """How long the worker has had it by now; 0 before its turn."""
        return 0.0 if self.started_at_s is None else (time.monotonic() - self.started_at_s) * 1e3

    def cancel(self, msg: Any | None = None) -> bool:
        """As of a future; a run that is under way is stopped, one that waits never begins."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._compute.withdraw(self)
        return cancelled


class Compute:
    """One worker thread with a queue ordered by deadline: `await run(…)` on the event loop, `close()` once.

    `slowdown` ≥ 1: after every job the worker sleeps (slowdown − 1) × the time the job took, so that each stage lasts
    as long as on a device that many times slower, while the core stays free for others on this machine.
    """

    def __init__(self, slowdown: float = 1.0, *, max_waiting: int = MAX_WAITING) -> None:
        assert slowdown >= 1.0, slowdown
        self.on_load: Callable[[float, float], None] = _nobody_minds
        """Called on the event loop with the expected ms and the deadline of a job that is about to enter, so that what
        must come before it can enter first; and with (0.0, inf) once it has entered, and when a job is done while
        others wait: it may have taken longer than expected.
        """
        self._hold_ratio = slowdown - 1.0
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, Job[Any]]] = []  # heap, under the lock
        self._waiting_ms = 0.0
        self._order = itertools.count()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()  # at least one for each waiting job
        self._handback: Handback | None = None
        """To the loop of the last job, which is that of all in a daemon."""
        self._running: Job[Any] | None = None
        self._begun = 0
        """Jobs so far."""
        self._started_at_s = 0.0
        self._busy_s = 0.0
        self._closing = threading.Event()
        self._stopping = False
        """The job under way ends in a moment: it was stopped."""
        self._no_hold = threading.Event()
        """Emulation adds nothing to the job under way any more."""
        self._thread = threading.Thread(target=self._serve, name="isthmus-compute", daemon=True)
        self._thread.start()

    def run(
        self,
        work: Callable[[], T],
        *,
        deadline_at_s: float,
        expected_ms: float,
        rank: int = LAST_RANK,
        stop: Stop | None = None,
        yields: bool = False,
    ) -> Job[T]:
        """Have `work` run on the worker thread; among those waiting, the earliest deadline goes first.

        `deadline_at_s`: monotonic seconds, only for the order: a late job is still run; `math.inf` for what may run
        when nothing else waits. `expected_ms`: what it will take, hold included, for `queue_ms`. `rank`: the smaller,
        the sooner, where nobody is late by it. `stop`: asked when the job is cancelled while it runs; what emulation
        adds ends then, too. `yields`: it is for idle times, and cancelled by the next job that enters while it runs
        (give it a `stop`). The job raises what `work` raises, ModelUnavailable when the daemon
        closes before its turn, Overloaded when one of a better rank took its place in a full queue. Raises Overloaded
        when too many wait, none of them of a worse rank, ModelUnavailable while closing.
        """
        self.on_load(expected_ms, deadline_at_s)
        job = Job(self, work, deadline_at_s, expected_ms, rank, stop, yields, self._to_loop(asyncio.get_running_loop()))
        if (running := self._running) is not None and running.yields:
            running.cancel()
        too_many = f"{self._max_waiting} jobs wait for the compute worker, no more fit; try again later"
        passed_over = None
        with self._lock:
            if self._closing.is_set() or not self._thread.is_alive():
                raise ModelUnavailable("the compute worker has stopped; the daemon is shutting down")
            if len(self._waiting) >= self._max_waiting:
                passed_over = max(self._waiting, key=lambda entry: (entry[2].rank, entry[:2]))[2]
                if passed_over.rank <= rank:
                    raise Overloaded(too_many)
                self._forget(passed_over)
            if self._running is None and not self._waiting:
                job.next_is = self._begun
            heapq.heappush(self._waiting, (deadline_at_s, next(self._order), job))
            self._waiting_ms += expected_ms
        self._tokens.put(None)
        if passed_over is not None and not passed_over.done():
            passed_over.set_exception(Overloaded(f"{too_many} (a request of a better class or priority came)"))
        self.on_load(0.0, math.inf)
        return job

    @property
    def slowdown(self) -> float:
        """`emulation.slowdown`; 1.0: none."""
        return self._hold_ratio + 1.0

    @property
    def queue_ms(self) -> float:
        """Expected ms until a job that comes now would start: those waiting and the rest of the running one."""
        with self._lock:
            running, waiting_ms = self._running, self._waiting_ms
            if running is None or running.yields or self._stopping:
                return waiting_ms
            left_ms = running.expected_ms - (time.monotonic() - self._started_at_s) * 1e3
            # One that is late is expected to need as much again, up to its whole time: the device has become slower.
            return waiting_ms + (left_ms if left_ms > 0.0 else min(-left_ms, running.expected_ms))

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

    @property
    def busy_s(self) -> float:
        """How long the worker has run jobs since it was made, emulated holds and the one under way included."""
        with self._lock:
            running_s = 0.0 if self._running is None else time.monotonic() - self._started_at_s
            return self._busy_s + running_s

    def close(self) -> None:
        """Refuse what waits, let the job under way end (at most `CLOSE_TIMEOUT_S`), end the thread. Blocking."""
        with self._lock:
            self._closing.set()
            self._no_hold.set()
            refused = [job for _, _, job in self._waiting]
            self._waiting.clear()
            self._waiting_ms = 0.0
        self._tokens.put(None)
        for job in refused:
            self._deliver(job, ModelUnavailable("the daemon is shutting down; the request was not run"))
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            stuck = self._running
        if stuck is not None:
            why = f"the job under way did not end within {CLOSE_TIMEOUT_S} s of the shutdown"
            self._deliver(stuck, EngineFailed(why))
        if self._handback is not None:
            self._handback.close()

    def settle(self, job: Job[Any], outcome: Timed[Any] | BaseException) -> None:
        """On the event loop: the job's outcome goes to the one who waits for it."""
        if self._waiting:
            self.on_load(0.0, math.inf)
        if job.done():  # cancelled meanwhile
            return
        if isinstance(outcome, StopIteration):  # a future cannot carry it
            job.set_exception(RuntimeError(f"the job raised {outcome!r}"))
        elif isinstance(outcome, BaseException):
            job.set_exception(outcome)
        else:
            job.set_result(outcome)

    def withdraw(self, job: Job[Any]) -> None:
        """Nobody waits for it any more: if it still waits for its turn, it is forgotten; if it runs, it is stopped."""
        with self._lock:
            self._forget(job)
            if job is self._running and job.stop is not None:
                job.stop.ask()
                self._stopping = True
                self._no_hold.set()

    def _to_loop(self, loop: asyncio.AbstractEventLoop) -> Handback:
        if self._handback is None or self._handback.loop is not loop:
            if self._handback is not None:
                self._handback.close()
            self._handback = Handback(loop)
        return self._handback

    def _forget(self, job: Job[Any]) -> None:
        """Under the lock."""
        left = [entry for entry in self._waiting if entry[2] is not job]
        if len(left) < len(self._waiting):
            heapq.heapify(left)
            self._waiting = left
            self._waiting_ms = max(0.0, self._waiting_ms - job.expected_ms) if left else 0.0

    def _take(self) -> Job[Any]:
        """Under the lock: the job whose turn it is out of those that wait, one at least."""
        first = self._waiting[0][2]
        if any(job.rank < first.rank for _, _, job in self._waiting):
            jobs = [job for _, _, job in sorted(self._waiting, key=lambda entry: entry[:2])]
            waiting = [(job.deadline_at_s, job.expected_ms, job.rank) for job in jobs]
            first = jobs[first_to_run(time.monotonic(), waiting)]
        self._forget(first)
        return first

    def _serve(self) -> None:
        while True:
            self._tokens.get()
            with self._lock:
                if self._closing.is_set():
                    return
                if not self._waiting:  # its job was withdrawn
                    continue
                self._running = job = self._take()
                self._stopping = False
                self._no_hold.clear()
                self._started_at_s = job.started_at_s = time.monotonic()
                waited_ms = (self._started_at_s - job.entered_at_s) * 1e3 if job.next_is != self._begun else 0.0
                self._begun += 1
            outcome = self._perform(job, waited_ms)
            with self._lock:
                self._running = None
                self._busy_s += time.monotonic() - self._started_at_s
            self._deliver(job, outcome)
            del job, outcome  # an idle worker must not keep the last request's tensors

    def _perform(self, job: Job[Any], waited_ms: float) -> Timed[Any] | BaseException:
        started_at_s = self._started_at_s
        try:
            value = job.work()
        except BaseException as error:  # whatever it is belongs to the one who waits; the worker lives
            return error
        finally:
            if self._hold_ratio > 0.0:
                self._no_hold.wait((time.monotonic() - started_at_s) * self._hold_ratio)
        return Timed(value, waited_ms, (time.monotonic() - started_at_s) * 1e3)

    def _deliver(self, job: Job[Any], outcome: Timed[Any] | BaseException) -> None:
        try:
            job.handback.give(self.settle, job, outcome)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass


def _nobody_minds(entering_ms: float, deadline_at_s: float) -> None:
    return None
