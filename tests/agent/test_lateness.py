"""When the local finish must begin; virtual time, the margin taken from the module's documented constants."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from agent.lateness import Lateness
from split.errors import Overloaded
from split.transport.virtual_time import run_in_virtual_time


async def rings_at(begun: asyncio.Future[asyncio.Future[Any]]) -> float:
    await begun
    return asyncio.get_running_loop().time()


def watch(
    late: Lateness,
    key: str = "a",
    *,
    deadline_at_s: float = 1.0,
    timeout_ms: float | None = None,
    begin: Callable[[], asyncio.Future[Any]] | None = None,
    hedge_after_ms: float = math.inf,
) -> asyncio.Future[asyncio.Future[Any]]:
    """One request whose local finish takes 100 ms; by default nothing begins but the clock."""
    return late.watch(
        key,
        deadline_at_s=deadline_at_s,
        local_ms=100.0,
        timeout_ms=timeout_ms,
        begin=begin or asyncio.get_running_loop().create_future,
        hedge_after_ms=hedge_after_ms,
    )


def test_one_request_is_finished_here_just_in_time() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        ring = watch(late)
        # 1 s − (100 ms + 5 % of it + 8 ms + 5 % of the 900 ms beyond)
        assert await rings_at(ring) == pytest.approx(1.0 - 0.158)

    run_in_virtual_time(story())


def test_requests_that_share_the_worker_begin_one_after_the_other() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        rings = [watch(late, key) for key in "abc"]
        times = sorted(await asyncio.gather(*(rings_at(ring) for ring in rings)))
        assert times == pytest.approx([1.0 - 3 * 0.158, 1.0 - 2 * 0.158, 1.0 - 0.158])

    run_in_virtual_time(story())


def test_work_that_will_be_done_by_then_changes_nothing() -> None:
    async def story() -> None:
        free_at_s = 0.84  # before 0.842
        late = Lateness(queue_ms=lambda: max(free_at_s - asyncio.get_running_loop().time(), 0.0) * 1000)
        assert await rings_at(watch(late)) == pytest.approx(1.0 - 0.158)

    run_in_virtual_time(story())


def test_work_that_would_still_keep_the_worker_busy_makes_the_finish_begin_at_once() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 850.0)
        assert await rings_at(watch(late)) == 0.0

    run_in_virtual_time(story())


@pytest.mark.parametrize(("entering_ms", "rings_at_s"), [(140.0, 1.0 - 0.158), (145.0, 0.7)])
def test_work_that_enters_later_is_let_in_behind_a_finish_that_it_would_make_late(
    entering_ms: float, rings_at_s: float
) -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        begun = watch(late)
        await asyncio.sleep(0.7)  # 142 ms before the latest start
        late.make_room(entering_ms)
        assert begun.done() is (rings_at_s == 0.7)  # before the worker gets to know of the other
        assert await rings_at(begun) == pytest.approx(rings_at_s)

    run_in_virtual_time(story())


@pytest.mark.parametrize(("job_deadline_at_s", "goes_before"), [(0.99, False), (1.0, True), (5.0, True)])
def test_only_finishes_with_no_later_deadline_go_before_what_enters(
    job_deadline_at_s: float, goes_before: bool
) -> None:
    async def story() -> None:
        queue_ms = 0.0
        late = Lateness(queue_ms=lambda: queue_ms)
        begun = watch(late)
        await asyncio.sleep(0.7)  # 142 ms before the latest start
        late.make_room(145.0, job_deadline_at_s)
        assert begun.done() is goes_before
        queue_ms = 145.0  # it has entered
        late.make_room()
        assert begun.done()

    run_in_virtual_time(story())


def test_a_finish_that_begins_is_itself_work_that_may_make_others_late() -> None:
    async def story() -> None:
        queue_ms = 0.0

        def begin() -> asyncio.Future[Any]:
            nonlocal queue_ms
            late.make_room(100.0)
            queue_ms += 100.0
            return asyncio.get_running_loop().create_future()

        late = Lateness(queue_ms=lambda: queue_ms)
        soon = watch(late, "soon", deadline_at_s=0.5, timeout_ms=200.0, begin=begin)
        # could start at 0.4 − (105 + 8 + 15) ms = 0.272: not behind one that runs from 0.2 to 0.3
        other = watch(late, "other", deadline_at_s=0.4, begin=begin)
        assert await rings_at(soon) == pytest.approx(0.2)
        assert other.done()

    run_in_virtual_time(story())


@pytest.mark.parametrize("error", [Overloaded("256 jobs wait"), ZeroDivisionError("a bug")])
def test_a_finish_that_cannot_begin_says_so_to_the_one_who_waits_and_keeps_no_other_back(error: Exception) -> None:
    def fail() -> asyncio.Future[Any]:
        raise error

    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        begun, other = watch(late, begin=fail), watch(late, "other")
        late.hurry_all()
        with pytest.raises(type(error)):
            await begun
        assert other.done()

    run_in_virtual_time(story())


def test_a_failed_companion_makes_the_finish_begin_at_once_and_once() -> None:
    async def story() -> None:
        began: list[float] = []

        def begin() -> asyncio.Future[Any]:
            began.append(asyncio.get_running_loop().time())
            return asyncio.get_running_loop().create_future()

        late = Lateness(queue_ms=lambda: 0.0)
        begun = watch(late, begin=begin)
        await asyncio.sleep(0.1)
        late.hurry("a")
        late.hurry("a")
        assert begun.done()
        await asyncio.sleep(2.0)
        assert began == [pytest.approx(0.1)]

    run_in_virtual_time(story())


def test_the_wait_is_bounded_by_the_timeout_too() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        assert await rings_at(watch(late, deadline_at_s=9.0, timeout_ms=50.0)) == pytest.approx(0.05)

    run_in_virtual_time(story())


@pytest.mark.parametrize(("left_ms", "rings"), [(99.0, False), (101.0, True)])
def test_a_finish_that_would_end_after_its_deadline_keeps_the_worker_from_nobody(left_ms: float, rings: bool) -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        begun = watch(late, deadline_at_s=left_ms / 1000, hedge_after_ms=0.0)
        other = watch(late, "other")
        late.make_room(50.0)
        assert begun.done() is rings
        assert await rings_at(other) == pytest.approx(1.0 - 0.158)  # not earlier because of one that is lost
        if not rings:
            late.hurry("a")  # the companion has failed: nobody else will answer
            assert begun.done()

    run_in_virtual_time(story())


@pytest.mark.parametrize("other_deadline_ms", [300.0, 1000.0])
def test_one_that_need_not_begin_yet_waits_for_another_that_would_be_late_behind_it(
    other_deadline_ms: float,
) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        free_at_s = 0.0
        ends_s: dict[str, float] = {}

        def begin(key: str) -> asyncio.Future[Any]:
            nonlocal free_at_s
            free_at_s = ends_s[key] = max(free_at_s, loop.time()) + 0.1
            return loop.create_future()

        late = Lateness(queue_ms=lambda: max(free_at_s - loop.time(), 0.0) * 1000)
        # takes 100 ms; could start at 300 − (105 + 8 + 10) ms = 0.177: not behind one that runs from 0.1 to 0.2
        watch(late, "other", deadline_at_s=other_deadline_ms / 1000, begin=lambda: begin("other"))
        early = watch(late, "early", deadline_at_s=2.0, hedge_after_ms=100.0, begin=lambda: begin("early"))
        await early
        await asyncio.sleep(2.0)
        assert ends_s["other"] <= other_deadline_ms / 1000
        assert (ends_s["early"] > ends_s["other"]) is (other_deadline_ms == 300.0)

    run_in_virtual_time(story())


def test_a_forgotten_request_gives_its_time_to_the_others() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        ring = watch(late)
        other = watch(late, "b")
        late.forget("b")
        assert other.cancelled()
        assert await rings_at(ring) == pytest.approx(1.0 - 0.158)

    run_in_virtual_time(story())


def test_a_finish_that_pays_earlier_begins_then_and_not_before() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        assert await rings_at(watch(late, hedge_after_ms=300.0)) == pytest.approx(0.3)

    run_in_virtual_time(story())


@pytest.mark.parametrize(("free_at_s", "rings_at_s"), [(0.2, 0.3), (0.5, 0.5)])
def test_it_waits_until_the_worker_is_free(free_at_s: float, rings_at_s: float) -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: max(free_at_s - asyncio.get_running_loop().time(), 0.0) * 1000)
        assert await rings_at(watch(late, hedge_after_ms=300.0)) == pytest.approx(rings_at_s)

    run_in_virtual_time(story())


def test_on_a_worker_that_is_never_free_it_begins_when_it_must() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 50.0)
        # 158 ms before 1 s it must run, which takes 50 ms of waiting first
        assert 1.0 - 0.158 - 2 * 0.050 <= await rings_at(watch(late, hedge_after_ms=300.0)) <= 1.0 - 0.158

    run_in_virtual_time(story())


def test_of_several_that_pay_earlier_one_begins_at_a_time_the_earliest_deadline_first() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        free_at_s = 0.0
        began: list[tuple[str, float]] = []

        def begin(key: str) -> asyncio.Future[Any]:
            nonlocal free_at_s
            began.append((key, round(loop.time(), 3)))
            free_at_s = loop.time() + 0.1
            return loop.create_future()

        late = Lateness(queue_ms=lambda: max(free_at_s - loop.time(), 0.0) * 1000)
        deadlines_s = {"b": 2.0, "a": 1.5, "c": 2.5}
        rings = [
            watch(late, key, deadline_at_s=at_s, hedge_after_ms=200.0, begin=lambda key=key: begin(key))  # type: ignore[misc]  # bound early
            for key, at_s in deadlines_s.items()
        ]
        await asyncio.sleep(0.35)
        assert began == [("a", 0.2), ("b", 0.3)]
        late.forget("c")  # answered
        await asyncio.sleep(3.0)
        assert len(began) == 2
        assert [ring.done() for ring in rings] == [True, True, True]

    run_in_virtual_time(story())
