"""Ours against split/wire/vectors.json, which a script without a line of ours has written from PROTOCOL.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import split.wire
from scripts import wire_vectors
from split.errors import CompanionRefused
from split.wire.connection import Received, WireConnection
from split.wire.greeting import VersionMismatch
from split.wire.limits import Limits
from split.wire.messages import Hello

TEXT = (Path(split.wire.__path__[0]) / "vectors.json").read_text()
FILE = json.loads(TEXT)
VECTORS: list[dict[str, Any]] = FILE["vectors"]
NUMBERS = range(len(VECTORS))


def joined(parts: list[Any]) -> bytes:
    return b"".join(bytes.fromhex(one) if isinstance(one, str) else bytes.fromhex(one[0]) * one[1] for one in parts)


def plain(value: Any) -> Any:
    """Expected fields as MessagePack has them."""
    if isinstance(value, dict):
        return joined(value["bytes"]) if value.keys() == {"bytes"} else {key: plain(one) for key, one in value.items()}
    return value


def fields_of(message: msgspec.Struct) -> dict[str, Any]:
    """Tag and all fields that differ from their default."""
    defaults = {one.name: one.default for one in msgspec.structs.fields(message)}
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return {name: json_like(one) for name, one in fields.items() if one != defaults.get(name, msgspec.NODEFAULT)}


def json_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: json_like(one) for key, one in value.items()}
    return [json_like(one) for one in value] if isinstance(value, list | tuple) else value


def receiver_of(vector: dict[str, Any]) -> WireConnection:
    ours = FILE["receiver"] | vector.get("receiver", {})
    limits = Limits(max_message_bytes=ours["max_message_bytes"])
    connection = WireConnection(Hello(major=1, agent="ours", runtime="none", codecs=("raw",), **ours), limits=limits)
    if not vector.get("early", False):
        assert [one["t"] for one in messages_sent(connection)] == ["hello"]
    return connection


def messages_sent(connection: WireConnection) -> list[dict[str, Any]]:
    """What waits to be sent, but for grants; all of it is small enough for one frame each."""
    return [msgspec.msgpack.decode(one[20:]) for one in connection.data_to_send(2**30) if one[0] == 1]


def check(vector: dict[str, Any], connection: WireConnection, received: Iterable[Received]) -> None:
    found = [(fields_of(one.message), bytes(one.payload)) for one in received]
    assert found == [(plain(one["message"]), joined(one["payload"])) for one in vector.get("events", [])]
    hello = vector.get("hello", FILE["hello"])
    assert (fields_of(connection.peer_hello) if connection.peer_hello is not None else {}) == hello
    assert connection.invalid_messages == vector.get("invalid", 0)
    match connection.failure:
        case None:
            assert "error" not in vector
            assert "refused" not in vector
        case CompanionRefused() as why:
            assert why.code == vector["refused"]
        case VersionMismatch():
            assert vector["error"] == "VERSION_MISMATCH"
        case _:
            assert vector["error"] == "PROTOCOL_ERROR"
    sent = messages_sent(connection)
    if vector.get("early", False):
        assert sent.pop(0)["t"] == "hello", "ours goes before all answers"
    if "error" in vector:
        assert (sent[-1]["t"], sent[-1]["code"]) == ("refused", vector["error"])
    elif "refused" not in vector:
        assert sent == [plain(one) for one in vector.get("answers", [])]


def test_there_are_two_hundred_and_the_script_wrote_them() -> None:
    assert len(VECTORS) >= 200
    assert wire_vectors.document() == TEXT


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: VECTORS[number]["name"])
def test_each_vector_means_what_it_says_whole_and_in_pieces(number: int) -> None:
    vector = VECTORS[number]
    data = joined(vector["stream"])
    for step in (len(data) or 1, 1, 20, 4_099):
        connection = receiver_of(vector)
        received: list[Received] = []
        for at in range(0, len(data), step):
            received += connection.receive(data[at : at + step])
        check(vector, connection, received)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: VECTORS[number]["name"])
def test_each_vector_means_the_same_through_the_buffers_of_a_transport(number: int) -> None:
    vector = VECTORS[number]
    data = memoryview(joined(vector["stream"]))
    for most in (2**20, 5_000):
        connection = receiver_of(vector)
        received: list[Received] = []
        at = 0
        while at < len(data):
            place = connection.get_buffer()
            count = min(len(place), most, len(data) - at)
            place[:count] = data[at : at + count]
            received += connection.buffer_updated(count)
            at += count
        check(vector, connection, received)
