"""The model itself in int8, run locally: a further rival, which is another model and has a fidelity of its own.

Quantised without training, as ONNX Runtime does it (static, QDQ, by channel), calibrated from the same photographs as
the codec. Held against a bound like everything else: faster is no rival where it answers something else.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from scripts.benches.codec_rivals import worst
from scripts.benches.codec_splits import lay
from scripts.benches.codec_subjects import Sample, Subject
from scripts.benches.figure import interleaved
from split.errors import IsthmusError
from split.runtime.segment import OrtEngine

ROUNDS: Final = 40


def row(subject: Subject, bound: float, samples: Sequence[Sample], *, threads: int) -> dict[str, Any]:
    """Its mean of the measure on these samples, whether that is inside `bound`, and fp32 ms / int8 ms."""
    path = lay(subject, bound)
    with tempfile.TemporaryDirectory(prefix="isthmus-int8-") as folder:
        target = Path(folder) / "int8.onnx"
        try:
            quantize_static(
                path,
                target,
                _Reader(subject.samples("calibration", crops=1)),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                weight_type=QuantType.QInt8,
            )
            whole, small = (OrtEngine().open(one, threads=threads) for one in (path, target))
        except (IsthmusError, ValueError, RuntimeError) as error:
            return {"model": subject.model, "rival": "local int8", "failed": str(error)}
        off = [worst(subject.measure, small.run(sample.tensors), whole.run(sample.tensors)) for sample in samples]
        first = samples[0].tensors
        taken = interleaved({"fp32": lambda: whole.run(first), "int8": lambda: small.run(first)}, ROUNDS)
        whole.close()
        small.close()
    ms = {name: statistics.median(values) for name, values in taken.items()}
    mean = float(np.mean(off))
    return {
        "model": subject.model,
        "rival": "local int8",
        subject.measure: mean,
        "inside_bound": mean <= bound,
        "fp32_ms": ms["fp32"],
        "int8_ms": ms["int8"],
    }


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # the runtime ships no types
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._left = iter([sample.tensors for sample in samples])

    def get_next(self) -> Any:
        """One request, then None."""
        return next(self._left, None)
