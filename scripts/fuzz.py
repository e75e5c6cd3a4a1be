"""Look for what breaks, with random input: `cuts` draws models and holds head ∘ tail against the whole, `wire` draws
streams, sound and broken, and holds what the wire protocol makes of them against what was put in, `codec` does so with
the compiled core of codec klt, under sanitizers.

A failure is printed with all it takes to see it again: the seed, the cut, the model as text, made smaller where that
is cheap. Exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from scripts.fuzzing.codec import NotCompiled
from scripts.fuzzing.codec import run as fuzz_codec
from scripts.fuzzing.cuts import Tally, Wrong
from scripts.fuzzing.run import fuzz_cuts
from scripts.fuzzing.shrink import smaller
from scripts.fuzzing.wire import run as fuzz_wire

SHOWN_MAX = 5
"""Failures printed with their models; the others with their seeds."""
FUZZ_CODEC_S = 3600.0


def report(tally: Tally, wrong: Sequence[Wrong]) -> dict[str, Any]:
    return {
        "graphs": tally.graphs,
        "rejected": tally.rejected,
        "sensitive": tally.sensitive,
        "reshaped": tally.reshaped,
        "cuts": tally.cuts,
        "wrong": len(tally.wrong),
        "rounded": tally.rounded,
        "unopened": tally.unopened,
        "boundaries": tally.boundaries,
        "usable_ratio": tally.usable_ratio,
        "refusals": dict(tally.refusals.most_common()),
        "failures": [
            {"seed": failure.seed, "cut": failure.cut, "boundary": failure.boundary, "why": failure.why}
            for failure in wrong
        ],
    }


def show(console: Console, tally: Tally, took_s: float) -> None:
    table = Table(title=f"head ∘ tail against the whole, {took_s:.0f} s", title_style="", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("graphs", f"{tally.graphs:,}")
    table.add_row("drafts the runtime rejects", f"{tally.rejected:,}")
    table.add_row("graphs judged without optimisations only", f"{tally.sensitive:,}")
    table.add_row("graphs judged with optimisations only", f"{tally.reshaped:,}")
    table.add_row("cuts", f"{tally.cuts:,}")
    table.add_row("wrong", f"[{'red' if tally.wrong else 'green'}]{len(tally.wrong):,}[/]")
    table.add_row("off by one 16-bit rounding", f"{tally.rounded:,}")
    table.add_row("not opened by the runtime's optimiser", f"{tally.unopened:,}")
    table.add_row("boundaries usable", f"{tally.usable_ratio:.1%} of {tally.boundaries:,}")
    table.add_section()
    for reason, count in tally.refusals.most_common():
        table.add_row(f"refused: {reason}", f"{count:,}")
    console.print(table)


def cuts(arguments: argparse.Namespace, console: Console) -> int:
    started_s = time.monotonic()
    with console.status("") as status:

        def tell(tally: Tally) -> None:
            status.update(f"{tally.graphs} of {arguments.graphs} graphs, {tally.cuts} cuts, {len(tally.wrong)} wrong")

        tally = fuzz_cuts(arguments.seed, graphs=arguments.graphs, cuts_max=arguments.cuts, on_graph=tell)
    show(console, tally, time.monotonic() - started_s)
    wrong = [smaller(failure) for failure in tally.wrong[:SHOWN_MAX]] + tally.wrong[SHOWN_MAX:]
    for failure in wrong[:SHOWN_MAX]:
        console.print(f"\nseed {failure.seed} cut {failure.cut} at {failure.boundary}: {failure.why}", markup=False)
        console.print(failure.text, markup=False, highlight=False)
    for failure in wrong[SHOWN_MAX:]:
        console.print(f"seed {failure.seed} cut {failure.cut}: {failure.why}", markup=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(tally, wrong), indent=1))
    return 1 if tally.wrong else 0


def wire(arguments: argparse.Namespace, console: Console) -> int:
    result = fuzz_wire(arguments.frames, arguments.seed)
    figures = {"frames": result.frames, "wrong": len(result.wrong), **result.as_json()}
    for name, value in figures.items():
        console.print(f"{name.removeprefix('wire_'):22} {value}", markup=False)
    for one in result.wrong:
        console.print(f"scripts/fuzz wire --frames 1 --seed {one.seed}: {one.why}", markup=False)
    if arguments.json is not None:
        failures = [{"seed": one.seed, "why": one.why} for one in result.wrong]
        arguments.json.write_text(json.dumps(figures | {"failures": failures}, indent=1))
    return 1 if result.wrong else 0


def codec(arguments: argparse.Namespace, console: Console) -> int:
    try:
        figures, wrong = fuzz_codec(arguments.rounds, arguments.seed, timeout_s=FUZZ_CODEC_S)
    except NotCompiled as error:
        print(f"scripts/fuzz: {error}", file=sys.stderr)
        return 1
    for name, value in figures.items():
        console.print(f"{name:22} {value}", markup=False)
    if wrong:
        console.print(wrong, markup=False, highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures | {"wrong": wrong}, indent=1))
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    kinds = parser.add_subparsers(required=True)
    models = kinds.add_parser("cuts", help="random models, cut everywhere, against the whole")
    models.add_argument("--graphs", type=int, default=300, metavar="N", help="valid graphs to draw (300)")
    models.add_argument("--cuts", type=int, default=9, metavar="N", help="cuts of each graph that are run (9)")
    models.set_defaults(run=cuts)
    streams = kinds.add_parser("wire", help="random streams, sound and broken, against the wire protocol")
    streams.add_argument("--frames", type=int, default=100_000, metavar="N", help="frames to be taken (100,000)")
    streams.set_defaults(run=wire)
    core = kinds.add_parser("codec", help="random maps and streams through the compiled core of codec klt")
    core.add_argument("--rounds", type=int, default=10_000, metavar="N", help="maps, six damaged streams each (10,000)")
    core.set_defaults(run=codec)
    for kind in (models, streams, core):
        kind.add_argument("--seed", type=int, default=0, metavar="S", help="of the first draw; the next count on (0)")
        kind.add_argument("--json", type=Path, metavar="FILE", help="write the figures, too")
    arguments = parser.parse_args()
    console = Console(stderr=False)
    if not console.is_terminal:
        console = Console(width=120)
    status: int = arguments.run(arguments, console)
    return status


if __name__ == "__main__":
    sys.exit(main())
