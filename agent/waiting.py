"""The requests that a companion has still to answer, over all connections. `uplink.py` says which connection there is;
nothing here waits.

    sent ── reply, refusal ──► answered
     │ ▲
     │ └── the next connection, to whichever companion, has open what it needs, and is soon enough
     ▼   │
    lost ┴── no attempt left, too late, or abandoned
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from agent.openings import are_times
from agent.planner import Planner
from split.codec.image import image_fingerprint
from split.codec.klt import klt_key
from split.codec.payload import decode
from split.errors import CompanionRefused, ConnectionLost, IsthmusError, Overloaded, RemoteProtocolError, TooLarge
from split.ids import KLT
from split.plan.plan import REENCODED
from split.tensor import Tensors, dtype_name
from split.transport.channel import Buffer, Channel, Incoming
from split.wire.messages import Cancel, Infer, Priority, Refused, Reply

GROWTH: Final = 64
"""Outputs are asked for as they are, and take what came; only texts become larger, each by 64 bytes of overhead."""
DECODED_BYTES: Final = 256 << 20
"""A reply that is larger than it came is at most so large: a companion that was broken into may send what unpacks."""
REPLY_SIZES_KEPT: Final = 1024
"""Cuts whose replies' size is known: far more than are in use at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """What came back for one request."""

    outputs: Tensors
    reply: Reply
    network_ms: float
    """Round trip without the companion's own time."""
    down_bytes: int
    """Of its payload."""
    decode_ms: float
    """Of the outputs, here; slowdown in."""


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """One request that a companion is to answer, through all its attempts."""

    reply: asyncio.Future[RemoteReply]
    """The reply to the attempt that counts, or a ChannelError once none will come."""
    lost: asyncio.Future[str]
    """Done, with why, when a connection took the request with it, be it sent again or not."""
    here_at_s: float = math.inf
    """When the device expects to have the answer itself, set by whoever waits: nothing that would come later is sent
    again."""


@dataclass(slots=True, kw_only=True)
class _Request:
    asked: Asked
    message: Infer
    """As last sent."""
    payload: Sequence[Buffer]
    priority: Priority
    payload_bytes: int
    network_ms: float
    cloud_ms: float
    """What network and companion are expected to need of the time."""
    reply_bytes: int
    """What its reply is expected to weigh."""
    attempts: int
    made: Mapping[str, str]
    """Element types of the model's outputs."""
    sent_at_s: float = 0.0
    up_bytes: int = 0
    """Payload and what was queued before it: all that had to travel first."""
    up_bytes_max: int = 0
    """Payload and all that was unanswered: no more had to travel first, whatever the kernel knew of routers' queues."""


def _seen(future: asyncio.Future[RemoteReply]) -> None:
    """An error that comes at the very moment of the request's deadline finds nobody who waits; that is no news."""
    if not future.cancelled():
        future.exception()


class Waiting:
    """Lives as long as the daemon."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._channel: Channel | None = None
        self._sent: dict[str, _Request] = {}
        """By id: what this connection has still to answer."""
        self._lost: dict[str, _Request] = {}
        """What an earlier connection took with it and the next one may still answer."""
        self._opened: set[tuple[str, str]] = set()
        """(Digest, cut or `KLT`) that this connection takes."""
        self._decoded_until_s = -math.inf
        """Emulation: until then the event loop of the slower device would be decoding."""
        self._reply_bytes: dict[tuple[str, str], int] = {}
        """What the last reply had, by model and cut: so much is on its way for each request that was sent, and is
        neither seen by the meter yet nor free for others."""

    @property
    def unanswered(self) -> int:
        """Requests that this connection has still to answer."""
        return len(self._sent)

    @property
    def inflight(self) -> int:
        """Those, and the ones that wait for the next connection."""
        return len(self._sent) + len(self._lost)

    def begin(self, channel: Channel) -> None:
        """From now on this is the connection."""
        self._channel = channel
        self._opened.clear()

    def send(
        self,
        message: Infer,
        payload: Sequence[Buffer],
        *,
        priority: Priority,
        network_ms: float = 0.0,
        cloud_ms: float = 0.0,
        reply_bytes: int = 0,
        attempts: int = 1,
        made: Mapping[str, str] = MappingProxyType({}),
    ) -> Asked:
        """Send one request, and again while `attempts` and its budget last when a connection takes it with it.

        `network_ms`, `cloud_ms`, `reply_bytes`: what the link and the companion are expected to need and to send, so
        that lateness is not all put down to the way up, and nothing is sent again that would come too late. `made`:
        element types of the model's outputs; a reply with others is none. The payload must not change until `abandon`.
        Raises ConnectionLost when there is no connection, Overloaded when the channel's byte bound is reached or the
        metered bytes are used up, CompanionRefused (TOO_LARGE) for a message that the companion does not take.
        """
        loop = asyncio.get_running_loop()
        asked = Asked(reply=loop.create_future(), lost=loop.create_future())
        asked.reply.add_done_callback(_seen)
        waiting = _Request(
            asked=asked,
            message=message,
            payload=payload,
            priority=priority,
            payload_bytes=sum(memoryview(part).nbytes for part in payload),
            network_ms=network_ms,
            cloud_ms=cloud_ms,
            reply_bytes=reply_bytes,
            attempts=attempts,
            made=made,
        )
        self._put(waiting)
        return asked

    def _put(self, waiting: _Request) -> None:
        channel, message = self._channel, waiting.message
        if channel is None:
            raise ConnectionLost("there is no companion")
        ahead = self.ahead_bytes()
        owed_bytes = sum(self._reply_bytes.get(_asks_for(one.message), 0) for one in (*self._sent.values(), waiting))
        if why := self._planner.metered_why_not(waiting.payload_bytes + owed_bytes):
            raise Overloaded(why)  # others may have used up what was left when this was decided
        try:
            channel.send(message, waiting.payload, priority=waiting.priority)
        except TooLarge as error:  # no mistake of the caller's: the device takes what the companion does not
            raise CompanionRefused(error.code, f"the companion does not take it: {error}") from error
        waiting.sent_at_s, waiting.up_bytes = _now(), ahead + waiting.payload_bytes
        waiting.up_bytes_max = waiting.payload_bytes + sum(one.payload_bytes for one in self._sent.values())
        self._sent[message.request_id] = waiting

    def send_again(self, digest: str, opened: str) -> None:
        """This connection takes requests of this cut now, or (`KLT`) payloads of codec klt of the model: what an
        earlier one took with it is sent, if that pays."""
        self._opened.add((digest, opened))
        if self._channel is None:
            return
        peer = self._channel.peer_hello
        unread = {*(REENCODED - {*peer.codecs}), *(() if peer.image == image_fingerprint() else ("encoded",))}
        for waiting in list(self._lost.values()):
            message, asked = waiting.message, waiting.asked
            needs = {(message.digest, message.cut), *([(message.digest, KLT)] if message.codec == KLT else ())}
            if (digest, opened) not in needs or not needs <= self._opened:
                continue
            if message.codec in unread:
                continue
            del self._lost[message.request_id]
            now_s = _now()
            left_ms = message.budget_ms - (now_s - waiting.sent_at_s) * 1000
            there_at_s = now_s + (waiting.network_ms + waiting.cloud_ms) / 1000
            try:
                if there_at_s > min(now_s + left_ms / 1000, asked.here_at_s):
                    raise ConnectionLost("the connection was lost, and sent again it would be answered too late")
                waiting.message = msgspec.structs.replace(message, attempt=message.attempt + 1, budget_ms=left_ms)
                self._put(waiting)
            except IsthmusError as error:
                asked.reply.set_exception(error)

    def ahead_bytes(self) -> int:
        """Bytes of the requests that wait which are not yet past the narrowest place of the link: what a new one's
        transfer has before it. Files of models queue too, but any request overtakes all of them but the piece that
        has begun."""
        if self._channel is None or not self._sent:
            return 0
        return min(self._channel.ahead_bytes, sum(waiting.payload_bytes for waiting in self._sent.values()))

    def abandon(self, request_id: str) -> None:
        """Nobody waits any more: unsent bytes are dropped, the companion is told."""
        self._lost.pop(request_id, None)
        waiting = self._sent.pop(request_id, None)
        if waiting is None or self._channel is None:
            return
        now_s = _now()
        network_ms = (now_s - waiting.sent_at_s) * 1000 - waiting.cloud_ms
        self._planner.observe_late(waiting.up_bytes, waiting.reply_bytes, network_ms, now_s)
        attempt = waiting.message.attempt
        self._channel.forget(request_id, attempt)
        try:
            self._channel.send(Cancel(request_id=request_id, attempt=attempt), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the companion finds out by itself
            return

    def _answered(self, request_id: str, attempt: int) -> _Request | None:
        """Who waits for the answer to this attempt; None for a stale one, and when the answer has come otherwise."""
        waiting = self._sent.get(request_id)
        if waiting is None or waiting.message.attempt != attempt:
            return None
        del self._sent[request_id]
        return None if waiting.asked.reply.done() else waiting

    def refuse(self, refused: Refused) -> bytes:
        """The companion does not answer this one; which calibration (`calibration_key`) it was coded with, b"" for none
        and where it is not waited for."""
        if (waiting := self._answered(refused.request_id, refused.attempt)) is None:
            return b""
        waiting.asked.reply.set_exception(CompanionRefused(refused.code, refused.message))
        return klt_key(b"".join(waiting.payload)) if waiting.message.codec == KLT else b""

    def take(self, reply: Reply, incoming: Incoming) -> bool:
        """A reply came; whether it was the one waited for, and usable: only such a one teaches the planner."""
        waiting = self._answered(reply.request_id, reply.attempt)
        if waiting is None:
            return False
        answer = waiting.asked.reply
        times_ms = (reply.queue_ms, reply.decode_ms, reply.tail_ms, reply.encode_ms, reply.cloud_ms)
        if not are_times(*times_ms):  # a single NaN would stay in every estimate
            error = RemoteProtocolError(f"the companion's reply is not usable: it says that it took {times_ms} ms")
            answer.set_exception(error)
            return False
        down_bytes = incoming.payload.nbytes
        network_ms = max((incoming.received_at_s - waiting.sent_at_s) * 1000 - reply.cloud_ms, 0.0)
        self._planner.observe_transfer(
            waiting.up_bytes, down_bytes, network_ms, _now(), up_bytes_max=waiting.up_bytes_max
        )
        if len(self._reply_bytes) >= REPLY_SIZES_KEPT:
            self._reply_bytes.clear()
        self._reply_bytes[_asks_for(waiting.message)] = down_bytes
        started_s = time.perf_counter()
        try:
            if (reply.cut, reply.codec) != (waiting.message.cut, waiting.message.codec):
                raise RemoteProtocolError(f"{reply.cut} {reply.codec} was answered to {waiting.message.cut}")
            most = max(down_bytes, min(GROWTH * down_bytes, DECODED_BYTES))
            outputs = decode(incoming.payload, max_bytes=most)
            if missing := set(waiting.message.outputs) - outputs.keys():
                raise RemoteProtocolError(f"output {min(missing)!r} is not in the reply")
            for name, dtype in waiting.made.items():
                if name in outputs and (came := dtype_name(outputs[name].dtype)) != dtype:
                    raise RemoteProtocolError(f"output {name!r} is {came}, the model makes {dtype}")
        except IsthmusError as error:
            answer.set_exception(RemoteProtocolError(f"the companion's reply is not usable: {error}"))
            return False
        decode_ms = (time.perf_counter() - started_s) * 1000
        slowdown = self._planner.slowdown
        answered = RemoteReply(
            outputs=outputs,
            reply=reply,
            network_ms=network_ms,
            down_bytes=down_bytes,
            decode_ms=decode_ms * slowdown,
        )
        if slowdown > 1.0:
            self._hold(answer, answered, decode_ms * (slowdown - 1.0))
        else:
            answer.set_result(answered)
        self._planner.observe_reply(waiting.message.digest, down_bytes=down_bytes, decode_ms=decode_ms)
        return True

    def _hold(self, answer: asyncio.Future[RemoteReply], answered: RemoteReply, held_ms: float) -> None:
        """Emulation: the answer is there when a slower device would have decoded it. Replies are decoded on the event
        loop, one after the other and beside the worker, so the worker neither waits for this nor makes it wait."""
        loop = asyncio.get_running_loop()
        self._decoded_until_s = max(self._decoded_until_s, loop.time()) + held_ms / 1000
        loop.call_at(self._decoded_until_s, lambda: None if answer.done() else answer.set_result(answered))

    def lose(self, why: str) -> None:
        """The connection is over: what may be sent again waits for the next one, for the rest it was the last."""
        self._channel = None
        waiting, self._sent = self._sent, {}
        for request_id, one in waiting.items():
            if one.asked.reply.done():
                continue
            if not one.asked.lost.done():
                one.asked.lost.set_result(why)
            if one.message.attempt < one.attempts:
                self._lost[request_id] = one
            else:
                one.asked.reply.set_exception(ConnectionLost(why))

    def close(self, why: str) -> None:
        """No connection follows."""
        for one in self._lost.values():
            one.asked.reply.set_exception(ConnectionLost(why))
        self._lost.clear()


def _asks_for(message: Infer) -> tuple[str, str]:
    return message.digest, message.cut


def _now() -> float:
    return asyncio.get_running_loop().time()
