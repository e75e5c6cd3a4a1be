"""The device's models: what lies in the repository folder, and who may change which of them when.

Layout as Triton has it: `MODELS/<name>/<version>/model.onnx`, beside the versions `contract.yaml` and `golden/`. How
one becomes READY is `bringing_up.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.bringing_up import BringingUp, Entry, ModelState
from agent.calibrated import Sidecar, calibrated
from agent.model_folders import ModelFolder, find_models
from agent.served_model import ServedModel
from split.errors import ModelUnavailable, UnknownModel
from split.ids import ModelName
from split.runtime.store import SegmentStore

UNLOADED: Final = "unloaded"
"""Triton's reason why a model is UNAVAILABLE with which nothing is wrong."""


class Repository:
    """Owns the entries and the tasks that load them.

    `timeout_s`, `memory_bytes`: of each child process, see `run_child`; opening a model here may take as long.
    `runtime`, `machine`: what a profile must have been measured on. `on_ready`, `on_gone` and `on_recalibrated` (what
    is served under the name from now on) tell planner and uplink.
    """

    def __init__(
        self,
        *,
        folder: Path,
        cache_dir: Path,
        store: SegmentStore,
        timeout_s: float,
        memory_bytes: int | None,
        runtime: str,
        machine: str,
        warm_up: Callable[[ServedModel], Awaitable[None]],
        on_ready: Callable[[ServedModel], None],
        on_gone: Callable[[ServedModel], None],
        on_recalibrated: Callable[[ServedModel], None],
    ) -> None:
        self._folder = folder
        self._on_gone = on_gone
        self._on_recalibrated = on_recalibrated
        self._entries: dict[ModelName, Entry] = {}
        self._changing: dict[ModelName, asyncio.Lock] = {}
        """Of the names in the folder: one load or unload of each at a time."""
        self._changes: set[asyncio.Task[None]] = set()
        self._bringing_up = BringingUp(
            folder=folder,
            cache_dir=cache_dir,
            store=store,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            runtime=runtime,
            machine=machine,
            warm_up=warm_up,
            on_ready=on_ready,
            in_use=lambda: {model.folder for model in self.served()},
        )

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def served(self) -> list[ServedModel]:
        """What answers requests now."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def serving(self, name: str, version: str | None = None) -> ServedModel:
        """The model as served; UnknownModel or ModelUnavailable with the reason."""
        entry = self._entries.get(ModelName(name))
        if entry is None or (version and version != entry.version):
            known = ", ".join(self._entries) or "none"
            raise UnknownModel(
                f"Request for unknown model: {name!r}{f' version {version}' if version else ''} (known: {known})"
            )
        if entry.model is None or entry.state is not ModelState.READY:
            raise ModelUnavailable(f"model {name!r} is {entry.state}{f': {entry.reason}' if entry.reason else ''}")
        return entry.model

    def start(self) -> None:
        """Begin to load everything that lies in the folder; ConfigError when that cannot be read."""
        for name, place in find_models(self._folder).items():
            self._begin(name, place)

    async def load(self, name: str) -> None:
        """Load (again) by name and wait until it is READY; UnknownModel, or the reason it cannot be used.

        Loads of one model that come together follow one another. A caller that leaves does not stop what it began.
        """
        found = await asyncio.to_thread(find_models, self._folder)
        place = found.get(ModelName(name))
        if place is None:
            raise UnknownModel(f"failed to load {name!r}: no folder {name}/<version>/model.onnx in {self._folder}")
        await self._owned(self._load(ModelName(name), place))

    async def unload(self, name: str) -> None:
        """Stop serving a model; its requests in flight are answered first by whoever holds them."""
        entry = self._entries.get(ModelName(name))
        if entry is None:
            raise UnknownModel(f"Request for unknown model: {name!r}")
        if entry.state is ModelState.LOADING and entry.task is not None:
            entry.task.cancel()  # nobody waits for what is not wanted
        await self._owned(self._unload(ModelName(name)))

    async def close(self) -> None:
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        for name in list(self._entries):
            await self._stop(name)

    async def _owned(self, change: Coroutine[None, None, None]) -> None:
        """Wait for a change that goes on when the one who waits is cancelled; `close` ends it."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(_retrieved)
        await asyncio.shield(task)

    def recalibrated(self, entry: Entry, model: ServedModel, sidecar: Sidecar) -> None:
        """Serve the same model with this calibration from now on; requests under way keep theirs."""
        assert entry.model is model, "whoever looks at a model does not wait in between"
        assert model.profile is not None, "it is measured"
        profile = calibrated(model.card, model.profile, sidecar.calibration)
        entry.model = replace(model, profile=profile, sidecar=sidecar)
        self._on_recalibrated(entry.model)

    async def _load(self, name: ModelName, place: ModelFolder) -> None:
        async with self._changing.setdefault(name, asyncio.Lock()):
            await self._stop(name)
            entry = self._begin(name, place)
            await entry.settled.wait()
            if entry.state is not ModelState.READY:
                raise ModelUnavailable(f"failed to load {name!r}: {entry.reason}")

    async def _unload(self, name: ModelName) -> None:
        async with self._changing.setdefault(name, asyncio.Lock()):
            await self._stop(name)
            entry = self._entries[name]
            entry.state, entry.reason = ModelState.UNAVAILABLE, UNLOADED

    def _begin(self, name: ModelName, place: ModelFolder) -> Entry:
        entry = Entry(name=name, version=place.version, path=place.path)
        self._entries[name] = entry
        entry.task = asyncio.create_task(self._bringing_up.run(entry, place.why_not), name=f"load {name}")
        return entry

    async def _stop(self, name: ModelName) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        if entry.task is not None:
            entry.task.cancel()
            await asyncio.wait([entry.task])
        if entry.model is not None:
            self._on_gone(entry.model)
            self._bringing_up.close(entry.model.folder, entry.model.card)
            entry.model = None


def _retrieved(task: asyncio.Task[None]) -> None:
    """An error that its caller did not wait for is told by the entry's reason, not by the event loop."""
    if not task.cancelled():
        task.exception()
