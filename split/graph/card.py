"""What the serving processes know of a model without opening it: inputs, outputs, cuts. Written by the workbench as
`card.json`, read by the daemon and the companion (neither imports `onnx`). Not costs: those are measured per device
and lie in `split.profiles.measured`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from split.errors import CutRefused, InvalidModel, InvalidRequest, ModelUnavailable
from split.graph.growth import Growth
from split.ids import CutId, ModelDigest
from split.tensor import TensorSpec

CARD_VERSION = 9


class CutCard(msgspec.Struct, frozen=True, kw_only=True):
    """One cut: what crosses it, who makes which output, who needs which input."""

    id: CutId
    boundary: tuple[TensorSpec, ...]
    """Tensors computed in the head that the tail needs, in a fixed order (names of the original graph)."""
    head_inputs: tuple[str, ...]
    """Model inputs the head reads."""
    head_outputs: tuple[str, ...]
    """Model outputs made in the head: the device keeps them."""
    tail_inputs: tuple[str, ...]
    """Model inputs the tail reads: they travel in the same frame as the boundary."""
    shown_inputs: tuple[str, ...]
    """Model inputs that can be read off what crosses: as they are, rearranged or changed value by value."""
    tail_outputs: tuple[str, ...]
    """Model outputs made in the tail."""
    nodes: int
    """Nodes on the device side (constants in disguise not counted)."""
    compute_share: float
    """Estimated share of the model's compute that lies in the head, 0…1 (FLOPs; measured times live elsewhere)."""
    head_weight_bytes: int = 0
    """Bytes of the weights that the head reads, each counted once."""
    node_bitmap: str
    """Hex bitmap over the graph's non-constant nodes in file order, bit 0 of byte 0 first: tells a peer the cut."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    version: int = CARD_VERSION
    digest: ModelDigest
    path: str
    """The original file, absolute: segments of the whole open it directly."""
    files: tuple[tuple[str, int, str], ...]
    """(name, bytes, sha256 hex) of the model file first, then of each external data file beside it."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """In the model's declared order; symbolic dims kept."""
    nodes: int
    opset: int
    integer: bool = False
    """Whether operators compute in integers: then both sides' integer kernels must answer alike."""
    cuts: tuple[CutCard, ...]
    """Candidates in topological order."""
    demands: str = ""
    """What the contract asked of the candidates (`split/profiles/demands.py`); a card of other demands is made
    again."""
    calibrated: tuple[CutId, ...] = ()
    """Cuts of the calibration that lay beside the model when the card was made, sorted: they are among `cuts`, but for
    those that may not be made. A card that lacks one of the present calibration's is made again."""
    growth: Growth | None = None
    """What the open dims of the inputs do to each candidate's boundary and work; None where all sizes are fixed."""
    made: dict[str, tuple[int, str]] = {}
    """(bytes, sha256 hex) of each file the workbench wrote beside this card: a damaged one is made again."""
    no_cuts_reason: str = ""
    """Why `cuts` is empty, as a sentence; empty when it is not."""
    note: str = ""
    """Why there are fewer cuts than there could be, as a sentence; empty where nothing stood in the way."""

    def cut(self, wanted: CutId) -> CutCard:
        """The candidate of that id; CutRefused when it is none of this model's."""
        for card in self.cuts:
            if card.id == wanted:
                return card
        known = ", ".join(card.id for card in self.cuts) or "none"
        raise CutRefused(f"cut {wanted} is no candidate of this model; its candidates are {known}")


def write_card(card: ModelCard, folder: Path) -> None:
    """Write `folder/card.json` in one step: readers see the old or the new one."""
    fresh = folder / "card.json.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1))
    fresh.replace(folder / "card.json")


def read_card(folder: Path) -> ModelCard:
    """Read `folder/card.json`; InvalidModel when it is missing, damaged or of another version."""
    path = folder / "card.json"
    try:
        card = msgspec.json.decode(path.read_bytes(), type=ModelCard)
    except FileNotFoundError:
        raise InvalidModel(f"{path} is not there; prepare the model first") from None
    except (msgspec.MsgspecError, InvalidRequest) as error:  # the latter of a tensor's spec
        raise InvalidModel(f"{path} is damaged ({error}); delete it, it is made again") from error
    if card.version != CARD_VERSION:
        raise InvalidModel(f"{path} has version {card.version}, this program reads {CARD_VERSION}; delete it")
    return card


def read_sound_card(folder: Path) -> ModelCard:
    """`read_card`, and every file the workbench made beside it is as it was made; InvalidModel names one that is not.

    Hashes all of them: about a second per gigabyte.
    """
    card = read_card(folder)
    _require_sound(folder, card.made)
    return card


def _require_sound(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    for name, made in files.items():
        if not file_is(folder / name, *made):
            raise InvalidModel(f"{folder / name} is missing or damaged; it is made again")


def file_is(path: Path, size: int, sha256: str) -> bool:
    """Whether the file has these bytes."""
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


class FolderBefore:
    """The files in a model's folder as they are now. What is made of them from now on belongs to the model only if they
    are the same files at the end: a model may be replaced at any time, also by a file that replaces it again."""

    def __init__(self, model: Path) -> None:
        self._model = model
        names = os.listdir(model.parent) if model.parent.is_dir() else []
        self._before = {name: self._seen(name) for name in names}

    def require_same(self, card: ModelCard) -> None:
        """ModelUnavailable when one of the card's files was written or replaced since."""
        for name, _, _ in self._files(card):
            if self._seen(name) is None or self._seen(name) != self._before.get(name):
                raise _replaced(self._model)

    def require_model(self, card: ModelCard) -> None:
        """ModelUnavailable when the files are not those of the card. Hashes them: about a second per gigabyte."""
        if not all(file_is(self._model.parent / name, size, sha256) for name, size, sha256 in self._files(card)):
            raise _replaced(self._model)

    def _files(self, card: ModelCard) -> Iterator[tuple[str, int, str]]:
        """As in `ModelCard`, by the names they have now: what a model file is called is nothing of the model's."""
        for number, (name, size, sha256) in enumerate(card.files):
            yield self._model.name if number == 0 else name, size, sha256

    def _seen(self, name: str) -> tuple[int, int, int, int] | None:
        try:
            found = (self._model.parent / name).stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _replaced(model: Path) -> ModelUnavailable:
    return ModelUnavailable(f"{model} was replaced since it was loaded; load it again, or put the file back")


class _CutFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int = CARD_VERSION
    cut: CutCard
    made: dict[str, tuple[int, str]]
    """As in `ModelCard`, of the halves alone."""


def write_cut(cut: CutCard, made: dict[str, tuple[int, str]], folder: Path) -> None:
    """Write `folder/<cut>.json`: the card of a cut that was made on demand, beside its halves (`made`), which come
    first."""
    fresh = folder / f"{cut.id}.json.new"
    fresh.write_bytes(msgspec.json.encode(_CutFile(cut=cut, made=made)))
    fresh.replace(folder / f"{cut.id}.json")


def read_cut(folder: Path, cut: CutId) -> CutCard:
    """Read what `write_cut` wrote; InvalidModel when it or a half is missing, damaged, or of another version."""
    path = folder / f"{cut}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_CutFile)
    except (FileNotFoundError, msgspec.MsgspecError, InvalidRequest) as error:
        raise InvalidModel(f"{path} is missing or damaged ({error}); make the cut again") from error
    if found.version != CARD_VERSION or found.cut.id != cut:
        raise InvalidModel(f"{path} is of another version or cut; make the cut again")
    _require_sound(folder, found.made)
    return found.cut


def digest_of_files(files: Sequence[tuple[str, int, str]]) -> ModelDigest:
    """The model's digest from (name, bytes, sha256 hex) of its file, then of each external data file by name.

    One file: its own SHA-256 (as `sha256sum` prints it), whatever it is called; with external data: SHA-256 over
    that and one line `<sha256> <name>` for each data file.
    """
    _, _, main = files[0]
    if len(files) == 1:
        return ModelDigest(f"sha256:{main}")
    lines = [main, *(f"{digest} {name}" for name, _, digest in files[1:])]
    return ModelDigest("sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest())
