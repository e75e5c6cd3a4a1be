"""Traces as ONNX Runtime writes them, in microseconds, by hand; one of a real run."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from split.errors import EngineFailed
from split.runtime.node_times import node_times
from split.runtime.segment import OrtEngine


def event(name: str, ts: int, dur: int, cat: str = "Node") -> dict[str, object]:
    return {"cat": cat, "pid": 1, "tid": 2, "dur": dur, "ts": ts, "ph": "X", "name": name, "args": {"op_name": "Add"}}


def trace(*events: dict[str, object]) -> bytes:
    return json.dumps(events).encode()


def test_the_quicker_half_of_each_nodes_runs_counts() -> None:
    events = [event("a_kernel_time", 1000 * n, dur) for n, dur in enumerate((20, 10, 90, 900))]
    assert node_times(trace(*events)) == [("a", pytest.approx(0.015))]


def test_what_is_no_kernel_does_not_count() -> None:
    run = event("model_run", 0, 500, cat="Session")
    fence = event("a_fence_before", 0, 5)
    assert node_times(trace(run, fence, event("a_kernel_time", 10, 40))) == [("a", pytest.approx(0.04))]


def test_nodes_in_a_body_are_part_of_their_loop() -> None:
    inner = [event("body_kernel_time", 10 + 20 * n, 10) for n in range(3)]
    loop, after = event("loop_kernel_time", 5, 80), event("after_kernel_time", 90, 7)
    assert node_times(trace(*inner, loop, after)) == [("loop", pytest.approx(0.08)), ("after", pytest.approx(0.007))]


def test_two_nodes_of_one_name_are_both_counted() -> None:
    events = [
        event(name, 100 * n, 30) for n, name in enumerate(("a_kernel_time", "b_kernel_time", "a_kernel_time") * 2)
    ]
    assert dict(node_times(trace(*events))) == {"a": pytest.approx(0.06), "b": pytest.approx(0.03)}


def test_a_trace_that_is_none_is_said_to_be_none() -> None:
    with pytest.raises(EngineFailed, match="profile cannot be read"):
        node_times(b"[{")


def test_the_runtime_names_every_node_it_ran_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { a = Sin(x) y = Cos(a) }'
    model = onnx.parser.parse_model(text)
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    onnx.save(model, tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    found = OrtEngine().node_times(tmp_path / "m.onnx", {"x": np.ones(4, "f4")}, threads=1, budget_s=0.0)
    assert [name for name, _ in found] == ["n0", "n1"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
