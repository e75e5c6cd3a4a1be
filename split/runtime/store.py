"""Open segments, kept as long as the budget of bytes allows: what is used again is there at once.

A segment is opened in the form that is quickest to open: as optimised for this machine where that is there (`prefer`),
else as it was cut; a form that runs faster takes its place as soon as a thread in the background has opened it.
Invariant: a segment that someone holds is never closed. The store only forgets; the engine gives the memory back when
the last holder lets go of it (reference counting, at once). Blocking: call `get` from worker threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from split.errors import IsthmusError
from split.profiles.measured import Tuning
from split.runtime.background import Background, in_own_thread
from split.runtime.engine import Engine, Segment
from split.runtime.eviction import LruK
from split.runtime.optimised import Optimised

log = logging.getLogger(__name__)

WEIGHTS: Final = "weights.bin"
"""The workbench's one file of weights that all heads and tails in a folder share."""

_DATA_SUFFIXES: Final = (".data", "_data", ".bin", ".weight", ".weights")
"""Names that exporters give to external data; only the budget depends on it."""

CUT_MS: Final = 300.0
OPTIMISED_MS: Final = 10.0
"""Opening before anything was opened here: a ResNet-50's tail, optimised on the way, and as it lies there optimised."""


class _Form(NamedTuple):
    """How a segment was opened, or is to be."""

    optimised: Optimised | None
    """None: the file as it was cut."""
    prepacked: bool
    """With its matrices laid out."""
    tuning: Tuning


@dataclass(slots=True, eq=False)
class _Slot:
    """One path: its lock makes the second asker wait for the first one's opening instead of opening too."""

    lock: threading.Lock
    segment: Segment | None = None
    parts: dict[Hashable, int] | None = None
    form: _Form | None = None
    improving: bool = False


class SegmentStore:
    """Segments by path, let go by LRU-K. Thread-safe.

    `threads`, `spin_us`: of each, where `tune` has not said otherwise. `budget_bytes`: sum over the files behind the
    open segments, a file or a weight that several share counted once; the segment asked for last stays open even when
    it is larger.
    """

    def __init__(self, engine: Engine, *, threads: int, spin_us: int = 0, budget_bytes: int) -> None:
        assert budget_bytes > 0, budget_bytes
        self._engine = engine
        self._tuning = Tuning(threads=threads, spin_us=spin_us)
        self._tunings: dict[Path, Tuning] = {}
        """Of a file, or of all files in a folder."""
        self._budget_bytes = budget_bytes
        self._engines: dict[Path, Engine] = {}
        """Of a file, or of all files in a folder, where it is another one."""
        self._lock = threading.Lock()
        self._slots: dict[Path, _Slot] = {}
        self._uses: LruK[Path] = LruK()
        self._preferred: dict[Path, Optimised] = {}
        self._opening_ms: dict[Path, tuple[bool, float]] = {}
        """How long it took last, and whether that was an optimised form."""
        self._kept: dict[Path, Callable[[], object]] = {}
        self._held: Counter[Path] = Counter()
        self.changes = 0
        """Goes up whenever `activation_ms` of anything may have changed."""
        self._trimming = False
        """Is about to happen."""
        self._behind = Background("isthmus-warm")
        self._openings: dict[Path, Future[Segment]] = {}
        """Under way in threads of their own: one for each file, however many wait for it."""

    def get(self, path: Path) -> Segment:
        """The segment of this file, opened if it is not open yet. InvalidModel when the engine refuses it."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None:
                slot = self._slots[path] = _Slot(threading.Lock())
            self._uses.use(path)
            if slot.segment is not None:
                return slot.segment
        with slot.lock:
            if slot.segment is None:
                self._open(path, slot)
            assert slot.segment is not None
            return slot.segment

    def opened(self, path: Path) -> Segment | None:
        """The segment of this file if it is open: never blocks."""
        with self._lock:
            slot = self._slots.get(path)
            if slot is None or slot.segment is None:
                return None
            self._uses.use(path)
            return slot.segment

    def opening(self, path: Path) -> Future[Segment]:
        """`get` in a thread of its own, which holds up nobody who does not wait for it, even where the engine hangs."""
        with self._lock:
            known = self._openings.get(path)
            if known is not None:
                return known
            opening = in_own_thread(lambda: self.get(path), name=f"isthmus-open {path.name}")
            self._openings[path] = opening
        opening.add_done_callback(lambda done: self._opening_ended(path, done))
        return opening

    def _opening_ended(self, path: Path, opening: Future[Segment]) -> None:
        with self._lock:  # which must not be what keeps the segment
            if self._openings.get(path) is opening:
                del self._openings[path]

    def warm(self, paths: Iterable[Path]) -> Future[None]:
        """Have these open, in the background, in the form that runs fastest: what is likely to be asked for next.

        One that cannot be opened is left closed: whoever asks for it learns why.
        """

        def work() -> None:
            for path in paths:
                try:
                    self.get(path)
                except IsthmusError as error:
                    log.info("%s is not warmed up: %s", path, error)

        return self._behind.submit(work)

    def prefer(self, made: Mapping[Path, Optimised]) -> None:
        """From now on open these files in their optimised form; those that are open change over in the background."""
        with self._lock:
            self._preferred |= made
            self.changes += 1
            for path in made:
                if (slot := self._slots.get(path)) is not None and slot.segment is not None:
                    self._improve_later(path, slot)

    def tune(self, places: Iterable[Path], tuning: Tuning) -> None:
        """From now on open these files, and every file in these folders, so; those that are open change over in the
        background."""
        with self._lock:
            self._tunings |= dict.fromkeys(places, tuning)
            for path, slot in self._slots.items():
                if slot.segment is not None:
                    self._improve_later(path, slot)

    def use(self, places: Iterable[Path], engine: Engine) -> None:
        """From now on open these files, and every file in these folders, in this engine; until they are forgotten."""
        with self._lock:
            self._engines |= dict.fromkeys(places, engine)

    def keep(self, path: Path, *, still: Callable[[], object] | None = None) -> None:
        """Close this one, until it is forgotten, only when nothing that is not kept is left to be closed.

        `still`: raises an IsthmusError when the file is not the one any more that is meant; asked after each opening of
        it as it was cut.
        """
        with self._lock:
            self._kept[path] = still or _anything

    @contextlib.contextmanager
    def held(self, path: Path) -> Iterator[None]:
        """Within the block this one is not closed if it is open, whatever the budget."""
        with self._lock:
            self._held[path] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[path] -= 1
                if not self._held[path]:
                    del self._held[path]

    def is_open(self, path: Path) -> bool:
        """Whether `get` would return at once."""
        slot = self._slots.get(path)
        return slot is not None and slot.segment is not None

    def activation_ms(self, path: Path) -> float:
        """How long `get` is expected to take: 0.0 when it is open, else what it took last, else the longest so far of
        those that are opened in the same form."""
        if self.is_open(path):
            return 0.0
        with self._lock:
            optimised = path in self._preferred
            known = self._opening_ms.get(path)
            if known is not None and known[0] == optimised:
                return known[1]
            alike = [ms for kind, ms in self._opening_ms.values() if kind == optimised]
        return max(alike, default=OPTIMISED_MS if optimised else CUT_MS)

    def forget(self, place: Path) -> None:
        """Let go of the segment of this file, or of every segment whose file lies in this folder, in any form."""
        with self._lock:
            known = {*self._slots, *self._preferred, *self._openings}
            for path in [path for path in known if place in (path, path.parent)]:
                self._let_go(path)
                self._openings.pop(path, None)
                self._preferred.pop(path, None)
                self._opening_ms.pop(path, None)
                self._uses.forget(path)
            self._tunings.pop(place, None)
            self._engines.pop(place, None)
            self._kept.pop(place, None)
            self.changes += 1

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._slots.clear()
            self._preferred.clear()

    def close(self) -> None:
        """`clear`, and nothing is opened in the background any more; an opening that hangs is left to itself."""
        self._behind.close()
        self.clear()

    @property
    def used_bytes(self) -> int:
        """What counts against the budget."""
        with self._lock:
            return self._used_bytes()

    def _open(self, path: Path, slot: _Slot) -> None:
        optimised = self._preferred.get(path)
        started_s = time.perf_counter()
        try:
            segment, form = self._opened(path, optimised)
            parts = _parts_of(path, form.optimised)
        except BaseException:
            with self._lock:
                if self._slots.get(path) is slot:
                    del self._slots[path]
            raise
        took_ms = (time.perf_counter() - started_s) * 1e3
        with self._lock:
            self._opening_ms[path] = (form.optimised is not None, took_ms)
            slot.parts, slot.form, slot.segment = parts, form, segment
            self.changes += 1
            self._make_room(path)
            if self._slots.get(path) is slot:
                self._improve_later(path, slot)

    def _opened(self, path: Path, optimised: Optimised | None) -> tuple[Segment, _Form]:
        """Quickly: matrices are laid out later."""
        tuning = self._tuning_of(path)
        if optimised is not None:
            form = _Form(optimised, False, tuning)
            try:
                return self._open_as(path, form), form
            except IsthmusError as error:
                self._dislike(path, optimised, error)
        form = _Form(None, True, tuning)
        return self._open_as(path, form), form

    def _open_as(self, path: Path, form: _Form) -> Segment:
        threads, spin_us = form.tuning.threads, form.tuning.spin_us
        engine = self._engines.get(path) or self._engines.get(path.parent) or self._engine
        if form.optimised is None:
            segment = engine.open(path, threads=threads, spin_us=spin_us)
            self._kept.get(path, _anything)()
            return segment
        return engine.open_optimised(form.optimised.path, threads=threads, spin_us=spin_us, prepack=form.prepacked)

    def _tuning_of(self, path: Path) -> Tuning:
        return self._tunings.get(path) or self._tunings.get(path.parent) or self._tuning

    def _dislike(self, path: Path, optimised: Optimised, error: IsthmusError) -> None:
        log.warning("%s is opened as it was cut: its optimised form is refused: %s", path, error)
        with self._lock:
            if self._preferred.get(path) is optimised:
                del self._preferred[path]

    def _improve_later(self, path: Path, slot: _Slot) -> None:
        """Under the lock."""
        wanted = self._wanted(path)
        if slot.improving or slot.form == wanted:
            return
        with contextlib.suppress(RuntimeError):  # closing
            self._behind.submit(lambda: self._improve(path, slot, wanted))
            slot.improving = True

    def _wanted(self, path: Path) -> _Form:
        optimised = self._preferred.get(path)
        return _Form(optimised, optimised is None or optimised.prepacked, self._tuning_of(path))

    def _improve(self, path: Path, slot: _Slot, wanted: _Form) -> None:
        segment: Segment | None = None
        try:
            if self._slots.get(path) is slot:
                segment = self._open_as(path, wanted)
        except IsthmusError as error:
            if wanted.optimised is not None:
                self._dislike(path, wanted.optimised, error)
            else:
                log.warning("%s stays open as it is: %s", path, error)
        with self._lock:
            slot.improving = False
            if segment is None or self._slots.get(path) is not slot:
                return
            slot.parts, slot.segment, slot.form = _parts_of(path, wanted.optimised), segment, wanted
            self._make_room(path)
            self._improve_later(path, slot)  # preferred otherwise meanwhile

    def _make_room(self, wanted: Path) -> None:
        """Under the lock: forget until the budget holds, what is kept last, `wanted` and what is held never."""
        if self._used_bytes() <= self._budget_bytes:
            return
        closable = [
            path
            for path, slot in self._slots.items()
            if slot.segment is not None and path != wanted and path not in self._held
        ]
        for path in sorted(self._uses.in_order(closable), key=self._kept.__contains__):
            self._let_go(path)
            if self._used_bytes() <= self._budget_bytes:
                return

    def _let_go(self, path: Path) -> None:
        """Under the lock. The engine keeps memory for the next run until it is told that there will be none."""
        slot = self._slots.pop(path, None)
        self.changes += 1
        if slot is not None and slot.segment is not None and not self._trimming:
            self._trimming = True  # before it is asked for: it may be over before `submit` returns
            with contextlib.suppress(RuntimeError):  # closing
                self._behind.submit(self._trim)

    def _trim(self) -> None:
        self._trimming = False
        self._engine.trim()

    def _used_bytes(self) -> int:
        parts: dict[Hashable, int] = {}
        for slot in self._slots.values():
            parts |= slot.parts or {}
        return sum(parts.values())


def _anything() -> None:
    """Nobody has said which file is meant."""


def _parts_of(path: Path, optimised: Optimised | None) -> dict[Hashable, int]:
    """What is in memory for this segment, by what others share it under, with sizes."""
    if optimised is not None:
        parts: dict[Hashable, int] = {optimised.path: optimised.bytes}
        parts.update(optimised.weights.items())
        return parts
    return _files_behind(path)


def _files_behind(path: Path) -> dict[Hashable, int]:
    """The model file and the external data beside it, with their sizes."""
    part = path.name.endswith((".head.onnx", ".tail.onnx"))
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    data = (file for file in beside if (file.name == WEIGHTS if part else file.name.endswith(_DATA_SUFFIXES)))
    return {file: file.stat().st_size for file in (path, *data) if file.is_file()}
