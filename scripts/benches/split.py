"""(head + tail) / whole at the cuts that are chosen: what parting a model costs, without codec and link.

Chosen are the cuts that beat every other split somewhere on a grid of device speeds and link rates, by the measured
profile; the other candidates are listed, too. All sessions run in this process in turns, all out of the segment store.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts import models
from scripts.benches.figure import CACHE, Figure, interleaved, median_ratio
from split.graph.card import CutCard, ModelCard, read_card
from split.profiles.measured import ModelProfile, Tuning, read_profile
from split.runtime.engine import Segment
from split.runtime.machine import read_machine
from split.runtime.optimised import WHOLE
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.tuning import tunings
from split.tensor import Array, Tensors
from split.workbench.cut import prepare as cut_model
from split.workbench.optimise import Optimiser, open_halves
from split.workbench.profile import profile_model

MODELS: Final = ("efficientnet-lite0", "ppocrv4-rec", "silero-vad")
SLOWDOWNS: Final = (1, 2, 5, 10, 20, 50)
RATES_MBIT: Final = (1, 2, 5, 10, 20, 50, 100, 500)

ROUNDS: Final = 60
ROUNDS_QUICK: Final = 15


def feeds(name: str) -> Tensors:
    """Inputs of the shapes that the manifest names, from a fixed seed; integers are silero's sample rate."""
    random = np.random.default_rng(7)
    made: Tensors = {}
    for entry in models.MANIFEST["models"][name]["feed"]:
        dtype = np.dtype(entry["dtype"])
        shape = tuple(entry["shape"])
        made[entry["name"]] = (
            random.uniform(-1, 1, shape).astype(dtype) if dtype.kind == "f" else np.full(shape, 16000, dtype)
        )
    return made


def prepare() -> None:
    """Cut and profile the models, once."""
    for name in MODELS:
        _prepared(name)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        card, profile = _prepared(name)
        chosen = chosen_cuts(profile)
        for cut in card.cuts:
            if cut.id in chosen or not quick:
                measured = _measure(
                    card, profile.tuning, cut, CACHE / name, feeds(name), ROUNDS_QUICK if quick else ROUNDS
                )
                rows.append({"model": name, "cut": cut.id, "chosen": cut.id in chosen, **measured})
    worst = max(row["ratio"] for row in rows if row["chosen"])
    return [Figure(name="ratio_max", value=worst, unit="ratio", at_most=1.02)], rows


def chosen_cuts(profile: ModelProfile) -> set[str]:
    """Cuts that are the fastest split somewhere on the grid, each with its smallest measured codec."""
    chosen = set()
    for slowdown in SLOWDOWNS:
        for rate_mbit in RATES_MBIT:
            ms_per_byte = 8 / (rate_mbit * 1e3)
            costs = {
                cut.cut: cut.head_ms * slowdown + cut.tail_ms + min(codec.bytes for codec in cut.codecs) * ms_per_byte
                for cut in profile.cuts
            }
            if costs:
                chosen.add(min(costs, key=lambda cut: costs[cut]))
    return {str(cut) for cut in chosen}


def _prepared(name: str) -> tuple[ModelCard, ModelProfile]:
    folder = CACHE / name
    if not (folder / "profile.json").exists():
        print(f"cutting and profiling {name} …", flush=True)
        inputs = feeds(name)
        card = cut_model(models.model_path(name), folder, inputs=inputs)
        profile_model(
            card,
            folder,
            inputs=[inputs],
            engine=OrtEngine(),
            tunings=tunings(read_machine()),
            open_tuned=_optimiser(card, folder).open,
        )
    profile = read_profile(folder)
    assert profile is not None
    return read_card(folder), profile


def _measure(
    card: ModelCard, tuning: Tuning, cut: CutCard, folder: Path, inputs: Tensors, rounds: int
) -> dict[str, float]:
    optimiser = _optimiser(card, folder)

    def open_best(name: str, path: Path, feeds: Tensors) -> Segment:
        return optimiser.open(name, path, feeds, tuning)

    whole = open_best(WHOLE, Path(card.path), inputs)
    head, tail, _ = open_halves(cut, folder, inputs, open_best)
    boundary: dict[str, Array] = inputs | _run(head, inputs)
    taken = interleaved(
        {
            "whole": lambda: whole.run(inputs),
            "halves": lambda: (_run(head, inputs), _run(tail, boundary)),
        },
        rounds,
        burst=3,
    )
    whole_ms, halves_ms = statistics.median(taken["whole"]), statistics.median(taken["halves"])
    return {"whole_ms": whole_ms, "halves_ms": halves_ms, "ratio": median_ratio(taken, "halves", "whole")}


def _optimiser(card: ModelCard, folder: Path) -> Optimiser:
    """Opens segments in the form the daemon ends up with."""
    return Optimiser(card, folder, OrtEngine(), threads=usable_threads())


def _run(segment: Segment, tensors: Mapping[str, Array]) -> Tensors:
    return segment.run({name: tensors[name] for name in segment.inputs})
