"""The calibrated codec against the picture itself, at equal fidelity: bytes on photographs that nothing was calibrated
from, with 90 % intervals over photographs; the coder's times; and for six models of as many kinds who wins. Whether a
split that wins in bytes wins in time is bench `links`.

Fidelity is against the unsplit model on the lossless pixels that it looks at. Nothing here is an accuracy.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.benches import codec_plot, codec_speech
from scripts.benches.codec_curves import Curve, Estimate, Measurements, bytes_at, cheapest, ratio_at
from scripts.benches.codec_rivals import Detail, measure, picture_rivals, plain_bytes, speech_rivals
from scripts.benches.codec_splits import (
    Parted,
    calibration_of,
    coder_times,
    levels_near,
    measure_int8,
    measure_klt,
    over_ideal,
    parted,
)
from scripts.benches.codec_subjects import MAIN, MAIN_BOUND, SUBJECTS, Finish, Sample, Subject, subject
from scripts.benches.figure import Figure
from scripts.models import Unavailable
from split.codec.calibration import Calibration
from split.runtime.segment import OrtEngine
from split.tensor import Tensors

TARGETS: Final = {"036": MAIN_BOUND, "0105": 0.0105}
"""KL in nats: what JPEG at quality 90 and 95 cost on the first photographs that were tried."""
BOTTLENECK: Final = (80, 14, 14)
"""The boundary of the figures: EfficientNet-Lite0's first projection to 14 × 14, at 37 % of the time."""
REFERENCES: Final = {"jpeg": ("q95", "q90", "q75"), "opus": ("64 kbit/s", "32 kbit/s", "16 kbit/s")}
"""Other models are compared where these codecs lead them at these settings, whatever that is."""
CROPS, CROPS_QUICK, CROPS_OTHER = 3, 1, 1
OFFSETS: Final = tuple(range(-20, 25, 4))
OFFSETS_FEW: Final = (-8, -4, 0, 4, 8)
"""Beside the level where the calibration's curve meets a target; 8 halve the step, for a quarter of the divergence."""
ROUNDS, ROUNDS_QUICK = 300, 60
FALLBACK_ROUNDS: Final = 20
HALF: Final = 0.5
"""Of the compute: a cut behind most of the network saves the device little, however few its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model: what each codec was measured to cost and to do on the same inputs."""

    subject: Subject
    cuts: dict[str, Parted]
    """Name → cut, for those of `splits`."""
    splits: dict[str, Measurements]
    """Calibrated, by the name of the cut."""
    told: dict[str, Curve]
    """The calibration's own curves, by which a cut is chosen: never by what is then measured of it."""
    int8: dict[str, Measurements]
    rivals: dict[str, Measurements]
    plain: dict[str, float] = field(default_factory=dict)
    """Mean bytes of inputs that travel as they are."""


def prepare(*, quick: bool) -> None:
    """Photographs fetched and models calibrated, once: a minute each."""
    for one in SUBJECTS if not quick else [subject(MAIN)]:
        with _skipped(one):
            calibration_of(one, MAIN_BOUND)
            if one.speech:
                codec_speech.prepare()


def run(*, quick: bool, plot: Path | None = None) -> tuple[list[Figure], list[dict[str, Any]]]:
    main = subject(MAIN)
    path, calibration = calibration_of(main, MAIN_BOUND)
    samples = main.samples("test", crops=CROPS_QUICK if quick else CROPS)
    targets = list(TARGETS.values())
    with parted(path, calibration, samples[0].tensors) as cuts:
        if quick:
            cuts = [one for one in cuts if _is_bottleneck(one)]
        found = _compared(main, path, cuts, calibration, samples, targets, Detail.AROUND if quick else Detail.ALL)
        figures, rows = _figures(found, calibration, samples, quick=quick)
    rows += [_row(found, f"kl {value:g}", value) for value in targets]
    rows += _settings(found)
    if plot is not None:
        curves = {name: one.curve() for name, one in (found.splits | found.rivals).items()}
        levels = {f"KL {value:g}": value for value in targets}
        codec_plot.draw(curves, f"{MAIN}: bytes against fidelity", "KL", levels, plot)
    if not quick:
        for other in SUBJECTS:
            if other is not main:
                with _skipped(other):
                    rows += _table(other)
    return figures, rows


@contextlib.contextmanager
def _skipped(one: Subject) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        if one.model == MAIN:
            raise
        print(f"skipped {one.model}: {error}", file=sys.stderr)


# -- the figures ------------------------------------------------------------------------------------------------------


def _figures(
    found: Compared, calibration: Calibration, samples: Sequence[Sample], *, quick: bool
) -> tuple[list[Figure], list[dict[str, Any]]]:
    name = _bottleneck(found)
    ours, cut = found.splits[name], found.cuts[name]
    high, low = (bytes_at(ours, value) for value in TARGETS.values())
    ratios = {rival: ratio_at(one, ours, MAIN_BOUND) for rival, one in found.rivals.items()}
    [level] = levels_near(calibration, cut.cut, found.subject.measure, [MAIN_BOUND], [0])
    times = coder_times(cut, level, samples[:8], ROUNDS_QUICK if quick else ROUNDS, native=True)
    slow = coder_times(cut, level, samples[:8], FALLBACK_ROUNDS, native=False)
    over = over_ideal(cut, level, samples)
    figures = [
        Figure(name="effnet_kl036_bytes", value=high.value, unit="B", at_most=2600),
        Figure(name="effnet_kl0105_bytes", value=low.value, unit="B", at_most=4100),
        *(
            Figure(name=f"effnet_vs_{rival}", value=ratios[rival].value, unit="ratio", at_least=least)
            for rival, least in (("jpeg", 5.0), ("webp", 5.0), ("avif", 4.0))
            if rival in ratios
        ),
        Figure(name="encode_ms", value=times.encode_ms, unit="ms", at_most=0.5),
        Figure(name="decode_ms", value=times.decode_ms, unit="ms", at_most=0.5),
        Figure(name="fallback_ms", value=max(slow.encode_ms, slow.decode_ms), unit="ms", at_most=15),
        Figure(name="over_ideal", value=over, unit="ratio", at_most=1.015),
    ]
    intervals = {"effnet_kl036_bytes": high, "effnet_kl0105_bytes": low}
    intervals |= {f"effnet_vs_{rival}": ratio for rival, ratio in ratios.items()}
    rows = [_interval(name, one, len(set(ours.sources.tolist()))) for name, one in intervals.items()]
    return figures, rows


def _interval(name: str, found: Estimate, sources: int) -> dict[str, Any]:
    return {"figure": name, "value": found.value, "low": found.low, "high": found.high, "sources": sources}


def _is_bottleneck(one: Parted) -> bool:
    return any(tensor.spec.shape[1:] == BOTTLENECK for tensor in one.tables.tensors)


def _bottleneck(found: Compared) -> str:
    """Of the cuts there are at that boundary's shape (before and after it is added to) the one that is chosen."""
    name = _chosen({name: found.told[name] for name, cut in found.cuts.items() if _is_bottleneck(cut)}, MAIN_BOUND)
    if not name:
        raise Unavailable(f"no calibrated cut of {MAIN} at {BOTTLENECK} comes as close as KL {MAIN_BOUND}")
    return name


# -- one model --------------------------------------------------------------------------------------------------------


def _compared(
    one: Subject,
    path: Path,
    cuts: Sequence[Parted],
    calibration: Calibration,
    samples: Sequence[Sample],
    targets: Sequence[float],
    detail: Detail,
) -> Compared:
    """`targets`: [] for those of `_references`."""
    whole = OrtEngine().open(path, threads=1)
    expected = [whole.run(sample.tensors) for sample in samples]
    rivals = _rivals(one, samples, expected, whole.run, detail)
    if not targets:
        targets = list(_references(rivals).values())
    named = {f"{cut.shapes} ({cut.share:.0%}, {cut.cut[:6]})": cut for cut in cuts}
    splits, int8 = {}, {}
    for name, cut in named.items():
        print(f"  {one.model} {name} …", file=sys.stderr, flush=True)
        levels = levels_near(
            calibration, cut.cut, one.measure, targets, OFFSETS if detail is Detail.ALL else OFFSETS_FEW
        )
        splits[name] = measure_klt(cut, levels, samples, expected, one.measure)
        if detail is not Detail.AROUND:
            int8[name] = measure_int8(cut, samples, expected, one.measure)
    whole.close()
    plain = plain_bytes(one, samples)
    told = {name: _told(calibration, cut, one.measure) for name, cut in named.items()}
    return Compared(subject=one, cuts=named, splits=splits, told=told, int8=int8, rivals=rivals, plain=plain)


def _told(calibration: Calibration, cut: Parted, measure: str) -> Curve:
    points = [point for point in calibration.curves[cut.cut].points if measure in point.fidelity]
    sizes = np.array([point.mean_bytes for point in points])
    return Curve.of(sizes, np.array([point.fidelity[measure] for point in points]))


def _chosen(told: Mapping[str, Curve], target: float) -> str:
    """The cut that the calibration says is cheapest at this mean of the measure; "" where none comes as close."""
    sizes = {name: curve.bytes_at(target) for name, curve in told.items()}
    return min((name for name, size in sizes.items() if math.isfinite(size)), key=lambda name: sizes[name], default="")


def _rivals(
    one: Subject, samples: Sequence[Sample], expected: Sequence[Tensors], finish: Finish, detail: Detail
) -> dict[str, Measurements]:
    if one.speech:
        return measure(list(speech_rivals()), samples, expected, finish, one)
    if one.spec is None:
        return {}
    print(f"  {one.model} as a picture …", file=sys.stderr, flush=True)
    return measure(list(picture_rivals(one, detail)), samples, expected, finish, one)


def _references(rivals: Mapping[str, Measurements]) -> dict[str, float]:
    """Name → value of the measure: where JPEG at full size, or Opus, leads the model at these settings; for one that
    takes neither a fixed ladder."""
    for codec, settings in REFERENCES.items():
        if codec in rivals:
            one = rivals[codec]
            means = dict(zip(one.settings, one.fidelity.mean(axis=1).tolist(), strict=True))
            return {f" ({codec} {setting})": means[setting] for setting in settings if 0 < means[setting] < math.inf}
    return {" (close)": 0.003, " (usual)": 0.015, " (loose)": 0.037}


def _table(one: Subject) -> list[dict[str, Any]]:
    """Rows of a model beside the main one, winners and losers alike."""
    path, calibration = calibration_of(one, MAIN_BOUND)
    samples = one.samples("test", crops=CROPS_OTHER)
    with parted(path, calibration, samples[0].tensors) as cuts:
        found = _compared(one, path, cuts, calibration, samples, [], Detail.SOME)
    return [_row(found, f"{one.measure} {value:.3g}{name}", value) for name, value in _references(found.rivals).items()]


def _row(found: Compared, at: str, target: float) -> dict[str, Any]:
    """Bytes of everything at one fidelity; inf where it never comes as close."""
    cut = _chosen(found.told, target)
    ours = found.splits[cut].curve().bytes_at(target) if cut else math.inf
    plain_cut, int8 = cheapest(found.int8, target)
    sizes = {name: one.curve().bytes_at(target) for name, one in found.rivals.items()} | found.plain
    rival = min(sizes, key=lambda name: sizes[name], default="")
    row: dict[str, Any] = {"model": found.subject.model, "kind": found.subject.kind, "at": at, "klt": ours, "cut": cut}
    if cut:
        interval = bytes_at(found.splits[cut], target)
        row |= {"klt_low": interval.low, "klt_high": interval.high}
        if found.splits[cut].curve().is_bound(target):
            row["klt_is_at_most"] = True
    row |= {"int8": int8, "int8_cut": plain_cut, **sizes, "best_rival": rival}
    early = _chosen({name: curve for name, curve in found.told.items() if found.cuts[name].share <= HALF}, target)
    half = found.splits[early].curve().bytes_at(target) if early else math.inf
    row |= {"klt_by_half": half, "half_cut": early}
    if rival:
        row["rival_over_klt"] = sizes[rival] / ours if math.isfinite(ours) else 0.0
        row["rival_over_half"] = sizes[rival] / half if math.isfinite(half) else 0.0
    return row


def _settings(found: Compared) -> list[dict[str, Any]]:
    """What was measured, setting by setting."""
    return [
        {"model": found.subject.model, "codec": name, "setting": setting, "bytes": size, found.subject.measure: off}
        for name, one in (found.splits | found.int8 | found.rivals).items()
        for setting, size, off in zip(
            one.settings, one.bytes.mean(axis=1).tolist(), one.fidelity.mean(axis=1).tolist(), strict=True
        )
    ]
