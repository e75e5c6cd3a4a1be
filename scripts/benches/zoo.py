"""Ten real models of ten kinds, cut and checked: how many places there are to cut, how wide, what is refused and why.

Every boundary of a topological order is looked at; the candidates, and others evenly between them, are made and run,
head ∘ tail against the whole, on natural inputs. Beside the worst difference stands the one that the whole makes with
itself when the runtime may not rearrange it: a model that compares floats for equality (the non-maximum suppression of
M-LSD) jumps by a peak whoever rounds differently, cut or not. Counts and differences, no times: other work on the
machine does not disturb it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from scripts import models
from scripts.benches.figure import Figure
from scripts.natural import NATURAL
from split.graph.candidates import candidates
from split.graph.cuts import Cut, all_prefix_cuts, crossing_bytes
from split.graph.load import load_model
from split.graph.partition import share_weights
from split.tensor import Tensors, relative_difference
from split.workbench.check import check_cuts
from split.workbench.cut import settle

ZOO: Final[dict[str, str]] = models.MANIFEST["zoo"]
"""Name → kind."""

CUTS: Final = 24
CUTS_QUICK: Final = 4
RELATIVE_DIFFERENCE_MAX: Final = 1e-5
SELF_FACTOR: Final = 2
"""A cut is wrong when it is off by more than the bound and by more than this times what the whole differs from itself:
two runs that each differ from a third by up to x differ by up to 2x."""


def prepare() -> None:
    """Fetch the models; those that cannot be had are skipped with a message."""
    _available()


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows = []
    for name, path in _available().items():
        print(f"cutting {name} …", file=sys.stderr, flush=True)
        row = survey(path, NATURAL[name](), cuts=CUTS_QUICK if quick else CUTS)
        rows.append({"model": name, "kind": ZOO[name], **row})
    figures = [
        Figure(name="missing", value=len(ZOO) - len(rows), unit="models", at_most=0),
        Figure(name="wrong", value=sum(row["wrong"] for row in rows), unit="cuts", at_most=0),
        Figure(name="above_bound", value=sum(row["above_bound"] for row in rows), unit="cuts", at_most=0),
    ]
    return figures, rows


def survey(path: Path, inputs: Tensors, *, cuts: int) -> dict[str, Any]:
    """One model's row. Sizes in KB (1000 bytes) uncoded, at the shapes of `inputs`; at most `cuts` cuts are checked."""
    model = load_model(path)
    with tempfile.TemporaryDirectory(prefix="isthmus-zoo-") as folder:
        share_weights(model, Path(folder))
        settle(model, Path(folder), inputs=inputs)
    everywhere = all_prefix_cuts(model)
    usable = [cut for cut in everywhere if cut.legal and cut.boundary]
    best = candidates(model)
    widths = [crossing_bytes(model, cut) / 1e3 for cut in usable]
    checked = check_cuts(path, [cut.id for cut in spread(best, usable, cuts)], inputs=inputs)
    differences = [cut["max_rel"] for cut in checked]
    self_rel = difference_with_itself(path, inputs)
    bound = max(RELATIVE_DIFFERENCE_MAX, SELF_FACTOR * self_rel)
    return {
        "nodes": len(model.nodes),
        "opset": model.opset,
        "input_kb": sum(array.nbytes for array in inputs.values()) / 1e3,
        "boundaries": len(everywhere),
        "legal": len(usable),
        "candidates": len(best),
        "narrowest_kb": min(widths, default=0.0),
        "widest_kb": max(widths, default=0.0),
        "refused": dict(Counter(without_names(cut.reason) for cut in everywhere if cut.reason)),
        "checked": len(checked),
        "wrong": sum(not difference <= bound for difference in differences),
        "above_bound": sum(not difference <= RELATIVE_DIFFERENCE_MAX for difference in differences),
        "worst_rel": max(differences, default=0.0),
        "self_rel": self_rel,
    }


def difference_with_itself(path: Path, inputs: Tensors) -> float:
    """Worst relative difference between the unsplit model as the runtime rearranges it and as it was written."""
    outputs = []
    for level in (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, inputs))
    return max(relative_difference(plain, rearranged) for rearranged, plain in zip(*outputs, strict=True))


def spread(first: Sequence[Cut], others: Sequence[Cut], limit: int) -> list[Cut]:
    """`first`, then of `others` as many as there is room for, evenly spaced; together at most `limit`."""
    chosen = {cut.id: cut for cut in first[:limit]}
    rest = [cut for cut in others if cut.id not in chosen]
    room = min(limit - len(chosen), len(rest))
    picked = [rest[(2 * at + 1) * len(rest) // (2 * room)] for at in range(room)]
    return [*chosen.values(), *picked]


def without_names(reason: str) -> str:
    """A refusal without the tensor's name, so that equal reasons count together."""
    return re.sub(r"'[^']*'", "…", reason)


def _available() -> dict[str, Path]:
    found = {}
    for name in ZOO:
        try:
            found[name] = models.model_path(name)
        except models.Unavailable as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
    return found
