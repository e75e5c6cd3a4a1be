"""The runtime cases that need no daemon, each by its id."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

from split.graph.cuts import all_prefix_cuts
from split.graph.load import load_model
from split.graph.partition import share_weights
from split.runtime.segment import OrtEngine
from split.workbench.check import run_halves
from split.workbench.cut import settle

ROOT = Path(__file__).resolve().parents[2]

MANY_STRINGS = """
import sys, uuid
from pathlib import Path
import numpy as np
from split.runtime.segment import OrtEngine
segment = OrtEngine().open(Path(sys.argv[1]), threads=1)
page_bytes = 4096
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes
def ask(times):
    for _ in range(times):
        text = [str(uuid.uuid4()).encode() for _ in range(4)]
        assert segment.run({"s": np.array(text, dtype=object)})["t"].tolist() == text
ask(2000)
for _ in range(3):
    before = resident()
    ask(6000)
    print(resident() - before)
"""


def test_o_rt_04_strings_leak_nothing(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (string[n] s) => (string[n] t) { t = Identity(s) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    done = subprocess.run(
        [sys.executable, "-c", MANY_STRINGS, str(tmp_path / "model.onnx")],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    growth = [int(line) for line in done.stdout.split()]
    # 1 KiB for each 1,000 requests; a leak grows in every repetition, an allocator settles in one of them.
    assert min(growth) <= 6 * 1024, growth


MANY_SHAPES = """
import random, sys
from pathlib import Path
import numpy as np
from split.runtime.segment import OrtEngine
segment = OrtEngine().open(Path(sys.argv[1]), threads=1)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def ask(height, width):
    segment.run({"x": np.zeros((1, 3, height, width), np.float32)})
dice = random.Random(3)
ask(400, 400)
print(resident())
for number in range(1, 501):
    ask(dice.randint(32, 400), dice.randint(32, 400))
    if number in (100, 500):
        print(resident())
for _ in range(100):
    ask(8, 8)
print(resident())
"""


def test_o_rt_03_every_new_shape_takes_no_more_memory(tmp_path: Path) -> None:
    """In a process of its own; that a request beyond the budget of bytes is refused is tested with the HTTP server."""
    weights = ", ".join("0.1" for _ in range(16 * 27))
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 3, H, W] x) => (float[1, 3, P, Q] y) '
        f"<float[16, 3, 3, 3] w = {{{weights}}}, float[3, 16, 3, 3] v = {{{weights}}}> "
        "{ a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  y = Conv<pads = [1, 1, 1, 1]>(b, v) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    done = subprocess.run(
        [sys.executable, "-c", MANY_SHAPES, str(tmp_path / "model.onnx")],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    biggest, hundred, all_of_them, tiny = (int(line) for line in done.stdout.split())
    assert all_of_them <= 1.1 * hundred
    assert tiny <= 1.3 * biggest


def test_o_rt_06_a_loop_of_no_rounds_is_the_same_split_as_whole(tmp_path: Path) -> None:
    """Over HTTP it is tested with the daemon."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x, int64 m) => (float[3] v, float[R, C] scan) <bool go = {1}> {
            z = Neg (x)
            u = Neg (z)
            v, scan = Loop (m, go, u) <body = b (int64 i, bool c, float[3] u0) => (bool d, float[3] w, float[3] s) {
                d = Identity(c) w = Add(u0, u0) s = Identity(u0)
            }>
        }"""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    model = load_model(path)
    share_weights(model, tmp_path)
    settle(model, tmp_path)
    feeds = {"x": np.float32([1, 2, 3]), "m": np.array(0)}
    whole = OrtEngine().open(path, threads=1).run(feeds)
    assert (whole["v"].tolist(), whole["scan"].ndim, whole["scan"].shape[0]) == ([1, 2, 3], 2, 0)
    cuts = [cut for cut in all_prefix_cuts(model) if cut.legal]
    assert len(cuts) >= 2
    for cut in cuts:
        halves = run_halves(model, cut, OrtEngine(), tmp_path, feeds)
        for name in ("v", "scan"):
            assert halves[name].dtype == whole[name].dtype
            assert halves[name].shape == whole[name].shape
            assert halves[name].tobytes() == whole[name].tobytes()


def test_o_rt_08_no_process_of_ours_is_forked(tmp_path: Path) -> None:
    """A session does not survive a fork: children are programs started anew (`asyncio.create_subprocess_exec`)."""
    for place in ("agent", "cloud", "split"):
        for path in (ROOT / place).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert not any("multiprocessing" in name for name in (*names, module)), path
                assert not (isinstance(node, ast.Attribute) and node.attr in {"fork", "forkpty"}), path
