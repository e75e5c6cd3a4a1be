"""One model on its way from one device: what is here of it, what other models have of it, what must still come.
Blocking; files and bytes only. Room and names are the store's.

What lies there is never trusted for having been written: of a model that was offered with its chunks each chunk is
hashed when the upload is taken up again, and every whole file at the end. So a cut at any byte, of the link, the
process or the power, costs the chunk that it hit.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from split.errors import CompanionRefused, InvalidRequest
from split.graph.chunks import Chunk, read_chunks
from split.transport.channel import Buffer

Files = tuple[tuple[str, int, str], ...]
"""(plain name, bytes, sha256 hex), the model file first: as a device offers it."""

RANGES_MAX: Final = 2048
"""Ranges asked for at once: their list is metadata. Beyond it whole stretches are asked for, held parts included."""
RESERVED_S: Final = 60.0
"""How long room is kept for a model of which too little comes: longer than a link is usually gone. Then others may have
it; the bytes that came count on, and where room is left the upload goes on."""
WHOLE_WITHIN_S: Final = 86_400.0
"""Too little is what would not bring the model in a day."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of a chunk lie already."""

    path: Path
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a device is to send."""

    missing: tuple[tuple[int, int], ...] = ()
    """(Index of the file in the offer, offset)."""
    lengths: tuple[int, ...] = ()
    """Bytes from each; empty: to the end of each file."""


@dataclass(slots=True)
class _Range:
    file: int
    at: int
    """What came so far ends here."""
    end: int


@dataclass(slots=True)
class Upload:
    files: Files
    place: Path
    moved_at_s: float
    """When enough had come last."""
    chunks: bytes = b""
    """As in `model-offer`; empty: the files come from their beginnings to their ends."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    granted_bytes: int = 0
    """For so many more there is room on the disk."""
    sources: frozenset[Path] = frozenset()
    """Files of other models that chunks will be copied from: they must stay."""
    _ranges: list[_Range] = field(default_factory=list)
    _shared: list[tuple[Chunk, Source]] = field(default_factory=list)
    _moved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self.files)

    @property
    def missing_bytes(self) -> int:
        """What must still come."""
        return sum(one.end - one.at for one in self._ranges)

    @property
    def shared_bytes(self) -> int:
        """What will be copied from other models."""
        return sum(chunk.size for chunk, _ in self._shared)

    @property
    def list_path(self) -> Path:
        """Where the list of chunks is kept while the model is on its way."""
        return self.place.with_name(f"{self.place.name}.chunks")

    def take_up(self, known: Callable[[], Mapping[bytes, Source]]) -> Wanted:
        """Look at what is here, and say what must come. `known`: chunks of the models held, by hash.

        InvalidRequest where the list of chunks is not that of the files.
        """
        sizes = [size for _, size, _ in self.files]
        kept = self.list_path.read_bytes() if self.list_path.exists() else b""
        if self.chunks:
            chunks = read_chunks(self.chunks, sizes)
        else:
            try:
                chunks = read_chunks(kept, sizes) if kept else []
            except InvalidRequest:  # of other files under the same digest, or torn
                chunks = []
            self.chunks = kept if chunks else b""
            if kept and not chunks:
                self.discard()
        self.place.mkdir(parents=True, exist_ok=True)
        self._keep_only(dict(zip((name for name, _, _ in self.files), sizes, strict=True)))
        if not self.chunks:
            self._ranges = [
                _Range(index, _size(self.place / name), size)
                for index, (name, size, _) in enumerate(self.files)
                if _size(self.place / name) < size
            ]
            return Wanted(missing=tuple((one.file, one.at) for one in self._ranges))
        if kept != self.chunks:
            self.list_path.write_bytes(self.chunks)
        self._look_at(chunks, known())
        return Wanted(
            missing=tuple((one.file, one.at) for one in self._ranges),
            lengths=tuple(one.end - one.at for one in self._ranges),
        )

    def append(self, index: int, offset: int, data: Buffer) -> bool:
        """Write a piece; what is not wanted of it is let fall. Whether nothing is missing any more.

        InvalidRequest for bytes behind the file's end, or a piece that leaves a gap in what is wanted.
        """
        name, size, _ = self.files[index]
        view = memoryview(data)
        end = offset + view.nbytes
        if offset < 0 or end > size:
            raise InvalidRequest(f"{name!r} was offered with {size} bytes, a chunk reaches from {offset} to {end}")
        for one in [one for one in self._ranges if one.file == index and one.at < end and one.end > offset]:
            if one.at < offset:
                raise InvalidRequest(f"{name!r} is held up to byte {one.at}, a chunk at {offset} would leave a gap")
            piece = view[one.at - offset : one.end - offset]
            self._write(name, one.at, piece)
            one.at += piece.nbytes
            self.granted_bytes -= piece.nbytes
            if one.at == one.end:
                self._ranges.remove(one)
        return not self._ranges

    def moved(self, count: int, now_s: float) -> bool:
        """Bytes came. Whether they were enough for the room to be kept for another while."""
        self._moved_bytes += count
        if self._moved_bytes * WHOLE_WITHIN_S < self.total_bytes * RESERVED_S and self._ranges:
            return False
        self.moved_at_s, self._moved_bytes = now_s, 0
        return True

    def assemble(self) -> None:
        """Copy what other models have, then check every file's hash. Reads every byte.

        Refused with MODEL_UNAVAILABLE when a copied chunk is not there as it was (offer again), with DIGEST_MISMATCH
        when a file has another hash than offered: what came is removed.
        """
        for chunk, source in self._shared:
            name = self.files[chunk.file][0]
            data = _read(source, chunk.size)
            if hashlib.sha256(data).digest() != chunk.sha256:
                raise CompanionRefused(
                    "MODEL_UNAVAILABLE",
                    f"a part of {name!r} that another model had here is gone; offer the model again",
                )
            self._write(name, chunk.offset, data)
        self._shared = []
        for name, size, sha256 in self.files:
            target = self.place / name
            if size == 0:
                target.touch()
            with target.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                self.discard()
                raise CompanionRefused(
                    "DIGEST_MISMATCH",
                    f"{name!r} has SHA-256 {found}, offered was {sha256}; what came was removed, offer the model again",
                )

    def discard(self) -> None:
        """Remove what came."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.list_path.unlink(missing_ok=True)

    def _look_at(self, chunks: Collection[Chunk], known: Mapping[bytes, Source]) -> None:
        """Which chunks are here, which other models have, which must come."""
        self._ranges, self._shared = [], []
        coming: dict[bytes, Source] = {}
        for chunk in chunks:
            here = Source(self.place / self.files[chunk.file][0], chunk.offset)
            if _holds(here, chunk):
                continue
            source = known.get(chunk.sha256)
            if source is not None and _holds(source, chunk):
                self._shared.append((chunk, source))
            elif (twin := coming.get(chunk.sha256)) is not None:
                self._shared.append((chunk, twin))
            else:
                coming[chunk.sha256] = here
                self._want(chunk)
        self.sources = frozenset(source.path for _, source in self._shared if source.path.parent != self.place)
        if len(self._ranges) > RANGES_MAX:
            spans: dict[int, _Range] = {}
            for one in self._ranges:  # a file's follow one another
                spans.setdefault(one.file, one).end = one.end
            self._ranges = list(spans.values())

    def _want(self, chunk: Chunk) -> None:
        last = self._ranges[-1] if self._ranges else None
        if last is not None and (last.file, last.end) == (chunk.file, chunk.offset):
            last.end += chunk.size
        else:
            self._ranges.append(_Range(chunk.file, chunk.offset, chunk.offset + chunk.size))

    def _keep_only(self, sizes: Mapping[str, int]) -> None:
        """Remove what an earlier offer left under other names or with more bytes."""
        for path in self.place.iterdir():
            if path.stat().st_size > sizes.get(path.name, -1):
                path.unlink()

    def _write(self, name: str, offset: int, data: Buffer) -> None:
        try:
            with (self.place / name).open("r+b" if (self.place / name).exists() else "w+b") as out:
                out.seek(offset)
                out.write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CompanionRefused("DISK_FULL", f"the companion's disk is full at byte {offset} of {name!r}") from error


def _holds(source: Source, chunk: Chunk) -> bool:
    return hashlib.sha256(_read(source, chunk.size)).digest() == chunk.sha256


def _read(source: Source, size: int) -> bytes:
    """The bytes there; fewer where there are not so many."""
    try:
        with source.path.open("rb") as file:
            file.seek(source.offset)
            return file.read(size)
    except FileNotFoundError:
        return b""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
