"""Codec klt with two real processes: the sidecar reaches the companion, answers keep the bound against plain
onnxruntime, and whatever becomes of sidecar or companion, every request gets a right answer."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from scripts.client import Answer, Client, Refused
from scripts.pair import STATUS, Pair
from split.codec.calibration import CALIBRATION_FILE, Calibration, Curve, write_calibration
from split.codec.fidelity import divergence
from split.ids import CutId, ModelDigest
from split.workbench.cut import prepare
from tests.calibrated_model import MEAN, SIDE, STD, calibrate, draw_inputs, draw_pictures, save_model, whole_of

BOUND = 0.003
CONTRACT = f"""
data:
  inputs:
  - {{name: x, encoded: {{kind: image, resize: {SIDE}, crop: {SIDE}, mean: {[MEAN] * 3}, std: {[STD] * 3}}}}}
  codecs: [raw, klt, jpeg, webp]
  fidelity: {{measure: kl, bound: {BOUND}}}
"""
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
    cheapest = min((p for p in points if p.fidelity_high["kl"] <= BOUND), key=lambda point: point.mean_bytes)
    chosen = explained["chosen"]
    assert chosen["codec"] == "klt"
    assert chosen["fidelity"] == pytest.approx(cheapest.fidelity["kl"])
    assert chosen["bytes"] == pytest.approx(cheapest.mean_bytes, rel=0.2)


@pytest.mark.parametrize("codec", ["jpeg", "webp"])
def test_a_picture_made_anew_for_the_trip_keeps_the_same_bound(served: Calibrated, codec: str) -> None:
    """From tensors, and from pictures that came as files (PNG here, larger than what is made of it)."""
    points = served.calibration.pictures[codec].points
    cheapest = next(point for point in points if point.fidelity_high["kl"] <= BOUND)
    wishes = {"mode": "offload", "codec": codec, "deadline_ms": 20_000}
    with served.pair.client() as client:
        served.until_split(client)
        distances = []
        for number, (picture, whole) in enumerate(zip(draw_pictures(30, seed=2), served.whole, strict=True)):
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "PNG")
            as_file = {"x": np.array([file.getvalue()], dtype=object)}
            answer = client.infer("narrow", INPUTS[number] if number % 2 else as_file, **wishes)
            assert (answer.placement, answer.codec) == ("offload", codec), answer
            distances.append(divergence("kl", answer.outputs["y"], whole["y"]))
        chosen = client.get(f"/v2/isthmus/explain/{answer.request_id}")["chosen"]
    assert (chosen["level"], chosen["fidelity"]) == (cheapest.level, cheapest.fidelity["kl"])
    assert 0.0 < float(np.mean(distances)) <= BOUND * 1.5


def test_a_request_may_ask_for_closer_and_not_for_looser(served: Calibrated) -> None:
    points = served.calibration.curves[served.cut].points
    closest = min(points, key=lambda point: point.fidelity["kl"])
    with served.pair.client() as client:
        served.until_split(client)
        wishes = {"mode": "split", "cut": served.cut, "codec": "klt", "deadline_ms": 20_000}
        answer = client.infer("narrow", INPUTS[0], **wishes, fidelity=closest.fidelity_high["kl"])
        chosen = client.get(f"/v2/isthmus/explain/{answer.request_id}")["chosen"]
        assert (chosen["level"], answer.placement) == (closest.level, "split")
        with pytest.raises(Refused, match=r"isthmus.fidelity is 0.5: looser .* bound is 0.003 \(kl\)"):
            client.infer("narrow", INPUTS[0], **wishes, fidelity=0.5)


@pytest.mark.parametrize("forgets", [False, True], ids=["with its models", "with nothing"])
def test_a_companion_that_comes_back_reads_klt_again(served: Calibrated, forgets: bool) -> None:
    with served.pair.client() as client:
        served.until_split(client)
        served.pair.stop_companion()
        if forgets:
            served.pair.forget_companion_models()
        answer = served.ask(client)
        assert answer.placement == "local"
        np.testing.assert_allclose(answer.outputs["y"], served.whole[0]["y"], rtol=1e-4, atol=1e-5)
        served.pair.start_companion()
        answer = served.until_split(client)
        assert divergence("kl", answer.outputs["y"], served.whole[0]["y"]) <= 10 * BOUND


def test_a_new_calibration_replaces_the_old_one_while_requests_are_under_way(served: Calibrated) -> None:
    with served.pair.client() as client:
        before = served.until_split(client)
        answers: list[Answer] = []
        going = threading.Event()
        going.set()

        def asking() -> None:
            with served.pair.client() as beside:
                while going.is_set():
                    answers.append(served.ask(beside))

        caller = threading.Thread(target=asking)
        caller.start()
        try:
            served.lay(served.another())
            after = until(
                lambda: served.ask(client),
                lambda one: (
                    one.placement == "split"
                    and not np.allclose(one.outputs["y"], before.outputs["y"], rtol=1e-4, atol=1e-4)
                ),
            )
        finally:
            going.clear()
            caller.join()
        assert len(answers) > 3
        assert all(divergence("kl", one.outputs["y"], served.whole[0]["y"]) <= 10 * BOUND for one in answers)
        assert divergence("kl", after.outputs["y"], served.whole[0]["y"]) <= 10 * BOUND
        assert {one.placement for one in answers} <= {"split", "local"}
        served.lay(served.calibration)
        client.load("narrow")  # at once; laid beside it, it is taken up within seconds
        again = served.until_split(client)
        np.testing.assert_allclose(again.outputs["y"], before.outputs["y"], rtol=1e-5, atol=1e-5)


def _damaged(served: Calibrated) -> str:
    path = served.path.with_name(CALIBRATION_FILE)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)
    return "it is damaged"


def _of_another_model(served: Calibrated) -> str:
    served.lay(replace(served.calibration, model=ModelDigest("sha256:" + "ab" * 32)))
    return "it belongs to the model sha256:abab"


def _gone(served: Calibrated) -> str:
    served.path.with_name(CALIBRATION_FILE).unlink()
    return ""


@pytest.mark.parametrize("becomes", [_damaged, _of_another_model, _gone])
def test_a_calibration_that_cannot_be_used_costs_klt_and_nothing_else(
    served: Calibrated, becomes: Callable[[Calibrated], str]
) -> None:
    try:
        note = becomes(served)
        with served.pair.client() as client:
            client.load("narrow")
            model = client.get(STATUS)["models"][0]
            assert model["state"] == "READY"
            assert note in model["calibration_note"]
            assert bool(model["calibration_note"]) == bool(note)
            raw = {"mode": "split", "cut": served.cut, "codec": "raw", "deadline_ms": 20_000}
            answer = until(lambda: client.infer("narrow", INPUTS[0], **raw), lambda answer: answer.placement == "split")
            np.testing.assert_allclose(answer.outputs["y"], served.whole[0]["y"], rtol=1e-4, atol=1e-5)
            with pytest.raises(Refused, match="no calibration for it here; isthmus calibrate makes one"):
                served.ask(client)
    finally:
        served.lay(served.calibration)
        with served.pair.client() as client:
            client.load("narrow")


def test_a_bound_that_was_found_broken_stays_so_over_a_load_and_a_restart_until_the_calibration_is_another(
    served: Calibrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that makes its coarsest step look fine: each answer is some ten times as far off as is allowed."""
    coarsest = max(served.calibration.curves[served.cut].points, key=lambda point: point.level)
    said = msgspec.structs.replace(coarsest, fidelity={"kl": 1e-4}, fidelity_high={"kl": 1e-4})
    curves = served.calibration.curves | {served.cut: Curve(points=(said,), inputs=12)}
    monkeypatch.setenv("ISTHMUS__SPOT_CHECK_EVERY", "1")
    try:
        served.lay(replace(served.calibration, curves=curves))
        served.pair.start_agent(slowdown=1.0)
        with served.pair.client() as client:
            served.until_split(client)
            found = until(lambda: served.ask(client), lambda answer: answer.placement == "local")
            assert "times as far from the unsplit model's as the bound allows (kl 0.003" in found.fallback
            client.load("narrow")
            until(lambda: client.get(STATUS)["models"][0]["state"], lambda state: state == "READY")
            why = client.get(STATUS)["models"][0]["codecs_why_not"]["klt"]
            assert why in found.fallback
        served.pair.start_agent(slowdown=1.0)
        with served.pair.client() as client:
            assert client.get(STATUS)["models"][0]["codecs_why_not"]["klt"] == why
    finally:
        monkeypatch.delenv("ISTHMUS__SPOT_CHECK_EVERY")
        served.lay(served.calibration)
        served.pair.start_agent(slowdown=1.0)
        with served.pair.client() as client:
            served.until_split(client)
