"""Known answers of integer kernels: what is right by arithmetic, and what a kernel that saturates makes of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

from split.runtime import kernels
from split.runtime.kernels import kernel_answers, kernels_differ

TEXT = """<ir_version: 8, opset_import: ["" : 13]>
kernels (uint8[1, 64] a, int8[64, 8] b)
    => (int32[1, 8] m, int32[1, 8] n, uint8[1, 8] q, uint8[1, 8, 1, 1] c, int8[1, 8, 1, 1] d)
<float one = {1}, float step = {16192.5}, uint8 u = {0}, int8 s = {0},
 int64[4] pixel = {1, 64, 1, 1}, int64[4] taps = {8, 64, 1, 1}, int64[2] square = {64, 8}>
{
  w = ConstantOfShape<value = int8[1] {127}>(square)
  k = ConstantOfShape<value = int8[1] {127}>(taps)
  m = MatMulInteger(a, b)
  n = MatMulInteger(a, w)
  q = QLinearMatMul(a, one, u, w, one, s, step, u)
  x = Reshape(a, pixel)
  c = QLinearConv(x, one, u, k, one, s, step, u)
  y = ConstantOfShape<value = int8[1] {127}>(pixel)
  d = QLinearConv(y, one, s, k, one, s, step, s)
}"""


def saturating(a: int, b: int, count: int) -> int:
    """As vpmaddubsw and vpaddd do it: pairs of products are added in 16 bits, the pairs in 32."""
    return int(np.clip(2 * a * b, -(2**15), 2**15 - 1)) * (count // 2)


def test_the_built_in_model_is_the_one_written_here() -> None:
    assert onnx.load_from_string(kernels._MODEL) == onnx.parser.parse_model(TEXT)


def test_the_answers_are_those_of_arithmetic_or_of_a_kernel_that_saturates() -> None:
    answers = kernel_answers()
    right, saturated = 255 * 127 * 64, saturating(255, 127, 64)
    assert (right, saturated) == (2_072_640, 1_048_544)
    for name in ("MatMulInteger", "MatMulInteger, constant"):
        assert answers[name] in {right, saturated}
    for name in ("QLinearMatMul", "QLinearConv"):
        assert answers[name] in {round(right / 16192.5), round(saturated / 16192.5)}
    assert answers["QLinearConv, int8"] == round(127 * 127 * 64 / 16192.5)
    assert kernels_differ(answers, dict(answers)) is None


def test_the_first_difference_is_told_with_both_answers() -> None:
    ours = {"MatMulInteger": 2_072_640, "QLinearConv": 128}
    assert kernels_differ({"MatMulInteger": 1_048_544, "QLinearConv": 65}, ours) == (
        "its MatMulInteger answers 1,048,544 where this device's answers 2,072,640"
    )
    assert kernels_differ({"MatMulInteger": 2_072_640}, ours) == "it does not tell what its QLinearConv answers"
