"""The workbench as the companion uses it: each job in a child process; a hostile model kills that child and no more."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from split.graph.card import CutCard, read_cut
from split.ids import CutId
from split.workbench.child import run_child

PROBE_TIMEOUT_S = 60.0
"""Opening: the largest models of the zoo take a few seconds; one that hangs must not hold up the others for long."""
JOB_TIMEOUT_S = 110.0
"""Preparing or parting: shorter than the 120 s after which a device gives up waiting for the answer."""

OPTIMISE_TIMEOUT_S = 600.0
"""Nobody waits for it, and it runs at low priority beside the requests."""


class ChildWorkbench:
    """`cloud.segments.Workbench` over `python -m split.workbench`."""

    async def probe(self, model: Path) -> None:
        """As `Workbench.probe`."""
        await run_child(["probe", str(model)], timeout_s=PROBE_TIMEOUT_S)

    async def prepare(self, model: Path, folder: Path, dims: Mapping[str, int]) -> None:
        """As `Workbench.prepare`."""
        command = ["prepare", str(model), "--folder", str(folder), "--dims", json.dumps(dict(dims))]
        await run_child(command, timeout_s=JOB_TIMEOUT_S)

    async def rehearse(self, model: Path, folder: Path, feeds: Path, names: Collection[str]) -> None:
        """As `Workbench.rehearse`."""
        command = ["rehearse", str(model), "--folder", str(folder), "--feeds", str(feeds), "--names", ",".join(names)]
        await run_child(command, timeout_s=JOB_TIMEOUT_S)

    async def part(self, model: Path, folder: Path, cut: CutId, node_bitmap: str) -> CutCard:
        """As `Workbench.part`."""
        command = ["part", str(model), "--folder", str(folder), "--cut", cut, "--bitmap", node_bitmap]
        await run_child(command, timeout_s=JOB_TIMEOUT_S)
        return read_cut(folder, cut)

    async def optimise(self, model: Path, folder: Path, cuts: Collection[str]) -> None:
        """As `Workbench.optimise`."""
        command = ["optimise", str(model), "--folder", str(folder), "--cuts", ",".join(cuts)]
        await run_child(command, timeout_s=OPTIMISE_TIMEOUT_S)
