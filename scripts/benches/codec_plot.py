"""The picture of `codec --plot`: bytes against fidelity, ours and the picture's own codecs, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.commands.chart import GRID, INK, MUTED, Canvas, Panel, size_text
from scripts.benches.codec_curves import Curve

WIDTH, HEIGHT = 900, 560
COLOURS: Final = {"jpeg": "#30363d", "jpeg 4:4:4": "#8a929b", "webp": "#7b3f98", "avif": "#b02a4c"}
OURS: Final = ("#1d5c8f", "#4a8fc0", "#7a9e7e", "#d9622b", "#c99a2e", "#66727f")
"""In the order of the cuts, the cheapest first."""
MARGIN: Final = 1.15


def draw(curves: Mapping[str, Curve], title: str, measure: str, levels: Mapping[str, float], path: Path) -> None:
    """`curves`: name → curve, names of `COLOURS` for the picture's own codecs. `levels`: what a horizontal line is
    called → its value of the measure. OSError when the file cannot be written."""
    shown = {name: curve for name, curve in curves.items() if curve.bytes and curve.fidelity[-1] > 0}
    sizes = [size for curve in shown.values() for size in curve.bytes]
    off = [value for curve in shown.values() for value in curve.fidelity] + list(levels.values())
    canvas = Canvas(WIDTH, HEIGHT)
    panel = Panel(
        left=78,
        top=52,
        right=WIDTH - 190,
        bottom=HEIGHT - 60,
        x_range=(min(sizes) / MARGIN, max(sizes) * MARGIN),
        y_range=(min(off) / MARGIN, max(off) * MARGIN),
        x_log=True,
        y_log=True,
    )
    canvas.text((panel.left, 28), title, size=17, anchor="ls")
    _grid(canvas, panel, measure)
    for name, value in levels.items():
        y = panel.y(value)
        canvas.line([(panel.left, y), (panel.right, y)], MUTED, 1.0, dash=5)
        canvas.text((panel.left + 4, y - 8), name, size=11, colour=MUTED, anchor="lm")
    ours = iter(OURS)
    for place, (name, curve) in enumerate(shown.items()):
        colour = COLOURS.get(name) or next(ours, INK)
        points = [(panel.x(size), panel.y(value)) for size, value in zip(curve.bytes, curve.fidelity, strict=True)]
        if len(points) > 1:
            canvas.line(points, colour, 2.4 if place == 0 else 1.6)
        for point in points:
            canvas.dot(point, 3.0, colour)
        y = 66 + 20 * place
        canvas.dot((panel.right + 18, y), 4.0, colour)
        canvas.text((panel.right + 30, y), name, size=12)
    canvas.save(path)


def _grid(canvas: Canvas, panel: Panel, measure: str) -> None:
    for at in _round(*panel.x_range):
        canvas.line([(panel.x(at), panel.top), (panel.x(at), panel.bottom)], GRID, 1.0)
        canvas.text((panel.x(at), panel.bottom + 8), size_text(at), size=11, colour=MUTED, anchor="ma")
    for at in _round(*panel.y_range):
        canvas.line([(panel.left, panel.y(at)), (panel.right, panel.y(at))], GRID, 1.0)
        canvas.text((panel.left - 8, panel.y(at)), f"{at:g}", size=11, colour=MUTED, anchor="rm")
    canvas.text(((panel.left + panel.right) / 2, HEIGHT - 16), "bytes per request, mean", size=12, anchor="ms")
    canvas.upright_text((18, (panel.top + panel.bottom) / 2), f"{measure} against the unsplit model, mean", size=12)


def _round(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [at for power in decades for lead in (1, 2, 5) if low <= (at := lead * 10.0**power) <= high]
