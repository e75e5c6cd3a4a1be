"""How fast the runtime is on this machine, on matrix products and convolutions as models have them.

Made-up weights: no kernel looks at values. What a real model takes is not guessed from it, that is measured
(`profile.py`); it compares machines.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.parser

from split.errors import EngineFailed, InvalidModel
from split.profiles.rates import KINDS, Rate, Rates
from split.runtime.engine import Segment
from split.runtime.segment import OrtEngine
from split.tensor import NUMPY_DTYPES, Array
from split.workbench.child import Progress

SIDE: Final = 512
CHANNELS: Final = 64
PIXELS: Final = 56
"""The first stage of a ResNet: big enough for all threads, small enough for a second-level cache."""

_OPERATIONS: Final = {"gemm": 2 * SIDE**3, "conv": 2 * PIXELS**2 * CHANNELS**2 * 9}

_MODELS: Final[Mapping[str, str]] = {
    "gemm_fp32": f"""
<ir_version: 8, opset_import: ["" : 17]>
speed (float[{SIDE}, {SIDE}] x, float[{SIDE}, {SIDE}] w) => (float[{SIDE}, {SIDE}] y) {{ y = MatMul(x, w) }}
""",
    "gemm_int8": f"""
<ir_version: 8, opset_import: ["" : 17]>
speed (uint8[{SIDE}, {SIDE}] x, int8[{SIDE}, {SIDE}] w) => (int32[{SIDE}, {SIDE}] y) {{ y = MatMulInteger(x, w) }}
""",
    "conv_fp32": f"""
<ir_version: 8, opset_import: ["" : 17]>
speed (float[1, {CHANNELS}, {PIXELS}, {PIXELS}] x, float[{CHANNELS}, {CHANNELS}, 3, 3] w)
  => (float[1, {CHANNELS}, {PIXELS}, {PIXELS}] y) {{ y = Conv<pads=[1, 1, 1, 1]>(x, w) }}
""",
    "conv_int8": f"""
<ir_version: 8, opset_import: ["" : 17]>
speed (uint8[1, {CHANNELS}, {PIXELS}, {PIXELS}] x, int8[{CHANNELS}, {CHANNELS}, 3, 3] w)
  => (uint8[1, {CHANNELS}, {PIXELS}, {PIXELS}] y)
  <float scale = {{0.02}}, uint8 zero = {{128}}, int8 none = {{0}}>
{{ y = QLinearConv<pads=[1, 1, 1, 1]>(x, scale, zero, w, scale, none, scale, zero) }}
""",
}


def measure_rates(threads: int, *, budget_s: float, on_progress: Progress) -> Rates:
    """Each kind on one thread and on all; about `budget_s` seconds and the time to open eight small sessions."""
    rates: dict[str, Rate] = {}
    with tempfile.TemporaryDirectory(prefix="isthmus-speed-") as folder:
        for number, kind in enumerate(KINDS):
            path = Path(folder) / f"{kind}.onnx"
            model = _with_weights(onnx.parser.parse_model(_MODELS[kind]))
            onnx.save(model, path)
            on_progress(kind, number / len(KINDS))
            each_s = budget_s / (2 * len(KINDS))
            rates[kind] = Rate(one=_rate(path, kind, 1, each_s), all=_rate(path, kind, threads, each_s))
    return Rates(threads=threads, **rates)


def _with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The input `w` becomes a constant: those are laid out for the kernels beforehand, as weights of models are."""
    (w,) = [value for value in model.graph.input if value.name == "w"]
    model.graph.input.remove(w)
    shape = [dim.dim_value for dim in w.type.tensor_type.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(w.type.tensor_type.elem_type)
    model.graph.initializer.append(onnx.numpy_helper.from_array(_values(shape, dtype), "w"))
    return model


def _values(shape: list[int], dtype: np.dtype[np.generic]) -> Array:
    values = np.random.default_rng(0).integers(0, 64, shape)
    return (values / 64).astype(dtype) if dtype == np.float32 else values.astype(dtype)


def _rate(path: Path, kind: str, threads: int, budget_s: float) -> float | None:
    """10⁹ operations a second; None where the runtime has no kernel for it."""
    try:
        segment = OrtEngine().open(path, threads=threads)
        feeds = {
            spec.name: _values([int(dim) for dim in spec.shape], NUMPY_DTYPES[spec.dtype])
            for spec in segment.input_specs
        }
        return _OPERATIONS[kind.partition("_")[0]] / _fastest_s(segment, feeds, budget_s) / 1e9
    except (InvalidModel, EngineFailed):
        return None


def _fastest_s(segment: Segment, feeds: Mapping[str, Array], budget_s: float) -> float:
    """The best run of those that fit, two at least: everything else that a machine does only adds time."""
    segment.run(feeds)
    end_at_s, best_s = time.perf_counter() + budget_s, math.inf
    while True:
        started_s = time.perf_counter()
        segment.run(feeds)
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - started_s)
        if now_s >= end_at_s:
            return best_s
