"""Profiles of models written out as text, halves cut by hand; expected fidelity comes from numpy's own rounding."""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from agent.commands import profile as command
from split.codec.calibration import CALIBRATION_FILE, encode_calibration
from split.codec.golden import golden_inputs
from split.codec.payload import decode, encode
from split.errors import InvalidModel, ModelUnavailable
from split.graph.card import CutCard, ModelCard, write_card
from split.ids import CutId, ModelDigest
from split.plan.plan import Placement, Plan, RequestFacts
from split.plan.predict import sent_bytes
from split.plan.table import PlanTable
from split.profiles.contract import Contract, Data, InputContract, contract_beside
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import GOLDEN_RUNS, GoldenRuns, ModelProfile, Tuning, read_golden_runs, read_profile
from split.runtime.engine import Segment, Stop
from split.runtime.segment import OrtEngine, OrtSegment
from split.tensor import Array, Tensors, TensorSpec
from split.workbench.child import run_child_sync
from split.workbench.cut import prepare
from split.workbench.golden import profile_basis, typical_jpeg
from split.workbench.profile import profile_model
from tests import calibrated_model

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
WHOLE = f"{HEADER} g (float[N, 1024] x) => (float[N, 1024] y) {{ a = Neg(x) y = Neg(a) }}"
HEAD = f"{HEADER} h (float[N, 1024] x) => (float[N, 1024] a) {{ a = Neg(x) }}"
TAIL = f"{HEADER} t (float[N, 1024] a) => (float[N, 1024] y) {{ y = Neg(a) }}"
X = TensorSpec(name="x", dtype="FP32", shape=("N", 1024))
Y = TensorSpec(name="y", dtype="FP32", shape=("N", 1024))
TAIL_OF_TWO = (
    f"{HEADER} t (float[N, 1024] a) => (float[N, 1024] y) <float[2, 1] two = {{1, 1}}> {{ b = Neg(a) y = Mul(b, two) }}"
)
"""Right for a batch of two, of another shape for a batch of one."""
FACTS = RequestFacts(budget_ms=1e9)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.parser.parse_model(text), path)


def cut_at(name: str, spec: TensorSpec) -> CutCard:
    return CutCard(
        id=CutId(name),
        boundary=(spec,),
        head_inputs=("x",),
        head_outputs=(),
        tail_inputs=(),
        shown_inputs=(),
        tail_outputs=("y",),
        nodes=1,
        compute_share=0.5,
        node_bitmap="01",
    )


def card_of(path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], *cuts: CutCard) -> ModelCard:
    return ModelCard(
        digest=ModelDigest("sha256:" + "0" * 64),
        path=str(path),
        files=((path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()),),
        inputs=inputs,
        outputs=outputs,
        nodes=2,
        opset=17,
        cuts=cuts,
    )


def lay_out(folder: Path, *, tail: str = TAIL) -> ModelCard:
    """The double negation in a repository, cut in the middle."""
    path = folder / "models/m/1/model.onnx"
    write(path, WHOLE)
    write(folder / "parts/c.head.onnx", HEAD)
    write(folder / "parts/c.tail.onnx", tail)
    return card_of(path, (X,), (Y,), cut_at("c", TensorSpec(name="a", dtype="FP32", shape=("N", 1024))))


def measured(
    card: ModelCard, folder: Path, *, inputs: list[Tensors] | None = None, contract: Contract | None = None
) -> ModelProfile:
    (folder / "parts").mkdir(exist_ok=True)
    one = [Tuning(threads=1)]
    return profile_model(card, folder / "parts", inputs=inputs, contract=contract, engine=OrtEngine(), tunings=one)


def requests(count: int, batch: int = 2) -> list[Tensors]:
    random = np.random.default_rng(1)
    return [{"x": random.normal(size=(batch, 1024)).astype("f4")} for _ in range(count)]


def test_each_part_and_codec_has_its_cost_and_the_file_holds_what_was_returned(tmp_path: Path) -> None:
    profile = measured(lay_out(tmp_path), tmp_path, inputs=requests(1))
    assert profile.dims == {"N": 2}
    assert profile.whole_ms > 0
    assert profile.output_bytes >= 2 * 1024 * 4
    [cut] = profile.cuts
    assert (cut.cut, cut.head_ms > 0, cut.tail_ms > 0) == ("c", True, True)
    raw, half, eighth = cut.codecs
    assert (raw.codec, half.codec, eighth.codec) == ("raw", "fp16", "int8")
    assert 8192 <= raw.bytes <= 8192 + 512
    assert eighth.bytes < half.bytes < raw.bytes
    assert [codec.codec for codec in profile.input_codecs] == ["raw", "fp16", "int8"]
    assert read_profile(tmp_path / "parts") == profile
    here = {
        "digest": profile.digest,
        "runtime": OrtEngine().name,
        "fingerprint": profile.fingerprint,
        "basis": profile_basis(tmp_path / "models/m/1/model.onnx", None),
    }
    assert profile.holds_for(**here)  # type: ignore[arg-type]  # a digest is a str
    for other in here:
        assert not profile.holds_for(**here | {other: "another"})  # type: ignore[arg-type]  # as above


class Replaced(OrtEngine):
    """A runtime that takes so long to open the whole without optimisations that its file is another afterwards."""

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> OrtSegment:
        opened = super().open_optimised(path, threads=threads, spin_us=spin_us, prepack=prepack)
        path.with_name("new").write_bytes(path.read_bytes())
        path.with_name("new").replace(path)
        return opened


def test_the_profile_says_whether_the_rows_of_a_batch_depend_on_each_other(tmp_path: Path) -> None:
    assert measured(lay_out(tmp_path), tmp_path, inputs=requests(1)).rows_apart
    mixed = f"{HEADER} g (float[N, 1024] x) => (float[N, 1024] y) {{ a = Softmax <axis = 0> (x) y = Neg(a) }}"
    write(tmp_path / "mixed/models/m/1/model.onnx", mixed)
    card = card_of(tmp_path / "mixed/models/m/1/model.onnx", (X,), (Y,))
    assert not measured(card, tmp_path / "mixed", inputs=requests(1)).rows_apart


def test_what_was_measured_on_two_files_is_not_kept(tmp_path: Path) -> None:
    card = lay_out(tmp_path)
    with pytest.raises(ModelUnavailable, match="was replaced since it was loaded"):
        profile_model(card, tmp_path / "parts", engine=Replaced(), tunings=[Tuning(threads=1)], inputs=requests(1))
    assert read_profile(tmp_path / "parts") is None


class Unfused(OrtEngine):
    """A runtime that without its optimisations computes a ten-thousandth more."""

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> OrtSegment:
        write(
            path.with_name("unfused.onnx"),
            WHOLE.replace("y = Neg(a)", "b = Neg(a) y = Mul(b, c)").replace(
                "(float[N, 1024] y)", "(float[N, 1024] y) <float[1] c = {1.0001}>"
            ),
        )
        return super().open_optimised(path.with_name("unfused.onnx"), threads=threads, prepack=prepack)


@pytest.mark.parametrize(("engine", "expected"), [(OrtEngine(), 0.0), (Unfused(), 1e-4)])
def test_the_profile_says_how_far_the_model_is_from_itself_without_optimisations(
    tmp_path: Path, engine: OrtEngine, expected: float
) -> None:
    card = lay_out(tmp_path)
    profile = profile_model(card, tmp_path / "parts", inputs=requests(2), engine=engine, tunings=[Tuning(threads=1)])
    assert profile.self_difference == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("step_s", "runs"), [(0.0, 3), (100.0, 1)])
def test_a_slow_model_is_held_against_itself_on_one_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, runs: int
) -> None:
    ran = []

    class Counted(OrtEngine):
        def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> OrtSegment:
            plain = super().open_optimised(path, threads=threads, spin_us=spin_us, prepack=prepack)
            run = plain.run
            monkeypatch.setattr(plain, "run", lambda feeds: (ran.append(path), run(feeds))[1])
            return plain

    given = {"inputs": requests(3), "engine": Counted(), "tunings": [Tuning(threads=1)]}
    profile_model(lay_out(tmp_path), tmp_path / "parts", **given, now_s=Hasty(step_s))  # type: ignore[arg-type]  # each fits
    assert len(ran) == runs


def test_everything_is_measured_with_the_threads_that_were_found_best(tmp_path: Path) -> None:
    card = lay_out(tmp_path)
    slow, quick = Tuning(threads=1), Tuning(threads=2, spin_us=200)
    opened: list[tuple[str, Tuning]] = []

    def open_tuned(name: str, path: Path, feeds: Tensors, tuning: Tuning) -> Segment:
        opened.append((name, tuning))
        segment = OrtEngine().open(path, threads=1)
        return Slow(segment) if tuning == slow else segment

    profile = profile_model(
        card,
        tmp_path / "parts",
        inputs=requests(1),
        engine=OrtEngine(),
        tunings=[slow, quick],
        open_tuned=open_tuned,
    )
    assert profile.tuning == quick
    assert opened == [("whole", slow), *((name, quick) for name in ("whole", "whole", "c.head", "c.tail"))]


class Slow:
    """Runs many times instead of once."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.inputs, self.outputs = segment.inputs, segment.outputs

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        for _ in range(100):
            self._segment.run(feeds, outputs)
        return self._segment.run(feeds, outputs)

    def close(self) -> None:
        self._segment.close()


def test_the_threads_of_the_contract_are_those_of_the_profile(tmp_path: Path) -> None:
    card = lay_out(tmp_path)
    write_card(card, tmp_path / "parts")
    path = Path(card.path)
    contract = path.parent.parent / "contract.yaml"
    contract.write_text("model: m\nresource: {threads: 3}\n")
    run_child_sync(["profile", str(path), "--folder", str(tmp_path / "parts")], timeout_s=120)
    profile = read_profile(tmp_path / "parts")
    assert profile is not None
    assert profile.tuning.threads == 3
    assert profile.basis == profile_basis(path, contract_beside(path))
    contract.unlink()
    assert profile.basis != profile_basis(path, None)


def test_a_profile_is_stale_once_what_it_was_measured_with_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(lay_out(tmp_path).path)
    home = path.parent.parent

    def contract(**encoded: Any) -> Contract:
        return Contract(data=Data(inputs=(InputContract(name="x", encoded=ImageSpec(resize=8, **encoded)),)))

    bases = [profile_basis(path, None)]
    assert profile_basis(path, Contract()) == bases[0]  # no pictures either
    bases += [profile_basis(path, contract(crop=8)), profile_basis(path, contract(crop=4))]
    np.savez(home / "golden.npz", x=np.ones((1, 1024), "f4"))
    bases.append(profile_basis(path, None))
    np.savez(home / "golden.npz", x=np.zeros((1, 1024), "f4"))
    bases.append(profile_basis(path, None))
    (home / "golden").mkdir()
    (home / "golden" / "one.png").write_bytes(b"a picture")
    bases.append(profile_basis(path, None))
    (home / "golden" / "one.png").rename(home / "golden" / "two.png")
    bases.append(profile_basis(path, None))
    assert len(set(bases)) == len(bases)
    (home / "labels.txt").write_text("cat")
    assert profile_basis(path, None) == bases[-1]
    monkeypatch.setattr("split.workbench.golden.CARD_VERSION", 1_000)  # halves are cut by other rules
    assert profile_basis(path, None) not in bases


def test_the_fidelity_of_fp16_is_the_worst_over_all_requests(tmp_path: Path) -> None:
    given = requests(3)
    profile = measured(lay_out(tmp_path), tmp_path, inputs=given)
    rounding = [
        np.abs(x.astype("f2").astype("f8") - x.astype("f8")).max() / np.abs(x.astype("f8")).max()
        for x in (request["x"] for request in given)
    ]
    assert max(rounding) > min(rounding)
    for codecs in (profile.cuts[0].codecs, profile.input_codecs):
        raw, half, _ = codecs
        assert raw.fidelity == {}
        assert half.fidelity["relative"] == pytest.approx(max(rounding), rel=1e-6)
        assert half.fidelity["top1"] == 0.0


def test_the_golden_file_holds_requests_and_the_answers_of_the_whole(tmp_path: Path) -> None:
    given = requests(2)
    measured(lay_out(tmp_path), tmp_path, inputs=given)
    with np.load(tmp_path / "parts/golden.npz") as golden:
        assert sorted(golden.files) == ["0/input/x", "0/output/y", "1/input/x", "1/output/y"]
        np.testing.assert_array_equal(golden["1/input/x"], given[1]["x"])
        np.testing.assert_array_equal(golden["1/output/y"], given[1]["x"])  # −(−x)


def test_a_cut_whose_halves_give_something_else_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    card = lay_out(tmp_path, tail=TAIL.replace("Neg", "Identity"))
    assert measured(card, tmp_path, inputs=requests(1)).cuts == ()
    assert "cut=c is left out: head and tail differ from the whole by 2" in caplog.text


def test_a_cut_whose_half_does_not_open_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    card = lay_out(tmp_path)
    (tmp_path / "parts/c.tail.onnx").write_bytes(b"damaged" * 20)
    assert measured(card, tmp_path, inputs=requests(1)).cuts == ()
    assert "cut=c is left out" in caplog.text


def test_a_lossy_codec_that_saves_nothing_is_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(path, f"{HEADER} g (int64[1] x) => (int64[1] y) {{ y = Neg(x) }}")
    spec = TensorSpec(name="x", dtype="INT64", shape=(1,))
    card = card_of(path, (spec,), (TensorSpec(name="y", dtype="INT64", shape=(1,)),))
    assert [codec.codec for codec in measured(card, tmp_path).input_codecs] == ["raw"]


def test_built_in_inputs_that_a_model_refuses_give_way_to_zeros(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(path, f"{HEADER} g (float[1] x, int64[64] i) => (float[64] y) {{ y = Gather(x, i) }}")  # 1 is out of range
    inputs = (TensorSpec(name="x", dtype="FP32", shape=(1,)), TensorSpec(name="i", dtype="INT64", shape=(64,)))
    measured(card_of(path, inputs, (TensorSpec(name="y", dtype="FP32", shape=(64,)),)), tmp_path)
    with np.load(tmp_path / "parts/golden.npz") as golden:
        assert not golden["0/input/i"].any()


def test_a_model_that_takes_no_built_in_input_asks_for_a_real_one(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(path, f"{HEADER} g (float[6] x, int64[2] s) => (float[A, B] y) {{ y = Reshape(x, s) }}")
    inputs = (TensorSpec(name="x", dtype="FP32", shape=(6,)), TensorSpec(name="s", dtype="INT64", shape=(2,)))
    card = card_of(path, inputs, (TensorSpec(name="y", dtype="FP32", shape=("A", "B")),))
    with pytest.raises(InvalidModel, match=r"--inputs FILE\.npz"):
        measured(card, tmp_path)
    given: Tensors = {"x": np.arange(6, dtype="f4"), "s": np.array([2, 3])}
    assert measured(card, tmp_path, inputs=[given]).whole_ms > 0


def golden_runs(folder: Path) -> GoldenRuns:
    profile = read_profile(folder)
    assert profile is not None
    return read_golden_runs(profile, folder)


def test_requests_beside_the_model_are_used_and_a_wrong_one_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card = lay_out(tmp_path)
    golden = tmp_path / "models/m/golden"
    golden.mkdir()
    np.savez(golden / "b.npz", x=np.ones((3, 1024), "f4"))
    np.savez(golden / "a.npz", x=np.ones((3, 7), "f4"))
    (golden / "c.npz").write_bytes(b"no archive")
    assert measured(card, tmp_path).dims == {"N": 3}
    assert "a.npz is not used as a golden request: tensor 'x' must have shape" in caplog.text
    assert "c.npz is not used as a golden request" in caplog.text
    (golden / "b.npz").unlink()
    assert measured(card, tmp_path).dims == {"N": 1}  # the built-in ones


def test_a_golden_npz_in_the_models_folder_is_used(tmp_path: Path) -> None:
    card = lay_out(tmp_path)
    np.savez(tmp_path / "models/m/golden.npz", x=np.ones((5, 1024), "f4"))
    assert measured(card, tmp_path).dims == {"N": 5}


def test_golden_runs_are_those_of_the_built_in_inputs_where_the_model_takes_them(tmp_path: Path) -> None:
    measured(lay_out(tmp_path), tmp_path, inputs=requests(1))
    runs = golden_runs(tmp_path / "parts")
    x = golden_inputs([X], {"N": 2})["x"].reshape(-1)  # 2048 elements: all of them are in the sample
    assert runs.offered == b""
    np.testing.assert_array_equal(decode(runs.whole, max_bytes=1 << 20)["y"], x)  # −(−x)
    at_cut = decode(runs.cuts[CutId("c")], max_bytes=1 << 20)
    np.testing.assert_array_equal(at_cut["a"], -x)
    np.testing.assert_array_equal(at_cut["y"], x)


def test_where_it_takes_none_they_are_those_of_the_smallest_request_which_has_to_travel(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(path, f"{HEADER} g (float[n] x, int64[2] s) => (float[A, B] y) {{ y = Reshape(x, s) }}")
    inputs = (TensorSpec(name="x", dtype="FP32", shape=("n",)), TensorSpec(name="s", dtype="INT64", shape=(2,)))
    card = card_of(path, inputs, (TensorSpec(name="y", dtype="FP32", shape=("A", "B")),))
    large: Tensors = {"x": np.arange(12, dtype="f4"), "s": np.array([4, 3])}
    small: Tensors = {"x": np.arange(6, dtype="f4"), "s": np.array([2, 3])}
    measured(card, tmp_path, inputs=[large, small])
    runs = golden_runs(tmp_path / "parts")
    offered = decode(runs.offered, max_bytes=1 << 20)
    assert {name: array.tolist() for name, array in offered.items()} == {"x": [*range(6)], "s": [2, 3]}
    assert decode(runs.whole, max_bytes=1 << 20)["y"].tolist() == [*range(6)]


@pytest.mark.parametrize("damage", ["cut short", "changed", "removed"])
def test_a_profile_whose_golden_runs_are_damaged_is_measured_again(tmp_path: Path, damage: str) -> None:
    measured(lay_out(tmp_path), tmp_path, inputs=requests(1))
    path = tmp_path / "parts" / GOLDEN_RUNS
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut short" else data[:-1] + bytes([data[-1] ^ 1]))
    assert read_profile(tmp_path / "parts") is None


IMAGE = f"{HEADER} g (float[N, 3, 8, 8] x) => (float[N, 3, 8, 8] y) {{ y = Neg(x) }}"


def image_model(folder: Path) -> tuple[ModelCard, Contract]:
    path = folder / "models/m/1/model.onnx"
    write(path, IMAGE)
    spec = TensorSpec(name="x", dtype="FP32", shape=("N", 3, 8, 8))
    contract = Contract(data=Data(inputs=(InputContract(name="x", encoded=ImageSpec(resize=8, crop=8)),)))
    return card_of(path, (spec,), (TensorSpec(name="y", dtype="FP32", shape=("N", 3, 8, 8)),)), contract


def test_a_picture_beside_the_model_becomes_the_input_the_contract_describes(tmp_path: Path) -> None:
    card, contract = image_model(tmp_path)
    picture = tmp_path / "models/m/golden/red.PNG"
    picture.parent.mkdir()
    Image.new("RGB", (16, 16), (255, 0, 0)).save(picture)
    profile = measured(card, tmp_path, contract=contract)
    assert profile.encoded_bytes == picture.stat().st_size
    assert profile.image_ms > 0
    with np.load(tmp_path / "parts/golden.npz") as golden:
        assert golden["0/output/y"][0, :, 3, 3].tolist() == [-1.0, 0.0, 0.0]


def test_a_picture_that_the_contract_does_not_describe_leaves_the_built_in_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card, _ = image_model(tmp_path)
    picture = tmp_path / "models/m/golden/red.PNG"
    picture.parent.mkdir()
    Image.new("RGB", (16, 16), (255, 0, 0)).save(picture)
    assert measured(card, tmp_path).dims == {"N": 1}
    assert "red.PNG is not used as a golden request: the contract does not say" in caplog.text


def test_without_a_picture_at_hand_a_typical_one_is_decoded(tmp_path: Path) -> None:
    card, contract = image_model(tmp_path)
    profile = measured(card, tmp_path, contract=contract)
    assert profile.encoded_bytes == len(typical_jpeg())
    assert 20_000 < profile.encoded_bytes < 200_000
    assert profile.image_ms > 0


def test_the_command_prepares_measures_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    write(path, WHOLE)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(path), "--cache", str(tmp_path / "cache"), "--json"])) == 0
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["model"] == str(path)
    assert shown["whole_ms"] > 0
    assert "profile: done (100%)" in printed.err
    [folder] = (tmp_path / "cache/models").iterdir()
    kept = read_profile(folder)
    assert kept is not None
    assert kept.whole_ms == shown["whole_ms"]
    profiled = command.profiled(
        path, tmp_path / "cache", on_progress=lambda stage, ratio: pytest.fail("measured again")
    )
    assert profiled[1] == kept


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    write(path, WHOLE)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(path), "--cache", str(tmp_path / "cache")])) == 0
    out = capsys.readouterr().out
    assert "whole model" in out
    assert "offload" in out
    assert "int8" in out


class Hasty:
    """A clock on which every look takes this long."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def chain(folder: Path, cuts: int) -> ModelCard:
    """Eight negations, cut after each of the first `cuts`."""
    steps = [f"t{n} = Neg(t{n - 1})" for n in range(1, 9)]
    steps[0], steps[-1] = "t1 = Neg(x)", "y = Neg(t7)"
    path = folder / "models/m/1/model.onnx"
    write(path, f"{HEADER} g (float[N, 64] x) => (float[N, 64] y) {{ {' '.join(steps)} }}")
    specs = [TensorSpec(name=f"t{n}", dtype="FP32", shape=("N", 64)) for n in range(1, cuts + 1)]
    made = []
    for number, spec in enumerate(specs, start=1):
        head, tail = " ".join(steps[:number]), " ".join(steps[number:])
        write(
            folder / f"parts/c{number}.head.onnx",
            f"{HEADER} h (float[N, 64] x) => (float[N, 64] {spec.name}) {{ {head} }}",
        )
        write(
            folder / f"parts/c{number}.tail.onnx",
            f"{HEADER} t (float[N, 64] {spec.name}) => (float[N, 64] y) {{ {tail} }}",
        )
        bitmap = ((1 << number) - 1).to_bytes(1, "little").hex()
        made.append(msgspec.structs.replace(cut_at(f"c{number}", spec), node_bitmap=bitmap, compute_share=number / 8))
    wide = TensorSpec(name="x", dtype="FP32", shape=("N", 64)), TensorSpec(name="y", dtype="FP32", shape=("N", 64))
    return card_of(path, (wide[0],), (wide[1],), *made)


def hasty_profile(folder: Path, *, step_s: float) -> ModelProfile:
    card = chain(folder, 7)
    return profile_model(
        card, folder / "parts", engine=OrtEngine(), tunings=[Tuning(threads=1)], budget_s=58.0, now_s=Hasty(step_s)
    )


def test_with_time_enough_every_cut_is_measured(tmp_path: Path) -> None:
    profile = hasty_profile(tmp_path, step_s=0.0)
    assert [cut.cut for cut in profile.cuts] == [f"c{n}" for n in range(1, 8)]
    assert not any(cut.estimated for cut in profile.cuts)


def test_what_there_is_no_time_to_measure_is_estimated_and_says_so(tmp_path: Path) -> None:
    profile = hasty_profile(tmp_path, step_s=4.0)  # three looks, 12 s, for a measured cut, two for another
    assert sorted(cut.estimated for cut in profile.cuts) == [False] * 3 + [True] * 2
    measured_cuts = {str(cut.cut) for cut in profile.cuts if not cut.estimated}
    assert {"c1", "c7"} <= measured_cuts  # the ends
    for cut in profile.cuts:
        assert (cut.head_ms >= 0.0, cut.tail_ms >= 0.0) == (True, True)
        assert [codec.codec for codec in cut.codecs] == ["raw", "fp16", "int8"]
        assert cut.codecs[1].fidelity, "a lossy codec is measured, or it is not allowed"
    runs = golden_runs(tmp_path / "parts")
    assert set(runs.cuts) == {cut.cut for cut in profile.cuts}


def test_choosing_threads_is_given_a_quarter_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def first(candidates: Sequence[Tuning], open_with: object, *, limit_s: float) -> Tuning:
        given.append(limit_s)
        return candidates[0]

    monkeypatch.setattr("split.workbench.profile.fastest", first)
    hasty_profile(tmp_path, step_s=0.0)
    assert given == [14.5]


def test_what_there_is_no_time_to_compare_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = hasty_profile(tmp_path, step_s=100.0)
    assert profile.cuts == ()
    assert profile.whole_ms > 0
    assert "7 of 7 cuts are left out" in caplog.text


NET = f"""{HEADER} g (float[N, 3, H, W] x) => (float[N, 4, P, Q] y)
<float[8, 3, 3, 3] w1, float[8, 8, 3, 3] w2, float[4, 8, 3, 3] w3>
{{
  a = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x, w1)
  b = Relu(a)
  c = Conv <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (b, w2)
  d = Relu(c)
  y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (d, w3)
}}"""


def test_a_dynamic_model_is_timed_at_two_sizes_and_its_bytes_are_known_at_all(tmp_path: Path) -> None:
    path = tmp_path / "models/m/1/model.onnx"
    path.parent.mkdir(parents=True)
    model, random = onnx.parser.parse_model(NET), np.random.default_rng(4)
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        weight = random.normal(0, 0.1, shape).astype("f4")
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, value.name))
    del model.graph.value_info[:]
    onnx.save(model, path)
    first = {"x": random.normal(size=(1, 3, 96, 64)).astype("f4")}
    card = prepare(path, tmp_path / "parts", inputs=first)
    assert card.cuts
    profile = measured(card, tmp_path, inputs=[first])
    assert profile.sizes == (1, 96, 64)
    assert profile.other_sizes == (1, 32, 32)
    assert len(profile.cuts) == len(card.cuts)
    assert profile.other_whole_ms > 0.0
    assert all(cut.other_head_ms > 0.0 and cut.other_tail_ms > 0.0 for cut in profile.cuts)
    table = PlanTable.build(card, profile, Contract(data=Data(codecs=("raw", "fp16", "int8"))))
    for sizes in ((1, 33, 47), (2, 64, 100), (1, 224, 128)):
        image = {"x": random.normal(size=(sizes[0], 3, *sizes[1:])).astype("f4")}
        for cut in card.cuts:
            crosses = OrtEngine().open(tmp_path / f"parts/{cut.id}.head.onnx", threads=1).run(image)
            for codec in ("raw", "fp16", "int8"):
                plan = Plan(placement=Placement.SPLIT, cut=cut.id, codec=codec)
                if plan not in table.row_of:
                    continue
                predicted = round(float(sent_bytes(table.at(sizes), FACTS)[table.row_of[plan]]))
                really = len(b"".join(encode({spec.name: crosses[spec.name] for spec in cut.boundary}, codec)))
                assert predicted == (really if codec == "raw" else pytest.approx(really, rel=0.2, abs=256)), (
                    cut.id,
                    plan,
                )


def test_a_cut_that_is_right_at_one_size_only_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grown = prepare(tmp_path / "models/m/1/model.onnx", tmp_path / "as-it-is") if lay_out(tmp_path) else None
    assert grown is not None
    card = msgspec.structs.replace(lay_out(tmp_path, tail=TAIL_OF_TWO), growth=grown.growth)
    profile = measured(card, tmp_path, inputs=requests(1, batch=2))
    assert profile.other_sizes == (1,)
    assert profile.cuts == ()
    assert "is left out" in caplog.text


def test_codecs_of_a_calibration_are_timed_and_their_fidelity_is_the_calibrations(tmp_path: Path) -> None:
    path = tmp_path / "models/m/1/model.onnx"
    path.parent.mkdir(parents=True)
    calibrated_model.save_model(path)
    card = prepare(path, tmp_path / "parts")
    calibration = calibrated_model.calibrate(card, tmp_path / "parts", count=8)
    contract = Contract(data=Data(inputs=(InputContract(name="x", encoded=calibrated_model.PICTURE),)))
    for laid in (b"damaged", encode_calibration(calibration)):
        path.with_name(CALIBRATION_FILE).write_bytes(laid)
        profile = measured(card, tmp_path, contract=contract)
        of_input = {codec.codec: codec for codec in profile.input_codecs}
        klt = {cut.cut: codec for cut in profile.cuts for codec in cut.codecs if codec.codec == "klt"}
        if laid == b"damaged":
            assert klt == {}
            assert of_input.keys() == {"raw", "fp16", "int8"}
            continue
        assert klt.keys() == calibration.curves.keys()
        for codec in (*klt.values(), of_input["jpeg"], of_input["webp"]):
            assert codec.encode_ms > 0
            assert codec.decode_ms > 0
            assert (codec.fidelity, codec.curve) == ({}, ())
        for cut, codec in klt.items():
            sizes = [point.mean_bytes for point in calibration.curves[cut].points]
            assert codec.bytes < 3 * max(sizes)
