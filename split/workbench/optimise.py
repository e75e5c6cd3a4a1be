"""Optimises segments for this machine and lays them down with every distinct weight once, in one file that all map.

Runs in the workbench's child; `split/runtime/optimised.py` says what lies where and reads it. A segment is kept only
when its names, types and shapes are those of what was cut and a run gives the same numbers (1e-5). Blocked layouts stay
inside: what crosses a cut is in the original graph's layout.

Two processes may work on one folder: what is made is added under a lock, the file of weights only grows, and the
manifest comes last, in one step. On a full disk the old state stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import onnx
from onnx import GraphProto, ModelProto, TensorProto

from split.errors import EngineFailed, IsthmusError, ModelUnavailable
from split.graph.card import CutCard, FolderBefore, ModelCard
from split.graph.partition import PAGE_BYTES, write_whole
from split.profiles.measured import Tuning
from split.runtime.engine import Segment
from split.runtime.machine import Machine, read_machine
from split.runtime.optimised import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    WHOLE,
    Extent,
    Manifest,
    OptimisedFile,
    content_digest,
    key_of,
    place_of,
    read_manifest,
    read_sound,
)
from split.runtime.profiler import measure_interleaved
from split.runtime.segment import OrtEngine, OrtSegment
from split.tensor import Tensors, worst_difference
from split.workbench.residual import fuse_sums

log = logging.getLogger(__name__)

SAME: Final = 1e-5
"""Largest relative difference to the segment as it was cut (DESIGN §8, I2)."""
SLOWER_MAX: Final = 1.02
"""Without saved layouts a model opens faster and is smaller; worth it while a run is not slower than this."""
MEASURE_S: Final = 1.0

REORDERS: Final = ("ReorderInput", "ReorderOutput")
BLOCKABLE: Final = frozenset(
    ("Conv", "Add", "Relu", "Clip", "BatchNormalization", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool")
)
"""Readers of a boundary that work in the blocked layout and do not tell 0.0 from -0.0, the one thing a pool changes."""

LOCK_FILE: Final = ".lock"
SCRATCH: Final = ".making-"
SCRATCH_LIFE_S: Final = 3600.0
"""A child is ended after minutes: what is older than an hour has no maker any more."""


Opener = Callable[[str, Path, Tensors], Segment]
"""(`whole`, `<cut>.head` or `<cut>.tail`; the file as it was cut; what to try it on) → the segment, opened."""

TunedOpener = Callable[[str, Path, Tensors, Tuning], Segment]
"""The same, with these threads."""


class Optimiser:
    """Makes the optimised segments of one model in its cache folder, and opens the best form there is.

    `threads`: of the sessions opened here. What an earlier run made is verified at the start; what is sound is kept.
    """

    def __init__(
        self, card: ModelCard, folder: Path, engine: OrtEngine, *, threads: int, machine: Machine | None = None
    ) -> None:
        self._card = card
        self._folder = folder
        self._engine = engine
        self._threads = threads
        self._key = key_of(card.digest, engine.name, machine or read_machine())
        self._place = place_of(folder, self._key)
        with self._locked():
            found = read_sound(self._place, self._key)
            if found is None:
                _empty(self._place)
            _remove_left_over(self._place)
            if found is None or found != read_manifest(self._place, self._key):
                self._write(found or Manifest(key=self._key))
        for other in self._place.parent.iterdir():  # of another runtime or processor: never used again here
            if other != self._place:
                shutil.rmtree(other, ignore_errors=True)

    def open(self, name: str, source: Path, feeds: Tensors, tuning: Tuning | None = None) -> OrtSegment:
        """The segment cut as `source`: optimised where that could be made, else as it is.

        `name`: `whole`, `<cut>.head` or `<cut>.tail`. `feeds`: what it is tried on. `tuning`: None, with this
        optimiser's threads, asleep between operators. Errors as `Engine.open`,
        ModelUnavailable when the disk is full or the whole's files are not the card's.
        """
        manifest = read_manifest(self._place, self._key) or Manifest(key=self._key)
        if name not in manifest.segments and name not in manifest.refused:
            try:
                self._make(name, source, feeds)
            except ModelUnavailable:
                raise
            except IsthmusError as error:
                log.info("%s stays as it was cut: %s", name, error)
                self._refuse(name, str(error))
            manifest = read_manifest(self._place, self._key) or manifest
        made = manifest.segments.get(name)
        threads, spin_us = (tuning.threads, tuning.spin_us) if tuning is not None else (self._threads, 0)
        if made is None:
            return self._engine.open(source, threads=threads, spin_us=spin_us)
        path = self._place / f"{name}.onnx"
        return self._engine.open_optimised(path, threads=threads, spin_us=spin_us, prepack=made.prepacked)

    def _make(self, name: str, source: Path, feeds: Tensors) -> None:
        before = FolderBefore(source)
        if name == WHOLE:
            before.require_model(self._card)
        with tempfile.TemporaryDirectory(dir=self._place, prefix=SCRATCH) as scratch:
            made = _Made(self._engine, source, Path(scratch), self._threads)
            plain, expected = made.plain, made.plain.run(feeds)
            if name.endswith(".tail") and made.reorders:
                fuse_sums(made.proto.graph)
                made = self._hooked(source, Path(scratch), made) or made
            manifest = read_manifest(self._place, self._key) or Manifest(key=self._key)
            prepacked = made.is_prepacked and (manifest.prepacked if name != WHOLE else made.gains_by_layout(feeds))
            if not prepacked:
                made.drop_layouts()
            if name == WHOLE:
                before.require_same(self._card)
            self._add(name, made, plain, feeds, expected, prepacked=prepacked)

    def _hooked(self, source: Path, scratch: Path, made: _Made) -> _Made | None:
        """The tail with its boundary led through identity pools, when more of it stays in the blocked layout then."""
        model = hooked(onnx.load(source, load_external_data=False))
        if model is None:
            return None
        # External data is looked for beside the file alone.
        path = source.with_name(f".{source.stem}.{os.getpid()}.hooked.onnx")
        write_whole(path, model.SerializeToString())
        try:
            (scratch / "hooked").mkdir()
            other = _Made(self._engine, path, scratch / "hooked", self._threads)
        finally:
            path.unlink(missing_ok=True)
        other.hooked = True
        return other if other.unblocked < made.unblocked else None

    def _add(
        self, name: str, made: _Made, plain: OrtSegment, feeds: Tensors, expected: Tensors, *, prepacked: bool
    ) -> None:
        """Weights first, then the graph, then (when it computes what it should) the manifest."""
        with self._locked():
            manifest = read_manifest(self._place, self._key) or Manifest(key=self._key)
            if name in manifest.segments:
                return  # another process was quicker
            weights = _Weights(self._place / WEIGHTS_FILE, manifest)
            reads = made.move_weights(weights, prepacked=prepacked)
            weights.flush()
            data = made.proto.SerializeToString()
            path = self._place / f"{name}.onnx"
            write_whole(path, data)
            try:
                self._prove(plain, path, feeds, expected, prepacked=prepacked)
            except IsthmusError:
                path.unlink(missing_ok=True)
                raise
            file = OptimisedFile(
                bytes=len(data), blake2b=content_digest(data), prepacked=prepacked, hooked=made.hooked, reads=reads
            )
            manifest = msgspec.structs.replace(
                manifest,
                prepacked=prepacked if name == WHOLE else manifest.prepacked,
                weights=(*manifest.weights, *weights.added),
                segments=manifest.segments | {name: file},
            )
            self._write(manifest)

    def _prove(self, plain: OrtSegment, path: Path, feeds: Tensors, expected: Tensors, *, prepacked: bool) -> None:
        segment = self._engine.open_optimised(path, threads=self._threads, prepack=prepacked)
        if (segment.input_specs, segment.output_specs) != (plain.input_specs, plain.output_specs):
            raise EngineFailed(f"{path.name}: its inputs and outputs are not those of what was cut")
        difference = worst_difference(segment.run(feeds), expected, list(expected))
        if not difference <= SAME:
            raise EngineFailed(
                f"{path.name} differs from what was cut by {difference:.2g} (relative), allowed is {SAME:g}"
            )

    def _refuse(self, name: str, reason: str) -> None:
        with self._locked():
            manifest = read_manifest(self._place, self._key) or Manifest(key=self._key)
            self._write(msgspec.structs.replace(manifest, refused=manifest.refused | {name: reason}))

    def _write(self, manifest: Manifest) -> None:
        write_whole(self._place / MANIFEST_FILE, msgspec.json.encode(manifest))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time changes the folder; the kernel lets go of the lock when its holder dies."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            file = (self._place / LOCK_FILE).open("ab")
        except OSError as error:
            raise ModelUnavailable(f"{self._place} cannot be written: {error.strerror}; make room there") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Weights:
    """The file of weights while something is added: contents that are there are found, others are appended."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._known = {extent.blake2b: extent for extent in manifest.weights}
        self._end = manifest.end
        self._fresh: list[tuple[int, bytes]] = []
        self.added: list[Extent] = []

    def place(self, content: memoryview) -> Extent:
        digest = content_digest(content)
        extent = self._known.get(digest)
        if extent is None:
            offset = -(-self._end // PAGE_BYTES) * PAGE_BYTES
            extent = self._known[digest] = Extent(offset, content.nbytes, digest)
            self._end = offset + content.nbytes
            self.added.append(extent)
            self._fresh.append((offset, bytes(content)))
        return extent

    def flush(self) -> None:
        """Append what is new. Nothing that the manifest names is touched: others have it mapped."""
        if not self._fresh:
            return
        first, _ = self._fresh[0]
        try:
            with self._path.open("r+b" if self._path.exists() else "w+b") as file:
                try:
                    for offset, content in self._fresh:
                        file.seek(offset)
                        file.write(content)
                    file.flush()
                except OSError:
                    with contextlib.suppress(OSError):
                        os.truncate(self._path, first)
                    raise
        except OSError as error:
            raise ModelUnavailable(
                f"{self._path} cannot grow: {error.strerror}; free {sum(len(c) for _, c in self._fresh)} bytes there"
            ) from error


class _Made:
    """One segment, optimised into a scratch folder."""

    def __init__(self, engine: OrtEngine, source: Path, scratch: Path, threads: int) -> None:
        self._engine = engine
        self._threads = threads
        self._path = scratch / "made.onnx"
        self._data = scratch / "made.bin"
        self.plain = _optimised(engine, source, self._path, self._data, threads)
        """The session that was written down: what was cut, as it runs without us."""
        self.proto: ModelProto = onnx.load(self._path, load_external_data=False)
        self.hooked = False

    @property
    def reorders(self) -> int:
        """Changes between the file's layout and the blocked one."""
        return sum(node.op_type in REORDERS for node in self.proto.graph.node)

    @property
    def unblocked(self) -> int:
        """Nodes that a better layout would save: changes of layout, and what was not fused into a convolution."""
        return sum(node.op_type in (*REORDERS, "Add", "Relu") for node in self.proto.graph.node)

    @property
    def is_prepacked(self) -> bool:
        return any(True for tensor in _outside(self.proto.graph) for _ in _layouts(tensor))

    def gains_by_layout(self, feeds: Tensors) -> bool:
        """Whether runs are faster by more than they may be slower, with matrices laid out before."""
        with_layout, without = (
            self._engine.open_optimised(self._path, threads=self._threads, prepack=prepack) for prepack in (True, False)
        )
        ms = measure_interleaved(
            {"with": lambda: with_layout.run(feeds), "without": lambda: without.run(feeds)}, MEASURE_S
        )
        return ms["without"] > SLOWER_MAX * ms["with"]

    def drop_layouts(self) -> None:
        for tensor in _outside(self.proto.graph):
            for entry in list(_layouts(tensor)):
                tensor.external_data.remove(entry)

    def move_weights(self, weights: _Weights, *, prepacked: bool) -> tuple[int, ...]:
        """Let the graph refer to `weights`; the offsets that a run reads."""
        tensors = list(_outside(self.proto.graph))
        if not tensors:
            return ()
        reads: set[int] = set()
        with (
            self._data.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            for tensor in tensors:
                reads |= _move(tensor, content, weights)
        return tuple(sorted(reads))


def _optimised(engine: OrtEngine, source: Path, target: Path, data: Path, threads: int) -> OrtSegment:
    try:
        return engine.optimise(source, target, weights=data.name, threads=threads)
    except IsthmusError as error:
        if "rite" in str(error):  # what it says when a file does not take what it writes
            free = shutil.disk_usage(target.parent).free
            raise ModelUnavailable(
                f"{source.name} cannot be optimised, writing failed with {free} bytes free in {target.parent}: "
                "make room there"
            ) from error
        raise


def hooked(tail: ModelProto) -> ModelProto | None:
    """The tail with an identity pool behind each picture-like input that blocked operators read; None where none is.

    ONNX Runtime blocks channels from a convolution or pool on: a boundary that feeds a convolution and the residual
    sum beside it comes as NCHW to both, and every sum and activation of that stage stays unfused. Behind a pool it is
    blocked for all. An average over one element is the element, NaN and infinities too; a MaxPool would turn -inf into
    the smallest float.
    """
    readers: dict[str, set[str]] = {}
    for node in tail.graph.node:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            return None  # a body may read the boundary by its name
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    outputs = {value.name for value in tail.graph.output}
    names = [
        value.name
        for value in tail.graph.input
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
        and len(value.type.tensor_type.shape.dim) == 4
        and value.name not in outputs
        and readers.get(value.name)
        and readers[value.name] <= BLOCKABLE
    ]
    if not names:
        return None
    renamed = {name: f"{name}/blocked" for name in names}
    for node in tail.graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    for name, inside in renamed.items():
        tail.graph.node.insert(0, onnx.helper.make_node("AveragePool", [name], [inside], kernel_shape=[1, 1]))
    return tail


def _move(tensor: TensorProto, content: memoryview, weights: _Weights) -> set[int]:
    """Place one tensor and its layouts; the offsets that a run reads: the layouts where there are some."""

    def place(offset: int, length: int) -> Extent:
        with content[offset : offset + length] as part:
            return weights.place(part)

    entries = {entry.key: entry for entry in tensor.external_data}
    plain = place(int(entries["offset"].value), int(entries["length"].value))
    entries["location"].value = WEIGHTS_FILE
    entries["offset"].value = str(plain.offset)
    reads = set()
    for entry in _layouts(tensor):
        key, *blobs = entry.value.split("|")
        moved = []
        for blob in blobs:
            offset, length, rest = blob.split(";", 2)
            extent = place(int(offset), int(length))
            reads.add(extent.offset)
            moved.append(f"{extent.offset};{length};{rest}")
        entry.value = "|".join((key, *moved))
    return reads or {plain.offset}


def _layouts(tensor: TensorProto) -> Iterator[Any]:
    """Entries that say where a tensor lies as kernels want it: `prepacked_<n>` = `<kernel>|<offset>;<length>;…|…`."""
    return (entry for entry in list(tensor.external_data) if entry.key.startswith("prepacked_"))


def _outside(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors whose data lies outside, in bodies of If, Loop and Scan too."""
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _outside(body)


def _empty(place: Path) -> None:
    """Remove what is there, not what others are making. Files are unlinked: who has them mapped keeps them."""
    for path in place.iterdir():
        if path.is_file() and path.name != LOCK_FILE:
            path.unlink(missing_ok=True)


def _remove_left_over(place: Path) -> None:
    """Scratch folders of processes that were killed."""
    for path in place.glob(f"{SCRATCH}*"):
        if time.time() - path.stat().st_mtime > SCRATCH_LIFE_S:
            shutil.rmtree(path, ignore_errors=True)


def optimise(
    card: ModelCard,
    folder: Path,
    cuts: Sequence[CutCard],
    *,
    inputs: Tensors,
    engine: OrtEngine,
    threads: int,
    on_progress: Callable[[str, float], None] = lambda stage, ratio: None,
) -> None:
    """Make the whole and the halves of these cuts, tried on one request's `inputs`.

    What cannot be optimised stays as it was cut. InvalidModel and EngineFailed when that does not run either.
    """
    optimiser = Optimiser(card, folder, engine, threads=threads)
    on_progress(WHOLE, 0.0)
    optimiser.open(WHOLE, Path(card.path), inputs)
    for number, cut in enumerate(cuts):
        on_progress(f"cut {number + 1} of {len(cuts)}", (number + 1) / (len(cuts) + 1))
        open_halves(cut, folder, inputs, optimiser.open)
    on_progress("done", 1.0)


def open_halves(cut: CutCard, folder: Path, inputs: Tensors, open_best: Opener) -> tuple[Segment, Segment, Tensors]:
    """Head, tail and what the tail takes for these inputs."""
    name = f"{cut.id}.head"
    head_feeds = {taken: inputs[taken] for taken in cut.head_inputs}
    head = open_best(name, folder / f"{name}.onnx", head_feeds)
    made = inputs | head.run(head_feeds)
    name = f"{cut.id}.tail"
    feeds = {taken: made[taken] for taken in (*(spec.name for spec in cut.boundary), *cut.tail_inputs)}
    return head, open_best(name, folder / f"{name}.onnx", feeds), feeds
