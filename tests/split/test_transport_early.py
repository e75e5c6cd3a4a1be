"""What a device sends directly behind its Hello: one round trip less to the first answer, and nothing to a stranger."""

from __future__ import annotations

import asyncio
import struct

import msgspec
import pytest

from split.errors import ChannelError, ConnectionLost, IdentityError, LocalProtocolError
from split.identity.certificates import Identity, issue, make_authority
from split.identity.contexts import client_context, server_context
from split.transport.channel import Channel
from split.transport.listener import listen
from split.transport.tls import dial
from split.wire.limits import KIB, MIB
from split.wire.messages import Hello, Infer, Ping, Pong


def hello(minor: int = 1) -> Hello:
    return Hello(major=1, minor=minor, agent="a", runtime="r", max_message_bytes=256 * MIB, codecs=("raw",))


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    root = tmp_path_factory.mktemp("ours")
    make_authority(root / "ca")
    return {role: issue(root / "ca", f"{role}-1", role, root / role) for role in ("device", "companion")}


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    root = tmp_path_factory.mktemp("strangers")
    make_authority(root / "ca")
    return {role: issue(root / "ca", f"{role}-1", role, root / role) for role in ("device", "companion")}


def frame(number: int, message: object, payload: bytes = b"", *, priority: int = 0, pay: int | None = None) -> bytes:
    """A BEGIN written by hand (PROTOCOL.md §2); `pay`: what it says of its payload."""
    metadata = msgspec.msgpack.encode(message)
    pay = len(payload) if pay is None else pay
    body = metadata + payload
    return struct.pack("<BBHIIII", 1, priority, 0, number, len(body), len(metadata), pay) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, object], bytes]:
    header = struct.unpack("<BBHIIII", await reader.readexactly(20))
    body = await reader.readexactly(header[4])
    return msgspec.msgpack.decode(body[: header[5]]), body[header[5] :]


async def test_the_first_messages_come_before_the_companion_has_said_anything(ours: dict[str, Identity]) -> None:
    seen: list[tuple[dict[str, object], bytes]] = []

    async def companion(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend([await read_frame(reader) for _ in range(3)])
        writer.write(frame(1, hello(minor=0)) + frame(2, infer("answer"), b"outputs", priority=2))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(companion, "127.0.0.1", 0, ssl=server_context(ours["companion"]))
    async with server:
        channel = await dial(
            "127.0.0.1",
            server.sockets[0].getsockname()[1],
            identity=ours["device"],
            hello=hello(),
            timeout_s=20,
            first=[(infer("a"), [b"bound", b"ary"]), (Ping(nonce=5), ())],
        )
        assert (await channel.receive()).payload == b"outputs"
        await channel.close("done")
    assert [fields["t"] for fields, _ in seen] == ["hello", "infer", "ping"]
    assert seen[1][1] == b"boundary"


@pytest.mark.parametrize("minor", [0, 1])
async def test_our_companion_answers_what_came_early_in_its_order(ours: dict[str, Identity], minor: int) -> None:
    taken: list[str] = []

    async def echo(channel: Channel) -> None:
        try:
            while True:
                incoming = await channel.receive()
                assert isinstance(incoming.message, Infer)
                taken.append(incoming.message.request_id)
                channel.send(incoming.message, [incoming.payload])
        except ConnectionLost:
            pass

    listener = await listen(
        "127.0.0.1", 0, identity=ours["companion"], make_hello=lambda: hello(minor), on_channel=echo, max_sessions=2
    )
    try:
        channel = await dial(
            "127.0.0.1",
            listener.port,
            identity=ours["device"],
            hello=hello(),
            timeout_s=20,
            first=[(infer(str(n)), [bytes([n]) * 10_000]) for n in range(6)],
        )
        channel.send(infer("late"))
        answers = [await channel.receive() for _ in range(6)]
        assert [bytes(one.payload[:1]) for one in answers] == [bytes([n]) for n in range(6)]
        assert taken[:6] == [str(n) for n in range(6)]
        await channel.close("done")
    finally:
        await listener.close()


async def test_more_than_64_kib_are_refused_before_anything_is_dialled(ours: dict[str, Identity]) -> None:
    with pytest.raises(LocalProtocolError, match="65536 bytes may be sent"):
        await dial(
            "127.0.0.1",
            1,
            identity=ours["device"],
            hello=hello(),
            timeout_s=20,
            first=[(infer("a"), [bytes(64 * KIB)])],
        )


async def test_a_device_that_announces_more_early_is_told_so_by_the_companion(ours: dict[str, Identity]) -> None:
    served: list[Channel] = []

    async def serve(channel: Channel) -> None:
        served.append(channel)
        with pytest.raises(ConnectionLost):
            await channel.receive()

    listener = await listen(
        "127.0.0.1", 0, identity=ours["companion"], make_hello=hello, on_channel=serve, max_sessions=2
    )
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", listener.port, ssl=client_context(ours["device"]), server_hostname=""
        )
        writer.write(frame(1, hello()) + frame(2, infer("a"), b"x" * 100, priority=2, pay=70_000))
        said = await reader.read()
        assert b"PROTOCOL_ERROR" in said
        assert b"before this side's Hello at most 65536 bytes may come" in said
        writer.close()
        await writer.wait_closed()
    finally:
        await listener.close()


async def test_a_companion_that_is_not_ours_sees_nothing_of_it(
    ours: dict[str, Identity], strangers: dict[str, Identity]
) -> None:
    context = server_context(strangers["companion"])
    context.load_verify_locations(ours["device"].ca)
    read: list[bytes] = []

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(listens, "127.0.0.1", 0, ssl=context)
    async with server:
        with pytest.raises(IdentityError):
            await dial(
                "127.0.0.1",
                server.sockets[0].getsockname()[1],
                identity=ours["device"],
                hello=hello(),
                timeout_s=20,
                first=[(infer("secret"), [b"secret"])],
            )
    assert b"".join(read) == b""


async def test_a_device_that_is_not_ours_gets_nothing_for_what_it_sends_early(
    ours: dict[str, Identity], strangers: dict[str, Identity]
) -> None:
    served: list[Channel] = []

    async def serve(channel: Channel) -> None:
        served.append(channel)

    listener = await listen(
        "127.0.0.1", 0, identity=ours["companion"], make_hello=hello, on_channel=serve, max_sessions=2
    )
    credentials = Identity(cert=strangers["device"].cert, key=strangers["device"].key, ca=ours["device"].ca)
    try:
        with pytest.raises((IdentityError, ChannelError)):
            await dial(
                "127.0.0.1",
                listener.port,
                identity=credentials,
                hello=hello(),
                timeout_s=20,
                first=[(Ping(nonce=1), ()), (Pong(nonce=1), ())],
            )
    finally:
        await listener.close()
    assert served == []
