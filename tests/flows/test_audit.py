"""Real processes over TLS and a shaped link: what the daemon has recorded of its last requests is fetched, and
replaying the plans that were chosen comes to what the daemon has measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import zstandard
from onnx import TensorProto, helper, numpy_helper

from agent.cli import run
from agent.http_client import DaemonClient
from agent.record import unpack
from agent.replay.recording import AsItWas, replayable
from agent.replay.simulate import simulate
from scripts.client import Answer
from scripts.pair import Pair

WIDTH, LAYERS = 512, 8
REQUESTS = 150


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """(MatMul → Relu) × 8 on rows of 512, the widths of their own 512, 64, 512, …: small boundaries between."""
    folder, dice = tmp_path_factory.mktemp("audit"), np.random.default_rng(5)
    nodes, weights, value, width = [], [], "x", WIDTH
    for n in range(LAYERS):
        wide = 64 if n % 2 == 0 else WIDTH
        weights.append(numpy_helper.from_array(dice.standard_normal((width, wide)).astype(np.float32) / 16, f"w{n}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"m{n}"]))
        value, width = "y" if n == LAYERS - 1 else f"r{n}", wide
        nodes.append(helper.make_node("Relu", [f"m{n}"], [value]))
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        weights,
    )
    path = folder / "models" / "layers" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with Pair(folder, folder / "models") as pair:
        pair.start_agent(slowdown=10.0)
        pair.link(rtt_ms=10, rate_mbit=50)
        wait_until_remote(pair)
        yield pair


def wait_until_remote(pair: Pair) -> None:
    """Until forced plans run as forced, and no cut is being compared in the background."""
    deadline_at_s = time.monotonic() + 60.0
    with pair.client() as client:
        for mode in ("split", "offload"):
            while client.infer("layers", {"x": np.zeros((8, WIDTH), np.float32)}, mode=mode).placement != mode:
                assert time.monotonic() < deadline_at_s, f"no {mode} within a minute"
                time.sleep(0.05)
    pair.wait_until_idle()


def asked(pair: Pair) -> list[Answer]:
    """Batches of 8 to 512 rows, each kind of plan."""
    dice, answers = np.random.default_rng(9), []
    with pair.client() as client:
        for n in range(REQUESTS):
            rows = int(2 ** dice.uniform(3, 9))
            x = dice.standard_normal((rows, WIDTH)).astype(np.float32)
            mode = ("auto", "local", "auto", "split", "offload")[n % 5]
            answers.append(client.infer("layers", {"x": x}, mode=mode, deadline_ms=20_000))
    return answers


def test_replaying_the_recorded_plans_comes_to_the_measured_times(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = asked(pair)
    url, kept = f"http://127.0.0.1:{pair.agent_port}", tmp_path / "hour.zst"
    data = DaemonClient(url).fetch("/v2/isthmus/record")
    recording = replayable(unpack(data, name="the last hour"))
    happened = recording.happened[-REQUESTS:]  # before them some that tried whether it is all there
    assert len({one.chosen.placement for one in happened}) == 3
    measured_ms = sum(answer.timings_ms["total"] for answer in answers)
    assert sum(one.request.total_ms for one in happened) == pytest.approx(measured_ms, rel=1e-3)
    replayed = simulate(recording.world, AsItWas(recording))[-REQUESTS:]
    assert sum(one.total_ms for one in replayed) == pytest.approx(measured_ms, rel=0.1)

    text = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    assert not any(answer.request_id.encode() in text for answer in answers)

    assert run(["audit", "--url", url, "--save", str(kept), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] >= REQUESTS
    assert abs(found["replay_off_ratio"]) <= 0.1
    assert run(["audit", str(kept), "--policy", "local"]) == 0
