"""The device's side of the channel: one owner of the connection to a companion, and the requests that wait on it.

It dials (with back-off, over all configured companions), brings every model over, holds golden outputs against the
companion's before a model is shared (I10), opens the cuts, sends requests and hands replies back, pings. It never
decides and never runs a model; what it learns goes to the planner. A dead or silent companion fails nothing here: the
waiting requests get ConnectionLost and `serve` finishes them on the device.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.golden import Golden
from agent.planner import Planner
from agent.repository import ServedModel
from split.codec.golden import differs
from split.codec.image import image_fingerprint
from split.codec.payload import decode
from split.errors import (
    ChannelError,
    CompanionRefused,
    ConnectionLost,
    IdentityError,
    IsthmusError,
    RemoteProtocolError,
)
from split.ids import CutId
from split.tensor import Tensors
from split.transport.channel import Buffer, Channel, Incoming
from split.transport.retry import IDENTITY_RETRY_S, Backoff
from split.wire.messages import (
    Cancel,
    Goodbye,
    Infer,
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Ping,
    Pong,
    Priority,
    Refused,
    Reply,
    SegmentOpen,
    SegmentReady,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Model chunks: small enough that a request never waits long behind one."""
BULK_WINDOW_BYTES = 1024 * 1024
"""Model bytes queued ahead of the socket; more would only delay requests."""
SETUP_TIMEOUT_S = 120.0
"""For one answer while a model or a cut is being opened (the companion cuts it first)."""
TICK_S = 0.25
"""Heartbeat while requests wait or a probe is due (evidence: a silent peer must be noticed within a second)."""
STABLE_S = 1.0
"""A connection that lived so long was a good one: the back-off starts anew after it."""
SILENCE_S = 10.0
"""No byte for so long although a ping is out: the connection is given up and dialled anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """What came back for one request."""

    outputs: Tensors
    reply: Reply
    network_ms: float
    """Round trip without the companion's own time."""
    up_bytes: int
    down_bytes: int
    decode_ms: float
    """Of the outputs, here."""


@dataclass(slots=True, kw_only=True)
class _Waiting:
    future: asyncio.Future[RemoteReply]
    asked: Infer
    sent_at_s: float
    up_bytes: int
    """Payload and what was queued before it: all that had to travel first."""


_Key = tuple[str, str, str]
"""(model | segment, digest, cut)."""

Dial = Callable[[str], Awaitable[Channel]]


class Uplink:
    """Lives as long as the daemon. All methods are called on its event loop."""

    def __init__(
        self, *, companions: Sequence[str], dial: Dial, planner: Planner, golden: Golden, backoff: Backoff
    ) -> None:
        self._companions = tuple(companions)
        self._dial = dial
        self._planner = planner
        self._golden = golden
        self._backoff = backoff
        self._channel: Channel | None = None
        self._models: dict[str, ServedModel] = {}
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._answers: dict[_Key, asyncio.Queue[Message]] = {}
        """Set-up answers awaited, by what was asked."""
        self._pings: dict[int, tuple[float, int]] = {}
        """Nonce → when it was sent, and its padding in bytes."""
        self._nonces = itertools.count(1)
        self._setups: dict[str, asyncio.Task[None]] = {}
        self._heard_at_s = 0.0
        self._suspected = False
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        self.state = "no companion configured" if not companions else "connecting"
        self.connects = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._companions:
            self._task = asyncio.create_task(self._keep_connected(), name="uplink")
        else:
            self._planner.companion_lost(self.state, self._now())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def serve_model(self, model: ServedModel) -> None:
        """From now on this model may be shared with a companion."""
        self._models[model.name] = model
        if self._channel is not None:
            self._begin_setup(self._channel, model)

    def drop_model(self, model: ServedModel) -> None:
        self._models.pop(model.name, None)
        if (task := self._setups.pop(model.name, None)) is not None:
            task.cancel()

    @property
    def peer(self) -> str:
        return self._channel.peer.name if self._channel is not None else ""

    @property
    def inflight(self) -> int:
        return len(self._waiting)

    # -- requests -----------------------------------------------------------------------------------------------------

    def infer(self, message: Infer, payload: Sequence[Buffer], *, priority: Priority) -> asyncio.Future[RemoteReply]:
        """Send one request; the future gets its reply, or a ChannelError as soon as it is known that none will come.

        Raises ConnectionLost at once when there is no companion, Overloaded when the channel's byte bound is reached.
        """
        channel = self._channel
        if channel is None:
            raise ConnectionLost(f"no companion: {self.state}")
        ahead = channel.queued_bytes
        channel.send(message, payload, priority=priority)
        future = asyncio.get_running_loop().create_future()
        size = sum(memoryview(part).nbytes for part in payload)
        self._waiting[message.request_id, message.attempt] = _Waiting(
            future=future, asked=message, sent_at_s=self._now(), up_bytes=ahead + size
        )
        return future

    def abandon(self, request_id: str, attempt: int) -> None:
        """Nobody waits any more: unsent bytes are dropped, the companion is told."""
        waiting = self._waiting.pop((request_id, attempt), None)
        if waiting is None or self._channel is None:
            return
        now_s = self._now()
        self._planner.observe_late(waiting.up_bytes, (now_s - waiting.sent_at_s) * 1000, now_s)
        self._channel.forget(request_id, attempt)
        try:
            self._channel.send(Cancel(request_id=request_id, attempt=attempt), priority=Priority.CONTROL)
        except IsthmusError:  # gone, or full: the companion finds out by itself
            return

    def suspect(self) -> None:
        """A reply is late: no new request goes there until something is heard again."""
        if self._channel is not None and not self._suspected:
            self._suspected = True
            self.state = "silent"
            self._planner.companion_lost(f"the companion {self.address} does not answer in time", self._now())
            self._ping(0)

    # -- connection ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _keep_connected(self) -> None:
        for address in itertools.cycle(self._companions):
            self.address = address
            refused = False
            try:
                channel = await self._dial(address)
            except Exception as error:  # whatever it is, the next address or the next try may do
                if not isinstance(error, IsthmusError | OSError | TimeoutError):
                    log.exception("companion=%s cannot be dialled", address)
                self.state = f"cannot connect: {error or 'timed out'}"
                refused = isinstance(error, IdentityError) and len(self._companions) == 1
            else:
                started_at_s = self._now()
                try:
                    await self._live_with(channel)
                except ChannelError as error:
                    self.state = f"lost: {error}"
                except Exception:  # a bug of ours must not end remote use for ever
                    log.exception("companion=%s the connection is given up", address)
                    self.state = "lost: an internal error, the daemon's log says more"
                finally:
                    self._channel = None
                    self._fail_all(ConnectionLost(f"companion {address} {self.state}"))
                    await channel.close("the device is going")
                if self._now() - started_at_s > STABLE_S:
                    self._backoff.succeeded()
            self._planner.companion_lost(f"companion {address} {self.state}", self._now())
            delay_s = max(self._backoff.failed(), IDENTITY_RETRY_S if refused else 0.0)
            log.warning("companion=%s %s; next try in %.1f s", address, self.state, delay_s)
            await asyncio.sleep(delay_s)

    async def _live_with(self, channel: Channel) -> None:
        """Until the connection ends (it always ends with a ChannelError)."""
        self._channel, self.state, self.connects = channel, "connected", self.connects + 1
        self._suspected, self._heard_at_s = False, self._now()
        self._pings.clear()
        log.info("companion=%s connected as %s (%s)", self.address, channel.peer.name, channel.peer_hello.runtime)
        for model in self._models.values():
            self._begin_setup(channel, model)
        self._ping(0)
        beat = asyncio.create_task(self._keep_beating(channel), name="heartbeat")
        try:
            while True:
                self._take(channel, await channel.receive())
        finally:
            tasks = [beat, *self._setups.values()]
            self._setups.clear()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _take(self, channel: Channel, incoming: Incoming) -> None:
        self._heard_at_s = self._now()
        if self._suspected:
            self._suspected, self.state = False, "connected"
            self._planner.companion_back(self._now())
        match incoming.message:
            case Reply():
                self._take_reply(incoming.message, incoming)
            case Refused(request_id=request_id) as refused if request_id:
                waiting = self._waiting.pop((request_id, refused.attempt), None)
                if waiting is not None and not waiting.future.done():
                    waiting.future.set_exception(CompanionRefused(refused.code, refused.message))
            case ModelNeed(digest=digest) as answer:
                self._answer(("model", digest, ""), answer)
            case ModelReady(digest=digest) as answer:
                self._answer(("model", digest, ""), answer)
            case SegmentReady(digest=digest, cut=cut) as answer:
                self._answer(("segment", digest, cut), answer)
            case Refused(digest=digest, cut=cut) as answer:
                self._answer(("segment" if cut else "model", digest, cut), answer)
            case Pong(nonce=nonce):
                if (ping := self._pings.pop(nonce, None)) is not None:
                    rtt_ms = (incoming.received_at_s - ping[0]) * 1000
                    self._planner.observe_ping(rtt_ms, self._now(), padding_bytes=ping[1])
            case Goodbye(reason=reason):
                self._planner.companion_lost(f"companion {self.address} says goodbye: {reason}", self._now())
                self.state = f"goodbye: {reason}"
            case other:
                raise RemoteProtocolError(f"a companion does not send {type(other).__name__}")

    def _take_reply(self, reply: Reply, incoming: Incoming) -> None:
        waiting = self._waiting.pop((reply.request_id, reply.attempt), None)
        if waiting is None or waiting.future.done():
            return  # a stale attempt: its request was answered otherwise
        down_bytes = incoming.payload.nbytes
        network_ms = max((incoming.received_at_s - waiting.sent_at_s) * 1000 - reply.cloud_ms, 0.0)
        self._planner.observe_transfer(waiting.up_bytes, down_bytes, network_ms, self._now())
        started_s = time.perf_counter()
        try:
            if (reply.cut, reply.codec) != (waiting.asked.cut, waiting.asked.codec):
                raise RemoteProtocolError(f"{reply.cut} {reply.codec} was answered to {waiting.asked.cut}")
            outputs = decode(incoming.payload, max_bytes=max(down_bytes, 1) * 64)
            if missing := set(waiting.asked.outputs) - outputs.keys():
                raise RemoteProtocolError(f"output {min(missing)!r} is not in the reply")
        except IsthmusError as error:
            waiting.future.set_exception(RemoteProtocolError(f"the companion's reply is not usable: {error}"))
            return
        waiting.future.set_result(
            RemoteReply(
                outputs=outputs,
                reply=reply,
                network_ms=network_ms,
                up_bytes=waiting.up_bytes,
                down_bytes=down_bytes,
                decode_ms=(time.perf_counter() - started_s) * 1000,
            )
        )

    def _answer(self, key: _Key, message: Message) -> None:
        if (queue := self._answers.get(key)) is not None:
            queue.put_nowait(message)

    def _fail_all(self, error: ChannelError) -> None:
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.future.done():
                one.future.set_exception(error)

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

    async def _keep_beating(self, channel: Channel) -> None:
        """`_beat`, supervised: without it a silent companion would never be noticed, so the connection ends with it."""
        try:
            await self._beat(channel)
        except Exception:  # a bug of ours; the connection is dialled anew
            log.exception("companion=%s the heartbeat failed", self.address)
            await channel.close("the heartbeat of this side failed, its log says why")

    async def _beat(self, channel: Channel) -> None:
        """Ping while requests wait or the planner wants to know; give a silent connection up."""
        while channel.closed_because is None:
            await asyncio.sleep(TICK_S)
            now = self._now()
            silent_s = now - self._heard_at_s
            if self._pings and silent_s > SILENCE_S:
                await channel.close(f"nothing heard for {silent_s:.0f} s")
                return
            if (self._waiting or self._suspected) and silent_s > TICK_S and len(self._pings) < 4:
                self._ping(0)
            elif not self._waiting and (padding := self._planner.probe_wanted(now)) > 0:
                self._ping(padding)

    # -- models -------------------------------------------------------------------------------------------------------

    def _begin_setup(self, channel: Channel, model: ServedModel) -> None:
        if (old := self._setups.pop(model.name, None)) is not None:
            old.cancel()
        self._setups[model.name] = asyncio.create_task(self._set_up(channel, model), name=f"set up {model.name}")

    async def _set_up(self, channel: Channel, model: ServedModel) -> None:
        """Bring one model over, compare golden outputs, open its cuts; the planner learns each step."""
        if model.privacy == "local-only":
            self._planner.forbid_remote(model.name, "the contract says local-only")
            return
        try:
            await self._share(channel, model)
            for cut in model.card.cuts:
                await self._open_cut(channel, model, cut.id, cut.node_bitmap)
        except Exception as error:
            if not isinstance(error, IsthmusError | TimeoutError):
                log.exception("model=%s set-up failed", model.name)
            why = str(error) or "the companion did not answer while the model was set up"
            log.warning("model=%s is not shared with %s: %s", model.name, self.address, why)
            self._planner.forbid_remote(model.name, why)

    async def _share(self, channel: Channel, model: ServedModel) -> None:
        same = channel.peer_hello.image == image_fingerprint()
        why = None if same else "the companion decodes pictures otherwise than this device"
        self._planner.forbid_encoded(model.name, why)
        offer = ModelOffer(
            digest=model.digest,
            files=model.card.files,
            dims=model.profile.dims if model.profile is not None else {},
            golden=await self._golden.offered(model),
        )
        with self._expecting(("model", model.digest, "")) as answers:
            channel.send(offer)
            need = await _next(answers)
            if isinstance(need, ModelNeed) and need.missing:
                await self._send_files(channel, model, need)
            ready = await _next(answers)
        if not isinstance(ready, ModelReady):
            raise RemoteProtocolError(f"the companion answered an offer with {type(ready).__name__}")
        mine = await self._golden.run(model, None)
        theirs = decode(memoryview(ready.golden), max_bytes=1 << 26)
        if (why := differs(theirs, mine)) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes this model differently: {why}")
        self._planner.companion_ready(model.name, ready.whole_ms, ready.image_ms)

    async def _send_files(self, channel: Channel, model: ServedModel, need: ModelNeed) -> None:
        folder = Path(model.card.path).parent
        for name, start in need.missing:
            size = next(size for file, size, _ in model.card.files if file == name)
            with (folder / name).open("rb") as file:
                file.seek(start)
                offset = start
                while offset < size or size == 0:
                    data = await asyncio.to_thread(file.read, CHUNK_BYTES)
                    last = offset + len(data) >= size
                    chunk = ModelChunk(digest=model.digest, file=name, offset=offset, last=last)
                    await channel.drain(BULK_WINDOW_BYTES)
                    channel.send(chunk, [data], priority=Priority.BULK)
                    offset += len(data)
                    if last or not data:
                        break

    async def _open_cut(self, channel: Channel, model: ServedModel, cut: CutId, node_bitmap: str) -> None:
        """One cut; a cut that the companion refuses or computes differently is left out, the others go on."""
        try:
            with self._expecting(("segment", model.digest, cut)) as answers:
                channel.send(SegmentOpen(digest=model.digest, cut=cut, node_bitmap=node_bitmap))
                ready = await _next(answers)
        except CompanionRefused as error:
            log.warning("model=%s cut=%s refused by %s: %s", model.name, cut, self.address, error)
            return
        if not isinstance(ready, SegmentReady):
            raise RemoteProtocolError(f"the companion answered a cut with {type(ready).__name__}")
        mine = await self._golden.run(model, cut)
        if (why := differs(decode(memoryview(ready.golden), max_bytes=1 << 26), mine)) is not None:
            log.warning("model=%s cut=%s computed differently by %s: %s", model.name, cut, self.address, why)
            return
        self._planner.segment_ready(model.name, cut, ready.tail_ms)

    @contextmanager
    def _expecting(self, key: _Key) -> Iterator[asyncio.Queue[Message]]:
        queue = self._answers[key] = asyncio.Queue()
        try:
            yield queue
        finally:
            self._answers.pop(key, None)


async def _next(answers: asyncio.Queue[Message]) -> Message:
    """The next set-up answer; CompanionRefused for a refusal, TimeoutError when it does not come."""
    async with asyncio.timeout(SETUP_TIMEOUT_S):
        match await answers.get():
            case Refused(code=code, message=text):
                raise CompanionRefused(code, text)
            case message:
                return message
