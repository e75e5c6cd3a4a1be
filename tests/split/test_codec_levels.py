"""split/codec/levels.py: bytes as numpy counts them, and what is left when they are too many."""

from __future__ import annotations

import dataclasses

import numpy as np

from split.codec import klt
from split.codec.levels import LevelsKept, OfOneCut
from split.codec.transform import Level, level_of
from split.tensor import TensorSpec
from tests.split.klt_world import boundary_of, klt_of, one_map


def level(number: int) -> Level:
    return level_of(klt_of("NCHW", 8, (4, 4)), number)


def test_a_level_counts_each_of_its_arrays_once() -> None:
    made = level(100)
    arrays = [getattr(made, field.name) for field in dataclasses.fields(made)]
    arrays += [getattr(order, field.name) for order in (made.usual, made.full) for field in dataclasses.fields(order)]
    assert made.nbytes == sum({id(one): one.nbytes for one in arrays if isinstance(one, np.ndarray)}.values())


def test_those_used_last_stay_whoever_has_them() -> None:
    made = level(100)
    kept, one, other = LevelsKept(3 * made.nbytes), OfOneCut(), OfOneCut()
    for cut, number in ((one, 1), (other, 1), (other, 2)):
        kept.use(cut, number, (made, None))
    kept.use(one, 1, (made, None))  # used again: not the oldest any more
    kept.use(one, 3, (made,))
    assert (sorted(one.made), sorted(other.made)) == ([1, 3], [2])
    assert kept.bytes == 3 * made.nbytes


def test_one_that_is_larger_than_all_the_room_is_kept_while_it_is_the_last() -> None:
    kept, cut, made = LevelsKept(10), OfOneCut(), level(100)
    kept.use(cut, 1, (made,))
    assert list(cut.made) == [1]
    kept.use(cut, 2, (made,))
    assert (list(cut.made), kept.bytes) == ([2], made.nbytes)


def test_those_of_a_cut_that_is_gone_make_room_in_their_turn() -> None:
    kept, made = LevelsKept(2 * level(100).nbytes), level(100)
    for number in range(5):
        kept.use(OfOneCut(), number, (made,))
    cut = OfOneCut()
    for number in (1, 2):
        kept.use(cut, number, (made,))
    assert (sorted(cut.made), kept.bytes) == ([1, 2], 2 * made.nbytes)


def test_payloads_of_few_bytes_do_not_fill_the_memory_whatever_levels_and_cuts_they_name(monkeypatch) -> None:
    spec = TensorSpec(name="x", dtype="FP32", shape=(1, 64, "h", "w"))
    tables = klt_of("NCHW", 64, (16, 16))
    cuts = [boundary_of(x=(spec, tables)) for _ in range(4)]
    one = cuts[0].at(100)[0]
    assert one is not None
    small = LevelsKept(3 * one.nbytes)
    monkeypatch.setattr(klt, "levels_kept", small)
    payload = b"".join(map(bytes, klt.encode_klt({"x": np.zeros((1, 64, 1, 1), np.float32)}, cuts[0], 100)))
    assert len(payload) < 64
    for number in range(100, 110):
        for cut in cuts:
            klt.decode_klt(payload[:5] + bytes([number]) + payload[6:], cut, max_bytes=1 << 24)
    left = [made for cut in cuts for of_tensors in cut._levels.made.values() for made in of_tensors]
    assert 1 <= len(left) <= 3
    assert small.bytes == sum(made.nbytes for made in left if made is not None) <= 3 * one.nbytes


def test_a_level_is_worked_out_again_after_it_was_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(klt, "levels_kept", LevelsKept(1))
    tables, _ = one_map("NCHW", (1, 8, 4, 4), (4, 4))
    first = tables.at(100)
    tables.at(101)
    again = tables.at(100)
    assert again is not first
    assert again[0] is not None
    assert first[0] is not None
    np.testing.assert_array_equal(again[0].rounding, first[0].rounding)
