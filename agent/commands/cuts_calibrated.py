"""What a model's calibration tells `isthmus cuts --plot`: bytes of cuts and pictures inside the contract's bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.commands.cuts_plot import Coded, Level
from split.codec.calibration import CALIBRATION_FILE, read_calibration
from split.ids import ModelDigest
from split.profiles.contract import contract_beside

PICTURES: Final = {"jpeg": "JPEG", "webp": "WebP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Everything inside one bound."""

    cuts: tuple[Coded, ...]
    levels: tuple[Level, ...]
    """The input as JPEG and WebP, at the size and quality that the bound allows."""
    note: str


def calibrated(found: Mapping[str, Any], path: Path) -> Calibrated | None:
    """Of the model at `path`, of which `found` is what `split.workbench.cut.list_cuts` found; None where no sidecar
    lies beside it, no contract names a bound, or no cut comes as close. InvalidCalibration for a sidecar that cannot be
    used, ConfigError for such a contract."""
    calibration = read_calibration(path.with_name(CALIBRATION_FILE), ModelDigest(found["digest"]))
    contract = contract_beside(path)
    if calibration is None or contract is None:
        return None
    fidelity = contract.data.fidelity
    name, bound = fidelity.name, fidelity.bound
    shares = {cut["id"]: cut["compute_share"] for cut in found["cuts"]}
    cuts = tuple(
        Coded(nodes=_nodes(calibration.tables[cut].node_bitmap), share=shares.get(cut), size=point.mean_bytes)
        for cut, curve in calibration.curves.items()
        if (point := curve.within(name, bound)) is not None
    )
    if not cuts:
        return None
    levels = tuple(
        Level(name=PICTURES.get(codec, codec), size=round(point.mean_bytes))
        for codec, curve in calibration.pictures.items()
        if (point := curve.within(name, bound)) is not None
    )
    note = (
        f"klt, JPEG and WebP: mean bytes at a mean {fidelity.measure} of {bound:g} at most (95 % sure), as calibrated"
    )
    return Calibrated(cuts=cuts, levels=levels, note=note)


def _nodes(bitmap: str) -> int:
    """How many the head has."""
    return int.from_bytes(bytes.fromhex(bitmap), "little").bit_count()
