"""Codec klt with two real processes: the sidecar reaches the companion, answers keep the bound against plain
onnxruntime, and whatever becomes of sidecar or companion, every request gets a right answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.client import Answer, Client
from scripts.pair import Pair
from split.codec.calibration import CALIBRATION_FILE, Calibration, write_calibration
from split.codec.fidelity import divergence
from split.ids import CutId
from split.workbench.cut import prepare
from tests.calibrated_model import calibrate, draw_inputs, save_model, whole_of

BOUND = 0.02
CONTRACT = f"data: {{codecs: [raw, klt], fidelity: {{measure: kl, bound: {BOUND}}}}}\n"
INPUTS = draw_inputs(30, seed=2)


class Calibrated:
    """The pair, its one model, and the calibration that was laid beside it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models" / "narrow" / "1" / "model.onnx"
        self.path.parent.mkdir(parents=True)
        save_model(self.path)
        (self.path.parent.parent / "contract.yaml").write_text(CONTRACT)
        self._cuts = folder / "cuts"
        self.card = prepare(self.path, self._cuts)
        self.calibration = calibrate(self.card, self._cuts)
        self.cut: CutId = max(self.calibration.curves, key=lambda cut: self.card.cut(cut).compute_share)
        self.whole = whole_of(self.path, INPUTS)
        self.lay(self.calibration)
        self.pair = Pair(folder, folder / "models")

    def lay(self, calibration: Calibration) -> str:
        return write_calibration(calibration, self.path.with_name(CALIBRATION_FILE))

    def another(self) -> Calibration:
        return calibrate(self.card, self._cuts, seed=3)

    def ask(self, client: Client, number: int = 0) -> Answer:
        return client.infer("narrow", INPUTS[number], mode="split", cut=self.cut, codec="klt", deadline_ms=20_000)

    def until_split(self, client: Client) -> Answer:
        return until(lambda: self.ask(client), lambda answer: answer.placement == "split")

    def distances(self, client: Client) -> list[float]:
        """Of split answers to what was drawn, from the unsplit run's."""
        found = []
        for number, whole in enumerate(self.whole):
            answer = self.ask(client, number)
            assert (answer.placement, answer.codec) == ("split", "klt"), answer
            found.append(divergence("kl", answer.outputs["y"], whole["y"]))
        return found


def until(ask: Callable[[], Any], holds: Callable[[Any], bool], *, within_s: float = 60.0) -> Any:
    deadline_at_s = time.monotonic() + within_s
    while not holds(found := ask()):
        assert time.monotonic() < deadline_at_s, found
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrated]:
    made = Calibrated(tmp_path_factory.mktemp("calibrated"))
    with made.pair:
        made.pair.start_agent(slowdown=1.0)
        yield made


def test_split_answers_keep_the_bound_in_the_mean_and_cost_what_the_curve_says(served: Calibrated) -> None:
    with served.pair.client() as client:
        served.until_split(client)
        distances = served.distances(client)
        explained = client.get(f"/v2/isthmus/explain/{served.ask(client).request_id}")
    assert 0.0 < float(np.mean(distances)) <= BOUND * 1.5  # thirty others than the curve is of: its own error in
    points = served.calibration.curves[served.cut].points
    cheapest = min((p for p in points if p.fidelity["kl"] <= BOUND), key=lambda point: point.mean_bytes)
    chosen = explained["chosen"]
    assert chosen["codec"] == "klt"
    assert chosen["fidelity"] == pytest.approx(cheapest.fidelity["kl"])
    assert chosen["bytes"] == pytest.approx(cheapest.mean_bytes, rel=0.2)
