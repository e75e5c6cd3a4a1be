"""A companion that is right on golden inputs and a tenth off on large ones: `isthmus-cloud` with its kernels replaced;
the arguments are the program's own command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from cloud.cli import run
from split.runtime.segment import OrtSegment
from split.tensor import Tensors

LARGE = 50.0
"""No golden input has an element beyond it."""


def drift() -> None:
    """Let what gets a large input answer a tenth less."""
    right = OrtSegment.run

    def otherwise(self: OrtSegment, feeds: Tensors, outputs: Sequence[str] | None = None) -> Tensors:
        made = right(self, feeds, outputs)
        if not any(array.dtype.kind == "f" and np.abs(array).max() > LARGE for array in feeds.values()):
            return made
        return {name: array * array.dtype.type(0.9) for name, array in made.items()}

    OrtSegment.run = otherwise  # type: ignore[method-assign, assignment]  # the purpose of this program


if __name__ == "__main__":
    drift()
    sys.exit(run(sys.argv[1:]))
