"""What the demo lays for its two processes, and by which roads it asks; no process is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from scripts import demo_calibration, demo_conditions, models
from scripts.demo_conditions import ALL_ROADS, CONDITIONS, contract_for, lay_models
from split.oip.options import CODECS, MODES

SHIPPED = {
    "model": "m",
    "data": {"codecs": ["raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp"], "privacy": "any"},
}


def test_only_a_calibrated_row_may_use_what_the_calibration_says() -> None:
    assert contract_for(SHIPPED, "any", calibrated=False)["data"]["codecs"] == ["raw", "fp16", "int8", "encoded"]
    codecs = contract_for(SHIPPED, "any", calibrated=True)["data"]["codecs"]
    assert sorted(codecs) == sorted(SHIPPED["data"]["codecs"])


def test_a_condition_changes_nothing_in_the_contract_but_privacy_and_codecs() -> None:
    before = yaml.safe_dump(SHIPPED)
    made = contract_for(SHIPPED, "local-only", calibrated=True)
    assert made["model"] == "m"
    assert made["data"]["privacy"] == "local-only"
    assert set(made["data"]) == set(SHIPPED["data"])
    assert yaml.safe_dump(SHIPPED) == before


def test_every_road_asks_for_what_the_protocol_knows_and_has_its_column() -> None:
    for condition in CONDITIONS:
        assert set(condition.left_out) <= set(condition.roads)
        for name, wishes in condition.roads.items():
            assert name in ALL_ROADS
            assert wishes["mode"] in MODES
            assert wishes.get("codec", "raw") in CODECS


def test_exactly_one_row_is_calibrated_and_it_has_the_pictures_for_rivals() -> None:
    (row,) = [condition for condition in CONDITIONS if condition.calibrated]
    assert {wishes.get("codec") for wishes in row.roads.values()} == {None, "klt", "raw", "jpeg", "webp"}


def test_the_model_is_laid_with_its_calibration_over_one_that_somebody_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "1").mkdir(parents=True)
    (source / "1" / "calibration.isthmus").write_bytes(b"somebody's")
    (source / "contract.yaml").write_text(yaml.safe_dump(SHIPPED))
    sidecar = tmp_path / "sidecar"
    sidecar.write_bytes(b"the demo's")
    monkeypatch.setattr(models, "lay_in_repository", lambda name: source)
    lay_models(tmp_path / "laid", sidecar, privacy="no-raw-input")
    place = tmp_path / "laid" / demo_conditions.MODEL
    assert (place / "1" / "calibration.isthmus").read_bytes() == b"the demo's"
    assert yaml.safe_load((place / "contract.yaml").read_text())["data"]["privacy"] == "no-raw-input"


def test_a_calibration_is_kept_for_exactly_this_model_contract_and_photographs(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("model.onnx", "contract.yaml", "a.jpg")]
    for file in files:
        file.write_bytes(file.name.encode())
    first = demo_calibration.key(files)
    assert demo_calibration.key(files) == first
    files[1].write_bytes(b"another bound")
    assert demo_calibration.key(files) != first
    assert demo_calibration.key(files[:2]) != demo_calibration.key(files)


def test_the_demo_asks_about_no_photograph_that_it_calibrates_on() -> None:
    manifest = models.MANIFEST["photographs"]
    learnt = {
        name
        for name in (*manifest["calibration"], *manifest["test"])
        if models.MANIFEST["files"][name]["package"] == demo_calibration.PACKAGE
    }
    assert len(learnt) == 20
    assert not learnt & set(demo_conditions.PHOTOS)
