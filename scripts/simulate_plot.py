"""Latency over time of a few policies on one trace; below, the link and the load that it saw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agent.commands.chart import GRID, MUTED, Canvas, Panel, steps
from agent.replay.world import Moment, Outcome

WIDTH: Final = 1000
HEIGHT: Final = 560
COLOURS: Final = ("#1d5c8f", "#30363d", "#d9622b", "#7a9e7e", "#7b3f98")
"""In the order of the policies; the second, an oracle's, is drawn first and thin."""
LINK: Final = (
    ("up Mbit/s", "#1d5c8f"),
    ("rtt ms", "#d9622b"),
    ("device load", "#7a9e7e"),
    ("companion load", "#7b3f98"),
)


def draw(lines: Mapping[str, Sequence[Outcome]], trace: Sequence[Moment], title: str, path: Path) -> None:
    """OSError when the file cannot be written."""
    canvas = Canvas(WIDTH, HEIGHT)
    every = [outcome for outcomes in lines.values() for outcome in outcomes]
    until_s = max(max(outcome.arrival.at_s for outcome in every), 1.0)
    low, high = 0.8 * min(one.total_ms for one in every), 1.25 * max(one.total_ms for one in every)
    above = Panel(left=70, top=70, right=WIDTH - 20, bottom=370, x_range=(0, until_s), y_range=(low, high), y_log=True)
    below = Panel(left=70, top=410, right=WIDTH - 20, bottom=510, x_range=(0, until_s), y_range=(0.7, 400), y_log=True)
    canvas.text((above.left, 28), title, size=17, anchor="ls")
    _grid(canvas, above, below, until_s)
    order = sorted(range(len(lines)), key=lambda place: place != 1)
    for place in order:
        outcomes = list(lines.values())[place]
        points = [(above.x(one.arrival.at_s), above.y(one.total_ms)) for one in outcomes]
        if len(points) > 1:
            canvas.line(points, COLOURS[place], 0.9 if place == 1 else 1.5)
    x = above.left
    for place, (name, outcomes) in enumerate(lines.items()):
        mean_ms = sum(one.total_ms for one in outcomes) / len(outcomes)
        text = f"{name}: {mean_ms:.1f} ms"
        canvas.line([(x, 52), (x + 14, 52)], COLOURS[place], 2.0)
        canvas.text((x + 20, 52), text, size=12, colour=MUTED)
        x += canvas.text_width(text, 12) + 48
    _link(canvas, below, trace, until_s)
    canvas.save(path)


def _grid(canvas: Canvas, above: Panel, below: Panel, until_s: float) -> None:
    for panel in (above, below):
        low, high = (math.floor(math.log10(end)) for end in panel.y_range)
        for at in [lead * 10.0**power for power in range(low, high + 1) for lead in (1, 2, 5)]:
            if panel.y_range[0] <= at <= panel.y_range[1] and (panel is above or math.log10(at).is_integer()):
                canvas.line([(panel.left, panel.y(at)), (panel.right, panel.y(at))], GRID, 1.0)
                canvas.text((panel.left - 8, panel.y(at)), f"{at:g}", size=11, colour=MUTED, anchor="rm")
    for at in steps(int(until_s), 12):
        x = below.x(at)
        canvas.line([(x, above.top), (x, below.bottom)], GRID, 1.0)
        canvas.text((x, below.bottom + 6), str(at), size=11, colour=MUTED, anchor="ma")
    canvas.upright_text((16, (above.top + above.bottom) / 2), "latency, ms", size=12)
    canvas.text(((above.left + above.right) / 2, HEIGHT - 8), "seconds", size=12, anchor="ms")


def _link(canvas: Canvas, panel: Panel, trace: Sequence[Moment], until_s: float) -> None:
    x = panel.left
    for name, colour in LINK:
        canvas.line([(x, panel.top - 14), (x + 14, panel.top - 14)], colour, 2.0)
        canvas.text((x + 20, panel.top - 14), name, size=11.5, colour=MUTED)
        x += canvas.text_width(name, 11.5) + 48
    ends = [moment.at_s for moment in trace[1:]] + [until_s]
    for place, (_, colour) in enumerate(LINK):
        points = []
        for moment, end_s in zip(trace, ends, strict=True):
            value = (moment.up_mbit_s, moment.rtt_ms, moment.edge_ratio, moment.cloud_ratio)[place]
            y = panel.y(value if moment.connected or place > 1 else panel.y_range[0])
            points += [(panel.x(moment.at_s), y), (panel.x(end_s), y)]
        canvas.line(points, colour, 1.4)
