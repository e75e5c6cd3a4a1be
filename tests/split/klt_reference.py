"""A decoder of codec klt from PAYLOAD.md alone: plain Python integers, nothing of the package. Slow, easy to check."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isqrt

ONE = 1 << 64
DEAD_ZONES = [82, 71, 63, 56, 51, 47, 44, 42, 40, 39, 37, 37, 36, 35, 35, 34, 34, 34] + [33] * 6 + [32] * 40


class Damaged(Exception):
    """Not a stream."""


def power(j: int) -> int:
    return isqrt(isqrt(isqrt(isqrt(1 << (16 * 64 + j)))))


def exp(z: int) -> int:
    term = total = ONE
    n = 1
    while (term := term * z // (n * ONE)) > 0:
        total += term
        n += 1
    return ONE * ONE // total


@cache
def table(k: int) -> tuple[list[int], int]:
    """Frequencies, s."""
    s = 0
    while power(4 * k - 45) > 5 * ONE * 2**s:
        s += 1
    tails = [ONE, exp(power(45 - 4 * k) * DEAD_ZONES[k] // 64)]
    while len(tails) < 3 or (len(tails) < 32 and tails[-1] * 2**14 >= 2 * ONE):
        tails.append(tails[-1] * exp(power(45 - 4 * k) * 2**s) // ONE)
    tails.append(0)
    frequencies = [max(1, (2 * (tails[i] - tails[i + 1]) * 2**14 + ONE) // (2 * ONE)) for i in range(len(tails) - 1)]
    largest = frequencies.index(max(frequencies))
    frequencies[largest] += 2**14 - sum(frequencies)
    return frequencies, s


def table_of(scale: int, level: int, *, full: bool) -> int | None:
    """Which table a coefficient of this scale has, None where it is not in the stream."""
    k = (scale - level + 23) // 2
    if scale == 0 or (k < 0 and not full):
        return None
    return min(max(k, 0), 63)


class Stream:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        low = self.word()
        self.x = low + 65536 * self.word()
        if self.x < 65536:
            raise Damaged

    def word(self) -> int:
        if self.at + 2 > len(self.data):
            raise Damaged
        self.at += 2
        return self.data[self.at - 2] + 256 * self.data[self.at - 1]

    def refill(self) -> None:
        if self.x < 65536:
            self.x = 65536 * self.x + self.word()

    def bits(self, n: int) -> int:
        value = self.x % 2**n
        self.x //= 2**n
        self.refill()
        return value

    def coefficient(self, k: int) -> int:
        frequencies, s = table(k)
        r = self.x % 2**14
        symbol = before = 0
        while before + frequencies[symbol] <= r:
            before += frequencies[symbol]
            symbol += 1
        self.x = frequencies[symbol] * (self.x // 2**14) + r - before
        self.refill()
        if symbol == 0:
            return 0
        if symbol < len(frequencies) - 1:
            bits = self.bits(s + 1)
            magnitude, negative = (symbol - 1) * 2**s + bits // 2 + 1, bits % 2
        else:
            b = self.bits(5)
            if b > 20:
                raise Damaged
            high = self.bits(b - min(b, 12))
            magnitude = (len(frequencies) - 2) * 2**s + 2**b + high * 2 ** min(b, 12) + self.bits(min(b, 12))
            negative = self.bits(1)
        if magnitude > 2**20:
            raise Damaged
        return -magnitude if negative else magnitude

    def end(self) -> None:
        if self.x != 65536 or self.at != len(self.data):
            raise Damaged


def coefficients(
    data: bytes, scales: Sequence[Sequence[int]], blocks: int, level: int, *, full: bool
) -> list[list[list[int]]]:
    """[position][block][component] of a stream; `scales` [component][position]. Damaged for what is none."""
    stream = Stream(data)
    found = []
    for position in range(len(scales[0])):
        of_position = []
        for _ in range(blocks):
            tables = [table_of(scale[position], level, full=full) for scale in scales]
            of_position.append([0 if k is None else stream.coefficient(k) for k in tables])
        found.append(of_position)
    stream.end()
    return found


def number(data: bytes, at: int) -> tuple[int, int]:
    """A LEB128 number and where it ends."""
    value = shift = 0
    while True:
        value += (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at
