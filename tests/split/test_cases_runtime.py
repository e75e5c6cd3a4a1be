"""The runtime cases that need no daemon, each by its id."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser

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


def test_o_rt_08_no_process_of_ours_is_forked(tmp_path: Path) -> None:
    """A session does not survive a fork: children are programs started anew (`asyncio.create_subprocess_exec`)."""
    for place in ("agent", "cloud", "split"):
        for path in (ROOT / place).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert not any("multiprocessing" in name for name in (*names, module)), path
                assert not (isinstance(node, ast.Attribute) and node.attr in {"fork", "forkpty"}), path
