"""The canvas of the plots: values become pixels, sizes become words."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from agent.commands.chart import Canvas, Panel, decades, size_text, steps


def panel(*, y_log: bool) -> Panel:
    return Panel(left=100, top=50, right=300, bottom=250, x_range=(0, 10), y_range=(1, 10_000), y_log=y_log)


@pytest.mark.parametrize(("value", "x"), [(0, 100), (5, 200), (10, 300), (-1, 100), (11, 300)])
def test_a_value_lies_between_the_edges_in_proportion_and_never_outside(value: float, x: float) -> None:
    assert panel(y_log=False).x(value) == x


@pytest.mark.parametrize(("value", "y"), [(1, 250), (10, 200), (100, 150), (10_000, 50), (0, 250), (10**6, 50)])
def test_a_logarithmic_axis_gives_each_decade_the_same_room(value: float, y: float) -> None:
    assert panel(y_log=True).y(value) == pytest.approx(y)


def test_an_axis_of_no_length_is_no_division_by_zero() -> None:
    flat = Panel(left=0, top=0, right=9, bottom=9, x_range=(3, 3), y_range=(5, 5), y_log=True)
    assert (flat.x(3), flat.y(5)) == (0, 9)


@pytest.mark.parametrize(
    ("low", "high", "around"), [(5, 5000, (1, 10_000)), (10, 100, (10, 1000)), (999, 1001, (100, 10_000))]
)
def test_decades_leave_room_above_the_biggest(low: float, high: float, around: tuple[float, float]) -> None:
    assert decades(low, high) == around


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1000, "1 KB"),
        (999.6, "1.0 KB"),
        (12_800, "12.8 KB"),
        (99_960, "100 KB"),
        (602_112, "602 KB"),
        (1_605_632, "1.6 MB"),
        (2e9, "2 GB"),
    ],
)
def test_sizes_are_told_in_three_figures_at_most(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("high", "expected"), [(94, [*range(0, 91, 10)]), (3, [0, 1, 2, 3]), (1051, [*range(0, 1001, 200)]), (0, [0])]
)
def test_ticks_are_round_numbers(high: int, expected: list[int]) -> None:
    assert steps(high, 10) == expected


def test_what_is_drawn_is_where_it_was_asked_for(tmp_path: Path) -> None:
    canvas = Canvas(60, 40)
    canvas.area([(10, 10), (30, 10), (30, 30), (10, 30)], "#ff0000")
    canvas.dot((45, 20), 5, "#0000ff")
    canvas.line([(0, 38), (60, 38)], "#00ff00", 3, dash=10)
    canvas.save(tmp_path / "drawn.png")
    with Image.open(tmp_path / "drawn.png") as picture:
        assert picture.size == (60, 40)
        at = {place: picture.getpixel(place) for place in ((20, 20), (45, 20), (5, 38), (15, 38), (55, 5))}
    assert at == {
        (20, 20): (255, 0, 0),
        (45, 20): (0, 0, 255),
        (5, 38): (0, 255, 0),
        (15, 38): (255, 255, 255),
        (55, 5): (255, 255, 255),
    }


def test_upright_text_is_taller_than_wide(tmp_path: Path) -> None:
    canvas = Canvas(100, 100)
    canvas.upright_text((50, 50), "bytes that travel", size=10, colour="#000000")
    canvas.save(tmp_path / "upright.png")
    with Image.open(tmp_path / "upright.png") as picture:
        box = picture.convert("L").point(lambda light: 255 * (light < 128)).getbbox()
    assert box is not None
    left, top, right, bottom = box
    assert bottom - top > 4 * (right - left)
    assert abs((left + right) / 2 - 50) < 3
    assert abs((top + bottom) / 2 - 50) < 3
