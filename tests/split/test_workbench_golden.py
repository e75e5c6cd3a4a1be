"""Requests that lie beside a model: which they are, and that they tell the sizes at which its cuts are weighed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from split.graph.card import read_card
from split.workbench import __main__ as child
from split.workbench import cut
from split.workbench.golden import inputs_beside, picture_beside

TEXT = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 4] x) => (float[n, 4] y) { a = Neg(x)  y = Abs(a) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a repository with a request and a picture beside its version."""
    (tmp_path / "net" / "3").mkdir(parents=True)
    (tmp_path / "net" / "golden").mkdir()
    (tmp_path / "net" / "golden" / "a.png").write_bytes(b"no picture yet")
    (tmp_path / "net" / "golden" / "notes.txt").write_text("no request")
    np.savez(tmp_path / "net" / "golden" / "request.npz", x=np.ones((9, 4), np.float32))
    path = tmp_path / "net" / "3" / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    return path


def prepare(model: Path, **given: Any) -> None:
    child._prepare(argparse.Namespace(model=model, folder=model.parent, **({"dims": {}, "inputs": None} | given)))


def test_a_request_of_each_kind_is_found_beside_the_versions(model: Path) -> None:
    found = inputs_beside(model)
    assert found is not None
    assert {name: array.shape for name, array in found.items()} == {"x": (9, 4)}
    assert picture_beside(model) == model.parents[1] / "golden" / "a.png"


def test_a_file_outside_a_repository_has_nothing_beside_it(model: Path) -> None:
    elsewhere = model.parents[1] / "model.onnx"
    model.rename(elsewhere)
    assert (inputs_beside(elsewhere), picture_beside(elsewhere)) == (None, None)


@pytest.mark.parametrize(("given", "shape"), [({}, (9, 4)), ({"dims": {"n": 5}}, None)])
def test_cuts_are_weighed_at_the_sizes_of_the_request_unless_others_are_given(
    model: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], shape: tuple[int, ...] | None
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cut, "prepare", lambda path, folder, **options: seen.append(options.get("inputs")))
    prepare(model, **given)
    [inputs] = seen
    assert (None if inputs is None else inputs["x"].shape) == shape


def test_a_request_that_does_not_fit_is_told_and_the_model_is_cut_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(model.parents[1] / "golden" / "request.npz", x=np.ones((9, 5), np.float32))
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(child, "say", said.append)
    prepare(model)
    assert len(read_card(model.parent).cuts) == 1
    [warning] = [message["warning"] for message in said if "warning" in message]
    assert "golden request are not used" in warning
    assert "[9, 5]" in warning
