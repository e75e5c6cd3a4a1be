"""What this machine's integer kernels answer to sums that not all of them can hold.

An x86 without VNNI multiplies uint8 by int8 and adds two products in 16 bits, which saturates: 64 × 255 × 127 becomes
1,048,544 there and 2,072,640 elsewhere. Golden inputs need not show it, since it takes large neighbours in activations
*and* weights; a known answer does. The companion tells its answers in `Hello`; where the device's own are others, no
model that computes in integers is shared (`agent/openings.py`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from split.runtime.segment import runtime

_MODEL: Final = base64.b64decode(
    "CAg6pQUKNQoGc3F1YXJlEgF3Ig9Db25zdGFudE9mU2hhcGUqFQoFdmFsdWUqCQgBEAMqAX9CAKABBDoACjMKBHRhcHMSAWsiD0Nv"
    "bnN0YW50T2ZTaGFwZSoVCgV2YWx1ZSoJCAEQAyoBf0IAoAEEOgAKGgoBYQoBYhIBbSINTWF0TXVsSW50ZWdlcjoAChoKAWEKAXcS"
    "AW4iDU1hdE11bEludGVnZXI6AAozCgFhCgNvbmUKAXUKAXcKA29uZQoBcwoEc3RlcAoBdRIBcSINUUxpbmVhck1hdE11bDoAChgK"
    "AWEKBXBpeGVsEgF4IgdSZXNoYXBlOgAKMQoBeAoDb25lCgF1CgFrCgNvbmUKAXMKBHN0ZXAKAXUSAWMiC1FMaW5lYXJDb252OgAK"
    "NAoFcGl4ZWwSAXkiD0NvbnN0YW50T2ZTaGFwZSoVCgV2YWx1ZSoJCAEQAyoBf0IAoAEEOgAKMQoBeQoDb25lCgFzCgFrCgNvbmUK"
    "AXMKBHN0ZXAKAXMSAWQiC1FMaW5lYXJDb252OgASB2tlcm5lbHMqDRABIgQAAIA/QgNvbmUqDhABIgQAAn1GQgRzdGVwKggQAioB"
    "AEIBdSoIEAMqAQBCAXMqEQgEEAc6BAFAAQFCBXBpeGVsKhAIBBAHOgQIQAEBQgR0YXBzKhAIAhAHOgJACEIGc3F1YXJlWhMKAWES"
    "DgoMCAISCAoCCAEKAghAWhMKAWISDgoMCAMSCAoCCEAKAggIYhMKAW0SDgoMCAYSCAoCCAEKAggIYhMKAW4SDgoMCAYSCAoCCAEK"
    "AggIYhMKAXESDgoMCAISCAoCCAEKAggIYhsKAWMSFgoUCAISEAoCCAEKAggICgIIAQoCCAFiGwoBZBIWChQIAxIQCgIIAQoCCAgK"
    "AggBCgIIAUIECgAQDQ=="
)
"""Opset 13; the test of this module has its text. 64 products of 255 (or 127) and 127 a sum, 8 sums an output: a uint8
row times an int8 matrix that comes as an input, the same with one that is a constant, the latter requantised in steps
of 16,192.5, the same as a convolution, and one of int8 by int8."""
_OPERATORS: Final = ("MatMulInteger", "MatMulInteger, constant", "QLinearMatMul", "QLinearConv", "QLinearConv, int8")


@cache
def kernel_answers() -> dict[str, int]:
    """Operator → what its kernel answers here; computed once, in a few milliseconds (blocking)."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session: Any = ort.InferenceSession(_MODEL, options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"a": np.full((1, 64), 255, np.uint8), "b": np.full((64, 8), 127, np.int8)})
    return {name: int(output.reshape(-1)[0]) for name, output in zip(_OPERATORS, outputs, strict=True)}


def kernels_differ(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str | None:
    """Why two sides do not compute integers alike, as the end of a sentence; None when they do."""
    for name, answer in ours.items():
        if name not in theirs:
            return f"it does not tell what its {name} answers"
        if theirs[name] != answer:
            return f"its {name} answers {theirs[name]:,} where this device's answers {answer:,}"
    return None
