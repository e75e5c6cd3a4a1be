"""`fallback.strategy: shadow` with two real processes: a companion that computes as the device on golden inputs, and
otherwise on users', loses the model; why is shown by `isthmus status` and counted in the metrics."""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from scripts.pair import STATUS, Pair

COMPANION = Path(__file__).with_name("drifting_companion.py")
MODEL = (
    """<ir_version: 8, opset_import: ["" : 17]> g (float[4, 16] x) => (float[4, 16] y) { a = Relu(x)  y = Tanh(a) }"""
)
CONTRACT = "behaviour: {fallback: {strategy: shadow, agreement_min: 0.9}}\n"
LARGE = np.full((4, 16), 100.0, np.float32)


class DriftingPair(Pair):
    def start_companion(self, n: int = 0) -> None:
        config = self.folder / "companion.yaml"
        self._start("companion", [sys.executable, str(COMPANION), "serve", "--config", str(config)])


def test_a_companion_that_is_off_on_users_inputs_loses_the_model(tmp_path: Path) -> None:
    path = tmp_path / "models" / "tanh" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(MODEL), path)
    (path.parent.parent / "contract.yaml").write_text(CONTRACT)
    with DriftingPair(tmp_path, tmp_path / "models") as pair:
        pair.start_agent(slowdown=1.0)
        with pair.client() as client:
            answers: list[float] = []
            deadline_at_s = time.monotonic() + 60
            while not (why := client.get(STATUS)["models"][0]["local_only_reason"]) or "agree" not in why:
                assert time.monotonic() < deadline_at_s, why
                answer = client.infer("tanh", {"x": LARGE}, mode="offload", deadline_ms=8000)
                if answer.placement == "offload":  # the companion's answer, as it is, until it is found out
                    answers.append(float(answer.outputs["y"].max()))
                time.sleep(0.02)
            np.testing.assert_allclose(answers, 0.9, rtol=1e-6)
            assert len(answers) >= 5
            assert "0% of the companion's last answers agree" in why
            answer = client.infer("tanh", {"x": LARGE}, mode="offload", deadline_ms=8000)
            assert answer.placement == "local"
            np.testing.assert_allclose(answer.outputs["y"], 1.0)
            assert client.get(STATUS)["models"][0]["shadow"] == {"agreed": 0, "differed": 5}
            with urllib.request.urlopen(f"http://127.0.0.1:{pair.agent_port}/metrics", timeout=10) as page:
                assert b'isthmus_shadow_runs_total{model="tanh",result="differed"} 5.0' in page.read()
