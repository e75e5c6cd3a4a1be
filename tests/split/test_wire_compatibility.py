"""The rule of PROTOCOL.md §9: this version with a peer of 1.7, with all that a version may add, and with one of 1.0.

Both peers are made of bytes written by hand; what ours sends them is read with nothing of ours.
"""

from __future__ import annotations

from typing import Any

import msgspec

from scripts.wire_vectors import HELLO, credit, frame, message
from split.wire.connection import WireConnection
from split.wire.limits import MIB, Limits
from split.wire.messages import Cancel, Hello, Infer, ModelChunk, ModelNeed, ModelOffer, Priority, Refused, Reply

LATER = HELLO | {"minor": 7, "codecs": ["raw", "int3", "neural"], "dance": {"a": [1, None]}, "window_bytes": 1 << 20}
TIMES = {"queue_ms": 0.0, "decode_ms": 0.0, "tail_ms": 1, "encode_ms": 0.0, "cloud_ms": 2.5}


def ours(**fields: Any) -> WireConnection:
    known: dict[str, Any] = {"major": 1, "minor": 1, "agent": "ours", "runtime": "none", "codecs": ("raw", "int8")}
    window = {"max_message_bytes": 16 * MIB, "window_bytes": MIB}
    return WireConnection(
        Hello(**(known | window | fields)), limits=Limits(max_message_bytes=16 * MIB, queue_bytes=MIB * 64)
    )


def infer(request_id: str) -> Infer:
    return Infer(request_id=request_id, attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)


def frames_of(connection: WireConnection) -> list[tuple[int, dict[str, Any]]]:
    """Kind and, of a BEGIN whose message is whole in it, the metadata."""
    return [
        (one[0], msgspec.msgpack.decode(one[20 : 20 + int.from_bytes(one[12:16], "little")]) if one[0] == 1 else {})
        for one in connection.data_to_send(2**30)
    ]


def test_a_peer_of_1_7_with_all_that_a_minor_version_may_add_is_understood() -> None:
    connection = ours()
    stream = message(1, LATER, priority=0)
    for kind in range(129, 256):
        stream += frame(kind, kind, bytes(kind), priority=kind, meta=1, pay=2, reserved=3)
    reply = {"t": "reply", "request_id": "r", "attempt": 1, "cut": "c", "codec": "raw", **TIMES, "watts": 3.5}
    stream += message(2, reply, b"outputs", body_bytes=50)
    stream += message(3, {"t": "refused", "code": "TOO_WARM", "message": "later", "request_id": "q", "retry_ms": 5})
    stream += message(4, {"t": "goodbye", "reason": "x", "where_to": ["elsewhere"]}, priority=0)
    received = connection.receive(stream)
    assert connection.failure is None
    assert connection.invalid_messages == 0
    assert connection.peer_hello is not None
    assert (connection.peer_hello.minor, connection.peer_hello.codecs) == (7, ("raw", "int3", "neural"))
    first, second, _ = (one.message for one in received)
    assert isinstance(first, Reply)
    assert (first.cloud_ms, bytes(received[0].payload)) == (2.5, b"outputs")
    assert isinstance(second, Refused)
    assert second.code == "TOO_WARM"


def test_a_message_of_1_7_that_was_sent_against_the_rule_costs_itself_alone() -> None:
    connection = ours()
    connection.receive(message(1, LATER, priority=0))
    stream = message(2, {"t": "telemetry", "values": [1.5] * 9}, b"blob") + message(3, {"t": "pong", "nonce": 1})
    assert len(connection.receive(stream)) == 1
    assert (connection.failure, connection.invalid_messages) == (None, 1)


def test_to_a_peer_of_1_7_only_what_1_1_has_is_sent() -> None:
    connection = ours()
    connection.receive(message(1, LATER, priority=0) + credit(2**40))
    connection.send(infer("a"), [bytes(100)])
    connection.send(Cancel(request_id="a", attempt=1), priority=Priority.CONTROL)
    connection.receive(message(2, {"t": "ping", "nonce": 4, "padding": b"", "hop": 1}))
    sent = frames_of(connection)
    assert {kind for kind, _ in sent} <= {1, 2, 3, 128}
    assert {fields["t"] for _, fields in sent if fields} == {"hello", "infer", "cancel", "pong"}


class HelloOf10(msgspec.Struct, tag="hello", tag_field="t"):
    """As 1.0 had it."""

    major: int
    minor: int
    agent: str
    runtime: str
    max_message_bytes: int
    codecs: tuple[str, ...]
    models: tuple[str, ...] = ()
    image: str = ""
    kernels: dict[str, int] = {}


def test_a_peer_of_1_0_reads_our_hello_and_needs_neither_credit_nor_session() -> None:
    connection = ours(session="0123456789abcdef" * 2, lane="urgent")
    (first,) = connection.data_to_send(2**20)
    assert msgspec.msgpack.decode(first[20:], type=HelloOf10).codecs == ("raw", "int8")
    connection.receive(message(1, HELLO | {"minor": 0}, priority=0))
    assert connection.peer_hello is not None
    assert (connection.peer_hello.session, connection.peer_hello.lane) == ("", "")
    for number in range(40):
        connection.send(infer(str(number)), [bytes(100_000)])
    sent = frames_of(connection)
    assert {kind for kind, _ in sent} == {1, 2}, "no credit, and nothing waits for any"
    assert connection.queued_bytes == 0
    chunk = {"t": "model-chunk", "digest": "d", "file": "f", "offset": 0}
    received = connection.receive(b"".join(message(number, chunk, bytes(100_000)) for number in range(2, 40)))
    assert len(received) == 38, "3.8 MB unread, the window of our Hello is 1 MiB"
    assert not any(one.taken() for one in received)
    assert (connection.failure, connection.next_frame()) == (None, None)


def test_of_what_1_1_added_to_messages_of_1_0_nothing_is_on_the_wire_unless_it_is_used() -> None:
    connection = ours()
    connection.receive(message(1, HELLO | {"minor": 0}, priority=0))
    connection.send(ModelOffer(digest="d", files=(("f", 1, "aa"),)))
    connection.send(ModelNeed(digest="d", missing=(("f", 0),)))
    connection.send(ModelChunk(digest="d", file="f", offset=0, last=True), [b"x"])
    _, offer, need, chunk = (fields for _, fields in frames_of(connection))
    assert set(offer) == {"t", "digest", "files"}
    assert set(need) == {"t", "digest", "missing"}
    assert set(chunk) == {"t", "digest", "file", "offset", "last"}
