"""Random models cut everywhere, each half against the whole: graphs, cuts, how many are wrong, what is refused and why.
And random streams against the wire protocol.

The same as `scripts/fuzz cuts` and `scripts/fuzz wire` draw from these seeds, which say what is counted how. Counts, no
times: other work on the machine does not disturb it.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from scripts.benches.figure import Figure
from scripts.fuzzing.cuts import Tally
from scripts.fuzzing.run import fuzz_cuts
from scripts.fuzzing.wire import Result as WireResult
from scripts.fuzzing.wire import run as fuzz_wire

SEED: Final = 900_000
GRAPHS: Final = 2000
GRAPHS_QUICK: Final = 200
CUTS_PER_GRAPH_MAX: Final = 9
CUTS_PER_GRAPH_MIN: Final = 7.5
"""15,000 of 2,000 graphs."""
USABLE_RATIO_MIN: Final = 0.85
TELL_EVERY: Final = 100
WIRE_SEED: Final = 1
WIRE_FRAMES: Final = 1_000_000
WIRE_FRAMES_QUICK: Final = 100_000


def prepare() -> None:
    """Nothing: the models are drawn."""


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    graphs = GRAPHS_QUICK if quick else GRAPHS
    told = 0

    def tell(tally: Tally) -> None:
        nonlocal told
        if tally.graphs >= told + TELL_EVERY:
            told = tally.graphs
            print(f"{told} graphs, {tally.cuts} cuts, {len(tally.wrong)} wrong …", file=sys.stderr, flush=True)

    figures, rows = report(fuzz_cuts(SEED, graphs=graphs, cuts_max=CUTS_PER_GRAPH_MAX, on_graph=tell), graphs)
    wire_frames = WIRE_FRAMES_QUICK if quick else WIRE_FRAMES
    wire_figures, wire_rows = report_wire(fuzz_wire(wire_frames, WIRE_SEED), wire_frames)
    return figures + wire_figures, rows + wire_rows


def report(tally: Tally, graphs: int) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Figures and rows of a run that was to have this many graphs: the rest of the tally, refusals, failures."""
    figures = [
        Figure(name="graphs", value=tally.graphs, unit="graphs", at_least=graphs),
        Figure(name="cuts", value=tally.cuts, unit="cuts", at_least=CUTS_PER_GRAPH_MIN * graphs),
        Figure(name="wrong", value=len(tally.wrong), unit="cuts", at_most=0),
        Figure(name="usable_ratio", value=tally.usable_ratio, unit="ratio", at_least=USABLE_RATIO_MIN),
    ]
    rows: list[dict[str, Any]] = [
        {
            "boundaries": tally.boundaries,
            "usable": tally.usable,
            "rejected": tally.rejected,
            "sensitive": tally.sensitive,
            "reshaped": tally.reshaped,
            "rounded": tally.rounded,
            "unopened": tally.unopened,
        }
    ]
    rows += [{"refused": reason, "boundaries": count} for reason, count in tally.refusals.most_common()]
    rows += [{"wrong": failure.cut, "seed": failure.seed, "why": failure.why} for failure in tally.wrong]
    return figures, rows


def report_wire(result: WireResult, frames: int) -> tuple[list[Figure], list[dict[str, Any]]]:
    """The same of the streams against the wire protocol."""
    figures = [
        Figure(name="wire_frames", value=result.frames, unit="frames", at_least=frames),
        Figure(name="wire_wrong", value=len(result.wrong), unit="streams", at_most=0),
    ]
    rows: list[dict[str, Any]] = [result.as_json()]
    return figures, rows + [{"wrong_stream_seed": one.seed, "why": one.why} for one in result.wrong]
