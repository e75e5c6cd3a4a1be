"""Two real processes over TLS and a shaped link; the companion is killed, frozen, restarted and cut off at every stage
of a request. Whatever happens: one answer each, the right one (against onnxruntime here), and remote use comes back.

Where a fault is to hit a stage, the request is forced to `split` or `offload` and made long enough there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from scripts.client import Answer
from scripts.pair import Pair

WIDTH = 1024
LAYERS = 12
ROWS = 96
"""Boundary and output of 96 × 1024 floats: 393 KB, 0.3 s at 10 Mbit/s each way; a layer takes some milliseconds."""


def heavy_model(path: Path) -> None:
    """x → (Gemm → Relu) × 12 → y, with seeded weights scaled so that values stay around 1."""
    random = np.random.default_rng(7)
    nodes, weights = [], []
    value = "x"
    for layer in range(LAYERS):
        matrix = (random.standard_normal((WIDTH, WIDTH)) * np.sqrt(2 / WIDTH)).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"]))
        value = "y" if layer == LAYERS - 1 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [value]))
    graph = helper.make_graph(
        nodes,
        "heavy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        weights,
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


X = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    heavy_model(folder / "models" / "heavy" / "1" / "model.onnx")
    with Pair(folder, folder / "models") as pair:
        pair.start_agent(slowdown=1.0)
        yield pair


@pytest.fixture(scope="module")
def expected(pair: Pair) -> np.ndarray:
    session = ort.InferenceSession(str(pair.models / "heavy" / "1" / "model.onnx"))
    return session.run(None, {"x": X})[0]


@pytest.fixture
def remote(pair: Pair) -> Pair:
    """The companion is up, the link fast, and both halves of every cut are ready."""
    pair.link(rtt_ms=2, rate_mbit=1000)
    wait_until(lambda: remote_works(pair))
    return pair


def ask(pair: Pair, mode: str = "auto", deadline_ms: float = 8000) -> Answer:
    with pair.client() as client:
        return client.infer("heavy", {"x": X}, mode=mode, deadline_ms=deadline_ms)


def remote_works(pair: Pair) -> bool:
    return ask(pair, "split").placement == "split" and ask(pair, "offload").placement == "offload"


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_at_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_at_s, "it never became true"
        time.sleep(0.05)


def assert_right(answer: Answer, expected: np.ndarray) -> None:
    worst = np.abs(answer.outputs["y"] - expected).max() / np.abs(expected).max()
    assert worst <= 1e-5, (answer.plan, worst)


def while_it_runs(pair: Pair, mode: str, after_s: float, fault: Callable[[], None]) -> Answer:
    """One forced request, the fault `after_s` seconds into it."""
    with ThreadPoolExecutor(1) as pool:
        answer: Future[Answer] = pool.submit(ask, pair, mode)
        threading.Event().wait(after_s)
        fault()
        return answer.result(timeout=30)


def test_what_crossed_the_link_is_counted_under_its_interface(remote: Pair) -> None:
    with remote.client() as client:
        before = client.get("/v2/isthmus/status")["metering"]
        for _ in range(3):
            assert client.infer("heavy", {"x": X}, mode="offload", deadline_ms=8000).placement == "offload"
        after = client.get("/v2/isthmus/status")["metering"]
    assert list(after["interfaces"]) == ["lo"]
    crossed = after["used_bytes"] - before["used_bytes"]
    assert 6 * X.nbytes <= crossed <= 6 * X.nbytes * 1.2 + 100_000
    model = remote.models / "heavy" / "1" / "model.onnx"
    assert after["used_bytes"] >= model.stat().st_size  # it was sent, once


@pytest.mark.parametrize("mode", ["split", "offload"])
@pytest.mark.parametrize(
    ("stage", "rate_mbit", "after_s"),
    [("on the way up", 10, 0.15), ("at the companion or on the way down", 10, 0.45), ("near its end", 10, 0.62)],
)
def test_a_companion_killed_at_any_stage_loses_no_request(
    remote: Pair, expected: np.ndarray, mode: str, stage: str, rate_mbit: float, after_s: float
) -> None:
    remote.link(rtt_ms=10, rate_mbit=rate_mbit)
    answer = while_it_runs(remote, mode, after_s, remote.kill_companion)
    assert_right(answer, expected)
    remote.start_companion()


def test_a_frozen_companion_is_overtaken_by_the_deadline_and_used_again_when_it_thaws(
    remote: Pair, expected: np.ndarray
) -> None:
    remote.freeze_companion()
    try:
        # Long enough that a busy machine, too, finishes the tail in what is kept for it.
        answer = ask(remote, "split", deadline_ms=5000)
        assert_right(answer, expected)
        assert answer.placement == "local"
        assert answer.fallback
        assert_right(ask(remote), expected)
    finally:
        remote.thaw_companion()
    wait_until(lambda: remote_works(remote), timeout_s=10)


@pytest.mark.parametrize("mode", ["split", "offload"])
def test_a_link_that_is_cut_loses_no_request(remote: Pair, expected: np.ndarray, mode: str) -> None:
    remote.link(rtt_ms=10, rate_mbit=10)
    try:
        answer = while_it_runs(remote, mode, 0.2, remote.cut_link)
    finally:
        remote.restore_link()
    assert_right(answer, expected)
    assert answer.fallback  # all of it was finished here, or, of a batch in parts, those parts that were under way


def test_a_link_that_falls_silent_loses_no_request_and_is_used_again(remote: Pair, expected: np.ndarray) -> None:
    """Silent for longer than the device waits before it dials anew beside the old connection."""
    answer = while_it_runs(remote, "split", 0.0, remote.silence_link)
    assert_right(answer, expected)
    for _ in range(8):
        assert_right(ask(remote, "offload", deadline_ms=1500), expected)
        threading.Event().wait(1.0)
    remote.restore_link()
    wait_until(lambda: remote_works(remote), timeout_s=10)


def test_a_companion_killed_while_it_takes_the_model_over_is_no_reason_to_fail(
    pair: Pair, expected: np.ndarray
) -> None:
    pair.kill_companion()
    pair.forget_companion_models()
    pair.link(rtt_ms=10, rate_mbit=100)  # 50 MB of weights: four seconds
    pair.start_companion()
    threading.Event().wait(1.0)
    assert_right(ask(pair), expected)
    pair.kill_companion()
    assert_right(ask(pair), expected)
    pair.start_companion()
    pair.link(rtt_ms=2, rate_mbit=1000)
    wait_until(lambda: remote_works(pair))


def test_a_stream_of_requests_survives_a_restart_of_the_companion(remote: Pair, expected: np.ndarray) -> None:
    stop = threading.Event()

    def restart() -> None:
        stop.wait(0.5)
        remote.kill_companion()
        stop.wait(0.3)
        remote.start_companion()

    def stream(mode: str) -> list[Answer]:
        return [ask(remote, mode) for _ in range(30)]

    with ThreadPoolExecutor(3) as pool:
        restarted = pool.submit(restart)
        streams = [pool.submit(stream, mode) for mode in ("split", "auto")]
        answers = [answer for each in streams for answer in each.result(timeout=120)]
        restarted.result(timeout=60)
    assert len(answers) == 60
    for answer in answers:
        assert_right(answer, expected)
    wait_until(lambda: remote_works(remote), timeout_s=10)


@pytest.mark.parametrize(
    "damaged",
    [
        "companion-cache/models/*/*.tail.onnx",
        "companion-cache/models/*/weights.bin",
        "companion-state/models/*/files/*",
        "companion-state/models/*/manifest.json",
    ],
)
def test_files_damaged_at_the_companion_are_made_or_sent_again(
    remote: Pair, expected: np.ndarray, damaged: str
) -> None:
    remote.kill_companion()
    files = sorted(remote.folder.glob(damaged))
    assert files
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    remote.start_companion()
    assert_right(ask(remote), expected)
    wait_until(lambda: remote_works(remote), timeout_s=30)
