"""Where models are cut: how many candidates, what they miss, and what cuts of several tensors are worth.

By estimated operations on a grid of device speeds and link rates, beside a companion that does `COMPANION_GFLOPS`,
each with raw and with int8 bytes. Exact is the minimum cut for the cell, over all closed sets of nodes, `local` and
`offload` (dense input) among them. No times are taken: other work on the machine does not disturb it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from scripts.benches.figure import Figure
from scripts.benches.zoo import ZOO, prepare
from scripts.models import Unavailable, model_path
from scripts.natural import NATURAL
from split.graph.candidates import CANDIDATES_MAX, find_candidates
from split.graph.cost import node_flops
from split.graph.cuts import Cut, troubles
from split.graph.envelope import MinCut
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights
from split.graph.weighed import INPUT, Point, Weighed, as_set, crosses
from split.graph.weighing import COST_UNITS, in_units, weigh
from split.workbench.cut import settle

__all__ = ["prepare", "run"]

DEVICE_GFLOPS: Final = (1, 2, 5, 10, 20, 50, 100)
RATES_MBIT: Final = (1, 2, 5, 10, 20, 50, 100, 500)
COMPANION_GFLOPS: Final = 200
QUICK: Final = ("efficientnet-lite0", "yolox-ddddocr-det", "minilm-l6-int8w", "silero-vad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the grid: what the exact best takes, and by how much others are slower."""

    multi: bool
    """The best of all plans is a split whose boundary has several tensors."""
    gain: float
    """Best of local, offload and splits of one tensor / exact."""
    loss: float
    """Best of local, offload and the candidates / exact."""
    split_gain: float | None
    """Best split of one tensor / best candidate, whether or not a split is best; None where there is none of one."""


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows = []
    for name in QUICK if quick else tuple(ZOO):
        try:
            path = model_path(name)
        except Unavailable as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
            continue
        print(f"cutting {name} …", file=sys.stderr, flush=True)
        model = load_model(path)
        with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
            share_weights(model, Path(folder))
            settle(model, Path(folder), inputs=NATURAL[name]())
        rows.append({"model": name, **survey(model)})
    if not rows:
        raise Unavailable("no model can be had")
    figures = [
        Figure(
            name="candidates_max", value=max(row["candidates"] for row in rows), unit="cuts", at_most=CANDIDATES_MAX
        ),
        Figure(name="loss_max", value=max(row["loss_max"] for row in rows), unit="ratio", at_most=1.02),
    ]
    return figures, rows


def survey(model: Model) -> dict[str, Any]:
    """One model's row. Shares are of the cells of the grid."""
    device = in_units(node_flops(model))
    locked = frozenset(troubles(model))
    found = find_candidates(model)
    numbers = {node.bit: number for number, node in enumerate(model.nodes)}
    cells = []
    for coded in (False, True):
        weighed = weigh(model, device, device, locked=locked, coded=coded)
        offered = [weighed.point(_members(cut, numbers)) for cut in found.cuts]
        cells += grid(weighed, offered, sum(node_flops(model)))
    multi = [cell.gain for cell in cells if cell.multi]
    among_splits = [cell.split_gain for cell in cells if cell.split_gain is not None]
    raw = weigh(model, device, device, locked=locked)
    return {
        "nodes": len(model.nodes),
        "largest_block": max((block.stop - block.start for block in raw.blocks), default=0),
        "candidates": len(found.cuts),
        "of_several": sum(len(cut.boundary) + len(cut.tail_inputs) > 1 for cut in found.cuts),
        "of_one_anywhere": len(single_tensor_cuts(raw)),
        "corners": found.corners,
        "dropped": found.dropped,
        "beyond_limit": found.beyond_limit,
        "multi_best": len(multi) / len(cells),
        "multi_gain": statistics.median(multi) if multi else 1.0,
        "multi_gain_max": max(multi, default=1.0),
        "split_gain": statistics.median(among_splits) if among_splits else 0.0,
        "split_gain_max": max(among_splits, default=0.0),
        "loss_max": max(cell.loss for cell in cells),
    }


def grid(weighed: Weighed, offered: list[Point], flops: float) -> list[Cell]:
    """Every cell of the grid for one way to weigh the bytes."""
    oracle = MinCut(weighed)
    ends = [weighed.point(0), weighed.point(weighed.everything)]
    singles = single_tensor_cuts(weighed)
    cells = []
    for gflops, mbit in product(DEVICE_GFLOPS, RATES_MBIT):
        # Picoseconds for a unit of compute more on the device, and for a byte; the rest is the same for all plans.
        unit = flops / COST_UNITS
        weights = (round(unit * 1e3 * (1 / gflops - 1 / COMPANION_GFLOPS) * 1e3), round(8e6 / mbit * 1e3), 0)
        whole = unit * sum(weighed.device) * 1e6 / COMPANION_GFLOPS
        best = oracle.best(weights)
        assert best is not None, "no cut is pinned, so one is legal"
        exact = best.at(weights) + whole

        def least(points: list[Point], weights: tuple[int, int, int] = weights, whole: float = whole) -> float:
            return min(point.at(weights) for point in points) + whole

        inside = best.members not in {0, weighed.everything}
        cells.append(
            Cell(
                multi=inside and sum(crosses(tensor, best.members) for tensor in weighed.tensors) > 1,
                gain=least([*ends, *singles]) / exact,
                loss=least([*ends, *offered]) / exact,
                split_gain=least(singles) / least(offered) if singles and offered else None,
            )
        )
    return cells


def single_tensor_cuts(weighed: Weighed) -> list[Point]:
    """For each node the smallest closed set with it, where that has exactly one tensor to send and may send it."""
    found = {}
    closures: list[set[int]] = []
    for node in range(len(weighed.device)):
        inside = {node}.union(*(closures[needed] for needed in weighed.needs[node]))
        closures.append(inside)
        crossing = [
            tensor
            for tensor in weighed.tensors
            if (tensor.maker == INPUT or tensor.maker in inside) and not inside.issuperset(tensor.readers)
        ]
        if len(crossing) == 1 and crossing[0].maker != INPUT and not crossing[0].locked:
            found[node] = weighed.point(as_set(inside))
    return list(found.values())


def _members(cut: Cut, numbers: dict[int, int]) -> int:
    return as_set(number for bit, number in numbers.items() if cut.mask >> bit & 1)
