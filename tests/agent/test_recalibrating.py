"""agent/recalibrating.py: what is laid beside a served model is taken up once, and nothing is looked at in vain."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent import recalibrating
from agent.calibrated import NO_SIDECAR, Sidecar, stamp_of
from agent.recalibrating import Recalibrating
from split.codec.calibration import CALIBRATION_FILE


class World:
    """One served model; a file's content stands for the sidecar that it is."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.path = folder / "model.onnx"
        self.sidecar = folder / CALIBRATION_FILE
        self.model = SimpleNamespace(profile=object(), digest="d", sidecar=NO_SIDECAR)
        self.entry = SimpleNamespace(name="m", model=self.model, path=self.path)
        self.adopted: list[bytes] = []
        self.read = 0
        self.others = 0
        """As many more like it."""
        self.looks = Recalibrating(entries=lambda: [self.entry] * (1 + self.others), adopt=self._adopt)  # type: ignore[arg-type, list-item]  # as far as they are looked at
        monkeypatch.setattr(recalibrating, "sidecar_beside", self._sidecar)

    def _sidecar(self, path: Path, digest: str) -> Sidecar:
        self.read += 1
        if not self.sidecar.exists():
            return NO_SIDECAR
        return Sidecar(data=self.sidecar.read_bytes(), stamp=stamp_of(self.sidecar))

    def _adopt(self, entry: Any, model: Any, sidecar: Sidecar) -> None:
        assert model is self.model
        self.adopted.append(sidecar.data)
        self.model = self.entry.model = SimpleNamespace(profile=object(), digest="d", sidecar=sidecar)

    def lay(self, data: bytes) -> None:
        """In one step, as `isthmus calibrate` does."""
        fresh = self.sidecar.with_name("fresh")
        fresh.write_bytes(data)
        fresh.replace(self.sidecar)


async def test_a_new_file_is_taken_up_once_and_one_that_goes_too(tmp_path: Path, monkeypatch: Any) -> None:
    world = World(tmp_path, monkeypatch)
    await world.looks.look()
    assert world.adopted == []
    world.lay(b"one")
    for _ in range(3):
        await world.looks.look()
    world.lay(b"two")
    await world.looks.look()
    world.sidecar.unlink()
    await world.looks.look()
    assert world.adopted == [b"one", b"two", b""]


async def test_files_that_stay_as_they_are_are_not_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    world = World(tmp_path, monkeypatch)
    world.lay(b"one")
    for _ in range(5):
        await world.looks.look()
    assert world.read == 1
    os.utime(world.sidecar, ns=(1, 1))
    for _ in range(5):
        await world.looks.look()
    assert (world.read, world.adopted) == (2, [b"one"])


async def test_what_was_read_when_the_model_was_loaded_is_not_read_again_and_all_are_looked_at_on_one_thread(
    tmp_path: Path, monkeypatch: Any
) -> None:
    world, threads = World(tmp_path, monkeypatch), list[Any]()
    world.lay(b"loaded")
    world.model.sidecar = world._sidecar(world.path, "d")
    to_thread = asyncio.to_thread

    async def counted(work: Any, *arguments: Any) -> Any:
        threads.append(work)
        return await to_thread(work, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    world.others = 99
    await world.looks.look()
    assert (world.read, world.adopted, len(threads)) == (1, [], 1)


async def test_a_model_that_is_not_measured_or_became_another_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    world = World(tmp_path, monkeypatch)
    world.lay(b"one")
    world.model.profile = None
    await world.looks.look()
    assert (world.read, world.adopted) == (0, [])
    world.model.profile = object()
    real = world._sidecar

    def and_is_unloaded(path: Path, digest: str) -> Sidecar:
        world.entry.model = None
        return real(path, digest)

    monkeypatch.setattr(recalibrating, "sidecar_beside", and_is_unloaded)
    await world.looks.look()
    assert world.adopted == []
