"""Two connections in a room, and one connection against hand-made bytes."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from split.errors import CompanionRefused, ConnectionLost, LocalProtocolError, Overloaded, RemoteProtocolError, TooLarge
from split.wire.arriving import Arriving
from split.wire.connection import Received, WireConnection
from split.wire.frames import FrameHeader, FrameKind
from split.wire.greeting import VersionMismatch
from split.wire.limits import KIB, MIB, Limits
from split.wire.messages import (
    Cancel,
    Goodbye,
    Hello,
    Infer,
    Message,
    ModelChunk,
    Ping,
    Pong,
    Priority,
    Refused,
    Reply,
    SegmentReady,
)

SMALL_FRAMES = Limits(frame_bytes=64)


def hello(**fields: Any) -> Hello:
    known: dict[str, Any] = {"major": 1, "minor": 0, "agent": "test", "runtime": "none", "codecs": ("raw",)}
    return Hello(**(known | {"max_message_bytes": 256 * MIB} | fields))


def infer(request_id: str, attempt: int = 1) -> Infer:
    return Infer(request_id=request_id, attempt=attempt, digest="d", cut="c", codec="raw", budget_ms=5.0)


def drain(connection: WireConnection) -> list[bytes]:
    return connection.data_to_send(2**40)


def pair(limits: Limits = SMALL_FRAMES, **fields: Any) -> tuple[WireConnection, WireConnection]:
    """Two connections whose Hellos are exchanged."""
    left, right = WireConnection(hello(**fields), limits=limits), WireConnection(hello(**fields), limits=limits)
    for frame in drain(left):
        right.receive(frame)
    for frame in drain(right):
        left.receive(frame)
    return left, right


def frame(kind: int, number: int, body: bytes, *, priority: int = 2, metadata: int = 0, payload: int = 0) -> bytes:
    """A frame by hand, as PROTOCOL.md §2 has it."""
    fields = ((kind, 1), (priority, 1), (0, 2), (number, 4), (len(body), 4), (metadata, 4), (payload, 4))
    return b"".join(value.to_bytes(width, "little") for value, width in fields) + body


def message_bytes(number: int, fields: dict[str, Any], payload: bytes = b"", *, priority: int = 2) -> bytes:
    metadata = msgspec.msgpack.encode(fields)
    return frame(1, number, metadata + payload, priority=priority, metadata=len(metadata), payload=len(payload))


HELLO_FIELDS: dict[str, Any] = {
    "t": "hello",
    "major": 1,
    "minor": 0,
    "agent": "a",
    "runtime": "r",
    "max_message_bytes": 2**20,
    "codecs": ["raw"],
}
HELLO_BYTES = message_bytes(1, HELLO_FIELDS, priority=0)


def plain(received: Sequence[Received]) -> list[tuple[Message, bytes]]:
    return [(one.message, bytes(one.payload)) for one in received]


def feed_as_transport(connection: WireConnection, data: bytes, cuts: Sequence[int]) -> list[tuple[Message, bytes]]:
    """Feed `data` by get_buffer/buffer_updated, no more than the next of `cuts` (repeated) at a time."""
    out: list[tuple[Message, bytes]] = []
    at = step = 0
    while at < len(data):
        place = connection.get_buffer()
        count = min(len(place), cuts[step % len(cuts)], len(data) - at)
        place[:count] = data[at : at + count]
        out += plain(connection.buffer_updated(count))
        at += count
        step += 1
    return out


# ---- Hello


def test_the_first_frame_of_a_connection_is_its_hello() -> None:
    (first,) = drain(WireConnection(hello(agent="isthmus 9")))
    assert first[:2] == b"\x01\x00"
    assert msgspec.msgpack.decode(first[20:])["agent"] == "isthmus 9"


def test_both_sides_know_each_other_after_the_hellos() -> None:
    left, right = pair(models=("sha256:aa",))
    assert left.peer_hello == right.peer_hello == hello(models=("sha256:aa",))


def test_a_hello_of_a_later_minor_version_with_new_fields_is_taken() -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, HELLO_FIELDS | {"minor": 7, "dance": True}, priority=0))
    assert connection.peer_hello is not None
    assert connection.peer_hello.minor == 7


def test_another_major_version_is_refused_by_name_even_when_nothing_else_of_its_hello_is_known() -> None:
    connection = WireConnection(hello())
    drain(connection)
    connection.receive(message_bytes(1, {"t": "hello", "major": 2, "whatever": 1}, priority=0))
    assert isinstance(connection.failure, VersionMismatch)
    assert "speaks wire protocol 2, this side speaks 1" in str(connection.failure)
    (last,) = drain(connection)
    assert msgspec.msgpack.decode(last[20:])["code"] == "VERSION_MISMATCH"


def test_anything_before_the_hello_is_refused() -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, {"t": "ping", "nonce": 1}))
    assert "first message must be a Hello, got Ping" in str(connection.failure)


def test_a_first_message_larger_than_a_hello_is_refused_by_its_header_alone() -> None:
    connection = WireConnection(hello())
    connection.receive(frame(1, 1, b"x", metadata=64 * KIB + 1)[:20])
    assert "a Hello has at most 65536 bytes" in str(connection.failure)


def test_a_hello_nested_too_deeply_is_refused_like_any_other_nonsense() -> None:
    fields = msgspec.msgpack.encode(HELLO_FIELDS)
    metadata = bytes([fields[0] + 1]) + fields[1:] + b"\xa1x" + b"\x91" * 60_000 + b"\xc0"  # one field more: "x": [[[…
    connection = WireConnection(hello())
    assert connection.receive(frame(1, 1, metadata, metadata=len(metadata))) == []
    assert isinstance(connection.failure, RemoteProtocolError)


def test_a_refusal_in_place_of_a_hello_is_the_peers_typed_reason() -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, {"t": "refused", "code": "OVERLOADED", "message": "full"}))
    assert isinstance(connection.failure, CompanionRefused)
    assert connection.failure.code == "OVERLOADED"
    with pytest.raises(ConnectionLost, match="full"):
        connection.send(Cancel(request_id="a", attempt=1))


@pytest.mark.parametrize("size", [-1, 0, 64 * KIB - 1, 2**32])
def test_a_hello_with_an_impossible_message_size_is_refused(size: int) -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, HELLO_FIELDS | {"max_message_bytes": size}, priority=0))
    assert "max_message_bytes must be" in str(connection.failure)


def test_a_companion_sends_nothing_before_the_devices_hello() -> None:
    with pytest.raises(LocalProtocolError, match="once the peer's Hello was received"):
        WireConnection(hello()).send(infer("a"))


def test_a_device_sends_64_kib_behind_its_hello_to_the_byte_and_the_rest_after_the_companions() -> None:
    device, companion = WireConnection(hello(), dials=True), WireConnection(hello())
    metadata_bytes = len(drain_one(infer("a")))
    device.send(infer("a"), [bytes(64 * KIB - 2 * 512 - 2 * metadata_bytes)])
    with pytest.raises(LocalProtocolError, match=r"65536 bytes may be sent, .* and Infer costs"):
        device.send(infer("b"), [b"x"])
    device.send(infer("b"))
    with pytest.raises(LocalProtocolError, match="before the companion's Hello"):
        device.send(Cancel(request_id="a", attempt=1), priority=Priority.CONTROL)
    received = companion.receive(b"".join(drain(device)))
    assert [one.message for one in received] == [infer("a"), infer("b")]
    assert device.receive(b"".join(drain(companion))) == []
    device.send(infer("c"), [bytes(64 * KIB)])
    assert [one.message for one in companion.receive(b"".join(drain(device)))] == [infer("c")]
    assert companion.failure is None


def drain_one(message: Message) -> bytes:
    """Metadata as msgspec alone makes it."""
    return msgspec.msgpack.encode(message)


def test_what_went_early_counts_against_the_credit_that_the_companions_hello_gives() -> None:
    device = WireConnection(hello(), dials=True)
    device.send(infer("a"), [bytes(60_000)])
    drain(device)
    device.receive(message_bytes(1, HELLO_FIELDS | {"window_bytes": 64 * KIB}, priority=0))
    device.send(infer("b"), [bytes(60_000)])
    left = 64 * KIB - (512 + len(drain_one(infer("a"))) + 60_000) - 512
    assert sum(len(frame) - 20 for frame in drain(device)) == left
    assert device.blocked


SESSION = "0123456789abcdef" * 2


@pytest.mark.parametrize("lane", ["urgent", "bulk"])
def test_a_hello_may_name_a_session_and_its_lane(lane: str) -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, HELLO_FIELDS | {"session": SESSION, "lane": lane}, priority=0))
    assert connection.peer_hello is not None
    assert (connection.peer_hello.session, connection.peer_hello.lane) == (SESSION, lane)


@pytest.mark.parametrize(
    ("session", "lane", "said"),
    [
        (SESSION, "", "a session and one of its lanes"),
        ("", "bulk", "a session and one of its lanes"),
        (SESSION, "fast", "a session and one of its lanes"),
        (SESSION[1:], "bulk", "32 hex digits"),
        (SESSION + "\n", "bulk", "32 hex digits"),
        ("../" + SESSION[3:], "urgent", "32 hex digits"),
    ],
)
def test_a_session_without_lane_or_of_another_form_is_refused(session: str, lane: str, said: str) -> None:
    connection = WireConnection(hello())
    connection.receive(message_bytes(1, HELLO_FIELDS | {"session": session, "lane": lane}, priority=0))
    assert said in str(connection.failure)


# ---- messages


@given(
    st.lists(st.tuples(st.binary(max_size=20_000), st.sampled_from(Priority)), min_size=1, max_size=6),
    st.integers(21, 9_000),
    st.lists(st.integers(1, 12_000), min_size=1, max_size=8),
    st.booleans(),
)
def test_any_fragmentation_parses_to_what_was_sent(
    payloads: list[tuple[bytes, Priority]], frame_bytes: int, cuts: list[int], by_buffer: bool
) -> None:
    left, right = pair(Limits(frame_bytes=frame_bytes))
    for index, (payload, priority) in enumerate(payloads):
        left.send(infer(str(index)), [payload[: len(payload) // 3], payload[len(payload) // 3 :]], priority)
    data = b"".join(drain(left))
    if by_buffer:
        received = feed_as_transport(right, data, cuts)
    else:
        received, at, step = [], 0, 0
        while at < len(data):
            received += plain(right.receive(data[at : at + cuts[step % len(cuts)]]))
            at += cuts[step % len(cuts)]
            step += 1
    assert right.failure is None
    expected = sorted(enumerate(payloads), key=lambda entry: entry[1][1])
    assert received == [(infer(str(index)), payload) for index, (payload, _) in expected]


def test_bytes_one_by_one_and_with_a_tail_parse_as_the_whole() -> None:
    data = HELLO_BYTES + message_bytes(2, {"t": "model-chunk", "digest": "d", "file": "f", "offset": 0}, b"payload")
    tail = message_bytes(3, {"t": "pong", "nonce": 1})
    expected = [(ModelChunk(digest="d", file="f", offset=0), b"payload")]
    whole, single, tailed = (WireConnection(hello()) for _ in range(3))
    assert plain(whole.receive(data)) == expected
    assert [one for byte in data for one in plain(single.receive(bytes([byte])))] == expected
    assert plain(tailed.receive(data + tail[:-1])) == expected
    assert plain(tailed.receive(tail[-1:])) == [(Pong(nonce=1), b"")]


def test_a_received_payload_is_not_overwritten_by_what_comes_later() -> None:
    left, right = pair(Limits(frame_bytes=8 * KIB))
    for letter in (b"a", b"b"):
        left.send(infer(letter.decode()), [letter * 30_000])
    received = feed_as_transport(right, b"".join(drain(left)), [7_000])
    assert [payload for _, payload in received] == [b"a" * 30_000, b"b" * 30_000]


def test_a_payload_arrives_mostly_in_its_own_place() -> None:
    left, right = pair(Limits(frame_bytes=64 * KIB))
    left.send(infer("a"), [bytes(500_000)])
    data = b"".join(drain(left))
    right.receive(data[:30_000])
    place = right.get_buffer()
    in_first_frame = 64 * KIB - 30_000
    assert len(place) == in_first_frame + 20, "the rest of this frame's body and the next header, in one read"


# ---- priority


def test_what_is_urgent_overtakes_what_is_under_way_and_equals_keep_their_order() -> None:
    left, right = pair(SMALL_FRAMES)
    left.send(infer("big"), [bytes(500)], Priority.BULK)
    first = left.next_frame()
    left.send(infer("normal 1"), [bytes(100)], Priority.NORMAL)
    left.send(infer("normal 2"), [], Priority.NORMAL)
    left.send(infer("urgent"), [], Priority.URGENT)
    left.send(Cancel(request_id="x", attempt=1), priority=Priority.CONTROL)
    assert first is not None
    order = [
        one.message.request_id if isinstance(one.message, Infer) else "cancel"
        for data in [first, *drain(left)]
        for one in right.receive(data)
    ]
    assert order == ["cancel", "urgent", "normal 1", "normal 2", "big"]


def test_a_request_of_the_lowest_priority_waits_for_no_piece_of_a_model_but_the_one_that_has_begun() -> None:
    left, right = pair()
    pieces = [ModelChunk(digest="d", file="f", offset=at) for at in (0, 100, 200)]
    for piece in pieces[:2]:
        left.send(piece, [bytes(100)], priority=Priority.BULK)
    first = left.next_frame()  # the first piece is under way
    assert first is not None
    for request in (infer("1"), infer("2")):
        left.send(request, [bytes(100)], priority=Priority.BULK)
    left.send(pieces[2], [bytes(100)], priority=Priority.BULK)
    left.send(infer("3"), [bytes(100)], priority=Priority.BULK)
    received = right.receive(b"".join([first, *drain(left)]))
    assert [one.message for one in received] == [
        pieces[0], infer("1"), infer("2"), infer("3"), pieces[1], pieces[2],
    ]  # fmt: skip


def test_what_is_received_says_with_which_priority_it_was_sent() -> None:
    left, right = pair()
    for priority in Priority:
        left.send(infer(priority.name), priority=priority)
    received = right.receive(b"".join(drain(left)))
    assert [one.priority.name for one in received] == [one.message.request_id for one in received]  # type: ignore[union-attr]


def test_data_to_send_stops_at_its_measure_but_gives_at_least_one_frame() -> None:
    left, _ = pair(SMALL_FRAMES)
    left.send(infer("a"), [bytes(1_000)])
    assert [len(data) for data in left.data_to_send(1)] == [64]
    assert [len(data) for data in left.data_to_send(128)] == [64, 64]


def test_the_size_of_frames_may_change_while_a_message_is_under_way() -> None:
    left, right = pair(SMALL_FRAMES)
    left.send(infer("a"), [bytes(5_000)])
    frames = left.data_to_send(1)
    left.frame_bytes = 1_000
    frames += left.data_to_send(1)
    left.frame_bytes = 100
    frames += drain(left)
    assert [len(data) for data in frames[:3]] == [64, 1_000, 100]
    assert [len(one.payload) for data in frames for one in right.receive(data)] == [5_000]


# ---- forget


def test_a_forgotten_message_that_has_not_begun_never_existed() -> None:
    left, right = pair()
    left.send(infer("a"), [bytes(1_000)])
    left.send(infer("b"), [b"b"])
    left.forget("a", 1)
    assert [one.message for data in drain(left) for one in right.receive(data)] == [infer("b")]
    assert left.queued_bytes == 0


def test_a_forgotten_message_under_way_is_reset_and_the_next_one_arrives() -> None:
    left, right = pair()
    left.send(infer("a"), [bytes(1_000)])
    begun = left.data_to_send(200)
    left.forget("a", 1)
    left.send(infer("b"), [b"b"])
    rest = drain(left)
    assert rest[0] == frame(3, 2, b""), "number 2: the Hello was number 1"
    assert [one.message for data in [*begun, *rest] for one in right.receive(data)] == [infer("b")]
    assert right.failure is None


def test_only_the_named_attempt_is_forgotten_and_a_cancel_of_it_still_goes() -> None:
    left, right = pair()
    for attempt in (1, 2):
        left.send(infer("a", attempt))
    left.send(Cancel(request_id="a", attempt=1))
    left.forget("a", 1)
    assert [one.message for data in drain(left) for one in right.receive(data)] == [
        infer("a", 2),
        Cancel(request_id="a", attempt=1),
    ]


# ---- ping


def test_a_ping_is_answered_by_the_connection_itself_before_everything_else() -> None:
    left, right = pair()
    right.send(infer("a"), [bytes(500)])
    left.send(Ping(nonce=2**64 - 1, padding=bytes(1_000)))
    assert [one for data in drain(left) for one in right.receive(data)] == []
    answer = right.next_frame()
    assert answer is not None
    assert [one.message for one in left.receive(answer)] == [Pong(nonce=2**64 - 1)]


def test_a_peer_that_pings_and_never_reads_is_cut_off() -> None:
    connection = WireConnection(hello())
    connection.receive(HELLO_BYTES)
    for number in range(2, 66):
        connection.receive(message_bytes(number, {"t": "ping", "nonce": number}))
    assert connection.failure is None
    connection.receive(message_bytes(66, {"t": "ping", "nonce": 66}))
    assert "64 answers to pings wait" in str(connection.failure)


# ---- bounds


def resident_bytes() -> int:
    """From /proc, so that the kernel says what is taken."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_what_is_only_announced_takes_no_memory() -> None:
    _, right = pair(Limits())
    before = resident_bytes()
    for priority in range(1, 4):
        body = bytes(1000)
        right.receive(frame(1, 10 + priority, body, priority=priority, metadata=500, payload=200 * MIB))
    assert right.failure is None
    assert resident_bytes() - before < 50 * MIB


@pytest.mark.parametrize("by_buffer", [True, False])
def test_a_large_payload_is_whole_although_its_room_grows_while_it_comes(by_buffer: bool) -> None:
    left, right = pair(Limits(frame_bytes=100_000, queue_bytes=64 * MIB))
    payload = bytes(range(251)) * 40_000
    left.send(infer("a"), [payload])
    left.send(infer("b"), [payload[: 2 * MIB]])
    data = b"".join(drain(left))
    if by_buffer:
        received = feed_as_transport(right, data, [70_001])
    else:
        received = [one for at in range(0, len(data), 70_001) for one in plain(right.receive(data[at : at + 70_001]))]
    assert received == [(infer("a"), payload), (infer("b"), payload[: 2 * MIB])]


def test_the_room_for_a_message_is_at_most_four_times_what_came_of_it() -> None:
    arriving = Arriving(FrameHeader(FrameKind.BEGIN, 2, 2, 0, 10, 200 * MIB))
    while arriving.filled < 20 * MIB:
        arriving.make_room(200_000)
        _, take = arriving.place(200_000)
        arriving.filled += take
        room = arriving.room_bytes - 30  # of the metadata
        assert len(arriving.payload) <= room <= max(MIB, 4 * arriving.filled) + 20


def test_of_a_message_larger_than_the_heap_keeps_only_what_came_takes_memory() -> None:
    before = resident_bytes()
    arriving = Arriving(FrameHeader(FrameKind.BEGIN, 2, 2, 0, 10, 250 * MIB))
    while arriving.filled < 40 * MIB:
        arriving.make_room(200_000)
        place, take = arriving.place(200_000)
        place[:take] = bytes(take)
        arriving.filled += take
    assert resident_bytes() - before < 80 * MIB
    assert arriving.room_bytes < 41 * MIB
    assert len(arriving.payload) == arriving.filled - 10


def test_a_payload_of_forty_megabytes_is_whole() -> None:
    left, right = pair(Limits(frame_bytes=256 * KIB, queue_bytes=64 * MIB))
    payload = bytes(range(251)) * 160_000
    left.send(infer("a"), [payload])
    (received,) = feed_as_transport(right, b"".join(drain(left)), [300_001])
    assert received == (infer("a"), payload)


def test_no_memory_for_a_payload_is_told_the_peer_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    _, right = pair(Limits())

    def scarce(size: int) -> bytearray:
        if size > 100_000:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr("split.wire.arriving.bytearray", scarce, raising=False)
    assert right.receive(frame(1, 9, bytes(1_000), metadata=500, payload=MIB)) == []
    assert "no memory here for 1048576 bytes of message 9" in str(right.failure)


def test_a_full_queue_says_overloaded_but_takes_control_messages() -> None:
    left, _ = pair(Limits(queue_bytes=10_000))
    left.send(infer("a"), [bytes(9_000)])
    with pytest.raises(Overloaded, match="the bound is 10000"):
        left.send(infer("b"), [bytes(2_000)])
    left.send(Cancel(request_id="a", attempt=1), priority=Priority.CONTROL)
    drain(left)
    left.send(infer("b"), [bytes(2_000)])


def test_control_messages_are_taken_and_go_first_however_much_data_waits() -> None:
    left, right = pair(Limits(queue_bytes=10_000, frame_bytes=64))
    left.send(infer("a"), [bytes(20 * MIB)])  # alone, so taken although it is far over the bound
    (begun,) = left.data_to_send(1)
    left.send(Ping(nonce=1), priority=Priority.CONTROL)
    left.send(Cancel(request_id="b", attempt=1), priority=Priority.CONTROL)
    left.send(Goodbye(reason="done"), priority=Priority.CONTROL)
    right.receive(begun)
    received = [one.message for _ in range(4) for data in left.data_to_send(1) for one in right.receive(data)]
    assert received == [Cancel(request_id="b", attempt=1), Goodbye(reason="done")]
    assert left.receive(right.next_frame() or b"")[0].message == Pong(nonce=1)


def test_control_messages_have_a_bound_of_their_own_in_bytes() -> None:
    left, _ = pair(Limits(queue_bytes=10_000))
    left.send(infer("a"), [bytes(9_000)])
    for _ in range(2):
        left.send(Ping(nonce=1, padding=bytes(MIB - 1000)), priority=Priority.CONTROL)
    with pytest.raises(Overloaded, match=f"control messages wait for the link already, the bound is {2 * MIB}"):
        left.send(Ping(nonce=1, padding=bytes(2000)), priority=Priority.CONTROL)
    deque(left.data_to_send(MIB))
    left.send(Ping(nonce=1, padding=bytes(2000)), priority=Priority.CONTROL)
    with pytest.raises(Overloaded):
        left.send(infer("b"), [bytes(2_000)])


def test_a_large_message_goes_alone_although_a_control_message_waits() -> None:
    left, _ = pair(Limits(queue_bytes=10_000))
    left.send(Ping(nonce=1), priority=Priority.CONTROL)
    left.send(infer("a"), [bytes(50_000)])
    assert left.queued_bytes > 50_000


def test_one_message_larger_than_the_queue_goes_when_it_is_alone() -> None:
    left, right = pair(Limits(queue_bytes=10_000))
    left.send(infer("a"), [bytes(50_000)])
    assert sum(len(one.payload) for data in drain(left) for one in right.receive(data)) == 50_000


def test_empty_messages_fill_the_queue_too() -> None:
    left, _ = pair(Limits(queue_bytes=100_000))
    for index in range(100):
        left.send(infer(str(index)))
    with pytest.raises(Overloaded):
        deque(map(left.send, [infer("more")] * 900))


def test_what_the_peer_does_not_take_is_too_large_here_already() -> None:
    left, _ = pair(max_message_bytes=64 * KIB)
    with pytest.raises(TooLarge, match="the peer takes at most 65536"):
        left.send(infer("a"), [bytes(64 * KIB)])


def test_metadata_over_its_bound_is_too_large() -> None:
    left, _ = pair()
    with pytest.raises(TooLarge, match="metadata of SegmentReady may have 1048576 bytes"):
        left.send(SegmentReady(digest="d", cut="c", golden=bytes(MIB), tail_ms=1.0))


def test_a_message_without_payload_takes_none() -> None:
    left, _ = pair()
    with pytest.raises(LocalProtocolError, match="Goodbye carries no payload"):
        left.send(Goodbye(reason="x"), [b"y"])
    with pytest.raises(LocalProtocolError, match="one Hello"):
        left.send(hello())


# ---- malformed

INFER = {"t": "infer", "request_id": "a", "attempt": 1, "digest": "d", "cut": "c", "codec": "raw", "budget_ms": 1.0}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "frame kind must be"),
        (bytes(20), "frame kind must be 1 to 3 or at least 128, got 0"),
        (HELLO_BYTES, "message numbers must rise, 1 came after 1"),
        (message_bytes(2, HELLO_FIELDS), "a second Hello"),
        (frame(1, 2, b"", metadata=5), "message 2 lacks 5 bytes, a frame brings 0"),
        (frame(1, 2, b"123456", metadata=5), "message 2 lacks 5 bytes, a frame brings 6"),
        (frame(2, 2, b"x"), "names message 2 of priority 2, which is not under way"),
        (frame(3, 2, b""), "names message 2 of priority 2, which is not under way"),
        (frame(1, 2, b"x", metadata=5) + frame(2, 3, b"x"), "names message 3"),
        (frame(1, 2, b"x", metadata=5) + frame(2, 2, b"x", priority=1), "names message 2 of priority 1"),
        (frame(1, 2, b"x", metadata=5) + frame(2, 2, b"12345"), "message 2 lacks 4 bytes, a frame brings 5"),
        (frame(1, 2, b"x", metadata=5) + frame(1, 3, b"x", metadata=5), "begins while 2 of the same priority"),
        (frame(1, 2, b"x", metadata=5) + frame(3, 2, b"") + frame(2, 2, b"x"), "not under way"),
        (frame(1, 2, b"x", metadata=1, payload=256 * MIB), "messages may have 268435456 bytes"),
        (message_bytes(2, {"t": "pong", "nonce": 1}, b"x"), "Pong carries no payload, this one has 1 bytes"),
        (message_bytes(2, {"t": "refused", "code": "PROTOCOL_ERROR", "message": "you lie"}), "you lie"),
    ],
)
def test_what_breaks_the_protocol_is_named_and_nothing_after_it_is_understood(data: bytes, said: str) -> None:
    whole, single = WireConnection(hello()), WireConnection(hello())
    good = message_bytes(9, INFER, b"later")
    assert plain(whole.receive(HELLO_BYTES + data + good)) == []
    assert [one for byte in HELLO_BYTES + data + good for one in single.receive(bytes([byte]))] == []
    for connection in (whole, single):
        assert said in str(connection.failure)
        assert connection.receive(good) == []
        with pytest.raises(ConnectionLost):
            connection.send(Cancel(request_id="a", attempt=1))


@pytest.mark.parametrize(
    "fields", [{"t": "unheard-of"}, {"t": "infer"}, INFER | {"attempt": "one"}, [1], INFER | {"encoded": {"x": 1}}]
)
def test_an_invalid_message_is_dropped_with_its_payload_and_the_next_one_is_understood(fields: Any) -> None:
    connection = WireConnection(hello())
    received = connection.receive(
        HELLO_BYTES + message_bytes(2, fields, bytes(1_000)) + message_bytes(3, INFER, b"good")
    )
    assert [bytes(one.payload) for one in received] == [b"good"]
    assert (connection.failure, connection.invalid_messages) == (None, 1)
    assert "no message of this protocol" in connection.last_invalid


def test_after_4096_invalid_messages_one_more_ends_the_connection() -> None:
    connection = WireConnection(hello())
    connection.next_frame()
    connection.receive(HELLO_BYTES)
    for number in range(2, 4_098):
        connection.receive(message_bytes(number, {"t": "unheard-of"}))
    assert connection.failure is None
    connection.receive(message_bytes(5_000, {"t": "unheard-of"}))
    assert "more than 4096 messages of this connection made no sense" in str(connection.failure)


def test_messages_before_the_error_in_the_same_bytes_are_still_received() -> None:
    connection = WireConnection(hello())
    received = connection.receive(HELLO_BYTES + message_bytes(2, INFER, b"good") + bytes(20))
    assert [bytes(one.payload) for one in received] == [b"good"]
    assert isinstance(connection.failure, RemoteProtocolError)


def test_after_an_error_the_peer_is_told_the_reason_and_nothing_else() -> None:
    connection = WireConnection(hello(), limits=SMALL_FRAMES)
    connection.receive(HELLO_BYTES)
    drain(connection)
    connection.send(infer("a"), [bytes(1_000)])
    connection.data_to_send(100)
    connection.receive(bytes(20))
    other = WireConnection(hello())
    for data in [HELLO_BYTES, *drain(connection)]:
        other.receive(data)
    assert isinstance(other.failure, CompanionRefused)
    assert other.failure.code == "PROTOCOL_ERROR"
    assert "frame kind" in str(other.failure)


def test_an_error_about_a_megabyte_is_told_in_a_short_sentence() -> None:
    connection = WireConnection(hello())
    connection.receive(HELLO_BYTES)
    drain(connection)
    metadata = msgspec.msgpack.encode({"t": "x" * 200_000})
    for number in range(2, 4_099):
        connection.receive(frame(1, number, metadata, metadata=len(metadata)))
    assert "no message of this protocol" in str(connection.failure)
    (last,) = drain(connection)
    assert len(last) < 4_200


def test_a_ping_is_answered_and_an_error_is_told_although_the_queue_is_full() -> None:
    connection = WireConnection(hello(), limits=Limits(queue_bytes=1))
    connection.receive(message_bytes(1, HELLO_FIELDS | {"max_message_bytes": 2**30}, priority=0))
    drain(connection)
    connection.send(infer("a"), [bytes(8 * MIB)])
    connection.receive(message_bytes(2, {"t": "ping", "nonce": 1}))
    connection.receive(bytes(20))
    tags = [msgspec.msgpack.decode(data[20:])["t"] for data in drain(connection)]
    assert tags == ["refused"], "the pong had not begun and is taken back with the rest"


def test_a_refusal_that_names_a_request_is_an_ordinary_message() -> None:
    left, right = pair()
    refused = Refused(code="PLAN_MISMATCH", message="no", request_id="a", attempt=1)
    left.send(refused)
    assert [one.message for data in drain(left) for one in right.receive(data)] == [refused]
    assert right.failure is None


def test_frames_of_unknown_skippable_kinds_are_skipped_anywhere_between_frames() -> None:
    connection = WireConnection(hello())
    metadata = msgspec.msgpack.encode(INFER)
    data = (
        frame(130, 0, b"?" * 300)
        + HELLO_BYTES
        + frame(1, 2, metadata + b"pay", metadata=len(metadata), payload=7)
        + frame(128, 77, bytes(8))
        + frame(2, 2, b"load")
    )
    assert [bytes(one.payload) for one in connection.receive(data)] == [b"payload"]


@given(st.binary(max_size=300))
def test_garbage_never_raises_and_never_makes_a_message_out_of_nothing(garbage: bytes) -> None:
    connection = WireConnection(hello())
    assert connection.receive(garbage) == []


@given(st.integers(0, 400), st.integers(0, 255), st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_one_changed_byte_gives_the_same_result_whole_and_in_pieces(at: int, value: int, cuts: list[int]) -> None:
    data = bytearray(HELLO_BYTES + message_bytes(2, INFER, bytes(100)) + message_bytes(3, {"t": "pong", "nonce": 1}))
    data[at % len(data)] = value
    whole, pieces = WireConnection(hello()), WireConnection(hello())
    assert feed_as_transport(pieces, bytes(data), cuts) == plain(whole.receive(bytes(data)))
    assert str(pieces.failure) == str(whole.failure)


def test_a_reply_is_forgotten_like_an_infer() -> None:
    left, right = pair()
    times = {"queue_ms": 0.0, "decode_ms": 0.0, "tail_ms": 0.0, "encode_ms": 0.0, "cloud_ms": 0.0}
    left.send(Reply(request_id="a", attempt=1, cut="c", codec="raw", **times), [b"late"])
    left.forget("a", 1)
    assert drain(left) == []
    assert right.failure is None
