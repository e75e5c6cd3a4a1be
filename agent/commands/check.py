"""`isthmus check MODEL`: proves each cut by running head ∘ tail against the whole."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from agent.commands.model_argument import (
    CHILD_TIMEOUT_S,
    add_inputs_argument,
    add_model_argument,
    model_path,
    show_progress,
)
from split.workbench.child import run_child_sync

RELATIVE_DIFFERENCE_MAX = 1e-5
"""Invariant I2: what a lossless split may differ from the unsplit run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_inputs_argument(parser)
    parser.add_argument(
        "--cuts",
        default="candidates",
        metavar="all|ID,…",
        help="which cuts: every boundary of a topological order, or ids (default: the candidates)",
    )
    parser.add_argument("--outputs", type=Path, metavar="DIR", help="keep each cut's outputs as DIR/ID.npz")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prove the cuts in a child process and print the verdicts; 1 when one differs by more than allowed."""
    path = model_path(arguments)
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        out = Path(folder) / "check.json"
        command = ["check", str(path), "--out", str(out), "--cuts", arguments.cuts]
        for option in ("inputs", "outputs"):
            if getattr(arguments, option) is not None:
                command += [f"--{option}", str(getattr(arguments, option))]
        run_child_sync(command, timeout_s=CHILD_TIMEOUT_S, on_progress=show_progress)
        cuts: list[dict[str, Any]] = json.loads(out.read_bytes())
    if arguments.json:
        print(json.dumps({"model": str(path), "cuts": cuts}, indent=1))
    else:
        print(_table(cuts))
    return 1 if any(_differs(cut) for cut in cuts) else 0


def _differs(cut: dict[str, Any]) -> bool:
    return cut["max_rel"] is not None and not cut["max_rel"] <= RELATIVE_DIFFERENCE_MAX


def _table(cuts: list[dict[str, Any]]) -> str:
    lines = [f"{'cut':12}  {'verdict':8}  {'max rel':>8}  {'max abs':>8}  boundary"]
    for cut in cuts:
        verdict = "refused" if not cut["legal"] else "DIFFERS" if _differs(cut) else "equal"
        numbers = "  ".join(
            f"{'–' if cut[key] is None else format(cut[key], '.1e'):>8}" for key in ("max_rel", "max_abs")
        )
        why = f"  ({cut['reason']})" if cut["reason"] else ""
        lines.append(f"{cut['id']:12}  {verdict:8}  {numbers}  {' + '.join(cut['boundary'])}{why}")
    legal = [cut for cut in cuts if cut["legal"]]
    wrong = sum(_differs(cut) for cut in legal)
    lines.append(f"{len(legal) - wrong} equal, {wrong} different, {len(cuts) - len(legal)} refused")
    return "\n".join(lines)
