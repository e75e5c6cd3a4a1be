"""What each codec costs on what would travel, and how far lossy ones move the answers."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from split.codec.calibration import Calibration
from split.codec.fidelity import MEASURES, divergence
from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.codec.payload import decode, encode
from split.ids import CutId
from split.profiles.measured import CodecCosts
from split.runtime.profiler import measure_interleaved
from split.tensor import Tensors
from split.workbench.golden import Golden

LOSSY: Final = ("fp16", "int8")
KLT: Final = "klt"
_PAYLOAD_BYTES_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A cut's tables of a calibration, to be timed; bytes and fidelity the calibration has measured itself."""

    tables: BoundaryTables
    level: int
    """One of its curve: what coding takes hardly depends on which."""


def calibrated_cut(calibration: Calibration | None, cut: CutId) -> Calibrated | None:
    """That of `cut`, at the level in the middle of its curve; None where it has none."""
    if calibration is None or cut not in calibration.tables:
        return None
    points = calibration.curves[cut].points
    tables = BoundaryTables(calibration.tables[cut], calibration.digest)
    return Calibrated(tables=tables, level=points[len(points) // 2].level)


def codec_costs(
    payloads: Sequence[Tensors],
    finish: Callable[[Tensors], Tensors],
    golden: Sequence[Golden],
    calibrated: Calibrated | None = None,
) -> tuple[CodecCosts, ...]:
    """Every codec on what travels (one payload for each golden request); a lossy one that saves no byte is left out.
    Codec klt where the cut is `calibrated`: its times, and no fidelity."""
    wires = {codec: [b"".join(encode(tensors, codec)) for tensors in payloads] for codec in ("raw", *LOSSY)}
    sizes = {codec: int(statistics.median(map(len, wire))) for codec, wire in wires.items()}
    kept = [codec for codec in wires if codec == "raw" or sizes[codec] < sizes["raw"]]
    work: dict[str, Callable[[], Any]] = {}
    for codec in kept:
        work[f"encode {codec}"] = functools.partial(encode, payloads[0], codec)
        work[f"decode {codec}"] = functools.partial(decode, wires[codec][0], max_bytes=_PAYLOAD_BYTES_MAX)
    if calibrated is not None:
        tables, level = calibrated.tables, calibrated.level
        wires[KLT] = [b"".join(encode_klt(tensors, tables, level)) for tensors in payloads]
        sizes[KLT] = int(statistics.median(map(len, wires[KLT])))
        kept.append(KLT)
        work[f"encode {KLT}"] = functools.partial(encode_klt, payloads[0], tables, level)
        work[f"decode {KLT}"] = functools.partial(decode_klt, wires[KLT][0], tables, max_bytes=_PAYLOAD_BYTES_MAX)
    ms = measure_interleaved(work, 0.1)
    return tuple(
        CodecCosts(
            codec=codec,
            bytes=sizes[codec],
            encode_ms=ms[f"encode {codec}"],
            decode_ms=ms[f"decode {codec}"],
            fidelity=_fidelity(wires[codec], finish, golden) if codec in LOSSY else {},
        )
        for codec in kept
    )


def _fidelity(
    wires: Sequence[bytes], finish: Callable[[Tensors], Tensors], golden: Sequence[Golden]
) -> dict[str, float]:
    """Each measure's worst value over golden requests and outputs; one that is not finite is left out: not allowed."""
    worst = dict.fromkeys(MEASURES, 0.0)
    for wire, request in zip(wires, golden, strict=True):
        outputs = finish(decode(wire, max_bytes=_PAYLOAD_BYTES_MAX))
        for name, found in outputs.items():
            for measure_name in worst:
                value = divergence(measure_name, found, request.outputs[name])
                worst[measure_name] = max(worst[measure_name], value)
    return {name: value for name, value in worst.items() if math.isfinite(value)}


def joined(tensors: Tensors) -> bytes:
    """The raw payload of these tensors."""
    return b"".join(encode(tensors, "raw"))
