"""The device's models: what lies in the repository folder, brought to READY one after the other.

Layout as Triton has it: `MODELS/<name>/<version>/model.onnx`, beside the versions `contract.yaml` and `golden/`.
Every first look at a model is a child process's (`split/workbench`): it is read and cut there, then opened and run
there, before this process opens it. READY as soon as the whole runs here; profiling goes on in a child meanwhile, and
until it is done the model answers locally. What cannot be used is UNAVAILABLE and says why; the daemon lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from agent.model_cache import find_card, remove_former
from agent.model_folders import ModelFolder, find_models
from agent.served_model import ServedModel
from split.errors import InvalidModel, IsthmusError, ModelUnavailable, UnknownModel
from split.graph.card import FolderBefore, ModelCard
from split.ids import ModelName
from split.profiles.contract import (
    CONTRACT_FILE,
    Contract,
    check_contract,
    contract_beside,
    default_contract,
    load_labels,
)
from split.profiles.measured import ModelProfile, read_profile
from split.runtime.accelerators import Choice, choose
from split.runtime.machine import read_machine
from split.runtime.optimised import Manifest, key_of, lacking, optimised_in, place_of, read_sound
from split.runtime.segment import OrtEngine
from split.runtime.store import SegmentStore
from split.runtime.tuning import default_tuning
from split.workbench.child import run_child
from split.workbench.golden import profile_basis

log = logging.getLogger(__name__)


class ModelState(StrEnum):
    """Triton's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"


UNLOADED: Final = "unloaded"
"""Triton's reason why a model is UNAVAILABLE with which nothing is wrong."""
STORAGE_RETRY_S: Final = 5.0
"""Between two looks whether the cache can be written again, after a model could not be worked on for that."""
STORAGE_RETRY_MAX_S: Final = 80.0
"""Where it can be and the work fails all the same, the pauses double up to here."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One name in the repository, whatever its state."""

    name: ModelName
    version: str
    path: Path
    state: ModelState = ModelState.LOADING
    reason: str = ""
    progress: str = ""
    """What the workbench is doing, for `isthmus status`; empty when idle."""
    model: ServedModel | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    settled: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set once it is known whether the model can be used: the state is LOADING no more."""


class Repository:
    """Owns the entries and the tasks that load them.

    `timeout_s`, `memory_bytes`: of each child process, see `run_child`; opening a model here may take as long.
    `runtime`, `machine`: what a profile must have been measured on. `on_ready` and `on_gone` tell planner and uplink.
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
    ) -> None:
        self._folder = folder
        self._cache_dir = cache_dir
        self._store = store
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._runtime = runtime
        self._machine = machine
        self._warm_up = warm_up
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._entries: dict[ModelName, Entry] = {}
        self._changing: dict[ModelName, asyncio.Lock] = {}
        """Of the names in the folder: one load or unload of each at a time."""
        self._changes: set[asyncio.Task[None]] = set()
        self._bench = asyncio.Lock()
        """One model on the workbench at a time: two would disturb each other's measurements."""

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
        entry.task = asyncio.create_task(self._bring_up(entry, place.why_not), name=f"load {name}")
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
            self._close(entry.model.folder, entry.model.card)
            entry.model = None

    def _close(self, folder: Path, card: ModelCard) -> None:
        """Let go of a model's sessions, which are kept by path."""
        self._store.forget(Path(card.path))
        self._store.forget(folder)

    async def _bring_up(self, entry: Entry, why_not: str) -> None:
        """Until the model is as good as it gets; where the cache cannot be written (a full disk), until it can be."""
        pause_s = STORAGE_RETRY_S
        while await self._attempt(entry, why_not):
            await asyncio.sleep(pause_s)
            while not await asyncio.to_thread(_takes_files, self._cache_dir):  # noqa: ASYNC110 - a disk tells nobody
                await asyncio.sleep(STORAGE_RETRY_S)
            pause_s = min(2 * pause_s, STORAGE_RETRY_MAX_S)

    async def _attempt(self, entry: Entry, why_not: str) -> bool:
        """One try. Whether another may do better: it failed for the files it works on, not for the model."""
        storage = False
        try:
            if why_not:
                raise InvalidModel(why_not)
            if entry.model is None:
                await self._to_ready(entry)
            await self._to_profiled(entry)
            entry.reason = ""
            in_use = {model.folder for model in self.served()}
            await asyncio.to_thread(remove_former, self._cache_dir, entry.path, self._folder, in_use=in_use)
            await self._to_optimised(entry)
        except (IsthmusError, OSError) as error:
            storage = isinstance(error, ModelUnavailable | OSError)
            if entry.state is ModelState.READY:
                entry.reason = f"answers locally only: {error}"
                log.warning("model=%s cannot be split: %s", entry.name, error)
            else:
                entry.state, entry.reason = ModelState.UNAVAILABLE, str(error)
                log.error("model=%s is unavailable: %s", entry.name, error)
        except Exception as error:  # a bug of ours costs this model, not the daemon
            log.exception("model=%s could not be brought up", entry.name)
            entry.reason = f"internal error ({type(error).__name__}), the daemon's log says more"
            if entry.state is not ModelState.READY:
                entry.state = ModelState.UNAVAILABLE
        finally:
            entry.progress = ""
            if entry.state is ModelState.LOADING:  # cancelled
                entry.state, entry.reason = ModelState.UNAVAILABLE, "loading was stopped"
            entry.settled.set()
        return storage

    async def _to_ready(self, entry: Entry) -> None:
        """Card, contract, the whole opened and run once."""
        if not entry.path.is_file():
            raise InvalidModel(f"{entry.path} is not there; a version folder holds the file model.onnx")
        async with self._bench:  # in order, to the end: what hangs is looked at after what can answer, not in between
            before = await asyncio.to_thread(FolderBefore, entry.path)
            folder, card = await self._card(entry)
            # A file replaced in place must not answer with its old weights, not even where a request that outlived the
            # unloading has opened them again.
            self._close(folder, card)
            contract = contract_beside(entry.path) or default_contract(card)
            contract_path = entry.path.parent.parent / CONTRACT_FILE
            check_contract(contract, card, path=contract_path)
            if contract.model not in ("", entry.name):
                log.warning("model=%s has the contract of %r beside it: %s", entry.name, contract.model, contract_path)
            choice = await asyncio.to_thread(choose, contract.resource.accelerators)
            if choice.note:
                log.warning("model=%s %s", entry.name, choice.note)
            if choice.accelerated:
                self._store.use((Path(card.path), folder), OrtEngine(choice.providers))
            profile = await asyncio.to_thread(self._profile, folder, card, contract, choice)
            if profile is None:  # else it has run here, on this runtime: that was measured
                await self._child(entry, "probe", *_on(choice))
        model = ServedModel(
            name=entry.name,
            version=entry.version,
            card=card,
            contract=contract,
            images=contract.encoded(),
            labels=load_labels(contract, contract_path.parent),
            folder=folder,
            profile=profile,
            store=self._store,
            choice=choice,
        )
        await self._adopt_forms(model)
        self._store.keep(Path(card.path), still=partial(before.require_same, card))
        await self._open(model)
        entry.model, entry.state, entry.reason = model, ModelState.READY, ""
        entry.settled.set()
        log.info("model=%s version=%s ready, %d cuts", entry.name, entry.version, len(card.cuts))

    async def _open(self, model: ServedModel) -> None:
        """Here, where a child opened it before: with other threads, and beside what else is open."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._warm_up(model)
        except TimeoutError:
            self._close(model.folder, model.card)
            raise InvalidModel(
                f"load timeout: the runtime did not open {model.card.path} within {self._timeout_s:g} s, though it did "
                "in a child process; restart the daemon, and see that its processors are not taken away from it"
            ) from None

    async def _to_profiled(self, entry: Entry) -> None:
        """Costs measured (or read from the cache), then the planner may choose."""
        model = entry.model
        assert model is not None
        if model.profile is None:
            async with self._bench:
                await self._child(entry, "profile", "--folder", str(model.folder), *_on(model.choice))
            model.profile = await asyncio.to_thread(
                self._profile, model.folder, model.card, model.contract, model.choice
            )
            if model.profile is None:
                raise InvalidModel(f"the profile of {entry.name!r} could not be read back from {model.folder}")
            await self._adopt_forms(model)  # made while it was measured
        self._on_ready(model)

    async def _to_optimised(self, entry: Entry) -> None:
        """What was not made with the profile, or was damaged since: in the background, the model serves meanwhile."""
        model = entry.model
        assert model is not None
        assert model.profile is not None
        if model.choice.accelerated:
            return  # what is optimised is optimised for the processor
        cuts = [cut.cut for cut in model.profile.cuts]
        if lacking(await self._adopt_forms(model), cuts):
            try:
                async with self._bench:
                    await self._child(entry, "optimise", "--folder", str(model.folder), "--cuts", ",".join(cuts))
            except IsthmusError as error:
                entry.reason = f"its segments are opened as they were cut, not optimised: {error}"
                log.warning("model=%s could not be optimised: %s", entry.name, error)
                return
            await self._adopt_forms(model)

    async def _adopt_forms(self, model: ServedModel) -> Manifest | None:
        """Have the store open segments with the model's threads, and optimised where sound ones lie there; what lies
        there."""
        path = Path(model.card.path)
        machine = await asyncio.to_thread(read_machine)
        profile, threads = model.profile, model.contract.resource.threads
        tuning = profile.tuning if profile is not None else default_tuning(machine, threads)
        self._store.tune((path, model.folder), tuning)
        if model.choice.accelerated:
            return None
        key = key_of(model.digest, self._runtime, machine)
        manifest = await asyncio.to_thread(read_sound, place_of(model.folder, key), key)
        if manifest is not None:
            self._store.prefer(optimised_in(model.folder, path, manifest))
        return manifest

    def _profile(self, folder: Path, card: ModelCard, contract: Contract, choice: Choice) -> ModelProfile | None:
        """The profile in `folder` if it was measured on this device and with the model's surroundings as they are."""
        profile = read_profile(folder)
        if profile is None:
            return None
        basis = profile_basis(Path(card.path), contract)
        runtime = OrtEngine(choice.providers).name if choice.accelerated else self._runtime
        fits = profile.holds_for(digest=card.digest, runtime=runtime, fingerprint=self._machine, basis=basis)
        return profile if fits else None

    async def _card(self, entry: Entry) -> tuple[Path, ModelCard]:
        """The model's folder in the cache and its card, made by the workbench when none fits the file as it is now."""
        found = await asyncio.to_thread(find_card, self._cache_dir, entry.path)
        if found is None:
            await self._child(entry, "prepare", "--cache", str(self._cache_dir))
            found = await asyncio.to_thread(find_card, self._cache_dir, entry.path)
        if found is None:
            raise InvalidModel(f"{entry.path} changed while it was being prepared; load it again")
        return found

    async def _child(self, entry: Entry, command: str, *arguments: str) -> None:
        def show(label: str, ratio: float) -> None:
            entry.progress = f"{command}: {label} ({ratio:.0%})"

        entry.progress = command
        await run_child(
            [command, str(entry.path), *arguments],
            timeout_s=self._timeout_s,
            memory_bytes=self._memory_bytes,
            on_progress=show,
        )


def _takes_files(folder: Path) -> bool:
    """Whether a megabyte can be written there now."""
    probe = folder / ".room"
    try:
        probe.write_bytes(bytes(1 << 20))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return True


def _on(choice: Choice) -> tuple[str, ...]:
    """What a child is told of where to run the model."""
    return ("--providers", ",".join(choice.providers)) if choice.accelerated else ()


def _retrieved(task: asyncio.Task[None]) -> None:
    """An error that its caller did not wait for is told by the entry's reason, not by the event loop."""
    if not task.cancelled():
        task.exception()
