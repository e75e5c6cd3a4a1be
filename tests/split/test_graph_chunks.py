"""Chunks by content: whole, reproducible, and shared by models that differ a little."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import split.graph.chunks
from split.errors import InvalidModel, InvalidRequest
from split.graph.chunks import LEAST_BYTES, list_chunks, read_chunks

NOISE = np.random.default_rng(7).integers(0, 256, 4_000_000, dtype=np.uint8).tobytes()


def chunked(folder: Path, *contents: bytes) -> list[bytes]:
    """Each chunk's bytes, in order."""
    paths = [folder / f"{number}.bin" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    sizes = [len(content) for content in contents]
    chunks = read_chunks(list_chunks(paths, sizes), sizes)
    parts = [contents[chunk.file][chunk.offset : chunk.offset + chunk.size] for chunk in chunks]
    for chunk, part in zip(chunks, parts, strict=True):
        assert hashlib.sha256(part).digest() == chunk.sha256
    return parts


def plainly(data: bytes) -> list[int]:
    """The sizes of the chunks, byte by byte as FastCDC describes it, with a gear that forgets after 32 bytes."""
    gear = [
        int.from_bytes(hashlib.sha256(b"isthmus chunk" + bytes([value])).digest()[:4], "little") for value in range(256)
    ]
    padded, sizes, start = bytes(32) + data, [], 0
    for at in range(len(data)):
        size = at + 1 - start
        if size < LEAST_BYTES and at + 1 < len(data):
            continue
        window = padded[at + 1 : at + 33]
        found = sum(gear[byte] << (31 - place) for place, byte in enumerate(window)) & 0xFFFFFFFF
        if found >> 17 == 0 or size == 16 * LEAST_BYTES or at + 1 == len(data):
            sizes.append(size)
            start = at + 1
    return sizes


def test_the_borders_are_those_of_the_gear_hash_byte_by_byte(tmp_path: Path) -> None:
    data = NOISE[:300_000] + bytes(400_000) + NOISE[:50_000]
    assert [len(part) for part in chunked(tmp_path, data)] == plainly(data)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 1_200_000), max_size=4), start=st.integers(0, 100_000))
def test_the_chunks_of_any_files_are_the_files(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], start: int
) -> None:
    contents = [NOISE[start : start + length] for length in lengths]
    parts = chunked(tmp_path_factory.mktemp("files"), *contents)
    assert b"".join(parts) == b"".join(contents)
    assert all(len(part) <= 16 * LEAST_BYTES for part in parts)
    assert sum(len(part) < LEAST_BYTES for part in parts) <= len(contents)


@pytest.mark.parametrize("content", [b"", b"x", bytes(1_000_000), b"\xff" * 1_000_000, b"ab" * 500_000])
def test_monotonous_files_are_cut_too(tmp_path: Path, content: bytes) -> None:
    parts = chunked(tmp_path, content)
    assert b"".join(parts) == content
    assert len(parts) <= len(content) // LEAST_BYTES + 1


def test_a_large_model_has_larger_chunks_and_a_list_of_bounded_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split.graph.chunks, "LIST_CHUNKS_MAX", 20)
    parts = chunked(tmp_path, NOISE[:2_000_000], NOISE[:700_000])
    assert len(parts) <= 20
    assert b"".join(parts) == NOISE[:2_000_000] + NOISE[:700_000]


def model_bytes(*, last_seed: int = 0, inserted: bool = False) -> bytes:
    """Six layers with their weights inside, as exporters write them: nodes first, then weights."""
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((256, 256)).astype(np.float32) for _ in range(6)]
    if last_seed:
        weights[-1] = np.random.default_rng(last_seed).standard_normal((256, 256)).astype(np.float32)
    nodes, at = [], "x"
    if inserted:
        nodes.append(onnx.helper.make_node("Identity", ["x"], ["early"], name="a-node-that-was-not-there"))
        at = "early"
    for number in range(6):
        nodes.append(onnx.helper.make_node("MatMul", [at, f"w{number}"], [f"t{number}"]))
        at = f"t{number}"
    graph = onnx.helper.make_graph(
        nodes,
        "net",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 256])],
        [onnx.helper.make_tensor_value_info(at, onnx.TensorProto.FLOAT, [1, 256])],
        [onnx.numpy_helper.from_array(value, f"w{number}") for number, value in enumerate(weights)],
    )
    return onnx.helper.make_model(graph).SerializeToString()


def to_send(folder: Path, held: bytes, wanted: bytes) -> int:
    """Bytes of `wanted` in chunks that `held` does not have."""
    known = set(chunked(folder, held))
    return sum(len(part) for part in chunked(folder, wanted) if part not in known)


def test_a_fine_tuned_last_layer_sends_that_layer_and_a_border_on_each_side(tmp_path: Path) -> None:
    layer = 256 * 256 * 4
    sent = to_send(tmp_path, model_bytes(), model_bytes(last_seed=9))
    assert layer <= sent <= layer + 2 * 16 * LEAST_BYTES


def test_a_node_inserted_early_moves_all_bytes_and_sends_next_to_none(tmp_path: Path) -> None:
    sent = to_send(tmp_path, model_bytes(), model_bytes(inserted=True))
    assert 0 < sent <= 16 * LEAST_BYTES
    assert len(model_bytes()) > 1_500_000


def test_a_list_that_does_not_make_up_the_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(NOISE[:200_000])
    good = list_chunks([path], [200_000])
    first = int.from_bytes(good[:4], "little")
    for bad in (
        good[:-1],
        good[:-36],
        good + good[:36],
        bytes(4) + good[4:],
        (first + 1).to_bytes(4, "little") + good[4:],
        b"\xff\xff\xff\xff" + good[4:],
    ):
        with pytest.raises(InvalidRequest):
            read_chunks(bad, [200_000])
    with pytest.raises(InvalidRequest, match="byte 0 of 5"):
        read_chunks(b"", [5])
    assert read_chunks(b"", [0, 0]) == []


def test_a_list_of_crumbs_is_refused_for_its_length() -> None:
    """What is listed is kept and read for each offer: a megabyte of list must not come with a megabyte of model."""
    for sizes, count in (([1000, 47], 4), ([28_000 * 36], 28_000)):  # one for each 1,024 bytes and one for each file
        with pytest.raises(InvalidRequest, match=f"a list of {count} chunks"):
            read_chunks((36).to_bytes(4, "little").ljust(36, b"x") * count, sizes)
    few = [1000, 1000, 24]
    assert len(read_chunks(b"".join(size.to_bytes(4, "little") + bytes(32) for size in few), [2000, 24])) == 3


def test_a_file_that_changed_since_it_was_loaded_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"123")
    with pytest.raises(InvalidModel, match=r"a\.bin was changed"):
        list_chunks([path], [4])
