"""split/codec/calibration.py: what is written is read back; what is damaged, foreign or hostile is refused by name."""

from __future__ import annotations

import errno
import hashlib
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from split.codec.calibration import (
    Calibration,
    Curve,
    CutTables,
    Klt,
    Point,
    TensorTables,
    decode_calibration,
    encode_calibration,
    grid_of,
    read_calibration,
    rounded,
    step_of,
    write_calibration,
)
from split.errors import InvalidCalibration, ModelUnavailable
from split.ids import CutId, ModelDigest
from split.tensor import TensorSpec

MODEL = ModelDigest("sha256:" + "ab" * 32)
OTHER = ModelDigest("sha256:" + "cd" * 32)
CUT = CutId("0123456789ab")


def a_klt(channels: int = 3, **changes: Any) -> Klt:
    """A transform that swaps and scales channels by powers of two, so that all of it is exact."""
    transform = np.eye(channels, dtype=np.float32)[::-1] * 4
    return Klt(
        **{
            "layout": "NCHW",
            "transform": transform.copy(),
            "inverse": (transform / 16).T.copy(),
            "mean": np.arange(channels, dtype=np.float32),
            "block": (7, 7),
            "scales": np.arange(channels * 49, dtype=np.uint8).reshape(channels, 7, 7),
        }
        | changes
    )


def a_calibration(klt: Klt | None = None, **changes: Any) -> Calibration:
    spec = TensorSpec(name="projected", dtype="FP32", shape=("N", 3, 14, 14))
    mask = TensorSpec(name="mask", dtype="BOOL", shape=("N", 14))
    points = (
        Point(
            level=140,
            mean_bytes=900.5,
            p95_bytes=1100.0,
            fidelity={"kl": 0.2, "top1": 0.1},
            fidelity_high={"kl": 0.2, "top1": 0.1},
        ),
        Point(level=120, mean_bytes=2400.0, p95_bytes=2900.0, fidelity={"kl": 0.03}, fidelity_high={"kl": 0.03}),
    )
    tables = CutTables(
        tensors=(TensorTables(spec=spec, klt=klt or a_klt()), TensorTables(spec=mask, klt=None)), node_bitmap="ff01"
    )
    return Calibration(
        **{
            "model": MODEL,
            "inputs": 40,
            "tables": {CUT: tables},
            "curves": {CUT: Curve(points=points, inputs=10)},
            "pictures": {"jpeg": Curve(points=(msgspec.structs.replace(points[0], level=35),), inputs=10)},
        }
        | changes
    )


def test_what_is_written_is_read_back_and_named_by_the_hash_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.isthmus"
    digest = write_calibration(a_calibration(), path)
    found = read_calibration(path, MODEL)
    assert found is not None
    assert found.digest == digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [one.name for one in tmp_path.iterdir()] == ["calibration.isthmus"]
    assert (found.model, found.inputs, found.curves, found.pictures) == (
        MODEL,
        40,
        a_calibration().curves,
        a_calibration().pictures,
    )
    projected, mask = found.tables[CUT].tensors
    assert (mask.spec.name, mask.klt, found.tables[CUT].node_bitmap) == ("mask", None, "ff01")
    assert projected.spec == TensorSpec(name="projected", dtype="FP32", shape=("N", 3, 14, 14))
    klt = projected.klt
    assert klt is not None
    for name in ("transform", "inverse", "mean", "scales"):
        np.testing.assert_array_equal(getattr(klt, name), getattr(a_klt(), name))
    assert (klt.layout, klt.block, klt.components, klt.channels) == ("NCHW", (7, 7), 3, 3)


def test_there_is_none_where_no_file_is(tmp_path: Path) -> None:
    assert read_calibration(tmp_path / "calibration.isthmus", MODEL) is None


def test_the_sidecar_of_another_model_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "calibration.isthmus"
    write_calibration(a_calibration(), path)
    with pytest.raises(InvalidCalibration, match=r"calibration.isthmus: .*belongs to the model .*isthmus calibrate"):
        read_calibration(path, OTHER)


def test_what_could_not_be_read_again_is_not_written_over_what_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.isthmus"
    write_calibration(a_calibration(), path)
    before = path.read_bytes()
    with pytest.raises(InvalidCalibration, match="not finite"):
        write_calibration(a_calibration(a_klt(mean=np.full(3, np.nan, np.float32))), path)
    monkeypatch.setattr("split.codec.calibration.FILE_BYTES_MAX", len(before) - 1)
    with pytest.raises(InvalidCalibration, match="more than"):
        write_calibration(a_calibration(), path)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [before]


def test_every_truncation_and_every_flipped_byte_is_refused_or_reads_as_a_sound_calibration() -> None:
    data = encode_calibration(a_calibration())
    for end in range(len(data)):
        with pytest.raises(InvalidCalibration):
            decode_calibration(data[:end], MODEL)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            found = decode_calibration(bytes(damaged), MODEL)
        except InvalidCalibration:
            continue
        assert found.model == MODEL  # a changed value: zstd carries no checksum, the digest names another file


def _repacked(change: dict[str, Any]) -> bytes:
    plain = msgspec.msgpack.decode(zstandard.decompress(encode_calibration(a_calibration())))
    return zstandard.compress(msgspec.msgpack.encode(plain | change))


@pytest.mark.parametrize(
    ("codec", "level", "words"), [("jpeg", 36, "point at level 36 is none"), ("avif", 0, "curve of codec 'avif'")]
)
def test_pictures_at_a_setting_that_does_not_exist_are_refused(codec: str, level: int, words: str) -> None:
    """There are 12 qualities at three sizes."""
    one = Point(level=level, mean_bytes=1.0, p95_bytes=1.0, fidelity={}, fidelity_high={})
    calibration = a_calibration(pictures={codec: Curve(points=(one,), inputs=10)})
    with pytest.raises(InvalidCalibration, match=words):
        decode_calibration(encode_calibration(calibration), MODEL)


def test_by_what_channels_were_weighed_is_read_back_and_a_file_of_before_does_not_say() -> None:
    tables = a_calibration().tables[CUT]
    told = replace(tables, tensors=(replace(tables.tensors[0], weighed_by="weights"), tables.tensors[1]))
    data = encode_calibration(replace(a_calibration(), tables={CUT: told}))
    assert [one.weighed_by for one in decode_calibration(data, MODEL).tables[CUT].tensors] == ["weights", None]
    plain = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data))
    first, second = plain["cuts"][CUT]["tensors"]
    assert (first[-1], second[-1]) == ("weights", None)
    plain["cuts"][CUT]["tensors"] = [first[:-1], second[:-1]]
    before = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(plain))
    assert [one.weighed_by for one in decode_calibration(before, MODEL).tables[CUT].tensors] == [None, None]
    plain["cuts"][CUT]["tensors"] = [[*first[:-1], "guess"], second]
    with pytest.raises(InvalidCalibration, match="it is damaged"):
        decode_calibration(zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(plain)), MODEL)


def test_tables_cannot_be_written_and_what_they_were_made_of_still_can() -> None:
    scales = np.ones((3, 7, 7), np.uint8)
    klt = a_klt(scales=scales)
    with pytest.raises(ValueError, match="read-only"):
        klt.scales[0] = 2
    scales[0] = 2


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(InvalidCalibration, match="version 4, this program reads 3"):
        decode_calibration(_repacked({"version": 4}), MODEL)


def test_a_frame_that_unpacks_to_gigabytes_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.compress(bytes(200 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(InvalidCalibration, match="claims to unpack to 209715200 bytes"):
        decode_calibration(bomb, MODEL)


def _curve_of(**changes: Any) -> dict[str, Any]:
    point = {"level": 1, "mean_bytes": 1.0, "p95_bytes": 1.0, "fidelity": {}, "fidelity_high": {}}
    return {"points": [point | changes], "inputs": 1}


MANY = 200_000


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [[0, 0]] * MANY},
        {"cuts": {str(n): {"tensors": [], "node_bitmap": "", "curve": _curve_of()} for n in range(MANY // 100)}},
        {"cuts": {CUT: {"tensors": [["x", "FP32", [1] * MANY, None]], "node_bitmap": "", "curve": _curve_of()}}},
        {"cuts": {CUT: {"tensors": [["x", "FP32", [1], None]] * MANY, "node_bitmap": "", "curve": _curve_of()}}},
        {"pictures": {"jpeg": {"points": _curve_of()["points"] * MANY, "inputs": 1}}},
        {"pictures": {"jpeg": _curve_of(fidelity={str(n): 0 for n in range(MANY)})}},
        {"pictures": {"jpeg": _curve_of(fidelity_high={str(n): 0 for n in range(MANY)})}},
        {"pictures": {str(n): _curve_of() for n in range(MANY // 100)}},
    ],
)
def test_what_repeats_too_often_is_refused_before_it_is_made(change: dict[str, Any]) -> None:
    """Of a few bytes each, one sidecar of twelve KB would take gigabytes. Here a million bytes of them are read within
    some more for the bytes themselves."""
    data = _repacked(change)
    decode_calibration(encode_calibration(a_calibration()), MODEL)  # whatever is made once
    plain_bytes = zstandard.get_frame_parameters(data).content_size
    tracemalloc.start()
    try:
        with pytest.raises(InvalidCalibration, match="length <="):
            decode_calibration(data, MODEL)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * plain_bytes + 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", ["", "../../../evil", "0123456789AB", "0123456789ab\n", "offload", "0" * 1_000_000])
def test_a_cut_by_a_name_that_is_no_cuts_is_refused_in_few_words(cut: str) -> None:
    known = msgspec.msgpack.decode(zstandard.decompress(encode_calibration(a_calibration())))["cuts"][CUT]
    with pytest.raises(InvalidCalibration, match="matching regex") as caught:
        decode_calibration(_repacked({"cuts": {cut: known}}), MODEL)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("opening", [b"\x81\xa1?", b"\x82\xa7version\x03\xa5sizes"])
def test_what_is_nested_too_deeply_is_refused(opening: bytes) -> None:
    with pytest.raises(InvalidCalibration, match="damaged"):
        decode_calibration(zstandard.compress(opening + b"\x91" * 1_000_000), MODEL)


def test_two_that_write_at_once_leave_one_whole_sidecar_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one writes and ends between the first one's writing and its renaming."""
    path, moved, replaced = tmp_path / "calibration.isthmus", Path.replace, []

    def other_process_first(fresh: Path, target: Path) -> Path:
        if not replaced:
            replaced.append(fresh)
            with monkeypatch.context() as patched:
                patched.setattr("os.getpid", lambda: 1)
                write_calibration(replace(a_calibration(), inputs=99), path)
        return moved(fresh, target)

    monkeypatch.setattr(Path, "replace", other_process_first)
    write_calibration(a_calibration(), path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    found = read_calibration(path, MODEL)
    assert found is not None
    assert found.inputs == a_calibration().inputs


def test_a_full_disk_leaves_the_old_sidecar_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.isthmus"
    write_calibration(a_calibration(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelUnavailable, match=r"calibration.isthmus cannot be written: the disk is full"):
        write_calibration(replace(a_calibration(), inputs=99), path)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == [before]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """Root's `--out /dev/null` would be the end of it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ModelUnavailable, match="is no file and is not replaced"):
            write_calibration(a_calibration(), path)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inverse": np.eye(3, dtype=np.float32)}, "do not undo each other"),
        ({"transform": np.full((3, 3), np.nan, np.float32)}, "not finite"),
        ({"mean": np.array([0, np.inf, 0], np.float32)}, "not finite"),
        ({"layout": "NHWC"}, "has tables for 3 channels"),
        ({"layout": "NTC"}, "has the layout 'NTC'"),
        ({"layout": "bad"}, "has the layout 'bad'"),
        ({"block": (7, 8)}, "tables of"),
        ({"block": (0, 7)}, "blocks of 0×7"),
        ({"block": (64, 7), "scales": np.zeros((3, 64, 7), np.uint8)}, "blocks of 64×7"),
        ({"mean": np.zeros(2, np.float32)}, "tables of"),
    ],
)
def test_tables_that_nobody_could_code_with_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidCalibration, match=words):
        decode_calibration(encode_calibration(a_calibration(a_klt(**changes))), MODEL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"level": 256}, "level 256"),
        ({"level": -1}, "level -1"),
        ({"mean_bytes": float("nan")}, "not in the order"),
        ({"mean_bytes": 900.0}, "not in the order"),
        ({"p95_bytes": float("inf")}, "not in the order"),
        ({"fidelity": {"kl": -0.1}}, "level 120"),
        ({"fidelity": {"kl": float("inf")}}, "level 120"),
        ({"fidelity": {str(n): 0.0 for n in range(17)}}, "length <= 16"),
    ],
)
def test_a_curve_that_cannot_have_been_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    sound = a_calibration()
    first, second = sound.curves[CUT].points
    curve = Curve(points=(first, msgspec.structs.replace(second, **changes)), inputs=10)
    with pytest.raises(InvalidCalibration, match=words):
        decode_calibration(encode_calibration(replace(sound, curves={CUT: curve})), MODEL)


def test_the_point_within_a_bound_is_the_cheapest_measured_one_and_never_between_two() -> None:
    curve = a_calibration().curves[CUT]
    assert [point.level if (point := curve.within("kl", bound)) else None for bound in (0.3, 0.2, 0.19, 0.02)] == [
        140,
        140,
        120,
        None,
    ]
    assert curve.within("top1", 1.0) == curve.points[0]
    assert curve.within("cosine", 1.0) is None


def test_the_grid_has_eight_indices_an_octave_and_one_at_128() -> None:
    assert [step_of(level) for level in (120, 128, 136, 0)] == [0.5, 1.0, 2.0, 2.0**-16]
    assert step_of(129) == pytest.approx(1.0905, abs=1e-4)  # the eighth root of 2
    found = grid_of(np.array([0.0, 1e-30, 0.5, 1.0, 1.04, 1.05, 1e30]))
    assert found.dtype == np.uint8
    assert found.tolist() == [0, 1, 120, 128, 128, 129, 255]


def test_rounded_transforms_keep_eleven_bits_and_the_range_of_fp32() -> None:
    values = np.array([1.0, 1.0 + 2**-11, 1.0 + 2**-13, -3.3e-30, 1e30, 0.0], np.float32)
    found = rounded(values)
    assert found[:2].tolist() == values[:2].tolist()
    assert found[2] == 1.0
    np.testing.assert_allclose(found, values, rtol=2.0**-12)
    random = np.random.default_rng(1).normal(0, 1, (100, 100)).astype(np.float32)
    np.testing.assert_allclose(rounded(random), random, rtol=2.0**-12)


def test_a_rounded_transform_takes_about_half_its_bytes_in_the_file() -> None:
    matrix = np.linalg.qr(np.random.default_rng(2).normal(0, 1, (100, 100)))[0].astype(np.float32)
    spec = TensorSpec(name="x", dtype="FP32", shape=("N", 100, 1, 1))
    klt = a_klt(
        transform=rounded(matrix),
        inverse=rounded(matrix.T),
        mean=np.zeros(100, np.float32),
        block=(1, 1),
        scales=np.full((100, 1, 1), 128, np.uint8),
    )
    tables = CutTables(tensors=(TensorTables(spec=spec, klt=klt),), node_bitmap="01")
    data = encode_calibration(a_calibration(tables={CUT: tables}))
    assert len(data) < 0.6 * 2 * matrix.nbytes
    back = decode_calibration(data, MODEL).tables[CUT].tensors[0].klt
    assert back is not None
    np.testing.assert_array_equal(back.transform, klt.transform)
    np.testing.assert_array_equal(back.inverse, klt.inverse)


def test_sizes_are_kept_and_what_are_none_is_refused() -> None:
    made = replace(a_calibration(), sizes=((1, 1), (64, 128)))
    assert decode_calibration(encode_calibration(made), MODEL).sizes == ((1, 1), (64, 128))
    for odd, words in ((((2, 1),), "measured at"), (((-1, 3),), "measured at"), (((1, 1),) * 257, "length <= 256")):
        with pytest.raises(InvalidCalibration, match=words):
            decode_calibration(encode_calibration(replace(made, sizes=odd)), MODEL)
