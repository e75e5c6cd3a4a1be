"""The worker is real; order is forced with events, and where time matters the clock of the module is a fake one."""

import asyncio
import functools
import gc
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent import compute as compute_module
from agent.compute import Compute
from split.errors import EngineFailed, InvalidRequest, ModelUnavailable, Overloaded
from split.runtime.engine import Stop


class Gate:
    """Work that says when it has begun and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(30)
        return "gate"


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    made = Compute()
    yield made
    made.close()


def later(
    compute: Compute, work: Callable[[], object], *, deadline_at_s: float = 1.0, expected_ms: float = 0.0
) -> "asyncio.Task[object]":
    async def run() -> object:
        return (await compute.run(work, deadline_at_s=deadline_at_s, expected_ms=expected_ms)).value

    return asyncio.get_running_loop().create_task(run())


async def blocked(compute: Compute, *, expected_ms: float = 0.0) -> "tuple[Gate, asyncio.Task[object]]":
    """The worker is busy until the gate is opened."""
    gate = Gate()
    task = later(compute, gate, deadline_at_s=0.0, expected_ms=expected_ms)
    assert await asyncio.to_thread(gate.begun.wait, 30)
    return gate, task


async def test_work_runs_on_one_thread_of_its_own_and_its_value_comes_back(compute: Compute) -> None:
    names = {await later(compute, lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"isthmus-compute"}


async def test_among_those_waiting_the_earliest_deadline_goes_first_and_equals_in_order(compute: Compute) -> None:
    gate, busy = await blocked(compute)
    order: list[str] = []
    tasks = [
        later(compute, lambda name=name: order.append(name), deadline_at_s=at)
        for name, at in (("late", 9.0), ("first of two", 5.0), ("second of two", 5.0), ("soon", 2.0))
    ]
    await asyncio.sleep(0)
    gate.may_end.set()
    await asyncio.gather(busy, *tasks)
    assert order == ["soon", "first of two", "second of two", "late"]


async def test_a_job_waits_for_others_and_not_for_the_worker_to_wake_up(compute: Compute) -> None:
    alone = await compute.run(lambda: 1, deadline_at_s=1.0, expected_ms=0.0)
    assert alone.queue_ms == 0.0
    gate, busy = await blocked(compute)
    behind = compute.run(lambda: 2, deadline_at_s=1.0, expected_ms=0.0)
    next_one = compute.run(lambda: 3, deadline_at_s=2.0, expected_ms=0.0)
    gate.may_end.set()
    await busy
    assert (await behind).queue_ms > 0.0
    assert (await next_one).queue_ms > 0.0


async def test_a_waiter_that_is_cancelled_is_never_run_and_keeps_nothing_alive(compute: Compute) -> None:
    class Tensor:
        pass

    tensor = Tensor()
    alive = weakref.ref(tensor)
    ran: list[object] = []
    gate, busy = await blocked(compute)
    task = later(compute, lambda held=tensor: ran.append(held), expected_ms=50.0)
    await asyncio.sleep(0)
    assert compute.waiting == 1
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task, tensor
    gc.collect()
    assert compute.waiting == 0
    assert compute.queue_ms == 0.0
    assert alive() is None
    gate.may_end.set()
    await busy
    assert await later(compute, lambda: "next") == "next"
    assert ran == []


async def test_cancelling_the_running_one_leaves_the_worker_fit(compute: Compute) -> None:
    gate, busy = await blocked(compute)
    busy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await busy
    gate.may_end.set()
    assert await later(compute, lambda: "next") == "next"


@pytest.mark.parametrize("error", [InvalidRequest("no"), ZeroDivisionError("bug"), MemoryError(), SystemExit(3)])
async def test_what_the_work_raises_reaches_the_one_who_waits_and_the_worker_lives(
    compute: Compute, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    future = asyncio.ensure_future(asyncio.shield(later(compute, lambda: "before")))
    await future
    with pytest.raises(type(error)) as caught:
        await compute.run(fail, deadline_at_s=1.0, expected_ms=0.0)
    assert caught.value is error
    assert compute.alive
    assert await later(compute, lambda: "after") == "after"


async def test_a_stop_iteration_does_not_strand_its_waiter(compute: Compute) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await later(compute, lambda: next(iter(())))


async def test_a_job_that_is_cancelled_while_it_runs_is_stopped_and_the_next_is_not(compute: Compute) -> None:
    stops = [Stop(), Stop()]
    begun, ended = threading.Event(), threading.Event()

    def work(stop: Stop) -> str:
        stop.begins(ended.set)
        begun.set()
        return str(ended.wait(30))

    running = compute.run(lambda: work(stops[0]), deadline_at_s=1.0, expected_ms=60_000.0, stop=stops[0])
    assert await asyncio.to_thread(begun.wait, 30)
    waiting = compute.run(lambda: "next", deadline_at_s=1.0, expected_ms=1000.0, stop=stops[1])
    assert compute.queue_ms > 1000.0
    assert not ended.is_set()
    running.cancel()
    assert compute.queue_ms <= 1000.0  # of the one that is stopped nothing is expected any more
    assert (await waiting).value == "next"
    assert ended.is_set()
    assert [stop.asked for stop in stops] == [True, False]
    waiting.cancel()
    assert not stops[1].asked  # it is over


async def test_a_job_for_idle_times_ends_for_the_next_that_enters_and_keeps_nobody_waiting(compute: Compute) -> None:
    stop, begun, ended = Stop(), threading.Event(), threading.Event()

    def work() -> bool:
        stop.begins(ended.set)
        begun.set()
        return ended.wait(30)

    idle = compute.run(work, deadline_at_s=math.inf, expected_ms=60_000.0, stop=stop, yields=True)
    assert await asyncio.to_thread(begun.wait, 30)
    assert compute.queue_ms == 0.0
    assert (await later(compute, lambda: "next")) == "next"
    assert idle.cancelled()


async def test_what_emulation_adds_ends_with_a_job_that_is_stopped() -> None:
    compute = Compute(slowdown=1e9)
    try:
        begun = threading.Event()

        def work() -> None:
            for _ in range(100_000):
                pass
            begun.set()

        running = compute.run(work, deadline_at_s=1.0, expected_ms=0.0, stop=Stop())
        assert await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        while compute.running_ms:  # noqa: ASYNC110 - ends at once, or after a day
            await asyncio.sleep(0)
        assert compute.alive
    finally:
        compute.close()


async def test_a_full_queue_refuses_with_a_typed_error() -> None:
    compute = Compute(max_waiting=2)
    try:
        gate, busy = await blocked(compute)
        tasks = [later(compute, lambda: None) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 jobs wait"):
            await compute.run(lambda: None, deadline_at_s=1.0, expected_ms=0.0)
        gate.may_end.set()
        await asyncio.gather(busy, *tasks)
    finally:
        compute.close()


async def test_in_a_full_queue_the_worst_rank_gives_way_to_a_better_one() -> None:
    compute = Compute(max_waiting=2)
    try:
        gate, busy = await blocked(compute)
        bronze, silver = (compute.run(lambda: None, deadline_at_s=1.0, expected_ms=10.0, rank=n) for n in (9, 5))
        gold = compute.run(lambda: "gold", deadline_at_s=2.0, expected_ms=10.0, rank=1)
        with pytest.raises(Overloaded, match="better class"):
            await bronze
        assert compute.waiting == 2
        with pytest.raises(Overloaded, match="2 jobs wait"):
            compute.run(lambda: None, deadline_at_s=0.0, expected_ms=10.0, rank=5)
        gate.may_end.set()
        assert (await gold).value == "gold"
        await asyncio.gather(busy, silver)
        assert compute.queue_ms == 0.0
    finally:
        compute.close()


async def test_a_better_rank_goes_first_unless_one_with_less_time_would_be_late(compute: Compute) -> None:
    now_s = time.monotonic()
    for silver_has_s, order in ((1000.0, ["gold", "silver"]), (400.0, ["silver", "gold"])):
        gate, busy = await blocked(compute)
        done: list[str] = []
        jobs = [
            compute.run(
                functools.partial(done.append, name),
                deadline_at_s=now_s + has_s,
                expected_ms=300_000.0,
                rank=rank,
            )
            for name, has_s, rank in (("silver", silver_has_s, 6), ("gold", 2000.0, 2))
        ]
        gate.may_end.set()
        await asyncio.gather(busy, *jobs)
        assert done == order


async def test_the_queue_in_milliseconds_is_what_waits_and_the_rest_of_what_runs(
    compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    assert compute.queue_ms == 0.0
    gate, busy = await blocked(compute, expected_ms=100.0)
    tasks = [later(compute, lambda: None, expected_ms=30.0) for _ in range(2)]
    await asyncio.sleep(0)
    assert compute.queue_ms == pytest.approx(160.0)
    clock.now_s += 0.040
    assert compute.queue_ms == pytest.approx(120.0)
    assert compute.running_ms == pytest.approx(40.0)
    clock.now_s += 0.080  # 20 ms late: expected to need as much again
    assert compute.queue_ms == pytest.approx(60.0 + 20.0)
    clock.now_s += 10.0
    assert compute.queue_ms == pytest.approx(60.0 + 100.0)
    gate.may_end.set()
    await asyncio.gather(busy, *tasks)
    assert compute.queue_ms == 0.0


async def test_those_who_must_come_first_are_asked_before_a_job_enters(compute: Compute) -> None:
    gate, busy = await blocked(compute)
    order: list[str] = []
    first: list[asyncio.Future[Any]] = []

    def let_in(entering_ms: float, deadline_at_s: float) -> None:
        compute.on_load = lambda *load: None
        assert (entering_ms, deadline_at_s, compute.waiting) == (70.0, 1.0, 0)
        first.append(compute.run(lambda: order.append("first"), deadline_at_s=1.0, expected_ms=0.0))

    compute.on_load = let_in
    second = later(compute, lambda: order.append("second"), deadline_at_s=1.0, expected_ms=70.0)
    await asyncio.sleep(0)
    gate.may_end.set()
    await asyncio.gather(busy, second, *first)
    assert order == ["first", "second"]


async def test_what_may_come_behind_a_job_is_asked_again_once_it_has_entered(compute: Compute) -> None:
    gate, busy = await blocked(compute)
    told: list[tuple[float, float, int]] = []
    compute.on_load = lambda *load: told.append((*load, compute.waiting))
    second = later(compute, lambda: None, deadline_at_s=3.0, expected_ms=70.0)
    await asyncio.sleep(0)
    assert told == [(70.0, 3.0, 0), (0.0, math.inf, 1)]
    gate.may_end.set()
    await asyncio.gather(busy, second)


async def test_a_job_that_is_done_while_others_wait_is_told(compute: Compute) -> None:
    gate, busy = await blocked(compute)
    second_gate = Gate()
    second, third = later(compute, second_gate, deadline_at_s=1.0), later(compute, lambda: None, deadline_at_s=2.0)
    await asyncio.sleep(0)
    told: list[tuple[float, float]] = []
    compute.on_load = lambda *load: told.append(load)
    gate.may_end.set()
    await busy
    assert told == [(0.0, math.inf)]
    second_gate.may_end.set()
    await asyncio.gather(second, third)


async def test_the_hold_lasts_as_long_as_the_device_would_and_counts_as_run_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    compute = Compute(slowdown=4.0)
    held_s: list[float] = []

    def hold(seconds: float) -> bool:
        held_s.append(seconds)
        clock.now_s += seconds
        return False

    monkeypatch.setattr(compute._no_hold, "wait", hold)
    try:
        timed = await compute.run(lambda: clock.advance(0.010), deadline_at_s=1.0, expected_ms=40.0)
        assert held_s == pytest.approx([0.030])
        assert timed.run_ms == pytest.approx(40.0)
        assert timed.queue_ms == pytest.approx(0.0)
        assert compute.slowdown == 4.0
    finally:
        compute.close()


async def test_without_emulation_nothing_is_held(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    held_s: list[float] = []
    monkeypatch.setattr(compute._no_hold, "wait", held_s.append)
    assert await later(compute, lambda: "done") == "done"
    assert held_s == []
    assert compute.slowdown == 1.0


async def test_closing_refuses_what_waits_ends_the_thread_and_takes_no_more() -> None:
    compute = Compute()
    gate, busy = await blocked(compute)
    waiting = later(compute, lambda: "never")
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(compute.close))
    with pytest.raises(ModelUnavailable, match="shutting down"):
        await waiting
    gate.may_end.set()
    await closing
    assert await busy == "gate"
    assert not compute.alive
    with pytest.raises(ModelUnavailable, match="shutting down"):
        await compute.run(lambda: None, deadline_at_s=1.0, expected_ms=0.0)
    compute.close()


async def test_closing_does_not_wait_for_ever_for_a_job_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_module, "CLOSE_TIMEOUT_S", 0.01)
    compute = Compute()
    gate, busy = await blocked(compute)
    await asyncio.to_thread(compute.close)
    with pytest.raises(EngineFailed, match="did not end"):
        await busy
    gate.may_end.set()
    compute._thread.join(30)
    assert not compute.alive


async def test_closing_ends_a_hold_early() -> None:
    compute = Compute(slowdown=1e9)
    ran = threading.Event()

    def work() -> None:
        for _ in range(100_000):
            pass
        ran.set()

    task = later(compute, work)
    assert await asyncio.to_thread(ran.wait, 30)
    await asyncio.to_thread(compute.close)
    assert not compute.alive
    await task


async def test_a_result_for_a_loop_that_is_gone_is_dropped(compute: Compute) -> None:
    gate = Gate()

    def other_program() -> None:
        async def leave() -> None:
            task = asyncio.ensure_future(compute.run(gate, deadline_at_s=1.0, expected_ms=0.0))
            await asyncio.to_thread(gate.begun.wait, 30)
            task.cancel()

        asyncio.run(leave())

    await asyncio.to_thread(other_program)
    gate.may_end.set()
    assert await later(compute, lambda: "still here") == "still here"


class Clock:
    """Replaces the module's `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(compute_module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
