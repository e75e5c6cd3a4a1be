"""How well the times of heads and tails are told by node times and a handful of measured cuts (`split/plan/costs.py`).

Every candidate cut is measured as two sessions in turns with the whole, as a profile does it; the model of costs is
fitted to `FITTED` of them, those that a profile would measure first, and held against all others. A model's error is
the mean over its cuts; the figure is the worst model's. What dynamic models take at other sizes than the profiled ones
is `dynamic.py`'s.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts import models
from scripts.benches import dynamic, nets, split
from scripts.benches.figure import CACHE, Figure
from split.graph.card import CutCard, ModelCard, read_card
from split.plan.costs import CutTimes, MeasuredCut, spread_out
from split.profiles.measured import Tuning
from split.runtime.engine import Segment
from split.runtime.optimised import WHOLE
from split.runtime.profiler import measure_interleaved
from split.runtime.segment import OrtEngine, usable_threads
from split.tensor import Tensors
from split.workbench.cut import prepare as cut_model
from split.workbench.node_times import head_shares
from split.workbench.optimise import Opener, Optimiser, open_halves

MODELS: Final = ("efficientnet-lite0", "ppocrv4-rec", *nets.NETS)
FITTED: Final = 5
FITTED_OF_FEW: Final = 3
"""Where a model has fewer than `MANY` candidates."""
MANY: Final = 10

BUDGET_S: Final = 3.0
BUDGET_QUICK_S: Final = 0.3
"""For one cut; at least three rounds."""


def prepare() -> None:
    """Cut the models and optimise their parts, once."""
    for name in MODELS:
        folder, inputs = _folder(name), _inputs(name)
        if (folder / "prepared").exists():
            continue
        print(f"cutting {name} …", flush=True)
        path = nets.net_path(name, CACHE / "nets") if name in nets.NETS else models.model_path(name)
        card = cut_model(path, folder, inputs=inputs)
        open_best = _opener(card, folder)
        open_best(WHOLE, Path(card.path), inputs)
        for cut in card.cuts:
            open_halves(cut, folder, inputs, open_best)
        (folder / "prepared").touch()
    dynamic.prepare()


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        rows += _errors(name, BUDGET_QUICK_S if quick else BUDGET_S)
    other_sizes = dynamic.rows(quick=quick)
    held_out = [row for row in rows if not row["fitted"]]
    heads = {name: [row["head_error"] for row in held_out if row["model"] == name] for name in MODELS}
    tails = {name: [row["tail_error"] for row in held_out if row["model"] == name] for name in MODELS}
    worst = max(error for errors in heads.values() for error in errors)
    return [
        Figure(name="head_mape", value=max(map(statistics.mean, heads.values())), unit="ratio", at_most=0.05),
        Figure(name="head_worst", value=worst, unit="ratio", at_most=0.12),
        Figure(name="tail_mape", value=max(map(statistics.mean, tails.values())), unit="ratio", at_most=0.05),
        *_at_other_sizes(other_sizes),
    ], rows + other_sizes


def _at_other_sizes(rows: list[dict[str, Any]]) -> list[Figure]:
    """Mean error of the worst model, and boundaries whose bytes were not told exactly."""
    errors = {name: [row["error"] for row in rows if row["model"] == name] for name in dynamic.PROFILED}
    wrong = sum(row["predicted_bytes"] != row["measured_bytes"] for row in rows)
    return [
        Figure(name="dynamic_mape", value=max(map(statistics.mean, errors.values())), unit="ratio", at_most=0.15),
        Figure(name="dynamic_bytes_wrong", value=wrong, unit="boundaries", at_most=0),
    ]


def _errors(name: str, budget_s: float) -> list[dict[str, Any]]:
    """One row a cut: what was measured, what the model of costs says, and how far it is off (relative)."""
    folder, inputs = _folder(name), _inputs(name)
    card = read_card(folder)
    shares = head_shares(card, folder, inputs, engine=OrtEngine(), threads=usable_threads())
    open_best = _opener(card, folder)
    whole = open_best(WHOLE, Path(card.path), inputs)
    wholes, measured = [], []
    for cut in card.cuts:
        beside_ms, halves = _measure(cut, folder, whole, inputs, shares[cut.id], open_best, budget_s)
        wholes.append(beside_ms)
        measured.append(halves)
    fitted = spread_out([halves.share for halves in measured])[: FITTED if len(measured) >= MANY else FITTED_OF_FEW]
    whole_ms = statistics.median(wholes)
    cuts = [_beside(halves, whole_ms / beside_ms) for halves, beside_ms in zip(measured, wholes, strict=True)]
    times = CutTimes.fit(whole_ms, [cuts[place] for place in fitted])
    rows = []
    for place, found in enumerate(cuts):
        head_ms = times.head_ms(found.share, found.boundary_bytes)
        tail_ms = times.tail_ms(found.share, found.boundary_bytes)
        rows.append(
            {
                "model": name,
                "cut": card.cuts[place].id,
                "fitted": place in fitted,
                "share": found.share,
                "bytes": found.boundary_bytes,
                "whole_ms": whole_ms,
                "head_ms": found.head_ms,
                "tail_ms": found.tail_ms,
                "head_error": abs(head_ms / found.head_ms - 1.0),
                "tail_error": abs(tail_ms / found.tail_ms - 1.0),
            }
        )
    return rows


def _measure(
    cut: CutCard,
    folder: Path,
    whole: Segment,
    inputs: Tensors,
    share: float,
    open_best: Opener,
    budget_s: float,
) -> tuple[float, MeasuredCut]:
    """The whole's milliseconds beside, and the cut as measured."""
    head, tail, _ = open_halves(cut, folder, inputs, open_best)
    head_feeds = {name: inputs[name] for name in head.inputs}
    made = head.run(head_feeds)
    tail_feeds = {name: (made if name in made else inputs)[name] for name in tail.inputs}
    ms = measure_interleaved(
        {
            "whole": lambda: whole.run(inputs),
            "head": lambda: head.run(head_feeds),
            "tail": lambda: tail.run(tail_feeds),
        },
        budget_s,
    )
    nbytes = sum(made[spec.name].nbytes for spec in cut.boundary)
    head.close()
    tail.close()
    return ms["whole"], MeasuredCut(share=share, boundary_bytes=nbytes, head_ms=ms["head"], tail_ms=ms["tail"])


def _beside(cut: MeasuredCut, factor: float) -> MeasuredCut:
    """As if the machine had been as fast as in the median."""
    return MeasuredCut(
        share=cut.share,
        boundary_bytes=cut.boundary_bytes,
        head_ms=cut.head_ms * factor,
        tail_ms=cut.tail_ms * factor,
    )


def _opener(card: ModelCard, folder: Path) -> Opener:
    optimiser = Optimiser(card, folder, OrtEngine(), threads=usable_threads())
    tuning = Tuning(threads=usable_threads())
    return lambda name, path, feeds: optimiser.open(name, path, feeds, tuning)


def _inputs(name: str) -> Tensors:
    if name not in nets.NETS:
        return split.feeds(name)
    random = np.random.default_rng(7)
    return {"image": random.uniform(-1, 1, (1, 3, nets.SIDE, nets.SIDE)).astype(np.float32)}


def _folder(name: str) -> Path:
    return CACHE / "costmodel" / name
