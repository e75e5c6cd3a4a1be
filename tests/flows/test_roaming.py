"""A device whose address changes while requests are under way, with real processes in a network namespace of its own:
nothing is lost, every answer is right, and the companion is used again from each new address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
roaming (float[1,3,64,64] x) => (float[1,3,64,64] y)
{
  a = Relu(x)
  b = Exp(a)
  c = Tanh(b)
  y = Add(a, c)
}
"""


def test_a_device_that_changes_its_address_under_load_loses_no_request(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare for a network namespace")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no network namespace")
    path = tmp_path / "models" / "roaming" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(MODEL), path)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "scripts.roam", str(tmp_path), "roaming", "--changes", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["lost"], found["wrong"]) == (0, 0), (found, done.stderr)
    assert found["connects"] >= 4
    assert found["remote"] >= 200
