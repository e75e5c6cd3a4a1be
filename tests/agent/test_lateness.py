"""When the local finish must begin; virtual time, the margin taken from the module's documented constants."""

from __future__ import annotations

import asyncio

import pytest

from agent.lateness import Lateness
from split.transport.virtual_time import run_in_virtual_time


async def rings_at(future: asyncio.Future[None]) -> float:
    await future
    return asyncio.get_running_loop().time()


def test_one_request_is_finished_here_just_in_time() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        ring = late.watch("a", deadline_at_s=1.0, local_ms=100.0, timeout_ms=None)
        # 1 s − (100 ms + 5 % of it + 8 ms + 5 % of the 900 ms beyond)
        assert await rings_at(ring) == pytest.approx(1.0 - 0.158)

    run_in_virtual_time(story())


def test_requests_that_share_the_worker_begin_one_after_the_other() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        rings = [late.watch(key, deadline_at_s=1.0, local_ms=100.0, timeout_ms=None) for key in "abc"]
        times = sorted(await asyncio.gather(*(rings_at(ring) for ring in rings)))
        assert times == pytest.approx([1.0 - 3 * 0.158, 1.0 - 2 * 0.158, 1.0 - 0.158])

    run_in_virtual_time(story())


def test_work_that_waits_before_it_makes_the_finish_begin_earlier() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 250.0)
        ring = late.watch("a", deadline_at_s=1.0, local_ms=100.0, timeout_ms=None)
        assert await rings_at(ring) == pytest.approx(1.0 - 0.158 - 0.25)

    run_in_virtual_time(story())


def test_the_wait_is_bounded_by_the_timeout_too() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        assert await rings_at(late.watch("a", deadline_at_s=9.0, local_ms=100.0, timeout_ms=50.0)) == pytest.approx(
            0.05
        )

    run_in_virtual_time(story())


def test_a_deadline_already_out_of_reach_rings_at_once() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        assert await rings_at(late.watch("a", deadline_at_s=0.05, local_ms=100.0, timeout_ms=None)) == 0.0

    run_in_virtual_time(story())


def test_a_forgotten_request_gives_its_time_to_the_others() -> None:
    async def story() -> None:
        late = Lateness(queue_ms=lambda: 0.0)
        ring = late.watch("a", deadline_at_s=1.0, local_ms=100.0, timeout_ms=None)
        other = late.watch("b", deadline_at_s=1.0, local_ms=100.0, timeout_ms=None)
        late.forget("b")
        assert other.cancelled()
        assert await rings_at(ring) == pytest.approx(1.0 - 0.158)

    run_in_virtual_time(story())
