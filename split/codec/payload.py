"""Tensors ↔ the bytes of one payload: self-describing, little-endian, checked in full before anything is allocated.

The format is specified in PAYLOAD.md beside this file. A codec is a policy: it chooses a coding (`Kind`) for each
tensor; the payload says which was chosen, so decoding needs no codec name. What a lossy coding does to the model's
outputs is not known here; it is measured (`fidelity.py`). Codec `klt` has payloads of its own (`klt.py`), told by their
first bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from split.codec import affine
from split.codec.half import decode_half, encode_half
from split.codec.klt import BoundaryTables, decode_klt, is_klt, klt_decoded_bytes
from split.codec.packing import pack, unpack
from split.codec.picture import HEADER_BYTES_MIN, PICTURE_CODECS, decode_picture, decoding_bytes, encode_picture
from split.codec.plain import (
    STRING_OVERHEAD_BYTES,
    Buffer,
    array_of,
    bytes_of,
    check_elements,
    join_strings,
    split_strings,
)
from split.errors import CodecError, InvalidRequest
from split.profiles.image_spec import ImageSpec
from split.tensor import NAME_BYTES_MAX, NUMPY_DTYPES, RANK_MAX, Array, Tensors, TensorSpec, dtype_name

CODECS: Final = ("raw", "fp16", "int8", "encoded", *PICTURE_CODECS)
"""What `encode` knows; klt has an encoder of its own, which needs tables (`split.codec.klt.encode_klt`)."""
SPOKEN: Final = (*CODECS, "klt")
"""What this program reads and writes, as its Hello says."""

MAGIC: Final = b"ISTP"
VERSION: Final = 1
ALIGNMENT: Final = 64
"""Of each tensor's bytes inside the payload: a cache line, and what vector units like."""
TENSORS_MAX: Final = 4096

_PREAMBLE: Final = struct.Struct("<4sBBHII")
_ENTRY: Final = struct.Struct("<HBBBBBBQQ")
_DTYPE_CODES: Final = {name: code for code, name in enumerate(NUMPY_DTYPES, start=1)}
_DTYPE_NAMES: Final = {code: name for name, code in _DTYPE_CODES.items()}
_ZEROS: Final = bytes(ALIGNMENT)


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
class _Entry:
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
        return math.prod(self.dims)

    @property
    def memory_bytes(self) -> int:
        """What the decoded tensor occupies; a picture's pixels while it is decoded, too."""
        if self.kind is Kind.STRINGS:
            return self.plain_bytes + self.size * STRING_OVERHEAD_BYTES
        if self.kind is Kind.PICTURE:
            return decoding_bytes(self.size)
        return self.size * NUMPY_DTYPES[self.dtype].itemsize


def encode(
    tensors: Mapping[str, Array],
    codec: str,
    *,
    level: int | None = None,
    pictures: Mapping[str, ImageSpec] | None = None,
) -> list[Buffer]:
    """The payload of `tensors` in this order, as buffers to be sent one after the other.

    `codec`: `raw` and `encoded` copy nothing that is C-contiguous and little-endian (the arrays must not change until
    the buffers are out); `fp16` and `int8` code the floats that survive it and pack everything with zstd where that
    pays; integers, booleans, strings and floats with NaN, infinity or mask values stay lossless in every codec.
    `jpeg` and `webp` code those that are `pictures` (name → how it was made of pixels) at the setting `level`, an index
    of `split.codec.picture.LEVELS`; what is no picture after all, and every other tensor, travels raw.
    CodecError: unknown codec or level, an element type or rank that does not travel, a BYTES element neither bytes nor
    str.
    """
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r} is not known; known are {', '.join(CODECS)}")
    if codec in PICTURE_CODECS and level is None:
        raise CodecError(f"codec {codec} needs a level; the model's calibration says which")
    if len(tensors) > TENSORS_MAX:
        raise CodecError(f"{len(tensors)} tensors do not fit into one payload; at most {TENSORS_MAX} do")
    header = bytearray(_PREAMBLE.size)
    bodies: list[list[Buffer]] = []
    for name, array in tensors.items():
        picture = None
        if level is not None and pictures and name in pictures and codec in PICTURE_CODECS:
            picture = encode_picture(array, pictures[name], codec, level)
        entry, body = _encode_tensor(name, array, codec, picture)
        header += _entry_bytes(entry)
        bodies.append(body)
    _PREAMBLE.pack_into(header, 0, MAGIC, VERSION, 0, len(bodies), len(header), 0)
    buffers: list[Buffer] = [bytes(header)]
    at = len(header)
    for body in bodies:
        length = sum(memoryview(part).nbytes for part in body)
        if not length:
            continue
        if gap := -at % ALIGNMENT:
            buffers.append(_ZEROS[:gap])
        buffers += body
        at += gap + length
    return buffers


def decode(payload: Buffer, *, max_bytes: int, tables: BoundaryTables | None = None) -> Tensors:
    """The tensors of `payload`, in its order; one of codec `klt` needs the `tables` of its calibration and cut.

    Unpacked raw tensors are views into `payload` where it lies aligned in memory (read-only when `payload` is), all
    others own their memory. `max_bytes` bounds the memory of all decoded tensors together. CodecError for anything that
    is not exactly one payload of this version: damaged, truncated, trailing bytes, duplicate names, sizes that do not
    add up.
    """
    if is_klt(payload):
        if tables is None:
            raise CodecError(
                "the payload was coded with a calibration, and there is none at hand; run isthmus calibrate"
            )
        return decode_klt(payload, tables, max_bytes=max_bytes)
    view = memoryview(payload).cast("B")
    entries, at = _read_header(view)
    wanted = sum(entry.memory_bytes for entry in entries)
    if wanted > max_bytes:
        raise CodecError(f"the payload's tensors take {wanted} bytes decoded, at most {max_bytes} are allowed")
    stored: list[memoryview] = []
    for entry in entries:
        if entry.stored_bytes:
            gap = -at % ALIGNMENT
            if any(view[at : at + gap]):
                raise CodecError(f"tensor {entry.name!r}: the padding before its bytes is not zero")
            at += gap
        if at + entry.stored_bytes > view.nbytes:
            raise CodecError(
                f"tensor {entry.name!r} ends at byte {at + entry.stored_bytes}, the payload at {view.nbytes}"
            )
        stored.append(view[at : at + entry.stored_bytes])
        at += entry.stored_bytes
    if at != view.nbytes:
        raise CodecError(f"{view.nbytes - at} bytes follow the last tensor; expected the end of the payload")
    return {entry.name: _decode_tensor(entry, part) for entry, part in zip(entries, stored, strict=True)}


def decoded_bytes(payload: Buffer, *, tensors_max: int = TENSORS_MAX) -> int:
    """Memory that the tensors of `payload` will take decoded, as its header says; CodecError for one that is none, or
    that claims more than `tensors_max` of them: each takes 7 µs to read, and whoever knows what must come need not.

    What `decode` checks against `max_bytes`: for those who count before they decode.
    """
    if is_klt(payload):
        return klt_decoded_bytes(payload)
    entries, _ = _read_header(memoryview(payload).cast("B"), tensors_max)
    return sum(entry.memory_bytes for entry in entries)


def payload_bytes(specs: Iterable[TensorSpec], codec: str, dims: Mapping[str, int]) -> int:
    """Payload size of dense tensors of `specs` under `codec`: exact for raw and no BYTES, else before zstd.

    `dims`: symbolic dim → size, 1 where missing. BYTES elements count 8 bytes each.
    """
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r} is not known; known are {', '.join(CODECS)}")
    specs = list(specs)
    sizes = []
    at = _PREAMBLE.size
    for spec in specs:
        at += _ENTRY.size + 8 * len(spec.shape) + len(spec.name.encode())
        sizes.append(_coded_bytes(spec, codec, dims))
    for size in sizes:
        at += (-at % ALIGNMENT + size) if size else 0
    return at


def _coded_bytes(spec: TensorSpec, codec: str, dims: Mapping[str, int]) -> int:
    dense = spec.nbytes(dims)
    if codec == "fp16" and spec.dtype in ("FP32", "FP64"):
        return 2 * dense // spec.element_bytes
    if codec == "int8" and spec.dtype in ("FP16", "FP32", "FP64"):
        shape = tuple(dims.get(d, 1) if isinstance(d, str) else max(d, 1) if d == -1 else d for d in spec.shape)
        count = math.prod(shape)
        width = affine.parameter_dtype(NUMPY_DTYPES[spec.dtype]).itemsize
        return count + 2 * width * affine.channels(shape, affine.channel_axis(shape)) if count else 0
    return dense


# --- one tensor -------------------------------------------------------------------------------------------------------


def _encode_tensor(name: str, array: Array, codec: str, picture: bytes | None) -> tuple[_Entry, list[Buffer]]:
    try:
        dtype = dtype_name(array.dtype)
    except InvalidRequest as error:
        raise CodecError(f"tensor {name!r}: {error}") from error
    encoded_name = name.encode()
    if not 1 <= len(encoded_name) <= NAME_BYTES_MAX:
        raise CodecError(f"a tensor's name must have 1 to {NAME_BYTES_MAX} bytes, got {len(encoded_name)}")
    if array.ndim > RANK_MAX:
        raise CodecError(f"tensor {name!r} has rank {array.ndim}; at most {RANK_MAX} travels")
    kind, axis, body = _choose_coding(name, array, dtype, codec, picture)
    plain_bytes = sum(memoryview(part).nbytes for part in body)
    packing = Packing.NONE
    if codec in ("fp16", "int8") and plain_bytes:
        plain = memoryview(body[0]) if len(body) == 1 else b"".join(body)
        packed = pack(plain)
        if packed is not None:
            packing, body = Packing.ZSTD, [packed]
    entry = _Entry(
        name=name,
        dtype=dtype,
        dims=tuple(array.shape),
        kind=kind,
        packing=packing,
        axis=axis,
        stored_bytes=sum(memoryview(part).nbytes for part in body),
        plain_bytes=plain_bytes,
    )
    return entry, body


def _choose_coding(
    name: str, array: Array, dtype: str, codec: str, picture: bytes | None
) -> tuple[Kind, int, list[Buffer]]:
    """Kind, axis and plain bytes of one tensor: the codec's choice, and raw wherever that would damage it."""
    if picture is not None:
        return Kind.PICTURE, 0, [picture]
    if dtype == "BYTES":
        return Kind.STRINGS, 0, [join_strings(name, array)]
    plain = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[dtype]).reshape(array.shape)
    if codec == "fp16" and (half := encode_half(plain)) is not None:
        return Kind.HALF, 0, bytes_of(half)
    if codec == "int8" and (coded := affine.encode_affine(plain)) is not None:
        return Kind.AFFINE, coded.axis, bytes_of(coded.parameters) + bytes_of(coded.codes)
    return Kind.RAW, 0, bytes_of(plain)


def _decode_tensor(entry: _Entry, stored: memoryview) -> Array:
    plain: Buffer = stored
    if entry.packing is Packing.ZSTD:
        plain = unpack(stored, plain_bytes=entry.plain_bytes, name=entry.name)
    dtype = NUMPY_DTYPES[entry.dtype]
    match entry.kind:
        case Kind.STRINGS:
            return split_strings(entry.name, entry.dims, entry.size, memoryview(plain))
        case Kind.PICTURE:
            return decode_picture(memoryview(plain), entry.dims, entry.name)
        case Kind.HALF:
            return decode_half(np.frombuffer(plain, "<f2").reshape(entry.dims), dtype)
        case Kind.AFFINE:
            width = affine.parameter_dtype(dtype)
            pairs = affine.channels(entry.dims, entry.axis)
            parameters = np.frombuffer(plain, width, count=2 * pairs).reshape(2, pairs)
            codes = np.frombuffer(plain, np.uint8, offset=2 * pairs * width.itemsize)
            return affine.decode_affine(parameters, codes, dtype=dtype, dims=entry.dims, axis=entry.axis)
        case Kind.RAW:
            return array_of(entry.name, entry.dtype, entry.dims, plain)


# --- header -----------------------------------------------------------------------------------------------------------


def _entry_bytes(entry: _Entry) -> bytes:
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


def _read_header(view: memoryview, tensors_max: int = TENSORS_MAX) -> tuple[list[_Entry], int]:
    """All entries, checked, and where the header ends."""
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


def _read_entries(header: memoryview, count: int) -> Iterator[_Entry]:
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
        entry = _Entry(
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


def _check_sizes(entry: _Entry) -> None:
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


def _plain_bytes(entry: _Entry) -> int | None:
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
