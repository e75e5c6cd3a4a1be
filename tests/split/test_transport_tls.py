"""The TLS transport against what the world does: wrong certificates, garbage, silence, floods, sudden death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from split.errors import ChannelError, CompanionRefused, ConnectionLost, IdentityError, IsthmusError
from split.identity.certificates import Identity, issue, make_authority
from split.identity.contexts import client_context
from split.identity.credentials import credentials_of
from split.transport import listener as listening_side
from split.transport.channel import Channel
from split.transport.lane import WAITING_BYTES, Lane
from split.transport.listener import Listener, listen
from split.transport.tls import dial
from split.wire.frames import FrameHeader, FrameKind
from split.wire.limits import MIB
from split.wire.messages import Hello, Infer

YEAR = timedelta(days=366)


def hello(major: int = 1) -> Hello:
    return Hello(major=major, minor=0, agent="a", runtime="r", max_message_bytes=256 * MIB, codecs=("raw",))


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    """Issued by our authority: the right ones and wrong ones."""
    root = tmp_path_factory.mktemp("ours")
    make_authority(root / "ca", now=datetime.now(UTC) - 3 * YEAR)
    past, future = datetime.now(UTC) - 2 * YEAR, datetime.now(UTC) + YEAR
    return {
        "device": issue(root / "ca", "device-1", "device", root / "device"),
        "companion": issue(root / "ca", "companion-1", "companion", root / "companion"),
        "expired device": issue(root / "ca", "device-1", "device", root / "old-device", now=past),
        "expired companion": issue(root / "ca", "companion-1", "companion", root / "old-companion", now=past),
        "future device": issue(root / "ca", "device-1", "device", root / "new-device", now=future),
        "future companion": issue(root / "ca", "companion-1", "companion", root / "new-companion", now=future),
    }


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, ours: dict[str, Identity]) -> dict[str, Identity]:
    """From another authority (trustme's, an independent source), in files that otherwise look right."""
    root = tmp_path_factory.mktemp("foreign")
    authority = trustme.CA()
    made: dict[str, Identity] = {}
    for who in ("device", "companion"):
        pair = authority.issue_cert(f"{who}.example")
        identity = Identity(cert=root / f"{who}.pem", key=root / f"{who}-key.pem", ca=ours[who].ca)
        pair.cert_chain_pems[0].write_to_path(identity.cert)
        pair.private_key_pem.write_to_path(identity.key)
        identity.key.chmod(0o600)
        made[who] = identity
    return made


@asynccontextmanager
async def listening(identity: Identity, *, major: int = 1, max_sessions: int = 4) -> AsyncIterator[Listener]:
    async def echo(channel: Channel) -> None:
        while True:
            incoming = await channel.receive()
            channel.send(incoming.message, [incoming.payload])

    async def until_lost(channel: Channel) -> None:
        try:
            await echo(channel)
        except ConnectionLost:
            pass

    listener = await listen(
        "127.0.0.1",
        0,
        identity=identity,
        make_hello=lambda: hello(major),
        on_channel=until_lost,
        max_sessions=max_sessions,
    )
    try:
        yield listener
    finally:
        await listener.close()


async def works(listener: Listener, identity: Identity) -> bool:
    """Whether a good device is still served."""
    channel = await dial("127.0.0.1", listener.port, identity=identity, hello=hello(), timeout_s=20)
    channel.send(infer("a"), [b"payload"])
    answer = await channel.receive()
    await channel.close("done")
    return answer.payload == b"payload"


async def refused(listener: Listener, identity: Identity) -> IsthmusError:
    with pytest.raises(IsthmusError) as caught:
        await dial("127.0.0.1", listener.port, identity=identity, hello=hello(), timeout_s=20)
    return caught.value


# ---- certificates


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("expired device", "refused our certificate, which has expired"),
        ("future device", "refused our certificate, which is broken or not valid yet"),
        ("foreign", "refused our certificate, which comes from another authority"),
        ("companion", "refused our certificate, which is for another role"),
    ],
)
async def test_a_device_with_a_wrong_certificate_learns_what_is_wrong_with_it(
    ours: dict[str, Identity], foreign: dict[str, Identity], which: str, said: str
) -> None:
    async with listening(ours["companion"]) as listener:
        error = await refused(listener, foreign["device"] if which == "foreign" else ours[which])
        assert isinstance(error, IdentityError)
        assert said in str(error)
        assert str(listener.port) in str(error)
        assert await works(listener, ours["device"])


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("expired companion", "has expired: issue a new one"),
        ("future companion", "is not valid yet: set this host's clock"),
        ("foreign", "comes from another authority: both sides must name the same `identity.ca`"),
        ("device", "is for another role: a companion needs a companion's certificate"),
    ],
)
async def test_a_companion_with_a_wrong_certificate_is_refused_by_the_device(
    ours: dict[str, Identity], foreign: dict[str, Identity], which: str, said: str
) -> None:
    async with listening(foreign["companion"] if which == "foreign" else ours[which]) as listener:
        error = await refused(listener, ours["device"])
    assert isinstance(error, IdentityError)
    assert said in str(error)


async def test_a_certificate_of_the_right_authority_without_our_uri_is_refused_by_both_sides(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = authority.issue_cert("companion.example")
    identity = Identity(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", ca=tmp_path / "ca.pem")
    pair.cert_chain_pems[0].write_to_path(identity.cert)
    pair.private_key_pem.write_to_path(identity.key)
    identity.key.chmod(0o600)
    async with listening(identity) as listener:
        error = await refused(listener, identity)
        assert isinstance(error, IdentityError)
        assert "must have the one URI spiffe://isthmus/companion/<name>, it has none" in str(error)


async def test_a_device_without_a_certificate_gets_no_byte_of_ours(
    ours: dict[str, Identity], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "isthmus.transport")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(ours["device"].ca)
    async with listening(ours["companion"]) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=bare)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            await reader.read()
        writer.close()
        with pytest.raises(ssl.SSLError):
            await writer.wait_closed()
        assert await works(listener, ours["device"])
    assert "shows no certificate" in caplog.text


async def test_tls_1_2_is_refused(ours: dict[str, Identity]) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.load_verify_locations(ours["device"].ca)
    old.load_cert_chain(ours["device"].cert, ours["device"].key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(ours["companion"]) as listener:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", listener.port, ssl=old)
        assert await works(listener, ours["device"])


# ---- strangers


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4_000, b"\x16\x03\x01\xff\xff" + b"x" * 70_000])
async def test_plain_garbage_is_closed_and_the_next_device_is_served(ours: dict[str, Identity], garbage: bytes) -> None:
    async with listening(ours["companion"]) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(garbage)
        try:
            assert infer("a").request_id.encode() not in await reader.read()
        except ConnectionError:
            pass
        writer.close()
        assert await works(listener, ours["device"])
        assert listener.refused == 1


async def test_half_a_frame_and_a_reset_many_times_leave_the_companion_well(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"], max_sessions=8) as listener:
        for _ in range(20):
            channel = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
            channel.send(infer("half"), [bytes(4 * MIB)])
            channel._abort()
            with pytest.raises(ConnectionLost):
                await channel.receive()
        assert await works(listener, ours["device"])


async def test_an_authenticated_peer_that_breaks_the_protocol_is_told_and_closed(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"]) as listener:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", listener.port, ssl=client_context(ours["device"]), server_hostname=""
        )
        writer.write(b"\x63" * 20)
        said = await reader.read()
        assert b"PROTOCOL_ERROR" in said
        assert b"frame kind must be" in said
        writer.close()
        await writer.wait_closed()
        assert await works(listener, ours["device"])


async def test_another_major_version_is_a_typed_refusal(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"], major=2) as listener:
        error = await refused(listener, ours["device"])
    assert isinstance(error, ChannelError)
    assert "wire protocol" in str(error)


@pytest.mark.parametrize("handshake", [False, True])
async def test_a_peer_that_says_no_hello_is_closed(
    ours: dict[str, Identity], handshake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_side, "HELLO_TIMEOUT_S", 0.2)
    async with listening(ours["companion"], max_sessions=1) as listener:
        options: dict[str, Any] = {}
        if handshake:
            options = {"ssl": client_context(ours["device"]), "server_hostname": ""}
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, **options)
        try:
            await reader.read()
        except ConnectionError:
            pass
        assert listener.refused == 1
        writer.close()
        monkeypatch.undo()
        assert await works(listener, ours["device"])


async def test_a_device_more_than_the_bound_is_told_so_and_the_others_live(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"], max_sessions=1) as listener:
        first = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        error = await refused(listener, ours["device"])
        assert isinstance(error, CompanionRefused)
        assert error.code == "OVERLOADED"
        assert "1 sessions are open here" in str(error)
        first.send(infer("a"), [b"x"])
        assert (await first.receive()).message == infer("a")
        await first.close("done")


async def test_strangers_who_say_nothing_keep_no_device_out(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_side, "MAX_STRANGERS", 4)
    async with listening(ours["companion"], max_sessions=2) as listener:
        silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(20)]
        assert await works(listener, ours["device"])
        assert listener.refused >= 17  # the oldest made room for the next ones, and one for the device
        for reader, writer in silent[:16]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        for _, writer in silent[16:]:
            writer.close()
    assert not listener._serving
    assert not listener._strangers


async def test_a_device_that_comes_again_and_again_while_it_is_turned_away_does_not_pile_up(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection that is refused takes a moment to go: that, too, is in the bound of strangers."""
    monkeypatch.setattr(listening_side, "MAX_STRANGERS", 4)
    going = asyncio.Event()

    async def lingering(self: Lane, code: str, why: str) -> None:
        try:
            await going.wait()
        finally:
            self.abort()
            await self.gone()

    monkeypatch.setattr(Lane, "refuse", lingering)
    async with listening(ours["companion"], max_sessions=1) as listener:
        first = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        again = [asyncio.create_task(refused(listener, ours["device"])) for _ in range(12)]
        async with asyncio.timeout(15):
            while sum(task.done() for task in again) < 8:  # noqa: ASYNC110 - sockets decide when
                await asyncio.sleep(0)
        going.set()
        await asyncio.gather(*again)
        first.send(infer("a"), [b"x"])
        assert (await first.receive()).message == infer("a")
        await first.close("done")


# ---- the device's view of what cannot be reached


async def test_nobody_listening_is_said_so(ours: dict[str, Identity]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionLost, match="refused the connection: nothing listens there"):
            await dial("127.0.0.1", unused.getsockname()[1], identity=ours["device"], hello=hello(), timeout_s=20)


async def test_a_listener_that_never_answers_is_given_up_in_time(ours: dict[str, Identity]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectionLost, match="did not answer within"):
        await dial("127.0.0.1", silent.getsockname()[1], identity=ours["device"], hello=hello(), timeout_s=0.2)


async def test_something_else_than_tls_is_said_so(ours: dict[str, Identity]) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost, match="does not speak TLS"):
            await dial("127.0.0.1", port, identity=ours["device"], hello=hello(), timeout_s=20)


async def test_an_address_that_is_taken_is_said_so(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"]) as listener:
        with pytest.raises(ChannelError, match=f"cannot listen on 127.0.0.1:{listener.port}"):
            await listen(
                "127.0.0.1",
                listener.port,
                identity=ours["companion"],
                make_hello=hello,
                on_channel=lambda channel: channel.close(""),
                max_sessions=1,
            )


# ---- life and death


async def test_the_death_of_the_companion_in_the_middle_of_a_message_wakes_the_device(
    ours: dict[str, Identity],
) -> None:
    async with listening(ours["companion"]) as listener:
        device = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        device.send(infer("a"), [bytes(8 * MIB)])
        waiting = asyncio.create_task(device.receive())
        await listener.close()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            device.send(infer("b"))


async def test_a_handler_that_fails_closes_its_own_channel_only(
    ours: dict[str, Identity], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_on_bad(channel: Channel) -> None:
        message = (await channel.receive()).message
        assert isinstance(message, Infer)
        if message.request_id == "bad":
            raise ZeroDivisionError
        channel.send(message)
        await channel.receive()

    listener = await listen(
        "127.0.0.1",
        0,
        identity=ours["companion"],
        make_hello=hello,
        on_channel=fail_on_bad,
        max_sessions=2,
    )
    good, bad = [
        await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20) for _ in range(2)
    ]
    bad.send(infer("bad"))
    with pytest.raises(ConnectionLost):
        await bad.receive()
    good.send(infer("good"))
    assert (await good.receive()).message == infer("good")
    assert "serving device-1" in caplog.text
    await good.close("done")
    await bad.close("done")
    await listener.close()


async def test_a_listener_that_stops_accepting_lets_open_channels_go_on(ours: dict[str, Identity]) -> None:
    async with listening(ours["companion"]) as listener:
        device = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        await listener.stop_accepting()
        with pytest.raises(ConnectionLost, match="nothing listens there"):
            await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        device.send(infer("a"), [b"x"])
        assert (await device.receive()).payload == b"x"
        await device.close("done")


@pytest.fixture
def best_congestion_control() -> str:
    """What the kernel lets this user choose: bbr, or else the default it already has."""
    folder = Path("/proc/sys/net/ipv4")
    allowed = (folder / "tcp_allowed_congestion_control").read_text().split()
    return "bbr" if "bbr" in allowed else (folder / "tcp_congestion_control").read_text().strip()


async def test_the_socket_is_tuned_for_prompt_sending(ours: dict[str, Identity], best_congestion_control: str) -> None:
    async with listening(ours["companion"]) as listener:
        device = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        sock = device._first._socket
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 16_384
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        (facts,) = device.observe().connections
        assert facts.congestion_control == best_congestion_control
        await device.close("done")


async def test_little_waits_in_the_tls_layer_and_in_the_transport_beneath_it(ours: dict[str, Identity]) -> None:
    """The latter is reached through private names: a Python that has changed them fails here, not in the field."""
    async with listening(ours["companion"]) as listener:
        device = await dial("127.0.0.1", listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        above: Any = device._first._transport
        for transport in (above, above._ssl_protocol._transport):
            assert transport.get_write_buffer_limits()[1] == WAITING_BYTES
        await device.close("done")


async def test_a_refusal_is_an_identity_error_before_any_contact_when_a_file_is_missing(
    ours: dict[str, Identity], tmp_path: Path
) -> None:
    with pytest.raises(IdentityError, match="does not exist"):
        await dial("127.0.0.1", 1, identity=replace(ours["device"], key=tmp_path / "none"), hello=hello(), timeout_s=20)
    assert issubclass(CompanionRefused, ChannelError)


@pytest.mark.parametrize("step", [1, 20, 150])
async def test_a_hello_that_comes_in_pieces_is_taken_like_any_other(ours: dict[str, Identity], step: int) -> None:
    """Which it does where it has more than a packet: a companion names up to 512 models in it."""

    async def companion(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        metadata = msgspec.msgpack.encode(hello())
        stream = FrameHeader(FrameKind.BEGIN, 0, 1, len(metadata), len(metadata), 0).encode() + metadata
        for at in range(0, len(stream), step):
            writer.write(stream[at : at + step])
            await writer.drain()
            for _ in range(20):
                await asyncio.sleep(0)
        await reader.read()
        writer.close()

    context = credentials_of(ours["companion"], "companion").context()
    async with await asyncio.start_server(companion, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        channel = await dial("127.0.0.1", port, identity=ours["device"], hello=hello(), timeout_s=5)
        assert channel.peer_hello == hello()
        await channel.close("done")


async def test_a_connection_that_breaks_right_behind_its_hello_is_a_channel_that_is_over(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anybody owns it: at both ends, whoever waits for a message is told."""
    opened = Lane.opened

    async def late(self: Lane) -> None:
        await opened(self)
        while self.over is None:  # noqa: ASYNC110 - the other end decides when
            await asyncio.sleep(0)

    async def companion(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        metadata = msgspec.msgpack.encode(hello())
        writer.write(FrameHeader(FrameKind.BEGIN, 0, 1, len(metadata), len(metadata), 0).encode() + metadata)
        await reader.read(1)  # the device's Hello: both are there
        for _ in range(20):
            await asyncio.sleep(0)
        reset = bytes([1, 0, 0, 0, 0, 0, 0, 0])
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()

    monkeypatch.setattr(Lane, "opened", late)
    context = credentials_of(ours["companion"], "companion").context()
    async with await asyncio.start_server(companion, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        channel = await dial("127.0.0.1", port, identity=ours["device"], hello=hello(), timeout_s=5)
        async with asyncio.timeout(5):
            with pytest.raises(ConnectionLost):
                await channel.receive()
        await channel.close("done")
