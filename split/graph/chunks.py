"""A model's files as pieces that other models may have too: cut where the bytes say, not where an offset does, so that
what is inserted or changed moves no border but those beside it (content-defined chunking).

A border lies behind a byte where the gear hash of the last 32 bytes has zeros on top (Xia et al., FastCDC, 2016), at
least `least` and at most 16 × `least` bytes behind the one before. The hash is computed for a block of bytes at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from split.errors import InvalidModel, InvalidRequest

LEAST_BYTES: Final = 16 * 1024
"""36 bytes of list for each chunk, of 48 KiB on average: less than a thousandth of the model."""
LIST_CHUNKS_MAX: Final = 12_000
"""So many fit into an offer with golden inputs beside; larger models have larger chunks."""
LISTED_BYTES_MIN: Final = 1024
"""Of a peer's list: no more chunks than one for so many bytes of the model, and one for each file. The lists of all
models held are read for each offer, and what is shared in pieces so small is not worth its line."""
_ENTRY_BYTES: Final = 4 + 32
_WINDOW: Final = 32
_BLOCK_BYTES: Final = 1 << 20
_ZEROS: Final = 15
"""On top of the hash: 32 KiB until they are met. One more for each time that `least` doubles."""
_GEAR: Final = np.array(
    [int.from_bytes(hashlib.sha256(b"isthmus chunk" + bytes([value])).digest()[:4], "little") for value in range(256)],
    dtype=np.uint32,
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of one file of a model."""

    file: int
    """Index among the model's files."""
    offset: int
    size: int
    sha256: bytes


def list_chunks(paths: Sequence[Path], sizes: Sequence[int]) -> bytes:
    """The chunks of these files as they travel (`model-offer`): 4 bytes of size and 32 of SHA-256 for each.

    Reads each file twice. InvalidModel for one that has another size than `sizes` says; OSError.
    """
    least, total = LEAST_BYTES, sum(sizes)
    while total // least > LIST_CHUNKS_MAX - len(sizes):
        least *= 2
    packed = bytearray()
    for path, size in zip(paths, sizes, strict=True):
        if path.stat().st_size != size:
            raise InvalidModel(f"{path} was changed since it was loaded; load the model again")
        with path.open("rb") as file:
            for length in _lengths(path, size, least):
                packed += length.to_bytes(4, "little") + hashlib.sha256(file.read(length)).digest()
    return bytes(packed)


def read_chunks(packed: bytes, sizes: Sequence[int]) -> list[Chunk]:
    """What `list_chunks` wrote, or a peer; InvalidRequest unless the chunks are exactly these files."""
    count, rest = divmod(len(packed), _ENTRY_BYTES)
    if rest:
        raise InvalidRequest(f"a list of chunks has {_ENTRY_BYTES} bytes for each, {len(packed)} came")
    if count > sum(sizes) // LISTED_BYTES_MIN + len(sizes):
        raise InvalidRequest(
            f"a list of {count} chunks for {sum(sizes)} bytes is too long: one for each {LISTED_BYTES_MIN} bytes and "
            "one for each file at most"
        )
    entries = (packed[at * _ENTRY_BYTES : (at + 1) * _ENTRY_BYTES] for at in range(count))
    chunks: list[Chunk] = []
    for file, size in enumerate(sizes):
        offset = 0
        while offset < size:
            entry = next(entries, None)
            length = int.from_bytes(entry[:4], "little") if entry is not None else 0
            if entry is None or not 0 < length <= size - offset:
                raise InvalidRequest(f"the list of chunks does not make up file {file} at byte {offset} of {size}")
            chunks.append(Chunk(file, offset, length, entry[4:]))
            offset += length
    if next(entries, None) is not None:
        raise InvalidRequest("the list of chunks goes on behind the last file")
    return chunks


def _lengths(path: Path, size: int, least: int) -> Iterator[int]:
    """The sizes of a file's chunks, in order."""
    start, borders, at = 0, _borders(path, least), np.empty(0, np.int64)
    known = 0  # bytes whose borders are in `at`
    while start < size:
        first, last = start + least, min(start + 16 * least, size)
        while known < last and (found := next(borders, None)) is not None:
            at = np.concatenate((at[at >= first], found[1]))
            known = found[0]
        place = int(np.searchsorted(at, first))
        end = min(int(at[place]), last) if place < at.size else last
        yield end - start
        start = end


def _borders(path: Path, least: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Block by block: how far the file was looked at, and the places in that block behind which a border may lie."""
    zeros = min(_ZEROS + (least // LEAST_BYTES).bit_length() - 1, 32)
    below = np.uint32(1 << (32 - zeros))
    done, before = 0, np.zeros(_WINDOW, np.uint8)
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            block = np.concatenate((before, np.frombuffer(data, np.uint8)))
            hashed = _GEAR[block]
            for step in (1, 2, 4, 8, 16):
                hashed[step:] += hashed[:-step] << np.uint32(step)
            done += len(data)
            yield done, np.flatnonzero(hashed[_WINDOW:] < below) + (done - len(data) + 1)
            before = block[-_WINDOW:]
