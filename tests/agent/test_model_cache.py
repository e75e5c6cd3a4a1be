"""Which card in the cache is a model's: that of these bytes, at this place, for the contract beside it. What goes."""

from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest

from agent.calibrated import sidecar_beside
from agent.model_cache import find_card, remove_former
from split.codec.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    CutTables,
    TensorTables,
    write_calibration,
)
from split.graph.card import file_is
from split.graph.load import model_digest
from split.ids import CutId, ModelDigest
from split.profiles.contract import contract_beside
from split.profiles.measured import Point
from split.tensor import TensorSpec
from split.workbench.cut import folder_for, prepare

MODEL = (
    """<ir_version: 8, opset_import: ["" : 18]> g (float[4] x) => (float[4] y) { a = Neg(x) b = Exp(a) y = Neg(b) }"""
)


def test_of_the_models_in_a_cache_only_the_one_that_is_asked_for_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, folders = tmp_path / "cache", {}
    for name in ("one", "two"):
        path = tmp_path / f"models/{name}/1/model.onnx"
        path.parent.mkdir(parents=True)
        onnx.save(onnx.parser.parse_model(MODEL), path)
        folders[name] = folder_for(cache, model_digest(path)[0], path)
        prepare(path, folders[name])
    hashed: list[Path] = []

    def recorded(path: Path, size: int, sha256: str) -> bool:
        hashed.append(path)
        return file_is(path, size, sha256)

    monkeypatch.setattr("agent.model_cache.file_is", recorded)
    found = find_card(cache, path, None)
    assert found is not None
    assert sorted(hashed) == sorted([path, *(folders["two"] / name for name in found[1].made)])


def test_a_card_that_was_made_for_another_contract_is_made_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "models/m/1/model.onnx", tmp_path / "cache"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(MODEL), path)
    assert find_card(cache, path, None) is None
    folder = folder_for(cache, model_digest(path)[0], path)
    card = prepare(path, folder, contract=contract_beside(path))
    assert find_card(cache, path, None) == (folder, card)
    (path.parent.parent / "contract.yaml").write_text("data: {codecs: [raw, fp16]}\n")
    assert find_card(cache, path, None) == (folder, card)  # nothing in it asks anything of cuts
    (path.parent.parent / "contract.yaml").write_text("data: {depth_min_ratio: 0.6}\n")
    assert find_card(cache, path, None) is None
    deep = prepare(path, folder, contract=contract_beside(path))
    assert find_card(cache, path, None) == (folder, deep)
    assert all(cut.compute_share >= 0.6 for cut in deep.cuts)


def test_what_was_made_of_a_file_that_is_another_now_or_gone_is_removed_and_nothing_else(tmp_path: Path) -> None:
    cache, repository = tmp_path / "cache", tmp_path / "models"

    def made(path: Path, text: str = MODEL) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(onnx.parser.parse_model(text), path)
        folder = folder_for(cache, model_digest(path)[0], path)
        prepare(path, folder)
        return folder

    served, other, elsewhere = repository / "m/1/model.onnx", repository / "n/1/model.onnx", tmp_path / "x.onnx"
    former, kept = made(served), [made(other), made(elsewhere)]
    gone, in_use = made(repository / "gone/1/model.onnx"), made(repository / "used/1/model.onnx")
    for folder in ("gone", "used"):
        (repository / folder / "1/model.onnx").unlink()
    elsewhere.unlink()  # no business of this repository
    now = made(served, MODEL.replace("Exp", "Abs"))
    assert former != now
    remove_former(cache, served, repository, in_use={in_use})
    assert sorted((cache / "models").iterdir()) == sorted([now, in_use, *kept])
    assert not gone.exists()
    assert find_card(cache, served, None) is not None


def test_a_card_that_lacks_a_cut_of_the_calibration_beside_the_model_is_made_again_once(tmp_path: Path) -> None:
    path, cache = tmp_path / "models/m/1/model.onnx", tmp_path / "cache"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(MODEL), path)
    digest = model_digest(path)[0]
    folder = folder_for(cache, digest, path)
    prepare(path, folder)
    sidecar = path.with_name(CALIBRATION_FILE)
    sidecar.write_bytes(b"damaged")  # whoever uses it says so; the card is as good as before
    assert find_card(cache, path, sidecar_beside(path, None).calibration) is not None
    spec = TensorSpec(name="a", dtype="FP32", shape=(4,))
    point = Point(level=3, mean_bytes=30.0, p95_bytes=30.0, fidelity={}, fidelity_high={})
    calibration = Calibration(
        model=digest,
        inputs=2,
        tables={CutId("0123456789ab"): CutTables(tensors=(TensorTables(spec=spec, klt=None),), node_bitmap="01")},
        curves={CutId("0123456789ab"): Curve(points=(point,), inputs=2)},
    )
    write_calibration(replace(calibration, model=ModelDigest("sha256:" + "00" * 32)), sidecar)
    assert find_card(cache, path, sidecar_beside(path, None).calibration) is not None  # of another model
    write_calibration(calibration, sidecar)
    assert find_card(cache, path, sidecar_beside(path, None).calibration) is None
    card = prepare(path, folder)  # the bitmap is of another cut, which is said and not tried for ever
    assert find_card(cache, path, sidecar_beside(path, None).calibration) == (folder, card)
    sidecar.unlink()
    assert find_card(cache, path, sidecar_beside(path, None).calibration) == (folder, card)
