"""split/codec/klt.py: what comes back for what went in, what stays lossless, framing, and what is refused."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split.codec import klt as module
from split.codec.calibration import CutTables
from split.codec.klt import (
    BoundaryTables,
    Kind,
    calibration_key,
    decode_klt,
    encode_klt,
    ideal_bytes,
    klt_key,
)
from split.codec.payload import decode, decoded_bytes
from split.codec.transform import Core
from split.errors import CodecError
from split.tensor import NUMPY_DTYPES, TensorSpec
from tests.split import klt_reference
from tests.split.klt_vectors import PAYLOAD_FILE, klt_with
from tests.split.klt_world import DIGEST, boundary_of, klt_of, one_map, tensor_of

ENOUGH: Final = 1 << 28
MAP: Final = ("NCHW", (1, 16, 14, 14), (7, 7))
HEADER: Final = 4 + 1 + 1 + 8
Tensor = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _this_core(either_core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "core", lambda: either_core)


def payload_of(tensors: dict[str, Tensor], tables: BoundaryTables, level: int = 128) -> bytes:
    return b"".join(encode_klt(tensors, tables, level))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("layout", "dims", "block"),
    [
        ("NCHW", (1, 24, 14, 14), (7, 7)),
        ("NHWC", (2, 9, 5, 17), (8, 8)),
        ("NTC", (1, 27, 48), (1, 1)),
        ("NCT", (2, 12, 30), (1, 8)),
        ("NC", (3, 96), (1, 1)),
    ],
)
def test_a_finer_step_brings_every_layout_nearer_to_what_went_in(
    layout: str, dims: tuple[int, ...], block: tuple[int, int]
) -> None:
    tables, x = one_map(layout, dims, block)
    errors, sizes = [], []
    for level in (144, 128, 112, 96):
        payload = payload_of({"x": x}, tables, level)
        found = decode(payload, max_bytes=ENOUGH, tables=tables)["x"]
        assert found.shape == x.shape
        errors.append(float(np.sqrt(np.mean((found - x) ** 2))))
        sizes.append(len(payload))
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes)
    assert errors[-1] < 2 ** ((96 - 128) / 8)  # an orthogonal transform: the mean error is below the step


@pytest.mark.parametrize("dtype", ["FP16", "FP64"])
def test_other_floats_come_back_as_what_they_were(dtype: str) -> None:
    klt = klt_of("NC", 32, (1, 1))
    tables = boundary_of(x=(TensorSpec(name="x", dtype=dtype, shape=(3, 32)), klt))
    x = tensor_of(klt, (3, 32)).astype(NUMPY_DTYPES[dtype])
    found = decode_klt(payload_of({"x": x}, tables, 90), tables, max_bytes=ENOUGH)["x"]
    assert found.dtype == x.dtype
    assert np.abs(found.astype(float) - x.astype(float)).max() < 0.2


def test_an_fp16_tensor_near_its_limit_comes_back_finite() -> None:
    klt = klt_of("NC", 32, (1, 1))
    tables = boundary_of(x=(TensorSpec(name="x", dtype="FP16", shape=(1, 32)), klt))
    x = np.where(np.arange(32) % 2, -65504, 65504).astype("f2").reshape(1, 32)
    assert np.isfinite(decode_klt(payload_of({"x": x}, tables, 140), tables, max_bytes=ENOUGH)["x"]).all()


def test_open_dims_and_batches_of_any_size_travel() -> None:
    klt = klt_of("NCHW", 6, (8, 8))
    tables = boundary_of(x=(TensorSpec(name="x", dtype="FP32", shape=("n", 6, -1, "w")), klt))
    for dims in ((1, 6, 1, 1), (3, 6, 17, 8), (2, 6, 300, 2)):
        x = tensor_of(klt, dims)
        found = decode_klt(payload_of({"x": x}, tables, 100), tables, max_bytes=ENOUGH)["x"]
        assert found.shape == dims
        assert np.sqrt(np.mean((found - x) ** 2)) < 2 ** ((100 - 128) / 8)


# --- lossless inside --------------------------------------------------------------------------------------------------


def made(dtype: str, dims: tuple[int, ...]) -> Tensor:
    rng = np.random.default_rng(5)
    if dtype == "BYTES":
        array = np.empty(math.prod(dims), object)
        array[:] = [b"", "é".encode(), b"\0\xff" * 30][: array.size] + [b"x"] * max(0, array.size - 3)
        return array.reshape(dims)
    if dtype == "BOOL":
        return rng.integers(0, 2, dims).astype(bool)
    if NUMPY_DTYPES[dtype].kind == "f":
        return rng.normal(size=dims).astype(NUMPY_DTYPES[dtype])
    return rng.integers(0, 100, dims).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize("dims", [(), (0,), (2, 0, 3), (1,), (4, 50)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_a_tensor_without_a_transform_is_lossless_beside_one_that_has_one(dtype: str, dims: tuple[int, ...]) -> None:
    klt = klt_of("NC", 40, (1, 1))
    tables = boundary_of(
        a=(TensorSpec(name="a", dtype="FP32", shape=(2, 40)), klt), b=TensorSpec(name="b", dtype=dtype, shape=dims)
    )
    tensors = {"a": tensor_of(klt, (2, 40)), "b": made(dtype, dims)}
    found = decode_klt(payload_of(tensors, tables), tables, max_bytes=ENOUGH)
    assert list(found) == ["a", "b"]
    if dtype == "BYTES":
        assert found["b"].shape == dims
        assert found["b"].reshape(-1).tolist() == tensors["b"].reshape(-1).tolist()
    else:
        assert same(found["b"], tensors["b"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -3.4e38, 3e38])
def test_a_tensor_with_a_value_that_no_coefficient_carries_travels_bit_for_bit(bad: float) -> None:
    tables, x = one_map(*MAP)
    x[0, 3, 5, 5] = bad
    assert same(decode_klt(payload_of({"x": x}, tables), tables, max_bytes=ENOUGH)["x"], x)


def test_a_tensor_of_denormals_does_not_disturb_the_codec() -> None:
    tables, x = one_map(*MAP)
    x[:] = 1e-42
    found = decode_klt(payload_of({"x": x}, tables), tables, max_bytes=ENOUGH)["x"]
    assert np.abs(found - x).max() < 1.3 * 8  # all below a step in each of 16 components and 49 positions at most


def test_a_tensor_that_is_empty_today_travels() -> None:
    klt = klt_of("NTC", 6, (1, 1))
    tables = boundary_of(x=(TensorSpec(name="x", dtype="FP32", shape=(1, "tokens", 6)), klt))
    x = np.empty((1, 0, 6), np.float32)
    assert same(decode_klt(payload_of({"x": x}, tables), tables, max_bytes=ENOUGH)["x"], x)


def test_values_far_out_of_the_tables_never_cost_more_than_the_tensor_itself() -> None:
    tables, x = one_map(*MAP)
    rng = np.random.default_rng(0)
    x[:] = rng.normal(size=x.shape) * 3e5
    header, *body = encode_klt({"x": x}, tables, 100)
    assert sum(memoryview(part).nbytes for part in body) <= x.nbytes
    assert header[HEADER + 2] in (Kind.PLAIN, Kind.ZSTD)


# --- framing ----------------------------------------------------------------------------------------------------------


def test_framing_of_one_tensor_of_known_shape_takes_at_most_32_bytes() -> None:
    tables, x = one_map("NCHW", (1, 80, 14, 14), (7, 7))
    header, *_ = encode_klt({"x": x}, tables, 128)
    assert len(header) <= 32


def test_the_payload_is_what_the_page_says_byte_for_byte() -> None:
    """Read by hand: header, entries, and the stream by the decoder that knows the page alone."""
    klt = klt_of("NHWC", 5, (2, 2), seed=3)
    tables = boundary_of(
        x=(TensorSpec(name="x", dtype="FP32", shape=("n", 6, 4, 5)), klt),
        mask=TensorSpec(name="mask", dtype="INT64", shape=(300,)),
    )
    tensors = {"x": tensor_of(klt, (2, 6, 4, 5)), "mask": np.arange(300) // 150}
    payload = payload_of(tensors, tables, 120)
    assert payload[:6] == b"ISTK" + bytes([1, 120])
    assert payload[6:14] == bytes.fromhex(DIGEST[:16])
    memory, at = klt_reference.number(payload, 14)
    assert memory == 4 * 2 * 6 * 4 * 5 + 8 * 300
    kind = payload[at]
    assert kind in (2, 3)
    n, at = klt_reference.number(payload, at + 1)
    stored, at = klt_reference.number(payload, at)
    assert n == 2
    assert payload[at] == 1
    packed, at = klt_reference.number(payload, at + 1)
    assert at + stored + packed == len(payload)
    scales = klt.scales.reshape(5, 4).tolist()
    found = klt_reference.coefficients(payload[at : at + stored], scales, 2 * 3 * 2, 120, full=kind == 3)
    level = tables.at(120)[0]
    assert level is not None
    read = module.core().unpack(
        level.full if kind == 3 else level.usual, memoryview(payload)[at : at + stored], blocks=12
    )
    assert read is not None
    assert read.tolist() == found


GOLDEN: Final = json.loads(PAYLOAD_FILE.read_text())


def test_the_committed_payload_is_read_as_it_always_was() -> None:
    """Coefficients exactly (test_codec_klt_stream.py); values to the last bits of FP32."""
    mean = np.array(GOLDEN["mean"], np.float32)
    klt = replace(klt_with(np.array(GOLDEN["scales"], np.uint8)), layout="NHWC", mean=mean)
    tables = boundary_of(
        x=(TensorSpec(name="x", dtype="FP32", shape=("n", 3, 4, 3)), klt),
        mask=TensorSpec(name="mask", dtype="BOOL", shape=(2, 3)),
    )
    payload = bytes.fromhex(GOLDEN["payload"])
    found = decode_klt(payload, tables, max_bytes=ENOUGH)
    assert found["mask"].tolist() == GOLDEN["mask"]
    assert found["x"] == pytest.approx(np.array(GOLDEN["x"]), abs=1e-5)


CUTS: Final[list[Callable[[bytes], bytes | bytearray | memoryview]]] = [
    bytearray,
    memoryview,
    lambda payload: memoryview(b"\0" + payload)[1:],
    lambda payload: memoryview(bytearray(b"\0\0\0" + payload + b"\0"))[3:-1],
]


@pytest.mark.parametrize("held", CUTS)
def test_a_payload_is_read_alike_wherever_and_however_it_lies_in_memory(held: Any) -> None:
    klt = klt_of("NCHW", 16, (7, 7))
    tables = boundary_of(
        x=(TensorSpec(name="x", dtype="FP32", shape=MAP[1]), klt), mask=TensorSpec(name="m", dtype="FP64", shape=(3,))
    )
    tensors = {"x": tensor_of(klt, MAP[1]), "m": np.array([1.5, math.nan, -0.0])}
    payload = payload_of(tensors, tables)
    expected = decode_klt(payload, tables, max_bytes=ENOUGH)
    found = decode_klt(held(payload), tables, max_bytes=ENOUGH)
    assert all(same(found[name], expected[name]) for name in expected)


def test_a_tensor_that_does_not_lie_in_a_row_in_memory_is_coded_alike() -> None:
    tables, x = one_map(*MAP)
    strided = np.asfortranarray(x)
    assert payload_of({"x": strided}, tables) == payload_of({"x": x}, tables)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_decoding_takes_is_known_before_and_held_against_the_bound(either_core: Core) -> None:
    tables, x = one_map(*MAP)
    payload = payload_of({"x": x}, tables)
    assert decoded_bytes(payload) == either_core.working * x.nbytes
    decode(payload, max_bytes=either_core.working * x.nbytes, tables=tables)
    with pytest.raises(CodecError, match="at most"):
        decode(payload, max_bytes=either_core.working * x.nbytes - 1, tables=tables)


@pytest.mark.parametrize("dtype", ["FP16", "FP32", "FP64"])
@pytest.mark.parametrize("side", [64, 65])
def test_what_decoding_is_said_to_take_is_no_less_than_what_it_takes(dtype: str, side: int) -> None:
    klt = klt_of("NCHW", 16, (8, 8))
    tables = boundary_of(x=(TensorSpec(name="x", dtype=dtype, shape=(1, 16, side, side)), klt))
    payload = payload_of({"x": tensor_of(klt, (1, 16, side, side)).astype(NUMPY_DTYPES[dtype])}, tables, 120)
    decode(payload, max_bytes=ENOUGH, tables=tables)  # what is kept between two is not counted
    tracemalloc.start()
    try:
        decode(payload, max_bytes=ENOUGH, tables=tables)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= decoded_bytes(payload)


def test_blocks_that_reach_far_over_the_edge_are_counted_too(either_core: Core) -> None:
    klt = klt_of("NCHW", 2, (32, 32))
    tables = boundary_of(x=(TensorSpec(name="x", dtype="FP32", shape=("n", 2, "h", "w")), klt))
    payload = payload_of({"x": tensor_of(klt, (5, 2, 1, 1))}, tables)
    assert decoded_bytes(payload) == either_core.working * 5 * 2 * 32 * 32 * 4


def test_another_calibration_or_none_is_refused() -> None:
    tables, x = one_map(*MAP)
    payload = payload_of({"x": x}, tables)
    other = BoundaryTables(CutTables(tensors=tables.tensors, node_bitmap=""), "f" * 64)
    with pytest.raises(CodecError, match="both sides must hold the same"):
        decode(payload, max_bytes=ENOUGH, tables=other)
    with pytest.raises(CodecError, match="none at hand"):
        decode(payload, max_bytes=ENOUGH)
    assert klt_key(payload) == calibration_key(DIGEST) != other.key


def test_tensors_that_are_not_those_of_the_tables_are_refused_by_name() -> None:
    tables, x = one_map(*MAP)
    for tensors, words in (
        ({}, "carries 'x'; got nothing"),
        ({"x": x, "y": x}, "got 'x', 'y'"),
        ({"x": x[:, :8]}, "must have shape"),
        ({"x": x.astype(np.float64)}, "must have datatype FP32, got FP64"),
        ({"x": x.astype(np.complex64)}, "complex64"),
    ):
        with pytest.raises(CodecError, match=words):
            encode_klt(tensors, tables, 128)


@pytest.mark.parametrize("level", [-1, 256])
def test_a_level_that_is_none_is_refused(level: int) -> None:
    tables, x = one_map(*MAP)
    with pytest.raises(CodecError, match="0 to 255"):
        encode_klt({"x": x}, tables, level)


def two_tensors() -> tuple[BoundaryTables, bytes]:
    klt = klt_of("NTC", 6, (1, 1))
    tables = boundary_of(
        x=(TensorSpec(name="x", dtype="FP32", shape=(1, "tokens", 6)), klt),
        ids=TensorSpec(name="ids", dtype="INT32", shape=(1, 4)),
    )
    tensors = {"x": tensor_of(klt, (1, 40, 6)), "ids": np.array([[1, -5, 7, 9]], np.int32)}
    return tables, payload_of(tensors, tables)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, ord("X"), "starts with"),
        (4, 2, "version 2"),
        (14, 0x80, "decoded"),  # decoded_bytes lower
        (16, 5, "cannot travel as kind 5"),
        (16, 0, "its entry says"),
        (16, 1, "its zstd frame|takes|refused"),
        (17, 41, "decoded"),  # another number of tokens
        (17, 0xFF, "more than|decoded|ends|refused"),
        (19, 2, "cannot travel as kind 2"),  # ids have no transform
    ],
)
def test_a_header_that_lies_is_refused_with_the_reason(at: int, value: int, words: str) -> None:
    tables, payload = two_tensors()
    lying = bytearray(payload)
    assert lying[at] != value
    lying[at] = value
    with pytest.raises(CodecError, match=words):
        decode_klt(lying, tables, max_bytes=ENOUGH)


def test_a_giant_that_a_few_bytes_claim_is_refused_before_anything_is_made() -> None:
    tables, payload = two_tensors()
    n = 1 << 45
    claim = payload[:14] + module._varint(4 * 6 * n + 16) + b"\2" + module._varint(n) + b"\4" + payload[-22:]
    with pytest.raises(CodecError, match="at most"):
        decode_klt(claim, tables, max_bytes=ENOUGH)
    claim = payload[:14] + b"\1" + b"\2" + module._varint(2 * n) + b"\4" + payload[-22:]
    with pytest.raises(CodecError, match="more than 281474976710656 elements"):
        decode_klt(claim, tables, max_bytes=ENOUGH)


def test_every_truncation_and_every_byte_more_is_refused() -> None:
    tables, payload = two_tensors()
    for end in range(len(payload)):
        with pytest.raises(CodecError):
            decode_klt(payload[:end], tables, max_bytes=ENOUGH)
    with pytest.raises(CodecError, match="tensors end at byte"):
        decode_klt(payload + b"\0", tables, max_bytes=ENOUGH)


@given(data=st.data())
@settings(max_examples=200)
def test_a_damaged_payload_gives_a_typed_error_or_tensors_of_the_same_kind(data: st.DataObject) -> None:
    tables, payload = two_tensors()
    hurt = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        hurt[data.draw(st.integers(0, len(hurt) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_klt(hurt, tables, max_bytes=1 << 20)
    except CodecError:
        return
    assert [(name, array.dtype.str) for name, array in found.items()] == [("x", "<f4"), ("ids", "<i4")]


def test_bytes_are_those_of_an_ideal_coder_and_a_handful_more() -> None:
    tables, x = one_map("NCHW", (1, 24, 14, 14), (7, 7))
    payload = payload_of({"x": x}, tables, 110)
    assert ideal_bytes({"x": x}, tables, 110) <= len(payload) <= ideal_bytes({"x": x}, tables, 110) * 1.01 + 28


def test_what_a_level_makes_of_the_tables_is_worked_out_once_while_it_is_used() -> None:
    tables, _ = one_map(*MAP)
    assert tables.at(139) is tables.at(139)
