"""How well times and bytes of dynamic models are told at sizes that were not profiled (`split/plan/scaling.py`).

Each model is cut and profiled as the daemon does it, at the sizes of `PROFILED`. At each of four others, whole, heads
and tails of a few cuts are measured beside the whole at the profiled sizes, whose distance from the profile is taken
out: it is the machine's, not the prediction's. Bytes of raw boundaries are held against those of the run; they shall be
equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts import models
from scripts.benches.figure import CACHE
from split.graph.card import CutCard, ModelCard, read_card
from split.graph.growth import open_dims, shapes_at
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.table import Column, PlanTable
from split.profiles.contract import Contract
from split.profiles.measured import ModelProfile, read_profile
from split.runtime.engine import Segment
from split.runtime.machine import read_machine
from split.runtime.optimised import WHOLE
from split.runtime.profiler import measure_interleaved
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.tuning import tunings
from split.tensor import NUMPY_DTYPES, Array, Tensors, TensorSpec
from split.workbench.cut import prepare as cut_model
from split.workbench.optimise import Optimiser, open_halves
from split.workbench.profile import profile_model

Sizes = tuple[int, ...]

PROFILED: Final[dict[str, Sizes]] = {
    "ppocrv4-rec": (1, 48, 320),
    "ppocrv4-det": (1, 320, 640),
    "minilm-l3-fp32": (1, 64),
}
"""Batch, height and width; batch and length."""
ASKED: Final[dict[str, tuple[Sizes, ...]]] = {
    "ppocrv4-rec": ((1, 48, 100), (1, 48, 240), (1, 48, 480), (4, 48, 320)),
    "ppocrv4-det": ((1, 160, 160), (1, 320, 320), (1, 480, 640), (1, 640, 960)),
    "minilm-l3-fp32": ((1, 16), (1, 48), (1, 128), (1, 256)),
}
CUTS: Final = 3
CUTS_QUICK: Final = 1
BUDGET_S: Final = 2.0
BUDGET_QUICK_S: Final = 0.3


def prepare() -> None:
    """Cut and profile the models, once."""
    for name in PROFILED:
        _prepared(name)


def rows(*, quick: bool) -> list[dict[str, Any]]:
    """One for each model, sizes and part: ms predicted and measured; bytes, too, where it is a head."""
    found = []
    for name, asked in ASKED.items():
        card, profile = _prepared(name)
        cuts = _spread(card, profile, CUTS_QUICK if quick else CUTS)
        table = PlanTable.build(card, profile, Contract())
        for sizes in asked:
            for cut in cuts:
                found += _held_against(name, card, profile, table, sizes, cut, BUDGET_QUICK_S if quick else BUDGET_S)
    return found


def _held_against(
    name: str, card: ModelCard, profile: ModelProfile, table: PlanTable, sizes: Sizes, cut: CutCard, budget_s: float
) -> list[dict[str, Any]]:
    optimiser = Optimiser(card, CACHE / "dynamic" / name, OrtEngine(), threads=usable_threads())

    def open_best(part: str, path: Path, feeds: Tensors) -> Segment:
        return optimiser.open(part, path, feeds, profile.tuning)

    here, there = _inputs(card, profile.sizes), _inputs(card, sizes)
    whole = open_best(WHOLE, Path(card.path), here)
    head, tail, _ = open_halves(cut, CACHE / "dynamic" / name, here, open_best)
    made = there | head.run({taken: there[taken] for taken in head.inputs})
    crossing = {taken: made[taken] for taken in tail.inputs}
    ms = measure_interleaved(
        {
            "profiled": lambda: whole.run(here),
            "whole": lambda: whole.run(there),
            "head": lambda: head.run({taken: there[taken] for taken in head.inputs}),
            "tail": lambda: tail.run(crossing),
        },
        budget_s,
    )
    head.close()
    tail.close()
    split = Plan(placement=Placement.SPLIT, cut=cut.id, codec="raw")
    at, machine = table.at(sizes), ms["profiled"] / profile.whole_ms
    told = {
        "whole": at.costs[Column.HEAD, table.row_of[LOCAL]],
        "head": at.costs[Column.HEAD, table.row_of[split]],
        "tail": at.costs[Column.TAIL, table.row_of[split]],
    }
    by_bytes = sum(map(_nbytes, there.values())) / sum(map(_nbytes, here.values()))
    assert card.growth is not None
    extents = [extent.at(sizes) for extent in card.growth.extents]
    travels = card.growth.cuts[cut.id].crossing[: len(cut.boundary)]
    assert all(one.exact for one in travels), (name, cut.id)
    elements = [math.prod(extents[number] for number in one.extents) for one in travels]
    nbytes = sum(count * spec.element_bytes for count, spec in zip(elements, cut.boundary, strict=True))
    return [
        {
            "model": name,
            "sizes": "x".join(map(str, sizes)),
            "cut": cut.id,
            "part": part,
            "predicted_ms": float(told[part]) * machine,
            "measured_ms": ms[part],
            "error": abs(float(told[part]) * machine / ms[part] - 1.0),
            "error_by_input_bytes": abs(_profiled_ms(table, split, part) * by_bytes * machine / ms[part] - 1.0),
            "predicted_bytes": round(nbytes),
            "measured_bytes": sum(_nbytes(made[spec.name]) for spec in cut.boundary),
        }
        for part in told
    ]


def _profiled_ms(table: PlanTable, split: Plan, part: str) -> float:
    row = table.row_of[LOCAL if part == "whole" else split]
    return float(table.costs[Column.TAIL if part == "tail" else Column.HEAD, row])


def _nbytes(array: Array) -> int:
    return int(array.nbytes)


def _spread(card: ModelCard, profile: ModelProfile, count: int) -> list[CutCard]:
    """Measured cuts from shallow to deep, the middle one if it is only one."""
    known = {cut.cut for cut in profile.cuts if not cut.estimated}
    cuts = [cut for cut in card.cuts if cut.id in known]
    places = sorted({(2 * place + 1) * len(cuts) // (2 * count) for place in range(count)})
    return [cuts[place] for place in places]


def _prepared(name: str) -> tuple[ModelCard, ModelProfile]:
    folder = CACHE / "dynamic" / name
    if not (folder / "profile.json").exists():
        print(f"cutting and profiling {name} …", flush=True)
        path = models.model_path(name)
        specs = OrtEngine().open(path, threads=1).input_specs
        inputs = _made(specs, PROFILED[name])
        card = cut_model(path, folder, inputs=inputs)
        profile_model(
            card,
            folder,
            inputs=[inputs],
            engine=OrtEngine(),
            tunings=tunings(read_machine()),
            open_tuned=Optimiser(card, folder, OrtEngine(), threads=usable_threads()).open,
        )
    profile = read_profile(folder)
    assert profile is not None
    return read_card(folder), profile


def _inputs(card: ModelCard, sizes: Sizes) -> Tensors:
    return _made(card.inputs, sizes)


def _made(specs: Sequence[TensorSpec], sizes: Sizes) -> Tensors:
    """Floats from a fixed seed, integers 1: a token that all vocabularies have, and a mask that shows everything."""
    random = np.random.default_rng(7)
    made: Tensors = {}
    for name, shape in shapes_at(specs, open_dims(specs), sizes).items():
        dtype = NUMPY_DTYPES[next(spec.dtype for spec in specs if spec.name == name)]
        floats = random.uniform(-1, 1, math.prod(shape)).reshape(shape)
        made[name] = floats.astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
    return made
