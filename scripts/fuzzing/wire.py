"""Random streams against the wire protocol: valid ones, and the same with something broken in them.

A stream is drawn frame by frame: messages of all kinds and priorities, side by side, cut anywhere, reset half-way, with
unknown kinds and credit in between. Then, mostly, it is broken: bytes changed, lengths that lie, frames lost, repeated,
out of order, from another stream, noise. Whatever comes out must be a valid event or one typed error; what was whole
before the first broken frame must be there to the byte; memory stays within what was sent; nothing takes long.
The bytes are packed by `scripts/wire_vectors.py`, which shares nothing with what is tested.
"""

from __future__ import annotations

import random
import struct
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final

from scripts.wire_vectors import HELLO, MESSAGES, PING, Raw, credit, frame, message, pack
from split.errors import CompanionRefused, RemoteProtocolError
from split.wire.arriving import FIRST_ROOM_BYTES, GROWTH
from split.wire.connection import Received, WireConnection
from split.wire.frames import decode_metadata
from split.wire.limits import FRAME_HEADER_BYTES, KIB, MAX_METADATA_BYTES, MIB, Limits
from split.wire.messages import Hello, Infer, Message

MAX_MESSAGE_BYTES: Final = 64 * MIB
OVERHEAD_BYTES: Final = 4 * (FIRST_ROOM_BYTES + MAX_METADATA_BYTES) + 512 * KIB
"""Held at most beside a multiple of what came: a first room for each priority, scratch, and answers to 64 pings
with 128 KiB of padding."""
SLOW_S: Final = 2.0
"""Processor time of one stream, a hundredfold of what the longest ever took."""
LIMITS: Final = Limits(max_message_bytes=MAX_MESSAGE_BYTES)

_GREETINGS: Final = (
    message(1, HELLO, priority=0),
    message(1, HELLO | {"minor": 0, "window_bytes": 65_536}, priority=0),
    message(1, HELLO | {"minor": 7, "invented": [1]}, priority=3, body_bytes=9),
)
_NUMBERS: Final = (0, 1, 2, 7, 8, 9, 255, 4096, 65_535, 65_536, 262_124, 262_125, 2**20, 2**20 + 1, 2**31, 2**32 - 1)
_PAYLOADS: Final = (*(0, 1, 20, 300) * 8, *(2_000,) * 3, 70_000)
_BODIES: Final = (1, 7, 50, 200, 200, 1_000, 20_000, 65_516)
_FIELDS: Final = ((0, "<B"), (1, "<B"), (2, "<H"), (4, "<I"), (8, "<I"), (12, "<I"), (16, "<I"))
"""Of a header: where, and how wide."""


@dataclass(frozen=True, slots=True)
class _Kind:
    metadata: bytes
    message: Message | None
    """What it means; None: nothing that is handed out."""
    has_payload: bool


def _kinds() -> list[_Kind]:
    kinds = []
    for known, more, payload in MESSAGES:
        for fields in (known, known | more, known | {"invented": {"x": [None]}}):
            metadata = pack(fields)
            kinds.append(_Kind(metadata, decode_metadata(metadata), bool(payload)))
    nonsense = ({"t": "unheard-of"}, [1, 2], Raw(b"\xc1"), {"t": "pong", "nonce": "x"}, Raw(b"\x91" * 500))
    pings = (PING, PING | {"pong_bytes": 3_000})
    return [
        *kinds,
        *(_Kind(pack(one), None, True) for one in nonsense),
        *(_Kind(pack(one), None, False) for one in pings),
    ]


_KINDS: Final = _kinds()


@dataclass(slots=True)
class Stream:
    """Frames as they go over the wire, and what they mean."""

    frames: list[bytes]
    events: list[tuple[int, Message, bytes]]
    """Each with the index of its last frame."""
    broken_from: int
    """Index of the first frame that is not as it was drawn."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A stream that did what it must not; `run(1, seed)` shows it again."""

    seed: int
    why: str


@dataclass(slots=True)
class Result:
    frames: int = 0
    streams: int = 0
    events: int = 0
    invalid_messages: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """How streams ended: `open`, or the class of the error."""
    held_bytes_max: int = 0
    slowest_s: float = 0.0
    """Processor time of one stream."""
    wrong: list[Wrong] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "wire_streams": self.streams,
            "wire_events": self.events,
            "wire_invalid_messages": self.invalid_messages,
            "wire_outcomes": dict(self.outcomes.most_common()),
            "wire_held_bytes_max": self.held_bytes_max,
            "wire_slowest_cpu_s": round(self.slowest_s, 3),
        }


def run(frames: int, seed: int) -> Result:
    """Streams from this seed on, one seed each, until so many frames were taken; those after an error do not count."""
    result = Result()
    while result.frames < frames:
        _judge(seed, result)
        seed += 1
    return result


# ---- drawing


def draw(rng: random.Random) -> Stream:
    """A valid stream."""
    waiting: list[list[tuple[_Kind, bytes]]] = [[], [], [], []]
    for _ in range(rng.randrange(1, 40)):
        kind = _KINDS[int(rng.random() * len(_KINDS))]
        size = 0 if not kind.has_payload else rng.choice(_PAYLOADS)
        waiting[int(rng.random() * 4)].append((kind, rng.randbytes(1) * size))
    stream = Stream([rng.choice(_GREETINGS)], [], 0)
    under_way: list[tuple[int, bytes, int] | None] = [None] * 4
    """By priority: number, whole message, and how much of it is out."""
    number, frames = 1, stream.frames
    while any(waiting):
        priority = int(rng.random() * 4)
        if not waiting[priority]:
            continue
        odd = rng.random()
        if odd < 0.05:
            frames.append(credit(rng.randrange(2**40)) if odd < 0.03 else frame(rng.randrange(129, 256), 9, b"?" * 9))
        kind, payload = waiting[priority][0]
        begun = under_way[priority]
        if begun is None:
            number += 1 if odd < 0.9 else rng.randrange(1, 1_000)
            whole = kind.metadata + payload
            at = min(len(whole), _body_bytes(rng))
            pay = len(payload)
            frames.append(frame(1, number, whole[:at], priority=priority, meta=len(kind.metadata), pay=pay))
            begun = (number, whole, at)
        elif odd > 0.97:
            frames.append(frame(3, begun[0], priority=priority))
            under_way[priority] = None
            waiting[priority].pop(0)
            continue
        else:
            at = min(len(begun[1]), begun[2] + _body_bytes(rng))
            frames.append(frame(2, begun[0], begun[1][begun[2] : at], priority=priority))
            begun = (begun[0], begun[1], at)
        if begun[2] < len(begun[1]):
            under_way[priority] = begun
            continue
        under_way[priority] = None
        waiting[priority].pop(0)
        if kind.message is not None:
            stream.events.append((len(frames) - 1, kind.message, payload))
    stream.broken_from = len(frames)
    return stream


def _body_bytes(rng: random.Random) -> int:
    return rng.choice(_BODIES)


# ---- breaking: each takes the frames and an index, and changes what is there or behind it


def _flip(rng: random.Random, frames: list[bytes], at: int) -> None:
    data = bytearray(frames[at])
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    frames[at] = bytes(data)


def _lie(rng: random.Random, frames: list[bytes], at: int) -> None:
    where, width = rng.choice(_FIELDS)
    data = bytearray(frames[at])
    (said,) = struct.unpack_from(width, data, where)
    bits = 8 * struct.calcsize(width)
    struct.pack_into(width, data, where, rng.choice((*_NUMBERS, said + 1, said - 1, said * 2)) % 2**bits)
    frames[at] = bytes(data)


def _shorten(rng: random.Random, frames: list[bytes], at: int) -> None:
    frames[at] = frames[at][: rng.randrange(len(frames[at]))]


def _lengthen(rng: random.Random, frames: list[bytes], at: int) -> None:
    frames[at] += rng.randbytes(rng.choice((1, 3, 20, 300)))


def _lose(rng: random.Random, frames: list[bytes], at: int) -> None:
    del frames[at]


def _replay(rng: random.Random, frames: list[bytes], at: int) -> None:
    frames.insert(at, frames[rng.randrange(at + 1)])


def _swap(rng: random.Random, frames: list[bytes], at: int) -> None:
    other = rng.randrange(at, len(frames))
    frames[at], frames[other] = frames[other], frames[at]


def _noise(rng: random.Random, frames: list[bytes], at: int) -> None:
    frames.insert(at, rng.randbytes(rng.choice((1, 19, 20, 21, 100, 3_000))))


def _splice(rng: random.Random, frames: list[bytes], at: int) -> None:
    """From another stream: sound frames that say something else."""
    frames[at:at] = draw(rng).frames[: rng.randrange(1, 8)]


def _announce(rng: random.Random, frames: list[bytes], at: int) -> None:
    """A message as large as may be, of which little or nothing comes."""
    number = rng.choice((2**31, 2**32 - 1))
    sizes = {
        "meta": rng.choice((1, MAX_METADATA_BYTES)),
        "pay": rng.choice((MIB, MAX_MESSAGE_BYTES - MAX_METADATA_BYTES)),
    }
    frames.insert(at, frame(1, number, b"!" * rng.choice((1, 40)), priority=rng.randrange(4), **sizes))


_BREAKERS: Final[tuple[Callable[[random.Random, list[bytes], int], None], ...]] = (
    *(_flip, _flip, _lie, _lie, _lie, _shorten, _lengthen, _lose, _replay, _swap, _noise, _splice, _announce),
)


def _break(rng: random.Random, stream: Stream) -> None:
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        if not stream.frames:
            return
        at = rng.randrange(len(stream.frames))
        if len(stream.frames[at]) < FRAME_HEADER_BYTES:  # shortened, or noise: broken enough
            continue
        rng.choice(_BREAKERS)(rng, stream.frames, at)
        stream.broken_from = min(stream.broken_from, at)


# ---- judging


def _judge(seed: int, result: Result) -> None:
    rng = random.Random(seed)
    stream = draw(rng)
    _break(rng, stream)
    window, early = rng.choice((0, 65_536, 16 * MIB)), rng.random() < 0.1
    began_s = time.thread_time()
    try:
        connection, received = _feed(rng, stream, _receiver(window, early=early), result)
        if rng.random() < 0.1 and window != 65_536 and not early:  # what is taken and sent meanwhile makes a difference
            _same_in_pieces(connection, received, b"".join(stream.frames), window)
        _check(connection, received, stream, bounded=window == 65_536 or early)
    except Exception as error:  # whatever it is: that is what is looked for
        result.wrong.append(Wrong(seed, f"{type(error).__name__}: {error}"))
    else:
        failure = connection.failure
        result.outcomes["open" if failure is None else type(failure).__name__] += 1
        result.invalid_messages += connection.invalid_messages
        result.events += len(received)
    took_s = time.thread_time() - began_s
    if took_s > SLOW_S:
        result.wrong.append(Wrong(seed, f"{len(stream.frames)} frames took {took_s:.1f} s of processor time"))
    result.slowest_s = max(result.slowest_s, took_s)
    result.streams += 1


def _receiver(window: int, *, early: bool) -> WireConnection:
    """`early`: its own Hello waits still, so that only a little may come."""
    known: dict[str, Any] = {"major": 1, "minor": 1, "agent": "fuzzed", "runtime": "none", "codecs": ("raw",)}
    hello = Hello(max_message_bytes=MAX_MESSAGE_BYTES, window_bytes=window, **known)
    connection = WireConnection(hello, limits=LIMITS)
    if not early:
        connection.next_frame()
    return connection


def _feed(
    rng: random.Random, stream: Stream, connection: WireConnection, result: Result
) -> tuple[WireConnection, list[Received]]:
    """All frames in pieces, as a transport does or as whole reads; now and then the program takes events and sends."""
    received: list[Received] = []
    data = memoryview(b"".join(stream.frames))
    at, untaken, by_buffer = 0, 0, rng.random() < 0.5
    most = rng.choice((20, 500, 16 * KIB, 256 * KIB)) if len(data) < 16 * KIB else rng.choice((2_000, 256 * KIB))
    while at < len(data) and connection.failure is None:
        count = min(most, len(data) - at)
        if by_buffer:
            place = connection.get_buffer()
            count = min(len(place), count)
            place[:count] = data[at : at + count]
            received += connection.buffer_updated(count)
        else:
            received += connection.receive(data[at : at + count])
        at += count
        held_bytes = connection.held_bytes
        result.held_bytes_max = max(result.held_bytes_max, held_bytes)
        assert held_bytes <= GROWTH * at + OVERHEAD_BYTES, f"{held_bytes} bytes are held after {at} came"
        if rng.random() < 0.1:
            for one in received[untaken:]:
                one.taken()
            untaken = len(received)
            _send(rng, connection)
    result.frames += bisect_right(list(accumulate(map(len, stream.frames))), at)
    return connection, received


def _send(rng: random.Random, connection: WireConnection) -> None:
    """The other direction, whose credit comes from the stream."""
    if connection.failure is not None:
        return  # its last word is looked at in the end
    if connection.peer_hello is not None and connection.queued_bytes < MIB:
        name = str(rng.randrange(9))
        asked = Infer(request_id=name, attempt=1, digest="d", cut="c", codec="raw", budget_ms=1.0)
        connection.send(asked, [bytes(rng.choice((0, 9, 5_000)))])
        connection.forget(str(rng.randrange(9)), 1)
    for data in connection.data_to_send(rng.choice((1, 10_000))):
        assert data[0] in (1, 2, 3, 128), f"a frame of kind {data[0]} was sent"


def _same_in_pieces(connection: WireConnection, received: list[Received], data: bytes, window: int) -> None:
    """The same bytes otherwise cut mean the same."""
    other, again = _receiver(window, early=False), list[Received]()
    cuts = [0, *accumulate((1, 3, 17, 20, 21) * (len(data) // 62 + 1))]
    for start, end in pairwise(cuts):
        again += other.receive(data[start:end])
        for one in again[-1:]:
            one.connection.data_to_send(2**20)
    pongs_differ = "answers to pings" in f"{connection.failure}{other.failure}"
    assert pongs_differ or str(other.failure) == str(connection.failure), f"{other.failure} or {connection.failure}"
    assert pongs_differ or [(one.message, bytes(one.payload)) for one in again] == [
        (one.message, bytes(one.payload)) for one in received
    ], "the same bytes in other pieces are other events"


def _check(connection: WireConnection, received: list[Received], stream: Stream, *, bounded: bool) -> None:
    failure = connection.failure
    assert failure is None or isinstance(failure, RemoteProtocolError | CompanionRefused), repr(failure)
    sound = [(sent, payload) for last, sent, payload in stream.events if last < stream.broken_from]
    found = [(one.message, bytes(one.payload)) for one in received]
    if bounded and failure is not None:
        sound = sound[: len(found)]  # the stream keeps to no credit, and to no bound on what comes early
    assert found[: len(sound)] == sound, "what was whole before anything was broken is missing or another"
    if failure is None:
        return
    before = connection.invalid_messages
    assert connection.receive(message(2**32 - 1, PING)) == [], "something was understood after the error"
    assert connection.invalid_messages == before
    frames = connection.data_to_send(16 * MIB)
    if isinstance(failure, RemoteProtocolError):
        assert b"refused" in frames[-1], "the peer was not told why"
