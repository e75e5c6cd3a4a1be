"""What a model is calibrated on is read once, checked, and refused by the name of its file."""

from __future__ import annotations

import io
import logging
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from split.codec.image import prepare_image
from split.errors import InvalidRequest
from split.profiles.contract import Contract, Data, InputContract
from split.profiles.image_spec import ImageSpec
from split.tensor import Array, TensorSpec
from split.workbench.sources import SOURCES_MAX, Source, dealt, folds_of, read_sources, spread

SPEC = ImageSpec(resize=40, crop=32, mean=(127.0,) * 3, std=(64.0,) * 3)
PICTURE = [TensorSpec(name="x", dtype="FP32", shape=("n", 3, 32, 32))]
CONTRACT = Contract(data=Data(inputs=(InputContract(name="x", encoded=SPEC),)))
PLAIN = [TensorSpec(name="a", dtype="FP32", shape=("n", 2)), TensorSpec(name="b", dtype="INT64", shape=("n", 3))]


def picture(seed: int, size: tuple[int, int] = (90, 60), mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 9, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode).save(out, "PNG")
    return out.getvalue()


def request(**arrays: Array) -> dict[str, Array]:
    return {"a": np.ones((1, 2), np.float32), "b": np.ones((1, 3), np.int64)} | arrays


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    return tmp_path


def test_the_first_view_is_what_a_request_with_the_picture_becomes(folder: Path) -> None:
    [first, *_] = read_sources(folder, PICTURE, CONTRACT)
    assert (first.name, first.picture) == ("0.png", "x")
    served = first.views[0]()["x"]
    # Kept as 8-bit pixels: what the resize gives between two of them is rounded by Pillow itself.
    np.testing.assert_array_equal(served, prepare_image((folder / "0.png").read_bytes(), SPEC))


def test_views_are_eight_different_ones_and_the_same_each_time(folder: Path) -> None:
    once, again = (read_sources(folder, PICTURE, CONTRACT) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        views = [view()["x"] for view in one.views]
        assert len(views) == 8
        assert len({view.tobytes() for view in views}) == 8
        assert {view.shape for view in views} == {(1, 3, 32, 32)}
        for view, same in zip(views, other.views, strict=True):
            np.testing.assert_array_equal(view, same()["x"])


def test_grey_models_and_transparent_or_grey_pictures_work(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1, mode="RGBA"))
    (tmp_path / "b.png").write_bytes(picture(2, mode="L"))
    grey = ImageSpec(resize=32, crop=32, mean=(0.0,), std=(255.0,), layout="NHWC")
    contract = Contract(data=Data(inputs=(InputContract(name="x", encoded=grey),)))
    sources = read_sources(tmp_path, [TensorSpec(name="x", dtype="FP32", shape=(1, 32, 32, 1))], contract)
    assert {view()["x"].shape for source in sources for view in source.views} == {(1, 32, 32, 1)}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("broken.jpg", b"\xff\xd8\xff\xe0 and then nothing", r"broken\.jpg: the 21 bytes are no picture"),
        ("notes.txt", b"hello", r"notes\.txt is neither a picture \(.jpg, .*\) nor an \.npz"),
        ("empty.npz", b"", r"empty\.npz: .*empty\.npz is no \.npz file"),
    ],
)
def test_a_file_that_is_none_of_these_is_named(folder: Path, name: str, data: bytes, words: str) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(InvalidRequest, match=words):
        read_sources(folder, PICTURE, CONTRACT)


def test_hidden_files_and_folders_are_passed_over_and_copies_count_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "more").mkdir()
    (folder / "again.png").write_bytes(picture(0))
    with caplog.at_level(logging.WARNING):
        sources = read_sources(folder, PICTURE, CONTRACT)
    assert [source.name for source in sources] == ["0.png", "1.png", "2.png"]
    assert "again.png is the same file as 0.png and is not used" in caplog.text


def test_pictures_without_a_word_of_the_contract_are_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"0\.png: .*add data\.inputs\.encoded"):
        read_sources(folder, PICTURE, Contract())


def test_requests_are_files_or_the_rows_of_one(tmp_path: Path) -> None:
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", **request(a=np.full((1, 2), number, np.float32)))
    files = read_sources(tmp_path, PLAIN, None)
    assert [(source.name, len(source.views), source.picture) for source in files] == [
        ("0.npz", 1, ""),
        ("1.npz", 1, ""),
    ]
    batch = tmp_path / "batch.npz"
    np.savez(batch, a=np.arange(10, dtype=np.float32).reshape(5, 2), b=np.ones((5, 3), np.int64))
    rows = read_sources(batch, PLAIN, None)
    assert [source.views[0]()["a"].tolist() for source in rows] == [[[2.0 * n, 2.0 * n + 1]] for n in range(5)]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (request(), "holds 1 input; calibration learns from some and measures on others"),
        (request(a=np.ones((1, 3), np.float32)), r"tensor 'a' must have shape \[-1, 2\], got \[1, 3\]"),
        (request(a=np.ones((1, 2))), "tensor 'a' must have datatype FP32, got FP64"),
        (request(a=np.array([[1, np.nan]], np.float32)), "input 'a' has values that are not finite"),
        ({"a": np.ones((1, 2), np.float32)}, "input 'b' is missing"),
        ({"a": np.ones((0, 2), np.float32), "b": np.ones((0, 3), np.int64)}, "holds 0 inputs"),
    ],
)
def test_requests_that_do_not_fit_are_named(tmp_path: Path, arrays: dict[str, Array], words: str) -> None:
    np.savez(tmp_path / "inputs.npz", **arrays)
    with pytest.raises(InvalidRequest, match=rf"inputs\.npz.*{words}"):
        read_sources(tmp_path / "inputs.npz", PLAIN, None)


def test_a_request_without_a_value_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "0.npz", a=np.ones((0, 2), np.float32), b=np.ones((0, 3), np.int64))
    np.savez(tmp_path / "1.npz", **request())
    with pytest.raises(InvalidRequest, match=r"0\.npz: .*its inputs are empty \(a, b\)"):
        read_sources(tmp_path, PLAIN, None)


def test_rows_that_are_copies_count_once_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else they are learnt from and measured on at once: a bound that nobody has measured is held for sure."""
    a = np.array([[1, 2], [1, 2], [3, 4], [1, 2], [3, 4]], np.float32)
    b = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]], np.int64)
    np.savez(tmp_path / "rows.npz", a=a, b=b)
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in read_sources(tmp_path / "rows.npz", PLAIN, None)] == ["row 0", "row 2", "row 3"]
    assert "rows.npz: 2 of 5 rows are copies of others and are not used" in caplog.text


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(InvalidRequest, match=r"pipe\.npz is no file"):
        read_sources(tmp_path / "pipe.npz", PLAIN, None)


def test_a_file_that_no_picture_can_be_as_large_as_is_refused_before_it_is_read(folder: Path) -> None:
    with (folder / "huge.png").open("wb") as stream:
        stream.truncate(1 << 40)  # of zeros, which take no room
    with pytest.raises(InvalidRequest, match=r"huge\.png has 1099511627776 bytes; a picture may have 268435456"):
        read_sources(folder, PICTURE, CONTRACT)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere is not there"):
        read_sources(tmp_path / "nowhere", PLAIN, None)


def test_few_inputs_are_said_to_be_few(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(tmp_path / "few.npz", a=np.arange(6, dtype=np.float32).reshape(3, 2), b=np.ones((3, 3), np.int64))
    with caplog.at_level(logging.WARNING):
        read_sources(tmp_path / "few.npz", PLAIN, None)
    assert "3 inputs are few" in caplog.text


def test_of_very_many_some_are_used_evenly(tmp_path: Path) -> None:
    many = 2 * SOURCES_MAX
    for number in range(many):
        np.savez(tmp_path / f"{number:04}.npz", **request(a=np.full((1, 2), number, np.float32)))
    sources = read_sources(tmp_path, PLAIN, None)
    assert [source.name for source in sources] == [f"{number:04}.npz" for number in range(0, many, 2)]


def test_of_very_many_rows_some_are_used_evenly_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = 2 * SOURCES_MAX
    np.savez(
        tmp_path / "rows.npz",
        a=np.arange(2.0 * many, dtype=np.float32).reshape(many, 2),
        b=np.ones((many, 3), np.int64),
    )
    with caplog.at_level(logging.WARNING):
        sources = read_sources(tmp_path / "rows.npz", PLAIN, None)
    assert [source.name for source in sources] == [f"row {row}" for row in range(0, many, 2)]
    assert f"rows.npz holds {many} inputs; {SOURCES_MAX} of them, evenly spread, are used" in caplog.text


@pytest.mark.parametrize("count", [2, 3, 4, 7, 20, 64, 96])
def test_sources_are_dealt_so_that_neighbours_share_a_fold_and_the_first_ones_lie_evenly(count: int) -> None:
    sources = [Source(name=f"{n}", views=()) for n in range(count)]
    order = [int(source.name) for source in dealt(sources)]
    assert sorted(order) == list(range(count))
    folds = folds_of(sources)
    for fold in range(folds):
        members = sorted(order[fold::folds])
        assert members == list(range(members[0], members[0] + len(members)))
    for first in range(2, count):
        used = sorted(order[:first])
        gaps = [b - a for a, b in pairwise([-1, *used, count])]
        assert max(gaps) <= 2.5 * count / first + 1


def test_requests_are_spread_over_sources_and_each_knows_its_own() -> None:
    sources = [
        Source(name=str(n), views=tuple((lambda n=n, v=v: {"x": np.array([n, v])}) for v in range(2))) for n in range(4)
    ]
    assert folds_of(sources) == 3
    found = [(source, *request()["x"].tolist()) for source, request in spread(sources, 6)]
    assert found == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 0), (0, 0, 1), (1, 1, 1)]
    assert folds_of(sources[:2]) == 2
