"""Which models and cuts this companion can open, and by whom they were made: the workbench, in a child process, once.

A model is first opened by a throw-away child (a hostile file kills that child, not the companion), then prepared (its
card and its candidate cuts are made); a cut beyond the candidates is made when a device asks for it. This process opens
none of it before a child came back sound from running it (`rehearse`). All of it lies in
`<cache_dir>/models/<16 hex>/` and outlives the process. Invariant: the card's digest is the one that was offered,
and a cut's node set hashes to its id, so that halves which do not belong together never meet (I6).
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from cloud.store import digest_hex
from split.codec.payload import encode
from split.errors import CompanionRefused, CutRefused, InvalidModel, IsthmusError
from split.graph.card import CutCard, ModelCard, read_card, read_cut, read_sound_card
from split.ids import OFFLOAD_CUT, CutId, ModelDigest
from split.runtime.machine import read_machine
from split.runtime.optimised import Manifest, Optimised, key_of, lacking, optimised_in, place_of, read_sound
from split.tensor import Tensors

log = logging.getLogger(__name__)

_UNSUPPORTED = re.compile(
    r"not a registered function/op|could not find an implementation|NOT_IMPLEMENTED", re.IGNORECASE
)
"""How onnxruntime says that it does not have an operator, whether unknown or not for these element types."""

CHILDREN: Final = 2
"""Jobs that a device waits for, at once: a model that hangs its child for minutes leaves room for another's. Each may
take a gigabyte, so no more."""

CUTS_KEPT: Final = 64
"""Of a model, beside its candidates: the cuts asked for last that outlive the process, each two graphs without weights.
A device asks for its own candidates, which differ only where it weighed the model at other sizes or demands."""
CUTS_MAX: Final = 512
"""Of a model, beside its candidates, at once: what sessions use is never removed under them."""

REHEARSED = "rehearsed.json"
"""Runtime → what came back sound from a child that ran it: `offload` and cut ids."""


class Workbench(Protocol):
    """The offline jobs, each in a child process; a Protocol so that tests can count and break them."""

    async def probe(self, model: Path) -> None:
        """Open `model` in a runtime that may die. InvalidModel when it is refused or the child dies."""

    async def prepare(self, model: Path, folder: Path, dims: Mapping[str, int]) -> None:
        """Write the card and the halves of the candidate cuts into `folder` (made if need be). InvalidModel."""

    async def rehearse(self, model: Path, folder: Path, feeds: Path, names: Collection[str]) -> None:
        """Open and run the whole (`offload`) or cuts (by id) on the inputs in the payload `feeds`, in a runtime that
        may die. InvalidModel when the child dies of it; that they refuse the inputs is no error."""

    async def part(self, model: Path, folder: Path, cut: CutId, node_bitmap: str) -> CutCard:
        """Make one given cut's halves in `folder`. CutRefused when the bitmap is not that cut or may not be cut."""

    async def optimise(self, model: Path, folder: Path, cuts: Collection[str]) -> None:
        """Make the optimised forms of the whole and of these cuts' halves. IsthmusError when that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A whole model that is on disk, checked and described."""

    card: ModelCard
    folder: Path
    """Where its halves lie."""
    path: Path
    """The model file."""

    def head(self, cut: CutId) -> Path:
        return self.folder / f"{cut}.head.onnx"

    def tail(self, cut: CutId) -> Path:
        return self.folder / f"{cut}.tail.onnx"


class Segments:
    """Prepares models and cuts: of one model one step at a time, over all `CHILDREN` child processes, first come first
    served (a session asks for one at a time). Used from the event loop.

    What was prepared is optimised for this machine (`runtime`: the engine's name) in the background, one more child at
    a time; `prefer` learns of each segment that can be opened in that form (`SegmentStore.prefer`), `let_go` of each
    file and folder that is gone (`SegmentStore.forget`).
    """

    def __init__(
        self,
        cache_dir: Path,
        workbench: Workbench,
        *,
        prefer: Callable[[Mapping[Path, Optimised]], None],
        let_go: Callable[[Path], None],
        runtime: str,
    ) -> None:
        self._folder = cache_dir / "models"
        self._workbench = workbench
        self._prefer = prefer
        self._let_go = let_go
        self._runtime = runtime
        self._turns: weakref.WeakValueDictionary[Path, asyncio.Lock] = weakref.WeakValueDictionary()
        """By a model's folder: who holds it changes what lies there."""
        self._children = asyncio.Semaphore(CHILDREN)
        self._unoptimised: dict[ModelDigest, tuple[PreparedModel, set[CutId]]] = {}
        self._behind: asyncio.Task[None] | None = None
        self._files: dict[Path, Path] = {}
        """Folder → model file, of what was prepared since this process started."""

    async def close(self) -> None:
        """Optimise nothing any more."""
        self._unoptimised.clear()
        if self._behind is not None:
            self._behind.cancel()
            await asyncio.wait([self._behind])

    async def prepare(self, digest: str, path: Path, dims: Mapping[str, int]) -> PreparedModel:
        """The model of this digest, whose file is `path`; made at the first call, read from disk later.

        Refused with UNSUPPORTED_OP when the runtime lacks an operator, DIGEST_MISMATCH when the files are another model
        than the digest says; InvalidModel for what is no model.
        """
        folder = self._folder / digest_hex(digest)[:16]
        async with self._turn(folder):
            try:
                card = await asyncio.to_thread(read_sound_card, folder)
            except InvalidModel:
                await self._make(path, folder, dims)
                card = read_card(folder)
            if card.digest != digest:
                await self._remove(folder)
                raise CompanionRefused(
                    "DIGEST_MISMATCH",
                    f"the files offered as {digest} are {card.digest}; offer them under their own digest",
                )
            if folder not in self._files:  # no session uses a cut of it yet
                await asyncio.to_thread(_remove_old_cuts, folder)
            self._files[folder] = path
        model = PreparedModel(card=card, folder=folder, path=path)
        self._optimise_later(model)
        return model

    async def cut(self, model: PreparedModel, cut: CutId, node_bitmap: str) -> CutCard:
        """The cut of that id, its halves on disk. Refused with PLAN_MISMATCH when `node_bitmap` defines another cut or
        one that may not be made, with BUDGET_EXCEEDED when `CUTS_MAX` of this model were made."""
        if not re.fullmatch(r"[0-9a-f]{12}", cut):
            raise CompanionRefused("PLAN_MISMATCH", f"{cut[:80]!r} is no cut id; expected 12 hex digits")
        digits = 2 * ((model.card.nodes + 7) // 8)
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", node_bitmap):  # it becomes an argument of a process
            raise CompanionRefused(
                "PLAN_MISMATCH", f"the node bitmap of cut {cut} must have {digits} hex digits: a bit for each node"
            )
        async with self._turn(model.folder):
            card = await asyncio.to_thread(_made_before, model, cut) or await self._part(model, cut, node_bitmap)
        if card.node_bitmap != node_bitmap:
            raise CompanionRefused(
                "PLAN_MISMATCH", f"cut {cut} consists of other nodes here than the bitmap that came; compare the models"
            )
        self._optimise_later(model, cut)
        return card

    async def rehearse(self, model: PreparedModel, golden: Tensors, cut: CutId | None = None) -> None:
        """Let a child run the whole, or this cut's halves, on the golden inputs before this process opens them: once
        for each runtime. InvalidModel when the child dies of it.

        The candidate cuts are run together with the whole; where that child dies, each is run by itself when asked for.
        """
        name = cut or OFFLOAD_CUT
        record = model.folder / REHEARSED
        async with self._turn(model.folder):
            done = _rehearsed(record, self._runtime)
            if name in done:
                return
            together = [] if cut else [candidate.id for candidate in model.card.cuts]
            feeds = model.folder / "rehearsal.payload"
            await asyncio.to_thread(lambda: feeds.write_bytes(b"".join(encode(golden, "raw"))))
            try:
                async with self._children:
                    await self._workbench.rehearse(model.path, model.folder, feeds, [name, *together])
            except InvalidModel as error:
                if not together:
                    raise
                log.warning("model %s: %s; its parts are tried one by one", model.card.digest, error)
                together = []
                async with self._children:
                    await self._workbench.rehearse(model.path, model.folder, feeds, [name])
            finally:
                feeds.unlink(missing_ok=True)
            fresh = record.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode({self._runtime: sorted({*done, name, *together})}))
            fresh.replace(record)

    async def keep_only(self, held: Callable[[], Collection[str]]) -> None:
        """Delete what was made of models that are not `held` any more; `held` is asked again before each deletion. What
        is being made right now stays until the next time."""
        kept = await asyncio.to_thread(_names_of, held)
        for folder in await asyncio.to_thread(_folders_in, self._folder):
            turn = self._turn(folder)
            if folder.name in kept or turn.locked():
                continue
            async with turn:
                if folder.name not in await asyncio.to_thread(_names_of, held):
                    await self._remove(folder)

    def _turn(self, folder: Path) -> asyncio.Lock:
        return self._turns.setdefault(folder, asyncio.Lock())

    async def _remove(self, folder: Path) -> None:
        self._let_go(folder)
        if (file := self._files.pop(folder, None)) is not None:
            self._let_go(file)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _make(self, path: Path, folder: Path, dims: Mapping[str, int]) -> None:
        try:
            async with self._children:
                await self._workbench.probe(path)
        except InvalidModel as error:
            if _UNSUPPORTED.search(str(error)):
                raise CompanionRefused("UNSUPPORTED_OP", str(error)) from error
            raise
        (folder / REHEARSED).unlink(missing_ok=True)
        async with self._children:
            await self._workbench.prepare(path, folder, dims)

    def _optimise_later(self, model: PreparedModel, *cuts: CutId) -> None:
        _, wanted = self._unoptimised.setdefault(model.card.digest, (model, set()))
        wanted.update(cuts)
        if self._behind is None or self._behind.done():
            self._behind = asyncio.create_task(self._optimise(), name="optimise segments")

    async def _optimise(self) -> None:
        while self._unoptimised:
            digest = next(iter(self._unoptimised))
            model, cuts = self._unoptimised.pop(digest)
            try:
                if lacking(await self._adopt(model), cuts):
                    await self._workbench.optimise(model.path, model.folder, sorted(cuts))
                    await self._adopt(model)
            except IsthmusError as error:
                log.warning("model %s is served as it was cut, not optimised: %s", digest, error)
            except Exception:  # a bug of ours costs speed, not the companion
                log.exception("model %s could not be optimised", digest)

    async def _adopt(self, model: PreparedModel) -> Manifest | None:
        """Tell of the sound optimised segments that lie there."""
        key = key_of(model.card.digest, self._runtime, await asyncio.to_thread(read_machine))
        manifest = await asyncio.to_thread(read_sound, place_of(model.folder, key), key)
        if manifest is not None:
            self._prefer(optimised_in(model.folder, model.path, manifest))
        return manifest

    async def _part(self, model: PreparedModel, cut: CutId, node_bitmap: str) -> CutCard:
        if len(await asyncio.to_thread(_cuts_in, model.folder)) >= CUTS_MAX:
            raise CompanionRefused(
                "BUDGET_EXCEEDED",
                f"{CUTS_MAX} cuts of this model were made here beside its candidates; restart the companion to keep "
                f"only the {CUTS_KEPT} asked for last",
            )
        try:
            async with self._children:
                return await self._workbench.part(model.path, model.folder, cut, node_bitmap)
        except CutRefused as error:
            raise CompanionRefused("PLAN_MISMATCH", str(error)) from error


def _rehearsed(record: Path, runtime: str) -> Collection[str]:
    """What came back sound from a child with this runtime."""
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, list[str]]).get(runtime, [])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []


def _names_of(held: Callable[[], Collection[str]]) -> Collection[str]:
    """The folders of these models. Looks at the disk."""
    return {digest_hex(digest)[:16] for digest in held()}


def _folders_in(place: Path) -> list[Path]:
    return [path for path in place.glob("*") if path.is_dir()]


def _cuts_in(folder: Path) -> list[Path]:
    """The cards of the cuts that were made on demand, the one asked for last at the end."""
    cards = [path for path in folder.glob("*.json") if re.fullmatch(r"[0-9a-f]{12}", path.stem)]
    return sorted(cards, key=lambda path: path.stat().st_mtime)


def _remove_old_cuts(folder: Path) -> None:
    """All made on demand but the last `CUTS_KEPT`: card first, so that no half stands for a whole cut."""
    for card in _cuts_in(folder)[:-CUTS_KEPT]:
        card.unlink()
        for half in [*folder.glob(f"{card.stem}.*.onnx"), *folder.glob(f"optimised/*/{card.stem}.*.onnx")]:
            half.unlink(missing_ok=True)


def _made_before(model: PreparedModel, cut: CutId) -> CutCard | None:
    """The card of a cut whose halves lie there as they were made: a candidate, or one that was asked for earlier."""
    candidate = next((card for card in model.card.cuts if card.id == cut), None)
    if candidate is not None and model.head(cut).exists() and model.tail(cut).exists():
        return candidate  # its halves were looked at when the model was prepared
    try:
        found = read_cut(model.folder, cut)
    except InvalidModel:
        return None
    (model.folder / f"{cut}.json").touch()  # its time says when it was last asked for
    return found
