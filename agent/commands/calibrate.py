"""`isthmus calibrate MODEL --inputs …`: learns how to code what crosses the model's cuts, and measures what that costs.

The work is done in a child process (`split/workbench/calibrate.py`); here it is asked for, and its result shown: the
sidecar beside the model, which the daemon and the companion read.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.commands.model_argument import CHILD_TIMEOUT_S, add_model_argument, model_path
from agent.commands.profile import progress_bar
from split.codec.calibration import CALIBRATION_FILE, Calibration, Curve, CutTables, read_calibration
from split.codec.picture import LEVELS
from split.errors import InvalidModel
from split.ids import KLT, CutId
from split.profiles.contract import Contract, Fidelity, contract_beside
from split.tensor import TensorSpec
from split.workbench.child import run_child_sync

_SHOWN_MAX: Final = 2
"""Boundary tensors named in a line."""
_WIDE: Final = 1.5
"""From a third of the bound on it is worth saying what it is lost to."""

_TOLD_LESS: Final = {
    "weights": "there was no time to see how the outputs move, or they told nothing; the layers behind did",
    "variance": "neither the outputs nor the layers behind told what matters; what varies more counts more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--inputs",
        type=Path,
        required=True,
        metavar="FOLDER|FILE.npz",
        help="what the model usually sees: a folder of pictures or .npz requests, or one .npz with a batch; 20 or "
        "more, of different scenes (ones that are alike, as frames of a film, next to each other by name or row)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where the result goes (default: {CALIBRATION_FILE} beside the model)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate in a child process, write the sidecar, print what was found; always 0."""
    path = model_path(arguments)
    out = arguments.out or path.with_name(CALIBRATION_FILE)
    with progress_bar("calibrate") as on_progress:
        run_child_sync(
            ["calibrate", str(path), "--inputs", str(arguments.inputs), "--out", str(out)],
            timeout_s=CHILD_TIMEOUT_S,
            on_progress=on_progress,
        )
    calibration = read_calibration(out, None)  # of this model: it was written just now
    if calibration is None:
        raise InvalidModel(f"{out} cannot be read back; is the disk full?")
    contract = contract_beside(path) or Contract()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(path, out, calibration)), indent=1).decode())
    else:
        print("\n".join(_table(out, calibration, contract.data.fidelity)))
    return 0


def _as_json(path: Path, out: Path, calibration: Calibration) -> dict[str, Any]:
    return {
        "model": str(path),
        "digest": calibration.model,
        "calibration": str(out),
        "calibration_digest": calibration.digest,
        "bytes": out.stat().st_size,
        "inputs": calibration.inputs,
        "cuts": [
            {
                "id": cut,
                "boundary": [
                    {"name": one.spec.name, "dtype": one.spec.dtype, "shape": list(one.spec.shape)}
                    | {"codec": "lossless" if one.klt is None else KLT, "weighed_by": one.weighed_by}
                    for one in tables.tensors
                ],
                "curve": msgspec.to_builtins(calibration.curves[cut]),
            }
            for cut, tables in _by_depth(calibration)
        ],
        "pictures": {codec: msgspec.to_builtins(curve) for codec, curve in calibration.pictures.items()},
    }


def _by_depth(calibration: Calibration) -> list[tuple[CutId, CutTables]]:
    """Cuts and tables, the shallowest cut first: by the number of nodes in the head."""
    return sorted(
        calibration.tables.items(),
        key=lambda pair: int.from_bytes(bytes.fromhex(pair[1].node_bitmap), "little").bit_count(),
    )


def _table(out: Path, calibration: Calibration, fidelity: Fidelity) -> Iterator[str]:
    """For people: what each cut and each picture codec sends within the contract's bound."""
    yield f"{out}  {out.stat().st_size / 1000:,.1f} KB  sha256 {calibration.digest[:12]}…  {calibration.inputs} inputs"
    yield ""
    if fidelity.bound > 0:
        yield f"within {fidelity.measure} {fidelity.bound:g}, the contract's bound, on inputs held out (95 % sure):"
    else:
        yield "the contract allows nothing lossy (data.fidelity.bound is 0); the closest settings are shown"
    measure = fidelity.measure
    yield f"{'cut':12}  {'KB':>8}  {'p95 KB':>8}  {measure:>9}  {'at most':>9}  {'level':>10}  {'by':8}  boundary"
    for cut, tables in _by_depth(calibration):
        tensors = _tensors([one.spec for one in tables.tensors])
        by = "+".join(sorted({one.weighed_by for one in tables.tensors if one.weighed_by}))
        yield f"{cut:12}  {_at(calibration.curves[cut], fidelity, picture=False)}  {by:8}  {tensors}"
    for codec, curve in calibration.pictures.items():
        yield f"{codec:12}  {_at(curve, fidelity, picture=True)}  {'':8}  the picture, made anew for the trip"
    weighed = {one.weighed_by for tables in calibration.tables.values() for one in tables.tensors}
    told_less = [f"by {by}: {why}" for by, why in _TOLD_LESS.items() if by in weighed]
    yield from (["", *told_less] if told_less else [])
    curves = [*calibration.curves.values(), *calibration.pictures.values()]
    if any(_margin(curve, fidelity) > _WIDE for curve in curves):
        yield ""
        yield (
            f"{calibration.inputs} inputs: the bound is held with a wide margin; more of them, each from another "
            "source, make it cheaper"
        )


def _margin(curve: Curve, fidelity: Fidelity) -> float:
    """What a mean may be at most over what it was found to be, at the setting that is used."""
    point, name = curve.within(fidelity.name, fidelity.bound) or curve.points[-1], fidelity.name
    found = point.fidelity.get(name, 0.0)
    return point.fidelity_high.get(name, math.inf) / found if found > 0 else 1.0


def _at(curve: Curve, fidelity: Fidelity, *, picture: bool) -> str:
    point = curve.within(fidelity.name, fidelity.bound)
    found = point or curve.points[-1]
    level = f"step {found.level}"
    if picture:
        setting = LEVELS[found.level]
        level = f"q{setting.quality}" + (f" at {setting.quarters}/4" if setting.quarters < 4 else "")
    value, high = (
        f"{measured[fidelity.name]:.2g}" if fidelity.name in measured else "unknown"
        for measured in (found.fidelity, found.fidelity_high)
    )
    mark = "" if point is not None else " (none)"
    return (
        f"{found.mean_bytes / 1000:>8,.2f}  {found.p95_bytes / 1000:>8,.2f}  {value:>9}  {high:>9}  {level:>10}{mark}"
    )


def _tensors(specs: list[TensorSpec]) -> str:
    texts = [f"{spec.name} {spec.dtype}[{','.join(map(str, spec.shape))}]" for spec in specs[:_SHOWN_MAX]]
    more = len(specs) - len(texts)
    return " + ".join([*texts, *([f"{more} more"] if more else [])])
