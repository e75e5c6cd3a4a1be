"""The core of codec `klt` in numpy and plain Python, where there is no compiled one: the same integers, the same bits.

Float operations come in the order of `native/transform.c`, one rounding each; the coder's state and words are those of
`native/rans.c`, described in PAYLOAD.md. Ten to thirty times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import numpy as np

from split.codec import laplace
from split.codec.transform import Level, Order, Shape, blocks_of, dct
from split.errors import CodecError
from split.tensor import Array

LOWEST: Final = 1 << 16
"""The state lies in 2^16 … 2^32 − 1; words have 16 bits."""
SPLIT_BITS: Final = 12
"""An escape's bits travel in two parts: these low ones, and what is above."""
LENGTH_MAX: Final = 20
CHUNK: Final = 1 << 16
"""Coefficients that lie in lists at once: there each takes up to twenty times the bytes that it has in an array."""
_BITS: Final = laplace.FREQUENCY_BITS
_MASK: Final = laplace.TOTAL - 1
_ROOM_BITS: Final = 32 - _BITS


class Fallback:
    """`Core` without anything compiled."""

    name = "plain Python"
    working = 16

    def forward(self, shape: Shape, level: Level, found: Array) -> tuple[Array, bool, bool]:
        """As `Core.forward`."""
        with np.errstate(invalid="ignore", over="ignore"):
            centred = found.reshape(shape.batch, shape.height, shape.width, shape.components) - level.offset
            blocks = _dct_forward(blocks_of(shape, centred), shape)
            scaled = np.abs(blocks) * np.float32(level.inverse_step) + level.rounding[:, None]
            limit = np.float32(laplace.LARGEST + 1)
            scaled = np.where(scaled < limit, scaled, limit)
        magnitudes = scaled.astype(np.int32) & level.kept[:, None]
        unfit = bool(magnitudes.size) and int(magnitudes.max()) > laplace.LARGEST
        spilled = bool((magnitudes & level.spilled[:, None]).any())
        return np.where(blocks < 0, -magnitudes, magnitudes), spilled, unfit

    def inverse(self, shape: Shape, level: Level, quantised: Array) -> Array:
        """As `Core.inverse`."""
        magnitudes = (np.abs(quantised).astype(np.float32) + level.bias[:, None]) * np.float32(level.step)
        values = np.where(quantised == 0, np.float32(0), np.where(quantised < 0, -magnitudes, magnitudes))
        tiles = values.reshape(shape.rows, shape.columns, shape.blocks, shape.components)
        if shape.columns > 1:
            tiles = np.moveaxis(_inverse(np.moveaxis(tiles, 1, 0), dct(shape.columns)), 0, 1)
        if shape.rows > 1:
            tiles = _inverse(tiles, dct(shape.rows))
        return _map(shape, tiles)

    def pack(self, order: Order, quantised: Array) -> bytes:
        """As `Core.pack`."""
        wanted = np.broadcast_to(order.coded[:, None], quantised.shape)
        values = quantised[wanted]
        if values.size and max(int(values.max()), -int(values.min())) > laplace.LARGEST:
            raise CodecError(f"a quantised coefficient is above {laplace.LARGEST}; this codec does not carry it")
        return _pack(values, np.broadcast_to(order.tables[:, None], quantised.shape)[wanted])

    def unpack(self, order: Order, stream: memoryview, blocks: int) -> Array | None:
        """As `Core.unpack`."""
        shape = (order.coded.shape[0], blocks, order.coded.shape[1])
        wanted = np.broadcast_to(order.coded[:, None], shape)
        found = _unpack(np.broadcast_to(order.tables[:, None], shape)[wanted], stream)
        if found is None:
            return None
        quantised = np.zeros(shape, np.int32)
        quantised[wanted] = found
        return quantised


# --- blocks and their DCT ---------------------------------------------------------------------------------------------


def _map(shape: Shape, tiles: Array) -> Array:
    """Undoes `blocks_of`."""
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
def _parts() -> Array:
    """OBJECT [tables · symbols]: (start, frequency, its complement to 2^14, lowest state that gives off a word first).
    Made once: a list of them for all coefficients costs a pointer each."""
    starts = laplace.tables().starts.astype(np.int64)
    found = np.empty((laplace.TABLES, laplace.SYMBOLS_MAX), object)
    for table, symbol in np.ndindex(found.shape):
        start, frequency = int(starts[table, symbol]), int(starts[table, symbol + 1] - starts[table, symbol])
        found[table, symbol] = (start, frequency, laplace.TOTAL - frequency, frequency << _ROOM_BITS)
    return found.reshape(-1)


@cache
def _zeros() -> Array:
    """OBJECT [tables]: the frequency of 0, which is each table's first symbol."""
    return laplace.tables().starts[:, 1].astype(int).astype(object)


@cache
def _row(k: int) -> tuple[bytes, list[int], list[int], int, int]:
    """Of table k: slot → symbol, the symbols' starts and frequencies, groups, low bits."""
    tables = laplace.tables()
    starts, frequencies = tables.starts[k], np.diff(tables.starts[k])
    symbols = np.repeat(np.arange(laplace.SYMBOLS_MAX, dtype=np.uint8), frequencies).tobytes()
    return symbols, starts.tolist(), frequencies.tolist(), int(tables.groups[k]), int(tables.low_bits[k])


def _symbols(values: Array, table: Array) -> tuple[list[tuple[int, int, int, int]], Iterator[tuple[int, int]]]:
    """What is packed of these coefficients, the last one first: of each its symbol's `_parts`, and for each that is not
    0 the bits that follow the symbol and how many they are; (rest, 0) for an escape, rest its magnitude past the groups
    with the sign below it."""
    tables = laplace.tables()
    symbols = np.zeros(len(values), np.int64)
    (places,) = np.nonzero(values)
    signed, its = values[places], table[places]
    rest = np.abs(signed).astype(np.int64) - 1
    low_bits = tables.low_bits[its].astype(np.int64)
    groups = tables.groups[its].astype(np.int64)
    group = rest >> low_bits
    escape = group >= groups
    symbols[places] = np.where(escape, groups, group) + 1
    bits = np.where(escape, rest - (groups << low_bits), rest & ((1 << low_bits) - 1)) << 1 | (signed < 0)
    count = np.where(escape, 0, low_bits + 1)
    parts: list[tuple[int, int, int, int]] = _parts()[(table * np.int64(laplace.SYMBOLS_MAX) + symbols)[::-1]].tolist()
    return parts, zip(bits[::-1].tolist(), count[::-1].tolist(), strict=True)


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
    for at in reversed(range(0, len(values), CHUNK)):
        state = _pack_some(values[at : at + CHUNK], table[at : at + CHUNK], words, state)
    words += (state >> 16, state & 0xFFFF)
    return np.array(words[::-1], "<u2").tobytes()


def _pack_some(values: Array, table: Array, words: list[int], state: int) -> int:
    """The state after them; its words are added to `words`."""
    parts, extras = _symbols(values, table)
    for start, frequency, complement, full in parts:
        if start:  # 0 alone starts at 0
            bits, count = next(extras)
            for value, length in ((bits, count),) if count else _escape_parts(bits):
                if state >> (32 - length):
                    words.append(state & 0xFFFF)
                    state >>= 16
                state = state << length | value
        if state >= full:
            words.append(state & 0xFFFF)
            state >>= 16
        state += state // frequency * complement + start  # = (state // frequency << 14) + state % frequency + start
    return state


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
            part = slice(start, start + CHUNK)
            found = _unpack_some(table[part], words, state, at, values[part])
            if found is None:
                return None
            state, at = found
    except IndexError:  # the words ended too early
        return None
    return values if state == LOWEST and at == len(words) else None


def _unpack_some(table: Array, words: list[int], state: int, at: int, values: Array) -> tuple[int, int] | None:
    """Fills `values` with the coefficients of these tables; the state and the place after them, None where that is
    damaged."""
    tables = table.tobytes()
    places: list[int] = []
    found: list[int] = []
    for i, zero in enumerate(_zeros()[table].tolist()):
        slot = state & _MASK
        if slot < zero:  # the way of nine in ten
            state = (state >> _BITS) * zero + slot
            if state < LOWEST:
                state = state << 16 | words[at]
                at += 1
            continue
        symbols, starts, frequencies, groups, low_bits = _row(tables[i])
        symbol = symbols[slot]
        state = (state >> _BITS) * frequencies[symbol] + slot - starts[symbol]
        if state < LOWEST:
            state = state << 16 | words[at]
            at += 1
        if symbol <= groups:
            bits = state & ((2 << low_bits) - 1)
            state >>= low_bits + 1
            if state < LOWEST:
                state = state << 16 | words[at]
                at += 1
            magnitude = ((symbol - 1) << low_bits | bits >> 1) + 1
            negative = bits & 1
        else:
            state, at, beyond, negative = _take_escape(state, words, at)
            magnitude = (groups << low_bits) + beyond
            if magnitude > laplace.LARGEST:
                return None
        places.append(i)
        found.append(-magnitude if negative else magnitude)
    values[places] = found
    return state, at


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
