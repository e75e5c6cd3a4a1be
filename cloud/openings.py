"""What one session brought and opened: models on their way, the cuts that may be asked for. How they are tried first is
`golden.py`'s, requests are `requests.py`'s.

A step that takes long (hashes, cutting, golden runs) is a task of the session's group; its failure becomes a Refused
and the session lives on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cloud.calibrations import CALIBRATIONS_MAX, Calibrations, check_offer, read_offered
from cloud.companion import Companion
from cloud.golden import GoldenRuns, golden_of
from cloud.opened import Opened
from cloud.segments import PreparedModel
from cloud.uploads import Wanted
from split.errors import CompanionRefused, InvalidRequest, IsthmusError, Overloaded
from split.ids import OFFLOAD_CUT, CutId
from split.tensor import Tensors
from split.wire.limits import MESSAGE_OVERHEAD_BYTES
from split.wire.messages import (
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Refused,
    SegmentOpen,
    SegmentReady,
)

log = logging.getLogger(__name__)

MAX_MODELS = 256
"""Models of one session; a device with more in use at once is broken."""
MAX_SETUPS = 64
"""Models and cuts being opened at once for one device; it asks for them one after the other."""
WAITING_BYTES = 4 << 20
"""Offers and pieces of models that wait for the disk; beyond it the session takes nothing more, and its device sends
nothing more by and by. So requests wait for the disk only where that is slower than the link."""
LOG_S = 1.0
LOG_LINES = 32.0
"""A session's lines about what was refused: one a second, so many at once (each of a model's cuts may have its own)."""
MAX_TEXT = 2000
"""Characters of a refusal: some name what came, and what came may be long."""


@dataclass(slots=True, kw_only=True)
class _Offered:
    """A model this session wants to use."""

    offer: ModelOffer
    preparing: asyncio.Task[None] | None = None
    model: PreparedModel | None = None
    """Set when it is ready."""
    ready: ModelReady | None = None
    """What was answered when it was."""
    golden: Tensors = field(default_factory=dict)
    opened: dict[str, Opened] = field(default_factory=dict)
    """By cut id, and `offload`."""

    def asked_as(self, offer: ModelOffer) -> bool:
        """Whether `offer`, of the same digest, wants the same golden run."""
        return (self.offer.dims, self.offer.golden, self.offer.calibrates) == (
            offer.dims,
            offer.golden,
            offer.calibrates,
        )

    def is_preparing(self, offer: ModelOffer) -> bool:
        """Whether what is being made ready right now will answer `offer` too."""
        return self.preparing is not None and not self.preparing.done() and self.asked_as(offer)


class Openings:
    """The models and cuts of one session. `group` owns the tasks, `send` queues a message to the device."""

    def __init__(
        self, device: str, companion: Companion, group: asyncio.TaskGroup, send: Callable[[Message], None]
    ) -> None:
        self._device = device
        self._companion = companion
        self._group = group
        self._send = send
        self._golden = GoldenRuns(device, companion.executor)
        self._offered: dict[str, _Offered] = {}
        self.calibrations = Calibrations(self._drop)
        self._refused: set[str] = set()
        """Digests whose chunks may still be on their way after a refusal: they are let fall."""
        self._waiting: deque[tuple[ModelOffer | ModelChunk | SegmentOpen, memoryview]] = deque()
        """What is worked on next, in the order in which it came."""
        self._waiting_bytes = 0
        self._took = asyncio.Event()
        """Set each time that something of it is done."""
        self._working = self._ended = False
        self._setups: set[asyncio.Task[None]] = set()
        self._at_bench = asyncio.Lock()
        """Held while this session waits for a child process or has one, or times what came of it: it has one place in
        the row, however much it asks for at once, and what it times is not slowed by what it makes. (A tail of
        195 ms took 330 to 390 while others were opened on the same core, and its device used another cut.)"""
        self._log_lines = LOG_LINES
        """That may be written now, about what was refused."""
        self._logged_at_s = 0.0
        self._unlogged = 0
        """What was refused since the last of them."""

    def find(self, digest: str, cut: str) -> Opened:
        """What was opened under exactly this digest and cut; refused with PLAN_MISMATCH otherwise (I6)."""
        offered = self._offered.get(digest)
        opened = offered.opened.get(cut) if offered is not None else None
        if opened is None:
            raise CompanionRefused(
                "PLAN_MISMATCH", f"cut {cut} of model {digest} was not opened in this session; open it first"
            )
        return opened

    def cancel(self) -> None:
        """The session ends: no step goes on. What the disk is doing just now is done to its end, since `release` must
        know of it, and what came of models is written: a later session goes on from there."""
        self._ended = True
        self._waiting = deque(one for one in self._waiting if isinstance(one[0], ModelChunk))
        for task in self._setups:
            task.cancel()

    def release(self) -> None:
        """After `cancel`, when the tasks have ended: this session uses no model any more."""
        for digest in self._offered:
            self._companion.store.release(digest, self._device)
        self._offered.clear()

    async def take(self, message: ModelOffer | ModelChunk | SegmentOpen, data: memoryview) -> None:
        """Something about models came: a cut may be asked for right behind its model. Worked on in order and beside the
        requests, since hashing and writing may take long; waits where much is waiting already."""
        while self._waiting_bytes > WAITING_BYTES:
            self._took.clear()
            await self._took.wait()
        self._waiting.append((message, data))
        self._waiting_bytes += _held_bytes(message, data)
        if not self._working:
            self._working = True
            self._group.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._waiting:
                message, data = self._waiting.popleft()
                match message:
                    case ModelOffer():
                        await self._offer(message)
                    case ModelChunk():
                        await self._chunk(message, data)
                    case SegmentOpen():
                        self._open(message)
                self._waiting_bytes -= _held_bytes(message, data)
                self._took.set()
        finally:
            self._working = False

    async def _offer(self, offer: ModelOffer) -> None:
        """Take an offer: ModelNeed at once, ModelReady when all is here, or Refused.

        A model that this session has open already stays so (a device may serve it under two names): it is answered as
        before, or, asked with other golden inputs, compared anew.
        """
        digest, store = offer.digest, self._companion.store
        known = self._offered.get(digest)
        if known is not None and self._answers(known, offer):
            return
        try:
            self._require_room(offer)
            if offer.calibrates:
                check_offer(offer)
            self._drop(digest)
            wanted = await self._companion.on_disk(lambda: store.offer(digest, self._device, offer.files, offer.chunks))
        except Exception as error:
            self._refuse(refusal_of(error), digest=digest)
            return
        self._refused.discard(digest)
        self._offered[digest] = _Offered(offer=offer)
        wanted = wanted or Wanted()
        missing = tuple((offer.files[index][0], at) for index, at in wanted.missing)
        self._send(ModelNeed(digest=digest, missing=missing, lengths=wanted.lengths))
        if not missing:
            self._begin_preparing(self._offered[digest])

    def _require_room(self, offer: ModelOffer) -> None:
        """OVERLOADED where this session has as many already, of models or of calibrations."""
        one_kind = [
            digest for digest, one in self._offered.items() if bool(one.offer.calibrates) == bool(offer.calibrates)
        ]
        most, what = (CALIBRATIONS_MAX, "calibrations") if offer.calibrates else (MAX_MODELS, "models")
        if len(one_kind) >= most and offer.digest not in one_kind:
            raise Overloaded(f"this session uses {most} {what} already; a new connection starts afresh")

    def _answers(self, known: _Offered, offer: ModelOffer) -> bool:
        """Answer an offer from what this session has of the model; False when it must be brought first."""
        preparing = known.is_preparing(offer)
        if known.ready is None and not preparing:
            return False
        self._send(ModelNeed(digest=offer.digest, missing=()))
        if preparing:
            return True  # its answer is this one's too
        if known.ready is not None and known.asked_as(offer):
            self._send(known.ready)
        else:
            known.offer = offer
            self._begin_preparing(known)
        return True

    async def _chunk(self, chunk: ModelChunk, data: memoryview) -> None:
        """Store a piece; the last one begins the preparing."""
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
            store = self._companion.store
            whole = await self._companion.on_disk(lambda: store.write(digest, self._device, index, chunk.offset, data))
        except Exception as error:
            self._refuse(refusal_of(error), digest=digest)
            return
        if whole and offered.preparing is None:
            self._begin_preparing(offered)

    def _begin_preparing(self, offered: _Offered) -> None:
        offered.preparing = self._begin(lambda: self._prepare(offered), digest=offered.offer.digest)

    async def _prepare(self, offered: _Offered) -> None:
        """From all bytes on disk to ModelReady: hashes, card, golden run."""
        shared, offer = self._companion, offered.offer
        if not await shared.on_disk(lambda: shared.store.finish(offer.digest, self._device)):
            raise InvalidRequest(f"model {offer.digest} was removed meanwhile; offer it again")
        if offer.calibrates:
            await self._calibrate(offered)
            return
        try:
            await shared.segments.keep_only(shared.store.held)  # older models may have made room for this one
            async with self._at_bench:
                model = await shared.segments.prepare(offer.digest, shared.store.path(offer.digest), offer.dims)
        except CompanionRefused as error:
            if error.code == "DIGEST_MISMATCH":
                await shared.on_disk(lambda: shared.store.remove(offer.digest))
            raise
        golden = await asyncio.to_thread(golden_of, offer, model.card.inputs)
        async with self._at_bench:
            await shared.segments.rehearse(model, golden)
            whole, outputs = await self._golden.whole(model, golden)
        offered.model, offered.golden = model, golden
        offered.opened[OFFLOAD_CUT] = whole
        shared.metrics.models_ready.inc()
        log.info("model ready device=%s digest=%s whole_ms=%.2f", self._device, offer.digest, whole.expected_ms)
        # image_ms stays 0, unknown: what pictures will come is the contract's, the replies will tell.
        offered.ready = ModelReady(digest=offer.digest, golden=outputs, whole_ms=whole.expected_ms)
        self._send(offered.ready)

    async def _calibrate(self, offered: _Offered) -> None:
        """The file is whole: no model, but the calibration of one."""
        offer, store = offered.offer, self._companion.store
        held = await self._companion.on_disk(lambda: read_offered(store.path(offer.digest), offer))
        self.calibrations.adopt(offer, held)
        log.info("calibration ready device=%s digest=%s model=%s", self._device, offer.digest, offer.calibrates)
        offered.ready = ModelReady(digest=offer.digest, golden=b"", whole_ms=0.0)
        self._send(offered.ready)

    def _open(self, wanted: SegmentOpen) -> None:
        """Begin to open a cut; answered by SegmentReady or Refused."""
        self._begin(lambda: self._open_cut(wanted), digest=wanted.digest, cut=wanted.cut)

    async def _open_cut(self, wanted: SegmentOpen) -> None:
        """Make the halves of a cut, run head ∘ tail on the golden inputs, answer SegmentReady."""
        offered = self._offered.get(wanted.digest)
        if offered is not None and offered.preparing is not None:  # a device may ask for both at once
            await asyncio.wait((offered.preparing,))
            offered = self._offered.get(wanted.digest)
        if offered is None or offered.model is None:
            raise CompanionRefused(
                "PLAN_MISMATCH", f"model {wanted.digest[:80]} is not ready in this session; offer it first"
            )
        model, golden = offered.model, offered.golden
        async with self._at_bench:
            card = await self._companion.segments.cut(model, CutId(wanted.cut), wanted.node_bitmap)
            await self._companion.segments.rehearse(model, golden, card.id)
            tail, outputs = await self._golden.cut(model, card, golden)
        offered.opened[card.id] = tail
        log.debug(
            "segment ready device=%s digest=%s cut=%s tail_ms=%.2f",
            self._device,
            wanted.digest,
            card.id,
            tail.expected_ms,
        )
        self._send(SegmentReady(digest=wanted.digest, cut=card.id, golden=outputs, tail_ms=tail.expected_ms))

    def _begin(self, work: Callable[[], Awaitable[None]], *, digest: str, cut: str = "") -> asyncio.Task[None] | None:
        """Run one set-up step beside the requests; its failure becomes a Refused. None when there are too many, or
        the session has ended."""
        if self._ended:
            return None
        if len(self._setups) >= MAX_SETUPS:
            full = f"{MAX_SETUPS} models and cuts are being opened for this device; wait for them"
            self._refuse(Overloaded(full), digest=digest, cut=cut)
            return None

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:
                self._refuse(refusal_of(error), digest=digest, cut=cut)

        task = self._group.create_task(guarded())
        self._setups.add(task)
        task.add_done_callback(self._setups.discard)
        return task

    def _drop(self, digest: str) -> None:
        """Nothing of this model is answered any more in this session (it is offered again, or failed)."""
        offered = self._offered.pop(digest, None)
        if offered is None:
            return
        self.calibrations.forget(digest)
        if offered.preparing is not None and offered.preparing is not asyncio.current_task():
            offered.preparing.cancel()
        self._companion.store.release(digest, self._device)

    def _refuse(self, error: IsthmusError, *, digest: str, cut: str = "") -> None:
        self._log_refused(error, digest, cut)
        self._companion.metrics.refusals.labels(error.code).inc()
        if not cut:
            self._drop(digest)
            if len(self._refused) >= MAX_MODELS:
                self._refused.clear()
            self._refused.add(digest)
        self._send(Refused(code=error.code, message=str(error)[:MAX_TEXT], digest=digest, cut=cut))

    def _log_refused(self, error: IsthmusError, digest: str, cut: str) -> None:
        """A few lines as they come, then one a second at most, however much is refused."""
        now_s = asyncio.get_running_loop().time()
        self._log_lines = min(self._log_lines + (now_s - self._logged_at_s) / LOG_S, LOG_LINES)
        self._logged_at_s = now_s
        if self._log_lines < 1:
            self._unlogged += 1
            return
        self._log_lines -= 1
        log.warning(
            "refused device=%s digest=%s cut=%s code=%s error=%r unlogged_before=%d",
            self._device,
            digest,
            cut,
            error.code,
            str(error)[:MAX_TEXT],
            self._unlogged,
        )
        self._unlogged = 0


def _held_bytes(message: ModelOffer | ModelChunk | SegmentOpen, data: memoryview) -> int:
    """What it takes while it waits, about."""
    match message:
        case ModelOffer(files=files, golden=golden, chunks=chunks, keeps=keeps):
            own_bytes = len(golden) + len(chunks) + sum(len(name) + MESSAGE_OVERHEAD_BYTES for name, _, _ in files)
            own_bytes += sum(map(len, keeps))
        case SegmentOpen(node_bitmap=bitmap):
            own_bytes = len(bitmap)
        case _:
            own_bytes = data.nbytes
    return own_bytes + MESSAGE_OVERHEAD_BYTES


def refusal_of(error: Exception) -> IsthmusError:
    """What a device is told of a failure. A bug of ours (or no memory) is logged with its traceback, and concerns only
    the request or set-up that met it: the session lives."""
    if isinstance(error, IsthmusError):
        return error
    if isinstance(error, OSError):
        return _storage_error(error)
    log.error("a bug of ours, refused as INTERNAL", exc_info=error)
    return IsthmusError(f"the companion failed at this by itself ({type(error).__name__}); its log says where")


def _storage_error(error: OSError) -> CompanionRefused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CompanionRefused("DISK_FULL", f"the companion's disk is full ({error.strerror})")
    return CompanionRefused("STORAGE_FAILED", f"the companion cannot store this: {error.strerror or error}")
