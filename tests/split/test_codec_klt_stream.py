"""The entropy coder of codec klt: the compiled core, the fallback and a decoder written from PAYLOAD.md agree."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split.codec import laplace
from split.codec.core import Native
from split.codec.fallback import CHUNK, Fallback
from split.codec.klt import code_bits
from split.codec.transform import Core, Order, level_of, order_of
from split.errors import CodecError
from tests.split import klt_reference
from tests.split.klt_vectors import FILE, klt_with

VECTORS: list[dict[str, Any]] = json.loads(FILE.read_text())
PLAIN = Fallback()


def order_in(vector: dict[str, Any]) -> Order:
    level = level_of(klt_with(np.array(vector["scales"], np.uint8)), vector["level"])
    return level.full if vector["full"] else level.usual


def by_the_page(vector: dict[str, Any], stream: bytes, blocks: int) -> list[Any]:
    scales = np.array(vector["scales"]).reshape(len(vector["scales"]), -1).tolist()
    return klt_reference.coefficients(stream, scales, blocks, vector["level"], full=vector["full"])


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_committed_streams_are_made_and_read_bit_for_bit(vector: dict[str, Any], either_core: Core) -> None:
    coefficients = np.array(vector["coefficients"], np.int32)
    stream = bytes.fromhex(vector["stream"])
    assert either_core.pack(order_in(vector), coefficients) == stream
    found = either_core.unpack(order_in(vector), memoryview(stream), coefficients.shape[1])
    assert found is not None
    assert found.dtype == np.int32
    assert np.array_equal(found, coefficients)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_committed_streams_are_read_by_a_decoder_that_knows_the_page_alone(vector: dict[str, Any]) -> None:
    found = by_the_page(vector, bytes.fromhex(vector["stream"]), len(vector["coefficients"][0]))
    assert found == vector["coefficients"]


@st.composite
def streams(draw: st.DrawFn) -> tuple[Order, np.ndarray[Any, Any]]:
    """Any tables, any whole numbers up to 2^20, most of them small; 0 where nothing is coded."""
    positions, blocks, components = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 9))
    coded = draw(hnp.arrays(np.bool_, (positions, components)))
    table = draw(hnp.arrays(np.uint8, (positions, components), elements=st.integers(0, 63)))
    largest = draw(st.sampled_from([1, 3, 40, laplace.LARGEST]))
    values = draw(hnp.arrays(np.int32, (positions, blocks, components), elements=st.integers(-largest, largest)))
    return order_of(coded, table), np.where(coded[:, None], values, 0).astype(np.int32)


@given(case=streams())
@settings(max_examples=150)
def test_whole_numbers_come_back_exactly_and_both_cores_make_the_same_stream(
    native: Native, case: tuple[Order, np.ndarray[Any, Any]]
) -> None:
    order, values = case
    stream = PLAIN.pack(order, values)
    assert native.pack(order, values) == stream
    for core in (native, PLAIN):
        found = core.unpack(order, memoryview(stream), values.shape[1])
        assert found is not None
        assert np.array_equal(found, values)


@given(case=streams(), data=st.data())
@settings(max_examples=200)
def test_a_damaged_stream_is_refused_or_read_the_same_by_both_cores(
    native: Native, case: tuple[Order, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    order, values = case
    stream = bytearray(PLAIN.pack(order, values))
    for _ in range(data.draw(st.integers(0, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    hurt = bytes(stream[: data.draw(st.integers(0, len(stream)))]) + data.draw(st.binary(max_size=6))
    by_native, by_plain = (core.unpack(order, memoryview(hurt), values.shape[1]) for core in (native, PLAIN))
    assert (by_native is None) == (by_plain is None)
    if by_native is not None and by_plain is not None:
        assert np.array_equal(by_native, by_plain)
        assert np.abs(by_native).max() <= laplace.LARGEST


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_every_truncation_and_every_longer_stream_is_refused(vector: dict[str, Any], either_core: Core) -> None:
    order, blocks = order_in(vector), len(vector["coefficients"][0])
    stream = bytes.fromhex(vector["stream"])
    ends = {*range(0, len(stream), max(1, len(stream) // 40)), len(stream) - 1, len(stream) - 2}
    for end in sorted(ends):
        assert either_core.unpack(order, memoryview(stream[:end]), blocks) is None
    for more in (b"\0", b"\0\0", b"\xff" * 4):
        assert either_core.unpack(order, memoryview(stream + more), blocks) is None


@given(data=st.binary(max_size=400))
@settings(max_examples=100)
def test_random_bytes_are_refused_as_the_page_says_or_read_as_it_says(native: Native, data: bytes) -> None:
    vector = VECTORS[3]  # every table
    blocks = len(vector["coefficients"][0])
    found = [core.unpack(order_in(vector), memoryview(data), blocks) for core in (native, PLAIN)]
    try:
        expected = by_the_page(vector, data, blocks)
    except klt_reference.Damaged:
        assert found == [None, None]
    else:
        assert all(one is not None and one.tolist() == expected for one in found)


@pytest.mark.parametrize("value", [laplace.LARGEST + 1, -laplace.LARGEST - 1, 2**31 - 1, -(2**31)])
def test_a_magnitude_above_2_to_the_20_is_refused_by_name(value: int, either_core: Core) -> None:
    order = order_of(np.ones((1, 1), np.bool_), np.full((1, 1), 9, np.uint8))
    with pytest.raises(CodecError, match="1048576"):
        either_core.pack(order, np.full((1, 1, 1), value, np.int32))


@pytest.mark.parametrize(("top", "fall"), [(12, 10), (16, 12), (24, 14), (40, 20)])
def test_a_stream_is_within_15_thousandths_of_what_an_ideal_coder_needs(top: int, fall: int, native: Native) -> None:
    """15,680 coefficients as of a map of 14 × 14 × 80, ½ KB to 11, flush included. Ideal: Σ −log2 p by hand."""
    components, positions, blocks = 80, 49, 4
    k = np.rint(top - fall * np.arange(components) / components - 0.3 * np.arange(positions)[:, None]).astype(int)
    order = order_of(k >= 0, np.clip(k, 0, 63).astype(np.uint8))
    scales = 2.0 ** ((4 * k - 45) / 16)
    values = np.rint(np.random.default_rng(7).laplace(size=(blocks, positions, components)) * scales * 0.95)
    quantised = np.ascontiguousarray(np.where(order.coded, values, 0).transpose(1, 0, 2), np.int32)
    ideal = 0.0
    for position in range(positions):
        for component in np.nonzero(order.coded[position])[0]:
            frequencies, s = klt_reference.table(int(order.tables[position, component]))
            for value in np.abs(quantised[position, :, component]).tolist():
                symbol = 0 if value == 0 else min(((value - 1) >> s) + 1, len(frequencies) - 1)
                ideal += 14 - np.log2(frequencies[symbol])
                if symbol == len(frequencies) - 1:
                    ideal += 6 + np.floor(np.log2(value - ((symbol - 1) << s)))
                elif symbol:
                    ideal += 1 + s
    assert code_bits(order, quantised) == pytest.approx(ideal)
    assert 8 * len(native.pack(order, quantised)) <= 1.015 * ideal


def test_a_long_stream_is_worked_on_in_pieces_and_stays_one(native: Native) -> None:
    order = order_of(np.ones((3, 50), np.bool_), np.full((3, 50), 6, np.uint8))
    values = np.rint(np.random.default_rng(2).laplace(size=(3, 1000, 50)) / 3).astype(np.int32)
    assert values.size > 2 * CHUNK
    stream = PLAIN.pack(order, values)
    assert native.pack(order, values) == stream
    found = PLAIN.unpack(order, memoryview(stream), 1000)
    assert found is not None
    assert np.array_equal(found, values)
