"""How one model of the repository becomes READY, then measured, then optimised.

Every first look at a model is a child process's (`split/workbench`): it is read and cut there, then opened and run
there, before this process opens it. READY as soon as the whole runs here; profiling goes on in a child meanwhile, and
until it is done the model answers locally. What cannot be used is UNAVAILABLE and says why; the daemon lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from agent.calibrated import Sidecar, calibrated, fitting, sidecar_again, sidecar_beside
from agent.model_cache import find_card, remove_former
from agent.served_model import ServedModel
from split.errors import InvalidModel, IsthmusError, ModelUnavailable
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


class BringingUp:
    """`run` for each entry, one at a time on the workbench; `close` when a model goes.

    `folder`, `cache_dir`, `timeout_s`, `memory_bytes`, `runtime`, `machine`, `warm_up`, `on_ready`: as for
    `Repository`. `in_use`: folders of the cache whose models are served.
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
        in_use: Callable[[], set[Path]],
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
        self._in_use = in_use
        self._bench = asyncio.Lock()
        """One model on the workbench at a time: two would disturb each other's measurements."""

    def close(self, folder: Path, card: ModelCard) -> None:
        """Let go of a model's sessions, which are kept by path."""
        self._store.forget(Path(card.path))
        self._store.forget(folder)

    async def run(self, entry: Entry, why_not: str) -> None:
        """Until the model of `entry` is as good as it gets; where the cache cannot be written (a full disk), until it
        can be. `why_not`: what is wrong with its place, "" mostly."""
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
            in_use = self._in_use()
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
            folder, card, sidecar = await self._card(entry)
            # A file replaced in place must not answer with its old weights, not even where a request that outlived the
            # unloading has opened them again.
            self.close(folder, card)
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
            profile=None if profile is None else calibrated(card, profile, sidecar.calibration),
            sidecar=sidecar,
            store=self._store,
            choice=choice,
        )
        await self._adopt_forms(model, model.profile)
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
            self.close(model.folder, model.card)
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
            profile = await asyncio.to_thread(self._profile, model.folder, model.card, model.contract, model.choice)
            if profile is None:
                raise InvalidModel(f"the profile of {entry.name!r} could not be read back from {model.folder}")
            await self._adopt_forms(model, profile)  # made while it was measured
            # Only now: a measured model may be given another calibration while something is awaited.
            model.profile = calibrated(model.card, profile, model.sidecar.calibration)
        self._on_ready(model)

    async def _to_optimised(self, entry: Entry) -> None:
        """What was not made with the profile, or was damaged since: in the background, the model serves meanwhile."""
        model = entry.model
        assert model is not None
        assert model.profile is not None
        if model.choice.accelerated:
            return  # what is optimised is optimised for the processor
        cuts = [cut.cut for cut in model.profile.cuts]
        if lacking(await self._adopt_forms(model, model.profile), cuts):
            try:
                async with self._bench:
                    await self._child(entry, "optimise", "--folder", str(model.folder), "--cuts", ",".join(cuts))
            except IsthmusError as error:
                entry.reason = f"its segments are opened as they were cut, not optimised: {error}"
                log.warning("model=%s could not be optimised: %s", entry.name, error)
                return
            await self._adopt_forms(model, model.profile)

    async def _adopt_forms(self, model: ServedModel, profile: ModelProfile | None) -> Manifest | None:
        """Have the store open segments with the threads of `profile`, and optimised where sound ones lie there; what
        lies there."""
        path = Path(model.card.path)
        machine = await asyncio.to_thread(read_machine)
        threads = model.contract.resource.threads
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
        basis = profile_basis(Path(card.path), contract, card.calibrated)
        runtime = OrtEngine(choice.providers).name if choice.accelerated else self._runtime
        fits = profile.holds_for(digest=card.digest, runtime=runtime, fingerprint=self._machine, basis=basis)
        return profile if fits else None

    async def _card(self, entry: Entry) -> tuple[Path, ModelCard, Sidecar]:
        """The model's folder in the cache and its card, made by the workbench when none fits the file as it is now and
        the calibration beside it."""
        sidecar = await asyncio.to_thread(sidecar_beside, entry.path, None)
        found = await asyncio.to_thread(find_card, self._cache_dir, entry.path, sidecar.calibration)
        if found is None:
            await self._child(entry, "prepare", "--cache", str(self._cache_dir))
            sidecar = await asyncio.to_thread(sidecar_again, entry.path, sidecar)
            found = await asyncio.to_thread(find_card, self._cache_dir, entry.path, sidecar.calibration)
        if found is None:
            raise InvalidModel(f"{entry.path} changed while it was being prepared; load it again")
        folder, card = found
        return folder, card, fitting(entry.path, sidecar, card.digest)

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
