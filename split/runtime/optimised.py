"""Segments as this machine's runtime has optimised them: what lies in a model's cache folder, and what may be used.

    <folder>/optimised/<key>/manifest.json      what is there, each with its hash
                             weights.bin        every distinct weight once, on page borders; all segments map it
                             <name>.onnx        `whole`, `<cut>.head`, `<cut>.tail`; weights are references

The key says for whom: model, way of cutting, runtime, processor, format. The workbench's child writes
(`split/workbench/optimise.py`), the serving processes read. Never trusted: what does not hash to what the manifest says
is not there.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from split.graph.card import CARD_VERSION
from split.ids import ModelDigest
from split.runtime.machine import Machine

FORMAT: Final = 2
"""Goes up when segments are optimised or laid down differently: what older programs made is made again."""

WHOLE: Final = "whole"
MANIFEST_FILE: Final = "manifest.json"
WEIGHTS_FILE: Final = "weights.bin"
_DIGEST_BYTES: Final = 16


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """One content in the file of weights."""

    offset: int
    bytes: int
    blake2b: str


class OptimisedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One segment's graph."""

    bytes: int
    blake2b: str
    prepacked: bool
    """Its matrices lie there as the runtime's kernels want them, too; else they are opened without prepacking."""
    hooked: bool = False
    """Its boundary goes through an identity pool, so that what follows stays in the blocked layout."""
    reads: tuple[int, ...]
    """Offsets of the extents a run touches."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    prepacked: bool = False
    """What was measured to be faster for this model, when the whole was made."""
    weights: tuple[Extent, ...] = ()
    """In the order of the file."""
    segments: dict[str, OptimisedFile] = {}
    refused: dict[str, str] = {}
    """Segments that cannot be optimised, and why: they are opened as they were cut."""

    @property
    def end(self) -> int:
        """Bytes of the file of weights that are accounted for."""
        return self.weights[-1].offset + self.weights[-1].bytes if self.weights else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimised:
    """A sound optimised segment, as `Engine.open_optimised` wants it."""

    path: Path
    prepacked: bool
    bytes: int
    weights: Mapping[tuple[Path, int], int]
    """(file, offset) → bytes of the weights it maps."""


def key_of(digest: ModelDigest, runtime: str, machine: Machine) -> str:
    """16 hex digits: for which model, runtime (`Engine.name`) and processor optimised segments hold, and by which rules
    the halves were cut: under the same cut id those of other rules may be other graphs."""
    parts = (FORMAT, CARD_VERSION, digest, runtime, machine.architecture, machine.cpu_model, machine.cpu_features)
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def place_of(folder: Path, key: str) -> Path:
    """Where the segments for `key` lie in a model's cache folder."""
    return folder / "optimised" / key


def content_digest(content: bytes | memoryview) -> str:
    """BLAKE2b in hex, as the manifest names contents."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def read_manifest(place: Path, key: str) -> Manifest | None:
    """The manifest as it was written; None where there is none for this key that can be read."""
    try:
        manifest = msgspec.json.decode((place / MANIFEST_FILE).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest if manifest.key == key else None


def read_sound(place: Path, key: str) -> Manifest | None:
    """`read_manifest`, with only those segments whose graph is as it was made; None when a weight is not.

    Hashes every byte: about a second per gigabyte.
    """
    manifest = read_manifest(place, key)
    # The file of weights is appended to, never mended: with a hole in it, all is made anew.
    if manifest is None or not _weights_are_sound(place / WEIGHTS_FILE, manifest.weights):
        return None
    segments = {name: file for name, file in manifest.segments.items() if _is(place / f"{name}.onnx", file)}
    return msgspec.structs.replace(manifest, segments=segments)


def optimised_in(folder: Path, model: Path, manifest: Manifest) -> dict[Path, Optimised]:
    """The file that was cut (`model` for the whole) → its optimised form, for all that a sound manifest names."""
    place = place_of(folder, manifest.key)
    weights = place / WEIGHTS_FILE
    sizes = {extent.offset: extent.bytes for extent in manifest.weights}
    return {
        model if name == WHOLE else folder / f"{name}.onnx": Optimised(
            path=place / f"{name}.onnx",
            prepacked=file.prepacked,
            bytes=file.bytes,
            weights={(weights, offset): sizes[offset] for offset in file.reads},
        )
        for name, file in manifest.segments.items()
    }


def lacking(manifest: Manifest | None, cuts: Iterable[str]) -> bool:
    """Whether the whole or a half of these cuts is still to be optimised."""
    wanted = {WHOLE, *(f"{cut}.{half}" for cut in cuts for half in ("head", "tail"))}
    return manifest is None or not wanted <= {*manifest.segments, *manifest.refused}


def _weights_are_sound(path: Path, extents: tuple[Extent, ...]) -> bool:
    if not extents:
        return True
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            return all(_holds(content, extent) for extent in extents)
    except (OSError, ValueError):  # not there, or empty
        return False


def _holds(content: memoryview, extent: Extent) -> bool:
    with content[extent.offset : extent.offset + extent.bytes] as part:
        return content_digest(part) == extent.blake2b


def _is(path: Path, file: OptimisedFile) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) == file.bytes and content_digest(content) == file.blake2b
