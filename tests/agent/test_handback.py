"""What threads hand back to the loop."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from functools import partial

import pytest

from agent.handback import Handback


async def from_thread(handback: Handback, calls: int, into: list[int], done: asyncio.Event) -> None:
    def work() -> None:
        for number in range(calls):
            handback.give(into.append, number)
        handback.give(done.set)

    thread = threading.Thread(target=work)
    thread.start()
    async with asyncio.timeout(10):
        await done.wait()
    thread.join()


@pytest.mark.parametrize("has_eventfd", [True, False])
async def test_everything_given_is_called_once_and_in_order(monkeypatch: pytest.MonkeyPatch, has_eventfd: bool) -> None:
    if not has_eventfd:
        monkeypatch.delattr(os, "eventfd", raising=False)
    handback = Handback(asyncio.get_running_loop())
    seen: list[int] = []
    await from_thread(handback, 1000, seen, asyncio.Event())
    assert seen == list(range(1000))
    handback.close()


async def test_what_was_given_before_the_end_and_after_it_is_called_on_the_loop() -> None:
    handback, seen, done = Handback(asyncio.get_running_loop()), list[int](), asyncio.Event()
    handback.give(seen.append, 1)
    handback.close()
    handback.close()  # nothing
    handback.give(seen.append, 2)
    handback.give(done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert seen == [1, 2]


async def test_a_call_that_fails_costs_none_of_the_others() -> None:
    loop, told = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    handback, seen, done = Handback(loop), list[int](), asyncio.Event()
    wrong = ValueError("wrong")

    def fail() -> None:
        raise wrong

    handback.give(fail)
    await from_thread(handback, 3, seen, done)
    assert told == [wrong]
    assert seen == [0, 1, 2]
    handback.close()


async def test_a_call_that_is_cancelled_leaves_the_others_their_turn() -> None:
    loop, told = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: told.append(type(context["exception"])))
    handback, seen = Handback(loop), list[int]()

    def cancelled() -> None:
        raise asyncio.CancelledError

    for call in (cancelled, partial(seen.append, 1), cancelled, partial(seen.append, 2)):
        handback.give(call)
    await asyncio.sleep(0.0)  # one look at the bell
    for _ in range(4):
        await asyncio.sleep(0.0)
    assert seen == [1, 2]
    handback.close()


async def test_where_no_file_descriptor_is_left_it_rings_as_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", none_left)
    handback, seen = Handback(asyncio.get_running_loop()), list[int]()
    await from_thread(handback, 3, seen, asyncio.Event())
    assert seen == [0, 1, 2]
    handback.close()


def test_what_comes_for_a_loop_that_is_closed_is_told_so() -> None:
    async def made() -> Handback:
        return Handback(asyncio.get_running_loop())

    handback = asyncio.run(made())
    handback.close()
    with pytest.raises(RuntimeError, match="closed"):
        handback.give(print)
