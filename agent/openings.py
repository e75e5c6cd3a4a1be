"""What is shared over one connection: each model brought to the companion and compared with it (I10), its cuts opened
there. The planner learns each step; the requests are the uplink's.

One task per model. What fails for a reason that may go away is tried again for as long as the connection lives; what
will not go away (`LASTING`) is said once. A cut that fails concerns no other, and what is open is used meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import random
from typing import Final

import msgspec

from agent.first_flight import FirstFlight, Opening
from agent.golden import Golden
from agent.planner import Planner
from agent.served_model import ServedModel
from split.codec.calibration import CALIBRATION_FILE
from split.codec.golden import SELF_DIFFERENCE_MAX, bound_of, differs
from split.codec.image import image_fingerprint
from split.codec.payload import decode
from split.errors import CompanionRefused, ConnectionLost, InvalidModel, IsthmusError, RemoteProtocolError
from split.graph.card import CutCard, digest_of_files
from split.graph.chunks import list_chunks
from split.ids import OFFLOAD_CUT
from split.plan.plan import REENCODED
from split.runtime.kernels import kernel_answers, kernels_differ
from split.tensor import Tensors
from split.transport.channel import Channel
from split.transport.retry import Backoff
from split.wire.limits import MAX_METADATA_BYTES
from split.wire.messages import (
    Message,
    ModelChunk,
    ModelNeed,
    ModelOffer,
    ModelReady,
    Priority,
    Refused,
    SegmentOpen,
    SegmentReady,
)

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 * 1024
"""Model chunks: small enough that a request never waits long behind one."""
OFFER_BYTES: Final = 96 * 1024
"""What an offer has beside golden inputs and chunks, at most: names and digests of 256 files."""
CHUNK_METADATA_BYTES: Final = 4096
"""What a chunk's message has beside its bytes, at most."""
BULK_WINDOW_BYTES: Final = CHUNK_BYTES
"""Bytes queued ahead of the link below which the next model chunk is queued: enough to keep it busy, and what a request
brings goes before."""
ANSWER_TIMEOUT_S: Final = 120.0
"""For one answer while a model or a cut is being opened (the companion cuts it first)."""
SHORTEST_MS: Final = 1e-6
LONGEST_MS: Final = 1e12
"""What a companion may say that something took, if not 0: a nanosecond; what a record holds, thirty years."""
RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
"""A companion that is short of disk or memory is asked now and then, not pressed."""
METERED_LOOK_S: Final = 10.0
"""A model that waits for metered bytes looks so often whether there are some: a month begins."""
ASKED_RATIO_MAX: Final = 3.0
"""How many times a model's bytes a companion may ask for on one connection: once, and again after a loss."""
GOLDEN_BYTES_MAX: Final = 1 << 26
LASTING: Final = frozenset(
    {
        "DIFFERENT_NUMBERS",
        "DIGEST_MISMATCH",
        "PLAN_MISMATCH",
        "UNSUPPORTED_OP",
        "UNSUPPORTED",
        "INVALID_MODEL",
        "CUT_REFUSED",
        "CODEC_ERROR",
        "INVALID_CALIBRATION",
        "TOO_LARGE",
    }
)
"""Codes that trying again does not mend: they speak of the model, the cut or the two machines."""

KLT: Final = "klt"

Files = tuple[tuple[str, int, str], ...]
"""(name, bytes, sha256 hex), as they are offered."""

_Key = tuple[str, str]
"""(digest, cut), the cut being "" for the model itself."""


class Openings:
    """Lives as long as one connection."""

    def __init__(
        self,
        channel: Channel,
        *,
        planner: Planner,
        golden: Golden,
        draw: Callable[[], float] = random,
        on_open: Callable[[str, str], None] = lambda digest, cut: None,
        flight: FirstFlight,
        asked: Sequence[Opening] = (),
    ) -> None:
        """`asked`: what went with the dial; `flight` learns what may go with the next one."""
        self._channel = channel
        self._planner = planner
        self._golden = golden
        self._draw = draw
        self._on_open = on_open
        """Told, after the planner, the digest and the cut (`OFFLOAD_CUT`: the whole; `KLT`: payloads of that codec)
        that may be asked for now."""
        self._served: dict[str, ServedModel] = {}
        """By name, with the calibration of now."""
        self._there: set[str] = set()
        """Names whose model the companion has."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By the model's name."""
        self._calibrating: dict[str, asyncio.Task[None]] = {}
        """The same, of what brings its calibration."""
        self._ended: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._flight = flight
        self._early = {_key(one): one for one in asked}
        """What went with the dial and was not waited for yet."""
        self._answers: dict[_Key, asyncio.Queue[Message]] = {key: asyncio.Queue() for key in self._early}
        """Who waits for the answer to what."""
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By digest: two names may serve one model, and its answers say only the digest."""
        self._asked_bytes: Counter[str] = Counter()
        """Digest → what the companion wanted to be sent so far."""

    def begin(self, model: ServedModel) -> None:
        """Share this model, in place of what had its name before."""
        self.drop(model.name)
        if self._stopped:
            return
        self._served[model.name] = model
        self._tasks[model.name] = asyncio.create_task(self._keep(model), name=f"open {model.name}")

    def recalibrated(self, model: ServedModel) -> None:
        """The model of this name has another calibration: bring it, and leave the rest as it is."""
        if self._stopped:
            return
        self._served[model.name] = model
        self._end(self._calibrating.pop(model.name, None))
        if model.name in self._there:
            self._tell_codecs(model)
            self.calibrate(model)

    def calibrate(self, model: ServedModel) -> None:
        """Have the companion read codec klt of this model, if there is a calibration: beside its cuts, and again where
        the companion says that it has it no more."""
        going_on = self._calibrating.get(model.name)
        if self._stopped or model.sidecar.calibration is None or (going_on is not None and not going_on.done()):
            return
        task = asyncio.create_task(self._keep_calibrated(model), name=f"calibrate {model.name}")
        self._calibrating[model.name] = task

    def drop(self, name: str) -> None:
        """Stop opening this model. Another name of the same model goes on."""
        self._served.pop(name, None)
        self._there.discard(name)
        self._end(self._tasks.pop(name, None))
        self._end(self._calibrating.pop(name, None))

    def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            self._ended.add(task)
            task.add_done_callback(self._ended.discard)

    def take(self, message: ModelNeed | ModelReady | SegmentReady | Refused) -> None:
        """An answer came; one that nobody waits for any more is let fall."""
        cut = message.cut if isinstance(message, SegmentReady | Refused) else ""
        if (answers := self._answers.get((message.digest, cut))) is not None:
            answers.put_nowait(message)

    def stop(self) -> None:
        """The companion takes nothing new on this connection: nothing more is asked."""
        self._stopped = True
        for name in [*self._tasks, *self._calibrating]:
            self.drop(name)

    async def close(self) -> None:
        """`stop`, and wait until all has ended."""
        self.stop()
        if self._ended:
            await asyncio.wait(self._ended)

    async def _keep(self, model: ServedModel) -> None:
        """Bring one model over and open its cuts, until all is done that can be done."""
        if model.privacy == "local-only":
            self._planner.forbid_remote(model.name, "the contract says local-only")
            return
        try:
            if await self._shared(model):
                self._there.add(model.name)
                self._tell_codecs(self._served[model.name])
                self.calibrate(self._served[model.name])
                await self._open_cuts(model)
        except ConnectionLost:
            return
        finally:
            self._golden.forget(model)

    async def _shared(self, model: ServedModel) -> bool:
        """Try until the companion has the model; False when it never will."""
        backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)
        said = ""
        while (error := await _failure(self._share(model))) is not None:
            if error.code != said:  # each time it is tried, `isthmus status` tells
                log.warning("model=%s is not shared: %s (%s)", model.name, error, error.code)
                said = error.code
            if error.code in LASTING:
                self._planner.forbid_remote(model.name, str(error))
                return False
            delay_s = backoff.failed()
            self._planner.companion_not_ready(model.name, f"{error}; tried again in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)
        return True

    async def _open_cuts(self, model: ServedModel) -> None:
        """One after the other, those used last first; those that fail for now once more when the others are through."""
        backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)
        _, recent = self._planner.recent_cuts(model.name)
        wanted = sorted(model.measured_cuts, key=lambda cut: cut.id not in recent)
        while True:
            again = []
            for cut in wanted:
                if (error := await _failure(self._open(model, cut))) is None:
                    continue
                log.warning("model=%s cut=%s is not open: %s (%s)", model.name, cut.id, error, error.code)
                self._planner.segment_not_ready(model.name, cut.id, str(error))
                if error.code not in LASTING:
                    again.append(cut)
            if not again:
                return
            wanted = again
            self._golden.forget(model)
            await asyncio.sleep(backoff.failed())

    async def _share(self, model: ServedModel) -> None:
        kernels = self._channel.peer_hello.kernels
        if model.card.integer and (why := kernels_differ(kernels, kernel_answers())) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes integers differently: {why}")
        same = self._channel.peer_hello.image == image_fingerprint()
        why = None if same else "the companion decodes pictures otherwise than this device"
        self._planner.forbid_encoded(model.name, why)
        offer = ModelOffer(
            digest=model.digest,
            files=model.card.files,
            dims=model.profile.dims if model.profile is not None else {},
            golden=await self._golden.offered(model),
        )
        folder = Path(model.card.path).parent
        waits = partial(self._planner.companion_not_ready, model.name)
        source = _Source(waits=waits, files=model.card.files, read=partial(_piece, folder))
        async with self._turn(model.digest):
            with self._asking(offer) as answers:
                answer = await _next(answers)
                if isinstance(answer, ModelNeed) and answer.missing and not answer.lengths:
                    self._channel.send(await self._with_chunks(offer, model))  # other models may have them in common
                    answer = await _next(answers)
                while isinstance(answer, ModelNeed):
                    await self._send_files(source, answer, answers)
                    answer = await _next(answers)
        if not isinstance(answer, ModelReady):
            raise RemoteProtocolError(f"the companion answered an offer with {type(answer).__name__}")
        if not are_times(answer.whole_ms, answer.image_ms):
            raise RemoteProtocolError(f"the companion says it needs {answer.whole_ms}, {answer.image_ms} ms")
        theirs = decode(memoryview(answer.golden), max_bytes=GOLDEN_BYTES_MAX)
        if (why := _difference(model, theirs, await self._golden.run(model, None))) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes this model differently: {why}")
        self._flight.opened(offer)
        self._planner.companion_ready(model.name, answer.whole_ms, answer.image_ms)
        self._on_open(model.digest, OFFLOAD_CUT)

    def _tell_codecs(self, model: ServedModel) -> None:
        """Which of its picture codecs the companion knows."""
        assert model.profile is not None, "a model is shared once it is profiled"
        for codec in {one.codec for one in model.profile.input_codecs} & REENCODED:
            if codec in self._channel.peer_hello.codecs:
                self._planner.codec_ready(model.name, codec)
            else:
                self._planner.codec_not_ready(model.name, codec, _unknown(codec))

    async def _calibrate(self, model: ServedModel) -> None:
        """Try until the companion has the calibration; what fails costs the codec alone."""
        if KLT not in self._channel.peer_hello.codecs:
            self._planner.codec_not_ready(model.name, KLT, _unknown(KLT))
            return
        backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S, draw=self._draw)
        said = ""
        while (error := await _failure(self._share_calibration(model))) is not None:
            if error.code != said:
                log.warning("model=%s its calibration is not shared: %s (%s)", model.name, error, error.code)
                said = error.code
            if error.code in LASTING:
                self._planner.codec_not_ready(model.name, KLT, str(error))
                return
            delay_s = backoff.failed()
            self._planner.codec_not_ready(model.name, KLT, f"{error}; tried again in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)

    async def _keep_calibrated(self, model: ServedModel) -> None:
        with suppress(ConnectionLost):
            await self._calibrate(model)

    async def _share_calibration(self, model: ServedModel) -> None:
        files = sidecar_files(model.sidecar.data)
        offer = ModelOffer(
            digest=digest_of_files(files), files=files, calibrates=model.digest, keeps=self._used_beside(model)
        )
        source = _Source(
            waits=partial(self._planner.codec_not_ready, model.name, KLT), files=files, read=_of(model.sidecar.data)
        )
        async with self._turn(offer.digest):
            with self._asking(offer) as answers:
                answer = await _next(answers)
                while isinstance(answer, ModelNeed):
                    await self._send_files(source, answer, answers)
                    answer = await _next(answers)
        if not isinstance(answer, ModelReady):
            raise RemoteProtocolError(f"the companion answered a calibration with {type(answer).__name__}")
        self._planner.codec_ready(model.name, KLT)
        self._on_open(model.digest, KLT)

    def _used_beside(self, model: ServedModel) -> tuple[str, ...]:
        """Digests of the calibrations that other names of the same model go on using."""
        others = (one for name, one in self._served.items() if name != model.name and one.digest == model.digest)
        found = (one.sidecar.calibration for one in others)
        return tuple(sorted({f"sha256:{one.digest}" for one in found if one is not None}))

    async def _send_files(self, source: _Source, need: ModelNeed, answers: asyncio.Queue[Message]) -> None:
        """What the companion lacks; what it says meanwhile (refused, or another device was first) ends it. Waits where
        the month has not enough metered bytes left for the rest."""
        sizes = {name: size for name, size, _ in source.files}
        lengths = need.lengths or tuple(sizes.get(name, 0) - start for name, start in need.missing)
        if len(lengths) != len(need.missing):
            raise RemoteProtocolError(f"the companion wants {len(need.missing)} parts and gives {len(lengths)} lengths")
        self._asked_bytes[need.digest] += sum(lengths)
        if (asked := self._asked_bytes[need.digest]) > ASKED_RATIO_MAX * max(sum(sizes.values()), CHUNK_BYTES):
            raise CompanionRefused(
                "UNSUPPORTED",
                f"the companion has asked for {asked} bytes of a model of {sum(sizes.values())}: it does not keep what "
                "it is sent; look at its log",
            )
        left_bytes = sum(lengths)
        piece_bytes = min(CHUNK_BYTES, self._channel.peer_hello.max_message_bytes - CHUNK_METADATA_BYTES)
        for (name, start), length in zip(need.missing, lengths, strict=True):
            if name not in sizes:
                raise RemoteProtocolError(f"the companion wants file {name!r}, which was not offered")
            if start < 0 or length < 0 or start + length > sizes[name]:
                raise RemoteProtocolError(f"the companion wants {length} bytes of {name!r} from {start}, over its end")
            for offset in range(start, start + length, piece_bytes):
                await self._bytes_left(source, left_bytes, answers)
                await self._channel.drain(BULK_WINDOW_BYTES)
                if not answers.empty():
                    return
                wanted = min(piece_bytes, start + length - offset)
                data = await asyncio.to_thread(source.read, name, offset, wanted)
                last = offset + wanted == sizes[name]
                chunk = ModelChunk(digest=need.digest, file=name, offset=offset, last=last)
                self._channel.send(chunk, [data], priority=Priority.BULK)
                left_bytes -= wanted

    async def _with_chunks(self, offer: ModelOffer, model: ServedModel) -> ModelOffer:
        """The offer, saying which chunks its files are made of, where one message has room for that."""
        folder = Path(model.card.path).parent
        names, sizes, _ = zip(*model.card.files, strict=True)
        chunks = await asyncio.to_thread(list_chunks, [folder / name for name in names], sizes)
        room = min(MAX_METADATA_BYTES, self._channel.peer_hello.max_message_bytes) - OFFER_BYTES
        fits = len(offer.golden) + len(chunks) <= room
        return msgspec.structs.replace(offer, chunks=chunks) if fits else offer

    async def _bytes_left(self, source: _Source, count: int, answers: asyncio.Queue[Message]) -> None:
        """Wait until so many bytes may cross the link this month; an answer of the companion ends the wait."""
        while (why := self._planner.metered_why_not(count)) and answers.empty():
            source.waits(f"it is not there yet and waits: {why}")
            await asyncio.sleep(METERED_LOOK_S)

    async def _open(self, model: ServedModel, cut: CutCard) -> None:
        wanted = SegmentOpen(digest=model.digest, cut=cut.id, node_bitmap=cut.node_bitmap)
        async with self._turn(model.digest):
            early = (model.digest, cut.id) in self._early
            try:
                with self._asking(wanted) as answers:
                    answer = await _next(answers)
            except CompanionRefused:
                if not early:
                    raise
                with self._asking(wanted) as answers:  # it was asked before the model was there
                    answer = await _next(answers)
        if not isinstance(answer, SegmentReady):
            raise RemoteProtocolError(f"the companion answered a cut with {type(answer).__name__}")
        if not are_times(answer.tail_ms):
            raise RemoteProtocolError(f"the companion says it needs {answer.tail_ms} ms")
        theirs = decode(memoryview(answer.golden), max_bytes=GOLDEN_BYTES_MAX)
        if (why := _difference(model, theirs, await self._golden.run(model, cut.id))) is not None:
            raise CompanionRefused("DIFFERENT_NUMBERS", f"the companion computes this cut differently: {why}")
        self._flight.opened(wanted)
        self._planner.segment_ready(model.name, cut.id, answer.tail_ms)
        self._on_open(model.digest, cut.id)

    def _turn(self, digest: str) -> asyncio.Lock:
        return self._turns.setdefault(digest, asyncio.Lock())

    @contextmanager
    def _asking(self, asked: Opening) -> Iterator[asyncio.Queue[Message]]:
        """Send it, unless the very same went with the dial, and take its answers."""
        key = _key(asked)
        if self._early.pop(key, None) != asked:
            self._answers[key] = asyncio.Queue()
            self._channel.send(asked)
        try:
            yield self._answers[key]
        finally:
            del self._answers[key]


def _unknown(codec: str) -> str:
    return f"the companion does not know codec {codec}; update it"


def _key(asked: Opening) -> _Key:
    return asked.digest, asked.cut if isinstance(asked, SegmentOpen) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What a companion may ask for."""

    waits: Callable[[str], None]
    """Told why nothing goes for now."""
    files: Files
    read: Callable[[str, int, int], bytes]
    """(file, offset, bytes); blocking."""


def _of(data: bytes) -> Callable[[str, int, int], bytes]:
    return lambda name, offset, size: data[offset : offset + size]


def sidecar_files(data: bytes) -> Files:
    """The one file of a calibration, as it is offered."""
    return ((CALIBRATION_FILE, len(data), hashlib.sha256(data).hexdigest()),)


def _piece(folder: Path, name: str, offset: int, size: int) -> bytes:
    path = folder / name
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) < size:
        raise InvalidModel(f"{path} became shorter since it was loaded; load the model again")
    return data


def _difference(model: ServedModel, theirs: Tensors, ours: Tensors) -> str | None:
    """Why golden outputs are not of the same computation, as a sentence; None when they are."""
    assert model.profile is not None, "a model is shared once it is profiled"
    itself = model.profile.self_difference
    why = differs(theirs, ours, bound_of(itself))
    if why is not None and itself > SELF_DIFFERENCE_MAX:
        why += (
            f"; the model is not reproducible (it differs from itself by {itself:.2g} when only the order of its sums "
            "changes), so a companion must answer the same bit for bit"
        )
    return why


def are_times(*ms: float) -> bool:
    """Whether a companion's figures can be how long something took: what is learned from others never goes away. One
    of 10⁻³²⁰ ms is a number, too, and what is held against it infinite."""
    return all(one == 0.0 or SHORTEST_MS <= one <= LONGEST_MS for one in ms)


async def _next(answers: asyncio.Queue[Message]) -> Message:
    """The next answer; CompanionRefused for a refusal, TimeoutError when none comes."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        match await answers.get():
            case Refused(code=code, message=text):
                raise CompanionRefused(code, text)
            case message:
                return message


async def _failure(step: Awaitable[None]) -> IsthmusError | None:
    """Why a step failed, None when it did not. ConnectionLost goes through: what was begun here ends with it."""
    try:
        await step
    except ConnectionLost:
        raise
    except IsthmusError as error:
        return error
    except TimeoutError:
        return IsthmusError("the companion did not answer while the model was opened there")
    except OSError as error:
        return IsthmusError(f"{error.filename or 'a file of the model'} cannot be read: {error.strerror or error}")
    except Exception as error:  # a bug of ours costs this step, not the connection
        log.exception("opening a model failed")
        return IsthmusError(f"an internal error ({type(error).__name__}); the daemon's log says more")
    return None
