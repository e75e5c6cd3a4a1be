"""The payload of codec `klt`: what crosses at one cut, coded with that cut's tables of a calibration (PAYLOAD.md).

Not self-describing: names, element types and known dims are the tables'; the payload says of which calibration. Each
tensor that has a transform is coded with it; one whose values it cannot carry, and all others, travel lossless inside.
What the level does to the model's outputs is not known here; the calibration's curves say.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from split.codec import half, laplace
from split.codec.calibration import LEVEL_MAX, CutTables, Klt, TensorTables
from split.codec.core import core
from split.codec.levels import Made, OfOneCut, levels_kept
from split.codec.packing import pack, unpack
from split.codec.plain import (
    STRING_OVERHEAD_BYTES,
    Buffer,
    array_of,
    bytes_of,
    check_elements,
    join_strings,
    split_strings,
)
from split.codec.transform import Level, Order, from_map, level_of, shape_of, to_map
from split.errors import CodecError, InvalidRequest
from split.tensor import NUMPY_DTYPES, Array, Tensors

MAGIC: Final = b"ISTK"
VERSION: Final = 1
KEY_BYTES: Final = 8

_PREAMBLE: Final = struct.Struct(f"<4sBB{KEY_BYTES}s")
_VARINT_BYTES_MAX: Final = 8


class Kind(IntEnum):
    """How one tensor travels."""

    PLAIN = 0
    ZSTD = 1
    KLT = 2
    """Without the coefficients that are all but always 0 at this level."""
    KLT_FULL = 3
    """With them: one of them was not."""


class BoundaryTables:
    """The tables of one cut, made ready: what depends on the level is worked out when it is used first (`levels.py`).
    Threads may share it."""

    def __init__(self, tables: CutTables, digest: str) -> None:
        """`digest`: the calibration's (`Calibration.digest`)."""
        self.tensors = tables.tensors
        self.key = calibration_key(digest)
        self._levels = OfOneCut()

    def at(self, level: int) -> Made:
        """What `level` makes of each tensor's tables; None for a tensor that has none."""
        found = self._levels.made.get(level)
        if found is None:
            if not 0 <= level <= LEVEL_MAX:
                raise CodecError(f"level {level} of codec klt is not known; levels are 0 to {LEVEL_MAX}")
            found = tuple(None if one.klt is None else level_of(one.klt, level) for one in self.tensors)
        levels_kept.use(self._levels, level, found)
        return found


def calibration_key(digest: str) -> bytes:
    """The first 8 bytes of a calibration's digest (hex): what a payload names it by."""
    return bytes.fromhex(digest[: 2 * KEY_BYTES])


def encode_klt(tensors: Mapping[str, Array], tables: BoundaryTables, level: int) -> list[Buffer]:
    """The payload of `tensors`, which must be those of `tables`, at `level` (grid index of the step).

    CodecError: a tensor is missing, too many, or does not fit its spec; a level outside 0 … 255.
    """
    if tensors.keys() != {one.spec.name for one in tables.tensors}:
        wanted = ", ".join(repr(one.spec.name) for one in tables.tensors)
        raise CodecError(f"the calibration's cut carries {wanted}; got {', '.join(map(repr, tensors)) or 'nothing'}")
    entries: list[tuple[bytes, list[Buffer]]] = []
    memory = 0
    for one, made in zip(tables.tensors, tables.at(level), strict=True):
        array = tensors[one.spec.name]
        kind, body = _encode_tensor(one, made, array)
        stored = sum(memoryview(part).nbytes for part in body)
        entries.append((_entry_bytes(one, kind, array.shape, stored), body))
        memory += _memory_bytes(one, kind, array.shape, stored)
    header = _PREAMBLE.pack(MAGIC, VERSION, level, tables.key) + _varint(memory)
    buffers: list[Buffer] = [header + b"".join(entry for entry, _ in entries)]
    for _, body in entries:
        buffers += body
    return buffers


def decode_klt(payload: Buffer, tables: BoundaryTables, *, max_bytes: int) -> Tensors:
    """The tensors of `payload`, in the order of `tables`.

    CodecError for what `encode_klt` has not made with these tables: another calibration's, damaged, truncated, trailing
    bytes. Work and memory, what decoding takes beside the tensors too, are bounded by `max_bytes`, checked before
    anything is allocated.
    """
    view = memoryview(payload).cast("B")
    level, key, claimed, at = _read_preamble(view)
    if key != tables.key:
        raise CodecError(
            f"the payload was coded with calibration {key.hex()}…, at hand is {tables.key.hex()}…;"
            " both sides must hold the same one"
        )
    working = core().working * claimed
    if working > max_bytes:
        raise CodecError(f"the payload's tensors take {working} bytes to decode, at most {max_bytes} are allowed")
    entries: list[_Entry] = []
    for one in tables.tensors:
        entry, at = _read_entry(view, at, one)
        entries.append(entry)
    memory = sum(_memory_bytes(e.tables, e.kind, e.dims, e.stored_bytes) for e in entries)
    if memory != claimed:
        raise CodecError(f"the payload's tensors take {memory} bytes decoded, its header says {claimed}")
    if at + sum(entry.stored_bytes for entry in entries) != view.nbytes:
        expected = at + sum(entry.stored_bytes for entry in entries)
        raise CodecError(f"the payload's tensors end at byte {expected}, the payload at {view.nbytes}")
    found: Tensors = {}
    for entry, made in zip(entries, tables.at(level), strict=True):
        found[entry.tables.spec.name] = _decode_tensor(entry, made, view[at : at + entry.stored_bytes])
        at += entry.stored_bytes
    return found


def is_klt(payload: Buffer) -> bool:
    """Whether these bytes are meant as such a payload."""
    return bytes(memoryview(payload).cast("B")[: len(MAGIC)]) == MAGIC


def klt_key(payload: Buffer) -> bytes:
    """The `calibration_key` of the calibration it was coded with; CodecError for one that is none of this version."""
    return _read_preamble(memoryview(payload).cast("B"))[1]


def klt_decoded_bytes(payload: Buffer) -> int:
    """Memory that decoding takes here: `Core.working` times what its header says (`decode_klt` holds it to that);
    CodecError as in `klt_key`."""
    return core().working * _read_preamble(memoryview(payload).cast("B"))[2]


def ideal_bytes(tensors: Mapping[str, Array], tables: BoundaryTables, level: int) -> float:
    """Code length of the coefficients under the tables, without framing and without coding: what a perfect entropy
    coder would need. Tensors that would not travel as coefficients do not count."""
    bits = 0.0
    for one, made in zip(tables.tensors, tables.at(level), strict=True):
        if one.klt is None or made is None:
            continue
        coefficients = _quantised(one.klt, made, tensors[one.spec.name])
        if coefficients is not None:
            quantised, order, _ = coefficients
            bits += code_bits(order, quantised)
    return bits / 8


def code_bits(order: Order, quantised: Array) -> float:
    """Code length in bits of INT32 [positions, blocks, components] under the tables of `order`."""
    tables = laplace.tables()
    wanted = np.broadcast_to(order.coded[:, None], quantised.shape)
    table = np.broadcast_to(order.tables[:, None], quantised.shape)[wanted]
    magnitudes = np.abs(quantised[wanted]).astype(np.int64)
    groups = tables.groups[table].astype(np.int64)
    low_bits = tables.low_bits[table]
    group = (magnitudes - 1) >> low_bits
    symbols = np.where(magnitudes == 0, 0, np.minimum(group, groups) + 1)
    escape = (magnitudes > 0) & (group >= groups)
    beyond = magnitudes[escape] - (groups[escape] << low_bits[escape])
    return float(tables.bits[table, symbols].sum() + np.floor(np.log2(beyond)).sum())


# --- one tensor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    tables: TensorTables
    kind: Kind
    dims: tuple[int, ...]
    stored_bytes: int


def _quantised(klt: Klt, level: Level, array: Array) -> tuple[Array, Order, bool] | None:
    """Coefficients, the order they travel in, and whether it is the full one; None where they cannot stand for it."""
    if not array.size:
        return None
    shape = shape_of(klt, array.shape)
    with np.errstate(all="ignore"):  # NaN, infinity and masks come out as unfit
        found = to_map(klt, array)
    quantised, spilled, unfit = core().forward(shape, level, found)
    return None if unfit else (quantised, level.full if spilled else level.usual, spilled)


def _encode_tensor(one: TensorTables, level: Level | None, array: Array) -> tuple[Kind, list[Buffer]]:
    spec = one.spec
    try:
        refusal = spec.refuse(array)
    except InvalidRequest as error:
        refusal = f"tensor {spec.name!r}: {error}"
    if refusal is not None:
        raise CodecError(f"the calibration does not fit: {refusal}")
    if one.klt is not None and level is not None:
        coded = _quantised(one.klt, level, array)
        if coded is not None:
            quantised, order, full = coded
            stream = core().pack(order, quantised)
            if len(stream) < array.nbytes:
                return Kind.KLT_FULL if full else Kind.KLT, [stream]
    if spec.dtype == "BYTES":
        return Kind.PLAIN, [join_strings(spec.name, array)]
    body = bytes_of(np.ascontiguousarray(array, dtype=NUMPY_DTYPES[spec.dtype]))
    packed = pack(memoryview(body[0])) if body else None
    return (Kind.PLAIN, body) if packed is None else (Kind.ZSTD, [packed])


def _decode_tensor(entry: _Entry, level: Level | None, stored: memoryview) -> Array:
    spec = entry.tables.spec
    size = math.prod(entry.dims)
    if entry.kind in (Kind.KLT, Kind.KLT_FULL):
        klt = entry.tables.klt
        assert klt is not None, "_read_entry has seen to it"
        assert level is not None, "klt has a level"
        shape = shape_of(klt, entry.dims)
        order = level.full if entry.kind is Kind.KLT_FULL else level.usual
        quantised = core().unpack(order, stored, shape.blocks)
        if quantised is None:
            raise CodecError(f"tensor {spec.name!r}: its {stored.nbytes} bytes are damaged")
        with np.errstate(all="ignore"):  # hostile coefficients give inf or NaN, not a crash
            coefficients = core().inverse(shape, level, quantised)
            del quantised  # of these only two at a time: `Core.working`
            found = from_map(klt, coefficients, entry.dims)
            del coefficients
            if spec.dtype == "FP16":
                np.clip(found, -half.LARGEST, half.LARGEST, out=found)
            return found.astype(NUMPY_DTYPES[spec.dtype], copy=False)
    if spec.dtype == "BYTES":
        return split_strings(spec.name, entry.dims, size, stored)
    plain: Buffer = stored
    if entry.kind is Kind.ZSTD:
        plain = unpack(stored, plain_bytes=size * spec.element_bytes, name=spec.name)
    return array_of(spec.name, spec.dtype, entry.dims, plain)


def _memory_bytes(one: TensorTables, kind: Kind, dims: tuple[int, ...], stored_bytes: int) -> int:
    """What decoding it occupies: the tensor, or its coefficients where they are more (blocks reach over the edge)."""
    size = math.prod(dims)
    if one.spec.dtype == "BYTES":
        return stored_bytes + size * STRING_OVERHEAD_BYTES
    if kind in (Kind.KLT, Kind.KLT_FULL) and one.klt is not None:
        return max(size * one.spec.element_bytes, 4 * shape_of(one.klt, dims).coefficients)
    return size * one.spec.element_bytes


# --- framing ----------------------------------------------------------------------------------------------------------


def _open_dims(one: TensorTables) -> list[int]:
    """Axes whose sizes the payload must say."""
    return [axis for axis, dim in enumerate(one.spec.shape) if isinstance(dim, str) or dim == -1]


def _entry_bytes(one: TensorTables, kind: Kind, dims: tuple[int, ...], stored_bytes: int) -> bytes:
    return bytes([kind]) + b"".join(_varint(dims[axis]) for axis in _open_dims(one)) + _varint(stored_bytes)


def _read_preamble(view: memoryview) -> tuple[int, bytes, int, int]:
    """Level, key, decoded bytes as claimed, and where the entries begin."""
    if view.nbytes < _PREAMBLE.size:
        raise CodecError(f"a payload of codec klt has more than {_PREAMBLE.size} bytes, got {view.nbytes}")
    magic, version, level, key = _PREAMBLE.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"a payload of codec klt starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise CodecError(f"version {version} of codec klt is not known; this program reads {VERSION}")
    claimed, at = _read_varint(view, _PREAMBLE.size)
    return level, key, claimed, at


def _read_entry(view: memoryview, at: int, one: TensorTables) -> tuple[_Entry, int]:
    name = one.spec.name
    if at >= view.nbytes:
        raise CodecError(f"the payload ends before tensor {name!r}")
    kind = view[at]
    at += 1
    allowed = {Kind.PLAIN, Kind.ZSTD, *((Kind.KLT, Kind.KLT_FULL) if one.klt is not None else ())}
    if kind not in (allowed if one.spec.dtype != "BYTES" else {Kind.PLAIN}):
        raise CodecError(f"tensor {name!r} cannot travel as kind {kind}")
    dims = [dim if isinstance(dim, int) else -1 for dim in one.spec.shape]
    for axis in _open_dims(one):
        dims[axis], at = _read_varint(view, at)
    stored_bytes, at = _read_varint(view, at)
    check_elements(name, tuple(dims))
    entry = _Entry(tables=one, kind=Kind(kind), dims=tuple(dims), stored_bytes=stored_bytes)
    plain_bytes = math.prod(dims) * one.spec.element_bytes
    exact = entry.kind is Kind.PLAIN and one.spec.dtype != "BYTES"
    if exact and stored_bytes != plain_bytes:
        raise CodecError(f"tensor {name!r} of shape {dims} takes {plain_bytes} bytes, its entry says {stored_bytes}")
    if entry.kind is not Kind.PLAIN and not 0 < stored_bytes < plain_bytes:
        raise CodecError(f"tensor {name!r}: coding {plain_bytes} bytes as {stored_bytes} is refused")
    return entry, at


def _varint(value: int) -> bytes:
    """LEB128: seven bits a byte, lowest first, the top bit says that another one follows."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if at + index >= view.nbytes:
            raise CodecError("the payload ends within a number of its header")
        byte = view[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte <= 0x7F:
            return value, at + index + 1
    raise CodecError(f"a number in the payload's header has more than {_VARINT_BYTES_MAX} bytes")
