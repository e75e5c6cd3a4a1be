"""`isthmus cuts` and `isthmus check`: what they print, how they end, and what MODEL may be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from agent import cli
from agent.commands import check, cuts
from agent.commands.cuts_plot import Coded, Level, coded_verdict, verdict
from split.codec.calibration import CALIBRATION_FILE, Calibration, Curve, CutTables, TensorTables, write_calibration
from split.ids import CutId, ModelDigest
from split.profiles.measured import Point
from split.tensor import TensorSpec

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 4] x) => (float[n, 4] y) { a = Neg(x)  y = Abs(a) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a repository as its newest version, 10; version 9 is no model at all."""
    for version in ("9", "10"):
        (tmp_path / "models" / "tiny" / version).mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "9" / "model.onnx").write_bytes(b"old")
    path = tmp_path / "models" / "tiny" / "10" / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def test_cuts_prints_the_agreed_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "in.npz", x=np.zeros((5, 4), dtype=np.float32))
    assert cli.run(["cuts", str(model), "--inputs", str(tmp_path / "in.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["model", "digest", "cuts"]
    [cut] = found["cuts"]
    assert set(cut) == {"id", "boundary", "bytes", "compute_share", "nodes"}
    assert cut["boundary"] == [{"name": "a", "dtype": "FP32", "shape": [5, 4]}]
    assert set(cut["bytes"]) == {"raw", "fp16", "int8"}
    assert (cut["compute_share"], cut["nodes"]) == (0.5, 1)


def test_a_name_means_its_newest_version(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cuts", "tiny", "--models", str(tmp_path / "models"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == str(model)


def test_the_repository_may_come_from_the_configuration(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(f"models: {tmp_path}/models\nstate_dir: {tmp_path}/state\ncache_dir: {tmp_path}/cache\n")
    monkeypatch.setenv("ISTHMUS_CONFIG", str(config))
    assert cli.run(["check", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == str(model)
    assert [cut["boundary"] for cut in found["cuts"]] == [["a"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cuts", "absent"], "--models DIR or --config FILE"),
        (["cuts", "absent", "--models", "MODELS"], "known there: tiny"),
        (["cuts", "tiny", "--models", "MODELS/none"], "is not a folder"),
        (["cuts", "MODELS/tiny/9/model.onnx"], "cannot be decoded"),
        (["cuts", "MODELS/tiny/10/model.onnx", "--inputs", "MODELS/none.npz"], "is not there"),
        (["check", "MODELS/tiny/10/model.onnx", "--cuts", "abc"], "cut abc is none of model.onnx"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_1(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.run([word.replace("MODELS", str(tmp_path / "models")) for word in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1


def test_the_tables_name_the_cut_and_its_verdict(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cuts", str(model)]) == 0
    table = capsys.readouterr().out
    assert "a FP32[1,4]" in table
    assert "50.0%" in table
    assert cli.run(["check", str(model), "--cuts", "all"]) == 0
    assert "1 equal, 0 different, 0 refused" in capsys.readouterr().out


def test_check_keeps_the_outputs_and_a_model_without_cuts_says_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", str(model), "--outputs", str(tmp_path / "out"), "--json"]) == 0
    [cut] = json.loads(capsys.readouterr().out)["cuts"]
    with np.load(tmp_path / "out" / f"{cut['id']}.npz") as kept:
        assert kept.files == ["y"]
    onnx.save(onnx.parser.parse_model(TEXT.replace("y = Abs(a)", "").replace("a = Neg", "y = Neg")), model)
    assert cli.run(["cuts", str(model)]) == 0
    assert "no cuts: the model has fewer than two nodes" in capsys.readouterr().out


@pytest.mark.parametrize(("difference", "status"), [(None, 0), (0.0, 0), (1e-5, 0), (1.01e-5, 1), (1e300, 1)])
def test_a_difference_above_one_in_a_hundred_thousand_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, difference: float | None, status: int
) -> None:
    cut = {"id": "0" * 12, "legal": True, "reason": "", "boundary": [], "max_abs": difference, "max_rel": difference}

    def write_result(command: list[str], **_: object) -> None:
        Path(command[command.index("--out") + 1]).write_text(json.dumps([cut]))

    monkeypatch.setattr(check, "run_child_sync", write_result)
    assert cli.run(["check", str(model)]) == status


def test_the_table_begins_with_the_input_and_shortens_what_is_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[2, 500] x) => (float[2, 500] y) {
            "network/stage_1/block_2/conv_3/activation" = Neg(x)
            b = Abs(x)  c = Exp(x)  d = Sqrt(x)
            y = Sum("network/stage_1/block_2/conv_3/activation", b, c, d) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "wide.onnx")
    assert cli.run(["cuts", str(tmp_path / "wide.onnx")]) == 0
    _, _, head, first, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["cut", "node", "compute", "raw", "KB", "fp16", "KB", "int8", "KB", "boundary"]
    assert first.split() == ["input", "0", "0.0%", "4.0", "x", "FP32[2,500]"]
    long = [row for row in rows if "activation" in row]
    assert long
    assert all("…tage_1/block_2/conv_3/activation"[-27:] in row and "network" not in row for row in long)


def test_the_table_says_what_the_search_gave_up(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"name": "a", "dtype": "FP32", "shape": [2]}
    cut = {
        "id": "0" * 12,
        "boundary": [spec],
        "bytes": {"raw": 8, "fp16": 4, "int8": 2},
        "compute_share": 0.5,
        "nodes": 1,
    }

    def write_result(command: list[str], **_: object) -> None:
        found = {"digest": "sha256:0", "nodes": 2, "along": [], "inputs": [spec], "no_cuts_reason": "", "cuts": [cut]}
        text = json.dumps(found | {"dropped": 12345, "beyond_limit": 3, "note": "its functions stay whole"})
        Path(command[command.index("--out") + 1]).write_text(text)

    monkeypatch.setattr(cuts, "run_child_sync", write_result)
    assert cli.run(["cuts", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "12,345 partial cuts given up" in shown
    assert "3 more cuts that trade compute for bytes found no room" in shown
    assert shown.endswith("the model is cut as it stands in the file: its functions stay whole\n")


def test_a_plot_is_a_picture_of_a_thousand_by_six_hundred(model: Path, tmp_path: Path) -> None:
    assert cli.run(["cuts", str(model), "--plot", str(tmp_path / "cuts.png"), "--json"]) == 0
    with Image.open(tmp_path / "cuts.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1000, 600))
        colours = picture.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    drawn = {colour for _, colour in colours}
    assert {(0x1D, 0x5C, 0x8F), (0xD9, 0x62, 0x2B)} <= drawn, "a candidate as raw and as int8"


def test_a_model_without_cuts_has_a_plot_too(model: Path, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(TEXT.replace("y = Abs(a)", "").replace("a = Neg", "y = Neg")), model)
    assert cli.run(["cuts", str(model), "--plot", str(tmp_path / "cuts.png")]) == 0
    assert (tmp_path / "cuts.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_says_where(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["cuts", str(model), "--plot", str(tmp_path / "none" / "cuts.png")]) == 1
    assert f"the plot cannot be written to {tmp_path}/none/cuts.png: No such file" in capsys.readouterr().err


def test_the_verdict_names_the_first_cut_that_is_smaller_than_the_input() -> None:
    cuts = [
        {"compute_share": share, "bytes": {"int8": size}} for share, size in ((0.004, 900), (0.25, 500), (0.75, 100))
    ]
    levels = [Level(name="raw", size=1000), Level(name="PNG", size=500), Level(name="JPEG", size=50)]
    assert verdict(cuts, levels) == (
        "Sent as int8, a cut beats the input as raw from 0.4% of the compute, its PNG from 75%, its JPEG nowhere"
    )
    assert verdict(cuts, levels[2:]) == "Sent as int8, a cut beats the input as JPEG nowhere"


def test_a_calibrated_model_shows_its_cuts_and_the_picture_at_the_same_fidelity(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["cuts", str(model), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    cut = listed["cuts"][0]
    (model.parents[1] / "contract.yaml").write_text(
        "model: tiny\ndata: {codecs: [raw, klt, jpeg], fidelity: {measure: kl, bound: 0.05}}\n"
    )
    curve = Curve(
        points=tuple(
            Point(level=level, mean_bytes=size, p95_bytes=size, fidelity={"kl": off}, fidelity_high={"kl": off})
            for level, size, off in ((9, 6.0, 0.2), (5, 9.0, 0.04))
        ),
        inputs=3,
    )
    spec = TensorSpec(name="a", dtype="FP32", shape=("n", 4))
    write_calibration(
        Calibration(
            model=ModelDigest(listed["digest"]),
            inputs=5,
            tables={CutId(cut["id"]): CutTables(tensors=(TensorTables(spec=spec, klt=None),), node_bitmap="01")},
            curves={CutId(cut["id"]): curve},
            pictures={"jpeg": curve},
        ),
        model.with_name(CALIBRATION_FILE),
    )
    assert cli.run(["cuts", str(model), "--plot", str(tmp_path / "cuts.png")]) == 0
    with Image.open(tmp_path / "cuts.png") as picture:
        colours = picture.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    assert (0x2F, 0x8F, 0x5B) in {colour for _, colour in colours}, "a calibrated cut"


def test_the_verdict_of_a_calibration_compares_the_cheapest_at_equal_fidelity() -> None:
    cuts = [Coded(nodes=9, share=0.2, size=12_000), Coded(nodes=31, share=0.37, size=2400)]
    levels = [Level(name="raw", size=602_112), Level(name="JPEG", size=16_000), Level(name="WebP", size=11_000)]
    assert coded_verdict(cuts, levels) == (
        "Calibrated, 1 of 2 cuts send less than its WebP; the smallest (37% of the compute) 2.4 KB against 11 KB"
    )
