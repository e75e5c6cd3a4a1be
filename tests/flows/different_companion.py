"""A companion that computes integers otherwise than this machine, as an x86 without VNNI does: `isthmus-cloud` with its
kernels replaced. The first argument says how it is known: `answers` (it says so itself) or `golden` (it says nothing,
and only what models answer shows it); the rest is the program's own command line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import cloud.daemon
from cloud.cli import run
from split.runtime.kernels import kernel_answers
from split.runtime.segment import OrtSegment
from split.tensor import Array, Tensors

SATURATED = 1_048_544
"""64 × 255 × 127 where two products are added in 16 bits: 32 × 32,767."""
INTEGER_OPERATORS = (b"MatMulInteger", b"ConvInteger", b"QLinear", b"QuantizeLinear", b"DynamicQuantizeMatMul")


def saturate() -> None:
    """Let what computes in integers answer a hundredth less, floats as ever."""
    right = OrtSegment.run

    def otherwise(self: OrtSegment, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> Tensors:
        made = right(self, feeds, outputs)
        graph = self.path.read_bytes()
        if not any(operator in graph for operator in INTEGER_OPERATORS):
            return made
        return {
            name: array * array.dtype.type(0.99) if array.dtype.kind == "f" else array for name, array in made.items()
        }

    OrtSegment.run = otherwise  # type: ignore[method-assign]  # the purpose of this program


if __name__ == "__main__":
    how = sys.argv[1]
    saturate()
    if how == "answers":
        cloud.daemon.kernel_answers = lambda: kernel_answers() | {"MatMulInteger": SATURATED}  # type: ignore[attr-defined]  # as above
    sys.exit(run(sys.argv[2:]))
