"""agent/bringing_up.py where something happens while it waits; what becomes of model files is `test_daemon.py`'s."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import bringing_up, recalibrating
from agent.bringing_up import BringingUp, Entry, ModelState
from agent.calibrated import NO_SIDECAR, Sidecar
from agent.recalibrating import Recalibrating
from split.ids import ModelName


async def test_a_calibration_laid_while_the_model_is_measured_is_not_undone_by_the_model_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, fresh = asyncio.get_running_loop(), Sidecar(data=b"laid meanwhile", stamp=(1, 2, 3))
    model = SimpleNamespace(
        card=SimpleNamespace(path="", digest="d"),
        choice=SimpleNamespace(accelerated=True, providers=("some",)),
        contract=SimpleNamespace(resource=SimpleNamespace(threads=1)),
        digest="d",
        folder=tmp_path,
        profile=None,
        sidecar=NO_SIDECAR,
    )
    entry = Entry(name=ModelName("m"), version="1", path=tmp_path / "model.onnx", state=ModelState.READY)
    entry.model = model  # type: ignore[assignment]  # as far as it is looked at
    told: list[Any] = []

    def adopt(entry: Any, served: Any, sidecar: Sidecar) -> None:
        entry.model = SimpleNamespace(**{**vars(served), "sidecar": sidecar})
        told.append(entry.model)

    looks = Recalibrating(entries=lambda: [entry], adopt=adopt)

    def machine() -> Any:
        """On a thread, while the loop goes on."""
        asyncio.run_coroutine_threadsafe(looks.look(), loop).result(10.0)
        return SimpleNamespace(threads=1)

    async def child(*arguments: Any, **options: Any) -> None:
        return

    monkeypatch.setattr(bringing_up, "run_child", child)
    monkeypatch.setattr(bringing_up, "read_machine", machine)
    monkeypatch.setattr(bringing_up, "remove_former", lambda *arguments, **options: None)
    monkeypatch.setattr(bringing_up, "calibrated", lambda card, profile, calibration: profile)
    monkeypatch.setattr(BringingUp, "_profile", lambda *arguments: SimpleNamespace(tuning=None))
    monkeypatch.setattr(recalibrating, "stamp_of", lambda path: fresh.stamp)
    monkeypatch.setattr(recalibrating, "sidecar_beside", lambda path, digest: fresh)
    stored: Any = SimpleNamespace(tune=lambda paths, tuning: None)

    async def warm(model: Any) -> None:
        return

    await BringingUp(
        folder=tmp_path,
        cache_dir=tmp_path,
        store=stored,
        timeout_s=1.0,
        memory_bytes=None,
        runtime="r",
        machine="m",
        warm_up=warm,
        on_ready=told.append,
        in_use=set,
    ).run(entry, "")
    assert entry.reason == ""
    assert told[-1] is entry.model
    await looks.look()
    assert (told[-1], entry.model.sidecar) == (entry.model, fresh)
