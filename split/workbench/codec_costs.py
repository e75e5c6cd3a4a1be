"""What each codec costs on what would travel, and how far lossy ones move the answers."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

from split.codec.fidelity import MEASURES, divergence
from split.codec.payload import decode, encode
from split.profiles.measured import CodecCosts
from split.runtime.profiler import measure_interleaved
from split.tensor import Tensors
from split.workbench.golden import Golden

LOSSY: Final = ("fp16", "int8")
_PAYLOAD_BYTES_MAX: Final = 1 << 40


def codec_costs(
    payloads: Sequence[Tensors], finish: Callable[[Tensors], Tensors], golden: Sequence[Golden]
) -> tuple[CodecCosts, ...]:
    """Every codec on what travels (one payload for each golden request); a lossy one that saves no byte is left out."""
    wires = {codec: [b"".join(encode(tensors, codec)) for tensors in payloads] for codec in ("raw", *LOSSY)}
    sizes = {codec: int(statistics.median(map(len, wire))) for codec, wire in wires.items()}
    kept = [codec for codec in wires if codec == "raw" or sizes[codec] < sizes["raw"]]
    work: dict[str, Callable[[], Any]] = {}
    for codec in kept:
        work[f"encode {codec}"] = functools.partial(encode, payloads[0], codec)
        work[f"decode {codec}"] = functools.partial(decode, wires[codec][0], max_bytes=_PAYLOAD_BYTES_MAX)
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
