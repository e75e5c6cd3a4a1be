"""What codec klt makes of given maps, as digests: one side of `scripts/arm --only codec`, run on both.

    python scripts/codec_bits.py [LIBRARY]

LIBRARY is a compiled core; none: plain Python alone. Prints {core: digest} of tables, coefficients, streams and the map
that is read back: whole numbers and bits that must be the same on every platform, and floats that are, too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from split.codec import laplace
from split.codec.calibration import Klt
from split.codec.core import load
from split.codec.fallback import Fallback
from split.codec.transform import Core, Shape, level_of

SHAPES: Final = (
    Shape(1, 14, 14, 80, 7, 7),
    Shape(1, 9, 5, 70, 8, 8),
    Shape(2, 1, 30, 12, 1, 8),
    Shape(1, 33, 40, 6, 32, 32),
)
LEVELS: Final = (96, 128, 140)


def digest(core: Core) -> str:
    """Over all shapes and levels; values are multiples of 1/64 from a seed, so that both sides have the same."""
    tables = laplace.tables()
    parts = [tables.starts.tobytes(), tables.rounding.tobytes(), tables.bias.tobytes()]
    for shape in SHAPES:
        rng = np.random.default_rng(1)
        values = rng.integers(-1000, 1000, (shape.batch, shape.height, shape.width, shape.components))
        scales = rng.integers(90, 160, (shape.components, shape.rows, shape.columns)).astype(np.uint8)
        unit = np.eye(shape.components, dtype=np.float32)
        klt = Klt(
            layout="NHWC",
            transform=unit,
            inverse=unit.copy(),
            mean=np.zeros(shape.components, np.float32),
            block=(shape.rows, shape.columns),
            scales=scales,
        )
        for index in LEVELS:
            level = level_of(klt, index)
            coefficients, _, unfit = core.forward(shape, level, (values / 64).astype(np.float32))
            stream = core.pack(level.full, coefficients)
            again = core.unpack(level.full, memoryview(stream), shape.blocks)
            assert not unfit
            assert again is not None
            assert np.array_equal(again, coefficients)
            parts += [coefficients.tobytes(), stream, core.inverse(shape, level, again).tobytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def main() -> None:
    cores: dict[str, Core] = {"plain Python": Fallback()}
    for name in sys.argv[1:]:
        found = load(Path(name))
        if isinstance(found, str):
            sys.exit(found)
        cores["compiled"] = found
    print(json.dumps({name: digest(core) for name, core in cores.items()}))


if __name__ == "__main__":
    main()
