"""What is asked of the companion over one connection, and the files that it lacks of what it is offered: a model's or a
calibration's. What is shared when, and what its answers are worth, is `openings.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent.first_flight import Opening
from split.codec.calibration import CALIBRATION_FILE
from split.errors import CompanionRefused, InvalidModel, RemoteProtocolError
from split.graph.card import ModelCard
from split.graph.chunks import list_chunks
from split.transport.channel import Channel
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
METERED_LOOK_S: Final = 10.0
"""What waits for metered bytes looks so often whether there are some: a month begins."""
ASKED_RATIO_MAX: Final = 3.0
"""How many times a model's bytes a companion may ask for on one connection: once, and again after a loss."""

Files = tuple[tuple[str, int, str], ...]
"""(name, bytes, sha256 hex), as they are offered."""

Answer = ModelNeed | ModelReady | SegmentReady | Refused

_Key = tuple[str, str]
"""(digest, cut), the cut being "" for an offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a companion may ask for."""

    files: Files
    read: Callable[[str, int, int], bytes]
    """(file, offset, bytes); blocking."""
    chunks: Callable[[], bytes] | None = None
    """What the files are made of (`split.graph.chunks`), since others may have that in common; blocking. None: nothing
    has."""
    waits: Callable[[str], None]
    """Told why nothing goes for now."""


def of_model(card: ModelCard, waits: Callable[[str], None]) -> Source:
    """Its files, which lie side by side."""
    folder = Path(card.path).parent
    names, sizes, _ = zip(*card.files, strict=True)
    chunks = partial(list_chunks, [folder / name for name in names], sizes)
    return Source(files=card.files, read=partial(_piece, folder), chunks=chunks, waits=waits)


def of_calibration(data: bytes, waits: Callable[[str], None]) -> Source:
    """The one file of a calibration."""
    files = ((CALIBRATION_FILE, len(data), hashlib.sha256(data).hexdigest()),)
    return Source(files=files, read=lambda name, offset, size: data[offset : offset + size], waits=waits)


class Sharing:
    """Lives as long as one connection. `metered_why_not`: why so many bytes may not cross the link now, "" where they
    may. `asked`: what went with the dial."""

    def __init__(
        self, channel: Channel, *, metered_why_not: Callable[[float], str], asked: Sequence[Opening] = ()
    ) -> None:
        self._channel = channel
        self._metered_why_not = metered_why_not
        self._early = {_key(one): one for one in asked}
        """What went with the dial and was not waited for yet."""
        self._answers: dict[_Key, asyncio.Queue[Message]] = {key: asyncio.Queue() for key in self._early}
        """Who waits for the answer to what."""
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """By digest: two names may serve one model, and its answers say only the digest."""
        self._asked_bytes: Counter[str] = Counter()
        """Digest → what the companion wanted to be sent so far."""

    def take(self, message: Answer) -> None:
        """An answer came; one that nobody waits for any more is let fall."""
        cut = message.cut if isinstance(message, SegmentReady | Refused) else ""
        if (answers := self._answers.get((message.digest, cut))) is not None:
            answers.put_nowait(message)

    async def offer(self, offer: ModelOffer, source: Source) -> ModelReady:
        """Offer it, send what the companion lacks, and wait until it has it all; CompanionRefused, RemoteProtocolError,
        TimeoutError."""
        async with self._turn(offer.digest):
            with self._asking(offer) as answers:
                answer = await _next(answers)
                new = isinstance(answer, ModelNeed) and answer.missing and not answer.lengths
                if new and source.chunks is not None:  # the companion may have them of something else
                    self._channel.send(await self._with_chunks(offer, source.chunks))
                    answer = await _next(answers)
                while isinstance(answer, ModelNeed):
                    await self._send_files(source, answer, answers)
                    answer = await _next(answers)
        if not isinstance(answer, ModelReady):
            raise RemoteProtocolError(f"the companion answered an offer with {type(answer).__name__}")
        return answer

    async def open(self, wanted: SegmentOpen) -> SegmentReady:
        """Have a cut opened of a model that the companion has; errors as of `offer`."""
        async with self._turn(wanted.digest):
            early = _key(wanted) in self._early
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
        return answer

    async def _send_files(self, source: Source, need: ModelNeed, answers: asyncio.Queue[Message]) -> None:
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

    async def _with_chunks(self, offer: ModelOffer, chunks: Callable[[], bytes]) -> ModelOffer:
        """The offer, saying which chunks its files are made of, where one message has room for that."""
        made_of = await asyncio.to_thread(chunks)
        room = min(MAX_METADATA_BYTES, self._channel.peer_hello.max_message_bytes) - OFFER_BYTES
        fits = len(offer.golden) + len(made_of) <= room
        return msgspec.structs.replace(offer, chunks=made_of) if fits else offer

    async def _bytes_left(self, source: Source, count: int, answers: asyncio.Queue[Message]) -> None:
        """Wait until so many bytes may cross the link this month; an answer of the companion ends the wait."""
        while (why := self._metered_why_not(count)) and answers.empty():
            source.waits(f"it is not there yet and waits: {why}")
            await asyncio.sleep(METERED_LOOK_S)

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


def _key(asked: Opening) -> _Key:
    return asked.digest, asked.cut if isinstance(asked, SegmentOpen) else ""


def _piece(folder: Path, name: str, offset: int, size: int) -> bytes:
    path = folder / name
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) < size:
        raise InvalidModel(f"{path} became shorter since it was loaded; load the model again")
    return data


async def _next(answers: asyncio.Queue[Message]) -> Message:
    """The next answer; CompanionRefused for a refusal, TimeoutError when none comes."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        match await answers.get():
            case Refused(code=code, message=text):
                raise CompanionRefused(code, text)
            case message:
                return message
