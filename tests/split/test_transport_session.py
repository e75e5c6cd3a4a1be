"""Sessions of two connections: what goes where, who may join, and how one ends."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from split.errors import CompanionRefused, ConnectionLost, IdentityError, NotReached, Overloaded
from split.identity.certificates import Identity, issue, make_authority, serial_of
from split.identity.credentials import Credentials, credentials_of
from split.transport import tls as device_side
from split.transport.channel import Channel
from split.transport.lane import Lane
from split.transport.listener import Listener, listen
from split.transport.tcp_options import tune
from split.transport.tls import TlsChannel, _Way, dial
from split.wire.limits import DEFAULT_LIMITS, MIB
from split.wire.messages import Cancel, Hello, Infer, ModelChunk, Ping, Pong, Priority

BYTES = bytes(4 * MIB)


def hello(minor: int = 1, **fields: Any) -> Hello:
    return Hello(major=1, minor=minor, agent="a", runtime="r", max_message_bytes=256 * MIB, codecs=("raw",), **fields)


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


def chunk(offset: int, digest: str = "d") -> ModelChunk:
    return ModelChunk(digest=digest, file="f", offset=offset)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    root = tmp_path_factory.mktemp("ours")
    make_authority(root / "ca")
    return {
        "device": issue(root / "ca", "device-1", "device", root / "device"),
        "renewed device": issue(root / "ca", "device-1", "device", root / "renewed"),
        "other device": issue(root / "ca", "device-2", "device", root / "other"),
        "companion": issue(root / "ca", "companion-1", "companion", root / "companion"),
    }


class House:
    """A companion that keeps what comes in."""

    def __init__(self) -> None:
        self.listener: Listener
        self.accepted: asyncio.Queue[TlsChannel] = asyncio.Queue()

    async def keep(self, channel: Channel) -> None:
        assert isinstance(channel, TlsChannel)
        self.accepted.put_nowait(channel)
        for lane in channel._lanes:
            await lane.ended()


@asynccontextmanager
async def house(
    ours: dict[str, Identity], *, host: str = "127.0.0.1", minor: int = 1, max_sessions: int = 4, **more: Any
) -> AsyncIterator[House]:
    made = House()
    made.listener = await listen(
        host,
        0,
        identity=ours["companion"],
        make_hello=lambda: hello(minor),
        on_channel=made.keep,
        max_sessions=max_sessions,
        **more,
    )
    try:
        yield made
    finally:
        await made.listener.close()
    assert not made.listener._serving
    assert not made.listener._sessions
    assert not made.listener._named


async def connect(place: House, ours: dict[str, Identity], minor: int = 1) -> tuple[TlsChannel, TlsChannel]:
    device = await dial("127.0.0.1", place.listener.port, identity=ours["device"], hello=hello(minor), timeout_s=20)
    companion = await place.accepted.get()
    if device._joining is not None:
        await device._joining
    return device, companion


async def one_lane(place: House, identity: Identity, **fields: Any) -> Lane:
    """A connection as its device likes to name it."""
    credentials = credentials_of(identity, "device")
    _, lane = await asyncio.get_running_loop().create_connection(
        lambda: Lane(hello(**fields), credentials, "the companion", DEFAULT_LIMITS, greets_first=True),
        "127.0.0.1",
        place.listener.port,
        ssl=credentials.context(),
        server_hostname="",
    )
    await lane.opened()
    return lane


async def test_a_session_knows_the_certificates_of_both_connections_where_a_renewal_fell_between_them(
    ours: dict[str, Identity],
) -> None:
    first, renewed = (serial_of(ours[one].cert.read_bytes()) for one in ("device", "renewed device"))
    async with house(ours) as place:
        urgent = await one_lane(place, ours["device"], session="5" * 32, lane="urgent")
        companion = await place.accepted.get()
        assert companion.peer.serials == {first}
        bulk = await one_lane(place, ours["renewed device"], session="5" * 32, lane="bulk")
        assert companion.peer.serials == {first, renewed}
        for lane in (bulk, urgent):
            lane.abort()


async def test_a_certificate_that_is_revoked_between_handshake_and_join_does_not_join(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(ours) as place:
        urgent = await one_lane(place, ours["device"], session="5" * 32, lane="urgent")
        companion = await place.accepted.get()
        renewed = serial_of(ours["renewed device"].cert.read_bytes())
        monkeypatch.setattr(Credentials, "is_revoked", lambda self, serial: False)
        opened = Lane.opened

        async def revoked_then(lane: Lane) -> None:
            await opened(lane)
            monkeypatch.setattr(Credentials, "is_revoked", lambda self, serial: serial == renewed)

        monkeypatch.setattr(Lane, "opened", revoked_then)
        with pytest.raises(CompanionRefused) as caught:
            await one_lane(place, ours["renewed device"], session="5" * 32, lane="bulk")
        assert caught.value.code == "REVOKED"
        assert companion.lanes == 1
        urgent.abort()


def carried(channel: TlsChannel) -> list[int]:
    """Bytes queued on each connection."""
    return [lane.connection.queued_bytes for lane in channel._lanes]


def unplug(channel: TlsChannel) -> Callable[[], None]:
    """Hold back what is sent from now on; the returned function lets it go."""
    for lane in channel._lanes:
        lane._may_send = False

    def plug_in() -> None:
        for lane in channel._lanes:
            lane.greet()

    return plug_in


async def test_urgent_and_control_go_over_the_first_connection_normal_and_bulk_over_the_second(
    ours: dict[str, Identity],
) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        for one in (device, companion):
            assert [facts.lane for facts in one.observe().connections] == ["urgent", "bulk"]
            unplug(one)
            for priority, on_second in (
                (Priority.URGENT, False),
                (Priority.NORMAL, True),
                (Priority.BULK, True),
            ):
                before = carried(one)
                one.send(infer("a"), [bytes(100)], priority=priority)
                assert [after > b for after, b in zip(carried(one), before, strict=True)] == [not on_second, on_second]
            before = carried(one)
            one.send(Cancel(request_id="a", attempt=1), priority=Priority.CONTROL)
            assert carried(one)[1] == before[1]
            assert one.queued_bytes == sum(carried(one))
        await device.close("done")


async def test_a_ping_with_weight_travels_where_tensors_do_and_both_are_answered(ours: dict[str, Identity]) -> None:
    async with house(ours) as place:
        device, _ = await connect(place, ours)
        plug_in = unplug(device)
        device.send(Ping(nonce=1), priority=Priority.CONTROL)
        light = carried(device)
        device.send(Ping(nonce=2, padding=bytes(10_000)), priority=Priority.CONTROL)
        assert (light[0] > 0, light[1]) == (True, 0)
        assert (carried(device)[0], carried(device)[1] > 10_000) == (light[0], True)
        plug_in()
        answers = [(await device.receive()).message for _ in range(2)]
        assert {answer.nonce for answer in answers if isinstance(answer, Pong)} == {1, 2}
        await device.close("done")


async def test_the_pieces_of_an_upload_that_began_on_the_first_connection_stay_there_in_order(
    ours: dict[str, Identity],
) -> None:
    async with house(ours) as place:
        device = await dial("127.0.0.1", place.listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        companion = await place.accepted.get()
        device.send(chunk(0), [bytes(1000)], priority=Priority.BULK)
        assert device.lanes == 1
        assert device._joining is not None
        await device._joining
        plug_in = unplug(device)
        device.send(chunk(1000), [bytes(1000)], priority=Priority.BULK)
        assert carried(device)[1] == 0
        device.send(chunk(0, "another"), [bytes(1000)], priority=Priority.BULK)
        assert carried(device)[1] > 1000
        plug_in()
        came = [(await companion.receive()).message for _ in range(3)]
        assert [one.offset for one in came if isinstance(one, ModelChunk) and one.digest == "d"] == [0, 1000]
        await device.close("done")


@pytest.mark.parametrize(("of_device", "of_companion"), [(0, 1), (1, 0), (0, 0)])
async def test_a_side_that_speaks_1_0_has_a_session_of_one_connection(
    ours: dict[str, Identity], of_device: int, of_companion: int
) -> None:
    async with house(ours, minor=of_companion) as place:
        device, companion = await connect(place, ours, of_device)
        assert device._joining is None
        device.send(infer("a"), [BYTES])
        assert (await companion.receive()).payload == BYTES
        assert device.lanes == companion.lanes == 1
        await device.close("done")


async def test_the_session_works_before_and_without_its_second_connection(
    ours: dict[str, Identity], caplog: pytest.LogCaptureFixture
) -> None:
    async with house(ours) as place:
        device = await dial("127.0.0.1", place.listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
        await place.listener.stop_accepting()
        companion = await place.accepted.get()
        while "one connection only" not in caplog.text:  # noqa: ASYNC110 - sockets decide when
            await asyncio.sleep(0)
        device.send(infer("a"), [BYTES], priority=Priority.BULK)
        assert (await companion.receive()).payload == BYTES
        assert device.lanes == 1
        await device.close("done")
        assert device._joining is not None
        assert device._joining.done()


async def test_a_second_connection_that_is_lost_on_the_way_is_tried_again_and_the_loss_is_said_once(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_side, "JOIN_FIRST_S", 0.001)
    opened, lost = _Way.open, 0

    async def lossy(self: _Way, host: str, port: int, hello: Hello, **more: Any) -> Lane:
        nonlocal lost
        if hello.lane == "bulk" and lost < 3:
            lost += 1
            raise NotReached("TIMEOUT", "nothing came back")
        return await opened(self, host, port, hello, **more)

    monkeypatch.setattr(_Way, "open", lossy)
    async with house(ours) as place:
        device, companion = await connect(place, ours)  # waits for the second connection
        assert lost == 3
        assert device.lanes == 2
        assert caplog.text.count("one connection only") == 1
        device.send(infer("a"), [BYTES], priority=Priority.BULK)
        assert (await companion.receive()).payload == BYTES
        await device.close("done")


async def test_o_wi_04_a_loop_that_stands_still_again_and_again_under_a_transfer_loses_no_connection(
    ours: dict[str, Identity],
) -> None:
    """The case is WebRTC's, 30 s of it; no timer of ours or TCP's is shorter than a few such pauses."""

    def stand_still() -> None:
        time.sleep(0.4)

    sent = random.Random(4).randbytes(30 * MIB)
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        loop = asyncio.get_running_loop()
        for pause in range(4):
            loop.call_later(0.05 + pause * 0.45, stand_still)
        device.send(infer("big"), [sent])
        device.send(Ping(nonce=1), priority=Priority.CONTROL)
        came = (await companion.receive()).payload
        assert hashlib.sha256(came).digest() == hashlib.sha256(sent).digest()
        assert (await device.receive()).message == Pong(nonce=1)
        assert device.closed_because is companion.closed_because is None
        await device.close("done")


async def test_o_wi_07_fifty_set_ups_over_two_addresses_of_one_host_all_work(ours: dict[str, Identity]) -> None:
    """The case is WebRTC's; over TLS the second connection must find the address that the first one found."""
    hosts = ("127.0.0.1", "127.0.0.2")
    async with house(ours, host=hosts[0], max_sessions=25) as one, house(ours, host=hosts[1], max_sessions=25) as two:
        for number in range(50):
            host, place = hosts[number % 2], (one, two)[number % 2]
            device = await dial(host, place.listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
            assert device._joining is not None
            await device._joining
            assert [lane.ends[1] for lane in device._lanes if lane.ends is not None] == [host, host]
            device.send(infer("a"), [bytes(100)], priority=Priority.BULK)
            companion = await place.accepted.get()
            assert (await companion.receive()).message == infer("a")
            await device.close("done")


async def test_nobody_joins_a_session_that_is_unknown_anothers_or_complete(ours: dict[str, Identity]) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        name = device._first._hello.session
        for identity, session in (
            (ours["device"], "0" * 32),
            (ours["other device"], name),
            (ours["device"], name),
        ):
            with pytest.raises(CompanionRefused, match="no session of that name") as caught:
                await one_lane(place, identity, session=session, lane="bulk")
            assert caught.value.code == "UNKNOWN_SESSION"
        with pytest.raises(CompanionRefused, match="is open already"):
            await one_lane(place, ours["device"], session=name, lane="urgent")
        assert place.listener.refused == 4
        device.send(infer("a"), [BYTES])
        assert (await companion.receive()).payload == BYTES
        await device.close("done")


@pytest.mark.parametrize("which", [0, 1])
async def test_the_death_of_one_connection_is_the_death_of_the_session_at_both_ends(
    ours: dict[str, Identity], which: int
) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        device._lanes[which]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
        device._lanes[which].abort()  # a reset
        for one in (device, companion):
            with pytest.raises(ConnectionLost):
                await one.receive()
            for lane in one._lanes:
                await lane.gone()
            with pytest.raises(ConnectionLost):
                one.send(infer("late"))


async def test_what_one_connection_still_brings_is_received_after_the_other_was_closed_in_good_order(
    ours: dict[str, Identity],
) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        device._lanes[1]._transport.pause_reading()  # type: ignore[union-attr]  # it is connected
        payload = BYTES[:60_000]
        companion.send(infer("last"), [payload], priority=Priority.NORMAL)
        closing = asyncio.create_task(companion.close("goodbye"))
        await device._lanes[0].ended()
        with pytest.raises(ConnectionLost, match="the peer closed"):
            device.send(infer("late"))
        device._lanes[1]._transport.resume_reading()  # type: ignore[union-attr]  # it is connected
        assert (await device.receive()).payload == payload
        with pytest.raises(ConnectionLost, match="the peer closed"):
            await device.receive()
        await closing


async def test_a_broken_protocol_on_the_second_connection_ends_the_session(ours: dict[str, Identity]) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        device._lanes[1]._transport.write(b"\x63" * 20)  # type: ignore[union-attr]  # it is connected
        with pytest.raises(ConnectionLost, match="the peer broke the protocol"):
            await companion.receive()
        with pytest.raises(ConnectionLost, match="PROTOCOL_ERROR"):
            await device.receive()
        await device.close("done")


async def test_closing_calls_off_a_second_connection_that_is_being_made(ours: dict[str, Identity]) -> None:
    async with house(ours) as place:
        for _ in range(5):
            device = await dial("127.0.0.1", place.listener.port, identity=ours["device"], hello=hello(), timeout_s=20)
            assert device._joining is not None
            await device.close("changed my mind")
            assert device._joining.done()


# ---- bounds of the listener


async def test_sessions_are_counted_not_connections_and_a_device_makes_room_for_itself(
    ours: dict[str, Identity],
) -> None:
    asked: list[str] = []
    ending: list[asyncio.Task[None]] = []

    def make_room(device: str) -> bool:
        asked.append(device)
        if device == "device-1":
            ending.append(asyncio.create_task(oldest.close("a newer one takes its place")))
        return device == "device-1"

    async with house(ours, max_sessions=2, make_room=make_room) as place:
        device, oldest = await connect(place, ours)
        second, _ = await connect(place, ours)
        assert device.lanes == second.lanes == 2
        with pytest.raises(CompanionRefused, match=r"2 sessions are open here, the bound \(limits.connections\)"):
            await dial("127.0.0.1", place.listener.port, identity=ours["other device"], hello=hello(), timeout_s=20)
        third, companion = await connect(place, ours)
        with pytest.raises(ConnectionLost):
            await device.receive()
        third.send(infer("a"))
        assert (await companion.receive()).message == infer("a")
        assert asked == ["device-2", "device-1"]
        await asyncio.gather(*ending, *(one.close("done") for one in (device, second, third)))


async def test_a_peer_that_stops_reading_holds_a_bounded_queue_and_harms_nobody(ours: dict[str, Identity]) -> None:
    async with house(ours) as place:
        deaf, to_deaf = await connect(place, ours)
        for lane in deaf._lanes:
            lane._transport.pause_reading()  # type: ignore[union-attr]  # it is connected
        other, to_other = await connect(place, ours)
        refused = 0
        while refused < 5:
            try:
                to_deaf.send(infer("reply"), [BYTES])
            except Overloaded:
                refused += 1
            await asyncio.sleep(0)
        assert to_deaf.queued_bytes <= 2 * DEFAULT_LIMITS.queue_bytes
        to_other.send(infer("answer"), [BYTES])
        assert (await other.receive()).payload == BYTES
        await asyncio.gather(other.close("done"), deaf.close("done"))


async def test_closing_at_any_moment_of_an_arrival_leaves_no_socket_open(ours: dict[str, Identity]) -> None:
    """A socket left open would be a ResourceWarning, which is an error here."""
    for steps in range(12):
        async with house(ours) as place:
            reader, writer = await asyncio.open_connection("127.0.0.1", place.listener.port)
            for _ in range(steps):
                await asyncio.sleep(0)
            await place.listener.close()
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
            writer.close()


async def test_a_device_that_takes_a_companion_for_one_learns_so_on_its_first_connection(
    ours: dict[str, Identity],
) -> None:
    async with house(ours) as place:
        with pytest.raises(IdentityError):
            await dial("127.0.0.1", place.listener.port, identity=ours["companion"], hello=hello(), timeout_s=20)


async def test_frames_and_what_may_wait_follow_the_rate_once_the_link_has_held_us_back(
    ours: dict[str, Identity],
) -> None:
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        bulk = device._lanes[1]
        assert device.observe().connections[1].frame_bytes == DEFAULT_LIMITS.frame_bytes
        while bulk._measure_at_s == 0.0:
            device.send(infer("a"), [BYTES])
            await companion.receive()
        frame_bytes = device.observe().connections[1].frame_bytes
        lowat = bulk._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        if frame_bytes != DEFAULT_LIMITS.frame_bytes:
            assert lowat == max(16_384, frame_bytes // 2)
        assert frame_bytes % 16_384 == 0
        assert 16_384 <= frame_bytes <= 131_072
        await device.close("done")


async def test_what_shows_the_rate_is_taken_up_afresh_on_the_second_connection_and_goes_on_where_the_kernel_refuses(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []

    def begin(sock: object, congestion_control: str) -> None:
        begun.append(sock)
        if len(begun) > 1:
            raise PermissionError("no bbr for users any more")

    monkeypatch.setattr("split.transport.lane.is_worth_it", lambda info, rtt_ms: rtt_ms == 7.0)
    monkeypatch.setattr("split.transport.lane.begin_afresh", begin)
    async with house(ours) as place:
        device, _ = await connect(place, ours)
        urgent, bulk = device._lanes
        for lane in (urgent, bulk):
            lane._congestion_control = "bbr"
        device.look_afresh(8.0)
        assert begun == []  # not worth it
        device.look_afresh(7.0)
        assert begun == [bulk._socket]
        device.look_afresh(7.0)
        assert len(begun) == 2
        assert bulk._congestion_control == tune(bulk._socket)  # whatever the kernel uses now
        bulk._congestion_control = "cubic"
        device.look_afresh(7.0)
        assert len(begun) == 2  # keeps no rate in mind
        await device.close("done")


async def test_a_companion_takes_it_up_afresh_before_a_pong_with_weight_and_no_other(
    ours: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr("split.transport.lane.is_worth_it", lambda info, rtt_ms: rtt_ms == info.rtt_ms)
    monkeypatch.setattr("split.transport.lane.begin_afresh", lambda sock, _: begun.append(sock))
    async with house(ours) as place:
        device, companion = await connect(place, ours)
        for lane in companion._lanes:
            lane._congestion_control = "bbr"
        device.send(Ping(nonce=1, padding=bytes(64)), priority=Priority.CONTROL)
        assert (await device.receive()).message == Pong(nonce=1)
        assert begun == []
        device.send(Ping(nonce=2, pong_bytes=14_000), priority=Priority.CONTROL)
        assert (await device.receive()).message == Pong(nonce=2, padding=bytes(14_000))
        assert begun == [companion._lanes[1]._socket]  # where tensors travel
        await device.close("done")
