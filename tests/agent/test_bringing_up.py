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
from split.codec.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    CutTables,
    TensorTables,
    decode_calibration,
    write_calibration,
)
from split.graph.load import model_digest
from split.ids import ModelDigest, ModelName
from split.profiles.measured import Point
from split.workbench.cut import folder_for, prepare
from tests.calibrated_model import save_model


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


async def test_a_model_whose_card_is_in_the_cache_is_brought_up_with_one_look_into_its_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "models/m/1/model.onnx"
    path.parent.mkdir(parents=True)
    save_model(path)
    digest = model_digest(path)[0]
    folder = folder_for(tmp_path / "cache", digest, path)
    cut = prepare(path, folder).cuts[0]
    calibration = Calibration(
        model=digest,
        inputs=2,
        tables={
            cut.id: CutTables(tensors=(TensorTables(spec=cut.boundary[0], klt=None),), node_bitmap=cut.node_bitmap)
        },
        curves={
            cut.id: Curve(
                points=(Point(level=3, mean_bytes=30.0, p95_bytes=30.0, fidelity={}, fidelity_high={}),), inputs=2
            )
        },
    )
    write_calibration(calibration, path.with_name(CALIBRATION_FILE))
    prepare(path, folder)
    decoded: list[bytes] = []
    for module in ("agent.calibrated", "split.codec.calibration"):

        def counted(data: bytes, model: ModelDigest | None) -> Calibration:
            decoded.append(data)
            return decode_calibration(data, model)

        monkeypatch.setattr(f"{module}.decode_calibration", counted)

    async def warm(model: Any) -> None:
        return

    stored: Any = None  # which is not asked
    entry = Entry(name=ModelName("m"), version="1", path=path, state=ModelState.LOADING)
    up = BringingUp(
        folder=tmp_path / "models",
        cache_dir=tmp_path / "cache",
        store=stored,
        timeout_s=10.0,
        memory_bytes=None,
        runtime="r",
        machine="m",
        warm_up=warm,
        on_ready=lambda model: None,
        in_use=set,
    )
    _, card, sidecar = await up._card(entry)
    assert len(decoded) == 1
    assert sidecar.calibration is not None
    assert cut.id in sidecar.calibration.tables
    assert card.calibrated == (cut.id,)
