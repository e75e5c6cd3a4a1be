"""Run one bench and say whether its figures reach what they shall. The benches are the modules of `scripts/benches`.

JSON: `{"bench", "machine", "commit", "figures": [{"name", "value", "unit", "reach", "met"}], "rows": […]}`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from agent.cli import NUMPY_THREADS
from scripts.models import Unavailable

os.environ.setdefault(*NUMPY_THREADS)  # before numpy is imported: benches measure what the programs run

ALIKE_MIN, COLUMNS_MAX = 3, 9
"""So many rows of the same keys in a row are shown as a table, unless that would be wider than a screen."""

ROOT: Final = Path(__file__).resolve().parents[1]

BENCHES: Final = {
    "overhead": "what the daemon costs over the bare runtime, and one decision",
    "cuts": "how many candidates, what they miss, what cuts of several tensors are worth",
    "split": "(head + tail) / whole at the cuts that are chosen",
    "costmodel": "what node times and a handful of measured cuts tell of all others",
    "memory": "copies of the weights, a daemon without models, many shapes, what is kept",
    "fault": "the companion killed, silent or restarted, the device roaming: late, lost, wrong, twice",
    "activate": "until a segment can be used, cached and not",
    "pipeline": "requests per second / what the slowest stage allows; mixed plans over the best single one",
    "fuzz": "random models, every cut's halves against the whole; what is refused and why",
    "cases": "the milliseconds that cases of the case list name, in real time",
    "channel": "what the TLS channel makes of an emulated link, and of the loopback",
    "codec": "the calibrated codec against JPEG, WebP and AVIF at equal fidelity, model by model",
    "links": "where a calibrated split wins in time: device speeds and named links",
    "regret": "latency of the chosen plan / of the best plan there was, over models, links and device speeds",
    "trace": "links and loads that change: ours against the best at each moment and the two-way rule",
    "zoo": "ten real models of ten kinds: where they may be cut, and every checked cut against the whole",
}


def machine() -> str:
    """Processor, usable cores, kernel: what a number depends on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release().partition('-')[0]}"


def commit() -> str:
    """The commit measured, `+` after it when files differ from it; empty outside a repository."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def show(console: Console, report: dict[str, Any], took_s: float) -> None:
    table = Table(title=f"{report['bench']} at {report['commit']}: {report['machine']}", title_style="")
    for name in ("figure", "value", "unit", "reach", "met"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for figure in report["figures"]:
        met = "[green]yes[/]" if figure["met"] else "[red]no[/]"
        table.add_row(figure["name"], f"{figure['value']:.4g}", figure["unit"], figure["reach"], met)
    console.print(table)
    for keys, group in itertools.groupby(report["rows"], key=tuple):
        rows = list(group)
        if len(rows) >= ALIKE_MIN and len(keys) <= COLUMNS_MAX:
            alike = Table(*(key.replace("_", " ") for key in keys), box=None)  # so that long ones wrap
            alike.columns[0].no_wrap = True
            for row in rows:
                alike.add_row(*map(_cell, row.values()))
            console.print(alike, highlight=False)
            continue
        for row in rows:
            console.print("  " + ", ".join(f"{key} {_cell(value)}" for key, value in row.items()), highlight=False)
    console.print(f"{took_s:.0f} s", style="dim")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    benches = "; ".join(f"{name}: {text}" for name, text in BENCHES.items())
    parser = argparse.ArgumentParser(prog="scripts/bench", description=f"Measure. {benches}.")
    parser.add_argument("name", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: within 50 s")
    parser.add_argument("--prepare", action="store_true", help="only fill the caches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, too")
    some = parser.add_argument_group("some benches")
    some.add_argument("--full", action="store_true", help="everything there is: hours")
    some.add_argument("--policies", action="store_true", help="the field's own policies beside ours")
    some.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what was measured")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with its `with` block
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    bench = importlib.import_module(f"scripts.benches.{arguments.name}")
    options = {name: value for name in ("full", "policies", "plot") if (value := getattr(arguments, name))}
    for name in options.keys() - inspect.signature(bench.run).parameters.keys():
        parser.error(f"bench {arguments.name} has no --{name}")
    part = "quick" in inspect.signature(bench.prepare).parameters  # of the caches is enough for a quick run
    try:
        bench.prepare(quick=arguments.quick) if part else bench.prepare()
        if arguments.prepare:
            return 0
        started_s = time.monotonic()
        figures, rows = bench.run(quick=arguments.quick, **options)
    except Unavailable as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    report = {
        "bench": arguments.name,
        "machine": machine(),
        "commit": commit(),
        "figures": [figure.as_json() for figure in figures],
        "rows": rows,
    }
    show(console, report, time.monotonic() - started_s)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
