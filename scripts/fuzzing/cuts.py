"""The differential test of cutting: head ∘ tail = whole, for random graphs and many cuts of each.

The whole file in the plain runtime is the oracle. Without optimisations the same kernels see the same values on both
ways, so every output must have the same bits. With them each side fuses on its own, and outputs may differ by
rounding: floats by `BOUND` of their largest, and a graph whose whole changes by more than that between the two levels
(rounding, comparing and quantising make much of little) is judged at the exact level alone, and counted.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from scripts.fuzzing.graphs import RandomGraph, random_graph
from split.errors import CutRefused, InvalidModel, IsthmusError
from split.graph.cuts import Cut, all_prefix_cuts, bitmap_of, candidates, cut_card, cut_from_mask, mask_of
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, write_parts
from split.runtime.segment import ort  # the one place that switches the vendor's telemetry off before the import
from split.tensor import Array, Tensors, TensorSpec, relative_difference
from split.workbench.cut import settle

BOUND: Final = 1e-5
EXACT = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
FUSED = ort.GraphOptimizationLevel.ORT_ENABLE_ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A cut that does not keep the answer, or a graph that fell over; all it takes to see it again."""

    seed: int
    cut: str
    boundary: tuple[str, ...]
    why: str
    text: str
    """The model as ONNX text."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a run of the fuzzer counts."""

    graphs: int = 0
    rejected: int = 0
    """Drafts that the runtime itself does not take: no graphs."""
    sensitive: int = 0
    """Graphs judged without optimisations only."""
    cuts: int = 0
    """Legal cuts whose halves were run against the whole."""
    boundaries: int = 0
    """Of a topological order, over all graphs."""
    usable: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """Boundaries that are refused, by reason (names left out)."""
    wrong: list[Wrong] = field(default_factory=list)

    @property
    def usable_ratio(self) -> float:
        return self.usable / max(self.boundaries, 1)


def fuzz_cuts(
    seeds: Iterator[int], *, graphs: int, cuts_max: int, on_graph: Callable[[Tally], None] = lambda tally: None
) -> Tally:
    """Draw graphs from these seeds until `graphs` of them are valid; at most `cuts_max` cuts of each are run."""
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as name:
        while tally.graphs < graphs:
            judge(random_graph(next(seeds)), Path(name), tally, cuts_max=cuts_max)
            on_graph(tally)
    return tally


def judge(graph: RandomGraph, folder: Path, tally: Tally, *, cuts_max: int) -> None:
    """Count one graph: its boundaries, and each of its sampled cuts as right, refused or wrong."""
    path = folder / "model.onnx"
    onnx.save(graph.proto, path)
    truth = _truth(path, graph)
    if truth is None:
        tally.rejected += 1
        return
    tally.graphs += 1
    trial = Trial(graph=graph, folder=folder, truth=truth)
    tally.sensitive += trial.sensitive
    try:
        model = load_model(path)
        share_weights(model, folder)
        settle(model, folder, inputs=graph.feeds[0])
        prefixes = all_prefix_cuts(model)
        tally.boundaries += len(prefixes)
        tally.usable += sum(cut.legal for cut in prefixes)
        tally.refusals.update(_kind(cut.reason) for cut in prefixes if not cut.legal)
        for number, cut in enumerate(_sample(model, prefixes, graph.seed, cuts_max)):
            # Every other cut at the other level: both are covered, at half the price.
            why = trial.refute(model, cut, exact=trial.sensitive or number % 2 == 0)
            tally.cuts += 1
            if why:
                tally.wrong.append(_wrong(graph, why, cut))
    except Exception as error:  # whatever falls over is what is looked for
        if isinstance(error, InvalidModel) and _refused_by_name(error):
            tally.refusals[_kind(str(error).partition(": ")[2])] += 1
        else:
            tally.wrong.append(_wrong(graph, f"{type(error).__name__}: {error}"))


def _truth(path: Path, graph: RandomGraph) -> dict[tuple[bool, int], Tensors] | None:
    """Outputs of the whole by (exact, request); None when the runtime refuses the model. A request of another size than
    the graph was made at may be refused alone."""
    truth: dict[tuple[bool, int], Tensors] = {}
    for exact in (True, False):
        try:
            session = _open(path, exact)
        except Exception:  # pybind's exceptions share no base class but this
            return None
        names = [value.name for value in session.get_outputs()]
        for number, feeds in enumerate(graph.feeds):
            try:
                truth[exact, number] = dict(zip(names, _open(path, exact).run(names, feeds), strict=True))
            except Exception:
                if number == 0:
                    return None
    return truth


@dataclass(slots=True, kw_only=True)
class Trial:
    """One graph with its true answers."""

    graph: RandomGraph
    folder: Path
    truth: dict[tuple[bool, int], Tensors]

    @property
    def sensitive(self) -> bool:
        """Whether the whole itself depends on the level of optimisation."""
        return any(
            relative_difference(_plain(outputs[name]), _plain(self.truth[True, number][name])) > BOUND
            for (exact, number), outputs in self.truth.items()
            if not exact and (True, number) in self.truth
            for name in outputs
        )

    def refute(self, model: Model, cut: Cut, *, exact: bool) -> str:
        """Why the halves of this cut are not the whole; empty when they are."""
        card = cut_card(model, cut, 0.0)
        if cut_from_mask(model, mask_of(bitmap_of(cut.mask, len(model.nodes)))).id != card.id:
            return "the bitmap of the cut is another cut"
        head, tail = self.folder / "head.onnx", self.folder / "tail.onnx"
        for path in (head, tail):
            path.unlink(missing_ok=True)
        write_parts(model, cut, head, tail)
        for (level, number), expected in self.truth.items():
            if level == exact and (why := self._compare(model, cut, number, expected, exact)):
                return f"{'without' if exact else 'with'} optimisations, request {number}: {why}"
        return ""

    def _compare(self, model: Model, cut: Cut, number: int, expected: Tensors, exact: bool) -> str:
        feeds, found = self.graph.feeds[number], dict[str, Array]()
        head, tail = self.folder / "head.onnx", self.folder / "tail.onnx"
        try:
            if head.exists():
                found = _run(_open(head, exact), {name: feeds[name] for name in cut.head_inputs})
            crossing = {name: found[name] for name in cut.boundary} | {name: feeds[name] for name in cut.tail_inputs}
            for name in cut.boundary:
                spec = model.spec(name)
                if not isinstance(spec, TensorSpec) or (why := spec.refuse(found[name])):
                    return f"the boundary is not what the card says: {spec if isinstance(spec, str) else why}"
            if tail.exists():
                session = _open(tail, exact)
                if {value.name for value in session.get_inputs()} != set(crossing):
                    return f"the tail asks for {[value.name for value in session.get_inputs()]}"
                found |= _run(session, crossing)
        except Exception as error:  # pybind's exceptions share no base class but this
            return f"a half fails: {error}"
        if list(expected) != list(model.output_names):
            return f"the outputs are {model.output_names}, those of the whole {list(expected)}"
        for name, wanted in expected.items():
            got = found[name]
            if exact and not _same_bits(got, wanted):
                return f"output {name!r} has other bits: {got.dtype} {got.shape}, not {wanted.dtype} {wanted.shape}"
            if (difference := relative_difference(_plain(got), _plain(wanted))) > BOUND:
                return f"output {name!r} has a relative difference of {difference:.3g}"
        return ""


def _open(path: Path, exact: bool) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = EXACT if exact else FUSED
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: Any, feeds: Tensors) -> Tensors:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _same_bits(found: Array, expected: Array) -> bool:
    """Equal in type, shape and value; one NaN is as good as another."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return np.array_equal(found, expected, equal_nan=found.dtype.kind == "f")


def _plain(array: Array) -> Array:
    return array.astype(np.str_) if array.dtype == object else array


def _sample(model: Model, prefixes: Sequence[Cut], seed: int, cuts_max: int) -> list[Cut]:
    """Legal cuts: nothing and everything on the device, candidates, boundaries of the order, random closed sets."""
    dice = random.Random(seed)
    everything = (1 << len(model.nodes)) - 1
    pool = {cut.id: cut for cut in prefixes if cut.legal}
    pool |= {cut.id: cut for cut in candidates(model)}
    for _ in range(cuts_max):
        cut = cut_from_mask(model, _closed(model, dice))
        if cut.legal:
            pool[cut.id] = cut
    chosen = dice.sample(list(pool.values()), min(len(pool), cuts_max - 1))
    return [*chosen, cut_from_mask(model, dice.choice((0, everything)))] if not model.no_cuts_reason else chosen


def _closed(model: Model, dice: random.Random) -> int:
    """A random set of nodes, with all they need."""
    makers = {name: node for node in model.nodes for name in node.makes}
    waiting = dice.sample(model.nodes, dice.randint(1, min(3, len(model.nodes))))
    mask = 0
    for node in waiting:  # grows while it is read
        if not mask >> node.bit & 1:
            mask |= 1 << node.bit
            waiting += [makers[name] for name in node.reads if name in makers]
    return mask


def _kind(reason: str) -> str:
    """A reason without the name it names."""
    before, quote, rest = reason.partition("'")
    return f"{before}…{rest.rpartition(chr(39))[2]}" if quote else reason


def _refused_by_name(error: IsthmusError) -> bool:
    return "unsupported type" in str(error)


def _wrong(graph: RandomGraph, why: str, cut: Cut | None = None) -> Wrong:
    return Wrong(
        seed=graph.seed,
        cut=cut.id if cut else "",
        boundary=cut.boundary if cut else (),
        why=why,
        text=onnx.printer.to_text(graph.proto),
    )
