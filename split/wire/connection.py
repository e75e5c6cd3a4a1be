"""One side of a connection as a state machine over bytes: messages in, frames out, and back. No socket, clock or task.

Invariants: the first message each way is a Hello; nothing is allocated before its length was checked; at most one
message per priority is under way in each direction; after an error the connection takes nothing any more.
The transport asks `get_buffer` where to put bytes and says how many came (`buffer_updated`), or hands over bytes it
already has (`receive`); it takes frames to write from `next_frame`, one at a time, so that priority decides late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from split.errors import CompanionRefused, ConnectionLost, LocalProtocolError, RemoteProtocolError, TooLarge
from split.wire.arriving import Arriving
from split.wire.credit import Granted, cost
from split.wire.frames import (
    SKIPPABLE_FROM,
    Buffer,
    FrameHeader,
    FrameKind,
    decode_credit,
    decode_header,
    decode_metadata,
    encode_credit,
    encode_metadata,
    may_have_payload,
)
from split.wire.greeting import VersionMismatch, read_hello
from split.wire.limits import (
    DEFAULT_LIMITS,
    EARLY_BYTES,
    FRAME_HEADER_BYTES,
    KIB,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    MAX_INVALID_MESSAGES,
    MAX_METADATA_BYTES,
    MAX_REASON_CHARACTERS,
    MAX_WAITING_PONG_BYTES,
    MAX_WAITING_PONGS,
    Limits,
)
from split.wire.messages import (
    CREDIT_SINCE_MINOR,
    Hello,
    Infer,
    Message,
    Ping,
    Priority,
    Refused,
    Reply,
)
from split.wire.outbox import Outbox, Outgoing
from split.wire.pinging import answer_to

_SCRATCH_BYTES: Final = 16 * KIB
"""A whole TLS record. Small messages are understood so many bytes at a time, some milliseconds of work; more would keep
the other connections of the loop waiting."""
_DIRECT_FROM_BYTES: Final = 4 * KIB
"""A shorter rest of a body is read through the scratch buffer, with whatever comes behind it."""


@dataclass(frozen=True, slots=True)
class Received:
    """One whole message; the payload is a buffer of its own and the receiver's to keep."""

    message: Message
    payload: memoryview
    priority: Priority
    """With which it was sent."""
    connection: WireConnection
    """On which it came."""
    credit_bytes: int
    """What its waiting takes of the peer's credit; 0: nothing."""

    def taken(self) -> bool:
        """The program has it, so the peer may send as much again; whether there is something to send now. Once."""
        return self.credit_bytes > 0 and self.connection.release(self.credit_bytes)


class WireConnection:
    """Sans-IO state of one connection; `hello` is sent first, the peer's is awaited.

    `dials`: the device's side, which may send a little behind its Hello without waiting for the companion's.
    """

    def __init__(self, hello: Hello, *, limits: Limits = DEFAULT_LIMITS, dials: bool = False) -> None:
        self.limits = limits
        self.peer_hello: Hello | None = None
        """Set when the peer's Hello was received."""
        self.failure: RemoteProtocolError | CompanionRefused | None = None
        """What the peer did wrong, or its reason for refusing us; the connection is to be closed once set."""
        self.messages = 0
        """Whole messages that came, whatever became of them."""
        self.invalid_messages = 0
        """Whole messages that were dropped because their metadata makes no sense."""
        self.last_invalid = ""
        """What was wrong with the last of them."""
        self.answers_rate = False
        """A pong with weight was queued, to measure a rate; reset by whoever has seen it."""
        self._closed_because: str | None = None
        self._outbox = Outbox(queue_bytes=limits.queue_bytes, frame_bytes=limits.frame_bytes)
        self._window_bytes = hello.window_bytes
        self._granted: Granted | None = None
        """Once the peer is known to keep to its credit."""
        self._credit = bytearray()
        """What came of the body of a CREDIT frame."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._header = memoryview(bytearray(FRAME_HEADER_BYTES))
        self._header_filled = 0
        self._arriving: dict[int, Arriving | None] = dict.fromkeys(Priority)
        self._highest_number = 0
        self._current: Arriving | None = None
        self._body_left = 0
        self._direct_body = 0
        self._is_credit = False
        self._early_left = EARLY_BYTES
        """What may still cross before the companion's Hello: sent by a side that dials, received by the other one."""
        self._dials = dials
        self._greeting = self._pack(hello, (), Priority.CONTROL)
        self._outbox.put(self._greeting)

    # ---- out

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages accepted and not yet taken as frames."""
        return self._outbox.queued_bytes

    @property
    def held_bytes(self) -> int:
        """Memory for messages under way to this side and for what waits to be sent; with what is announced it does not
        grow (`arriving.py`)."""
        under_way = sum(one.room_bytes for one in self._arriving.values() if one is not None)
        return under_way + self._scratch.nbytes + self._outbox.queued_bytes

    @property
    def blocked(self) -> bool:
        """Whether something waits and may not be sent before the peer has read what it has."""
        return self._outbox.blocked

    @property
    def frame_bytes(self) -> int:
        """Size of the next frames, header and body, at most; what is under way changes with it. To be set to what the
        link takes in some milliseconds: a frame is what an urgent message may have to wait for."""
        return self._outbox.frame_bytes

    @frame_bytes.setter
    def frame_bytes(self, frame_bytes: int) -> None:
        assert FRAME_HEADER_BYTES < frame_bytes <= MAX_FRAME_BYTES, frame_bytes
        self._outbox.frame_bytes = frame_bytes

    def send(self, message: Message, payload: Sequence[Buffer] = (), priority: Priority = Priority.NORMAL) -> None:
        """Queue a message; the payload is not copied and must not change until its frames were taken.

        Raises ConnectionLost after an error, Overloaded when the queue's bound in bytes is reached, TooLarge when the
        message is over the bound for metadata or over what the peer's Hello allows, LocalProtocolError for a second
        Hello, a payload where the message has none, or, before the peer's Hello came, anything by a companion and more
        than `EARLY_BYTES` by a device (that knows no message of 1.1 to be welcome, either).
        """
        if self._closed_because is not None:
            raise ConnectionLost(self._closed_because)
        if isinstance(message, Hello):
            raise LocalProtocolError("a connection sends one Hello, its first message")
        if payload and not may_have_payload(message):
            raise LocalProtocolError(f"{type(message).__name__} carries no payload")
        outgoing = self._pack(message, payload, priority)
        self._outbox.require_room(outgoing)
        if self.peer_hello is None and not isinstance(message, Refused):
            self._spend_early(outgoing)
        self._outbox.put(outgoing)

    def _spend_early(self, outgoing: Outgoing) -> None:
        """LocalProtocolError when the peer's Hello must come first."""
        name, cost_bytes = type(outgoing.message).__name__, cost(outgoing.left, begins=True)
        if not self._dials:
            raise LocalProtocolError(f"{name} may be sent once the peer's Hello was received")
        if cost_bytes > self._early_left:
            raise LocalProtocolError(
                f"before the companion's Hello {EARLY_BYTES} bytes may be sent, {self._early_left} are left and {name} "
                f"costs {cost_bytes}: send it once the Hello was received"
            )
        self._early_left -= cost_bytes

    def _pack(self, message: Message, payload: Sequence[Buffer], priority: Priority) -> Outgoing:
        metadata = encode_metadata(message)
        outgoing = Outgoing(message, metadata, payload, priority)
        name = type(message).__name__
        bound = MAX_HELLO_BYTES if isinstance(message, Hello) else MAX_METADATA_BYTES
        if len(metadata) > bound:
            raise TooLarge(f"the metadata of {name} may have {bound} bytes, these are {len(metadata)}")
        if self.peer_hello is not None and outgoing.left > self.peer_hello.max_message_bytes:
            raise TooLarge(
                f"{name} has {outgoing.left} bytes, the peer takes at most {self.peer_hello.max_message_bytes}"
            )
        return outgoing

    def forget(self, request_id: str, attempt: int) -> None:
        """Drop what is unsent of this request's Infer or Reply; the peer is told when part of it is already out."""
        self._outbox.drop(lambda one: _is_of(one.message, request_id, attempt), reset=True)

    def next_frame(self) -> bytes | None:
        """The best frame now (credit or a reset, else lowest priority number, else first come); None when nothing waits
        or all that waits is `blocked`."""
        return self._outbox.next_frame()

    def data_to_send(self, max_bytes: int) -> list[bytes]:
        """Frames worth about `max_bytes`: as many as fit, and at least one when anything waits."""
        frames: list[bytes] = []
        room = max_bytes
        while room > 0 and (frame := self.next_frame()) is not None:
            frames.append(frame)
            room -= len(frame)
        return frames

    def refuse(self, code: str, message: str, *, stranger: bool = False) -> None:
        """Queue this side's last message, the reason for closing, in place of all that can still be taken back.

        `stranger`: nothing has left yet, and the peer is to learn nothing else, our Hello neither.
        """
        self._outbox.drop((lambda _: True) if stranger else _may_be_taken_back, reset=False)
        refused = Refused(code=code, message=message[:MAX_REASON_CHARACTERS])
        self._outbox.put(self._pack(refused, (), Priority.CONTROL))
        self._closed_because = message

    # ---- in

    def release(self, credit_bytes: int) -> bool:
        """See `Received.taken`."""
        if self._granted is None or self._closed_because is not None:
            return False
        self._granted.release(credit_bytes)
        return self._top_up()

    def _top_up(self) -> bool:
        if self._granted is None or (total_bytes := self._granted.top_up()) is None:
            return False
        self._outbox.grant(encode_credit(total_bytes))
        return True

    def get_buffer(self) -> memoryview:
        """Where the transport should put the next bytes: mostly the very place in the message they belong to."""
        if self._current is not None and self._header_filled == 0 and self._body_left >= _DIRECT_FROM_BYTES:
            place, self._direct_body = self._current.place(self._body_left)
            return place
        self._direct_body = 0
        return self._scratch

    def buffer_updated(self, count: int) -> list[Received]:
        """`count` bytes were put where `get_buffer` said; returns as `receive` does."""
        if not self._direct_body:
            return self.receive(self._scratch[:count])
        current = self._current
        assert current is not None
        place, _ = current.place(self._body_left)
        body_bytes = min(count, self._direct_body)
        behind = bytes(place[body_bytes:count])
        self._direct_body = 0
        received: list[Received] = []
        try:
            self._advance(current, body_bytes, received)
        except (RemoteProtocolError, CompanionRefused) as error:
            self._fail(error)
        return received + self.receive(behind)

    def receive(self, data: Buffer) -> list[Received]:
        """Take bytes of any length; returns the messages that are whole now.

        Never raises: what came before an error is returned, and `failure` says what was wrong. Bytes after it are
        ignored.
        """
        received: list[Received] = []
        view = memoryview(data)
        try:
            while view.nbytes and self._closed_because is None:
                view = view[self._take(view, received) :]
        except (RemoteProtocolError, CompanionRefused) as error:
            self._fail(error)
        return received

    def _take(self, view: memoryview, received: list[Received]) -> int:
        """Use up some bytes from the front of `view`; how many."""
        if self._body_left == 0:
            take = min(view.nbytes, FRAME_HEADER_BYTES - self._header_filled)
            self._header[self._header_filled : self._header_filled + take] = view[:take]
            self._header_filled += take
            if self._header_filled == FRAME_HEADER_BYTES:
                self._header_filled = 0
                self._open(decode_header(self._header))
            return take
        if self._current is None:
            take = min(view.nbytes, self._body_left)
            self._body_left -= take
            if self._is_credit:
                self._take_credit(view[:take])
            return take
        place, room = self._current.place(self._body_left)
        take = min(view.nbytes, room)
        place[:take] = view[:take]
        self._advance(self._current, take, received)
        return take

    def _open(self, header: FrameHeader) -> None:
        """Act on a header: check it against what is under way, and make room for a new message."""
        self._body_left = header.body_bytes
        self._current = None
        self._is_credit = header.kind == FrameKind.CREDIT
        if header.kind >= SKIPPABLE_FROM:
            return
        if header.kind == FrameKind.BEGIN:
            self._current = self._begin(header)
        else:
            arriving = self._arriving[header.priority]
            if arriving is None or arriving.number != header.number:
                raise RemoteProtocolError(
                    f"a frame of kind {header.kind} names message {header.number} of priority {header.priority}, "
                    "which is not under way"
                )
            if header.kind == FrameKind.RESET:
                self._arriving[header.priority] = None
                return
            self._current = arriving
        if not 0 < header.body_bytes <= self._current.missing:
            raise RemoteProtocolError(
                f"message {header.number} lacks {self._current.missing} bytes, a frame brings {header.body_bytes}"
            )
        if self._granted is not None and header.priority != Priority.CONTROL:
            self._granted.take(cost(header.body_bytes, begins=header.kind == FrameKind.BEGIN))
        self._current.make_room(header.body_bytes)

    def _take_credit(self, part: memoryview) -> None:
        """Some bytes of a CREDIT's body. An older total changes nothing, and a peer that gave none is not asked."""
        self._credit += part
        if self._body_left == 0:
            total_bytes = decode_credit(self._credit)
            self._credit.clear()
            if self._outbox.credit_bytes is not None:
                self._outbox.credit_bytes = max(self._outbox.credit_bytes, total_bytes)

    def _begin(self, header: FrameHeader) -> Arriving:
        under_way = self._arriving[header.priority]
        if under_way is not None:
            raise RemoteProtocolError(
                f"message {header.number} begins while {under_way.number} of the same priority is under way"
            )
        if header.number <= self._highest_number:
            raise RemoteProtocolError(f"message numbers must rise, {header.number} came after {self._highest_number}")
        if self.peer_hello is None and (header.metadata_bytes > MAX_HELLO_BYTES or header.payload_bytes):
            raise RemoteProtocolError(
                f"a Hello has at most {MAX_HELLO_BYTES} bytes and no payload, the first message says "
                f"{header.metadata_bytes} and {header.payload_bytes}"
            )
        size = header.metadata_bytes + header.payload_bytes
        if size > self.limits.max_message_bytes:
            raise RemoteProtocolError(
                f"messages may have {self.limits.max_message_bytes} bytes as the Hello says, one of {size} begins"
            )
        if self.peer_hello is not None and not self._greeting.begun:
            self._early_left -= cost(size, begins=True)
            if self._early_left < 0:
                raise RemoteProtocolError(
                    f"before this side's Hello at most {EARLY_BYTES} bytes may come, message {header.number} of {size} "
                    f"bytes is {-self._early_left} too many"
                )
        self._highest_number = header.number
        self._arriving[header.priority] = arriving = Arriving(header)
        return arriving

    def _advance(self, arriving: Arriving, count: int, received: list[Received]) -> None:
        """`count` bytes of a body are in their place."""
        arriving.filled += count
        self._body_left -= count
        if self._body_left:
            return
        if arriving.missing == 0:
            self._complete(arriving, received)
        self._top_up()

    def _complete(self, arriving: Arriving, received: list[Received]) -> None:
        self._arriving[arriving.priority] = None
        self._current = None
        self.messages += 1
        message = self._understand(arriving)
        if isinstance(message, Ping):
            self._answer(message)
        elif message is not None:
            credit_bytes = 0
            if self._granted is not None and arriving.priority != Priority.CONTROL:
                credit_bytes = cost(arriving.filled, begins=True)
                self._granted.hold(credit_bytes)
            priority = Priority(arriving.priority)
            received.append(Received(message, arriving.payload, priority, connection=self, credit_bytes=credit_bytes))

    def _understand(self, arriving: Arriving) -> Message | None:
        """The message, if it is one that anybody but this connection wants to know of."""
        metadata = arriving.metadata[: arriving.metadata_bytes]
        if self.peer_hello is None:
            self._greet(read_hello(metadata))
            return None
        try:
            message = decode_metadata(metadata)
        except RemoteProtocolError as error:
            self._drop_invalid(error)
            return None
        if isinstance(message, Hello):
            raise RemoteProtocolError("a second Hello came; a connection has one each way, first of all")
        if arriving.payload_bytes and not may_have_payload(message):
            raise RemoteProtocolError(
                f"{type(message).__name__} carries no payload, this one has {arriving.payload_bytes} bytes"
            )
        if isinstance(message, Refused) and not (message.request_id or message.digest):
            raise CompanionRefused(message.code, message.message)
        return message

    def _drop_invalid(self, error: RemoteProtocolError) -> None:
        """Its frames are sound, so what comes next is too: one message is lost, and the others need not be."""
        self.invalid_messages += 1
        self.last_invalid = str(error)
        if self.invalid_messages > MAX_INVALID_MESSAGES:
            raise RemoteProtocolError(
                f"more than {MAX_INVALID_MESSAGES} messages of this connection made no sense, the last one: {error}"
            )

    def _greet(self, hello: Hello) -> None:
        self.peer_hello = hello
        if hello.window_bytes:
            self._outbox.credit_bytes = hello.window_bytes
        if hello.minor >= CREDIT_SINCE_MINOR and self._window_bytes:
            self._granted = Granted(self._window_bytes)

    def _answer(self, ping: Ping) -> None:
        pong = answer_to(ping)
        if pong.padding and self._dials:
            raise RemoteProtocolError(
                f"a companion asks for no padding in a pong, this one for {ping.pong_bytes} bytes"
            )
        waiting = self._outbox.waiting_pongs()
        if len(waiting) >= MAX_WAITING_PONGS:
            raise RemoteProtocolError(f"{MAX_WAITING_PONGS} answers to pings wait already and the peer reads none")
        padding_bytes = sum(len(one.padding) for one in (*waiting, pong))
        if pong.padding and padding_bytes > MAX_WAITING_PONG_BYTES:
            raise RemoteProtocolError(
                f"answers to pings may wait with {MAX_WAITING_PONG_BYTES} bytes of padding, now {padding_bytes} would"
            )
        self.answers_rate = self.answers_rate or bool(pong.padding)
        self._outbox.put(self._pack(pong, (), Priority.CONTROL))

    def _fail(self, error: RemoteProtocolError | CompanionRefused) -> None:
        self.failure = error
        self._arriving = dict.fromkeys(Priority)
        self._current = None
        if isinstance(error, CompanionRefused):
            self._closed_because = f"the peer refused the connection: {error} ({error.code})"
        else:
            self.refuse("VERSION_MISMATCH" if isinstance(error, VersionMismatch) else "PROTOCOL_ERROR", str(error))


def _is_of(message: Message, request_id: str, attempt: int) -> bool:
    return isinstance(message, Infer | Reply) and message.request_id == request_id and message.attempt == attempt


def _may_be_taken_back(outgoing: Outgoing) -> bool:
    """All but the Hello, and what has begun of CONTROL: the refusal must come after these."""
    kept = isinstance(outgoing.message, Hello) or outgoing.begun
    return outgoing.priority is not Priority.CONTROL or not kept
