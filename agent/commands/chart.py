"""A small canvas for plots on Pillow: drawn three times too large and shrunk, so that lines and letters are smooth.

Not a plotting library: panels with linear or logarithmic axes, and what one draws in them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
Colour = str

_SCALE: Final = 3

INK: Final = "#1f2933"
MUTED: Final = "#66727f"
GRID: Final = "#e4e8ec"
PAPER: Final = "#ffffff"


class Canvas:
    """Pixels with the origin at the top left; colours as `#rrggbb`."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def line(self, points: Sequence[Point], colour: Colour, width: float = 1.5, dash: float = 0.0) -> None:
        """A polyline; with `dash`, pieces and gaps of that many pixels along each straight part."""
        if not dash:
            self._draw.line(self._up(points), fill=colour, width=round(width * _SCALE), joint="curve")
            return
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            length = math.hypot(x1 - x0, y1 - y0)
            at = 0.0
            while at < length:
                a, b = at / length, min(at + dash, length) / length
                ends = [(x0 + (x1 - x0) * part, y0 + (y1 - y0) * part) for part in (a, b)]
                self._draw.line(self._up(ends), fill=colour, width=round(width * _SCALE))
                at += 2 * dash

    def area(self, points: Sequence[Point], colour: Colour) -> None:
        self._draw.polygon(self._up(points), fill=colour)

    def dot(self, at: Point, radius: float, colour: Colour) -> None:
        """With a thin rim of paper, so that dots on lines and on each other stay apart."""
        for reach, fill in ((radius + 1.2, PAPER), (radius, colour)):
            box = self._up([(at[0] - reach, at[1] - reach), (at[0] + reach, at[1] + reach)])
            self._draw.ellipse(box, fill=fill)

    def text(self, at: Point, text: str, *, size: float = 12, colour: Colour = INK, anchor: str = "lm") -> None:
        """`anchor` as Pillow has it: l, m or r, then a, m, s or d."""
        self._draw.text(self._up([at])[0], text, fill=colour, font=_font(size), anchor=anchor)

    def text_width(self, text: str, size: float = 12) -> float:
        return self._draw.textlength(text, font=_font(size)) / _SCALE

    def upright_text(self, at: Point, text: str, *, size: float = 12, colour: Colour = INK) -> None:
        """Turned by 90° to the left, centred at `at`."""
        width, height = (round(side * _SCALE) for side in (self.text_width(text, size) + 4, size * 1.6))
        strip = Image.new("L", (width, height), 0)
        ImageDraw.Draw(strip).text((width / 2, height / 2), text, fill=255, font=_font(size), anchor="mm")
        turned = strip.transpose(Image.Transpose.ROTATE_90)
        [(x, y)] = self._up([at])
        corner = (round(x - turned.width / 2), round(y - turned.height / 2))
        self._image.paste(Image.new("RGB", turned.size, colour), corner, turned)

    def save(self, path: Path) -> None:
        """Write a PNG; OSError as for any file."""
        self._image.resize((self.width, self.height), Image.Resampling.LANCZOS).save(path, "PNG", optimize=True)

    @staticmethod
    def _up(points: Sequence[Point]) -> list[Point]:
        return [(x * _SCALE, y * _SCALE) for x, y in points]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A rectangle of the canvas with its two axes; `x` and `y` turn values into pixels, clipped to the rectangle."""

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    y_log: bool = False
    x_log: bool = False

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * _share(value, *self.x_range, log=self.x_log)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * _share(value, *self.y_range, log=self.y_log)


def decades(low: float, high: float) -> tuple[float, float]:
    """Powers of ten around positive values."""
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high * 1.0001))


def steps(high: int, about: int) -> list[int]:
    """0 and round numbers up to `high`, some `about` of them."""
    rough = max(high / about, 1)
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return list(range(0, high + 1, step))


def size_text(size: float) -> str:
    """Bytes for people, in units of 1000: `512 B`, `12.8 KB`, `602 KB`, `1.6 MB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= 0.9995 * unit:
            value = size / unit
            return f"{value:.0f} {name}" if value >= 99.95 or value == round(value) else f"{value:.1f} {name}"
    return f"{size:.0f} B"


def _share(value: float, low: float, high: float, *, log: bool) -> float:
    if log:
        value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def _font(size: float) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(round(size * _SCALE))
