"""Pongs with weight: as much as was asked for, never more than a bound; what older peers make of it, by hand."""

from __future__ import annotations

import msgspec
import pytest

from scripts.wire_vectors import HELLO, message
from split.errors import RemoteProtocolError
from split.wire.connection import WireConnection
from split.wire.messages import Hello, Ping, Pong, Priority
from split.wire.pinging import answer_to

OURS = Hello(major=1, minor=3, agent="ours", runtime="none", max_message_bytes=1 << 20, codecs=("raw",))


def greeted(*, dials: bool = False) -> WireConnection:
    connection = WireConnection(OURS, dials=dials)
    connection.receive(message(1, HELLO, priority=0))
    connection.data_to_send(1 << 20)
    return connection


def test_a_companion_answers_with_as_many_bytes_as_it_was_asked_for() -> None:
    companion = greeted()
    companion.receive(message(2, {"t": "ping", "nonce": 9, "pong_bytes": 20_000}, priority=0))
    [frame] = companion.data_to_send(1 << 20)
    assert msgspec.msgpack.decode(frame[20:]) == {"t": "pong", "nonce": 9, "padding": bytes(20_000)}
    device = greeted(dials=True)
    assert [one.message for one in device.receive(frame)] == [Pong(nonce=9, padding=bytes(20_000))]


@pytest.mark.parametrize("asked", [-1, 32_769, 1 << 40])
def test_what_asks_for_more_than_any_may_ends_with_a_typed_error_and_sends_nothing(asked: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"0 to 32768 bytes of padding in its pong, one asks for {asked}"):
        answer_to(Ping(nonce=1, pong_bytes=asked))
    companion = greeted()
    companion.receive(message(2, {"t": "ping", "nonce": 9, "pong_bytes": asked}, priority=0))
    [frame] = companion.data_to_send(1 << 20)
    last = msgspec.msgpack.decode(frame[20:])
    assert (last["t"], last["code"]) == ("refused", "PROTOCOL_ERROR")


def test_pings_for_weight_that_nobody_reads_pile_up_to_128_kib_at_most() -> None:
    companion = greeted()
    for number in range(2, 6):
        companion.receive(message(number, {"t": "ping", "nonce": number, "pong_bytes": 32_768}, priority=0))
    assert companion.failure is None
    assert companion.queued_bytes < 4 * (32_768 + 50)
    companion.receive(message(6, {"t": "ping", "nonce": 6, "pong_bytes": 1}, priority=0))
    assert "131072 bytes of padding, now 131073 would" in str(companion.failure)
    assert companion.queued_bytes < 1_000


def test_a_device_sends_no_companion_weight_that_it_asks_for() -> None:
    """A companion that was broken into shall not spend a device's metered bytes with pings of a few."""
    device = greeted(dials=True)
    device.receive(message(2, {"t": "ping", "nonce": 1}, priority=0))
    assert device.failure is None
    device.receive(message(3, {"t": "ping", "nonce": 2, "pong_bytes": 100}, priority=0))
    assert "a companion asks for no padding in a pong, this one for 100 bytes" in str(device.failure)


def test_to_a_peer_that_knows_nothing_of_weight_it_is_a_ping_and_a_pong_as_ever() -> None:
    """As 1.2 has them: two fields and one."""
    device = greeted(dials=True)
    device.send(Ping(nonce=4, padding=b"ab"), priority=Priority.CONTROL)
    [frame] = device.data_to_send(1 << 20)
    assert msgspec.msgpack.decode(frame[20:]) == {"t": "ping", "nonce": 4, "padding": b"ab"}
    companion = greeted()
    companion.receive(message(2, {"t": "ping", "nonce": 4, "padding": b"ab"}, priority=0))
    [frame] = companion.data_to_send(1 << 20)
    assert msgspec.msgpack.decode(frame[20:]) == {"t": "pong", "nonce": 4}
