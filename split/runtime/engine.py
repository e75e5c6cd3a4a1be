"""The seam for anything that runs a segment: ONNX Runtime first, LiteRT or RKNN later. Blocking by nature: call it
from a worker thread, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from split.tensor import Array, Tensors


class Stop:
    """Ends one run whose result nobody waits for any more. Asked from any thread, before the run or while it lasts."""

    __slots__ = ("_end", "asked")

    def __init__(self) -> None:
        self.asked = False
        self._end: Callable[[], object] | None = None

    def ask(self) -> None:
        """The run ends soon, with EngineFailed; one that is over is not touched."""
        self.asked = True
        if self._end is not None:
            self._end()

    def begins(self, end: Callable[[], object]) -> None:
        """For an engine: a run begins that `end` ends, from another thread; at once where that was asked already."""
        self._end = end
        if self.asked:
            end()


class Segment(Protocol):
    """A head, a tail or a whole model, opened. Not thread-safe unless its engine says so."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names, in the graph's order."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names, in the graph's order."""

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> Tensors:
        """Run once. InvalidRequest for feeds the model does not take, EngineFailed for anything else and when it was
        stopped."""

    def close(self) -> None:
        """Give the memory back; a closed segment refuses to run."""


class Engine(Protocol):
    @property
    def name(self) -> str:
        """Name, version and machine: `onnxruntime 1.32.0 x86_64`."""

    def open(self, path: Path, *, threads: int, spin_us: int = 0) -> Segment:
        """Open a model file (external data beside it). InvalidModel when the runtime refuses it.

        `threads`, `spin_us`: see `split.profiles.measured.Tuning`."""

    def node_times(
        self, path: Path, feeds: Mapping[str, Array], *, threads: int, budget_s: float
    ) -> Sequence[tuple[str, float]]:
        """(node as the runtime names it, ms) in the order of execution, by its own profile; empty where it has none."""

    def trim(self) -> None:
        """Give memory back that no open segment needs."""

    def open_optimised(self, path: Path, *, threads: int, spin_us: int = 0, prepack: bool) -> Segment:
        """Open what this machine's runtime optimised and the workbench laid down; `prepack`: slower to open, faster to
        run where matrices are large. InvalidModel when the runtime refuses it."""
