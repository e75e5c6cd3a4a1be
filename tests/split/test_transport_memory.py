"""The faults that the in-memory channel can play."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from split.errors import CompanionRefused, ConnectionLost
from split.transport.memory import MemoryChannel, memory_pair
from split.wire.limits import MIB, Limits
from split.wire.messages import Hello, Infer, Priority


def hello(major: int = 1) -> Hello:
    return Hello(major=major, minor=0, agent="a", runtime="r", max_message_bytes=256 * MIB, codecs=("raw",))


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


def pair() -> tuple[MemoryChannel, MemoryChannel]:
    return memory_pair(hello(), hello())


async def test_a_kill_is_seen_at_once_by_both_ends() -> None:
    device, companion = pair()
    waiting = asyncio.create_task(device.receive())
    await asyncio.sleep(0)
    companion.kill("power was cut")
    with pytest.raises(ConnectionLost, match="power was cut"):
        await waiting
    with pytest.raises(ConnectionLost, match="power was cut"):
        companion.send(infer("a"))


@pytest.mark.parametrize("after_bytes", [1, 19, 20, 21, 100, 70_000])
async def test_a_kill_in_the_middle_of_a_message_delivers_nothing_of_it(after_bytes: int) -> None:
    device, companion = pair()
    device.kill(after_bytes=after_bytes)
    device.send(infer("a"), [bytes(200_000)])
    with pytest.raises(ConnectionLost):
        await companion.receive()
    assert device.closed_because is not None


async def test_a_frozen_end_is_silent_and_thaws() -> None:
    device, companion = pair()
    companion.freeze()
    companion.send(infer("a"))
    waiting = asyncio.create_task(device.receive())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert device.closed_because is None
    companion.thaw()
    assert (await waiting).message == infer("a")


async def test_exactly_the_nth_message_is_lost() -> None:
    device, companion = pair()
    device.drop_message(2)
    for name in "abc":
        device.send(infer(name), [bytes(100_000)])
    assert [(await companion.receive()).message for _ in range(2)] == [infer("a"), infer("c")]


async def test_with_a_delay_every_frame_waits_for_its_delivery_and_priority_decides_which_is_next() -> None:
    on_the_way: list[tuple[int, Callable[[], None]]] = []
    device, companion = memory_pair(
        hello(),
        hello(),
        limits=Limits(frame_bytes=1_000),
        delay=lambda size, deliver: on_the_way.append((size, deliver)),
    )
    device.send(infer("slow"), [bytes(1_500)])
    device.send(infer("fast"), priority=Priority.URGENT)
    while on_the_way:
        size, deliver = on_the_way.pop()
        assert size <= 1_000
        assert not on_the_way
        deliver()
    assert [(await companion.receive()).message for _ in range(2)] == [infer("fast"), infer("slow")]


def test_hellos_that_do_not_go_together_make_no_channel() -> None:
    with pytest.raises(CompanionRefused, match="speaks wire protocol 2"):
        memory_pair(hello(major=2), hello())
