"""The picture of `isthmus audit --plot`: latency over time, as it was and as it would have been."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from agent.commands.chart import GRID, MUTED, Canvas, Panel, decades
from agent.replay.recording import Recording
from agent.replay.tally import quantile
from split.plan.observation import Floats

WIDTH: Final = 1100
HEIGHT: Final = 520
BINS: Final = 200
"""Points of a line: each the median of its share of the time."""
SHOWN: Final = {
    "as it was": "#66727f",
    "do nothing": "#d9622b",
    "isthmus": "#1d5c8f",
    "oracle": "#7a9e7e",
}
"""Drawn in this order, those that were replayed."""


def draw(recording: Recording, total_ms: Mapping[str, Floats], path: Path) -> None:
    """Draw the policies of `SHOWN` that are in `total_ms` (a value for each request); OSError when the file cannot be
    written."""
    shown = {name: total_ms[name] for name in SHOWN if name in total_ms}
    at_s = np.array([one.at_s for one in recording.happened])
    lines = {name: _medians(at_s, recording, ms) for name, ms in shown.items()}
    values = [ms for line in lines.values() for _, ms in line]
    low, high = decades(max(min(values), 1e-3), max(values))
    until_s = max(float(at_s[-1]), 1e-3)
    canvas = Canvas(WIDTH, HEIGHT)
    panel = Panel(
        left=80, top=80, right=WIDTH - 30, bottom=HEIGHT - 60, x_range=(0.0, until_s), y_range=(low, high), y_log=True
    )
    canvas.text((20, 30), "latency over time (medians)", size=17, anchor="ls")
    _axes(canvas, panel, None if recording.gaps else recording.zero_s, until_s)
    x = 20.0
    for name, line in lines.items():
        canvas.line([(panel.x(at), panel.y(ms)) for at, ms in line], SHOWN[name], 1.6)
        if len(line) == 1:
            canvas.dot((panel.x(line[0][0]), panel.y(line[0][1])), 3.0, SHOWN[name])
        canvas.line([(x, 58), (x + 22, 58)], SHOWN[name], 3.0)
        canvas.text((x + 28, 58), name, size=12, colour=MUTED)
        x += canvas.text_width(name, 12) + 60
    canvas.save(path)


def _medians(at_s: Floats, recording: Recording, total_ms: Floats) -> list[tuple[float, float]]:
    """(Middle of the span, median ms) of each span that has requests."""
    weights = recording.weights
    width_s = max(float(at_s[-1]), 1e-3) / BINS
    places = np.minimum((at_s / width_s).astype(int), BINS - 1)
    return [
        ((place + 0.5) * width_s, quantile(total_ms[places == place], weights[places == place], 0.5))
        for place in sorted(set(places.tolist()))
    ]


def _axes(canvas: Canvas, panel: Panel, zero_s: float | None, until_s: float) -> None:
    """`zero_s`: wall clock at 0, None where there is no one clock."""
    low, high = panel.y_range
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = panel.y(10.0**power)
        canvas.line([(panel.left, y), (panel.right, y)], GRID, 1.0)
        canvas.text((panel.left - 10, y), f"{10.0**power:g}", size=11, colour=MUTED, anchor="rm")
    canvas.upright_text((24, (panel.top + panel.bottom) / 2), "ms")
    form = "%H:%M" if until_s > 600 else "%H:%M:%S"
    for n in range(7):
        at_s = until_s * n / 6
        x = panel.x(at_s)
        canvas.line([(x, panel.top), (x, panel.bottom)], GRID, 1.0)
        said = time.strftime(form, time.gmtime((zero_s or 0.0) + at_s))
        canvas.text((x, panel.bottom + 8), said, size=11, colour=MUTED, anchor="ma")
    canvas.text(
        ((panel.left + panel.right) / 2, panel.bottom + 44),
        "time (UTC)" if zero_s is not None else "time, without gaps",
        size=12,
        anchor="ms",
    )
