"""Tensors ↔ the bytes of one payload: self-describing, little-endian, checked in full before anything is allocated.

The format is specified in PAYLOAD.md beside this file; the header is `payload_header.py`'s. A codec is a policy: it
chooses a coding (`Kind`) for each tensor; the payload says which was chosen, so decoding needs no codec name. What a
lossy coding does to the model's outputs is not known here; it is measured (`fidelity.py`). Codec `klt` has payloads of
its own (`klt.py`), told by their first bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from split.codec import affine
from split.codec.half import decode_half, encode_half
from split.codec.klt import BoundaryTables, decode_klt, is_klt, klt_decoded_bytes
from split.codec.packing import pack, unpack
from split.codec.payload_header import TENSORS_MAX, Entry, Kind, Packing, header_bytes_of, read_header, write_header
from split.codec.picture import PICTURE_CODECS, decode_picture, encode_picture
from split.codec.plain import Buffer, array_of, bytes_of, join_strings, split_strings
from split.errors import CodecError, InvalidRequest
from split.ids import KLT
from split.profiles.image_spec import ImageSpec
from split.tensor import NAME_BYTES_MAX, NUMPY_DTYPES, RANK_MAX, Array, Tensors, TensorSpec, dtype_name

CODECS: Final = ("raw", "fp16", "int8", "encoded", *PICTURE_CODECS)
"""What `encode` knows; klt has an encoder of its own, which needs tables (`split.codec.klt.encode_klt`)."""
SPOKEN: Final = (*CODECS, KLT)
"""What this program reads and writes, as its Hello says."""

ALIGNMENT: Final = 64
"""Of each tensor's bytes inside the payload: a cache line, and what vector units like."""
_ZEROS: Final = bytes(ALIGNMENT)


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
    entries: list[Entry] = []
    bodies: list[list[Buffer]] = []
    for name, array in tensors.items():
        picture = None
        if level is not None and pictures and name in pictures and codec in PICTURE_CODECS:
            picture = encode_picture(array, pictures[name], codec, level)
        entry, body = _encode_tensor(name, array, codec, picture)
        entries.append(entry)
        bodies.append(body)
    header = write_header(entries)
    buffers: list[Buffer] = [header]
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
    entries, at = read_header(view)
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
    entries, _ = read_header(memoryview(payload).cast("B"), tensors_max)
    return sum(entry.memory_bytes for entry in entries)


def payload_bytes(specs: Iterable[TensorSpec], codec: str, dims: Mapping[str, int]) -> int:
    """Payload size of dense tensors of `specs` under `codec`: exact for raw and no BYTES, else before zstd.

    `dims`: symbolic dim → size, 1 where missing. BYTES elements count 8 bytes each.
    """
    if codec not in CODECS:
        raise CodecError(f"codec {codec!r} is not known; known are {', '.join(CODECS)}")
    specs = list(specs)
    at = header_bytes_of(specs)
    for size in [_coded_bytes(spec, codec, dims) for spec in specs]:
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


def _encode_tensor(name: str, array: Array, codec: str, picture: bytes | None) -> tuple[Entry, list[Buffer]]:
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
    entry = Entry(
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


def _decode_tensor(entry: Entry, stored: memoryview) -> Array:
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
