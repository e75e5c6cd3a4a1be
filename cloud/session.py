"""One connected device: what it offers, opens and asks, over any channel. The straight road of a request on this side
is `_infer`: admit, decode, check, run, encode, reply.

Invariants: nothing runs that was not opened in this session under the same digest and cut (I6); every Infer gets one
Reply or one Refused, unless it was cancelled or the session ended; nothing about a request is kept after its answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cloud.admission import Admission
from cloud.executor import Done, TailExecutor, Work
from cloud.metrics import Metrics
from cloud.segments import PreparedModel, Segments
from cloud.store import ModelStore
from split.codec.golden import golden_inputs, sample
from split.codec.image import ImageSpec, prepare_image
from split.codec.payload import CODECS, decode, encode
from split.errors import (
    CompanionRefused,
    ConnectionLost,
    InvalidRequest,
    IsthmusError,
    ModelUnavailable,
    Overloaded,
    RemoteProtocolError,
)
from split.ids import OFFLOAD_CUT, CutId
from split.tensor import Array, Tensors, TensorSpec, dtype_name
from split.transport.channel import Buffer, Channel, Incoming
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

INLINE_BYTES = 1 << 20
"""Raw payloads up to here are decoded and encoded on the event loop: views or at most one copy, about 0.1 ms."""
GOLDEN_RUNS = 3
"""Timed golden runs after one that opens and warms up; the median of three shrugs off one disturbance."""
MAX_MODELS = 256
"""Models of one session; a device with more in use at once is broken."""
MAX_SETUPS = 64
"""Models and cuts being opened at once for one device; it asks for them one after the other."""
MAX_GOLDEN_BYTES = 64 << 20
"""Golden inputs as decoded: a few pictures."""
DRIFT_SHARE = 0.2
"""Weight of the latest run in the expected time of the next: follows a change within about five requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """What all sessions of one companion share."""

    store: ModelStore
    segments: Segments
    executor: TailExecutor
    admission: Admission
    metrics: Metrics
    decoded_bytes: int
    """Bound of one payload as decoded: a few compressed bytes must not become gigabytes."""


@dataclass(slots=True, kw_only=True)
class _Opened:
    """A tail, or the whole model, that this session may ask for."""

    path: Path
    feeds: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    expected_ms: float


@dataclass(slots=True, kw_only=True)
class _Offered:
    """A model this session wants to use."""

    offer: ModelOffer
    preparing: asyncio.Task[None] | None = None
    model: PreparedModel | None = None
    """Set when it is ready."""
    golden: Tensors = field(default_factory=dict)
    opened: dict[str, _Opened] = field(default_factory=dict)
    """By cut id, and `offload`."""


class Session:
    """Serves one device until its channel ends; `run` once, `goodbye` and `drained` from outside."""

    def __init__(self, channel: Channel, companion: Companion) -> None:
        self._channel = channel
        self._companion = companion
        self._device = channel.peer.name
        self._offered: dict[str, _Offered] = {}
        self._refused: set[str] = set()
        """Digests whose chunks may still be on their way after a refusal: they are let fall."""
        self._requests: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._setups: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = ""
        self._cut_off = False
        self._group = asyncio.TaskGroup()
        """Owner of all tasks of this session."""

    async def run(self) -> None:
        """Until the channel is closed, by either side. Raises nothing of the peer's making."""
        device = self._device
        log.info("session opened device=%s agent=%r", device, self._channel.peer_hello.agent)
        self._companion.metrics.sessions.inc()
        try:
            async with self._group:
                try:
                    await self._serve()
                finally:
                    self._cut_off = True  # nothing is started any more
                    for task in (*self._requests.values(), *self._setups):
                        task.cancel()
        finally:
            self._companion.metrics.sessions.dec()
            for digest in self._offered:
                self._companion.store.release(digest, self._device)
            log.info("session closed device=%s reason=%r", device, self._channel.closed_because or "")

    def goodbye(self, reason: str) -> None:
        """Tell the device that nothing new is taken; what is under way goes on."""
        self._leaving = reason
        self._send(Goodbye(reason=reason), priority=Priority.CONTROL)

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def close(self, reason: str) -> None:
        """Send what is queued, then end the session."""
        await self._channel.close(reason)

    async def _serve(self) -> None:
        while True:
            try:
                incoming = await self._channel.receive()
                await self._take(incoming)
            except ConnectionLost:
                return
            except RemoteProtocolError as error:
                log.warning("session broken device=%s error=%r", self._device, str(error))
                await self._channel.close(str(error))
                return

    async def _take(self, incoming: Incoming) -> None:
        match incoming.message:
            case Infer(request_id="") | ModelOffer(digest="") | ModelChunk(digest="") | SegmentOpen(digest=""):
                raise RemoteProtocolError("a message without the id or digest it is about cannot be answered")
            case Infer() as infer:
                self._begin_infer(infer, incoming)
            case Cancel() as cancel:
                self._cancel(cancel)
            case ModelOffer() as offer:
                await self._offer(offer)
            case ModelChunk() as chunk:
                await self._chunk(chunk, incoming.payload)
            case SegmentOpen() as wanted:
                self._begin_setup(lambda: self._open_cut(wanted), digest=wanted.digest, cut=wanted.cut)
            case Ping(nonce=nonce):
                self._send(Pong(nonce=nonce), priority=Priority.CONTROL)
            case Pong():
                pass
            case Goodbye(reason=reason):
                log.info("goodbye device=%s reason=%r", self._device, reason)
            case other:
                raise RemoteProtocolError(f"a device does not send {type(other).__name__}")

    # -- requests -----------------------------------------------------------------------------------------------------

    def _begin_infer(self, infer: Infer, incoming: Incoming) -> None:
        key, size, shared = (infer.request_id, infer.attempt), incoming.payload.nbytes, self._companion
        if key in self._requests:
            return  # the same attempt twice gets one answer
        shared.metrics.received_bytes.inc(size)
        deadline_at_s = incoming.received_at_s + infer.budget_ms / 1000
        try:
            if self._leaving:
                raise ModelUnavailable(f"the companion takes nothing new: {self._leaving}")
            opened = self._find(infer)
            shared.admission.enter(
                size,
                wait_ms=shared.executor.wait_ms(self._device),
                budget_ms=(deadline_at_s - time.monotonic()) * 1000,
            )
        except IsthmusError as error:
            self._refuse_request(infer, error)
            return
        shared.metrics.inflight_bytes.set(shared.admission.inflight_bytes)
        task = self._group.create_task(self._infer(infer, incoming, opened, deadline_at_s))
        self._requests[key] = task
        self._idle.clear()

        def left(_: asyncio.Task[None]) -> None:  # a callback: a task cancelled before its first step runs no `finally`
            shared.admission.leave(size)
            shared.metrics.inflight_bytes.set(shared.admission.inflight_bytes)
            del self._requests[key]
            if not self._requests:
                self._idle.set()

        task.add_done_callback(left)

    def _find(self, infer: Infer) -> _Opened:
        """What this frame asks for, if exactly that was opened here; otherwise it is never answered (I6)."""
        offered = self._offered.get(infer.digest)
        opened = offered.opened.get(infer.cut) if offered is not None else None
        if opened is None:
            what = f"cut {infer.cut[:40]} of model {infer.digest[:80]}"
            raise CompanionRefused("PLAN_MISMATCH", f"{what} was not opened in this session; open it first")
        if infer.codec not in CODECS or infer.output_codec not in CODECS or infer.output_codec == "encoded":
            raise CompanionRefused(
                "PLAN_MISMATCH",
                f"codecs {infer.codec[:40]!r} up and {infer.output_codec[:40]!r} down are not both spoken here",
            )
        if (infer.codec == "encoded") != bool(infer.encoded) or (infer.encoded and infer.cut != OFFLOAD_CUT):
            raise CompanionRefused(
                "PLAN_MISMATCH", "codec 'encoded' goes with cut 'offload' and says in `encoded` how to read its inputs"
            )
        if not math.isfinite(infer.budget_ms):
            raise InvalidRequest(f"budget_ms must be a finite number, got {infer.budget_ms}")
        known = {spec.name for spec in offered.model.card.outputs} if offered and offered.model else set()
        unknown = [name for name in infer.outputs if name not in known]
        if unknown:
            raise InvalidRequest(
                f"output {unknown[0][:80]!r} is not the model's, which makes {', '.join(sorted(known))}"
            )
        return opened

    async def _infer(self, infer: Infer, incoming: Incoming, opened: _Opened, deadline_at_s: float) -> None:
        try:
            began_at_s = time.monotonic()
            feeds = await self._decode(infer, incoming.payload)
            check_feeds(feeds, opened.feeds)
            decoded_at_s = time.monotonic()
            done = await self._companion.executor.run(
                Work(
                    path=opened.path,
                    feeds=feeds,
                    outputs=_wanted(infer.outputs, opened.outputs),
                    device=self._device,
                    deadline_at_s=deadline_at_s,
                    expected_ms=opened.expected_ms,
                )
            )
            opened.expected_ms += DRIFT_SHARE * (done.run_ms - opened.expected_ms)
            encoding_at_s = time.monotonic()
            payload = await self._encode(done.outputs, infer.output_codec)
            ended_at_s = time.monotonic()
            reply = Reply(
                request_id=infer.request_id,
                attempt=infer.attempt,
                cut=infer.cut,
                codec=infer.codec,
                queue_ms=done.queue_ms,
                decode_ms=(decoded_at_s - began_at_s) * 1000,
                tail_ms=done.run_ms,
                encode_ms=(ended_at_s - encoding_at_s) * 1000,
                cloud_ms=(ended_at_s - incoming.received_at_s) * 1000,
            )
            self._send(reply, payload)
            self._companion.metrics.requests.labels("ok").inc()
            self._companion.metrics.queue_seconds.observe(done.queue_ms / 1000)
            self._companion.metrics.tail_seconds.observe(done.run_ms / 1000)
            self._companion.metrics.sent_bytes.inc(sum(memoryview(part).nbytes for part in payload))
        except IsthmusError as error:
            self._refuse_request(infer, error)

    async def _decode(self, infer: Infer, payload: memoryview) -> Tensors:
        bound = self._companion.decoded_bytes
        if infer.codec == "raw" and payload.nbytes <= INLINE_BYTES:
            return decode(payload, max_bytes=bound)
        return await asyncio.to_thread(_decode_inputs, payload, infer.encoded, bound)

    async def _encode(self, outputs: Tensors, codec: str) -> list[Buffer]:
        if codec == "raw" and sum(array.nbytes for array in outputs.values()) <= INLINE_BYTES:
            return encode(outputs, codec)
        return await asyncio.to_thread(encode, outputs, codec)

    def _cancel(self, cancel: Cancel) -> None:
        task = self._requests.get((cancel.request_id, cancel.attempt))
        if task is not None:
            task.cancel()
            self._companion.metrics.requests.labels("cancelled").inc()
        else:
            self._channel.forget(cancel.request_id, cancel.attempt)

    def _refuse_request(self, infer: Infer, error: IsthmusError) -> None:
        self._companion.metrics.requests.labels(error.code).inc()
        self._send(
            Refused(
                code=error.code,
                message=str(error),
                request_id=infer.request_id,
                attempt=infer.attempt,
                digest=infer.digest,
                cut=infer.cut,
            ),
            priority=Priority.URGENT,
        )

    # -- models and cuts ----------------------------------------------------------------------------------------------

    async def _offer(self, offer: ModelOffer) -> None:
        digest, store = offer.digest, self._companion.store
        try:
            if len(self._offered) >= MAX_MODELS and digest not in self._offered:
                raise Overloaded(f"this session uses {MAX_MODELS} models already; a new connection starts afresh")
            self._drop_offer(digest)
            missing = await asyncio.to_thread(store.offer, digest, self._device, offer.files)
        except IsthmusError as error:
            self._refuse_setup(error, digest=digest)
            return
        except OSError as error:
            self._refuse_setup(_storage_error(error), digest=digest)
            return
        self._refused.discard(digest)
        self._offered[digest] = _Offered(offer=offer)
        self._send(ModelNeed(digest=digest, missing=tuple((offer.files[index][0], at) for index, at in missing)))
        if not missing:
            self._begin_preparing(self._offered[digest])

    async def _chunk(self, chunk: ModelChunk, data: memoryview) -> None:
        digest = chunk.digest
        offered = self._offered.get(digest)
        if offered is None and digest in self._refused:
            return
        try:
            if offered is None:
                raise InvalidRequest(f"model {digest[:80]} was not offered; offer it before sending its files")
            index = next((i for i, (name, _, _) in enumerate(offered.offer.files) if name == chunk.file), None)
            if index is None:
                raise InvalidRequest(f"file {chunk.file[:80]!r} is not among those offered for {digest}")
            whole = await asyncio.to_thread(
                self._companion.store.write, digest, self._device, index, chunk.offset, data
            )
        except IsthmusError as error:
            self._refuse_setup(error, digest=digest)
            return
        except OSError as error:
            self._refuse_setup(_storage_error(error), digest=digest)
            return
        if whole and offered.preparing is None:
            self._begin_preparing(offered)

    def _begin_preparing(self, offered: _Offered) -> None:
        offered.preparing = self._begin_setup(lambda: self._prepare(offered), digest=offered.offer.digest)

    async def _prepare(self, offered: _Offered) -> None:
        """From all bytes on disk to ModelReady: hashes, card, golden run."""
        shared, offer = self._companion, offered.offer
        if not await asyncio.to_thread(shared.store.finish, offer.digest, self._device):
            raise InvalidRequest(f"model {offer.digest} was removed meanwhile; offer it again")
        try:
            await shared.segments.keep_only(shared.store.held)  # older models may have made room for this one
            model = await shared.segments.prepare(offer.digest, shared.store.path(offer.digest), offer.dims)
        except CompanionRefused as error:
            if error.code == "DIGEST_MISMATCH":
                await asyncio.to_thread(shared.store.remove, offer.digest)
                shared.segments.forget(offer.digest)
            raise
        golden = _golden_of(offer, model.card.inputs)
        whole = _Opened(
            path=model.path,
            feeds=model.card.inputs,
            outputs=tuple(spec.name for spec in model.card.outputs),
            expected_ms=0.0,
        )
        outputs = await self._golden_run(whole, golden)
        offered.model, offered.golden = model, golden
        offered.opened[OFFLOAD_CUT] = whole
        shared.metrics.models_ready.inc()
        log.info("model ready device=%s digest=%s whole_ms=%.2f", self._device, offer.digest, whole.expected_ms)
        self._send(
            # image_ms stays 0, unknown: what pictures will come is the contract's, the replies will tell.
            ModelReady(digest=offer.digest, golden=_joined(sample(outputs)), whole_ms=whole.expected_ms)
        )

    async def _open_cut(self, wanted: SegmentOpen) -> None:
        """Make the halves of a cut, run head ∘ tail on the golden inputs, answer SegmentReady."""
        offered = self._offered.get(wanted.digest)
        if offered is None or offered.model is None:
            raise CompanionRefused(
                "PLAN_MISMATCH", f"model {wanted.digest[:80]} is not ready in this session; offer it first"
            )
        model, golden = offered.model, offered.golden
        card = await self._companion.segments.cut(model, CutId(wanted.cut), wanted.node_bitmap)
        by_name = {spec.name: spec for spec in model.card.inputs}
        boundary = tuple(spec.name for spec in card.boundary)
        head = _Opened(
            path=model.head(card.id),
            feeds=tuple(by_name[name] for name in card.head_inputs),
            outputs=tuple(dict.fromkeys((*boundary, *card.head_outputs))),
            expected_ms=0.0,
        )
        tail = _Opened(
            path=model.tail(card.id),
            feeds=(*card.boundary, *(by_name[name] for name in card.tail_inputs)),
            outputs=card.tail_outputs,
            expected_ms=0.0,
        )
        made = await self._golden_run(head, {name: golden[name] for name in card.head_inputs}, times=0)
        feeds = {name: made[name] for name in boundary} | {name: golden[name] for name in card.tail_inputs}
        check_feeds(feeds, tail.feeds)
        outputs = await self._golden_run(tail, feeds)
        self._companion.executor.forget(head.path)  # heads run on devices
        offered.opened[card.id] = tail
        log.info(
            "segment ready device=%s digest=%s cut=%s tail_ms=%.2f",
            self._device,
            wanted.digest,
            card.id,
            tail.expected_ms,
        )
        self._send(
            SegmentReady(
                digest=wanted.digest, cut=card.id, golden=_joined(sample(made | outputs)), tail_ms=tail.expected_ms
            )
        )

    async def _golden_run(self, opened: _Opened, feeds: Tensors, *, times: int = GOLDEN_RUNS) -> Tensors:
        """Open and run once, then `times` more for `opened.expected_ms` (their median); the first run's outputs."""
        executor = self._companion.executor
        await executor.open(opened.path)
        runs: list[Done] = []
        for _ in range(1 + times):
            work = Work(
                path=opened.path,
                feeds=feeds,
                outputs=opened.outputs,
                device=self._device,
                deadline_at_s=math.inf,
                expected_ms=opened.expected_ms,
            )
            runs.append(await executor.run(work))
        opened.expected_ms = statistics.median(run.run_ms for run in runs[1:] or runs)
        return runs[0].outputs

    def _begin_setup(self, work: Callable[[], Awaitable[None]], *, digest: str, cut: str = "") -> asyncio.Task[None]:
        """Run one set-up step beside the requests; its failure becomes a Refused."""

        async def guarded() -> None:
            try:
                if len(self._setups) > MAX_SETUPS:
                    raise Overloaded(f"{MAX_SETUPS} models and cuts are being opened for this device; wait for them")
                await work()
            except IsthmusError as error:
                self._refuse_setup(error, digest=digest, cut=cut)
            except OSError as error:
                self._refuse_setup(_storage_error(error), digest=digest, cut=cut)

        task = self._group.create_task(guarded())
        self._setups.add(task)
        task.add_done_callback(self._setups.discard)
        return task

    def _drop_offer(self, digest: str) -> None:
        """Nothing of this model is answered any more in this session (it is offered again, or failed)."""
        offered = self._offered.pop(digest, None)
        if offered is None:
            return
        if offered.preparing is not None and offered.preparing is not asyncio.current_task():
            offered.preparing.cancel()
        self._companion.store.release(digest, self._device)

    def _refuse_setup(self, error: IsthmusError, *, digest: str, cut: str = "") -> None:
        log.warning(
            "refused device=%s digest=%s cut=%s code=%s error=%r", self._device, digest, cut, error.code, str(error)
        )
        self._companion.metrics.refusals.labels(error.code).inc()
        if not cut:
            self._drop_offer(digest)
            if len(self._refused) >= MAX_MODELS:
                self._refused.clear()
            self._refused.add(digest)
        self._send(Refused(code=error.code, message=str(error), digest=digest, cut=cut))

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send(self, message: Message, payload: Sequence[Buffer] = (), *, priority: Priority = Priority.NORMAL) -> None:
        """Queue a message. A device that is gone needs none; one that does not read is cut off: what it is owed must
        not pile up here. TooLarge when the device takes no message of that size."""
        try:
            self._channel.send(message, payload, priority=priority)
        except ConnectionLost:
            return
        except Overloaded as error:
            log.warning("cut off device=%s error=%r", self._device, str(error))
            if not self._cut_off:
                self._cut_off = True
                self._group.create_task(self._channel.close("the device does not read what it is sent"))


def _golden_of(offer: ModelOffer, inputs: Sequence[TensorSpec]) -> Tensors:
    """The golden inputs that came with the offer, or the built-in ones of its dims."""
    if offer.golden:
        golden = decode(memoryview(offer.golden), max_bytes=MAX_GOLDEN_BYTES)
        check_feeds(golden, inputs)
        return golden
    size = sum(spec.nbytes(offer.dims) for spec in inputs)
    if size > MAX_GOLDEN_BYTES or any(dim < 0 for dim in offer.dims.values()):
        raise InvalidRequest(
            f"golden inputs of these dims would have {size} bytes, at most {MAX_GOLDEN_BYTES} are; give smaller ones"
        )
    return golden_inputs(inputs, offer.dims)


def _decode_inputs(payload: memoryview, rules: Mapping[str, Mapping[str, object]], max_bytes: int) -> Tensors:
    """Tensors of a payload; inputs that `rules` names came as the picture's own bytes and are prepared here."""
    tensors = decode(payload, max_bytes=max_bytes)
    for name, rule in rules.items():
        try:
            spec = msgspec.convert(rule, ImageSpec)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"how to read input {name[:80]!r} makes no sense: {error}") from error
        array = tensors.get(name)
        if array is None or dtype_name(array.dtype) != "BYTES" or array.shape != (1,):
            raise InvalidRequest(f"input {name[:80]!r} must be a BYTES tensor of shape [1] with codec 'encoded'")
        tensors[name] = prepare_image(bytes(array[0]), spec)
    return tensors


def _wanted(asked: tuple[str, ...], made: tuple[str, ...]) -> tuple[str, ...]:
    """Of the outputs asked for, those made here; the device keeps what its head made. Nothing asked: all."""
    return tuple(name for name in asked if name in made) if asked else made


def _joined(tensors: Tensors) -> bytes:
    return b"".join(bytes(part) for part in encode(tensors, "raw"))


def _storage_error(error: OSError) -> CompanionRefused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CompanionRefused("DISK_FULL", f"the companion's disk is full ({error.strerror})")
    return CompanionRefused("STORAGE_FAILED", f"the companion cannot store this: {error.strerror or error}")


def check_feeds(feeds: Mapping[str, Array], specs: Sequence[TensorSpec]) -> None:
    """InvalidRequest unless `feeds` are exactly these tensors by name, element type and rank.

    Sizes are not compared: a boundary's shape is known only as far as shape inference went; the runtime checks them.
    """
    wanted = {spec.name: spec for spec in specs}
    if feeds.keys() != wanted.keys():
        raise InvalidRequest(
            f"expected the tensors {', '.join(sorted(wanted)) or 'none'}, got {', '.join(sorted(feeds)) or 'none'}"
        )
    for name, array in feeds.items():
        spec = wanted[name]
        if dtype_name(array.dtype) != spec.dtype or array.ndim != len(spec.shape):
            raise InvalidRequest(
                f"tensor {name!r} must have datatype {spec.dtype} and {len(spec.shape)} dims, got "
                f"{dtype_name(array.dtype)} and shape {list(array.shape)}"
            )
