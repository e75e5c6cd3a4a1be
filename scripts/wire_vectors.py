"""Write split/wire/vectors.json: bytes of wire protocol v1 and what they mean, said by hand from PROTOCOL.md.

Nothing of the implementation is imported: frames are packed here field by field, MessagePack byte by byte, and what
each stream means stands beside it. `--check` compares with the file instead. The file's format: PROTOCOL.md §12.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "split" / "wire" / "vectors.json"
RECEIVER = {"minor": 1, "max_message_bytes": 1 << 20, "window_bytes": 65_536}
"""What the side that takes the bytes says in its own Hello, where a vector does not say otherwise."""

Fields = dict[str, Any]
vectors: list[Fields] = []


class Raw(bytes):
    """MessagePack as it is, in place of a value."""


def pack(value: Any) -> bytes:
    """MessagePack, each value in its shortest form."""
    match value:
        case Raw():
            return bytes(value)
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            for low, high, mark, code in (
                (0, 0x7F, b"", "B"),
                (-32, -1, b"", "b"),
                (0, 0xFF, b"\xcc", "B"),
                (0, 0xFFFF, b"\xcd", ">H"),
                (0, 2**32 - 1, b"\xce", ">I"),
                (0, 2**64 - 1, b"\xcf", ">Q"),
                (-(2**7), -1, b"\xd0", "b"),
                (-(2**63), -1, b"\xd3", ">q"),
            ):
                if low <= value <= high:
                    return mark + struct.pack(code, value)
            raise ValueError(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            if len(data) < 32:
                return bytes([0xA0 | len(data)]) + data
            return _sized(data, len(data), b"\xd9", b"\xda", b"\xdb")
        case bytes():
            return _sized(value, len(value), b"\xc4", b"\xc5", b"\xc6")
        case list():
            data = b"".join(map(pack, value))
            return bytes([0x90 | len(value)]) + data if len(value) < 16 else _sized(data, len(value), b"", b"\xdc", b"")
        case dict():
            data = b"".join(pack(key) + pack(one) for key, one in value.items())
            return bytes([0x80 | len(value)]) + data if len(value) < 16 else _sized(data, len(value), b"", b"\xde", b"")
    raise TypeError(value)


def _sized(data: bytes, count: int, one: bytes, two: bytes, four: bytes) -> bytes:
    if count < 2**8 and one:
        return one + bytes([count]) + data
    return two + struct.pack(">H", count) + data if count < 2**16 else four + struct.pack(">I", count) + data


def frame(
    kind: int, number: int, body: bytes = b"", *, priority: int = 2, meta: int = 0, pay: int = 0, reserved: int = 0
) -> bytes:
    return struct.pack("<BBHIIII", kind, priority, reserved, number, len(body), meta, pay) + body


def header(kind: int, number: int, body_bytes: int, *, priority: int = 2, meta: int = 0, pay: int = 0) -> bytes:
    """A header that may lie about its body, which is not there."""
    return struct.pack("<BBHIIII", kind, priority, 0, number, body_bytes, meta, pay)


def message(number: int, fields: Any, payload: bytes = b"", *, priority: int = 2, body_bytes: int = 65_516) -> bytes:
    """All frames of one message."""
    metadata = pack(fields)
    whole = metadata + payload
    pieces = [whole[at : at + body_bytes] for at in range(0, len(whole), body_bytes)]
    first = frame(1, number, pieces[0], priority=priority, meta=len(metadata), pay=len(payload))
    return first + b"".join(frame(2, number, piece, priority=priority) for piece in pieces[1:])


def credit(total: int) -> bytes:
    return frame(128, 0, struct.pack("<Q", total), priority=0)


HELLO: Fields = {
    "t": "hello",
    "major": 1,
    "minor": 1,
    "agent": "vectors",
    "runtime": "none",
    "max_message_bytes": 1 << 20,
    "codecs": ["raw"],
}
GREETING = message(1, HELLO, priority=0)


def add(
    name: str,
    *stream: bytes,
    hello: Fields | None = HELLO,
    events: list[tuple[Fields, bytes]] | None = None,
    answers: list[Fields] | None = None,
    invalid: int = 0,
    error: str = "",
    refused: str = "",
    receiver: Fields | None = None,
    early: bool = False,
) -> None:
    """One vector. `stream`: with the peer's Hello in front, unless `hello` is not HELLO and so part of it."""
    data = (GREETING if hello is HELLO else b"") + b"".join(stream)
    vector = {
        "name": name,
        "receiver": receiver,
        "early": early,
        "stream": parts(data),
        "hello": None if hello is HELLO else hello or {},
        "events": [{"message": tagged(fields), "payload": parts(payload)} for fields, payload in events or []],
        "answers": [tagged(one) for one in answers or []],
        "invalid": invalid,
        "error": error,
        "refused": refused,
    }
    vectors.append({key: value for key, value in vector.items() if value or key == "stream" or value == {}})


def parts(data: bytes) -> list[Any]:
    """Bytes as JSON: pieces of hex digits and, for runs of one byte, pairs of its hex digits and how often."""
    found: list[Any] = []
    at = 0
    for run in re.finditer(rb"(.)\1{63,}", data, re.DOTALL):
        found += [data[at : run.start()].hex()] if run.start() > at else []
        found.append([run[1].hex(), len(run[0])])
        at = run.end()
    return found + ([data[at:].hex()] if at < len(data) else [])


def tagged(value: Any) -> Any:
    """Bytes inside a message as JSON."""
    if isinstance(value, bytes):
        return {"bytes": parts(value)}
    return {key: tagged(one) for key, one in value.items()} if isinstance(value, dict) else value


def refuse(name: str, *stream: bytes, **more: Any) -> None:
    add(name, *stream, error="PROTOCOL_ERROR", **more)


# Every message: what must be there, then what has a default (and is given another value here).
MESSAGES: list[tuple[Fields, Fields, bytes]] = [
    (
        {"t": "model-offer", "digest": "sha256:aa", "files": [["model.onnx", 3, "ab"], ["w", 2**40, "cd"]]},
        {"dims": {"n": 4}, "golden": b"\x00\x01", "chunks": b"\xff" * 36},
        b"",
    ),
    ({"t": "model-need", "digest": "sha256:aa", "missing": [["model.onnx", 0]]}, {"lengths": [3]}, b""),
    ({"t": "model-chunk", "digest": "sha256:aa", "file": "model.onnx", "offset": 2**33}, {"last": True}, b"bytes"),
    ({"t": "model-ready", "digest": "sha256:aa", "golden": b"out", "whole_ms": 12.5}, {"image_ms": 0.25}, b""),
    ({"t": "segment-open", "digest": "sha256:aa", "cut": "c1", "node_bitmap": "0f"}, {}, b""),
    ({"t": "segment-ready", "digest": "sha256:aa", "cut": "c1", "golden": b"", "tail_ms": 3.5}, {}, b""),
    (
        {
            "t": "infer",
            "request_id": "r1",
            "attempt": 1,
            "digest": "sha256:aa",
            "cut": "offload",
            "codec": "raw",
            "budget_ms": 99.5,
        },
        {"outputs": ["y", "z"], "encoded": {"x": {"width": 224, "layout": "NCHW"}}, "output_codec": "int8"},
        b"boundary",
    ),
    (
        {
            "t": "reply",
            "request_id": "r1",
            "attempt": 2,
            "cut": "c1",
            "codec": "fp16",
            "queue_ms": 0.0,
            "decode_ms": 0.5,
            "tail_ms": 2.0,
            "encode_ms": 1e-3,
            "cloud_ms": 1e9,
        },
        {},
        b"outputs",
    ),
    (
        {"t": "refused", "code": "OVERLOADED", "message": "später", "request_id": "r1"},
        {"attempt": 3, "digest": "sha256:aa", "cut": "c1"},
        b"",
    ),
    ({"t": "renew", "request": "-----BEGIN CERTIFICATE REQUEST-----"}, {}, b""),
    ({"t": "renewed"}, {"chain": "-----BEGIN CERTIFICATE-----", "message": "no"}, b""),
    ({"t": "cancel", "request_id": "r1", "attempt": 1}, {}, b""),
    ({"t": "pong", "nonce": 2**64 - 1}, {"padding": bytes(70)}, b""),
    ({"t": "pace", "work_ms": 2.5}, {"since_ms": 300.0}, b""),
    ({"t": "goodbye", "reason": "the companion is leaving"}, {}, b""),
]
PING: Fields = {"t": "ping", "nonce": 7}
PONG: Fields = {"t": "pong", "nonce": 7}
CANCEL = MESSAGES[11][0]
INFER = MESSAGES[6][0]
CHUNK: Fields = {"t": "model-chunk", "digest": "d", "file": "f", "offset": 0}
GOOD = message(99, PONG)
"""What must be understood after something that was let fall, and must not after an error."""
GOOD_EVENT: tuple[Fields, bytes] = (PONG, b"")


def without(fields: Fields, name: str) -> Fields:
    return {key: value for key, value in fields.items() if key != name}


def every_message() -> None:
    for known, more, payload in MESSAGES:
        tag = known["t"]
        add(f"{tag} with what must be there", message(2, known, payload), events=[(known, payload)])
        if more:
            add(f"{tag} with everything", message(2, known | more, payload), events=[(known | more, payload)])
        invented = known | {"invented": [1, {"x": None}, 2.5]}
        add(f"{tag} with a field of a later version", message(2, invented, payload), events=[(known, payload)])
        for name in without(known, "t"):
            if (tag, name) == ("refused", "request_id"):
                continue
            nothing = message(2, without(known, name), payload)
            add(f"{tag} without {name} is invalid", nothing, GOOD, events=[GOOD_EVENT], invalid=1)
            wrong = message(2, known | {name: {"a": 1}}, payload)
            add(f"{tag} with a map as {name} is invalid", wrong, GOOD, events=[GOOD_EVENT], invalid=1)
        if not payload:
            refuse(f"{tag} has no payload", message(2, known, b"x"), GOOD)
        else:
            add(f"{tag} without payload", message(2, known), events=[(known, b"")])
    add("ping is answered and no event", message(2, PING, priority=0), answers=[PONG])
    add("ping with padding", message(2, PING | {"padding": bytes(1_000)}), answers=[PONG])
    add("ping with a number as padding is invalid", message(2, PING | {"padding": 4}), invalid=1)
    for asked in (0, 1, 32_768):
        answer = PONG | ({"padding": bytes(asked)} if asked else {})
        add(f"ping for a pong of {asked} bytes", message(2, PING | {"pong_bytes": asked}, priority=0), answers=[answer])
    for asked in (-1, 32_769, 2**32, 2**64 - 1):
        refuse(f"ping for a pong of {asked} bytes", message(2, PING | {"pong_bytes": asked}, priority=0), GOOD)
    add("ping for text as padding of its pong is invalid", message(2, PING | {"pong_bytes": "9"}), invalid=1)
    heavy = b"".join(message(number, PING | {"pong_bytes": 32_768}, priority=0) for number in range(2, 6))
    padded = [PONG | {"padding": bytes(32_768)}] * 4
    add("four pings for much whose answers wait", heavy, answers=padded)
    refuse("a fifth ping for much", heavy, message(6, PING | {"pong_bytes": 32_768}, priority=0), GOOD)
    add("a fifth ping for nothing", heavy, message(6, PING, priority=0), answers=[*padded, PONG])
    refuse("ping has no payload", message(2, PING, b"x"), GOOD)


def hellos() -> None:
    def hello(name: str, fields: Fields, understood: Fields | None = None, **more: Any) -> None:
        add(name, message(1, fields, priority=0), hello=understood or fields, **more)

    def no_hello(name: str, fields: Any, **more: Any) -> None:
        refuse(name, message(1, fields, priority=0), GOOD, hello=None, **more)

    hello("the least hello", dict(HELLO))
    hello("hello of version 1.0", HELLO | {"minor": 0})
    full = {"models": ["sha256:aa"], "image": "ab", "kernels": {"QLinearConv": 1_048_544}}
    hello("hello of a companion", HELLO | full | {"window_bytes": 1 << 24})
    session = "0123456789abcdef" * 2
    hello("hello of the first of two connections", HELLO | {"session": session, "lane": "urgent"})
    hello("hello of the second of two connections", HELLO | {"session": session, "lane": "bulk"})
    no_hello("a session without lane", HELLO | {"session": session})
    no_hello("a lane without session", HELLO | {"lane": "bulk"})
    no_hello("a lane of a later version", HELLO | {"session": session, "lane": "video"})
    no_hello("a session of 31 digits", HELLO | {"session": session[1:], "lane": "bulk"})
    no_hello("a session of 33 digits", HELLO | {"session": session + "0", "lane": "bulk"})
    no_hello("a session in capitals", HELLO | {"session": session.upper(), "lane": "bulk"})
    no_hello("a session that ends with a newline", HELLO | {"session": session[:-1] + "\n", "lane": "bulk"})
    hello("hello of version 1.7 with fields unheard of", HELLO | {"minor": 7, "dance": [True]}, HELLO | {"minor": 7})
    hello("hello with codecs unheard of", HELLO | {"codecs": ["raw", "int3", ""]})
    for major in (0, 2, 2**64 - 1, -1):
        stranger = {"t": "hello", "major": major, "whatever": [1]}
        add(f"hello of major version {major}", message(1, stranger, priority=0), hello=None, error="VERSION_MISMATCH")
    for name in without(HELLO, "t"):
        no_hello(f"hello without {name}", without(HELLO, name))
        no_hello(f"hello with nil as {name}", HELLO | {name: None})
    for size, good in ((0, False), (65_535, False), (65_536, True), (2**32 - 1, True), (2**32, False), (-1, False)):
        (hello if good else no_hello)(f"max_message_bytes {size}", HELLO | {"max_message_bytes": size})
        understood = {"window_bytes": size}
        if size == 0:
            hello("window_bytes 0 is the default", HELLO | understood, dict(HELLO))
        else:
            (hello if good else no_hello)(f"window_bytes {size}", HELLO | understood)
    for known, _, payload in MESSAGES:
        if known["t"] != "refused":
            refuse(f"{known['t']} before the hello", message(1, known, payload), GOOD, hello=None)
    refuse("ping before the hello", message(1, PING), GOOD, hello=None)
    no_hello("a first message without tag", without(HELLO, "t"))
    no_hello("a first message of a tag unheard of", HELLO | {"t": "hallo"})
    no_hello("a first message that is no map", [1, 2, 3])
    refuse("a hello with payload", message(1, HELLO, b"x"), hello=None)
    refuse("a second hello", message(2, HELLO), GOOD)
    largest = HELLO | {"agent": "a" * (65_536 - len(pack(HELLO | {"agent": "a" * 65_000})) + 65_000)}
    assert len(pack(largest)) == 65_536
    add("the largest hello", message(1, largest), hello=largest)
    refuse("a hello one byte too large", header(1, 1, 100, meta=65_537), hello=None)
    add("a hello in frames of one byte", message(1, HELLO, body_bytes=1), hello=dict(HELLO))
    add("a hello of priority BULK and number 7", message(7, HELLO, priority=3), hello=dict(HELLO))
    refuse("a hello of number 0", message(0, HELLO), hello=None)
    for code in ("OVERLOADED", "REVOKED", "UNKNOWN_SESSION", "A_CODE_OF_LATER"):
        why = {"t": "refused", "code": code, "message": "why"}
        add(f"refused with {code} in the hello's place", message(1, why), GOOD, hello=None, refused=code)
        add(f"refused with {code} after the hello", message(2, why), GOOD, refused=code)
    about = {"t": "refused", "code": "CUT_REFUSED", "message": "no", "digest": "sha256:aa", "cut": "c1"}
    add("refused about a segment does not end the connection", message(2, about), events=[(about, b"")])
    add("an empty stream", hello=None)
    add("half a header", b"\x01\x00\x00", hello=None)
    add("a hello without its last byte", message(1, HELLO, priority=0)[:-1], hello=None)


def headers() -> None:
    for kind in (0, 4, 5, 64, 127):
        refuse(f"kind {kind}", frame(kind, 2, b"x"), GOOD)
    for kind, body in ((129, b""), (129, b"x"), (200, b"x" * 300), (255, b"x" * 262_124)):
        unknown = frame(kind, 9, body, priority=77, meta=5, pay=6, reserved=7)
        add(f"kind {kind} with {len(body)} bytes is skipped", unknown, GOOD, events=[GOOD_EVENT])
    add(
        "kind 130 before the hello is skipped",
        frame(130, 0, b"??") + GREETING,
        GOOD,
        hello=dict(HELLO),
        events=[GOOD_EVENT],
    )
    for kind in (1, 2, 3, 129, 255):
        refuse(f"kind {kind} with a body of 262,125 bytes", header(kind, 2, 262_125, meta=1))
        refuse(f"kind {kind} with a body of 2³²−1 bytes", header(kind, 2, 2**32 - 1, meta=1))
    for kind in (1, 2, 3):
        for priority in (4, 255):
            refuse(f"kind {kind} with priority {priority}", header(kind, 2, 1, meta=1, priority=priority))
    for reserved in (1, 256, 65_535):
        refuse(f"reserved bytes {reserved}", frame(1, 2, b"x", meta=1, reserved=reserved), GOOD)
    refuse("a BEGIN without metadata", frame(1, 2, b"x", pay=1), GOOD)
    refuse("a BEGIN with 1,048,577 bytes of metadata", header(1, 2, 1, meta=1_048_577))
    refuse("a BEGIN without body", frame(1, 2, meta=5), GOOD)
    refuse("a BEGIN with more than its message", frame(1, 2, b"123456", meta=3, pay=2), GOOD)
    refuse("a CONTINUE with metadata bytes", frame(1, 2, b"x", meta=9), header(2, 2, 1, meta=1))
    refuse("a CONTINUE with payload bytes", frame(1, 2, b"x", meta=9), header(2, 2, 1, pay=1))
    refuse("a RESET with metadata bytes", frame(1, 2, b"x", meta=9), header(3, 2, 0, meta=1))
    refuse("a RESET with a body", frame(1, 2, b"x", meta=9), frame(3, 2, b"x"))
    refuse("HTTP", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", hello=None)
    refuse("a TLS record", bytes.fromhex("16030100c8010000c40303") + bytes(32), hello=None)
    refuse("zeros", bytes(40), hello=None)


def streams() -> None:
    chunk, size = pack(CHUNK), len(pack(CHUNK))
    long = b"0123456789" * 100
    for body_bytes in (1, 2, size - 1, size, size + 1, 500, size + 999, size + 1000):
        cut = message(2, CHUNK, long, body_bytes=body_bytes)
        add(f"a message in bodies of {body_bytes} bytes", cut, events=[(CHUNK, long)])
    pieces = (
        frame(1, 2, chunk[:1], meta=size, pay=3),
        frame(2, 2, chunk[1:] + b"a"),
        frame(2, 2, b"b"),
        frame(2, 2, b"c"),
    )
    add("bodies of many sizes", *pieces, events=[(CHUNK, b"abc")])
    add("gaps between numbers", message(3, PONG), message(2**32 - 1, PONG), events=[(PONG, b"")] * 2)
    refuse("the same number again", message(2, PONG), message(2, PONG), events=[(PONG, b"")])
    refuse(
        "a smaller number, of another priority", message(5, PONG), message(4, PONG, priority=0), events=[(PONG, b"")]
    )
    a, b = (frame(1, number, chunk, priority=number, meta=size, pay=2) for number in (2, 3))
    urgent = message(4, CANCEL, priority=1)
    add("messages of three priorities side by side", a, b, urgent, frame(2, 3, b"bb", priority=3), frame(2, 2, b"aa"),
        events=[(CANCEL, b""), (CHUNK, b"bb"), (CHUNK, b"aa")])  # fmt: skip
    refuse("two of one priority side by side", a, frame(1, 3, chunk, meta=size, pay=2), GOOD)
    refuse("a CONTINUE of nothing", frame(2, 2, b"x"), GOOD)
    refuse("a CONTINUE after the end", message(2, PONG), frame(2, 2, b"x"), events=[(PONG, b"")])
    refuse("a CONTINUE of another number", a, frame(2, 3, b"x"))
    refuse("a CONTINUE of another priority", a, frame(2, 2, b"x", priority=3))
    refuse("a CONTINUE without body", a, frame(2, 2))
    refuse("a CONTINUE with more than is missing", a, frame(2, 2, b"123"))
    add("a RESET, and the next message", a, frame(3, 2), message(3, CHUNK, b"n"), events=[(CHUNK, b"n")])
    add(
        "a RESET leaves the other priority alone",
        a,
        b,
        frame(3, 2),
        frame(2, 3, b"bb", priority=3),
        events=[(CHUNK, b"bb")],
    )
    refuse("a RESET of nothing", frame(3, 2), GOOD)
    refuse("a RESET of what is whole", message(2, PONG), frame(3, 2), events=[(PONG, b"")])
    refuse("a RESET of another number", a, frame(3, 3))
    refuse("a CONTINUE after the RESET", a, frame(3, 2), frame(2, 2, b"x"))
    refuse("a number again after its RESET", a, frame(3, 2), message(2, PONG))
    add("what is cut off is no event", message(2, CHUNK, long)[:-1])
    add("a replayed pong is another pong", message(2, PONG), message(3, PONG), events=[(PONG, b"")] * 2)
    refuse("a message one byte over max_message_bytes", header(1, 2, 1, meta=100, pay=(1 << 20) - 99))
    refuse("a message of 2³²−1 bytes of payload", header(1, 2, 1, meta=100, pay=2**32 - 1))
    pings = b"".join(message(number, PING | {"nonce": number}, priority=0) for number in range(2, 66))
    pongs = [PONG | {"nonce": number} for number in range(2, 66)]
    add("64 pings whose answers wait", pings, answers=pongs)
    refuse("65 pings whose answers wait", pings, message(66, PING, priority=0), GOOD)
    add("what came before the error counts", message(2, PONG), message(3, CHUNK, b"x"), bytes(20), GOOD,
        events=[(PONG, b""), (CHUNK, b"x")], error="PROTOCOL_ERROR")  # fmt: skip


def metadata() -> None:
    def good(name: str, fields: Fields, understood: Fields) -> None:
        add(name, message(2, fields), events=[(understood, b"")])

    def bad(name: str, fields: Any) -> None:
        add(name, message(2, fields), GOOD, events=[GOOD_EVENT], invalid=1)

    five = {"t": "pong", "nonce": 5}
    for name, value in (("uint8", b"\xcc\x05"), ("uint16", b"\xcd\0\x05"), ("uint64", b"\xcf" + bytes(7) + b"\x05"),
                        ("int8", b"\xd0\x05"), ("int64", b"\xd3" + bytes(7) + b"\x05")):  # fmt: skip
        good(f"an int as {name}", five | {"nonce": Raw(value)}, five)
    good("a negative int", five | {"nonce": -5}, five | {"nonce": -5})
    for name, value in (("str8", b"\xd9\x02ok"), ("str16", b"\xda\0\x02ok"), ("str32", b"\xdb\0\0\0\x02ok")):
        good(f"text as {name}", {"t": "goodbye", "reason": Raw(value)}, {"t": "goodbye", "reason": "ok"})
    good("empty text", {"t": "goodbye", "reason": ""}, {"t": "goodbye", "reason": ""})
    ready = {"t": "model-ready", "digest": "d", "golden": b"g", "whole_ms": 2.5}
    for name, value in (("bin16", b"\xc5\0\x01g"), ("bin32", b"\xc6\0\0\0\x01g")):
        good(f"bytes as {name}", ready | {"golden": Raw(value)}, ready)
    good("a float as float32", ready | {"whole_ms": Raw(b"\xca" + struct.pack(">f", 2.5))}, ready)
    good("an int for a float", ready | {"whole_ms": 3}, ready | {"whole_ms": 3.0})
    good("a map as map16", Raw(b"\xde\0\x02" + pack("t") + pack("pong") + pack("nonce") + b"\x05"), five)  # type: ignore[arg-type]  # the bytes of one
    good("a map as map32", Raw(b"\xdf\0\0\0\x02" + pack("t") + pack("pong") + pack("nonce") + b"\x05"), five)  # type: ignore[arg-type]  # the bytes of one
    good("the tag not first", {"nonce": 5, "t": "pong"}, five)
    good("defaults said", INFER | {"outputs": [], "encoded": {}, "output_codec": "raw"}, INFER)
    need = {"t": "model-need", "digest": "d", "missing": []}
    good("an array as array16", need | {"missing": Raw(b"\xdc\0\x01" + pack(["f", 0]))}, need | {"missing": [["f", 0]]})
    bad("a tag unheard of", {"t": "from-the-future", "x": 1})
    bad("no tag", {"nonce": 5})
    bad("a number as tag", {"t": 5, "nonce": 5})
    bad("an array", [1, 2])
    bad("nil", None)
    bad("text", "pong")
    bad("an ext type", Raw(b"\xd4\x01\x00"))
    bad("the byte that MessagePack does not have", Raw(b"\xc1"))
    bad("a float for an int", five | {"nonce": 5.5})
    bad("text for an int", five | {"nonce": "5"})
    bad("a bool for an int", five | {"nonce": True})
    bad("bytes for text", {"t": "goodbye", "reason": b"x"})
    bad("text that is not UTF-8", {"t": "goodbye", "reason": Raw(b"\xa2\xff\xfe")})
    bad("an array of wrong length inside", need | {"missing": [["f"]]})
    bad("an array of wrong types inside", need | {"missing": [[0, "f"]]})
    bad("something behind the map", Raw(pack(five) + b"\0"))
    bad("two maps", Raw(pack(five) * 2))
    bad("a map cut short", Raw(pack(five)[:-1]))
    bad("an array that lies about its length", Raw(pack(need)[:-1] + b"\xdd\xff\xff\xff\xff"))
    bad("bytes that lie about their length", Raw(pack(PING)[:1] + b"\xc6\xff\xff\xff\xff"))
    deep = Raw(b"\x91" * 20_000 + b"\xc0")
    bad("nested 20,000 deep where anything may stand", INFER | {"encoded": {"x": {"y": deep}}})
    bad("nested 20,000 deep in an unknown field", five | {"z": deep})


def credits() -> None:
    chunk, size = pack(CHUNK), len(pack(CHUNK))
    room = 65_536 - 512 - size
    full = message(2, CHUNK, bytes(room), body_bytes=262_124)
    unread: list[tuple[Fields, bytes]] = [(CHUNK, bytes(room))]
    add("a window used to its last byte", full, events=unread)
    refuse("one byte beyond the window", message(2, CHUNK, bytes(room + 1), body_bytes=262_124))
    refuse("one byte more in another message", full, message(3, PONG, priority=1), events=unread)
    add("CONTROL costs no credit", full, message(3, PONG, priority=0), events=[*unread, (PONG, b"")])
    add("a ping passes a full window", full, message(3, PING, priority=0), events=unread, answers=[PONG])
    add("skipped frames cost no credit", full, frame(255, 0, bytes(9_000)), message(3, PONG, priority=0),
        events=[*unread, (PONG, b"")])  # fmt: skip
    small = b"".join(message(number, PONG) for number in range(2, 200))
    count = 65_536 // (512 + len(pack(PONG)))
    refuse("small messages cost 512 more each", small, events=[(PONG, b"")] * count)
    old = HELLO | {"minor": 0}
    add("a peer of 1.0 needs no credit", message(1, old, priority=0), small, hello=old, events=[(PONG, b"")] * 198)
    add("a side that gives none takes all", small, receiver={"window_bytes": 0}, events=[(PONG, b"")] * 198)
    large = message(2, CHUNK, bytes(150_000), body_bytes=20_000)
    add("a message larger than the window, its parts acknowledged", large, events=[(CHUNK, bytes(150_000))])
    again = b"".join(frame(1, n, chunk + bytes(20_000), meta=size, pay=30_000) + frame(3, n) for n in range(2, 7))
    add("reset messages give their credit back", again, message(50, PONG), events=[(PONG, b"")])
    invalid = b"".join(message(n, {"t": "?"}, bytes(20_000)) for n in range(2, 7))
    add("invalid messages give their credit back", invalid, message(50, PONG), events=[(PONG, b"")], invalid=5)
    for total in (0, 65_536, 2**64 - 1):
        add(f"credit of {total}", credit(total), GOOD, events=[GOOD_EVENT])
    add("credit between two frames of a message", frame(1, 2, chunk, meta=size, pay=2), credit(1), frame(2, 2, b"ab"),
        events=[(CHUNK, b"ab")])  # fmt: skip
    strange = frame(128, 9, bytes(8), priority=9, meta=9, pay=9, reserved=9)
    add("credit whose other fields say something", strange, GOOD, events=[GOOD_EVENT])
    for length in (0, 4, 7, 9, 16):
        refuse(f"credit with a body of {length} bytes", frame(128, 0, bytes(length), priority=0), GOOD)


def early() -> None:
    """What a device sends before it has the companion's Hello."""
    offer, wanted = MESSAGES[0][0], MESSAGES[4][0]
    flight = message(2, offer), message(3, wanted), message(4, INFER, b"boundary")
    add("an offer, a cut and a request early", *flight,
        events=[(offer, b""), (wanted, b""), (INFER, b"boundary")], early=True)  # fmt: skip
    add("a ping early is answered behind the hello", message(2, PING, priority=0), answers=[PONG], early=True)
    chunk, size = pack(CHUNK), len(pack(CHUNK))
    for payload_bytes, body_bytes in ((65_536 - 512 - size, 262_124), (65_536 - 512 - size, 1_000)):
        full = message(2, CHUNK, bytes(payload_bytes), body_bytes=body_bytes)
        name = f"65,536 bytes early, in bodies of {body_bytes}"
        add(name, full, events=[(CHUNK, bytes(payload_bytes))], early=True)
    full = message(2, CHUNK, bytes(65_536 - 512 - size))
    kept: list[tuple[Fields, bytes]] = [(CHUNK, bytes(65_536 - 512 - size))]
    more = {"max_message_bytes": 1 << 20, "window_bytes": 1 << 20}
    beyond = header(1, 2, 100, meta=size, pay=65_536 - 512 - size + 1)
    refuse("one byte more early than there is for that, whatever the window", beyond, receiver=more, early=True)
    refuse("one message more early than there is room for", full, message(3, PONG), events=kept, receiver=more,
           early=True)  # fmt: skip
    refuse("CONTROL is not free early", full, message(3, PONG, priority=0), events=kept, early=True)
    again = frame(1, 2, chunk, meta=size, pay=40_000) + frame(3, 2)
    refuse("a reset message has cost what it announced, early", again, message(3, CHUNK, bytes(30_000)), receiver=more,
           early=True)  # fmt: skip
    add("skipped frames and credit cost nothing early", frame(255, 0, bytes(70_000)), credit(2**40), GOOD,
        events=[GOOD_EVENT], early=True)  # fmt: skip
    old = HELLO | {"minor": 0}
    add("early from a peer of 1.0", message(1, old, priority=0), flight[0], hello=old, events=[(offer, b"")],
        early=True)  # fmt: skip
    add("early behind a hello of another major version", message(1, {"t": "hello", "major": 2}, priority=0), GOOD,
        hello=None, error="VERSION_MISMATCH", early=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/wire_vectors.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="say whether the file is what this script writes")
    arguments = parser.parse_args()
    text = document()
    if arguments.check:
        return 0 if FILE.read_text() == text else 1
    FILE.write_text(text)
    print(f"{len(vectors)} vectors in {FILE}")
    return 0


def document() -> str:
    """The file's text."""
    vectors.clear()
    for some in (hellos, headers, streams, every_message, metadata, credits, early):
        some()
    names = [vector["name"] for vector in vectors]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    lines = ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in vectors)
    about = {"protocol": "1.1", "format": "PROTOCOL.md §12", "receiver": RECEIVER, "hello": HELLO}
    return f'{json.dumps(about)[:-1]}, "vectors": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    sys.exit(main())
