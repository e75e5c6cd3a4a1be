"""Credit both ways: what stops, what passes, what is refused; against PROTOCOL.md §7, with costs counted by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from split.errors import RemoteProtocolError
from split.wire.connection import Received, WireConnection
from split.wire.limits import KIB, MIB, Limits
from split.wire.messages import Cancel, Hello, Infer, ModelChunk, Ping, Pong, Priority

WINDOW = 64 * KIB


def hello(**fields: Any) -> Hello:
    known: dict[str, Any] = {"major": 1, "minor": 1, "agent": "test", "runtime": "none", "codecs": ("raw",)}
    return Hello(**(known | {"max_message_bytes": 256 * MIB, "window_bytes": WINDOW} | fields))


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


def frame(kind: int, number: int, body: bytes, *, priority: int = 2, metadata: int = 0, payload: int = 0) -> bytes:
    fields = ((kind, 1), (priority, 1), (0, 2), (number, 4), (len(body), 4), (metadata, 4), (payload, 4))
    return b"".join(value.to_bytes(width, "little") for value, width in fields) + body


def credit(total: int) -> bytes:
    return frame(128, 0, total.to_bytes(8, "little"), priority=0)


def hello_bytes(**fields: Any) -> bytes:
    known = {"t": "hello", "major": 1, "minor": 1, "agent": "a", "runtime": "r", "codecs": ["raw"]}
    metadata = msgspec.msgpack.encode(known | {"max_message_bytes": 2**28, "window_bytes": WINDOW} | fields)
    return frame(1, 1, metadata, priority=0, metadata=len(metadata))


def pair(left_hello: Hello | None = None, frame_bytes: int = 4 * KIB) -> tuple[WireConnection, WireConnection]:
    """Two connections whose Hellos are exchanged; the queue is larger than the window."""
    limits = Limits(frame_bytes=frame_bytes, queue_bytes=64 * MIB)
    left, right = WireConnection(left_hello or hello(), limits=limits), WireConnection(hello(), limits=limits)
    assert carry(left, right) == carry(right, left) == []
    return left, right


def carry(sender: WireConnection, receiver: WireConnection) -> list[Received]:
    """All frames that may go now; what became whole over there."""
    received: list[Received] = []
    while (data := sender.next_frame()) is not None:
        received += receiver.receive(data)
    assert receiver.failure is None, receiver.failure
    return received


def dialled(**fields: Any) -> WireConnection:
    """Ours, against a peer made of hand-written bytes."""
    connection = WireConnection(hello(), limits=Limits(queue_bytes=64 * MIB))
    connection.receive(hello_bytes(**fields))
    connection.data_to_send(2**20)
    return connection


# ---- sending


def test_a_sender_stops_at_its_credit_to_the_byte_and_goes_on_when_it_grows() -> None:
    ours = dialled()
    ours.send(infer("a"), [bytes(200_000)])
    sent = ours.data_to_send(2**30)
    assert sum(len(data) - 20 for data in sent) == WINDOW - 512
    assert ours.blocked
    ours.receive(credit(WINDOW + 1_000))
    assert [len(data) - 20 for data in ours.data_to_send(2**30)] == [1_000]
    ours.receive(credit(2**40))
    assert not ours.blocked
    ours.data_to_send(2**30)
    assert ours.queued_bytes == 0


def test_a_message_does_not_begin_without_credit_for_its_first_byte() -> None:
    ours = dialled()
    ours.send(infer("a"), [bytes(WINDOW - 512 - 512 - len_of_infer("a"))])
    ours.data_to_send(2**30)
    ours.send(infer("b"))
    assert (ours.blocked, ours.next_frame()) == (True, None)
    ours.receive(credit(WINDOW + 1))
    frame_of_one_byte = ours.next_frame()
    assert frame_of_one_byte is not None
    assert len(frame_of_one_byte) == 21


def len_of_infer(request_id: str) -> int:
    """By a connection that needs no credit."""
    free = dialled(window_bytes=0)
    free.send(infer(request_id))
    return free.queued_bytes


def test_control_messages_and_resets_pass_a_sender_without_credit() -> None:
    ours = dialled()
    ours.send(infer("a"), [bytes(200_000)])
    ours.data_to_send(2**30)
    ours.send(Cancel(request_id="x", attempt=1), priority=Priority.CONTROL)
    ping = msgspec.msgpack.encode({"t": "ping", "nonce": 5})
    ours.receive(frame(1, 2, ping, priority=0, metadata=len(ping)))
    ours.forget("a", 1)
    kinds = [(data[0], data[1]) for data in ours.data_to_send(2**30)]
    assert kinds == [(3, 2), (1, 0), (1, 0)], "reset, cancel, pong"
    assert not ours.blocked


def test_an_urgent_message_waits_for_credit_like_all_data() -> None:
    ours = dialled()
    ours.send(infer("big"), [bytes(200_000)], Priority.BULK)
    ours.data_to_send(2**30)
    ours.send(infer("urgent"), [], Priority.URGENT)
    assert ours.next_frame() is None
    ours.receive(credit(WINDOW + 10_000))
    first = ours.next_frame()
    assert first is not None
    assert first[1] == Priority.URGENT


@pytest.mark.parametrize("total", [0, WINDOW - 1, WINDOW])
def test_a_total_that_is_not_greater_changes_nothing(total: int) -> None:
    ours = dialled()
    ours.receive(credit(total))
    ours.send(infer("a"), [bytes(200_000)])
    assert sum(len(data) - 20 for data in ours.data_to_send(2**30)) == WINDOW - 512


def test_credit_is_understood_byte_by_byte_and_between_the_frames_of_a_message() -> None:
    ours = dialled()
    ours.send(infer("a"), [bytes(200_000)])
    ours.data_to_send(2**30)
    chunk = msgspec.msgpack.encode({"t": "model-chunk", "digest": "d", "file": "f", "offset": 0})
    stream = frame(1, 2, chunk, metadata=len(chunk), payload=3) + credit(WINDOW + 77) + frame(2, 2, b"abc")
    received = [one for byte in stream for one in ours.receive(bytes([byte]))]
    assert [bytes(one.payload) for one in received] == [b"abc"]
    assert [len(data) - 20 for data in ours.data_to_send(2**30)] == [77]


def test_a_peer_that_gives_no_credit_gets_all_and_its_credit_frames_mean_nothing() -> None:
    ours = dialled(window_bytes=0)
    ours.receive(credit(10))
    ours.send(infer("a"), [bytes(200_000)])
    ours.data_to_send(2**30)
    assert (ours.queued_bytes, ours.blocked) == (0, False)


# ---- receiving


def test_what_is_not_read_stops_the_peer_and_what_is_read_lets_it_go_on() -> None:
    left, right = pair()
    for number in range(20):
        left.send(infer(str(number)), [bytes(10_000)])
    first = carry(left, right)
    assert left.blocked
    assert len(first) == 6, "each costs 512 more than its 10,000 and metadata, the window is 65,536"
    assert [one.taken() for one in first].count(True) == 1, "one grant in half a window"
    seen = list(first)
    while len(seen) < 20:
        assert carry(right, left) == []
        more = carry(left, right)
        assert more
        for one in more:
            one.taken()
        seen += more
    assert [one.message for one in seen] == [infer(str(number)) for number in range(20)]


def test_a_message_larger_than_the_window_becomes_whole_unread() -> None:
    left, right = pair()
    left.send(infer("a"), [bytes(20 * WINDOW)])
    received: list[Received] = []
    while not received:
        received += carry(left, right)
        assert received or left.blocked
        carry(right, left)
    assert received[0].payload.nbytes == 20 * WINDOW
    left.send(infer("b"), [bytes(20 * WINDOW)])
    for _ in range(5):
        assert carry(left, right) == []
        carry(right, left)
    assert left.blocked, "the first one is not read"
    received[0].taken()
    carry(right, left)
    carry(left, right)
    carry(right, left)
    assert not left.blocked or carry(left, right) == []


def test_small_messages_are_held_back_too() -> None:
    left, right = pair()
    for number in range(1_000):
        left.send(infer(str(number)))
    assert 60 < len(carry(left, right)) < WINDOW // 512
    assert left.blocked


def test_a_reset_message_gives_its_credit_back() -> None:
    left, right = pair()
    for number in range(50):
        left.send(infer(str(number)), [bytes(50_000)])
        carry_some(left, right, frames=3)
        left.forget(str(number), 1)
        carry(left, right)
        carry(right, left)
    left.send(infer("last"), [b"x"])
    assert [one.message for one in carry(left, right)] == [infer("last")]


def carry_some(sender: WireConnection, receiver: WireConnection, *, frames: int) -> None:
    for _ in range(frames):
        data = sender.next_frame()
        assert data is not None
        assert receiver.receive(data) == []


@pytest.mark.parametrize("priority", [1, 2, 3])
def test_a_frame_beyond_the_credit_is_an_error_before_its_bytes_came(priority: int) -> None:
    ours = dialled()
    chunk = msgspec.msgpack.encode({"t": "model-chunk", "digest": "d", "file": "f", "offset": 0})
    whole = chunk + bytes(WINDOW - 512 - len(chunk))
    assert len(
        ours.receive(frame(1, 2, whole, priority=priority, metadata=len(chunk), payload=len(whole) - len(chunk)))
    )
    assert ours.failure is None
    ours.receive(frame(1, 3, b"x", priority=priority, metadata=1)[:20])
    assert isinstance(ours.failure, RemoteProtocolError)
    assert str(ours.failure) == "a frame costs 513 bytes of credit, the peer had 0"


def test_control_messages_cost_no_credit_however_many() -> None:
    ours = dialled()
    pong = msgspec.msgpack.encode({"t": "pong", "nonce": 5})
    for number in range(2, 1_000):
        (received,) = ours.receive(frame(1, number, pong, priority=0, metadata=len(pong)))
        assert received.credit_bytes == 0
    assert ours.failure is None


def test_a_peer_of_version_1_0_may_send_without_credit_and_is_told_none() -> None:
    ours = dialled(minor=0, window_bytes=0)
    chunk = msgspec.msgpack.encode({"t": "model-chunk", "digest": "d", "file": "f", "offset": 0})
    for number in range(2, 100):
        (received,) = ours.receive(frame(1, number, chunk + bytes(9_999), metadata=len(chunk), payload=9_999))
        assert received.credit_bytes == 0
        assert not received.taken()
    assert ours.failure is None
    assert ours.next_frame() is None


def test_a_ping_among_the_data_gives_its_credit_back_by_itself() -> None:
    left, right = pair()
    for nonce in range(300):
        left.send(Ping(nonce=nonce, padding=bytes(1_000)), priority=Priority.NORMAL)
        assert carry(left, right) == []
        assert [one.message for one in carry(right, left)] == [Pong(nonce=nonce)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.sampled_from(list(Priority)), st.integers(0, 100_000)),
            st.tuples(st.just("read"), st.just(Priority.CONTROL), st.integers(1, 4)),
            st.tuples(st.just("move"), st.just(Priority.CONTROL), st.integers(1, 40)),
        ),
        max_size=60,
    )
)
def test_whatever_the_order_nothing_is_lost_nothing_stays_stuck_and_what_waits_is_bounded(
    steps: list[tuple[str, Priority, int]],
) -> None:
    left, right = pair()
    sent = 0
    waiting: list[Received] = []
    read: list[Received] = []

    def move(frames: int) -> int:
        moved = 0
        for _ in range(frames):
            for sender, receiver, into in ((left, right, waiting), (right, left, [])):
                if (data := sender.next_frame()) is not None:
                    into += receiver.receive(data)
                    moved += 1
        assert left.failure is None, left.failure
        assert right.failure is None, right.failure
        held = sum(one.credit_bytes for one in waiting)
        assert held <= WINDOW + 3 * (100_000 + 1_000)
        return moved

    def take(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            waiting[0].taken()
            read.append(waiting.pop(0))

    for what, priority, amount in steps:
        if what == "send":
            left.send(ModelChunk(digest="d", file="f", offset=sent), [bytes(amount)], priority)
            sent += 1
        elif what == "read":
            take(amount)
        else:
            move(amount)
    while move(10) or waiting:
        take(3)
    assert sorted(one.message.offset for one in read if isinstance(one.message, ModelChunk)) == list(range(sent))
    assert left.queued_bytes == 0
