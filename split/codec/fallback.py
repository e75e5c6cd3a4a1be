"""The core of codec `klt` in numpy and plain Python, where there is no compiled one: the same integers, the same bits.

Float operations come in the order of `native/transform.c`, one rounding each; the coder's state and words are those of
`native/rans.c`, described in PAYLOAD.md. Ten to thirty times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Final

import numpy as np

from split.codec import laplace
from split.codec.transform import Level, Order, Shape, dct
from split.errors import CodecError
from split.tensor import Array

LOWEST: Final = 1 << 16
"""The state lies in 2^16 … 2^32 − 1; words have 16 bits."""
SPLIT_BITS: Final = 12
"""An escape's bits travel in two parts: these low ones, and what is above."""
LENGTH_MAX: Final = 20
CHUNK: Final = 1 << 16
"""Coefficients that are plain numbers at once: as such each takes twenty times the bytes that it has in an array."""
_MASK: Final = laplace.TOTAL - 1


class Fallback:
    """`Core` without anything compiled."""

    name = "plain Python"

    def forward(self, shape: Shape, level: Level, found: Array) -> tuple[Array, bool, bool]:
        with np.errstate(invalid="ignore", over="ignore"):
            centred = found.reshape(shape.batch, shape.height, shape.width, shape.components) - level.offset
            blocks = _dct_forward(_blocks(shape, centred), shape)
            scaled = np.abs(blocks) * np.float32(level.inverse_step) + level.rounding[:, None]
            limit = np.float32(laplace.LARGEST + 1)
            scaled = np.where(scaled < limit, scaled, limit)
        magnitudes = scaled.astype(np.int32) & level.kept[:, None]
        unfit = bool(magnitudes.size) and int(magnitudes.max()) > laplace.LARGEST
        spilled = bool((magnitudes & level.spilled[:, None]).any())
        return np.where(blocks < 0, -magnitudes, magnitudes), spilled, unfit

    def inverse(self, shape: Shape, level: Level, quantised: Array) -> Array:
        magnitudes = (np.abs(quantised).astype(np.float32) + level.bias[:, None]) * np.float32(level.step)
        values = np.where(quantised == 0, np.float32(0), np.where(quantised < 0, -magnitudes, magnitudes))
        tiles = values.reshape(shape.rows, shape.columns, shape.blocks, shape.components)
        if shape.columns > 1:
            tiles = np.moveaxis(_inverse(np.moveaxis(tiles, 1, 0), dct(shape.columns)), 0, 1)
        if shape.rows > 1:
            tiles = _inverse(tiles, dct(shape.rows))
        return _map(shape, tiles)

    def pack(self, order: Order, quantised: Array) -> bytes:
        wanted = np.broadcast_to(order.coded[:, None], quantised.shape)
        values = quantised[wanted]
        if values.size and max(int(values.max()), -int(values.min())) > laplace.LARGEST:
            raise CodecError(f"a quantised coefficient is above {laplace.LARGEST}; this codec does not carry it")
        return _pack(values, np.broadcast_to(order.tables[:, None], quantised.shape)[wanted])

    def unpack(self, order: Order, stream: memoryview, blocks: int) -> Array | None:
        shape = (order.coded.shape[0], blocks, order.coded.shape[1])
        wanted = np.broadcast_to(order.coded[:, None], shape)
        found = _unpack(np.broadcast_to(order.tables[:, None], shape)[wanted], stream)
        if found is None:
            return None
        quantised = np.zeros(shape, np.int32)
        quantised[wanted] = found
        return quantised


# --- blocks and their DCT ---------------------------------------------------------------------------------------------


def _blocks(shape: Shape, centred: Array) -> Array:
    """[rows, columns, blocks, components] of a map, its edges repeated."""
    down, across = -(-shape.height // shape.rows), -(-shape.width // shape.columns)
    below, beside = down * shape.rows - shape.height, across * shape.columns - shape.width
    if below or beside:
        centred = np.pad(centred, ((0, 0), (0, below), (0, beside), (0, 0)), mode="edge")
    split = centred.reshape(shape.batch, down, shape.rows, across, shape.columns, shape.components)
    tiles = split.transpose(2, 4, 0, 1, 3, 5)
    return np.ascontiguousarray(tiles).reshape(shape.rows, shape.columns, shape.blocks, shape.components)


def _map(shape: Shape, tiles: Array) -> Array:
    """The inverse of `_blocks`."""
    down, across = -(-shape.height // shape.rows), -(-shape.width // shape.columns)
    split = tiles.reshape(shape.rows, shape.columns, shape.batch, down, across, shape.components)
    whole = split.transpose(2, 3, 0, 4, 1, 5).reshape(
        shape.batch, down * shape.rows, across * shape.columns, shape.components
    )
    return np.ascontiguousarray(whole[:, : shape.height, : shape.width])


def _dct_forward(tiles: Array, shape: Shape) -> Array:
    """[positions, blocks, components]."""
    if shape.rows > 1:
        tiles = _forward(tiles, dct(shape.rows))
    if shape.columns > 1:
        tiles = np.moveaxis(_forward(np.moveaxis(tiles, 1, 0), dct(shape.columns)), 0, 1)
    return tiles.reshape(shape.positions, shape.blocks, shape.components)


def _forward(x: Array, m: Array) -> Array:
    """`rows_forward` of transform.c along the first axis."""
    n = len(m)
    half = n // 2
    sums = [x[k] + x[n - 1 - k] for k in range(half)]
    differences = [x[k] - x[n - 1 - k] for k in range(half)]
    if n % 2:
        sums.append(x[half])
    out = np.empty(x.shape, np.float32)
    for u in range(n):
        terms = differences if u % 2 else sums
        total = m[u, 0] * terms[0]
        for k in range(1, len(terms)):
            total += m[u, k] * terms[k]
        out[u] = total
    return out


def _inverse(x: Array, m: Array) -> Array:
    """`rows_inverse` of transform.c along the first axis."""
    n = len(m)
    out = np.empty(x.shape, np.float32)
    for k in range(n - n // 2):
        even = m[0, k] * x[0]
        for u in range(2, n, 2):
            even += m[u, k] * x[u]
        odd = np.zeros_like(even)
        for u in range(1, n, 2):
            odd += m[u, k] * x[u]
        out[n - 1 - k] = even - odd
        out[k] = even if k == n - 1 - k else even + odd
    return out


# --- the stream -------------------------------------------------------------------------------------------------------


@cache
def _rows() -> list[tuple[list[int], list[int], int, int]]:
    """For each table its starts, frequencies, groups and low bits, as plain numbers."""
    tables = laplace.tables()
    return [
        (tables.starts[k].tolist(), np.diff(tables.starts[k]).tolist(), int(tables.groups[k]), int(tables.low_bits[k]))
        for k in range(laplace.TABLES)
    ]


@cache
def _symbols(k: int) -> bytes:
    """Slot → symbol of table k."""
    return np.repeat(np.arange(laplace.SYMBOLS_MAX, dtype=np.uint8), np.diff(laplace.tables().starts[k])).tobytes()


def _parts(values: Array, table: Array) -> Iterator[tuple[int, int, int, int]]:
    """Start and frequency of each coefficient's symbol, the bits that follow it and how many they are, last coefficient
    first; (…, rest, -1) for an escape, rest its magnitude past the groups with the sign below it."""
    tables = laplace.tables()
    magnitudes = np.abs(values).astype(np.int64)
    rest = magnitudes - 1
    negative = values < 0
    low_bits = tables.low_bits[table].astype(np.int64)
    groups = tables.groups[table].astype(np.int64)
    escape = (rest >> low_bits) >= groups
    symbols = np.where(magnitudes == 0, 0, np.where(escape, groups, rest >> low_bits) + 1)
    starts = tables.starts[table, symbols].astype(np.int64)
    frequencies = tables.starts[table, symbols + 1] - starts
    bits = (rest & ((1 << low_bits) - 1)) << 1 | negative
    bits = np.where(escape, (rest - (groups << low_bits)) << 1 | negative, bits)
    count = np.where(magnitudes == 0, 0, np.where(escape, -1, low_bits + 1))
    return zip(*(part[::-1].tolist() for part in (starts, frequencies, bits, count)), strict=True)


def _escape_parts(rest: int) -> Iterator[tuple[int, int]]:
    """(bits, how many) of an escape, last first."""
    beyond = (rest >> 1) + 1
    below = beyond.bit_length() - 1
    low = min(below, SPLIT_BITS)
    yield rest & 1, 1
    yield beyond & ((1 << low) - 1), low
    yield (beyond & ((1 << below) - 1)) >> low, below - low
    yield below, laplace.ESCAPE_LENGTH_BITS


def _pack(values: Array, table: Array) -> bytes:
    words: list[int] = []  # last first
    state = LOWEST
    chunks = reversed(range(0, len(values), CHUNK))
    for start, frequency, bits, count in chain.from_iterable(
        _parts(values[at : at + CHUNK], table[at : at + CHUNK]) for at in chunks
    ):
        for value, length in ((bits, count),) if count > 0 else _escape_parts(bits) if count else ():
            if state >> (32 - length):
                words.append(state & 0xFFFF)
                state >>= 16
            state = state << length | value
        if state >> (32 - laplace.FREQUENCY_BITS) >= frequency:
            words.append(state & 0xFFFF)
            state >>= 16
        state = (state // frequency << laplace.FREQUENCY_BITS) + state % frequency + start
    words += (state >> 16, state & 0xFFFF)
    return np.array(words[::-1], "<u2").tobytes()


def _unpack(table: Array, stream: memoryview) -> Array | None:
    if len(stream) % 2:
        return None
    words = np.frombuffer(stream, "<u2").tolist()
    values = np.zeros(len(table), np.int32)
    try:
        state, at = words[0] | words[1] << 16, 2
        if state < LOWEST:
            return None
        for start in range(0, len(table), CHUNK):
            found = _unpack_some(table[start : start + CHUNK].tolist(), words, state, at)
            if found is None:
                return None
            values[start : start + CHUNK], state, at = found
    except IndexError:  # the words ended too early
        return None
    return values if state == LOWEST and at == len(words) else None


def _unpack_some(table: list[int], words: list[int], state: int, at: int) -> tuple[list[int], int, int] | None:
    """The values of coefficients of these tables, the state and the place after them; None where that is damaged."""
    rows = _rows()
    symbols = {k: _symbols(k) for k in set(table)}
    values = [0] * len(table)
    for i, k in enumerate(table):
        slot = state & _MASK
        symbol = symbols[k][slot]
        starts, frequencies, groups, low_bits = rows[k]
        state = (state >> laplace.FREQUENCY_BITS) * frequencies[symbol] + slot - starts[symbol]
        if state < LOWEST:
            state = state << 16 | words[at]
            at += 1
        if 0 < symbol <= groups:
            bits = state & ((2 << low_bits) - 1)
            state >>= low_bits + 1
            if state < LOWEST:
                state = state << 16 | words[at]
                at += 1
            magnitude = ((symbol - 1) << low_bits | bits >> 1) + 1
            values[i] = -magnitude if bits & 1 else magnitude
        elif symbol:
            state, at, beyond, negative = _take_escape(state, words, at)
            magnitude = (groups << low_bits) + beyond
            if magnitude > laplace.LARGEST:
                return None
            values[i] = -magnitude if negative else magnitude
    return values, state, at


def _take_escape(state: int, words: list[int], at: int) -> tuple[int, int, int, int]:
    """State and place after it, the magnitude past the groups (≥ 1; too great where damaged), whether negative."""

    def take(length: int) -> int:
        nonlocal state, at
        value = state & ((1 << length) - 1)
        state >>= length
        if state < LOWEST:
            state = state << 16 | words[at]
            at += 1
        return value

    below = take(laplace.ESCAPE_LENGTH_BITS)
    if below > LENGTH_MAX:
        return state, at, laplace.LARGEST + 1, 0
    low = min(below, SPLIT_BITS)
    high = take(below - low)
    beyond = 1 << below | high << low | take(low)
    negative = take(1)
    return state, at, beyond, negative
