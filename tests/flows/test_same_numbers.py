"""I10 with two real processes: a companion that computes integers otherwise gets no model that does, and float models
as ever; why is shown by `isthmus status` and `isthmus plan --url`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from scripts.pair import PROGRAMS, STATUS, Pair

COMPANION = Path(__file__).with_name("different_companion.py")
HEAD = '<ir_version: 8, opset_import: ["" : 17]> g (float[4, 16] x) => (float[4, 8] y)'
MODELS = {
    "floats": HEAD + "<float[16, 8] w = {W}> { a = Relu(x)  b = MatMul(a, w)  y = Tanh(b) }",
    "dynamic": HEAD
    + """<int8[16, 8] w = {I}, float step = {0.02}> {
        a = Relu(x)  q, s, z = DynamicQuantizeLinear(a)  m = MatMulInteger(q, w, z)  f = Cast<to = 1>(m)
        r = Mul(f, s)  b = Mul(r, step)  y = Tanh(b)
    }""",
    "qdq": HEAD
    + """<int8[16, 8] w = {I}, float step = {0.02}, int8 no = {0}, float fine = {0.01}, uint8 none = {0}> {
        a = Relu(x)  q = QuantizeLinear(a, fine, none)  d = DequantizeLinear(q, fine, none)
        k = DequantizeLinear(w, step, no)  m = MatMul(d, k)
        n = QuantizeLinear(m, fine, none)  b = DequantizeLinear(n, fine, none)  y = Tanh(b)
    }""",
}
X = np.random.default_rng(3).standard_normal((4, 16)).astype(np.float32)


class DifferentPair(Pair):
    how = ""

    def start_companion(self, n: int = 0) -> None:
        config = self.folder / "companion.yaml"
        command = [sys.executable, str(COMPANION), self.how, "serve", "--config", str(config)]
        self._start("companion", command)


@pytest.fixture(scope="module", params=["answers", "golden"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DifferentPair]:
    folder = tmp_path_factory.mktemp("pair")
    dice = np.random.default_rng(5)
    numbers = {
        "{W}": ",".join(f"{value:.4f}" for value in dice.standard_normal(128)),
        "{I}": ",".join(str(value) for value in dice.integers(-127, 128, 128)),
    }
    for name, text in MODELS.items():
        path = folder / "models" / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        for mark, values in numbers.items():
            text = text.replace(mark, f"{{{values}}}")
        onnx.save(onnx.parser.parse_model(text), path)
    made = DifferentPair(folder, folder / "models")
    made.how = request.param
    with made:
        made.start_agent(slowdown=1.0)
        yield made


def isthmus(*words: str) -> str:
    command = [str(PROGRAMS / "isthmus"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status_when_known(pair: DifferentPair) -> dict[str, dict[str, Any]]:
    """Models by name, once the floats are shared and the others are not for good."""
    deadline_at_s = time.monotonic() + 60
    with pair.client() as client:
        while True:
            models = {model["name"]: model for model in client.get(STATUS)["models"]}
            reasons = {name: model["local_only_reason"] for name, model in models.items()}
            if not reasons["floats"] and all("differently" in reasons[name] for name in ("dynamic", "qdq")):
                return models
            assert time.monotonic() < deadline_at_s, reasons
            time.sleep(0.05)


def test_models_that_compute_in_integers_stay_here_and_the_reason_is_shown(pair: DifferentPair) -> None:
    models = status_when_known(pair)
    url = f"http://127.0.0.1:{pair.agent_port}"
    text, plain = isthmus("status", "--url", url), json.loads(isthmus("status", "--url", url, "--json"))
    for name in ("dynamic", "qdq"):
        why = models[name]["local_only_reason"]
        if pair.how == "answers":
            assert "its MatMulInteger answers 1,048,544 where this device's answers" in why
        else:
            assert "computes this model differently: golden tensor 'y' has a relative difference of 0.01" in why
        assert why in text
        assert why in {model["local_only_reason"] for model in plain["models"]}
        path = str(pair.models / name / "1" / "model.onnx")
        planned = json.loads(isthmus("plan", path, "--url", url, "--json", "--cache", str(pair.folder / "plans")))
        remote = [each for each in planned["runners_up"] if each["placement"] != "local"]
        assert planned["chosen"]["placement"] == "local"
        assert why in planned["reason"]
        assert remote
        assert not any(each["allowed"] for each in remote)
        assert why in {each["why_not"] for each in remote}  # the contract has reasons of its own


def test_every_answer_is_that_of_this_machine_and_floats_are_shared(pair: DifferentPair) -> None:
    status_when_known(pair)
    with pair.client() as client:
        for name in MODELS:
            session = ort.InferenceSession(str(pair.models / name / "1" / "model.onnx"))
            expected = session.run(None, {"x": X})[0]
            answer = client.infer(name, {"x": X}, mode="offload", deadline_ms=8000) if name == "floats" else None
            answer = answer or client.infer(name, {"x": X}, deadline_ms=8000)
            assert answer.placement == ("offload" if name == "floats" else "local")
            np.testing.assert_allclose(answer.outputs["y"], expected, rtol=0, atol=1e-5)
