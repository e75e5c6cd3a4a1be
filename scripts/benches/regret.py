"""Latency of the chosen plan / latency of the best plan there was, over models × links × device speeds.

Device daemon and companion are real processes in two network namespaces with a processor each, an emulated link
between them (scripts/netlab), the device slowed by `emulation.slowdown`. An exhaustive oracle would take hours, so
stages and transfers are measured once (`regret_stages.py`), their sums rank all plans, and the best few of a cell run
for real (`regret_oracle.py`). Beside each figure the noise floor: the same plan twice in the same turns.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import StatisticsError
from typing import Any, Final

from scripts.benches import regret_plot, regret_policies
from scripts.benches.figure import CACHE, Figure, percentile
from scripts.benches.regret_cells import (
    ALL,
    QUICK,
    SUBJECTS,
    Cell,
    Grid,
    Subject,
    cells_default,
    cells_quick,
    in_order,
    lay_models,
)
from scripts.benches.regret_oracle import AUTO, PATIENCE, Measured, measure
from scripts.benches.regret_stages import (
    Offer,
    Sums,
    kept_stages,
    kept_transfers,
    measure_stages,
    measure_transfers,
    offers_of,
    wait_until_open,
)
from scripts.client import Refused
from scripts.lab_pair import LabPair, lab_pair
from scripts.models import Unavailable
from scripts.pair import PROFILE_TIMEOUT_S

LAB: Final = "regret"
TRANSFERS_BY: Final = SUBJECTS[0]
"""The subject whose plans measure the links: photos, from a few KB to 600."""
CELL_S, CELL_QUICK_S = 22.0, 8.0
WORTH: Final = 1.02
"""Splitting is worth something in a cell where the best plan without it takes so many times as long."""


def prepare(*, quick: bool) -> None:
    """Models laid out and profiled, stages and transfers over all links measured: ten minutes once, three for `quick`.

    Stages are measured at the first speed only: what they take at another is that times the slowdown, since this is
    what the emulation does, and the sums only say which plans run for real. The device is started in any case, since
    only it knows which profile it takes: what was measured beside a former one is not of the plans there are."""
    for grid in (QUICK,) if quick else (QUICK, ALL):
        lay_models(folder_of(grid) / "models", grid.subjects)
        with _pair(grid) as pair:
            _fill(pair, grid, grid.slowdowns[0])


def run(
    *, quick: bool, full: bool = False, policies: bool = False, plot: Path | None = None
) -> tuple[list[Figure], list[dict[str, Any]]]:
    grid = QUICK if quick else ALL
    offers = prepared(grid, grid.subjects)
    sums = Sums(folder_of(grid), offers)
    cells = cells_quick(sums.nearness) if quick else grid.cells() if full else cells_default(sums.nearness)
    seconds, patience = (CELL_QUICK_S, 1.0) if quick else (CELL_S, PATIENCE)
    measured, failed = _cells(grid, in_order(cells), offers, sums, seconds=seconds, patience=patience)
    if plot is not None:
        regret_plot.draw(measured, plot)
    rivals = regret_policies.compare(measured, offers, sums) if policies else []
    return figures(measured), [*_summaries(measured), *map(_row, measured), *failed, *_by_model(measured), *rivals]


def _cells(
    grid: Grid, cells: Sequence[Cell], offers: dict[Subject, Offer], sums: Sums, *, seconds: float, patience: float
) -> tuple[list[Measured], list[dict[str, Any]]]:
    """What was measured, and a row for each cell that could not be. Rows so far are in `cells.jsonl` of the folder, for
    a run that is interrupted."""
    measured, failed = [], []
    so_far = folder_of(grid) / "cells.jsonl"
    so_far.unlink(missing_ok=True)
    with _pair(grid) as pair:
        slowdown, link = 0.0, None
        for number, cell in enumerate(cells, 1):
            started_s = time.monotonic()
            if cell.slowdown != slowdown:
                slowdown, link = cell.slowdown, None
                pair.start_agent(slowdown=slowdown)
                wait_until_open(pair, offers)
            if cell.link != link:
                # What becomes of a connection whose link changes is the trace bench's.
                link = cell.link
                pair.condition(link)
                pair.reconnect()
                wait_until_open(pair, offers)
            try:
                found = measure(pair, cell, offers[cell.subject], sums.of(cell), seconds=seconds, patience=patience)
                said = f"{found.chosen}, regret {found.regret:.3f}, noise {found.noise:.3f}"
                measured.append(found)
                with so_far.open("a") as file:
                    print(json.dumps(_row(found)), file=file)
            except (Refused, OSError, StatisticsError) as error:
                said = f"not measured: {error}"
                failed.append(
                    {"model": str(cell.subject), "link": str(cell.link), "slowdown": slowdown, "failed": said}
                )
            print(f"{number}/{len(cells)} {cell}: {said}, {time.monotonic() - started_s:.0f} s", flush=True)
    if not measured:
        raise Unavailable(f"no cell could be measured; the last one was {said}")
    return measured, failed


def folder_of(grid: Grid) -> Path:
    """Of its daemon and companion, and of what was measured with them."""
    return CACHE / "regret" / grid.name


@contextlib.contextmanager
def _pair(grid: Grid) -> Iterator[LabPair]:
    with lab_pair(folder_of(grid), folder_of(grid) / "models", name=LAB) as pair:
        yield pair


def prepared(grid: Grid, subjects: Sequence[Subject]) -> dict[Subject, Offer]:
    """What these subjects offer; Unavailable where what `prepare` measures of them is not kept for their profiles."""
    offers = offers_of(folder_of(grid), subjects)
    if lacking := _lacking(grid, offers):
        raise Unavailable(
            f"nothing is kept in {folder_of(grid)} of {', '.join(lacking)} that belongs to the models' profiles as "
            "they are now; run scripts/bench regret --prepare"
        )
    return offers


def _lacking(grid: Grid, offers: Mapping[Subject, Offer]) -> list[str]:
    """What was not measured yet with these profiles."""
    folder, slowdown = folder_of(grid), grid.slowdowns[0]
    stages = [str(subject) for subject, one in offers.items() if not kept_stages(folder, one, slowdown).numbers]
    return stages + [str(link) for link in grid.links if not kept_transfers(folder, link).numbers]


def _fill(pair: LabPair, grid: Grid, slowdown: float) -> None:
    """The device at this speed, and what is not kept of it yet measured."""
    print(f"starting the device, {slowdown:g}× slower …", flush=True)
    pair.start_agent(slowdown=slowdown, timeout_s=PROFILE_TIMEOUT_S * len(grid.subjects))
    offers = offers_of(folder_of(grid), grid.subjects)
    if not _lacking(grid, offers):
        return
    wait_until_open(pair, offers)
    for offer in offers.values():
        measure_stages(pair, folder_of(grid), offer, slowdown)
    for link in grid.links:
        measure_transfers(pair, folder_of(grid), offers[TRANSFERS_BY], link)


# -- figures ----------------------------------------------------------------------------------------------------------


def figures(measured: Sequence[Measured]) -> list[Figure]:
    """Those of DESIGN §9."""
    values = {name: value for name, (value, *_) in _values(measured).items()}
    bounds = {"mean": 1.03, "p95": 1.10, "contested_mean": 1.05, "stage_mape": 0.10}
    found = [Figure(name=name, value=values[name], unit="ratio", at_most=bound) for name, bound in bounds.items()]
    return [*found, Figure(name="split_value", value=values["split_value"], unit="ratio", at_least=1.001)]


def _values(measured: Sequence[Measured]) -> dict[str, tuple[float, float, int]]:
    """Figure → (value, noise: the same of one plan run twice, cells)."""
    contested = [one for one in measured if one.contested]
    errors = [error for one in measured for error in one.stage_errors.values()] or [1.0]  # nothing told is not met

    def over(cells: Sequence[Measured], of: Callable[[list[float]], float]) -> tuple[float, float, int]:
        if not cells:
            return 1.0, 1.0, 0
        return of([one.regret for one in cells]), of([one.noise for one in cells]), len(cells)

    def p95(values: list[float]) -> float:
        return percentile(values, 0.95)

    auto = statistics.fmean(one.auto_regret for one in measured)
    noise = statistics.fmean(one.noise for one in measured)
    return {
        "mean": over(measured, statistics.fmean),
        "p95": over(measured, p95),
        "contested_mean": over(contested, statistics.fmean),
        "auto_mean": (auto, noise, len(measured)),
        "split_value": (geometric_mean([one.split_value for one in measured]), noise, len(measured)),
        "stage_mape": (statistics.fmean(errors), noise - 1.0, len(measured)),
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _summaries(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    return [
        {"figure": name, "value": value, "noise": noise, "cells": cells}
        for name, (value, noise, cells) in _values(measured).items()
    ]


def _row(one: Measured) -> dict[str, Any]:
    cell, oracle = one.cell, one.oracle()
    return {
        "model": str(cell.subject),
        "link": str(cell.link),
        "slowdown": cell.slowdown,
        "chosen": str(one.chosen),
        "oracle": oracle,
        "chosen_ms": one.median(one.scored),
        "auto_ms": one.median(AUTO),
        "oracle_ms": one.median(oracle),
        "regret": one.regret,
        "auto_regret": one.auto_regret,
        "noise": one.noise,
        "contested": one.contested,
        **{f"{placement}_ms": ms for placement, ms in one.placements().items()},
        "split_value": one.split_value,
        "predicted_ms": one.predicted_ms,
        "modelled_ms": one.sums_ms.get(one.chosen),
        "stage_errors": one.stage_errors,
        "stages_predicted_measured_ms": one.stages_ms,
        "turns": len(one.ms[AUTO]),
        "learned_plans": dict(one.learned_plans),
        "why_chosen": one.why_chosen,
        "auto_plans": dict(one.auto_plans),
        "excluded": one.excluded,
        "congestion_control": one.congestion_control,
        "why_auto": one.reason,
    }


def _by_model(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """What splitting is worth to each, and where it is worth nothing."""
    rows = []
    for subject in dict.fromkeys(one.cell.subject for one in measured):
        cells = [one for one in measured if one.cell.subject == subject]
        rows.append(
            {
                "subject": str(subject),
                "kind": subject.kind,
                "cells": len(cells),
                "mean_regret": statistics.fmean(one.regret for one in cells),
                "split_value": geometric_mean([one.split_value for one in cells]),
                "split_worth_it_in": sum(one.split_value > WORTH for one in cells),
            }
        )
    return rows
