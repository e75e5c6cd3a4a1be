"""Makes klt_golden.json, the committed bits of codec klt, when the format changes: `python -m tests.split.klt_vectors`.

By the fallback; every implementation must give and read them (test_codec_klt_stream.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from split.codec.calibration import Klt
from split.codec.fallback import Fallback
from split.codec.transform import level_of
from tests.split.klt_world import DIGEST

FILE: Final = Path(__file__).with_name("klt_golden.json")
PAYLOAD_FILE: Final = FILE.with_name("klt_golden_payload.json")
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


def payload() -> dict[str, Any]:
    """A whole one: a map of two images with open batch, and a mask; its values by cosines in double precision."""
    scales = np.array(falling(3, 2, 2, 150, 4), np.uint8)
    mean = [0.5, -1.0, 2.0]
    klt = replace(klt_with(scales), layout="NHWC", mean=np.array(mean, np.float32))
    level = level_of(klt, 128)
    q = np.random.default_rng(9).integers(-4, 5, (4, 2 * 2 * 2, 3)).astype(np.int32)
    stream = Fallback().pack(level.full, q)
    assert len(stream) < 128, "one byte says so"
    entry = bytes([3, 2, len(stream)])
    # 390 bytes decoded: 4 · 96 coefficients, which are more than the 72 values, and 6 of the mask
    data = b"ISTK" + bytes([1, 128]) + bytes.fromhex(DIGEST[:16]) + bytes([0x86, 0x03]) + entry + bytes([0, 6])
    values = np.sign(q) * (np.abs(q) + level.bias[:, None].astype(float)) * (q != 0)  # [uv, blocks, components]
    half = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    pixels = np.einsum("ur,vs,uvnyxc->nyrxsc", half, half, values.reshape(2, 2, 2, 2, 2, 3)).reshape(2, 4, 4, 3)
    x = (pixels[:, :3] + mean).round(7)
    mask = [[True, False, False], [True, True, False]]
    return {
        "scales": scales.tolist(),
        "mean": mean,
        "mask": mask,
        "x": x.tolist(),
        "payload": (data + stream + np.array(mask).tobytes()).hex(),
    }


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(vector, separators=(",", ":")) for vector in vectors())
    FILE.write_text(f"[\n{lines}\n]\n")
    PAYLOAD_FILE.write_text(json.dumps(payload(), separators=(",", ":")) + "\n")
