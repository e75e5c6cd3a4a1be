"""Proof that a model may be cut: head ∘ tail run against the whole, cut by cut. Blocking; runs in a child process."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from split.codec.golden import SAME
from split.errors import CutRefused, EngineFailed, InvalidRequest, IsthmusError
from split.graph.cuts import Cut, all_prefix_cuts
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, write_parts
from split.profiles.contract import Contract
from split.profiles.demands import demands_of
from split.runtime.engine import Engine
from split.runtime.segment import OrtEngine
from split.tensor import Array, Tensors, relative_difference, worst_difference
from split.workbench.cut import served_cuts, settle

CheckedCut = dict[str, Any]
"""`{"id", "legal", "reason", "boundary": [names], "max_abs", "max_rel"}`; the differences are None for a refused cut
and the largest float where outputs cannot be compared (another shape, a half that fails), with the reason."""


def check_cuts(
    model_path: Path,
    cuts: Literal["candidates", "all"] | Sequence[str] = "candidates",
    *,
    inputs: Tensors | None = None,
    contract: Contract | None = None,
    outputs_dir: Path | None = None,
    threads: int = 1,
    on_progress: Callable[[str, float], None] = lambda stage, ratio: None,
) -> list[CheckedCut]:
    """Run each cut's halves one after the other and compare with the whole on the same inputs (golden ones by default).

    `cuts`: `candidates` (those that `isthmus cuts` lists with these inputs and this contract), `all` (every boundary of
    a topological order, refused ones with the reason) or ids out of these. `outputs_dir` keeps each cut's outputs as
    `ID.npz`. InvalidModel when the whole cannot be opened, EngineFailed when it does not run on these inputs,
    CutRefused for an id this model does not have.
    """
    engine = OrtEngine()
    on_progress("read", 0.0)
    model = load_model(model_path)
    if outputs_dir is not None:
        outputs_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="isthmus-check-") as name:
        folder = Path(name)
        share_weights(model, folder)
        feeds = settle(model, folder, inputs=inputs)
        asked = demands_of(contract, [spec.name for spec in model.inputs])
        chosen = _chosen(model, cuts, lambda: served_cuts(model, feeds, asked).cuts)
        whole = engine.open(model_path, threads=threads)
        try:
            expected = whole.run(feeds, model.output_names)
        except (EngineFailed, InvalidRequest) as error:
            if inputs is not None:
                raise
            raise EngineFailed(
                f"{error}; these were made-up inputs with 1 for every open dim, give real ones: --inputs FILE.npz"
            ) from error
        whole.close()
        results = []
        for done, cut in enumerate(chosen):
            on_progress("check", done / len(chosen))
            results.append(_check(model, cut, engine, folder, feeds, expected, outputs_dir, threads))
        if any(_apart(result) for result in results):
            whole = engine.open(model_path, threads=threads)
            whole.run(feeds, model.output_names)  # the first run of each session draws the same
            _blame_chance(results, whole.run(feeds, model.output_names), expected)
    on_progress("done", 1.0)
    return results


def _apart(result: CheckedCut) -> bool:
    return result["max_rel"] is not None and not result["max_rel"] <= SAME


def _blame_chance(results: Sequence[CheckedCut], again: Tensors, expected: Tensors) -> None:
    """Say of cuts that differ that the whole does so, too, where another run of it gave something else."""
    off = worst_difference(again, expected, list(expected))
    if off <= SAME:
        return
    for result in results:
        if _apart(result) and not result["reason"]:
            result["reason"] = (
                f"the whole differs from itself by {off:.2g} from one run to the next: it draws random numbers, and no "
                "cut of it can be proved"
            )


def run_halves(model: Model, cut: Cut, engine: Engine, folder: Path, feeds: Tensors, *, threads: int = 1) -> Tensors:
    """The model's outputs in their declared order, by way of head and tail (written to `folder` and removed again)."""
    head, tail = folder / f"{cut.id}.head.onnx", folder / f"{cut.id}.tail.onnx"
    write_parts(model, cut, head, tail)
    try:
        made: Tensors = {}
        if head.exists():
            segment = engine.open(head, threads=threads)
            made = segment.run({name: feeds[name] for name in cut.head_inputs})
            segment.close()
        if tail.exists():
            segment = engine.open(tail, threads=threads)
            crossing = {name: made[name] for name in cut.boundary} | {name: feeds[name] for name in cut.tail_inputs}
            made |= segment.run(crossing)
            segment.close()
    finally:
        head.unlink(missing_ok=True)
        tail.unlink(missing_ok=True)
    return {name: made[name] for name in model.output_names}


def _chosen(
    model: Model, cuts: Literal["candidates", "all"] | Sequence[str], candidates: Callable[[], Sequence[Cut]]
) -> list[Cut]:
    if cuts == "candidates":
        return list(candidates())
    everywhere = all_prefix_cuts(model)
    if cuts == "all":
        return everywhere
    known = {cut.id: cut for cut in (*everywhere, *candidates())}
    unknown = [cut for cut in cuts if cut not in known]
    if unknown:
        raise CutRefused(f"cut {unknown[0]} is none of {model.path.name}; `isthmus check --cuts all` lists them all")
    return [cut for cut in known.values() if cut.id in cuts]


def _check(
    model: Model,
    cut: Cut,
    engine: Engine,
    folder: Path,
    feeds: Tensors,
    expected: Tensors,
    outputs_dir: Path | None,
    threads: int,
) -> CheckedCut:
    result: CheckedCut = {
        "id": cut.id,
        "legal": cut.legal,
        "reason": cut.reason,
        "boundary": list(cut.boundary),
        "max_abs": None,
        "max_rel": None,
    }
    if not cut.legal:
        return result
    try:
        found = run_halves(model, cut, engine, folder, feeds, threads=threads)
    except IsthmusError as error:
        return result | {"reason": str(error), "max_abs": sys.float_info.max, "max_rel": sys.float_info.max}
    relative = {name: relative_difference(found[name], expected[name]) for name in expected}
    absolute = [_absolute(found[name], expected[name]) for name in expected]
    off = next((name for name, value in relative.items() if not np.isfinite(value)), None)
    if outputs_dir is not None:
        write_npz(outputs_dir / f"{cut.id}.npz", found)
    return result | {
        "reason": "" if off is None else f"output {off!r} is not that of the whole",
        "max_abs": min(max(absolute, default=0.0), sys.float_info.max),
        "max_rel": min(max(relative.values(), default=0.0), sys.float_info.max),
    }


def _absolute(found: Array, expected: Array) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return sys.float_info.max
    if expected.dtype.kind not in "fiu":
        return 0.0 if np.array_equal(found, expected) else sys.float_info.max
    finite = np.isfinite(expected) & np.isfinite(found)
    return float(np.max(np.abs(found[finite].astype(np.float64) - expected[finite].astype(np.float64)), initial=0.0))


def write_npz(path: Path, tensors: Tensors) -> None:
    """An `.npz` under any tensor names (numpy's own writer refuses some); BYTES become fixed-width byte strings."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in tensors.items():
            plain = array.astype(np.bytes_) if array.dtype == object else array
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.ascontiguousarray(plain).reshape(array.shape), allow_pickle=False)
