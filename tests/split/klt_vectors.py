"""Makes klt_golden.json, the committed bits of codec klt, when the format changes: `python -m tests.split.klt_vectors`.

By the fallback; every implementation must give and read them (test_codec_klt_stream.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from split.codec.calibration import Klt
from split.codec.fallback import Fallback
from split.codec.transform import level_of

FILE: Final = Path(__file__).with_name("klt_golden.json")
EXTREMES: Final = (0, 1, -1, 2, -3, 30, -31, 32, 1000, -4096, 65535, 1 << 20, -(1 << 20))


def made(name: str, scales: list[list[list[int]]], blocks: int, level: int, *, full: bool, seed: int) -> dict[str, Any]:
    """One vector: Laplace values of these scales, rounded; those that are not coded are 0."""
    array = np.array(scales, np.uint8)
    klt = klt_with(array)
    order = level_of(klt, level).full if full else level_of(klt, level).usual
    widths = 2.0 ** ((array.reshape(len(array), -1).T.astype(float) - level) / 8)
    values = np.random.default_rng(seed).laplace(size=(widths.shape[0], blocks, widths.shape[1])) * widths[:, None]
    values = np.where(order.coded[:, None], np.clip(np.rint(values), -(1 << 20), 1 << 20), 0).astype(np.int32)
    if name == "extremes":
        values[:] = np.array(EXTREMES, np.int32)[None, :, None]
    if name == "nothing":
        values[:] = 0
    stream = Fallback().pack(order, values)
    return {
        "name": name,
        "level": level,
        "full": full,
        "scales": scales,
        "coefficients": values.tolist(),
        "stream": stream.hex(),
    }


def klt_with(scales: np.ndarray[Any, Any]) -> Klt:
    """Tables of these scales [components, rows, columns] and no transform across channels."""
    unit = np.eye(len(scales), dtype=np.float32)
    return Klt(
        layout="NCHW",
        transform=unit,
        inverse=unit.copy(),
        mean=np.zeros(len(scales), np.float32),
        block=(scales.shape[1], scales.shape[2]),
        scales=np.ascontiguousarray(scales),
    )


def falling(components: int, rows: int, columns: int, top: int, fall: int) -> list[list[list[int]]]:
    return [
        [[max(top - fall * (c + 2 * u + 2 * v), 1) for v in range(columns)] for u in range(rows)]
        for c in range(components)
    ]


def vectors() -> list[dict[str, Any]]:
    every_table = [[[2 * k + 100 - 23]] for k in range(64)]  # at level 100: table k
    return [
        made("coarse", falling(12, 7, 7, 140, 2), 4, 128, full=False, seed=1),
        made("coarse, full", falling(12, 7, 7, 140, 2), 4, 128, full=True, seed=2),
        made("fine", falling(6, 2, 3, 200, 3), 5, 120, full=False, seed=3),
        made("every table", every_table, 6, 100, full=False, seed=4),
        made("extremes", every_table, len(EXTREMES), 100, full=False, seed=5),
        made("some never", [[[0, 130]], [[130, 0]], [[0, 0]]], 3, 128, full=True, seed=6),
        made("nothing", falling(5, 1, 1, 140, 1), 7, 128, full=False, seed=7),
        made("none coded", [[[1]]], 2, 255, full=False, seed=8),
    ]


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(vector, separators=(",", ":")) for vector in vectors())
    FILE.write_text(f"[\n{lines}\n]\n")
