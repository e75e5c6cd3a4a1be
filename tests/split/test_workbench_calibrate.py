"""Calibration of models written out as text: what is known of their best transform by hand is what is found."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from agent.cli import run
from agent.commands.calibrate import _table
from split.codec.calibration import Calibration, Klt, read_calibration
from split.codec.core import core_in_use, load
from split.codec.fidelity import divergence
from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.errors import EngineFailed, InvalidModel, InvalidRequest, ModelUnavailable
from split.ids import CutId
from split.profiles.contract import Contract, Data, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.runtime.engine import Segment
from split.runtime.segment import OrtEngine
from split.tensor import Array
from split.workbench.calibrate import calibrate
from split.workbench.coded_cut import CodedCut
from split.workbench.klt_tables import Statistics
from split.workbench.sources import Request

NET = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 3, 16, 16] x) => (float[n, 5] y)
    <float[8, 3, 3, 3] W1, float[4, 8, 1, 1] W2, float[8, 4, 1, 1] W3, float[5, 8] W4>
    {
      a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, W1)  r = Relu(a)
      narrow = Conv(r, W2)
      wide = Conv(narrow, W3)  s = Relu(wide)
      p = GlobalAveragePool(s)  f = Flatten(p)  y = Gemm<transB = 1>(f, W4)
    }"""
"""A bottleneck of four channels; what reads it looks at three of them."""

BOUND = 0.05
CLOSE = Contract(data=Data(fidelity=Fidelity(measure="relative", bound=BOUND)))


def weights_of(text: str, seed: int = 7) -> onnx.ModelProto:
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(seed)
    for value in proto.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = random.normal(0, 1.5 / math.sqrt(math.prod(shape[1:])), shape).astype(np.float32)
        if value.name == "W3":
            weight[:, 3] = 0  # nobody looks at the fourth channel
        if value.name == "W4":
            weight *= 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
    del proto.graph.value_info[:]
    return proto


def smooth(count: int, seed: int = 3) -> Array:
    """FP32 [count, 3, 16, 16]: waves of a few pixels, as photographs are smooth."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:16, :16] / 16
    rows = []
    for _ in range(count):
        kx, ky, phase, size = random.uniform(0, 2, (4, 3, 1, 1))
        rows.append(size * np.sin(2 * np.pi * (kx * x + ky * y) + 3 * phase) + random.normal(0, 0.05, (3, 16, 16)))
    return np.array(rows, np.float32)


@dataclass(frozen=True)
class Place:
    model: Path
    inputs: Path
    out: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("net")
    onnx.save(weights_of(NET), folder / "model.onnx")
    np.savez(folder / "inputs.npz", x=smooth(12))
    return Place(folder / "model.onnx", folder / "inputs.npz", folder / "calibration.isthmus")


def calibrated(place: Place, out: Path | None = None, contract: Contract | None = CLOSE) -> Calibration:
    return calibrate(
        place.model, place.inputs, out or place.out, contract=contract, engine=OrtEngine(), threads=1, now_s=lambda: 0.0
    )


@pytest.fixture(scope="module")
def made(place: Place) -> Calibration:
    calibrated(place)
    found = read_calibration(place.out, None)
    assert found is not None
    return found


def narrow_klt(calibration: Calibration) -> tuple[str, Klt]:
    """The bottleneck's."""
    for cut, tables in calibration.tables.items():
        if [one.spec.name for one in tables.tensors] == ["narrow"]:
            klt = tables.tensors[0].klt
            assert klt is not None
            return cut, klt
    raise AssertionError("the bottleneck is not among the cuts")


def test_the_bottleneck_before_its_expansion_is_chosen_though_no_candidate_of_raw_bytes_need_be(
    made: Calibration,
) -> None:
    _, klt = narrow_klt(made)
    assert (klt.layout, klt.channels, klt.block) == ("NCHW", 4, (8, 8))


def test_a_channel_that_nobody_looks_at_costs_no_bits_and_comes_back_as_its_mean(made: Calibration) -> None:
    cut, klt = narrow_klt(made)
    assert klt.components == 3
    assert not klt.transform[:, 3].any()
    assert not klt.inverse[3].any()
    coder = BoundaryTables(made.tables[cut], made.digest)
    array = np.random.default_rng(0).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)
    louder = array.copy()
    louder[:, 3] *= 1e6
    one, other = (b"".join(encode_klt({"narrow": given}, coder, 100)) for given in (array, louder))
    assert one == other
    back = decode_klt(one, coder, max_bytes=1 << 20)["narrow"]
    np.testing.assert_allclose(back[0, 3], klt.mean[3], rtol=1e-6)


def test_curves_cost_more_bytes_the_finer_the_step_and_end_far_inside_the_bound(made: Calibration) -> None:
    assert made.inputs == 12
    assert made.pictures == {}
    assert made.sizes == ((1, 1),)  # the batch
    for curve in made.curves.values():
        assert curve.inputs == 12  # each is held out once
        assert len(curve.points) >= 4
        levels = [point.level for point in curve.points]
        assert all(finer < coarser + 4 for coarser, finer in pairwise(levels))  # of a dozen, neighbours may change
        assert levels[-1] < levels[0] - 8
        assert curve.points[-1].fidelity["relative"] < BOUND / 4 < BOUND < curve.points[0].fidelity["relative"]
        assert all(point.p95_bytes >= point.mean_bytes * 0.9 for point in curve.points)
        assert set(curve.points[0].fidelity) >= {"kl", "relative", "cosine", "top1"}


def test_other_inputs_of_the_kind_cost_and_lose_about_what_the_curve_says(made: Calibration, place: Place) -> None:
    cut, _ = narrow_klt(made)
    curve = made.curves[cut]  # type: ignore[index]  # a CutId
    point = curve.within("relative", BOUND)
    assert point is not None
    proto = onnx.load(place.model)
    proto.graph.output.extend([onnx.helper.make_tensor_value_info("narrow", 1, ["n", 4, 8, 8])])
    whole = onnx.load(place.model)
    import onnxruntime as ort

    seen = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    tail = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(whole)).extract_model(["narrow"], ["y"])
    finish = ort.InferenceSession(tail.SerializeToString(), providers=["CPUExecutionProvider"])
    coder = BoundaryTables(made.tables[cut], made.digest)  # type: ignore[index]  # a CutId
    sizes, off = [], []
    for row in smooth(40, seed=99):
        y, narrow = seen.run(["y", "narrow"], {"x": row[None]})
        payload = b"".join(encode_klt({"narrow": narrow}, coder, point.level))
        sizes.append(len(payload))
        back = decode_klt(payload, coder, max_bytes=1 << 20)["narrow"]
        off.append(divergence("relative", finish.run(["y"], {"narrow": back})[0], y))
    assert np.mean(sizes) == pytest.approx(point.mean_bytes, rel=0.15)
    assert np.mean(off) < 1.5 * BOUND


def test_the_same_inputs_give_the_same_file(place: Place, made: Calibration, tmp_path: Path) -> None:
    calibrated(place, tmp_path / "again.isthmus")
    assert (tmp_path / "again.isthmus").read_bytes() == place.out.read_bytes()


@pytest.mark.parametrize(("between", "by"), [("Relu", "weights"), ("Tanh", "variance")])
def test_without_time_the_transform_goes_by_the_weights_that_read_it_or_else_by_variance_and_says_so(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    between: str,
    by: str,
) -> None:
    text = NET.replace("wide = Conv(narrow, W3)", f"bent = {between}(narrow)  wide = Conv(bent, W3)")
    onnx.save(weights_of(text), tmp_path / "model.onnx")
    monkeypatch.setattr("split.workbench.calibration_budget.PROBES_SHARE", 0.0)
    with caplog.at_level(logging.WARNING):
        made = calibrated(Place(tmp_path / "model.onnx", place.inputs, tmp_path / "out"))
    assert "0 of 12 inputs were asked how the outputs move" in caplog.text
    told = {"weights": "the weights of the layers that read it", "variance": "variance alone"}
    assert f"its transform goes by {told[by]}" in caplog.text
    found = read_calibration(tmp_path / "out", made.model)
    assert found is not None
    cut, klt = narrow_klt(found)
    assert found.tables[CutId(cut)].tensors[0].weighed_by == by
    [line] = [line for line in _table(tmp_path / "out", found, CLOSE.data.fidelity) if line.startswith(cut)]
    assert f"  {by:8}  narrow" in line
    if by == "weights":
        assert not klt.transform[:, 3].any()  # no weight reads the fourth channel
        return
    assert klt.components == 4  # nothing was learnt of it
    gram = klt.transform.astype(np.float64) @ klt.transform.T.astype(np.float64)
    np.testing.assert_allclose(gram, np.eye(4) * gram[0, 0], atol=1e-3 * gram[0, 0])  # a rotation in one scale


def test_a_contract_that_keeps_inputs_and_depth_gets_cuts_that_do(place: Place, tmp_path: Path) -> None:
    deep = Contract(data=Data(depth_min_ratio=0.9, fidelity=Fidelity(measure="kl", bound=0.01)))
    found = calibrated(place, tmp_path / "deep.isthmus", deep)
    assert all("narrow" not in {one.spec.name for one in tables.tensors} for tables in found.tables.values())


def test_a_model_that_says_only_what_it_finds_is_calibrated_by_its_weights(tmp_path: Path) -> None:
    """Its output is as long as what it finds: no derivative tells of it."""
    text = NET.replace("float[n, 5] y", "float[k] y").replace(
        "p = GlobalAveragePool(s)  f = Flatten(p)  y = Gemm<transB = 1>(f, W4)",
        """low = Constant<value = float {0.6}>()  flat = Constant<value = int64[1] {-1}>()
        z = Reshape(s, flat)  above = Greater(z, low)  y = Compress<axis = 0>(z, above)""",
    )
    onnx.save(weights_of(text.replace(", float[5, 8] W4", "")), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", x=smooth(6))
    found = calibrated(Place(tmp_path / "model.onnx", tmp_path / "inputs.npz", tmp_path / "out"))
    cut, klt = narrow_klt(found)
    assert found.tables[CutId(cut)].tensors[0].weighed_by == "weights"
    assert klt.components == 3


@pytest.mark.parametrize(("out", "words"), [("gone/out", "its folder must be there"), ("", "is no file")])
def test_where_nothing_can_be_written_is_said_before_anything_is_read(tmp_path: Path, out: str, words: str) -> None:
    """Neither the model nor the inputs are there."""
    place = Place(tmp_path / "model.onnx", tmp_path / "inputs.npz", tmp_path / out)
    (tmp_path / "model.onnx").touch()
    told: list[str] = []
    with pytest.raises(ModelUnavailable, match=words):
        calibrate(
            place.model,
            place.inputs,
            place.out,
            contract=None,
            engine=cast(Any, None),
            threads=1,
            on_progress=lambda stage, ratio: told.append(stage),
        )
    assert told == []


def test_a_model_without_cuts_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", x=np.arange(8, dtype=np.float32).reshape(4, 2))
    with pytest.raises(InvalidModel, match="no cut to calibrate"):
        calibrated(Place(tmp_path / "model.onnx", tmp_path / "inputs.npz", tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.npz", "model.onnx"]


def test_pictures_are_measured_as_jpeg_and_webp_by_the_same_measures(place: Place, tmp_path: Path) -> None:
    folder, random = tmp_path / "pictures", np.random.default_rng(5)
    folder.mkdir()
    for number in range(8):
        coarse = random.integers(0, 256, (4, 5, 3)).astype(np.uint8)
        Image.fromarray(coarse).resize((40, 32), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    spec = ImageSpec(resize=18, crop=16, mean=(127.0,) * 3, std=(60.0,) * 3)
    data = Data(inputs=(InputContract(name="x", encoded=spec),), fidelity=Fidelity(measure="kl", bound=0.05))
    found = calibrate(
        place.model,
        folder,
        tmp_path / "out",
        contract=Contract(data=data),
        engine=OrtEngine(),
        threads=1,
        now_s=lambda: 0.0,
    )
    assert set(found.pictures) == {"jpeg", "webp"}
    for curve in found.pictures.values():
        assert curve.inputs == found.curves[next(iter(found.curves))].inputs == 24
        assert [point.mean_bytes for point in curve.points] == sorted(point.mean_bytes for point in curve.points)
        assert curve.points[-1].fidelity["relative"] < curve.points[0].fidelity["relative"]


def test_what_fails_among_the_pictures_leaves_no_session_open(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (20, 20), (40 * number, 0, 90)).save(folder / f"{number}.png")
    opened: list[Segment] = []
    closed: list[Segment] = []

    class Counting(OrtEngine):
        def open(self, path: Path, *, threads: int, spin_us: int = 0) -> Segment:
            segment = super().open(path, threads=threads, spin_us=spin_us)
            close = segment.close
            monkeypatch.setattr(segment, "close", lambda: (closed.append(segment), close()))
            opened.append(segment)
            return segment

    def broken(*_: Any, **__: Any) -> list[Any]:
        raise EngineFailed("out of memory")

    monkeypatch.setattr("split.workbench.coded_pictures.trace", broken)
    spec = ImageSpec(resize=18, crop=16, mean=(127.0,) * 3, std=(60.0,) * 3)
    data = Data(inputs=(InputContract(name="x", encoded=spec),), fidelity=Fidelity(measure="kl", bound=0.05))
    with pytest.raises(EngineFailed):
        calibrate(
            place.model,
            folder,
            tmp_path / "out",
            contract=Contract(data=data),
            engine=Counting(),
            threads=1,
            now_s=lambda: 0.0,
        )
    assert opened
    assert all(segment in closed for segment in opened)


def test_the_command_writes_beside_the_model_and_prints_each_cut_at_the_contracts_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = tmp_path / "net" / "1"
    version.mkdir(parents=True)
    onnx.save(weights_of(NET), version / "model.onnx")
    (tmp_path / "net" / "contract.yaml").write_text(
        "data: {codecs: [raw, klt], fidelity: {measure: relative, bound: 0.05}}\n"
    )
    np.savez(tmp_path / "inputs.npz", x=smooth(12))
    assert run(["calibrate", "net", "--models", str(tmp_path), "--inputs", str(tmp_path / "inputs.npz"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = read_calibration(version / "calibration.isthmus", shown["digest"])
    assert found is not None
    assert (shown["calibration_digest"], shown["inputs"]) == (found.digest, 12)
    assert {cut["id"] for cut in shown["cuts"]} == set(found.tables)
    assert shown["cuts"][0]["boundary"][0]["name"] == "a"  # the shallowest first
    assert all(cut["curve"]["points"] for cut in shown["cuts"])

    curves = {
        cut: msgspec.structs.replace(
            curve,
            points=tuple(
                msgspec.structs.replace(one, fidelity={"relative": 0.01}, fidelity_high={"relative": 0.01 * wide})
                for one in curve.points
            ),
        )
        for wide, (cut, curve) in zip((1.2, 2.4), found.curves.items(), strict=False)
    }
    tables = {cut: found.tables[cut] for cut in curves}
    wide = replace(found, tables=tables, curves=curves)
    asked = Fidelity(measure="relative", bound=0.05)
    lines = list(_table(version / "calibration.isthmus", wide, asked))
    assert any("0.01      0.024" in line for line in lines)
    assert lines[-1].startswith("12 inputs: the bound is held with a wide margin; more of them")
    first = dict(list(curves.items())[:1])
    narrow = replace(found, tables={cut: tables[cut] for cut in first}, curves=first)
    assert "margin" not in list(_table(version / "calibration.isthmus", narrow, asked))[-1]


def test_the_command_refuses_bad_inputs_by_name_and_leaves_the_old_calibration(
    place: Place, made: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = place.out.read_bytes()
    np.savez(tmp_path / "bad.npz", x=np.full((4, 3, 16, 16), np.nan, np.float32))
    assert run(["calibrate", str(place.model), "--inputs", str(tmp_path / "bad.npz")]) == 1
    complaint = capsys.readouterr().err
    assert "bad.npz: row 0: input 'x' has values that are not finite" in complaint
    assert place.out.read_bytes() == before


def test_inputs_of_the_wrong_shape_are_refused(place: Place, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", x=smooth(4)[:, :, :8])
    with pytest.raises(InvalidRequest, match=r"wrong\.npz: tensor 'x' must have shape \[-1, 3, 16, 16\]"):
        calibrated(Place(place.model, tmp_path / "wrong.npz", tmp_path / "out"))


def test_of_a_model_too_slow_for_the_budget_fewer_cuts_are_calibrated_on_fewer_inputs(
    place: Place, made: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(made.tables) == 3
    monkeypatch.setattr("split.workbench.calibration_budget.CURVE_FLOPS", 1.0)
    monkeypatch.setattr("split.workbench.calibration_budget.CUTS_MIN", 2)
    found = calibrated(place, tmp_path / "slow.isthmus")
    assert len(found.tables) == 2
    assert {curve.inputs for curve in found.curves.values()} == {6}


def test_a_file_too_big_to_be_read_goes_without_its_largest_cuts(
    place: Place, made: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("split.codec.calibration.FILE_BYTES_MAX", place.out.stat().st_size - 1)
    calibrated(place, tmp_path / "big.isthmus")
    found = read_calibration(tmp_path / "big.isthmus", made.model)
    assert found is not None
    sizes = {cut: sum(klt_bytes(one.klt) for one in tables.tensors) for cut, tables in made.tables.items()}
    assert made.tables.keys() - found.tables.keys() == {max(sizes, key=lambda cut: sizes[cut])}
    assert found.curves.keys() == found.tables.keys()
    assert "whose tables are the largest, is left out: the calibration is not used: it has more than" in caplog.text


def klt_bytes(klt: Klt | None) -> int:
    return 0 if klt is None else klt.transform.nbytes + klt.inverse.nbytes + klt.scales.nbytes


def test_a_cut_whose_tables_could_not_be_read_again_is_left_out(
    place: Place, made: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("split.codec.calibration.CHANNELS_MAX", 4)
    found = calibrated(place, tmp_path / "few.isthmus")
    assert [one.spec.name for tables in found.tables.values() for one in tables.tensors] == ["narrow"]
    assert "is left out: the calibration is not used: tensor 'a' has" in caplog.text


def test_of_boundaries_too_large_to_keep_one_request_of_each_fold_is_learnt_from(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[list[int]] = []
    learn = CodedCut.learn

    def counted(self: CodedCut, requests: Sequence[tuple[int, Request]], **rest: Any) -> None:
        learnt.append([fold for fold, _ in requests])
        learn(self, requests, **rest)

    monkeypatch.setattr(CodedCut, "learn", counted)
    monkeypatch.setattr("split.workbench.calibrate.LEARNT_BYTES_MAX", 1)
    found = calibrated(place, tmp_path / "large.isthmus")
    assert learnt == [[0, 1, 2]] * len(found.tables)
    assert {curve.inputs for curve in found.curves.values()} == {12}


@pytest.mark.parametrize("calls", [1, 60])
def test_when_time_is_out_what_was_measured_by_then_is_written(
    place: Place, made: Calibration, tmp_path: Path, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = chain(repeat(0.0, calls), repeat(1e9))
    calibrate(
        place.model,
        place.inputs,
        tmp_path / "late.isthmus",
        contract=CLOSE,
        engine=OrtEngine(),
        threads=1,
        now_s=lambda: next(clock),
    )
    found = read_calibration(tmp_path / "late.isthmus", made.model)
    assert found is not None
    [(cut, curve)] = found.curves.items()
    assert 1 <= len(curve.points) < len(made.curves[cut].points)
    assert caplog.text.count("is left out: there was no time for it") == 2


def test_the_budget_is_counted_in_time_of_this_thread_whatever_the_runtime_may_use(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided by the threads of the runtime, what numpy does on one of them would count a quarter."""
    monkeypatch.setattr("time.thread_time", chain(repeat(0.0, 1), repeat(1e9)).__next__)
    found = calibrate(place.model, place.inputs, tmp_path / "out", contract=CLOSE, engine=OrtEngine(), threads=2)
    assert len(found.tables) == 1


def test_of_a_model_with_very_many_boundaries_the_ranking_looks_at_fewer_channels(
    place: Place, made: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    add = Statistics.add

    def counted(self: Statistics, array: Array) -> None:
        looked_at.append(array.shape[1])
        add(self, array)

    monkeypatch.setattr("split.workbench.worth_coding.RANKED_COST_MAX", 1.0)
    monkeypatch.setattr("split.workbench.worth_coding.RANKED_CHANNELS_MIN", 2)
    monkeypatch.setattr(Statistics, "add", counted)
    monkeypatch.setattr("split.workbench.calibration_budget.choose", lambda worth, *_, **__: [])
    with pytest.raises(InvalidModel):
        calibrated(place, tmp_path / "many.isthmus")
    assert set(looked_at) == {2}


@pytest.mark.skipif(isinstance(load(), str), reason="no compiled core to compare with")
def test_the_command_makes_the_same_file_without_the_compiled_core(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for native in ("1", "0"):
        monkeypatch.setenv("ISTHMUS_NATIVE", native)  # for the child that does it
        assert core_in_use().startswith("plain Python") == (native == "0")
        out = tmp_path / native
        assert run(["calibrate", str(place.model), "--inputs", str(place.inputs), "--out", str(out)]) == 0
        made.append(out.read_bytes())
    assert made[0] == made[1]
