"""Real processes over TLS: companions are restarted one after the other while two dozen callers send. No request fails,
every answer is right (against numpy here), and with a second companion the remote answers go on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from scripts.client import Answer
from scripts.pair import STATUS, Pair

WIDTH, LAYERS = 256, 6
WORKERS = 24
DICE = np.random.default_rng(11)
MATRICES = [(DICE.standard_normal((WIDTH, WIDTH)) * np.sqrt(2 / WIDTH)).astype(np.float32) for _ in range(LAYERS)]
MODES = ("split", "offload", "auto")


def by_numpy(x: np.ndarray) -> np.ndarray:
    """The model, in double precision."""
    value = x.astype(np.float64)
    for matrix in MATRICES:
        value = np.maximum(value @ matrix, 0.0)
    return value


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("rolling")
    path = folder / "models" / "layers" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    nodes, value = [], "x"
    for n in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [value, f"w{n}"], [f"m{n}"]))
        value = "y" if n == LAYERS - 1 else f"r{n}"
        nodes.append(helper.make_node("Relu", [f"m{n}"], [value]))
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(matrix, f"w{n}") for n, matrix in enumerate(MATRICES)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    with Pair(folder, folder / "models", companions=2) as pair:
        pair.start_agent(slowdown=1.0)
        yield pair


class Callers:
    """Each sends one request after the other until they are stopped. An error ends its caller and is raised
    at the end."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stop = threading.Event()
        self.answers: list[tuple[Answer, np.ndarray]] = []

    def call(self, number: int) -> int:
        """How many answers this caller got."""
        dice, count = np.random.default_rng(number), 0
        with self._pair.client() as client:
            for mode in itertools.cycle(MODES):
                if self._stop.is_set():
                    return count
                x = dice.standard_normal((4, WIDTH)).astype(np.float32)
                self.answers.append((client.infer("layers", {"x": x}, mode=mode, deadline_ms=30_000.0), x))
                count += 1
        return count

    def remote_so_far(self) -> int:
        return sum(answer.placement != "local" for answer, _ in self.answers)

    def until_remote(self, more: int = 50) -> None:
        """Until so many more answers have come from a companion."""
        wanted = self.remote_so_far() + more
        wait_until(lambda: self.remote_so_far() >= wanted)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def calling(pair: Pair) -> Iterator[Callers]:
    """Two dozen callers; at the end every one of them has had answers only, and all of them were right."""
    callers = Callers(pair)
    with ThreadPoolExecutor(WORKERS) as pool:
        calls = [pool.submit(callers.call, number) for number in range(WORKERS)]
        try:
            yield callers
        finally:
            callers.stop()
        counts = [call.result(timeout=60) for call in calls]
    assert min(counts) > 0
    for answer, x in callers.answers:
        expected = by_numpy(x)
        assert np.abs(answer.outputs["y"] - expected).max() <= 1e-4 * np.abs(expected).max(), answer.plan


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_at_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_at_s, "it never became true"
        time.sleep(0.05)


def address(pair: Pair) -> str:
    with pair.client() as client:
        return str(client.get(STATUS)["companion"]["address"])


def number_in_use(pair: Pair) -> int:
    return 1 if address(pair).endswith(f":{pair._companion_ports[1]}") else 0


def test_companions_that_are_restarted_in_turn_under_load_fail_no_request(pair: Pair) -> None:
    with calling(pair) as callers:
        for _ in range(2):
            callers.until_remote()
            used = number_in_use(pair)
            pair.stop_companion(used)
            callers.until_remote()  # by the other one, while this one is away
            assert number_in_use(pair) != used
            pair.start_companion(used)


def test_an_only_companion_that_is_restarted_under_load_fails_no_request(pair: Pair) -> None:
    pair.stop_companion(1)
    try:
        with calling(pair) as callers:
            for _ in range(2):
                callers.until_remote()
                pair.stop_companion(0)
                pair.start_companion(0)
            callers.until_remote()
    finally:
        pair.start_companion(1)
