"""Nodes without names and with one name, fused ones, and a runtime that tells nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.errors import EngineFailed
from split.graph.card import ModelCard, read_card
from split.runtime.segment import OrtEngine
from split.tensor import Array
from split.workbench.cut import prepare
from split.workbench.node_times import by_node, head_shares

TEXT = '<ir_version: 8, opset_import: ["" : 17]> g (float[N, 64] x) => (float[N, 1] y) { %s }'
BODY = "a = Sin(x) b = ReduceMean<axes = [1]>(a) c = Cos(b) y = Neg(c)"
FEEDS: dict[str, Array] = {"x": np.ones((2, 64), "f4")}


def lay_out(folder: Path, *, names: Sequence[str] = ("", "", "", "")) -> ModelCard:
    model = onnx.parser.parse_model(TEXT % BODY)
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    onnx.save(model, folder / "m.onnx")
    prepare(folder / "m.onnx", folder / "parts", inputs=FEEDS)
    return read_card(folder / "parts")


class Telling(OrtEngine):
    """Says that every node takes 1 ms, the first one 7."""

    def node_times(
        self, path: Path, feeds: Mapping[str, Array], *, threads: int, budget_s: float
    ) -> list[tuple[str, float]]:
        names = [name for name, _ in super().node_times(path, feeds, threads=threads, budget_s=0.0)]
        return [(name, 7.0 if number == 0 else 1.0) for number, name in enumerate(names)]


class Silent(OrtEngine):
    def node_times(
        self, path: Path, feeds: Mapping[str, Array], *, threads: int, budget_s: float
    ) -> list[tuple[str, float]]:
        raise EngineFailed("no profile here")


@pytest.mark.parametrize("names", [("", "", "", ""), ("n", "n", "n", "n"), ("y", "c", "isthmus0", "isthmus0")])
def test_a_node_is_known_whatever_the_file_calls_it(tmp_path: Path, names: Sequence[str]) -> None:
    card = lay_out(tmp_path, names=names)
    shares = head_shares(card, tmp_path / "parts", FEEDS, engine=Telling(), threads=1)
    assert card.cuts
    for cut in card.cuts:  # Sin takes 7 of 10 and the reduction 1; the nodes after it as many as there are in the head
        assert shares[cut.id] == pytest.approx((7 + cut.nodes - 1) / 10)
    assert not list((tmp_path / "parts").glob("*numbered*"))


def test_a_runtime_without_a_profile_leaves_the_estimated_operations(tmp_path: Path) -> None:
    card = lay_out(tmp_path)
    shares = head_shares(card, tmp_path / "parts", FEEDS, engine=Silent(), threads=1)
    assert shares == {cut.id: cut.compute_share for cut in card.cuts}


def test_fused_nodes_are_known_by_a_number_or_a_tensor_and_what_has_neither_joins_the_one_before() -> None:
    times = [
        ("ReorderInput", 1.0),
        ("isthmus2/MatMulAddFusion", 10.0),
        ("ReorderOutput_token_7", 2.0),
        ("relu_4_nchwc", 20.0),
        ("isthmus99", 4.0),
        ("isthmus0", 5.0),
    ]
    assert by_node(times, {"relu_4": 1}, 3) == [5.0 + 1.0, 24.0, 12.0]
