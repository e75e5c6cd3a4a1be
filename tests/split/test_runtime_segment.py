"""OrtEngine against real onnxruntime; expected values are written out or come from numpy."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.external_data_helper
import onnx.parser
import pytest

from split.errors import ConfigError, EngineFailed, InvalidModel, InvalidRequest
from split.runtime.engine import Stop
from split.runtime.segment import OrtEngine, OrtSegment, usable_providers

TWICE = "<ir_version: 8, opset_import: ['' : 17]> g (float[N, 3] x) => (float[N, 3] y) { y = Add(x, x) }"


def write(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text.replace("'", '"')), path)
    return path


def opened(folder: Path, text: str) -> OrtSegment:
    return OrtEngine().open(write(folder / "model.onnx", text), threads=1)


@pytest.fixture
def twice(tmp_path: Path) -> OrtSegment:
    return opened(tmp_path, TWICE)


def test_a_segment_knows_its_inputs_and_outputs(twice: OrtSegment) -> None:
    assert twice.inputs == ("x",)
    assert twice.outputs == ("y",)
    assert twice.input_specs[0].shape == ("N", 3)


def test_the_last_usable_provider_is_the_cpus() -> None:
    assert usable_providers()[-1] == "CPUExecutionProvider"


def test_the_engines_name_states_runtime_version_and_machine() -> None:
    runtime, version, machine = OrtEngine().name.split()
    assert runtime == "onnxruntime"
    assert version[0].isdigit()
    assert machine == os.uname().machine


@pytest.mark.parametrize(
    "x",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype="<f4").reshape(3, 2).T,
        np.arange(24, dtype="<f4").reshape(4, 6)[::2, ::2],
        np.arange(6, dtype="<f4").reshape(2, 3)[::-1],
        np.empty((0, 3), "<f4"),
        np.frombuffer(np.arange(3, dtype="<f4").tobytes(), "<f4").reshape(1, 3),
    ],
    ids=["dense", "big-endian", "transposed", "strided", "reversed", "empty", "read-only"],
)
def test_any_memory_layout_gives_what_numpy_gives(twice: OrtSegment, x: np.ndarray) -> None:
    y = twice.run({"x": x})["y"]
    np.testing.assert_array_equal(y, (x + x).astype("<f4"))
    assert y.shape == x.shape


def test_scalars_stay_scalars(tmp_path: Path) -> None:
    segment = opened(tmp_path, "<ir_version: 8, opset_import: ['' : 17]> g (float[] x) => (float[] y) { y = Neg(x) }")
    for x in (np.array(3, "<f4"), np.array(3, ">f4")):
        y = segment.run({"x": x})["y"]
        assert y.shape == ()
        assert y == -3


def test_outputs_come_in_the_order_asked_for(tmp_path: Path) -> None:
    segment = opened(
        tmp_path,
        "<ir_version: 8, opset_import: ['' : 17]> g (float[2] x) => (float[2] a, float[2] b) { a = Neg(x) b = Abs(x) }",
    )
    x = np.array([1, -2], "<f4")
    assert list(segment.run({"x": x})) == ["a", "b"]
    assert list(segment.run({"x": x}, ["b", "a"])) == ["b", "a"]
    assert segment.run({"x": x}, ["b"])["b"].tolist() == [1, 2]
    assert segment.run({"x": x}, []) == {}


def test_texts_go_in_as_bytes_or_str_and_come_out_as_bytes(tmp_path: Path) -> None:
    segment = opened(
        tmp_path, "<ir_version: 8, opset_import: ['' : 17]> g (string[n] s) => (string[n] t) { t = Identity(s) }"
    )
    for given in (
        np.array([b"ab", "c\u00e4"], dtype=object),
        np.array(["ab", "c\u00e4"]),
        np.array([b"ab", "c\u00e4".encode()]),
    ):
        assert segment.run({"s": given})["t"].tolist() == [b"ab", "c\u00e4".encode()]
    with pytest.raises(InvalidRequest, match="UTF-8 text, got a byte 0xff at 1"):
        segment.run({"s": np.array([b"a\xff"], dtype=object)})


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({}, "input 'x' is missing; the inputs are 'x'"),
        ({"x": np.zeros((1, 3), "f4"), "q": np.zeros(1, "f4")}, "input 'q' is unknown; the inputs are 'x'"),
        ({"x": np.zeros((1, 3), "f8")}, "tensor 'x' must have datatype FP32, got FP64"),
        ({"x": np.zeros((1, 4), "f4")}, r"tensor 'x' must have shape \[-1, 3\], got \[1, 4\]"),
        ({"x": np.zeros(3, "f4")}, r"tensor 'x' must have shape \[-1, 3\], got \[3\]"),
        ({"x": np.zeros((1, 3), "c8")}, "complex64 is not supported"),
    ],
)
def test_feeds_that_do_not_fit_are_refused_with_what_was_expected_and_what_came(
    twice: OrtSegment, feeds: dict[str, np.ndarray], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        twice.run(feeds)
    assert twice.run({"x": np.ones((1, 3), "f4")})["y"].tolist() == [[2, 2, 2]]


def test_an_output_that_is_not_made_here_is_named(twice: OrtSegment) -> None:
    with pytest.raises(InvalidRequest, match="output 'z' is not made here; the outputs are 'y'"):
        twice.run({"x": np.ones((1, 3), "f4")}, ["z"])


def test_a_failure_inside_the_runtime_is_one_sentence_without_source_paths(tmp_path: Path) -> None:
    segment = opened(
        tmp_path,
        "<ir_version: 8, opset_import: ['' : 17]> g (float[N] x, int64[K] s) => (float[M, L] y) { y = Reshape(x, s) }",
    )
    with pytest.raises(EngineFailed, match="Reshape") as caught:
        segment.run({"x": np.ones(6, "f4"), "s": np.array([4, 2])})
    text = str(caught.value)
    assert "requested shape:{4,2}" in text
    assert ".h:" not in text
    assert "::" not in text
    assert "\n" not in text
    assert "ONNXRuntimeError" not in text


def test_an_index_out_of_range_is_the_callers_mistake(tmp_path: Path) -> None:
    segment = opened(
        tmp_path,
        "<ir_version: 8, opset_import: ['' : 17]> g (float[4] x, int64[K] i) => (float[K] y) { y = Gather(x, i) }",
    )
    with pytest.raises(InvalidRequest, match="idx=9"):
        segment.run({"x": np.ones(4, "f4"), "i": np.array([9])})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<ir_version: 8, opset_import: ['' : 17]> g (float[1] x) => (float[1] y) { y = Frob(x) }", "Frob"),
        ("<ir_version: 8, opset_import: ['' : 17]> g (float[1] x) => (float[1] y) { y = Add(x, q) }", "'q'"),
        (
            "<ir_version: 8, opset_import: ['' : 17]> g (bfloat16[3] x) => (bfloat16[3] y) { y = Identity(x) }",
            "'x' is a tensor\\(bfloat16\\)",
        ),
    ],
)
def test_a_model_the_runtime_cannot_serve_is_refused_when_it_is_opened(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        opened(tmp_path, text)


def test_a_file_that_is_no_model_or_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"not a model" * 50)
    with pytest.raises(InvalidModel, match=r"junk\.onnx"):
        OrtEngine().open(junk, threads=1)
    with pytest.raises(InvalidModel, match="is not a file"):
        OrtEngine().open(tmp_path / "absent.onnx", threads=1)


def test_a_provider_this_build_does_not_have_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="NoSuchExecutionProvider is not in this build"):
        OrtEngine(["NoSuchExecutionProvider"])


def test_a_closed_segment_refuses_to_run(twice: OrtSegment) -> None:
    twice.close()
    with pytest.raises(EngineFailed, match="is closed"):
        twice.run({"x": np.ones((1, 3), "f4")})


def test_external_weights_are_found_beside_the_model_whatever_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) <float[3] w = {10, 20, 30}> '
        "{ y = Add(x, w) }"
    )
    [weights] = model.graph.initializer
    weights.CopyFrom(onnx.numpy_helper.from_array(np.array([10, 20, 30], "f4"), "w"))
    folder = tmp_path / "model"
    folder.mkdir()
    onnx.save_model(model, folder / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    assert (folder / "w.data").is_file()
    for cwd in (folder, Path("/")):
        monkeypatch.chdir(cwd)
        segment = OrtEngine().open(folder / "m.onnx", threads=1)
        assert segment.run({"x": np.array([1, 2, 3], "f4")})["y"].tolist() == [11, 22, 33]


def test_a_loop_of_no_rounds_gives_an_empty_output_of_the_right_rank(tmp_path: Path) -> None:  # O-RT-06
    segment = opened(
        tmp_path,
        """<ir_version: 8, opset_import: ['' : 17]> g (float[3] x, int64 m, bool go) => (float[3] v, float[R, 3] scan) {
            v, scan = Loop (m, go, x) <body = b (int64 i, bool c, float[3] u) => (bool d, float[3] w, float[3] s) {
                d = Identity(c) w = Add(u, u) s = Identity(u)
            }>
        }""",
    )
    made = segment.run({"x": np.array([1, 2, 3], "f4"), "m": np.array(0), "go": np.array(True)})
    assert made["v"].tolist() == [1, 2, 3]
    assert made["scan"].ndim == 2
    assert made["scan"].shape[0] == 0
    assert made["scan"].nbytes == 0


def test_a_model_that_the_runtime_would_die_of_takes_no_empty_tensor(tmp_path: Path) -> None:
    """The recurrent kernels end the process when the batch is empty, wherever in the model they are."""
    for call, gates in ((f"{op} <hidden_size = 1> (x, w, r)", gates) for op, gates in (("LSTM", 4), ("GRU", 3))):
        ones = ", ".join(["1"] * gates * 2)
        segment = opened(
            tmp_path,
            f"""<ir_version: 8, opset_import: ['' : 17]> g (float[T, B, 2] x, bool c) => (float[D, E, F, 1] y)
            <float[1, {gates}, 2] w = {{{ones}}}, float[1, {gates}, 1] r = {{{", ".join(["0"] * gates)}}},
             int64[1] two = {{2}}, int64[1] one = {{1}}> {{ y = If (c) <
              then_branch = on () => (float[D, E, F, 1] p) {{ p, h = {call} }},
              else_branch = off () => (float[D, E, F, 1] q) {{
                s = ReduceSum (x, two)
                q = Unsqueeze (s, one)
              }} > }}""",
        )
        yes, no = np.array(True), np.array(False)
        assert segment.run({"x": np.ones((2, 3, 2), "f4"), "c": yes})["y"].shape == (2, 1, 3, 1)
        for c in (yes, no):
            with pytest.raises(
                InvalidRequest, match=r"tensor 'x' is empty \(\[2, 0, 2\]\), which onnxruntime does not"
            ):
                segment.run({"x": np.ones((2, 0, 2), "f4"), "c": c})


def test_one_segment_may_run_on_several_threads(twice: OrtSegment) -> None:
    right: list[bool] = []

    def work(number: int) -> None:
        x = np.full((64, 3), number, "f4")
        right.append(all((twice.run({"x": x})["y"] == 2 * number).all() for _ in range(50)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 4


PINNED = """
import sys
from pathlib import Path
import numpy as np
from split.runtime.engine import Stop
from split.runtime.segment import OrtEngine, usable_threads
engine = OrtEngine()
segments = [engine.open(Path(sys.argv[1]), threads=threads) for threads in (usable_threads(), 2)]
for segment in segments:
    assert segment.run({"x": np.ones((1, 3), "f4")})["y"].tolist() == [[2, 2, 2]]
print(usable_threads())
"""


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_pinned_to_one_core_two_sessions_run_and_nothing_complains(tmp_path: Path) -> None:  # O-RT-01
    path = write(tmp_path / "model.onnx", TWICE)
    core = str(min(os.sched_getaffinity(0)))
    done = subprocess.run(
        ["taskset", "-c", core, sys.executable, "-c", PINNED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert done.stderr == ""


def test_the_runtime_leaves_nothing_in_the_home_directory(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", TWICE)
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", PINNED, str(path)],
        env=env | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []


DOUBLES = """<ir_version: 8, opset_import: ['' : 17]> g (int64 n, float x) => (float y) {
  going = Constant <value = bool {1}> ()
  y = Loop <body = b (int64 i, bool on, float v) => (bool still, float w) {
    still = Identity(on) w = Add(v, v)
  }> (n, going, x)
}"""
"""y = 2ⁿ · x, in n steps."""


@pytest.mark.parametrize("asked", ["before", "while it runs"])
def test_a_run_that_is_stopped_ends_and_the_segment_runs_again(tmp_path: Path, asked: str) -> None:
    class AskedSoon(Stop):
        def begins(self, end: Callable[[], object]) -> None:
            super().begins(end)
            threading.Thread(target=self.ask).start()

    segment = opened(tmp_path, DOUBLES)
    stop = Stop() if asked == "before" else AskedSoon()
    if asked == "before":
        stop.ask()
    errors: list[Exception] = []

    def run() -> None:
        try:
            segment.run({"n": np.array(2**50), "x": np.array(3.0, np.float32)}, stop=stop)
        except EngineFailed as error:
            errors.append(error)

    running = threading.Thread(target=run, daemon=True)  # years, unless stopped
    running.start()
    running.join(30)
    assert not running.is_alive()
    assert "terminate" in str(errors[0])
    doubled = segment.run({"n": np.array(2), "x": np.array(3.0, np.float32)}, stop=Stop())
    assert doubled["y"] == 12.0
    stop.ask()  # it is over
    assert segment.run({"n": np.array(1), "x": np.array(3.0, np.float32)})["y"] == 6.0
