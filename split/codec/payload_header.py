"""The header of a payload: one entry for each tensor, written and read, every count held against the others before
anybody allocates by it. The bytes behind it are `payload.py`'s; both are specified in PAYLOAD.md beside this file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from split.codec import affine
from split.codec.picture import HEADER_BYTES_MIN, decoding_bytes
from split.codec.plain import STRING_OVERHEAD_BYTES, check_elements
from split.errors import CodecError
from split.tensor import NAME_BYTES_MAX, NUMPY_DTYPES, RANK_MAX, TensorSpec

MAGIC: Final = b"ISTP"
VERSION: Final = 1
TENSORS_MAX: Final = 4096
"""In one payload."""

_PREAMBLE: Final = struct.Struct("<4sBBHII")
_ENTRY: Final = struct.Struct("<HBBBBBBQQ")
_DTYPE_CODES: Final = {name: code for code, name in enumerate(NUMPY_DTYPES, start=1)}
_DTYPE_NAMES: Final = {code: name for name, code in _DTYPE_CODES.items()}


class Kind(IntEnum):
    """How one tensor's elements became plain bytes."""

    RAW = 0
    HALF = 1
    AFFINE = 2
    STRINGS = 3
    PICTURE = 5


class Packing(IntEnum):
    """What was done to the plain bytes."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor as the header describes it."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    kind: Kind
    packing: Packing
    axis: int
    """Channel axis of AFFINE, else 0."""
    stored_bytes: int
    plain_bytes: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def memory_bytes(self) -> int:
        """What the decoded tensor occupies; a picture's pixels while it is decoded, too."""
        if self.kind is Kind.STRINGS:
            return self.plain_bytes + self.size * STRING_OVERHEAD_BYTES
        if self.kind is Kind.PICTURE:
            return decoding_bytes(self.size)
        return self.size * NUMPY_DTYPES[self.dtype].itemsize


def header_bytes_of(specs: Iterable[TensorSpec]) -> int:
    """Size of the header of a payload of such tensors."""
    return _PREAMBLE.size + sum(_ENTRY.size + 8 * len(spec.shape) + len(spec.name.encode()) for spec in specs)


def write_header(entries: Sequence[Entry]) -> bytes:
    """The header of a payload of at most `TENSORS_MAX` such tensors."""
    described = b"".join(map(_entry_bytes, entries))
    return _PREAMBLE.pack(MAGIC, VERSION, 0, len(entries), _PREAMBLE.size + len(described), 0) + described


def _entry_bytes(entry: Entry) -> bytes:
    name = entry.name.encode()
    fixed = _ENTRY.pack(
        len(name),
        _DTYPE_CODES[entry.dtype],
        len(entry.dims),
        entry.kind,
        entry.packing,
        entry.axis,
        0,
        entry.stored_bytes,
        entry.plain_bytes,
    )
    return fixed + struct.pack(f"<{len(entry.dims)}Q", *entry.dims) + name


def read_header(view: memoryview, tensors_max: int = TENSORS_MAX) -> tuple[list[Entry], int]:
    """All entries, checked, and where the header ends. CodecError for one that is damaged, of another version, or of
    more than `tensors_max` tensors; the bytes behind the header are not looked at."""
    if view.nbytes < _PREAMBLE.size:
        raise CodecError(f"a payload has at least {_PREAMBLE.size} bytes, got {view.nbytes}")
    magic, version, zero, count, header_bytes, zeros = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"a payload starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION or zero or zeros:
        raise CodecError(f"payload version {version} is not known; this program reads {VERSION}")
    if count > tensors_max:
        raise CodecError(f"the payload claims {count} tensors; at most {tensors_max} are allowed")
    if header_bytes > view.nbytes:
        raise CodecError(f"the payload's header claims {header_bytes} bytes, the payload has {view.nbytes}")
    entries = list(_read_entries(view[:header_bytes], count))
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise CodecError(f"tensor {entry.name!r} is in the payload twice")
        seen.add(entry.name)
    return entries, header_bytes


def _read_entries(header: memoryview, count: int) -> Iterator[Entry]:
    at = _PREAMBLE.size
    for index in range(count):
        if at + _ENTRY.size > header.nbytes:
            raise CodecError(f"the payload's header ends within tensor {index} of {count}")
        name_bytes, dtype, rank, kind, packing, axis, zero, stored, plain = _ENTRY.unpack_from(header, at)
        at += _ENTRY.size
        if rank > RANK_MAX:
            raise CodecError(f"tensor {index} of the payload has rank {rank}; at most {RANK_MAX} is allowed")
        if not 1 <= name_bytes <= NAME_BYTES_MAX:
            raise CodecError(
                f"tensor {index} of the payload has a name of {name_bytes} bytes, not 1 to {NAME_BYTES_MAX}"
            )
        if at + 8 * rank + name_bytes > header.nbytes:
            raise CodecError(f"the payload's header ends within tensor {index} of {count}")
        dims = struct.unpack_from(f"<{rank}Q", header, at)
        at += 8 * rank
        try:
            name = str(header[at : at + name_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise CodecError(f"the name of tensor {index} of the payload is not UTF-8 ({error})") from error
        at += name_bytes
        if dtype not in _DTYPE_NAMES or kind not in set(Kind) or packing not in set(Packing) or zero:
            raise CodecError(
                f"tensor {name!r} has element type {dtype}, kind {kind}, packing {packing}; this program reads"
                f" element types 1–{len(_DTYPE_NAMES)}, kinds {[*map(int, Kind)]}, packings {[*map(int, Packing)]}"
            )
        entry = Entry(
            name=name,
            dtype=_DTYPE_NAMES[dtype],
            dims=dims,
            kind=Kind(kind),
            packing=Packing(packing),
            axis=axis,
            stored_bytes=stored,
            plain_bytes=plain,
        )
        _check_sizes(entry)
        yield entry
    if at != header.nbytes:
        raise CodecError(f"{header.nbytes - at} bytes follow the last entry of the payload's header")


def _check_sizes(entry: Entry) -> None:
    """CodecError unless kind, element type, axis and byte counts belong together."""
    check_elements(entry.name, entry.dims)
    expected = _plain_bytes(entry)
    if expected is None:
        raise CodecError(
            f"tensor {entry.name!r}: {entry.dtype} of rank {len(entry.dims)} cannot be coded as {entry.kind.name}"
        )
    exact = entry.kind not in (Kind.STRINGS, Kind.PICTURE)
    if entry.plain_bytes < expected or (exact and entry.plain_bytes != expected):
        raise CodecError(
            f"tensor {entry.name!r} of shape {list(entry.dims)} takes {'' if exact else 'at least '}{expected} bytes"
            f" as {entry.kind.name}, its header says {entry.plain_bytes}"
        )
    if entry.packing is Packing.NONE and entry.stored_bytes != entry.plain_bytes:
        raise CodecError(
            f"tensor {entry.name!r} is not packed, yet {entry.stored_bytes} bytes are stored for {entry.plain_bytes}"
        )
    if entry.packing is Packing.ZSTD and not 0 < entry.stored_bytes < entry.plain_bytes:
        raise CodecError(
            f"tensor {entry.name!r}: packing {entry.plain_bytes} bytes into {entry.stored_bytes} is refused"
        )


def _plain_bytes(entry: Entry) -> int | None:
    """Plain bytes of the tensor (the least for STRINGS and PICTURE); None when kind, element type and axis do not go
    together."""
    dtype = NUMPY_DTYPES[entry.dtype]
    if (entry.kind is Kind.STRINGS) != (entry.dtype == "BYTES"):
        return None
    if entry.kind is not Kind.AFFINE and entry.axis:
        return None
    match entry.kind:
        case Kind.RAW:
            return entry.size * dtype.itemsize
        case Kind.HALF:
            return entry.size * 2 if entry.dtype in ("FP32", "FP64") else None
        case Kind.AFFINE:
            fits = entry.axis == affine.WHOLE or entry.axis < len(entry.dims)
            if dtype.kind != "f" or not fits or not entry.size:
                return None
            return entry.size + 2 * affine.parameter_dtype(dtype).itemsize * affine.channels(entry.dims, entry.axis)
        case Kind.STRINGS:
            return entry.size * 4
        case Kind.PICTURE:
            sound = entry.dtype == "FP32" and len(entry.dims) == 4 and entry.size and entry.packing is Packing.NONE
            return HEADER_BYTES_MIN if sound else None
