"""Dialling over real TLS on loopback: one connection is taken, whatever else was begun is ended."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config import AgentConfig, IdentityFiles
from agent.daemon import Daemon
from agent.dialler import Dialler, Opened
from split.errors import ConnectionLost
from split.identity.certificates import Identity, issue, make_authority
from split.transport.channel import Channel
from split.transport.listener import listen
from split.transport.retry import Backoff
from split.transport.tls import dial
from split.wire.limits import DEFAULT_LIMITS
from split.wire.messages import Hello

HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 20, codecs=("raw",))


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    root = tmp_path_factory.mktemp("identities")
    make_authority(root / "ca")
    return {
        "device": issue(root / "ca", "device-1", "device", root / "device"),
        "companion": issue(root / "ca", "companion-1", "companion", root / "companion"),
    }


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - sockets decide when, and nothing tells
        await asyncio.sleep(0)


@asynccontextmanager
async def companion(identities: dict[str, Identity], minor: int = 0) -> AsyncIterator[tuple[str, list[Channel]]]:
    """Its address, and the channels that are open to it."""
    channels: list[Channel] = []

    async def serve(channel: Channel) -> None:
        channels.append(channel)
        try:
            await channel.receive()
        except ConnectionLost:
            channels.remove(channel)

    listener = await listen(
        "127.0.0.1",
        0,
        identity=identities["companion"],
        make_hello=lambda: msgspec.structs.replace(HELLO, minor=minor),
        on_channel=serve,
        max_sessions=8,
    )
    try:
        yield f"127.0.0.1:{listener.port}", channels
        await until(lambda: not listener._serving)
    finally:
        await listener.close()


def dialler(identities: dict[str, Identity], companions: list[str], minor: int = 0) -> Dialler:
    hello = msgspec.structs.replace(HELLO, minor=minor)

    async def tls(address: str, timeout_s: float, first: object) -> Channel:
        host, _, port = address.rpartition(":")
        return await dial(host, int(port), identity=identities["device"], hello=hello, timeout_s=20)

    return Dialler(companions=companions, dial=tls, backoff=Backoff(), on_failure=lambda why: None)


async def test_one_of_two_companions_is_used_and_the_other_keeps_no_connection(identities: dict[str, Identity]) -> None:
    async with asyncio.timeout(60), companion(identities) as (one, at_one), companion(identities) as (two, at_two):
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
            dialling = dialler(identities, [f"127.0.0.1:{silent.getsockname()[1]}", one, two])
            opened = await dialling.open()
            assert opened.address in (one, two)
            await until(lambda: len(at_one) + len(at_two) == 1)
            dialling.hang_up(opened.channel, "the test ends")
            await dialling.close()
            await until(lambda: not at_one and not at_two)


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100, 1000])
async def test_an_opening_called_off_at_any_moment_leaves_no_connection(
    identities: dict[str, Identity], turns: int
) -> None:
    async with asyncio.timeout(60), companion(identities) as (address, open_there):
        dialling = dialler(identities, [address])
        opening: asyncio.Task[Opened] = asyncio.create_task(dialling.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        dialling.call_off(opening)
        await until(lambda: not dialling._late and not dialling._closing)
        await until(lambda: not open_there)


async def test_o_wi_05_set_ups_that_are_ended_at_fifty_random_moments_leave_nothing_and_no_record(
    identities: dict[str, Identity],
) -> None:
    """The case is WebRTC's; over TLS a set-up is a dial, and the second connection behind it."""
    records: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: records.append(context))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    async with asyncio.timeout(60), companion(identities, minor=1) as (address, open_there):
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            dialling = dialler(identities, [address], minor=1)
            opening: asyncio.Task[Opened] = asyncio.create_task(dialling.open())
            for _ in range(moments.randrange(400)):
                await asyncio.sleep(0)
            dialling.call_off(opening)
            await until(lambda one=dialling: not one._late and not one._closing)  # type: ignore[misc]
        await until(lambda: not open_there)
        await until(lambda: len(asyncio.all_tasks()) == tasks and len(os.listdir("/proc/self/fd")) == files)
        gc.collect()
        assert records == []


async def test_the_daemon_announces_the_largest_message_that_it_takes(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    device = identities["device"]
    config = AgentConfig(
        models=tmp_path,
        state_dir=tmp_path,
        cache_dir=tmp_path,
        identity=IdentityFiles(cert=device.cert, key=device.key, ca=device.ca),
    )
    async with asyncio.timeout(60), companion(identities) as (address, open_there):
        channel = await Daemon(config)._dial(address, 20.0, ())
        await until(lambda: bool(open_there))
        assert open_there[0].peer_hello.max_message_bytes == DEFAULT_LIMITS.max_message_bytes
        await channel.close("the test ends")
