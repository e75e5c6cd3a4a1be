"""A model's sidecar as the device uses it: its curves become codecs of the profile, which is what plans are made of.

Read when the model is loaded; one that cannot be used costs the codecs that need it, never the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from split.codec.calibration import CALIBRATION_FILE, Calibration, decode_calibration, read_file, require_model
from split.codec.klt import BoundaryTables
from split.errors import InvalidCalibration
from split.graph.card import CutCard, ModelCard
from split.ids import KLT, CutId, ModelDigest
from split.plan.plan import WITH_LEVELS
from split.profiles.measured import CodecCosts, ModelProfile, Point

log = logging.getLogger(__name__)

MS_PER_RAW_BYTE: Final = 0.5 / (4 * 16_000)
"""Encoding or decoding where the profile has not measured it: half a millisecond for 16,000 FP32 coefficients, which
the first requests correct (`split/plan/message_cost.py`)."""


Stamp = tuple[int, int, int] | None
"""Time of the last change in ns, bytes, inode; None where there is no file. Another one: perhaps another content."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """What lay beside the model file when the model was loaded; the file may have become another one since."""

    calibration: Calibration | None = None
    """None where nothing lies there, or nothing that can be used."""
    data: bytes = b""
    """The file, which the companion must have as it is."""
    tables: Mapping[CutId, BoundaryTables] = field(default_factory=dict)
    """Its cuts, ready for coding."""
    note: str = ""
    """Why what lies there is not used; "" otherwise."""
    stamp: Stamp = None
    """Of the file that was read."""

    def is_as(self, other: Sidecar) -> bool:
        """Whether it is the same file, or none that can be used for the same reason."""
        return (self.data, self.note) == (other.data, other.note)


NO_SIDECAR: Final = Sidecar()


def sidecar_beside(model_path: Path, digest: ModelDigest | None) -> Sidecar:
    """Read it, checked in full; `digest` None: of whatever model it is, which `fitting` then asks."""
    path = model_path.with_name(CALIBRATION_FILE)
    stamp = stamp_of(path)  # before it is read: what is written meanwhile changes it
    try:
        data = read_file(path)
    except InvalidCalibration as error:
        return _unused(str(error), stamp)
    if data is None:
        return NO_SIDECAR
    try:
        calibration = decode_calibration(data, digest)
    except InvalidCalibration as error:
        return _unused(f"{path}: {error}", stamp)
    tables = {cut: BoundaryTables(found, calibration.digest) for cut, found in calibration.tables.items()}
    return Sidecar(calibration=calibration, data=data, tables=tables, stamp=stamp)


def sidecar_again(model_path: Path, sidecar: Sidecar) -> Sidecar:
    """What lies there now: the same one, not read again, where the file has not changed."""
    unchanged = stamp_of(model_path.with_name(CALIBRATION_FILE)) == sidecar.stamp
    return sidecar if unchanged else sidecar_beside(model_path, None)


def fitting(model_path: Path, sidecar: Sidecar, digest: ModelDigest) -> Sidecar:
    """The same for this model alone: one that cannot be used where it is another's."""
    try:
        if sidecar.calibration is not None:
            require_model(sidecar.calibration.model, digest)
        return sidecar
    except InvalidCalibration as error:
        return _unused(f"{model_path.with_name(CALIBRATION_FILE)}: {error}", sidecar.stamp)


def _unused(note: str, stamp: Stamp) -> Sidecar:
    log.warning("%s", note)
    return Sidecar(note=note, stamp=stamp)


def stamp_of(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def calibrated(card: ModelCard, profile: ModelProfile, calibration: Calibration | None) -> ModelProfile:
    """The same profile with what the sidecar says: `klt` at each cut that it has, the picture codecs for offloading;
    without a sidecar, without them.

    Times are as profiled, where they were. A cut whose tables are of other tensors than cross there has none.
    """
    curves = {} if calibration is None else calibration.curves
    pictures = {} if calibration is None else calibration.pictures
    cards = {cut.id: cut for cut in card.cuts}
    cuts = []
    for cut in profile.cuts:
        fits = calibration is not None and cut.cut in curves and _fits(card, cards.get(cut.cut), calibration)
        curve = curves[cut.cut].points if fits else ()
        cuts.append(msgspec.structs.replace(cut, codecs=_with(cut.codecs, {KLT: curve} if curve else {})))
    inputs = _with(profile.input_codecs, {codec: curve.points for codec, curve in pictures.items()})
    sizes = () if calibration is None else calibration.sizes
    return msgspec.structs.replace(profile, cuts=tuple(cuts), input_codecs=inputs, calibrated_sizes=sizes)


def _fits(card: ModelCard, cut: CutCard | None, calibration: Calibration) -> bool:
    """Whether the tables are of what crosses at this cut."""
    if cut is None:
        return False
    inputs = {spec.name: spec for spec in card.inputs}
    crossing = [*cut.boundary, *(inputs[name] for name in cut.tail_inputs)]
    tables = [tensor.spec for tensor in calibration.tables[cut.id].tensors]
    return [(one.name, one.dtype) for one in tables] == [(one.name, one.dtype) for one in crossing]


def _with(codecs: tuple[CodecCosts, ...], curves: Mapping[str, tuple[Point, ...]]) -> tuple[CodecCosts, ...]:
    """The codecs that have no settings, and those with these curves."""
    known = {codec.codec: codec for codec in codecs}
    raw = known.get("raw")
    guess_ms = MS_PER_RAW_BYTE * raw.bytes if raw is not None else 0.0
    plain = tuple(codec for codec in codecs if codec.codec not in WITH_LEVELS)
    return plain + tuple(
        CodecCosts(
            codec=name,
            bytes=round(min(point.mean_bytes for point in curve)),
            encode_ms=known[name].encode_ms if name in known else guess_ms,
            decode_ms=known[name].decode_ms if name in known else guess_ms,
            curve=curve,
        )
        for name, curve in curves.items()
    )
