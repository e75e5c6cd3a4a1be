"""The emulated link carries every byte, in order, and passes on how a connection ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from scripts.relay import Direction, Relay

MEGABYTE = bytes(range(256)) * 4096


@contextlib.asynccontextmanager
async def echo_behind_relay() -> AsyncIterator[tuple[Relay, int]]:
    """A server that sends back all it got once its client has sent end of file, and a relay before it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(await reader.read())
            writer.write_eof()
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname())
    port, _ = await relay.start()
    try:
        yield relay, port
    finally:
        await relay.close()
        server.close()


async def dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def test_every_byte_arrives_in_order_and_a_half_close_is_passed_on() -> None:
    async with echo_behind_relay() as (relay, port):
        await relay.command("set delay_ms=1 rate_mbit=200")
        reader, writer = await dial(port)
        writer.write(MEGABYTE)
        writer.write_eof()
        assert await reader.read() == MEGABYTE
        writer.close()
        stats = await relay.command("stats")
        assert (stats["up_bytes"], stats["down_bytes"]) == (len(MEGABYTE), len(MEGABYTE))


async def test_a_cut_with_reset_ends_open_connections_and_refuses_new_ones_until_restored() -> None:
    async with echo_behind_relay() as (relay, port):
        reader, writer = await dial(port)
        writer.write(b"x")
        await relay.command("cut rst")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()

        reader, writer = await dial(port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()

        await relay.command("restore")
        reader, writer = await dial(port)
        writer.write(b"again")
        writer.write_eof()
        assert await reader.read() == b"again"
        writer.close()


async def test_a_silent_cut_lets_nothing_through_and_loses_nothing() -> None:
    async with echo_behind_relay() as (relay, port):
        await relay.command("cut silent")
        reader, writer = await dial(port)
        writer.write(b"held")
        writer.write_eof()
        answer = asyncio.ensure_future(reader.read())
        for _ in range(200):
            await asyncio.sleep(0)
        assert (await relay.command("stats"))["up_bytes"] == 0
        await relay.command("restore")
        assert await answer == b"held"
        writer.close()


@pytest.mark.parametrize(("way", "up_bytes"), [("up", 0), ("down", 4)])
async def test_a_silent_cut_of_one_way_leaves_the_other(way: str, up_bytes: int) -> None:
    async with echo_behind_relay() as (relay, port):
        reader, writer = await dial(port)
        await relay.command(f"cut silent {way}")
        writer.write(b"held")
        writer.write_eof()
        answer = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(30):
            while (await relay.command("stats"))["up_bytes"] != up_bytes:  # noqa: ASYNC110 - sockets decide when
                await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
            assert not answer.done()
            await relay.command("restore")
            assert await answer == b"held"
        writer.close()


async def test_a_reset_by_the_server_reaches_the_client() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.abort()  # unread bytes make this a reset

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname())
    port, _ = await relay.start()
    reader, writer = await dial(port)
    writer.write(MEGABYTE)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await relay.close()
    server.close()


@pytest.mark.parametrize("line", ["", "fly", "cut", "set loss=1", "set delay_ms=-1", "set rate_mbit=nan", "set up x=y"])
async def test_a_line_that_is_no_command_is_refused(line: str) -> None:
    relay = Relay(("127.0.0.1", 1))
    with pytest.raises(ValueError, match=r"command|condition|must be in|convert"):
        await relay.command(line)


def test_bytes_queue_for_the_air_and_then_travel_for_the_delay() -> None:
    way = Direction(delay_s=0.020, rate_bytes_per_s=1000.0)
    assert way.send(100, now_s=5.0) == pytest.approx(5.0 + 0.1 + 0.020)
    assert way.send(100, now_s=5.0) == pytest.approx(5.0 + 0.2 + 0.020)
    assert way.send(100, now_s=9.0) == pytest.approx(9.0 + 0.1 + 0.020)
