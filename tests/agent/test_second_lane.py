"""One of a session's two connections dies without a word: the other one must not hide it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agent.second_lane
from agent.planner import Planner
from agent.second_lane import LANE_SILENCE_S, SecondLane
from agent.uplink import Uplink
from split.codec.payload import encode
from split.errors import ConnectionLost
from split.identity.certificates import issue, make_authority
from split.transport.channel import Channel, LinkFacts, Observation
from split.transport.listener import listen
from split.transport.retry import Backoff
from split.transport.tls import dial
from split.wire.messages import Hello, Infer, Message, ModelOffer, Ping, Priority, Reply, SegmentOpen
from tests.agent.uplink_world import DIGEST, GOLDEN, Golden, model, opens, takes

FACTS = LinkFacts(
    lane="bulk",
    congestion_control="cubic",
    rtt_ms=1.0,
    rtt_var_ms=0.0,
    min_rtt_ms=1.0,
    rate_bytes_per_s=0.0,
    app_limited=False,
    cwnd_bytes=0,
    unacked_bytes=0,
    unsent_bytes=0,
    acked_bytes=0,
    retransmits=0,
    frame_bytes=0,
)


class TwoLanes:
    """What `SecondLane` asks of a channel."""

    def __init__(self, lanes: int = 2) -> None:
        self.lanes = lanes
        self.acked_bytes = 0
        self.sent: list[Message] = []

    def send(self, message: Message, payload: object = (), *, priority: Priority) -> None:
        assert priority is Priority.CONTROL
        self.sent.append(message)

    def observe(self) -> Observation:
        first = dataclasses.replace(FACTS, lane="urgent", acked_bytes=self.acked_bytes + len(self.sent) * 1000)
        second = dataclasses.replace(FACTS, acked_bytes=self.acked_bytes)
        return Observation(sent_bytes=0, received_bytes=0, queued_bytes=0, connections=(first, second))


def lane_of(channel: TwoLanes) -> SecondLane:
    return SecondLane(channel)  # type: ignore[arg-type]  # the part that is used


def test_it_is_silent_once_the_companion_was_heard_two_seconds_after_a_ping_there_that_nothing_answered() -> None:
    channel = TwoLanes()
    lane = lane_of(channel)
    lane.ask(1, 100.0)
    lane.ask(2, 101.0)
    assert channel.sent == [Ping(nonce=1, padding=b"\0")], "one is enough, TCP repeats it"
    assert not lane.is_silent(100.0 + LANE_SILENCE_S, 110.0)
    assert lane.is_silent(100.1 + LANE_SILENCE_S, 110.0)
    assert not lane.is_silent(100.1 + LANE_SILENCE_S, 110.0, patience=2.0)


def test_where_nothing_is_heard_over_the_first_either_it_is_not_the_second_that_is_dead() -> None:
    lane = lane_of(TwoLanes())
    lane.ask(1, 100.0)
    assert not lane.is_silent(99.0, 200.0)


def test_what_the_peers_kernel_acknowledges_shows_that_it_is_only_slow() -> None:
    channel = TwoLanes()
    lane = lane_of(channel)
    lane.ask(1, 100.0)
    for second in range(101, 120):
        channel.acked_bytes += 1_448
        assert not lane.is_silent(second, second)
    assert not lane.is_silent(119.0 + LANE_SILENCE_S, 121.0)
    assert lane.is_silent(119.1 + LANE_SILENCE_S, 122.0)


def test_whatever_comes_over_it_ends_the_doubt_and_the_next_ping_waits_for_a_silence() -> None:
    channel = TwoLanes()
    lane = lane_of(channel)
    lane.ask(1, 100.0)
    lane.heard(101.0)
    assert not lane.is_silent(200.0, 200.0)
    lane.ask(2, 101.1, unheard_s=0.25)
    assert len(channel.sent) == 1
    lane.ask(2, 101.3, unheard_s=0.25)
    assert len(channel.sent) == 2


def test_a_session_of_one_connection_has_no_second_to_doubt() -> None:
    channel = TwoLanes(lanes=1)
    lane = lane_of(channel)
    lane.ask(1, 100.0)
    assert (channel.sent, lane.is_silent(200.0, 200.0)) == ([], False)


HELLO = Hello(major=1, minor=1, agent="a", runtime="r", max_message_bytes=1 << 26, codecs=("raw",))


class Relay:
    """Passes on what comes, but for connections that are black holes: these take everything and say nothing."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._tasks: set[asyncio.Task[Any]] = set()
        self.holes: set[int] = set()
        self.connections = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass_on(number, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, number: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if number not in self.holes:
                    sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.close()


async def companion(channel: Channel) -> None:
    """Has everything, answers everything."""
    try:
        while True:
            match (await channel.receive()).message:
                case ModelOffer() as offer:
                    answers: Sequence[Message] = takes(offer, 0)
                case SegmentOpen() as wanted:
                    answers = opens(wanted, 0)
                case Infer(request_id=name, attempt=attempt):
                    times = dict.fromkeys(("queue_ms", "decode_ms", "tail_ms", "encode_ms", "cloud_ms"), 1.0)
                    reply = Reply(request_id=name, attempt=attempt, cut="offload", codec="raw", **times)
                    channel.send(reply, encode(GOLDEN, "raw"))
                    continue
                case _:
                    continue
            for answer in answers:
                channel.send(answer)
    except ConnectionLost:
        pass


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


async def test_a_second_connection_that_becomes_a_black_hole_is_replaced_and_requests_are_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent.second_lane, "LANE_SILENCE_S", 0.3)
    make_authority(tmp_path / "ca")
    device, cloud = (
        issue(tmp_path / "ca", "d", "device", tmp_path / "d"),
        issue(tmp_path / "ca", "c", "companion", tmp_path / "c"),
    )
    listener = await listen(
        "127.0.0.1", 0, identity=cloud, make_hello=lambda: HELLO, on_channel=companion, max_sessions=4
    )

    async def through(address: str, timeout_s: float, first: Sequence[Message]) -> Channel:
        host, _, port = address.rpartition(":")
        early = [(message, ()) for message in first]
        return await dial(host, int(port), identity=device, hello=HELLO, timeout_s=20, first=early)

    async with asyncio.timeout(60), Relay(listener.port) as relay:
        planner = Planner()
        uplink = Uplink(
            companions=[f"127.0.0.1:{relay.port}"],
            dial=through,
            planner=planner,
            golden=Golden(),  # type: ignore[arg-type]  # the same methods, nothing runs
            backoff=Backoff(),
        )
        served = model(tmp_path)
        planner.add_model(served.name, served.card, served.profile, served.contract)  # type: ignore[arg-type]
        uplink.serve_model(served)
        uplink.start()

        def ask(name: str, **more: Any) -> asyncio.Future[Any]:
            wanted = Infer(request_id=name, attempt=1, digest=DIGEST, cut="offload", codec="raw", budget_ms=60e3)
            return uplink.infer(wanted, [bytes(100)], priority=Priority.NORMAL, **more).reply

        try:
            await until(lambda: planner.local_only_reason("m") == "")
            await until(lambda: uplink._channel is not None and uplink._channel.lanes == 2)
            await ask("before")
            assert relay.connections == 2
            relay.holes.add(1)
            lost = ask("lost", attempts=2)
            uplink.suspect()
            await until(lambda: uplink.connects == 2)
            await lost
            await ask("after")
            assert uplink.state == "connected"
            assert relay.connections >= 3
        finally:
            await uplink.close()
            await listener.close()
