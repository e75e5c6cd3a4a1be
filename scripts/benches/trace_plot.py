"""The picture of `trace --plot`: latency over time on each trace, ours, the two-way rule, and the best there was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.commands.chart import GRID, INK, MUTED, Canvas, Panel

if TYPE_CHECKING:
    from scripts.benches.trace import Ran

WIDTH, HIGH, LEFT, TOP, GAP = 980, 150, 70, 60, 46
COLOURS: Final = {"ours": "#1f6feb", "two-way rule": "#c23b22"}
BEST_COLOUR: Final = "#6b7280"
MS_MIN, MS_MAX = 10.0, 420.0


def draw(ran: Sequence[Ran], path: Path) -> None:
    """A panel a trace, one above the other. OSError when the file cannot be written."""
    names = list(dict.fromkeys(one.trace for one in ran))
    canvas = Canvas(WIDTH, TOP + len(names) * (HIGH + GAP) + 10)
    canvas.text((LEFT, 26), "what a caller waits while link and load change", size=17, anchor="ls")
    x = LEFT + 430.0
    for label, colour in (*COLOURS.items(), ("best plan, replayed", BEST_COLOUR)):
        canvas.line([(x, 21), (x + 24, 21)], colour, width=2.2)
        canvas.text((x + 30, 21), label, size=12, colour=INK)
        x += 50 + canvas.text_width(label, 12)
    for number, name in enumerate(names):
        _panel(canvas, TOP + number * (HIGH + GAP), name, [one for one in ran if one.trace == name])
    canvas.save(path)


def _panel(canvas: Canvas, top: float, name: str, ran: Sequence[Ran]) -> None:
    ends_s = max(one.asked[-1].at_s for one in ran)
    low = 10.0
    panel = Panel(
        left=LEFT,
        top=top,
        right=WIDTH - 20,
        bottom=top + HIGH,
        x_range=(0.0, ends_s),
        y_range=(low, MS_MAX),
        y_log=True,
    )
    for ms in (10, 20, 50, 100, 200, 400):
        canvas.line([(panel.left, panel.y(ms)), (panel.right, panel.y(ms))], GRID, width=1)
        canvas.text((panel.left - 8, panel.y(ms)), f"{ms}", size=11, colour=MUTED, anchor="rm")
    canvas.text((panel.left, top - 9), f"{name}, ms over s", size=12.5, anchor="ls")
    for second in range(0, int(ends_s) + 1, 5):
        canvas.text((panel.x(second), panel.bottom + 12), str(second), size=11, colour=MUTED, anchor="mm")
    for one in sorted(ran, key=lambda one: one.policy == "ours"):
        line = [(panel.x(asked.at_s), panel.y(asked.took_ms)) for asked in one.asked]
        canvas.line(line, COLOURS[one.policy], width=1.4)
    ours = next(one for one in ran if one.policy == "ours")
    best = [(panel.x(asked.at_s), panel.y(ms)) for asked, ms in zip(ours.asked, ours.best_ms, strict=True)]
    canvas.line(best, BEST_COLOUR, width=1.2, dash=4)
