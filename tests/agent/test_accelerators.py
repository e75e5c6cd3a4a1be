"""`resource.accelerators` in the daemon: what this host has runs the model, what it lacks is said, nothing is silent.

No accelerator is here: `AzureExecutionProvider`, which every onnxruntime wheel has and which takes no node, stands for
one; so sessions, child processes and the profile are the real ones of a host that has it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import agent.bringing_up
from agent.commands.status import _lines
from agent.config import AgentConfig, Listen
from agent.daemon import Daemon
from agent.http_client import DaemonClient
from split.errors import ModelUnavailable
from split.profiles.address import HostPort
from split.runtime import accelerators
from split.runtime.accelerators import choose
from split.runtime.segment import OrtEngine, OrtSegment

STANDS_FOR_CUDA = "AzureExecutionProvider"
TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[n, 3] x) => (float[n, 3] y) { a = Relu(x)  y = Exp(a) }
"""


def configured(folder: Path, wanted: str) -> AgentConfig:
    place = folder / "models" / "tiny"
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.onnx").write_bytes(onnx.parser.parse_model(TINY).SerializeToString())
    (place / "contract.yaml").write_text(f"resource: {{accelerators: {wanted}}}\n")
    listen = Listen(http=HostPort("127.0.0.1:0"), unix=None)
    return AgentConfig(models=folder / "models", state_dir=folder / "state", cache_dir=folder / "cache", listen=listen)


def in_status(daemon: Daemon) -> dict[str, Any]:
    (found,) = daemon.service.status()["models"]
    return dict(found)


async def until_profiled(daemon: Daemon) -> None:
    async with asyncio.timeout(60):
        while not in_status(daemon)["profiled"]:  # noqa: ASYNC110 - status is asked, there is no event
            await asyncio.sleep(0.01)


async def test_a_model_that_may_only_run_where_this_host_cannot_is_unavailable_and_says_what_there_is(
    tmp_path: Path,
) -> None:
    async with Daemon(configured(tmp_path, "[cuda, rknpu]")) as daemon:
        with pytest.raises(ModelUnavailable, match="names cuda, rknpu, which this host does not have"):
            await daemon.service.load("tiny")
        found = in_status(daemon)
        assert found["state"] == "UNAVAILABLE"
        assert "(it has cpu)" in found["reason"]
        assert "add cpu to the list" in found["reason"]


async def test_a_model_that_may_run_on_the_processor_does_and_status_says_what_is_missing(tmp_path: Path) -> None:
    async with Daemon(configured(tmp_path, "[cuda, cpu]")) as daemon:
        await daemon.service.load("tiny")
        found = in_status(daemon)
        assert (found["state"], found["runs_on"]) == ("READY", ["cpu"])
        assert "runs on cpu: this host has no cuda" in "\n".join(_lines(daemon.service.status()))
        assert providers_of(daemon.service._repository.serving("tiny").whole()) == ["CPUExecutionProvider"]


async def test_a_model_runs_is_measured_and_is_described_on_the_accelerator_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(accelerators.PROVIDERS, "cuda", STANDS_FOR_CUDA)
    usable = (STANDS_FOR_CUDA, "CPUExecutionProvider")
    monkeypatch.setattr(agent.bringing_up, "choose", partial(choose, usable=lambda: usable))
    async with Daemon(configured(tmp_path, "[cuda, tensorrt, cpu]")) as daemon:
        await daemon.service.load("tiny")
        await until_profiled(daemon)
        url = f"http://127.0.0.1:{daemon.http.ports[0]}"
        answer = await asyncio.to_thread(DaemonClient(url).infer, "tiny", {"x": np.zeros((2, 3), np.float32)}, {})
        assert answer.outputs["y"].tolist() == [[1.0] * 3] * 2
        described = await asyncio.to_thread(DaemonClient(url).describe, "tiny")
        assert described["runs_on"] == in_status(daemon)["runs_on"] == ["cuda", "cpu"]
        assert in_status(daemon)["accelerators_note"] == ""
        model = daemon.service._repository.serving("tiny")
        assert model.profile is not None
        assert model.profile.runtime == f"{OrtEngine().name} Azure", "measured there, and known to be"
        paths = [Path(model.card.path), *model.folder.glob("*.head.onnx"), *model.folder.glob("*.tail.onnx")]
        assert len(paths) > 2
        for path in paths:
            assert providers_of(model.store.get(path)) == list(usable)
        assert not (model.folder / "optimised").exists(), "what is optimised is optimised for the processor"


def providers_of(segment: object) -> list[str]:
    """What the runtime has registered for it."""
    assert isinstance(segment, OrtSegment)
    assert segment._session is not None
    return list(segment._session.get_providers())
