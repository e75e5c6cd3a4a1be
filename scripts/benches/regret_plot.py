"""The picture of `regret --plot`: a heat map of the regret over links × (device speed, model)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent.commands.chart import INK, MUTED, Canvas
from scripts.benches.regret_cells import LINKS, SLOWDOWNS, SUBJECTS, Cell
from scripts.benches.regret_oracle import Measured

LEFT, TOP = 260, 96
WIDE, HIGH = 118, 26
GAP: Final = 10
"""Between one speed and the next."""
WORST: Final = 1.25
"""From here on a cell is as dark as it gets."""
_BEST, _BAD = (0xE6, 0xF2, 0xEA), (0xC2, 0x3B, 0x22)
_BLANK: Final = "#f4f5f7"


def draw(measured: Sequence[Measured], path: Path) -> None:
    """One box a cell with its regret and the placement that was chosen (`·`: contested); blank where nothing was
    measured, no row at all where nothing was in it. OSError when it cannot be written."""
    found = {one.cell: one for one in measured}
    speeds = [slowdown for slowdown in SLOWDOWNS if any(cell.slowdown == slowdown for cell in found)]
    subjects = [subject for subject in SUBJECTS if any(cell.subject == subject for cell in found)]
    rows = list(itertools.product(speeds, subjects))
    height = TOP + len(rows) * HIGH + (len(speeds) - 1) * GAP + 40
    canvas = Canvas(LEFT + WIDE * len(LINKS) + 20, height)
    canvas.text((LEFT, 28), "latency of the chosen plan / latency of the best plan", size=17, anchor="ls")
    for column, link in enumerate(LINKS):
        rate, _, rest = str(link).partition(", ")
        x = LEFT + (column + 0.5) * WIDE
        canvas.text((x, TOP - 30), rate, size=12, anchor="mm")
        canvas.text((x, TOP - 14), rest, size=11, colour=MUTED, anchor="mm")
    for row, (slowdown, subject) in enumerate(rows):
        top = TOP + row * HIGH + speeds.index(slowdown) * GAP
        label = f"{subject}, {slowdown:g}x"
        canvas.text((LEFT - 10, top + HIGH / 2), label, size=11.5, anchor="rm")
        for column, link in enumerate(LINKS):
            _box(canvas, LEFT + column * WIDE, top, found.get(Cell(subject=subject, link=link, slowdown=slowdown)))
    note = "times slower than this machine; · a second placement within 1.5 times"
    canvas.text((LEFT, height - 16), note, size=11, colour=MUTED, anchor="ls")
    canvas.save(path)


def _box(canvas: Canvas, left: float, top: float, one: Measured | None) -> None:
    right, bottom = left + WIDE - 2, top + HIGH - 2
    fill = _BLANK if one is None else _shade(one.regret)
    canvas.area([(left, top), (right, top), (right, bottom), (left, bottom)], fill)
    if one is not None:
        dot = " ·" if one.contested else ""
        text = f"{one.regret:.2f} {one.chosen.placement}{dot}"
        canvas.text(((left + right) / 2, (top + bottom) / 2), text, size=11, colour=INK, anchor="mm")


def _shade(regret: float) -> str:
    share = min(max((regret - 1) / (WORST - 1), 0.0), 1.0)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(_BEST, _BAD, strict=True))
