"""Joules from end to end: a daemon told which board it is on, a request, and what it says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import onnx
import onnx.parser
import pytest

from agent.config import AgentConfig, Emulation, Listen
from agent.daemon import Daemon
from split.profiles.address import HostPort

TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }
"""
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [[1.0, -2.0, 3.0]]}]}


async def test_a_request_on_a_raspberry_pi_4_reports_modelled_joules_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny" / "1"
    folder.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(TINY), folder / "model.onnx")
    config = AgentConfig(
        models=tmp_path / "models",
        state_dir=tmp_path / "state",
        cache_dir=tmp_path / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0")),
        device="raspberry-pi-4",
        emulation=Emulation(slowdown=3.0),
    )
    async with Daemon(config) as daemon, aiohttp.ClientSession(f"http://127.0.0.1:{daemon.http.ports[0]}") as session:

        async def get(path: str) -> Any:
            async with session.get(path) as answer:
                return await answer.json() if path != "/metrics" else await answer.text()

        async with asyncio.timeout(60):
            while True:
                status = await get("/v2/isthmus/status")
                if status["models"] and status["models"][0]["profiled"]:
                    break
                await asyncio.sleep(0.05)
        async with session.post("/v2/models/tiny/infer", json=BODY) as answer:
            request_id = (await answer.json())["parameters"]["isthmus.request_id"]
        explained = await get(f"/v2/isthmus/explain/{request_id}")
        status, page = await get("/v2/isthmus/status"), await get("/metrics")
    energy = explained["energy"]
    assert not energy["measured"]
    assert energy["source"].startswith("modelled: raspberry-pi-4")
    # The profile: 7.2 W busy, 3 W idle, by the share of its four cores that this machine's threads would be.
    watts = 4.2 * min(status["threads"], 4) / 4
    assert status["power"]["compute_w"] == pytest.approx(watts)
    assert energy["used_j"] == pytest.approx(watts * explained["measured_ms"]["whole"] / 1000, abs=1e-4)
    assert status["models"][0]["joules"] == pytest.approx(energy["used_j"], abs=1e-4)
    assert 'isthmus_energy_joules_total{measured="false",model="tiny"}' in page
