"""split/codec/payload.py and its codings, held against plain numpy formulas and a table of damaged payloads."""

from __future__ import annotations

import math
import struct
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from split.codec.payload import CODECS, decode, decoded_bytes, encode, payload_bytes
from split.errors import CodecError
from split.tensor import NUMPY_DTYPES, TensorSpec

ENOUGH = 1 << 28
FIXED_SIZE = [dtype for name, dtype in NUMPY_DTYPES.items() if name != "BYTES"]
INTEGERS = [dtype for dtype in FIXED_SIZE if dtype.kind != "f"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6)


def payload_of(tensors: dict[str, Any], codec: str) -> bytes:
    return b"".join(encode(tensors, codec, level=0))


def through(array: np.ndarray[Any, Any], codec: str) -> np.ndarray[Any, Any]:
    return decode(payload_of({"x": array}, codec), max_bytes=ENOUGH)["x"]


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("codec", ["raw", "encoded"])
@given(data=st.data())
@settings(max_examples=60)
def test_raw_returns_every_bit_of_every_element_type_nan_infinity_and_denormals_included(codec: str, data: Any) -> None:
    dtype = data.draw(st.sampled_from(FIXED_SIZE))
    array = data.draw(hnp.arrays(dtype, SHAPES))
    assert same_bits(through(array, codec), array)


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@settings(max_examples=40)
def test_integers_and_booleans_are_lossless_in_every_codec(codec: str, data: Any) -> None:
    array = data.draw(hnp.arrays(data.draw(st.sampled_from(INTEGERS)), SHAPES))
    assert same_bits(through(array, codec), array)


@pytest.mark.parametrize("codec", CODECS)
@given(elements=st.lists(st.binary(max_size=40), min_size=0, max_size=12))
@settings(max_examples=30)
def test_bytes_elements_are_lossless_in_every_codec(codec: str, elements: list[bytes]) -> None:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    found = through(array.reshape(-1, 1), codec)
    assert found.shape == (len(elements), 1)
    assert found.reshape(-1).tolist() == elements


@pytest.mark.parametrize("codec", ["fp16", "int8"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -3.4e38, 3.0e38])
def test_a_tensor_with_a_value_that_would_be_destroyed_stays_lossless(codec: str, dtype: str, bad: float) -> None:
    array = np.linspace(-1, 1, 512, dtype=dtype).reshape(1, 2, 16, 16)
    array[0, 1, 3, 3] = bad
    assert same_bits(through(array, codec), array)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("value", "kept"), [(65504.0, False), (65505.0, True), (-65505.0, True)])
def test_fp16_never_turns_a_large_finite_value_into_infinity(dtype: str, value: float, kept: bool) -> None:
    array = np.full((4, 4), value, dtype)
    array[0, 0] = 0.1  # not exact in half precision: shows whether the tensor was coded
    found = through(array, "fp16")
    assert np.isfinite(found).all()
    assert (found[0, 0] == array[0, 0]) == kept
    assert found[1, 1] == value


@given(hnp.arrays(st.sampled_from(["<f4", "<f8"]), SHAPES, elements={"min_value": -65504, "max_value": 65504}))
@settings(max_examples=80)
def test_fp16_rounds_as_ieee_half_precision_does(array: np.ndarray[Any, Any]) -> None:
    found = through(array, "fp16")
    expected = [struct.unpack("<e", struct.pack("<e", float(value)))[0] for value in array.reshape(-1)]
    assert found.dtype == array.dtype
    assert found.reshape(-1).tolist() == expected


def test_an_fp16_tensor_is_lossless_under_fp16() -> None:
    array = np.array([0.1, -2.5, np.nan, np.inf, 6e-8], "f2")
    assert same_bits(through(array, "fp16"), array)


@given(
    array=hnp.arrays(
        st.sampled_from(["<f2", "<f4", "<f8"]),
        st.tuples(st.integers(1, 2), st.integers(1, 5), st.just(6), st.integers(6, 9)),
        elements={"min_value": -1000, "max_value": 1000},
    )
)
@settings(max_examples=80)
def test_int8_is_within_half_a_step_of_each_channel(array: np.ndarray[Any, Any]) -> None:
    found = through(array, "int8").astype(np.float64)
    plain = array.astype(np.float64)
    precision = 2.0**-10 if array.dtype.itemsize == 2 else 2.0**-22  # the result is rounded to the tensor's own type
    for channel in range(array.shape[1]):
        values = plain[:, channel]
        half_step = (values.max() - values.min()) / 255 / 2
        allowed = half_step * 1.001 + np.abs(values).max() * precision + 1e-30
        assert np.abs(found[:, channel] - values).max() <= allowed


def test_int8_gives_each_channel_its_own_range() -> None:
    array = np.stack([np.linspace(0, 1000, 256), np.linspace(0, 0.001, 256)]).astype("f4").reshape(1, 2, 16, 16)
    found = through(array, "int8")
    assert np.abs(found[0, 1] - array[0, 1]).max() <= 0.001 / 255 / 2 * 1.01


def test_int8_keeps_a_large_offset_apart_from_a_small_range() -> None:
    array = (1e6 + np.arange(256, dtype="f8") / 16).astype("f4").reshape(16, 16)
    assert np.abs(through(array, "int8") - array).max() <= (255 / 16) / 255 / 2 + 0.0625  # + one FP32 step at 1e6


@pytest.mark.parametrize("value", [0.0, -0.1, 1e-40, 7.25])
def test_constant_channels_are_exact_under_int8(value: float) -> None:
    array = np.full((1, 3, 8, 8), value, "f4")
    np.testing.assert_array_equal(through(array, "int8"), array)


def test_denormal_ranges_do_not_overflow_int8() -> None:
    array = np.linspace(-1e-39, 1e-39, 64, dtype="f4").reshape(8, 8)
    assert np.abs(through(array, "int8")).max() <= 1e-38


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2**20, 0)])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "?"])
def test_scalars_and_empty_tensors_survive(codec: str, shape: tuple[int, ...], dtype: str) -> None:
    array = np.ones(shape, dtype)
    assert same_bits(through(array, codec), array)


def test_views_big_endian_and_transposed_arrays_arrive_as_the_values_they_show() -> None:
    base = np.arange(24, dtype=">f4").reshape(4, 6)
    found = through(base.T[1:, ::2], "raw")
    assert found.dtype == np.dtype("<f4")
    assert found.tolist() == base.T[1:, ::2].tolist()


def test_names_and_order_are_kept() -> None:
    tensors = {name: np.zeros(1, "f4") for name in ("z", "a/b:0", "ünïcode", "m")}
    assert list(decode(payload_of(tensors, "int8"), max_bytes=ENOUGH)) == list(tensors)


def test_no_tensors_make_a_payload_too() -> None:
    assert decode(payload_of({}, "raw"), max_bytes=0) == {}


def test_raw_copies_nothing_on_the_way_out_and_gives_views_on_the_way_in() -> None:
    array = np.arange(64, dtype="f4")
    buffers = encode({"x": array}, "raw")
    assert any(isinstance(part, memoryview) and np.shares_memory(np.frombuffer(part, "u1"), array) for part in buffers)
    payload = np.frombuffer(b"".join(buffers), "u1").copy()
    assert np.shares_memory(decode(payload.data, max_bytes=ENOUGH)["x"], payload)


def test_raw_data_start_at_multiples_of_64() -> None:
    payload = payload_of({"a": np.full(3, 7, "u1"), "b": np.full(5, 9, "u1")}, "raw")
    assert payload.index(bytes([7] * 3)) % 64 == 0
    assert payload.index(bytes([9] * 5)) % 64 == 0


@pytest.mark.parametrize("offset", range(8))
def test_a_payload_anywhere_in_memory_gives_aligned_tensors(offset: int) -> None:
    array = np.arange(9, dtype="f8")
    payload = payload_of({"x": array}, "raw")
    buffer = bytearray(offset) + payload
    found = decode(memoryview(buffer)[offset:], max_bytes=ENOUGH)["x"]
    assert found.flags.aligned
    assert found.tolist() == array.tolist()


def test_sparse_activations_are_packed_and_dense_noise_is_not() -> None:
    noise = np.random.default_rng(5).integers(0, 256, 400_000, dtype="u1")
    assert len(payload_of({"x": noise}, "int8")) <= noise.nbytes + 128
    sparse = np.where(noise > 150, noise, 0).astype("f4").reshape(1, 16, 125, 200)
    assert len(payload_of({"x": sparse}, "int8")) < sparse.nbytes / 4 * 0.9
    assert len(payload_of({"x": sparse}, "raw")) >= sparse.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_the_estimate_is_what_dense_unpackable_tensors_take(codec: str) -> None:
    rng = np.random.default_rng(7)
    tensors = {
        "f4": rng.standard_normal((1, 8, 20, 20)).astype("f4"),
        "f8": rng.standard_normal((1, 8, 20, 20)),
        "i": rng.integers(-(2**62), 2**62, (3,)),
        "empty": np.zeros((0, 2), "f4"),
    }
    specs = [
        TensorSpec(name="f4", dtype="FP32", shape=("batch", 8, 20, 20)),
        TensorSpec(name="f8", dtype="FP64", shape=(-1, 8, 20, 20)),
        TensorSpec(name="i", dtype="INT64", shape=("n",)),
        TensorSpec(name="empty", dtype="FP32", shape=("none", 2)),
    ]
    found = len(payload_of(tensors, codec))
    estimate = payload_bytes(specs, codec, {"n": 3, "none": 0})
    if codec in ("raw", "encoded"):
        assert estimate == found
    else:
        assert 0.85 * estimate <= found <= estimate


# --- what is refused --------------------------------------------------------------------------------------------------


def damaged(at: int, fresh: bytes) -> bytes:
    """A small raw payload with some bytes of it replaced."""
    payload = bytearray(payload_of({"x": np.arange(6, dtype="f4").reshape(2, 3)}, "raw"))
    payload[at : at + len(fresh)] = fresh
    return bytes(payload)


# Preamble 16 bytes; entry 24, dims 16, name 1; data at 64.
@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (damaged(60, b"\x01"), "padding"),
        (damaged(0, b"")[:-1], "ends at byte 88, the payload at 87"),
        (damaged(0, b"")[:60], "ends at byte"),
        (damaged(0, b"") + b"\0", "1 bytes follow"),
    ],
)
def test_bytes_that_do_not_end_where_the_header_says_are_refused(payload: bytes, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        decode(payload, max_bytes=ENOUGH)


def test_a_boolean_that_is_neither_true_nor_false_is_refused() -> None:
    payload = bytearray(payload_of({"x": np.ones(3, bool)}, "raw"))
    payload[-1] = 2
    with pytest.raises(CodecError, match="neither 0 nor 1"):
        decode(payload, max_bytes=ENOUGH)


def test_string_lengths_that_do_not_add_up_are_refused() -> None:
    payload = bytearray(payload_of({"x": np.array([b"abc", b"de"], dtype=object)}, "raw"))
    for length, complaint in (
        (200, "element 0 ends at"),
        (4, "element 1 ends at|within the length"),
        (9, "length of element 1"),
    ):
        payload[64:68] = struct.pack("<I", length)
        with pytest.raises(CodecError, match=complaint):
            decode(payload, max_bytes=ENOUGH)


def bomb(stated: int, frame: bytes) -> bytes:
    """A UINT8 tensor of `stated` elements, packed as `frame`."""
    header = struct.pack("<4sBBHII", b"ISTP", 1, 0, 1, 16 + 24 + 8 + 1, 0)
    entry = struct.pack("<HBBBBBBQQQ", 1, 2, 1, 0, 1, 0, 0, len(frame), stated, stated) + b"x"
    return (header + entry).ljust(64, b"\0") + frame


def test_a_zstd_bomb_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    assert len(frame) < 10_000
    with pytest.raises(CodecError, match="at most 1000000 are allowed"):
        decode(bomb(1 << 26, frame), max_bytes=1_000_000)
    with pytest.raises(CodecError, match="states 67108864 bytes, its header 500000"):
        decode(bomb(500_000, frame), max_bytes=1_000_000)


def test_a_zstd_frame_that_hides_its_size_lies_or_has_a_tail_is_refused() -> None:
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(5000))
    with pytest.raises(CodecError, match="zstd frame states"):
        decode(bomb(5000, silent), max_bytes=ENOUGH)
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(5000))
    assert decode(bomb(5000, honest), max_bytes=ENOUGH)["x"].tolist() == [0] * 5000
    for frame in (honest + b"x", honest[:-1], honest[:4] + b"\xff" * 9, b"not zstd at all"):
        with pytest.raises(CodecError, match="zstd frame"):
            decode(bomb(5000, frame), max_bytes=ENOUGH)


def test_the_memory_bound_counts_all_tensors_and_what_strings_cost() -> None:
    payload = payload_of({"a": np.zeros(100, "f4"), "b": np.zeros(100, "f4")}, "fp16")
    decode(payload, max_bytes=800)
    with pytest.raises(CodecError, match="take 800 bytes decoded, at most 799"):
        decode(payload, max_bytes=799)
    strings = np.empty(1000, dtype=object)
    strings[:] = [b""] * 1000
    with pytest.raises(CodecError, match="decoded"):
        decode(payload_of({"x": strings}, "raw"), max_bytes=4000)


@given(st.binary(max_size=300), st.integers(0, 160), st.sampled_from(CODECS))
@settings(max_examples=200)
def test_random_damage_gives_tensors_or_a_typed_error_and_nothing_else(junk: bytes, at: int, codec: str) -> None:
    tensors = {
        "x": np.arange(40, dtype="f4").reshape(1, 2, 20),
        "m": np.array([True, False]),
        "s": np.array([b"ab", b""], dtype=object),
    }
    payload = bytearray(payload_of(tensors, codec))
    payload[at : at + len(junk)] = junk
    try:
        decode(payload, max_bytes=1 << 20)
    except CodecError:
        pass


@pytest.mark.parametrize(
    ("tensors", "codec", "complaint"),
    [
        ({"x": np.zeros(1)}, "gzip", "codec 'gzip' is not known"),
        ({"x": np.zeros(1, "c8")}, "raw", "complex64"),
        ({"x": np.array([3], dtype=object)}, "raw", "bytes or str, got int"),
        ({"": np.zeros(1)}, "raw", "name must have"),
        ({"x": np.zeros((1,) * 17)}, "raw", "rank 17"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(tensors: dict[str, Any], codec: str, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        encode(tensors, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_the_header_tells_what_a_payload_takes_decoded(codec: str) -> None:
    tensors = {"zeros": np.zeros((500, 300), np.float32), "flags": np.ones(7, np.bool_)}
    assert decoded_bytes(payload_of(tensors, codec)) == 600_007
    with pytest.raises(CodecError):
        decoded_bytes(b"no payload at all")


def test_whoever_knows_how_many_tensors_come_reads_no_more_of_them() -> None:
    payload = payload_of({f"t{number}": np.zeros(1, np.uint8) for number in range(5)}, "raw")
    assert decoded_bytes(payload, tensors_max=5) == 5
    with pytest.raises(CodecError, match="claims 5 tensors; at most 4"):
        decoded_bytes(payload, tensors_max=4)
