"""The differential test of cutting: head ∘ tail = whole, for random graphs and many cuts of each.

The whole file in the plain runtime is the oracle; floats may differ by `BOUND` of their largest, all else by nothing.
Every other cut is run without optimisations, where the same kernels see the same values, and with all of them, where
each side fuses on its own. A graph whose whole itself differs by more between the two levels (rounding and comparing
make much of little) is judged at the first alone, and counted. One whose outputs even have other shapes there (the rows
of a loop of no rounds have the dims that the runtime infers, and fewer without optimisations) is judged at the second
alone, which is what is served, and what parts declare the dims of.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from scripts.fuzzing.graphs import RandomGraph
from split.errors import CutRefused, InvalidModel, IsthmusError
from split.graph.candidates import candidates
from split.graph.cuts import (
    Cut,
    all_prefix_cuts,
    bitmap_of,
    boundary_specs,
    cut_card,
    cut_from_mask,
    mask_of,
)
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, write_parts
from split.runtime.segment import runtime
from split.tensor import Array, Tensors, relative_difference
from split.workbench.cut import settle

BOUND: Final = 1e-5
ROUNDING: Final = 2**-10
"""A FLOAT16 has 11 bits."""
ROUNDED: Final = "off by one 16-bit rounding"
HALF_FAILS: Final = "a half fails"
UNOPENED: Final = "the runtime's optimiser fails on a half that it runs without"


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
    """Drafts that the runtime itself does not take, dies of or misreads, or that are of both of the next two kinds."""
    sensitive: int = 0
    """Graphs judged without optimisations only."""
    reshaped: int = 0
    """Graphs judged with optimisations only."""
    rounded: int = 0
    """Cuts of 16-bit graphs that are off by one rounding: the runtime leaves roundings out as it sees fit, and whether
    it does can hang on nodes that no output needs (`split/graph/half.py`)."""
    unopened: int = 0
    """Cuts with a half that opens without optimisations only, or kills the runtime: bugs of its optimiser. Never
    offered: the daemon measures in a child process, and what does not open there is not measured."""
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

    def add(self, other: Tally) -> None:
        """Count what the other one counted."""
        for name in (
            "graphs",
            "rejected",
            "sensitive",
            "reshaped",
            "rounded",
            "unopened",
            "cuts",
            "boundaries",
            "usable",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refusals.update(other.refusals)
        self.wrong += other.wrong


def judge(
    graph: RandomGraph, folder: Path, tally: Tally, *, cuts_max: int, on_valid: Callable[[], None] = lambda: None
) -> None:
    """Count one graph: its boundaries, and each of its sampled cuts as right, refused or wrong.

    `on_valid` is called when the runtime has taken the whole.
    """
    path = folder / "model.onnx"
    onnx.save(graph.proto, path)
    truth = _truth(path, graph)
    trial = Trial(graph=graph, folder=folder, truth=truth or {})
    sensitive, reshaped = trial.sensitive, trial.reshaped
    if truth is None or trial.misread or (sensitive and reshaped):
        tally.rejected += 1
        return
    tally.graphs += 1
    tally.sensitive += sensitive
    tally.reshaped += reshaped
    on_valid()
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
            why = trial.refute(model, cut, exact=sensitive or (not reshaped and number % 2 == 0))
            tally.cuts += 1
            if why == ROUNDED:
                tally.rounded += 1
            elif why == UNOPENED:
                tally.unopened += 1
            elif why:
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
        for number, feeds in enumerate(graph.feeds):
            try:
                # A session for each request: random operators go on where the last run left them.
                truth[exact, number] = _run(_open(path, exact), feeds)
            except Exception:  # pybind's exceptions share no base class but this
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
        """Whether numbers of the whole itself depend on the level of optimisation."""
        return any(
            there.shape == here.shape and relative_difference(_plain(there), _plain(here)) > BOUND
            for there, here in self._at_both_levels()
        )

    @property
    def reshaped(self) -> bool:
        """Whether the whole's outputs have other shapes at the two levels: loops of no rounds."""
        return any(there.shape != here.shape for there, here in self._at_both_levels())

    @property
    def misread(self) -> bool:
        """Whether they have other shapes, and both have elements: then one level is wrong, whatever is cut."""
        return any(there.shape != here.shape and there.size and here.size for there, here in self._at_both_levels())

    def _at_both_levels(self) -> Iterator[tuple[Array, Array]]:
        """Each output of each request that ran at both: with optimisations, without."""
        for (exact, number), outputs in self.truth.items():
            if not exact and (True, number) in self.truth:
                yield from ((outputs[name], self.truth[True, number][name]) for name in outputs)

    def refute(self, model: Model, cut: Cut, *, exact: bool) -> str:
        """Why the halves of this cut are not the whole; empty when they are, or one of the two excuses above."""
        card = cut_card(model, cut, 0.0)
        if cut_from_mask(model, mask_of(bitmap_of(cut.mask, len(model.nodes)))).id != card.id:
            return "the bitmap of the cut is another cut"
        head, tail = self.folder / "head.onnx", self.folder / "tail.onnx"
        for path in (head, tail):
            path.unlink(missing_ok=True)
        write_parts(model, cut, head, tail)
        for (level, number), expected in self.truth.items():
            if level != exact:
                continue
            why = self._compare(model, cut, number, expected, exact)
            if why.startswith(HALF_FAILS) and not exact and not self._compare(model, cut, number, expected, True):
                return UNOPENED
            if why:
                optimised = "without" if exact else "with"
                return why if why == ROUNDED else f"{optimised} optimisations, request {number}: {why}"
        return ""

    def _compare(self, model: Model, cut: Cut, number: int, expected: Tensors, exact: bool) -> str:
        try:
            found = self._run_halves(model, cut, self.graph.feeds[number], exact)
        except CutRefused as error:
            return str(error)
        except Exception as error:  # pybind's exceptions share no base class but this
            return f"{HALF_FAILS}: {error}"
        if list(expected) != list(model.output_names):
            return f"the outputs are {model.output_names}, those of the whole {list(expected)}"
        off = {name: relative_difference(_plain(found[name]), _plain(wanted)) for name, wanted in expected.items()}
        worst = max(off, key=lambda name: off[name])
        if off[worst] <= BOUND:
            return ""
        if off[worst] <= ROUNDING and _has_halves(model):
            return ROUNDED
        return f"output {worst!r} has a relative difference of {off[worst]:.3g}"

    def _run_halves(self, model: Model, cut: Cut, feeds: Tensors, exact: bool) -> Tensors:
        head, tail = self.folder / "head.onnx", self.folder / "tail.onnx"
        found: Tensors = {}
        if head.exists():
            found = _run(_open(head, exact), {name: feeds[name] for name in cut.head_inputs})
        for spec in boundary_specs(model, cut):
            if why := spec.refuse(found[spec.name]):
                raise CutRefused(f"the boundary is not what the card says: {why}")
        if tail.exists():
            crossing = {name: found[name] for name in cut.boundary} | {name: feeds[name] for name in cut.tail_inputs}
            session = _open(tail, exact)
            asked = [value.name for value in session.get_inputs()]
            if set(asked) != set(crossing):
                raise CutRefused(f"the tail asks for {asked}, there is {list(crossing)}")
            found |= _run(session, crossing)
        return found


def _has_halves(model: Model) -> bool:
    return any(value.dtype is not None and value.dtype.name == "FLOAT16" for value in model.values.values())


def _open(path: Path, exact: bool) -> Any:
    ort = runtime()
    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if exact else levels.ORT_ENABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: Any, feeds: Tensors) -> Tensors:
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _plain(array: Array) -> Array:
    return array.astype(np.str_) if array.dtype == object else array


def _sample(model: Model, prefixes: Sequence[Cut], seed: int, cuts_max: int) -> list[Cut]:
    """Legal cuts: nothing and everything on the device, candidates, boundaries of the order, random closed sets."""
    dice = random.Random(seed)
    everything = (1 << len(model.nodes)) - 1
    if not model.nodes:
        return []
    pool = {cut.id: cut for cut in prefixes if cut.legal}
    pool |= {cut.id: cut for cut in candidates(model)}
    for _ in range(cuts_max):
        cut = cut_from_mask(model, _closed(model, dice))
        if cut.legal:
            pool[cut.id] = cut
    chosen = dice.sample(list(pool.values()), min(len(pool), cuts_max - 1))
    last = cut_from_mask(model, dice.choice((0, everything)))
    return [*chosen, last] if last.legal else chosen


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
    return re.sub(r"""'[^']*'|"[^"]*\"""", "…", reason)


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
