"""`scripts/simulate` in this process, on one short question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from scripts.simulate import main


def test_it_prints_the_figures_writes_them_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", "outage", "--slowdown", "20", "--policy", "ours", "--policy", "local", "--per-second", "1"]
    outputs = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "plots")]
    assert main([*options, *outputs]) == 0
    printed = capsys.readouterr().out
    assert "outage, device 20 times slower, 60 requests" in printed
    ours, local = json.loads((tmp_path / "figures.json").read_text())
    assert (ours["policy"], local["policy"]) == ("ours", "local")
    # 20 · (5.2 + 2) ms, with 5 % scatter over 60 requests
    assert local["mean_ms"] == pytest.approx(144.0, rel=0.03)
    assert (local["missed"], local["bytes"], local["switches"], local["probe_bytes"]) == (0, 0.0, 0, 0)
    assert ours["mean_ms"] < local["mean_ms"]
    assert len(ours["recover_requests"]) == 2
    with Image.open(tmp_path / "plots" / "outage-20.png") as picture:
        assert picture.size == (1000, 560)
