"""What holds for every channel, asked of each transport: in memory, and TLS over the loopback with one connection and
with two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from split.errors import ConnectionLost, Overloaded, TooLarge
from split.identity.certificates import Identity, issue, make_authority
from split.transport.channel import Channel
from split.transport.listener import listen
from split.transport.memory import memory_pair
from split.transport.tls import TlsChannel, dial
from split.wire.limits import KIB, MIB, Limits
from split.wire.messages import Cancel, Goodbye, Hello, Infer, ModelChunk, Ping, Pong, Priority

Ends = tuple[Channel, Channel]
Pair = Callable[..., Awaitable[Ends]]
BYTES = bytes(range(256)) * 8_192


def hello(**fields: Any) -> Hello:
    known: dict[str, Any] = {"major": 1, "minor": 0, "agent": "test", "runtime": "none", "codecs": ("raw",)}
    return Hello(**(known | {"max_message_bytes": 256 * MIB} | fields))


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    root = tmp_path_factory.mktemp("identity")
    make_authority(root / "ca")
    return {
        "device": issue(root / "ca", "device", "device", root / "device"),
        "companion": issue(root / "ca", "companion", "companion", root / "companion"),
    }


@asynccontextmanager
async def tls_pair(identities: dict[str, Identity], limits: Limits, **fields: Any) -> AsyncIterator[Ends]:
    """The device's and the companion's end of one TLS session over the loopback."""
    accepted: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def hold(channel: Channel) -> None:
        accepted.put_nowait(channel)
        await over.wait()

    listener = await listen(
        "127.0.0.1",
        0,
        identity=identities["companion"],
        make_hello=lambda: hello(**fields),
        on_channel=hold,
        max_sessions=4,
        limits=limits,
    )
    try:
        device = await dial(
            "127.0.0.1",
            listener.port,
            identity=identities["device"],
            hello=hello(**fields),
            timeout_s=20,
            limits=limits,
        )
        try:
            companion = await accepted.get()
            if device._joining is not None:
                await device._joining
            assert isinstance(companion, TlsChannel)
            assert device.lanes == companion.lanes == (2 if fields["minor"] else 1)
            yield device, companion
        finally:
            await device.close("the test is over")
    finally:
        over.set()
        await listener.close()


@pytest.fixture(params=["memory", "tls", "tls, two connections"])
async def pair(request: pytest.FixtureRequest, identities: dict[str, Identity]) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:

        async def make(limits: Limits = Limits(), **fields: Any) -> Ends:  # noqa: B008  frozen
            if request.param == "memory":
                return memory_pair(hello(**fields), hello(**fields), limits=limits)
            minor = 1 if request.param == "tls, two connections" else 0
            return await stack.enter_async_context(tls_pair(identities, limits, **({"minor": minor} | fields)))

        yield make


async def test_both_ends_know_who_the_other_is(pair: Pair) -> None:
    device, companion = await pair(models=("sha256:aa",))
    assert (device.peer.name, device.peer.role) == ("companion", "companion")
    assert (companion.peer.name, companion.peer.role) == ("device", "device")
    assert device.peer_hello.models == companion.peer_hello.models == ("sha256:aa",)
    assert device.closed_because is None


@pytest.mark.parametrize("size", [0, 1, 65_516, 65_517, 1_000_000])
async def test_a_payload_arrives_whole_both_ways(pair: Pair, size: int) -> None:
    device, companion = await pair()
    for one, other in ((device, companion), (companion, device)):
        one.send(infer("a"), [BYTES[: size // 2], memoryview(BYTES)[size // 2 : size]])
        incoming = await other.receive()
        assert incoming.message == infer("a")
        assert incoming.payload == BYTES[:size]


async def test_many_messages_arrive_in_order_while_both_ends_send(pair: Pair) -> None:
    device, companion = await pair()

    async def run(one: Channel) -> list[tuple[str, int]]:
        for index in range(50):
            one.send(infer(str(index)), [BYTES[: index * 1_000]])
        return [(m.message.request_id, len(m.payload)) for m in [await one.receive() for _ in range(50)]]  # type: ignore[union-attr]  # only Infers were sent

    expected = [(str(index), index * 1_000) for index in range(50)]
    assert await asyncio.gather(run(device), run(companion)) == [expected, expected]


async def test_times_of_receipt_never_run_backwards(pair: Pair) -> None:
    device, companion = await pair()
    for index in range(5):
        device.send(infer(str(index)))
    times = [(await companion.receive()).received_at_s for _ in range(5)]
    assert times == sorted(times)


async def test_a_ping_comes_back_as_pong_without_the_other_program(pair: Pair) -> None:
    device, _ = await pair()
    device.send(Ping(nonce=5, padding=bytes(10_000)), priority=Priority.CONTROL)
    assert (await device.receive()).message == Pong(nonce=5)


async def test_a_cancelled_receive_loses_no_message(pair: Pair) -> None:
    device, companion = await pair()
    waiting = asyncio.create_task(companion.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    device.send(infer("a"))
    assert (await companion.receive()).message == infer("a")


async def test_closing_delivers_what_was_queued_and_then_both_ends_say_why(pair: Pair) -> None:
    device, companion = await pair()
    device.send(infer("last"), [BYTES])
    device.send(Goodbye(reason="restart"), priority=Priority.BULK)
    received = asyncio.create_task(companion.receive())
    await device.close("this program ends")
    assert (await received).payload == BYTES
    assert (await companion.receive()).message == Goodbye(reason="restart")
    with pytest.raises(ConnectionLost, match="the peer closed the connection"):
        await companion.receive()
    with pytest.raises(ConnectionLost, match="this program ends"):
        await device.receive()
    for one in (device, companion):
        with pytest.raises(ConnectionLost):
            one.send(infer("later"))
        with pytest.raises(ConnectionLost):
            await one.drain(1)
    assert device.closed_because == "this program ends"
    await device.close("again")
    assert device.closed_because == "this program ends"


async def test_a_waiting_receiver_is_woken_when_the_peer_closes(pair: Pair) -> None:
    device, companion = await pair()
    waiting = asyncio.create_task(device.receive())
    await asyncio.sleep(0)
    await companion.close("gone")
    with pytest.raises(ConnectionLost, match="the peer closed the connection"):
        await waiting


async def test_a_peer_that_does_not_read_bounds_what_is_queued_and_reading_frees_it(pair: Pair) -> None:
    device, companion = await pair(Limits(queue_bytes=4 * MIB, unread_bytes=1 * MIB))
    sent = 0
    full: Overloaded | None = None
    while full is None:
        try:
            device.send(infer(str(sent)), [BYTES])
            sent += 1
        except Overloaded as error:
            full = error
        await asyncio.sleep(0)
    assert "the bound is 4194304" in str(full)
    assert device.queued_bytes <= 4 * MIB
    device.send(Cancel(request_id="0", attempt=1), priority=Priority.CONTROL)
    drained = asyncio.create_task(device.drain(1))
    messages = [await companion.receive() for _ in range(sent + 1)]
    assert sorted(len(one.payload) for one in messages) == [0] + [len(BYTES)] * sent
    await drained
    assert device.queued_bytes == 0


async def test_a_ping_passes_and_is_answered_while_the_peers_program_reads_nothing(pair: Pair) -> None:
    device, companion = await pair(Limits(queue_bytes=64 * MIB), minor=1, window_bytes=256 * KIB)
    for number in range(16):
        device.send(infer(str(number)), [BYTES])
    device.send(Ping(nonce=7), priority=Priority.CONTROL)
    assert (await device.receive()).message == Pong(nonce=7)
    assert device.ahead_bytes >= device.queued_bytes > 8 * len(BYTES)
    messages = [(await companion.receive()).message for _ in range(16)]
    assert messages == [infer(str(number)) for number in range(16)]


async def test_a_forgotten_request_does_not_arrive_and_the_next_one_does(pair: Pair) -> None:
    device, companion = await pair(Limits(queue_bytes=64 * MIB, unread_bytes=1))
    device.send(infer("first"))
    for _ in range(8):
        device.send(infer("forgotten"), [BYTES])
    device.forget("forgotten", 1)
    device.send(infer("next"), [b"n"])
    assert (await companion.receive()).message == infer("first")
    names = []
    while "next" not in names:
        names.append((await companion.receive()).message.request_id)  # type: ignore[union-attr]  # only Infers were sent
    assert names.count("forgotten") < 8


async def test_urgent_overtakes_bulk_that_is_queued(pair: Pair) -> None:
    device, companion = await pair(Limits(unread_bytes=1))
    device.send(infer("plug"))
    for offset in range(3):
        device.send(
            ModelChunk(digest="d", file="f", offset=offset), [memoryview(BYTES).toreadonly()], priority=Priority.BULK
        )
    device.send(infer("urgent"), priority=Priority.URGENT)
    order = [(await companion.receive()).message for _ in range(5)]
    assert order.index(infer("urgent")) < order.index(ModelChunk(digest="d", file="f", offset=2))


async def test_what_the_peer_does_not_take_is_refused_here(pair: Pair) -> None:
    device, _ = await pair(max_message_bytes=100 * KIB)
    with pytest.raises(TooLarge, match="the peer takes at most 102400"):
        device.send(infer("a"), [BYTES])


async def test_bytes_are_counted_at_both_ends_and_stay_readable_after_the_end(pair: Pair) -> None:
    device, companion = await pair()
    before = device.sent_bytes, companion.received_bytes
    device.send(infer("a"), [BYTES])
    await companion.receive()
    await device.drain(1)
    seen = device.observe()
    assert len(BYTES) <= seen.sent_bytes - before[0] < 1.2 * len(BYTES)
    assert len(BYTES) <= companion.received_bytes - before[1] < 1.2 * len(BYTES)
    assert seen.queued_bytes == 0
    await device.close("done")
    assert device.sent_bytes >= seen.sent_bytes
    assert device.received_bytes >= seen.received_bytes
    assert device.observe().connections == ()


async def test_whoever_else_is_on_the_loop_has_a_turn_while_a_flood_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, companion = await pair()
    for number in range(8):
        device.send(Cancel(request_id=f"{number}", attempt=1), priority=Priority.CONTROL)
    first = await companion.receive()
    while len(companion._unread) < 7:  # type: ignore[attr-defined]  # noqa: ASYNC110
        await asyncio.sleep(0)
    monkeypatch.setattr("split.transport.endpoint.TURN_S", -1.0)  # any stretch has lasted too long
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    seen = []
    for _ in range(7):
        await companion.receive()
        seen.append(turns)
    beside.cancel()
    assert first.message == Cancel(request_id="0", attempt=1)
    assert seen == list(range(1, 8))


async def test_in_one_turn_of_the_loop_a_connection_understands_few_messages_of_a_flood(
    identities: dict[str, Identity],
) -> None:
    """What the kernel and asyncio hold ready may be ten thousand of them."""
    async with tls_pair(identities, Limits(), minor=0) as (device, companion):
        assert isinstance(companion, TlsChannel)
        count = 3_000
        for number in range(count):
            device.send(Cancel(request_id=f"{number}", attempt=1), priority=Priority.CONTROL)
        connection, steps = companion._first.connection, []
        before = connection.messages
        while connection.messages < count + 1:  # and the Hello
            await asyncio.sleep(0)
            steps.append(connection.messages - before)
            before = connection.messages
        assert max(steps) <= 16 * KIB / 40  # header and metadata of a Cancel have more
