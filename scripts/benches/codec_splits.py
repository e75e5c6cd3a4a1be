"""Splits with the calibrated codec, as the product makes them: `isthmus calibrate` on the sources for calibration, then
head, real payload and tail on the others; the coder's times on what really crosses.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import msgspec
import numpy as np
import yaml
from PIL import Image

from scripts import models
from scripts.benches.codec_curves import Measurements
from scripts.benches.codec_rivals import as_measurements, worst
from scripts.benches.codec_subjects import Sample, Subject
from scripts.benches.figure import CACHE, interleaved
from scripts.models import ROOT, Unavailable
from split.codec import klt
from split.codec.calibration import (
    CALIBRATION_FILE,
    CALIBRATION_VERSION,
    LEVEL_MAX,
    Calibration,
    read_calibration,
)
from split.codec.fallback import Fallback
from split.codec.klt import BoundaryTables, decode_klt, encode_klt, ideal_bytes
from split.codec.payload import decode, encode
from split.graph.cuts import compute_shares, cut_from_mask, mask_of
from split.graph.load import load_model
from split.graph.partition import share_weights, write_parts
from split.ids import CutId
from split.runtime.engine import Segment
from split.runtime.segment import OrtEngine
from split.tensor import Tensors
from split.workbench.check import write_npz
from split.workbench.cut import settle

FOLDER: Final = CACHE / "codec"
CALIBRATE_TIMEOUT_S: Final = 600
TEXT_CROPS: Final = 2
"""Pictures with text on them that calibration gets of each photograph."""
COEFFICIENTS: Final = 16_000
"""What the coder's times are for."""
DECODED_MAX: Final = 1 << 30
LEAST: Final = 1e-9
"""Of a measure, so that it has a logarithm."""
CODECS: Final = ["raw", "fp16", "int8", "klt", "jpeg", "webp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """One cut of a model, open."""

    cut: CutId
    share: float
    """Of the compute, in the head."""
    shapes: str
    """Of what crosses, for people."""
    tables: BoundaryTables
    head: Segment
    tail: Segment
    outputs: tuple[str, ...]

    def crossing(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """What the head makes, and what travels, in the order of the tables."""
        made = self.head.run({name: inputs[name] for name in self.head.inputs})
        there = inputs | made
        return made, {one.spec.name: there[one.spec.name] for one in self.tables.tensors}

    def finish(self, made: Tensors, received: Tensors) -> Tensors:
        found = made | self.tail.run({name: received[name] for name in self.tail.inputs})
        return {name: found[name] for name in self.outputs}


def lay(subject: Subject, bound: float) -> Path:
    """Its model file in a repository of this bench, under a contract that allows everything within `bound`."""
    folder = FOLDER / "models" / subject.model
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    source, target = models.model_path(subject.model), version / "model.onnx"
    if not target.exists():
        shutil.copyfile(source, version / "fresh")
        (version / "fresh").replace(target)
    said: dict[str, Any] = {"name": subject.input}
    if subject.spec is not None:
        said["encoded"] = msgspec.to_builtins(subject.spec)
    fidelity = {"measure": subject.measure, "bound": bound}
    contract = {"model": subject.model, "data": {"inputs": [said], "codecs": CODECS, "fidelity": fidelity}}
    (folder / "contract.yaml").write_text(yaml.safe_dump(contract))
    return target


def calibration_of(subject: Subject, bound: float) -> tuple[Path, Calibration]:
    """The model file and what `isthmus calibrate` made of the sources for calibration, once; Unavailable where it
    fails."""
    path = lay(subject, bound)
    digest = load_model(path).digest
    mark = path.parent / "calibrated-by"
    stamp = f"{CALIBRATION_VERSION} {subject.measure} {_made_by()}"
    if not mark.exists() or mark.read_text() != stamp:
        print(f"calibrating {subject.model} …", file=sys.stderr, flush=True)
        _calibrate(path, _inputs(subject))
        mark.write_text(stamp)
    found = read_calibration(path.with_name(CALIBRATION_FILE), digest)
    if found is None:
        raise Unavailable(f"{path} has no calibration beside it")
    return path, found


def _made_by() -> str:
    """Of the programs that calibrate: what another one made is not measured as theirs."""
    files = sorted((*(ROOT / "split" / "workbench").glob("*.py"), *(ROOT / "split" / "codec").glob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _inputs(subject: Subject) -> Path:
    """A folder of pictures, or of `.npz` files, each one source."""
    folder = FOLDER / "calibrate" / subject.model
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if subject.spec is not None and not subject.text:
        for number, photograph in enumerate(models.photographs("calibration")):
            shutil.copyfile(photograph, folder / f"{number:02}{photograph.suffix}")
        return folder
    for number, sample in enumerate(subject.samples("calibration", crops=TEXT_CROPS)):
        if isinstance(sample.plain, np.ndarray):
            Image.fromarray(sample.plain).save(folder / f"{number:03}.png")
        else:
            write_npz(folder / f"{number:03}.npz", sample.tensors)
    return folder


def _calibrate(path: Path, inputs: Path) -> None:
    command = [sys.executable, "-m", "agent.cli", "calibrate", str(path), "--inputs", str(inputs)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=CALIBRATE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"calibrating {path} takes longer than {CALIBRATE_TIMEOUT_S} s") from None
    if done.returncode:
        raise Unavailable(f"calibrating {path} failed: {done.stderr.strip().splitlines()[-1:]}")


@contextmanager
def parted(path: Path, calibration: Calibration, inputs: Tensors) -> Iterator[list[Parted]]:
    """All calibrated cuts, open on one thread each, in the order of their depth."""
    folder = FOLDER / "parts" / path.parents[1].name
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model(path)
    share_weights(model, folder)
    settle(model, folder, inputs=inputs)
    cuts = [cut_from_mask(model, mask_of(tables.node_bitmap)) for tables in calibration.tables.values()]
    engine, found = OrtEngine(), []
    try:
        for cut, share in zip(cuts, compute_shares(model, cuts), strict=True):
            head, tail = folder / f"{cut.id}.head.onnx", folder / f"{cut.id}.tail.onnx"
            write_parts(model, cut, head, tail)
            tables = calibration.tables[cut.id]
            found.append(
                Parted(
                    cut=cut.id,
                    share=share,
                    shapes=" + ".join("x".join(map(str, one.spec.shape[1:])) for one in tables.tensors),
                    tables=BoundaryTables(tables, calibration.digest),
                    head=engine.open(head, threads=1),
                    tail=engine.open(tail, threads=1),
                    outputs=tuple(model.output_names),
                )
            )
        yield sorted(found, key=lambda one: one.share)
    finally:
        for one in found:
            one.head.close()
            one.tail.close()


def levels_near(
    calibration: Calibration, cut: CutId, measure: str, targets: Sequence[float], offsets: Sequence[int]
) -> list[int]:
    """Levels around the ones where the calibration's own curve meets the targets: these and `offsets` beside them."""
    curve = calibration.curves[cut].points
    off = {point.level: point.fidelity.get(measure, math.inf) for point in curve}
    met = [min(off, key=lambda level: abs(math.log(max(off[level], LEAST) / target))) for target in targets]
    return sorted({min(max(level + offset, 0), LEVEL_MAX) for level in met for offset in offsets})


def measure_klt(
    one: Parted, levels: Sequence[int], samples: Sequence[Sample], expected: Sequence[Tensors], measure: str
) -> Measurements:
    """Real payloads, framing included, decoded and run through the tail."""
    crossings = [one.crossing(sample.tensors) for sample in samples]
    settings = []
    for level in levels:
        sizes, off = [], []
        for (made, crossing), wanted in zip(crossings, expected, strict=True):
            payload = b"".join(encode_klt(crossing, one.tables, level))
            sizes.append(len(payload))
            received = decode_klt(payload, one.tables, max_bytes=DECODED_MAX)
            off.append(worst(measure, one.finish(made, received), wanted))
        settings.append((f"level {level}", sizes, off))
    return as_measurements(settings, samples)


def measure_int8(one: Parted, samples: Sequence[Sample], expected: Sequence[Tensors], measure: str) -> Measurements:
    """What there is without calibration: int8 by channel and zstd, which has no knob."""
    sizes, off = [], []
    for sample, wanted in zip(samples, expected, strict=True):
        made, crossing = one.crossing(sample.tensors)
        payload = b"".join(encode(crossing, "int8"))
        sizes.append(len(payload))
        off.append(worst(measure, one.finish(made, decode(payload, max_bytes=DECODED_MAX)), wanted))
    return as_measurements([("int8", sizes, off)], samples)


# -- the coder alone --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CoderTimes:
    """ms per `COEFFICIENTS` on this core, medians."""

    encode_ms: float
    decode_ms: float


def coder_times(one: Parted, level: int, samples: Sequence[Sample], rounds: int, *, native: bool) -> CoderTimes:
    """All that lies between the tensors and the payload, with the compiled core or without."""
    crossings = [one.crossing(sample.tensors)[1] for sample in samples]
    payloads = [b"".join(encode_klt(crossing, one.tables, level)) for crossing in crossings]
    factor = COEFFICIENTS / sum(array.size for array in crossings[0].values())
    turns = iter(range(10**9))

    def encode_one() -> None:
        encode_klt(crossings[next(turns) % len(crossings)], one.tables, level)

    def decode_one() -> None:
        decode_klt(payloads[next(turns) % len(payloads)], one.tables, max_bytes=DECODED_MAX)

    work = {"encode": encode_one, "decode": decode_one}
    if native:
        taken = interleaved(work, rounds)
    else:
        with patch.object(klt, "core", Fallback):
            taken = interleaved(work, rounds)
    return CoderTimes(
        encode_ms=statistics.median(taken["encode"]) * factor, decode_ms=statistics.median(taken["decode"]) * factor
    )


def over_ideal(one: Parted, level: int, samples: Sequence[Sample]) -> float:
    """Bytes of the entropy coder / the code length of what it codes under its own tables, over all samples."""
    coded = ideal = 0.0
    for sample in samples:
        crossing = one.crossing(sample.tensors)[1]
        _, *streams = encode_klt(crossing, one.tables, level)
        coded += sum(memoryview(stream).nbytes for stream in streams)
        ideal += ideal_bytes(crossing, one.tables, level)
    return coded / ideal
