"""The device's side of the channel: one connection to a companion, and the requests that wait on it.

It keeps a connection (`dialler.py` makes them), has every model shared over it (`openings.py`), sends requests, hands
replies back, pings. It never decides and never runs a model; what it learns goes to the planner. A dead or silent
companion fails nothing here: `serve` is told and finishes the waiting requests on the device, and those that may be
sent again are, when the next connection (to whichever companion) can answer them before that.

    connected ── a reply is late, a ping is unanswered ─────► silent ── anything is heard ──► connected
        │        or the way there has become another one         │
        │                                                       │
        │ Goodbye                                               │ another connection opened, dialled beside this one
        ▼                                                       ▼
    leaving ── no reply is awaited any more ──► hung up ◄───────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from agent.dialler import Dial, Dialler, Opened, Unreached
from agent.golden import Golden
from agent.interfaces import source_towards
from agent.openings import Openings, are_times
from agent.planner import Planner
from agent.served_model import ServedModel
from split.codec.image import image_fingerprint
from split.codec.payload import decode
from split.errors import (
    ChannelError,
    CompanionRefused,
    ConnectionLost,
    IsthmusError,
    Overloaded,
    RemoteProtocolError,
    TooLarge,
)
from split.tensor import Tensors
from split.transport.channel import Buffer, Channel, Incoming, Observation
from split.transport.retry import Backoff
from split.wire.messages import (
    RENEW_SINCE_MINOR,
    Cancel,
    Goodbye,
    Infer,
    ModelNeed,
    ModelReady,
    Ping,
    Pong,
    Priority,
    Refused,
    Renew,
    Renewed,
    Reply,
    SegmentReady,
)

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Heartbeat while requests wait or a probe is due (evidence: a silent peer must be noticed within a second)."""
SILENCE_S: Final = 5.0
"""A ping unanswered and nothing heard for so long: another connection is dialled beside this one.

A way that was broken for t < 5 s heals: TCP sends again within t (its timer doubles), and after 5 s the dial is under
way, so that remote use is back within min(t, 5 − t) ≤ 2.5 s; `dialler.py` sums up what follows a longer break.
Not shorter, or a slow link would pass for a dead one: up to 112 KiB are ahead of a ping (a frame of 64, and 16 each in
TLS, beneath it and unsent in the kernel), which take 5 s at 180 kbit/s."""
SILENCE_MAX_S: Final = 20.0
"""What it doubles to while one connection after the other is replaced: then the link is slow, not dead."""
SETTLED_S: Final = 60.0
"""A connection that lived so long shows that SILENCE_S is enough."""
PINGS_OUT: Final = 4
"""Unanswered pings at once; more would tell nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """What came back for one request."""

    outputs: Tensors
    reply: Reply
    network_ms: float
    """Round trip without the companion's own time."""
    decode_ms: float
    """Of the outputs, here."""


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
class _Waiting:
    asked: Asked
    message: Infer
    """As last sent."""
    payload: Sequence[Buffer]
    priority: Priority
    payload_bytes: int
    network_ms: float
    cloud_ms: float
    """What network and companion are expected to need of the time."""
    attempts: int
    sent_at_s: float = 0.0
    up_bytes: int = 0
    """Payload and what was queued before it: all that had to travel first."""


def _seen(future: asyncio.Future[RemoteReply]) -> None:
    """An error that comes at the very moment of the request's deadline finds nobody who waits; that is no news."""
    if not future.cancelled():
        future.exception()


class Uplink:
    """Lives as long as the daemon. All methods are called on its event loop."""

    def __init__(
        self,
        *,
        companions: Sequence[str],
        dial: Dial,
        planner: Planner,
        golden: Golden,
        backoff: Backoff,
        source_towards: Callable[[str], str | None] = source_towards,
    ) -> None:
        self.on_silence: Callable[[], None] = lambda: None
        """Called each time that another connection is about to be dialled beside one on which nothing is heard."""
        self.on_renewed: Callable[[Renewed], None] = lambda renewed: None
        """Called with the answer to `ask_renewal`."""
        self._dialler = Dialler(companions=companions, dial=dial, backoff=backoff, on_failure=self._not_connected)
        self._planner = planner
        self._golden = golden
        self._draw = backoff.draw
        self._channel: Channel | None = None
        self._openings: Openings | None = None
        self._models: dict[str, ServedModel] = {}
        self._waiting: dict[str, _Waiting] = {}
        """By request: what this connection has still to answer."""
        self._unsent: dict[str, _Waiting] = {}
        """What an earlier connection took with it and the next one may still answer."""
        self._pings: dict[int, tuple[float, int]] = {}
        """Nonce → when it was sent, and its padding in bytes; the oldest first."""
        self._nonces = itertools.count(1)
        self._heard_at_s = 0.0
        self._silence_s = SILENCE_S
        self._suspected = False
        self._leaving = False
        """The companion said goodbye: nothing new on this connection."""
        self._source_towards = source_towards
        self._no_way = self._moved = False
        """There was no way to the companion for a time; it is another one than this connection's."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.address = companions[0] if companions else ""
        self.state = "connecting" if companions else "no companion configured"
        self.connects = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.address:
            self._task = asyncio.create_task(self._keep_connected(), name="uplink")
        else:
            self._planner.companion_lost(self.state)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._dialler.close()
        for waiting in self._unsent.values():
            waiting.asked.reply.set_exception(ConnectionLost("the device is going"))
        self._unsent.clear()

    def serve_model(self, model: ServedModel) -> None:
        """From now on this model may be shared with a companion."""
        self._models[model.name] = model
        if self._openings is not None:
            self._openings.begin(model)

    def drop_model(self, model: ServedModel) -> None:
        self._models.pop(model.name, None)
        if self._openings is not None:
            self._openings.drop(model.name)

    @property
    def observation(self) -> Observation | None:
        """The link as the kernel sees it now; None without a connection."""
        return self._channel.observe() if self._channel is not None else None

    @property
    def peer(self) -> str:
        return self._channel.peer.name if self._channel is not None else ""

    @property
    def unreached(self) -> list[Unreached]:
        """Companions that could not be reached when they were last dialled."""
        return self._dialler.unreached

    @property
    def inflight(self) -> int:
        return len(self._waiting) + len(self._unsent)

    # -- requests -----------------------------------------------------------------------------------------------------

    def infer(
        self,
        message: Infer,
        payload: Sequence[Buffer],
        *,
        priority: Priority,
        network_ms: float = 0.0,
        cloud_ms: float = 0.0,
        attempts: int = 1,
    ) -> Asked:
        """Send one request, and again while `attempts` and its budget last when a connection takes it with it.

        `network_ms`, `cloud_ms`: what the link and the companion are expected to need, so that lateness is not all put
        down to the link, and nothing is sent again that would come too late. The payload must not change until
        `abandon`. Raises ConnectionLost at once when there is no companion, Overloaded when the channel's byte bound
        is reached or the metered bytes are used up, CompanionRefused (TOO_LARGE) for a message that the companion does
        not take.
        """
        loop = asyncio.get_running_loop()
        asked = Asked(reply=loop.create_future(), lost=loop.create_future())
        asked.reply.add_done_callback(_seen)
        waiting = _Waiting(
            asked=asked,
            message=message,
            payload=payload,
            priority=priority,
            payload_bytes=sum(memoryview(part).nbytes for part in payload),
            network_ms=network_ms,
            cloud_ms=cloud_ms,
            attempts=attempts,
        )
        self._put(waiting)
        return asked

    def _put(self, waiting: _Waiting) -> None:
        channel, message = self._channel, waiting.message
        if channel is None or self._leaving:
            raise ConnectionLost(f"no companion: {self.state}")
        ahead = self._ahead_bytes()
        if why := self._planner.metered_why_not(
            waiting.payload_bytes
        ):  # others may have used up what was left when this was decided
            raise Overloaded(why)
        try:
            channel.send(message, waiting.payload, priority=waiting.priority)
        except TooLarge as error:  # no mistake of the caller's: the device takes what the companion does not
            raise CompanionRefused(error.code, f"the companion {self.address} does not take it: {error}") from error
        waiting.sent_at_s, waiting.up_bytes = self._now(), ahead + waiting.payload_bytes
        self._waiting[message.request_id] = waiting

    def _send_again(self, digest: str, cut: str) -> None:
        """This connection takes requests of this cut now: what an earlier one took with it is sent, if that pays."""
        same_pictures = self._channel is not None and self._channel.peer_hello.image == image_fingerprint()
        for waiting in list(self._unsent.values()):
            message, asked = waiting.message, waiting.asked
            if (message.digest, message.cut) != (digest, cut) or not (same_pictures or message.codec != "encoded"):
                continue
            del self._unsent[message.request_id]
            now_s = self._now()
            left_ms = message.budget_ms - (now_s - waiting.sent_at_s) * 1000
            there_at_s = now_s + (waiting.network_ms + waiting.cloud_ms) / 1000
            try:
                if there_at_s > min(now_s + left_ms / 1000, asked.here_at_s):
                    raise ConnectionLost("the connection was lost, and sent again it would be answered too late")
                waiting.message = msgspec.structs.replace(message, attempt=message.attempt + 1, budget_ms=left_ms)
                self._put(waiting)
            except IsthmusError as error:
                asked.reply.set_exception(error)

    def _ahead_bytes(self) -> int:
        """Unsent bytes of the requests that wait. Files of models queue too, but any request overtakes them."""
        if self._channel is None or not self._waiting:
            return 0
        return min(self._channel.queued_bytes, sum(waiting.payload_bytes for waiting in self._waiting.values()))

    def abandon(self, request_id: str) -> None:
        """Nobody waits any more: unsent bytes are dropped, the companion is told."""
        self._unsent.pop(request_id, None)
        waiting = self._waiting.pop(request_id, None)
        if waiting is None or self._channel is None:
            return
        now_s = self._now()
        network_ms = (now_s - waiting.sent_at_s) * 1000 - waiting.cloud_ms
        self._planner.observe_late(waiting.up_bytes, network_ms, now_s)
        attempt = waiting.message.attempt
        self._channel.forget(request_id, attempt)
        try:
            self._channel.send(Cancel(request_id=request_id, attempt=attempt), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the companion finds out by itself
            return

    def ask_renewal(self, request: str) -> bool:
        """Ask the companion that is connected for a new certificate; False where none is that knows of it."""
        channel = self._channel
        if channel is None or self._leaving or channel.peer_hello.minor < RENEW_SINCE_MINOR:
            return False
        try:
            channel.send(Renew(request=request))
        except IsthmusError:  # gone, or full: asked again later
            return False
        return True

    def suspect(self, why: str = "does not answer in time") -> None:
        """A reply is late: no new request goes there until something is heard again."""
        if self._channel is not None and not self._suspected and not self._leaving:
            self._suspected, self.state = True, "silent"
            self._planner.companion_silent(f"the companion {self.address} {why}")
            self._ping(0)

    def network_changed(self) -> None:
        """Interfaces, addresses or routes are others now: no back-off goes on, and where the way to the companion has
        become another one, another connection is made beside the one that there is."""
        self._dialler.hurry()
        if self._channel is None or (ends := self._channel.ends) is None:
            return
        here, there = ends
        leads_from = self._source_towards(there)
        if leads_from is None:
            self._no_way = True
        elif leads_from != here or self._no_way:  # after a gap even the old way waits for TCP's timer, which has grown
            self._moved = True
            self._changed.set()

    # -- connection ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _keep_connected(self) -> None:
        opened = await self._dialler.open()
        while True:
            began_at_s = self._now()
            successor = await self._live_with(opened)
            lived_s = self._now() - began_at_s
            if successor is None:
                self._silence_s = SILENCE_S
                self._dialler.lost(opened.address, lived_s)
                successor = await self._dialler.open()
            else:
                self._silence_s = SILENCE_S if lived_s > SETTLED_S else min(2 * self._silence_s, SILENCE_MAX_S)
            opened = successor

    def _not_connected(self, why: str) -> None:
        """No companion can be reached. Beside a connection that is only silent so far, that changes nothing."""
        if self._channel is None:
            self.state = why
            self._planner.companion_lost(why)

    async def _live_with(self, opened: Opened) -> Opened | None:
        """Use this connection until it ends; the one that has taken its place, if any."""
        channel = self._channel = opened.channel
        elsewhere = opened.address != self.address
        self.address, self.state, self.connects = opened.address, "connected", self.connects + 1
        self._suspected = self._leaving = self._no_way = self._moved = False
        self._heard_at_s = self._now()
        self._pings.clear()
        self._planner.connected(
            max_message_bytes=channel.peer_hello.max_message_bytes,
            ahead_bytes=self._ahead_bytes,
            elsewhere=elsewhere,
        )
        log.info("companion=%s connected as %s (%s)", self.address, channel.peer.name, channel.peer_hello.runtime)
        openings = self._openings = Openings(
            channel, planner=self._planner, golden=self._golden, draw=self._draw, on_open=self._send_again
        )
        for model in self._models.values():
            openings.begin(model)
        self._ping(0)
        receiving = asyncio.create_task(self._receive(channel), name="receive")
        watching = asyncio.create_task(self._watch(), name="heartbeat")
        successor: Opened | None = None
        why = "the device is going"
        try:
            await asyncio.wait((receiving, watching), return_when=asyncio.FIRST_COMPLETED)
            match (watching if watching.done() else receiving).result():
                case Opened() as successor:
                    why = "lost: nothing was heard, and dialling anew worked"
                case why:
                    pass
        finally:
            self._channel = self._openings = None
            self.state = why
            self._lose(f"companion {self.address} {why}")
            self._planner.companion_lost(f"companion {self.address} {why}")
            self._dialler.hang_up(channel, why)
            receiving.cancel()
            if not watching.cancel() and successor is None:
                self._dialler.call_off(watching)  # it had just ended with a connection that nobody takes
            await asyncio.wait((receiving, watching))
            await openings.close()
        log.warning("companion=%s %s", opened.address, why)
        return successor

    async def _receive(self, channel: Channel) -> str:
        """Take what comes until the connection ends; why it did."""
        try:
            while True:
                self._take(await channel.receive())
        except ChannelError as error:
            return f"lost: {error}"
        except Exception:  # a bug of ours must not end remote use for ever
            log.exception("companion=%s the connection is given up", self.address)
            return "lost: an internal error, the daemon's log says more"

    def _take(self, incoming: Incoming) -> None:
        self._heard_at_s = self._now()
        if self._suspected:
            self._suspected, self.state = False, "connected"
            self._planner.companion_back()
        match incoming.message:
            case Reply():
                self._take_reply(incoming.message, incoming)
            case Refused(request_id=request_id) as refused if request_id:
                if (waiting := self._answered(request_id, refused.attempt)) is not None:
                    waiting.asked.reply.set_exception(CompanionRefused(refused.code, refused.message))
            case ModelNeed() | ModelReady() | SegmentReady() | Refused() as answer:
                if self._openings is not None:
                    self._openings.take(answer)
            case Pong(nonce=nonce):
                if (ping := self._pings.pop(nonce, None)) is not None:
                    rtt_ms = (incoming.received_at_s - ping[0]) * 1000
                    self._planner.observe_ping(rtt_ms, self._now(), padding_bytes=ping[1])
                    heavy = ping[1] > 0  # those may travel on another connection; on one, answers keep their order
                    for older in [n for n, (_, weight) in self._pings.items() if n < nonce and (weight > 0) == heavy]:
                        del self._pings[older]  # that answer will not come
            case Renewed() as renewed:
                self.on_renewed(renewed)
            case Goodbye(reason=reason):
                self._take_goodbye(reason)
            case other:
                raise RemoteProtocolError(f"a companion does not send {type(other).__name__}")

    def _take_goodbye(self, reason: str) -> None:
        """Nothing new goes there, whatever it still says; what was sent may still be answered."""
        self._leaving, self.state = True, f"goodbye: {reason}"
        self._planner.companion_lost(f"companion {self.address} says goodbye: {reason}")
        if self._openings is not None:
            self._openings.stop()

    def _answered(self, request_id: str, attempt: int) -> _Waiting | None:
        """Who waits for the answer to this attempt; None for a stale one, and when the answer has come otherwise."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.message.attempt != attempt:
            return None
        del self._waiting[request_id]
        return None if waiting.asked.reply.done() else waiting

    def _take_reply(self, reply: Reply, incoming: Incoming) -> None:
        waiting = self._answered(reply.request_id, reply.attempt)
        if waiting is None:
            return
        answer = waiting.asked.reply
        times_ms = (reply.queue_ms, reply.decode_ms, reply.tail_ms, reply.encode_ms, reply.cloud_ms)
        if not are_times(*times_ms):  # a single NaN would stay in every estimate
            error = RemoteProtocolError(f"the companion's reply is not usable: it says that it took {times_ms} ms")
            answer.set_exception(error)
            return
        down_bytes = incoming.payload.nbytes
        network_ms = max((incoming.received_at_s - waiting.sent_at_s) * 1000 - reply.cloud_ms, 0.0)
        self._planner.observe_transfer(waiting.up_bytes, down_bytes, network_ms, self._now())
        started_s = time.perf_counter()
        try:
            if (reply.cut, reply.codec) != (waiting.message.cut, waiting.message.codec):
                raise RemoteProtocolError(f"{reply.cut} {reply.codec} was answered to {waiting.message.cut}")
            outputs = decode(incoming.payload, max_bytes=max(down_bytes, 1) * 64)
            if missing := set(waiting.message.outputs) - outputs.keys():
                raise RemoteProtocolError(f"output {min(missing)!r} is not in the reply")
        except IsthmusError as error:
            answer.set_exception(RemoteProtocolError(f"the companion's reply is not usable: {error}"))
            return
        decode_ms = (time.perf_counter() - started_s) * 1000
        answer.set_result(
            RemoteReply(
                outputs=outputs,
                reply=reply,
                network_ms=network_ms,
                decode_ms=decode_ms,
            )
        )
        self._planner.observe_reply(
            waiting.message.digest,
            waiting.message.codec,
            down_bytes=down_bytes,
            decode_ms=decode_ms,
            cloud_decode_ms=reply.decode_ms,
        )
        if not self._waiting and (padding := self._planner.probe_wanted(self._now())) > 0:
            self._ping(padding)  # the reply was a surprise: a stall, or another link?

    def _lose(self, why: str) -> None:
        """The connection is over: what may be sent again waits for the next one, for the rest it was the last."""
        waiting, self._waiting = self._waiting, {}
        for request_id, one in waiting.items():
            if one.asked.reply.done():
                continue
            if not one.asked.lost.done():
                one.asked.lost.set_result(why)
            if one.message.attempt < one.attempts:
                self._unsent[request_id] = one
            else:
                one.asked.reply.set_exception(ConnectionLost(why))

    # -- heartbeat ----------------------------------------------------------------------------------------------------

    def _ping(self, padding: int) -> None:
        if self._channel is None:
            return
        nonce = next(self._nonces)
        try:
            self._channel.send(Ping(nonce=nonce, padding=bytes(padding)), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the next tick asks again
            return
        self._pings[nonce] = (self._now(), padding)

    async def _watch(self) -> Opened | str:
        """The heartbeat, supervised: the connection ends with it, or nothing would notice a silent companion."""
        try:
            return await self._beat()
        except Exception:
            log.exception("companion=%s the heartbeat failed", self.address)
            return "lost: the heartbeat of this side failed, the daemon's log says why"

    async def _beat(self) -> Opened | str:
        """Ping while requests wait or the planner wants to know. Ends with why to hang up, or, after a silence
        or a change of the network, with the connection that another dial made."""
        successor: asyncio.Task[Opened] | None = None
        try:
            while True:
                if successor is not None:
                    await asyncio.wait((successor,), timeout=TICK_S)
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(TICK_S):
                            await self._changed.wait()
                self._changed.clear()
                now_s = self._now()
                silent = self._unanswered_s(now_s) > self._silence_s
                if self._leaving and (silent or not self._waiting):
                    return self.state
                if successor is not None and successor.done():
                    opened, successor = successor.result(), None
                    return opened
                if (silent or self._moved) and successor is None:
                    self.suspect("is reached another way now" if self._moved else "does not answer in time")
                    self.on_silence()
                    successor = asyncio.create_task(self._dialler.open(), name="dial beside")
                elif not (silent or self._moved) and successor is not None:
                    self._dialler.call_off(successor)
                    successor = None
                if len(self._pings) >= PINGS_OUT:
                    continue
                if (self._waiting or self._suspected) and now_s - self._heard_at_s > TICK_S:
                    self._ping(0)
                elif not self._waiting and (padding := self._planner.probe_wanted(now_s)) > 0:
                    self._ping(padding)
        finally:
            if successor is not None:
                self._dialler.call_off(successor)

    def _unanswered_s(self, now_s: float) -> float:
        """For how long nothing was heard although a ping is out; 0 without one."""
        if not self._pings:
            return 0.0
        oldest_s, _ = next(iter(self._pings.values()))
        return now_s - max(self._heard_at_s, oldest_s)
