"""agent/calibrated.py: a sidecar's curves become plans of the model, and one that cannot be used costs nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.calibrated import NO_SIDECAR, calibrated, fitting, sidecar_again, sidecar_beside
from split.codec.calibration import (
    CALIBRATION_FILE,
    Calibration,
    CutTables,
    TensorTables,
    decode_calibration,
    write_calibration,
)
from split.graph.card import ModelCard
from split.ids import CutId, ModelDigest
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec
from split.workbench.cut import prepare
from tests.calibrated_model import calibrate, save_model

RAW = CodecCosts(codec="raw", bytes=64_000, encode_ms=0.0, decode_ms=0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelCard, Calibration]:
    folder = tmp_path_factory.mktemp("calibrated")
    path = folder / "1" / "model.onnx"
    path.parent.mkdir()
    save_model(path)
    card = prepare(path, folder / "cuts")
    return path, card, calibrate(card, folder / "cuts", count=8)


def profile_of(card: ModelCard, *more: CodecCosts) -> ModelProfile:
    return ModelProfile(
        digest=card.digest,
        runtime="test",
        fingerprint="test",
        dims={},
        threads=1,
        whole_ms=1.0,
        image_ms=0.0,
        input_codecs=(RAW,),
        encoded_bytes=0,
        output_bytes=40,
        cuts=tuple(CutCosts(cut=cut.id, head_ms=0.5, tail_ms=0.5, codecs=(RAW, *more)) for cut in card.cuts),
    )


def klt_of(profile: ModelProfile) -> dict[CutId, CodecCosts]:
    return {cut.cut: codec for cut in profile.cuts for codec in cut.codecs if codec.codec == "klt"}


def test_each_calibrated_cut_has_its_curve_and_the_others_stay_as_profiled(
    made: tuple[Path, ModelCard, Calibration],
) -> None:
    _, card, calibration = made
    found = calibrated(card, profile_of(card), calibration)
    assert klt_of(found).keys() == calibration.curves.keys()
    assert len(klt_of(found)) < len(card.cuts)
    for cut, codec in klt_of(found).items():
        assert codec.curve == calibration.curves[cut].points
        assert codec.bytes == round(min(point.mean_bytes for point in codec.curve))
    assert [codec.codec for codec in found.input_codecs] == ["raw", "jpeg", "webp"]
    assert calibrated(card, found, None) == profile_of(card)


def test_times_are_as_profiled_and_else_half_a_millisecond_for_sixteen_thousand_numbers(
    made: tuple[Path, ModelCard, Calibration],
) -> None:
    _, card, calibration = made
    guessed = calibrated(card, profile_of(card), calibration)
    timed = calibrated(
        card, profile_of(card, CodecCosts(codec="klt", bytes=1, encode_ms=0.3, decode_ms=0.2)), calibration
    )
    for codec in klt_of(guessed).values():
        assert (codec.encode_ms, codec.decode_ms) == (pytest.approx(0.5), pytest.approx(0.5))
    for codec in klt_of(timed).values():
        assert (codec.encode_ms, codec.decode_ms) == (0.3, 0.2)
    assert klt_of(calibrated(card, timed, None)) == {}


def test_tables_of_other_tensors_than_cross_there_make_no_plan(made: tuple[Path, ModelCard, Calibration]) -> None:
    _, card, calibration = made
    cut = next(iter(calibration.tables))
    [one] = calibration.tables[cut].tensors
    spec = TensorSpec(name="another", dtype=one.spec.dtype, shape=one.spec.shape)
    other = CutTables(tensors=(TensorTables(spec=spec, klt=one.klt),), node_bitmap="00")
    found = calibrated(card, profile_of(card), replace(calibration, tables=calibration.tables | {cut: other}))
    assert klt_of(found).keys() == calibration.curves.keys() - {cut}


def test_the_sidecar_beside_a_model_is_read_with_its_bytes(made: tuple[Path, ModelCard, Calibration]) -> None:
    path, card, calibration = made
    assert sidecar_beside(path, card.digest) is NO_SIDECAR
    digest = write_calibration(calibration, path.with_name(CALIBRATION_FILE))
    found = sidecar_beside(path, card.digest)
    assert found.calibration is not None
    assert found.calibration.digest == digest
    assert found.data == path.with_name(CALIBRATION_FILE).read_bytes()
    assert found.tables.keys() == calibration.tables.keys()
    assert found.is_as(sidecar_beside(path, card.digest))
    assert not found.is_as(NO_SIDECAR)
    strange = sidecar_beside(path, ModelDigest("sha256:" + "ab" * 32))
    assert (strange.calibration, strange.data, dict(strange.tables)) == (None, b"", {})
    assert "belongs to the model" in strange.note
    whatever = sidecar_beside(path, None)
    assert whatever.is_as(found)
    assert fitting(path, whatever, card.digest) is whatever
    assert fitting(path, whatever, ModelDigest("sha256:" + "ab" * 32)).is_as(strange)
    assert fitting(path, NO_SIDECAR, card.digest) is NO_SIDECAR
    path.with_name(CALIBRATION_FILE).unlink()
    path.with_name(CALIBRATION_FILE).mkdir()
    assert "is no file and is not used" in sidecar_beside(path, card.digest).note
    path.with_name(CALIBRATION_FILE).rmdir()


def test_a_file_is_decoded_again_only_where_it_has_changed(
    made: tuple[Path, ModelCard, Calibration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def counted(data: bytes, model: ModelDigest | None) -> Calibration:
        decoded.append(data)
        return decode_calibration(data, model)

    monkeypatch.setattr("agent.calibrated.decode_calibration", counted)
    path, sidecar = tmp_path / "model.onnx", tmp_path / CALIBRATION_FILE
    assert sidecar_again(path, NO_SIDECAR) is NO_SIDECAR
    write_calibration(made[2], sidecar)
    first = sidecar_again(path, NO_SIDECAR)
    assert sidecar_again(path, first) is fitting(path, first, made[1].digest) is first
    assert len(decoded) == 1
    write_calibration(replace(made[2], inputs=99), sidecar)
    second = sidecar_again(path, first)
    assert second.calibration is not None
    assert (second.calibration.inputs, len(decoded)) == (99, 2)
    sidecar.unlink()
    assert sidecar_again(path, second) is NO_SIDECAR


def test_a_pipe_beside_a_model_is_not_waited_for(made: tuple[Path, ModelCard, Calibration], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CALIBRATION_FILE)
    assert "is no file and is not used" in sidecar_beside(tmp_path / "model.onnx", made[1].digest).note
