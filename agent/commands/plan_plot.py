"""The picture of `isthmus plan --plot`: one bar a plan, its stages one after the other; the chosen plan on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent.commands.chart import GRID, INK, MUTED, Canvas, Panel, steps
from split.plan.plan import PlanEstimate

SHOWN_MAX: Final = 20
WIDTH: Final = 1000
ROW: Final = 26
TOP: Final = 96
BOTTOM: Final = 48

_NAMES: Final = 250
"""Room for the plans' names and, at the right, for their times and why they may not be chosen."""
_COLOURS: Final = (
    "#1d5c8f",
    "#d9622b",
    "#7a9e7e",
    "#b02a4c",
    "#c9a227",
    "#7b3f98",
    "#4fa3a5",
    "#8d6e63",
    "#5c6bc0",
    "#a3b18a",
)


def draw(plans: Sequence[PlanEstimate], title: str, path: Path) -> None:
    """Draw up to `SHOWN_MAX` plans in the order given; OSError when the file cannot be written."""
    shown = plans[:SHOWN_MAX]
    canvas = Canvas(WIDTH, TOP + ROW * len(shown) + BOTTOM)
    longest = max(plan.predicted_ms for plan in shown)
    bars = Panel(
        left=_NAMES,
        top=TOP,
        right=WIDTH - 130,
        bottom=TOP + ROW * len(shown),
        x_range=(0.0, longest),
        y_range=(0.0, float(len(shown))),
    )
    stages = [stage for stage in shown[0].stages_ms if any(plan.stages_ms[stage] > 0.0 for plan in shown)]
    colours = {stage: _COLOURS[at % len(_COLOURS)] for at, stage in enumerate(stages)}
    canvas.text((20, 30), title, size=17, anchor="ls")
    _legend(canvas, colours)
    _scale(canvas, bars, longest)
    for row, plan in enumerate(shown):
        _bar(canvas, bars, TOP + ROW * row, plan, colours)
    if len(plans) > len(shown):
        canvas.text(
            (20, canvas.height - 14), f"{len(plans) - len(shown)} more plans", size=11, colour=MUTED, anchor="ls"
        )
    canvas.save(path)


def _bar(canvas: Canvas, bars: Panel, top: float, plan: PlanEstimate, colours: dict[str, str]) -> None:
    ink = INK if plan.allowed else MUTED
    middle = top + ROW / 2
    canvas.text((bars.left - 10, middle), str(plan.plan), size=11.5, colour=ink, anchor="rm")
    done = 0.0
    for stage, colour in colours.items():
        begin, done = done, done + plan.stages_ms[stage]
        left, right = bars.x(begin), bars.x(done)
        if right > left:
            box = [(left, top + 5), (right, top + 5), (right, top + ROW - 5), (left, top + ROW - 5)]
            canvas.area(box, colour if plan.allowed else _pale(colour))
    said = f"{plan.predicted_ms:.1f} ms" + ("" if plan.allowed else ", not allowed")
    canvas.text((bars.x(done) + 6, middle), said, size=11, colour=ink)


def _scale(canvas: Canvas, bars: Panel, longest: float) -> None:
    """Upright lines at round times; for plans below some milliseconds the bars' own figures are scale enough."""
    for at in steps(int(longest), 8) if longest >= 4 else [0]:
        x = bars.x(at)
        canvas.line([(x, bars.top), (x, bars.bottom)], GRID, 1.0)
        canvas.text((x, bars.bottom + 8), str(at), size=11, colour=MUTED, anchor="ma")
    canvas.text(((bars.left + bars.right) / 2, bars.bottom + 38), "predicted ms", size=12, anchor="ms")


def _legend(canvas: Canvas, colours: dict[str, str]) -> None:
    x, y = 20.0, 60.0
    for stage, colour in colours.items():
        width = canvas.text_width(stage, 11.5) + 34
        if x + width > WIDTH - 20:
            x, y = 20.0, y + 18
        canvas.area([(x, y - 6), (x + 12, y - 6), (x + 12, y + 6), (x, y + 6)], colour)
        canvas.text((x + 17, y), stage, size=11.5, colour=MUTED)
        x += width


def _pale(colour: str) -> str:
    """Two thirds of the way to paper."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"#{(red + 510) // 3:02x}{(green + 510) // 3:02x}{(blue + 510) // 3:02x}"
