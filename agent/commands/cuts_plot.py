"""The picture of `isthmus cuts --plot`: what would travel along the model, against what the input itself weighs.

Above, on a logarithmic axis: the boundary after each node (uncoded), the candidates as raw and int8, and the input's
own sizes as levels. A split can pay where a candidate lies below the level at which the input would travel, and only if
enough of the compute is still to its right: below, the share of the compute in the head. A model that was calibrated
shows what its cuts, and the input as a picture, take inside the same bound of fidelity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.commands.chart import GRID, INK, MUTED, Canvas, Panel, decades, size_text, steps

WIDTH: Final = 1000
HEIGHT: Final = 600

_OUTLINE: Final = "#9db4c8"
_FILL: Final = "#eef3f7"
_RAW: Final = "#1d5c8f"
_INT8: Final = "#d9622b"
_CODED: Final = "#2f8f5b"
_SHARE: Final = "#7a9e7e"
_SHARE_FILL: Final = "#e3eee3"
_LEVELS: Final = ("#30363d", "#7b3f98", "#b02a4c", "#c99a2e")
_LABEL_GAP: Final = 13.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One way in which the input itself could travel."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A calibrated cut inside the contract's bound of fidelity."""

    nodes: int
    """In the head."""
    share: float | None
    """Of the compute, where it is one of the candidates."""
    size: float
    """Mean bytes of its payload."""


def draw(
    found: Mapping[str, Any],
    title: str,
    levels: Sequence[Level],
    note: str,
    path: Path,
    *,
    coded: Sequence[Coded] = (),
) -> None:
    """Draw what `split.workbench.cut.list_cuts` found; `note` goes into a corner. OSError when it cannot be written.

    `coded`: what the model's calibration says, where it has one; `levels` are then those inside the same bound.
    """
    canvas = Canvas(WIDTH, HEIGHT)
    cuts, along = found["cuts"], found["along"]
    nodes = int(found["nodes"])
    sizes = [size for *_, size in along] + [cut["bytes"]["int8"] for cut in cuts] + [level.size for level in levels]
    sizes += [round(one.size) for one in coded]
    low, high = decades(max(min(sizes), 1), max(sizes))
    above = Panel(left=78, top=84, right=WIDTH - 150, bottom=430, x_range=(0, nodes), y_range=(low, high), y_log=True)
    below = Panel(left=78, top=462, right=WIDTH - 150, bottom=546, x_range=(0, nodes), y_range=(0, 1))

    canvas.text((above.left, 28), title, size=19, anchor="ls")
    canvas.text((WIDTH - 12, HEIGHT - 12), note, size=10.5, colour=MUTED, anchor="rs")
    said = coded_verdict(coded, levels) if coded else verdict(cuts, levels)
    canvas.text((above.left, 50), said, size=12.5, colour=MUTED, anchor="ls")
    _grid(canvas, above, below, nodes)
    _outline(canvas, above, below, along)
    _levels(canvas, above, levels)
    for cut in cuts:
        x = above.x(cut["nodes"])
        raw, int8 = (above.y(cut["bytes"][codec]) for codec in ("raw", "int8"))
        canvas.line([(x, raw), (x, int8)], "#c9ced4", 1.2)
        canvas.line([(x, below.top), (x, below.bottom)], "#c9ced4", 1.0)
        canvas.dot((x, raw), 4.2, _RAW)
        canvas.dot((x, int8), 4.2, _INT8)
        canvas.dot((x, below.y(cut["compute_share"])), 3.4, INK)
    for one in coded:
        canvas.dot((above.x(one.nodes), above.y(one.size)), 5.0, _CODED)
    _names(canvas, above, below, cuts)
    _legend(canvas, above, calibrated=bool(coded))
    canvas.save(path)


def verdict(cuts: Sequence[Mapping[str, Any]], levels: Sequence[Level]) -> str:
    """From which share of the compute on an int8 cut sends less than the input, for each way the input could travel."""
    parts: list[str] = []
    for level in levels:
        smaller = [cut["compute_share"] for cut in cuts if cut["bytes"]["int8"] < level.size]
        share = min(smaller, default=0.0)
        of = "" if parts else " of the compute"
        where = f"from {share:.1%}{of}" if 0 < share < 0.01 else f"from {share:.0%}{of}"
        parts.append(f"{'its' if parts else 'the input as'} {level.name} {where if smaller else 'nowhere'}")
    return f"Sent as int8, a cut beats {', '.join(parts)}"


def coded_verdict(coded: Sequence[Coded], levels: Sequence[Level]) -> str:
    """The cheapest calibrated cut against the cheapest way in which the input itself could travel."""
    best, rival = min(coded, key=lambda one: one.size), min(levels, key=lambda level: level.size)
    smaller = sum(one.size < rival.size for one in coded)
    share = "" if best.share is None else f" ({best.share:.0%} of the compute)"
    return (
        f"Calibrated, {smaller} of {len(coded)} cuts send less than its {rival.name}; the smallest{share} "
        f"{size_text(best.size)} against {size_text(rival.size)}"
    )


def _grid(canvas: Canvas, above: Panel, below: Panel, nodes: int) -> None:
    decade = above.y_range[0]
    while decade <= above.y_range[1] * 1.001:
        y = above.y(decade)
        canvas.line([(above.left, y), (above.right, y)], GRID, 1.0)
        canvas.text((above.left - 8, y), size_text(decade), size=11.5, colour=MUTED, anchor="rm")
        decade *= 10
    for share in (0.0, 0.5, 1.0):
        y = below.y(share)
        canvas.line([(below.left, y), (below.right, y)], GRID, 1.0)
        canvas.text((below.left - 8, y), f"{share:.0%}", size=11.5, colour=MUTED, anchor="rm")
    for at in steps(nodes, 10):
        canvas.text((below.x(at), below.bottom + 8), str(at), size=11.5, colour=MUTED, anchor="ma")
    middle = (below.left + below.right) / 2
    canvas.text((middle, HEIGHT - 12), "nodes on the device", size=12.5, anchor="ms")
    canvas.upright_text((17, (above.top + above.bottom) / 2), "bytes that travel", size=12.5)
    canvas.upright_text((17, (below.top + below.bottom) / 2), "compute", size=12.5)


def _outline(canvas: Canvas, above: Panel, below: Panel, along: Sequence[Sequence[float]]) -> None:
    """Steps: what is live after a node stays so until the next one has run."""
    if not along:
        return
    for panel, column, fill, colour in ((above, 2, _FILL, _OUTLINE), (below, 1, _SHARE_FILL, _SHARE)):
        points: list[tuple[float, float]] = []
        for place, following in zip(along, [*along[1:], (along[-1][0] + 1, 0, 0)], strict=True):
            y = panel.y(place[column])
            points += [(panel.x(place[0]), y), (panel.x(following[0]), y)]
        canvas.area([(points[0][0], panel.bottom), *points, (points[-1][0], panel.bottom)], fill)
        canvas.line(points, colour, 1.4)


def _levels(canvas: Canvas, panel: Panel, levels: Sequence[Level]) -> None:
    """Dashed, named at the right; names that would meet are moved apart."""
    ordered = sorted(zip(levels, _LEVELS, strict=False), key=lambda level: -level[0].size)
    free = panel.top - _LABEL_GAP
    for level, colour in ordered:
        y = panel.y(level.size)
        canvas.line([(panel.left, y), (panel.right, y)], colour, 1.3, dash=6)
        at = max(y, free + 2 * _LABEL_GAP)
        canvas.text((panel.right + 8, at - 6), f"input {level.name}", size=12, colour=colour)
        canvas.text((panel.right + 8, at + 8), size_text(level.size), size=12, colour=colour)
        free = at + 4


def _names(canvas: Canvas, above: Panel, below: Panel, cuts: Sequence[Mapping[str, Any]]) -> None:
    """The first half of each cut's id between the panels, where there is room for it."""
    free = 0.0
    for cut in cuts:
        x, text = above.x(cut["nodes"]), str(cut["id"])[:6]
        width = canvas.text_width(text, 10)
        if x - width / 2 >= free:
            canvas.text((x, (above.bottom + below.top) / 2), text, size=10, colour=MUTED, anchor="mm")
            free = x + width / 2 + 4


def _legend(canvas: Canvas, panel: Panel, *, calibrated: bool) -> None:
    y = panel.top - 14
    x = panel.left
    for colour, text in (
        (_RAW, "candidate cut, raw"),
        (_INT8, "candidate cut, int8"),
        *(((_CODED, "calibrated cut, klt"),) if calibrated else ()),
        (None, "boundary after each node, raw"),
    ):
        if colour is None:
            canvas.line([(x - 5, y), (x + 7, y)], _OUTLINE, 2.0)
        else:
            canvas.dot((x + 1, y), 4.2, colour)
        canvas.text((x + 12, y), text, size=11.5, colour=MUTED)
        x += canvas.text_width(text, 11.5) + 40
