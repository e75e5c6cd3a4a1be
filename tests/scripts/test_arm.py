from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from scripts import arm
from scripts.answers import Question, answers
from scripts.arm_numbers import spread
from scripts.emulated import Emulated, Unavailable
from split.workbench.cut import prepare

MODEL = """<ir_version: 8, opset_import: ["" : 17]> g (float[1, 16] x) => (float[1, 16] y)
    { a = Relu(x)  b = Neg(a)  y = Tanh(b) }"""


def test_a_side_answers_with_the_whole_the_unfused_whole_and_every_cut_with_its_boundary(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    card = prepare(tmp_path / "model.onnx", tmp_path / "parts")
    x = np.linspace(-2, 2, 16, dtype=np.float32)[None]
    np.savez(tmp_path / "natural.npz", x=x)
    question = Question(
        model="m",
        path=str(tmp_path / "model.onnx"),
        folder=str(tmp_path / "parts"),
        cuts=tuple(cut.id for cut in card.cuts),
        requests={"natural": str(tmp_path / "natural.npz")},
    )
    found = answers(question)
    expected = np.tanh(-np.maximum(x, 0))
    for run in ("whole", "plain", *question.cuts):
        np.testing.assert_allclose(found[f"m/natural/{run}/y"], expected, rtol=1e-5)
    assert len(question.cuts) >= 1
    for cut in card.cuts:
        assert all(f"m/natural/{cut.id}/{spec.name}" in found for spec in cut.boundary)


@pytest.mark.parametrize(("count", "expected"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (10, [0, 3, 6, 9])])
def test_cuts_are_spread_from_the_first_to_the_last(count: int, expected: list[int]) -> None:
    assert spread(list(range(count)), 4) == expected  # type: ignore[arg-type,comparison-overlap]  # any items will do


def test_where_it_cannot_run_it_says_so_and_ends_as_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Emulated, dependencies: list[str]) -> None:
        raise Unavailable("apt-get is missing")

    monkeypatch.setattr(Emulated, "set_up", refuse)
    monkeypatch.setattr("sys.argv", ["arm"])
    assert arm.main() == 77
    assert capsys.readouterr().err == "skipped: apt-get is missing\n"
