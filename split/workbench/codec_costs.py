"""What each codec costs on what would travel, and how far lossy ones move the answers."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from split.codec.boxes import count_detections
from split.codec.calibration import Calibration, Curve
from split.codec.fidelity import farthest, measures_under
from split.codec.image import prepare_image
from split.codec.klt import BoundaryTables, decode_klt, encode_klt
from split.codec.payload import decode, encode
from split.codec.plain import Buffer
from split.ids import KLT, CutId
from split.profiles.boxes import Boxes
from split.profiles.contract import Fidelity
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts
from split.runtime.profiler import measure_interleaved
from split.tensor import Tensors
from split.workbench.golden import Golden, typical_jpeg

LOSSY: Final = ("fp16", "int8")
_PAYLOAD_BYTES_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """A calibrated codec at one of its settings, to be timed: what coding takes hardly depends on which. Bytes and
    fidelity the calibration has measured itself."""

    encode: Callable[[Tensors], Sequence[Buffer]]
    decode: Callable[[bytes], Tensors]


def of_cut(calibration: Calibration | None, cut: CutId) -> dict[str, Coding]:
    """Codec klt with the tables of `cut`; {} where it has none."""
    if calibration is None or cut not in calibration.tables:
        return {}
    tables = BoundaryTables(calibration.tables[cut], calibration.digest)
    level = _middle(calibration.curves[cut])
    return {
        KLT: Coding(
            encode=lambda tensors: encode_klt(tensors, tables, level),
            decode=lambda wire: decode_klt(wire, tables, max_bytes=_PAYLOAD_BYTES_MAX),
        )
    }


def of_pictures(calibration: Calibration | None, images: Mapping[str, ImageSpec]) -> dict[str, Coding]:
    """The codecs that make the picture inputs `images` anew, timed on a typical one: what is no picture (the built-in
    golden inputs are noise) would travel raw."""
    if calibration is None or not images or not calibration.pictures:
        return {}
    typical = {name: prepare_image(typical_jpeg(), spec) for name, spec in images.items()}
    return {
        codec: _of_pictures(codec, _middle(curve), images, typical) for codec, curve in calibration.pictures.items()
    }


def _of_pictures(codec: str, level: int, images: Mapping[str, ImageSpec], typical: Tensors) -> Coding:
    return Coding(
        encode=lambda tensors: encode(tensors | typical, codec, level=level, pictures=images),
        decode=lambda wire: decode(wire, max_bytes=_PAYLOAD_BYTES_MAX),
    )


def _middle(curve: Curve) -> int:
    return curve.points[len(curve.points) // 2].level


def codec_costs(
    payloads: Sequence[Tensors],
    finish: Callable[[Tensors], Tensors],
    golden: Sequence[Golden],
    calibrated: Mapping[str, Coding] | None = None,
    contract: Fidelity | None = None,
) -> tuple[CodecCosts, ...]:
    """Every codec on what travels (one payload for each golden request); a lossy one that saves no byte is left out.
    Of those that are `calibrated` the times, and no fidelity. `contract`: as for `measures_under`."""
    wires = {codec: [b"".join(encode(tensors, codec)) for tensors in payloads] for codec in ("raw", *LOSSY)}
    sizes = {codec: int(statistics.median(map(len, wire))) for codec, wire in wires.items()}
    kept = [codec for codec in wires if codec == "raw" or sizes[codec] < sizes["raw"]]
    work: dict[str, Callable[[], Any]] = {}
    for codec in kept:
        work[f"encode {codec}"] = functools.partial(encode, payloads[0], codec)
        work[f"decode {codec}"] = functools.partial(decode, wires[codec][0], max_bytes=_PAYLOAD_BYTES_MAX)
    for codec, coding in (calibrated or {}).items():
        wires[codec] = [b"".join(coding.encode(tensors)) for tensors in payloads]
        sizes[codec] = int(statistics.median(map(len, wires[codec])))
        kept.append(codec)
        work[f"encode {codec}"] = functools.partial(coding.encode, payloads[0])
        work[f"decode {codec}"] = functools.partial(coding.decode, wires[codec][0])
    ms = measure_interleaved(work, 0.1)
    return tuple(
        CodecCosts(
            codec=codec,
            bytes=sizes[codec],
            encode_ms=ms[f"encode {codec}"],
            decode_ms=ms[f"decode {codec}"],
            fidelity=_fidelity(wires[codec], finish, golden, contract) if codec in LOSSY else {},
        )
        for codec in kept
    )


def _fidelity(
    wires: Sequence[bytes],
    finish: Callable[[Tensors], Tensors],
    golden: Sequence[Golden],
    contract: Fidelity | None,
) -> dict[str, float]:
    """Each measure's worst value over golden requests and outputs; one that is not finite is left out: not allowed. So
    is that of detections where the unsplit model finds none."""
    measures = {
        name: measure
        for name, measure in measures_under(contract).items()
        if not isinstance(measure, Boxes) or any(count_detections(measure, request.outputs) for request in golden)
    }
    worst = dict.fromkeys(measures, 0.0)
    for wire, request in zip(wires, golden, strict=True):
        outputs = request.outputs | finish(decode(wire, max_bytes=_PAYLOAD_BYTES_MAX))
        for name, measure in measures.items():
            worst[name] = max(worst[name], farthest(measure, outputs, request.outputs))
    return {name: value for name, value in worst.items() if math.isfinite(value)}


def joined(tensors: Tensors) -> bytes:
    """The raw payload of these tensors."""
    return b"".join(encode(tensors, "raw"))
