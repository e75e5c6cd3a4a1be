"""From a file to a folder of parts: what lies there, what is refused, what only a run can tell."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from split.codec.calibration import Calibration, Curve, CutTables, TensorTables, write_calibration
from split.errors import CutRefused, InvalidModel, InvalidRequest
from split.graph.candidates import Candidates
from split.graph.card import CARD_VERSION, read_card, read_cut
from split.graph.cuts import bitmap_of, cut_from_nodes
from split.graph.load import load_model
from split.graph.model import Model
from split.ids import CutId, ModelDigest
from split.profiles.contract import Contract, Data, Fidelity, Resource
from split.profiles.measured import Point
from split.runtime.segment import OrtEngine
from split.tensor import TensorSpec
from split.workbench.check import check_cuts
from split.workbench.cut import folder_for, list_cuts, part, prepare

DYNAMIC = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 512] x) => (float[n, 256] y)
    { a = Mul(x, W)  ra = Relu(a)  b, rest = Split<axis = 1, num_outputs = 2>(ra)  y = Neg(b) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(DYNAMIC)
    proto.graph.initializer.append(numpy_helper.from_array(np.linspace(-1, 1, 512, dtype=np.float32), "W"))
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_prepared_folder_holds_the_card_the_halves_and_the_weights_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    card = prepare(model, folder)
    assert read_card(folder) == card
    assert card.path == str(model)
    assert [(spec.name, spec.shape) for spec in card.inputs] == [("x", ("n", 512))]
    expected = {f"{cut.id}.{half}.onnx" for cut in card.cuts for half in ("head", "tail")}
    assert {path.name for path in folder.iterdir()} == expected | {"card.json", "weights.bin"}
    assert (folder / "weights.bin").stat().st_size == 2048


def test_halves_of_a_dynamic_model_serve_every_size(model: Path, tmp_path: Path) -> None:
    card = prepare(model, tmp_path / "parts", dims={"n": 3})
    engine = OrtEngine()
    whole = engine.open(model, threads=1)
    for cut in card.cuts:
        head = engine.open(tmp_path / "parts" / f"{cut.id}.head.onnx", threads=1)
        tail = engine.open(tmp_path / "parts" / f"{cut.id}.tail.onnx", threads=1)
        for n in (1, 3, 7):
            x = np.arange(n * 512, dtype=np.float32).reshape(n, 512)
            np.testing.assert_allclose(tail.run(head.run({"x": x}))["y"], whole.run({"x": x})["y"], rtol=1e-6)


def test_listed_bytes_follow_the_inputs(model: Path) -> None:
    one = list_cuts(model)
    five = list_cuts(model, inputs={"x": np.zeros((5, 512), dtype=np.float32)})
    assert [cut["id"] for cut in one["cuts"]] == [cut["id"] for cut in five["cuts"]]
    last_one, last_five = one["cuts"][-1], five["cuts"][-1]
    assert last_one["boundary"] == [{"name": "b", "dtype": "FP32", "shape": [1, 256]}]
    assert last_five["boundary"] == [{"name": "b", "dtype": "FP32", "shape": [5, 256]}]
    assert last_five["bytes"]["raw"] - last_one["bytes"]["raw"] == 4 * 256 * 4
    assert last_five["bytes"]["fp16"] - last_one["bytes"]["fp16"] == 4 * 256 * 2


def test_what_the_contract_asks_of_cuts_is_asked_of_the_candidates(model: Path, tmp_path: Path) -> None:
    free = prepare(model, tmp_path / "free")
    assert free.demands == ""
    assert [cut.head_weight_bytes for cut in free.cuts] == [2048] * len(free.cuts)  # W, in the first node
    assert min(cut.compute_share for cut in free.cuts) < 0.7
    deep = prepare(model, tmp_path / "deep", contract=Contract(data=Data(depth_min_ratio=0.7)))
    assert deep.cuts
    assert min(cut.compute_share for cut in deep.cuts) >= 0.7
    assert '"depth_min_ratio":0.7' in deep.demands
    light = prepare(model, tmp_path / "light", contract=Contract(resource=Resource(memory_bytes=2047)))
    assert light.cuts == ()
    assert light.no_cuts_reason.startswith("no cut meets what the contract asks of it: ")
    assert light.no_cuts_reason.endswith(": at most 2,047 bytes of weights in the head (resource.memory_bytes)")
    whole = prepare(model, tmp_path / "whole", contract=Contract(data=Data(depth_min_ratio=1.0)))
    assert whole.no_cuts_reason.endswith(": at least 100 % of the compute in the head (data.depth_min_ratio)")
    hidden = prepare(model, tmp_path / "hidden", contract=Contract(data=Data(privacy="no-raw-input")))
    assert hidden.cuts == ()  # no value of it is a sum: all show x
    assert list_cuts(model, contract=Contract(resource=Resource(memory_bytes=2047)))["cuts"] == []


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((2, 512), dtype=np.float64)}, "must have datatype FP32, got FP64"),
        ({"x": np.zeros((2, 511), dtype=np.float32)}, "must have shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, inputs: dict[str, np.ndarray], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        prepare(model, tmp_path / "parts", inputs=inputs)


def test_a_given_cut_is_made_on_demand_and_its_card_kept(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    wanted = cut_from_nodes(loaded, ["a"])
    bitmap = bitmap_of(wanted.mask, len(loaded.nodes))
    card = part(model, tmp_path / "parts", wanted.id, bitmap)
    assert (card.id, card.node_bitmap) == (wanted.id, bitmap)
    assert [spec.name for spec in card.boundary] == ["a"]
    assert read_cut(tmp_path / "parts", wanted.id) == card
    assert (tmp_path / "parts" / f"{wanted.id}.tail.onnx").is_file()


@pytest.mark.parametrize("half", ["head.onnx", "tail.onnx", "json"])
@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_a_cut_made_on_demand_that_is_damaged_is_to_be_made_again(
    model: Path, tmp_path: Path, half: str, content: bytes | None
) -> None:
    loaded = load_model(model)
    wanted = cut_from_nodes(loaded, ["a"])
    bitmap = bitmap_of(wanted.mask, len(loaded.nodes))
    card = part(model, tmp_path / "parts", wanted.id, bitmap)
    damaged = tmp_path / "parts" / f"{wanted.id}.{half}"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    with pytest.raises(InvalidModel, match="damaged"):
        read_cut(tmp_path / "parts", wanted.id)
    assert part(model, tmp_path / "parts", wanted.id, bitmap) == card
    assert read_cut(tmp_path / "parts", wanted.id) == card


def test_a_cut_made_on_demand_by_another_version_is_to_be_made_again(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    wanted = cut_from_nodes(loaded, ["a"])
    part(model, tmp_path / "parts", wanted.id, bitmap_of(wanted.mask, len(loaded.nodes)))
    path = tmp_path / "parts" / f"{wanted.id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": CARD_VERSION - 1}))
    with pytest.raises(InvalidModel, match="another version"):
        read_cut(tmp_path / "parts", wanted.id)


def test_a_card_with_a_type_that_is_none_is_damaged(model: Path, tmp_path: Path) -> None:
    prepare(model, tmp_path / "parts")
    path = tmp_path / "parts" / "card.json"
    path.write_text(path.read_text().replace("FP32", "FP33"))
    with pytest.raises(InvalidModel, match="damaged"):
        read_card(tmp_path / "parts")


def test_a_bitmap_of_another_cut_is_refused(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    wanted, other = cut_from_nodes(loaded, ["a"]), cut_from_nodes(loaded, ["a", "ra"])
    with pytest.raises(CutRefused, match=f"means {other.id} in sha256:.* the models differ"):
        part(model, tmp_path / "parts", wanted.id, bitmap_of(other.mask, len(loaded.nodes)))


def test_a_card_read_back_from_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="make the cut again"):
        read_cut(tmp_path, CutId("0123456789ab"))


def test_an_output_whose_type_nothing_declares_is_learnt_by_running(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[3] x) => (y) { a = com.microsoft.Gelu(x)  y = com.microsoft.Gelu(a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    card = prepare(tmp_path / "model.onnx", tmp_path / "parts")
    assert [(spec.name, spec.dtype, spec.shape) for spec in card.outputs] == [("y", "FP32", (3,))]


def test_one_model_at_two_places_has_two_folders(tmp_path: Path) -> None:
    folders = {folder_for(tmp_path, ModelDigest("sha256:00"), tmp_path / name) for name in ("a.onnx", "b.onnx")}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "models"}


DEEP = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[1, 64] x) => (float[1, 2] y) { a = MatMul(x, W)  b = Abs(a)  c = MatMul(b, V)  y = Neg(c) }"""


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of which the search finds the last cut alone."""

    def last(model: Model, **_: object) -> Candidates:
        return Candidates(cuts=(cut_from_nodes(model, "abc"),), corners=0, beyond_limit=0, dropped=0)

    monkeypatch.setattr("split.workbench.cut.find_candidates", last)
    proto = onnx.parser.parse_model(DEEP)
    for name, shape in (("W", (64, 64)), ("V", (64, 2))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def calibrated_at(path: Path, key: str, **changes: str) -> CutId:
    """Lay a calibration beside the model, of the cut whose last node this is."""
    model = load_model(path)
    cut = cut_from_nodes(model, ["a", "b", "c"][: "abc".index(key) + 1])
    spec = TensorSpec(name=key, dtype="FP32", shape=(1, 64))
    bitmap = changes.get("bitmap", bitmap_of(cut.mask, len(model.nodes)))
    points = tuple(
        Point(
            level=n, mean_bytes=1000.0 / n, p95_bytes=2000.0, fidelity={"kl": 0.01 * n}, fidelity_high={"kl": 0.01 * n}
        )
        for n in (9, 3)
    )
    calibration = Calibration(
        model=ModelDigest(changes.get("digest", model.digest)),
        inputs=2,
        tables={cut.id: CutTables(tensors=(TensorTables(spec=spec, klt=None),), node_bitmap=bitmap)},
        curves={cut.id: Curve(points=points, inputs=2)},
    )
    write_calibration(calibration, path.with_name("calibration.isthmus"))
    return cut.id


def test_cuts_of_the_calibration_beside_the_model_are_made_listed_and_checked(deep: Path, tmp_path: Path) -> None:
    path, before = deep, prepare(deep, tmp_path / "before")
    cut = calibrated_at(path, "a")
    assert cut not in {one.id for one in before.cuts}
    card = prepare(path, tmp_path / "parts")
    assert card.calibrated == (cut,)
    assert [(one.id, one.nodes) for one in card.cuts] == [(cut, 1), (before.cuts[0].id, 3)]
    assert (tmp_path / "parts" / f"{cut}.tail.onnx").is_file()
    contract = Contract(data=Data(fidelity=Fidelity(measure="kl", bound=0.05)))
    [listed] = [one for one in list_cuts(path, contract=contract)["cuts"] if one["id"] == cut]
    assert (listed["klt"]["level"], listed["klt"]["mean_bytes"]) == (3, pytest.approx(1000 / 3))
    assert all("klt" not in one for one in list_cuts(path)["cuts"])  # no contract, no bound
    assert cut in {one["id"] for one in check_cuts(path) if one["legal"] and one["max_rel"] == 0.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "sha256:" + "00" * 32}, "it belongs to the model sha256:000"),
        ({"bitmap": "03"}, "is left out: it means another cut here"),
        ({"bitmap": "02"}, "is left out: the cut keeps 'b' on the device but not 'a'"),
    ],
)
def test_a_calibration_of_another_model_or_cut_gives_no_cuts_and_a_warning(
    deep: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, str], words: str
) -> None:
    path, before = deep, prepare(deep, tmp_path / "before")
    calibrated_at(path, "a", **changes)
    card = prepare(path, tmp_path / "parts")
    assert [cut.id for cut in card.cuts] == [cut.id for cut in before.cuts]
    assert words in caplog.text
