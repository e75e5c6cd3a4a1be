"""Where a detector's outputs hold boxes and scores, and when two of its detections are the same: what the fidelity
measure `boxes` goes by. Facts only, `split.codec.boxes` counts.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Final, Literal

import msgspec

_Column = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

Columns = str | tuple[str, _Column, _Column]
"""An output whole, or its columns from … to, both counted, the first is 0: `[output, 0, 3]`."""

BOX_COLUMNS: Final = 4


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outputs whose rows belong together: row for row a box and its scores."""

    box: Columns
    """Four columns: output, or [output, first, last]."""
    score: Columns
    """A column for each class, or one for all; a row's score is the largest, its class where that stands."""
    objectness: Columns | None = None
    """A column that the score is multiplied with; none: it stands alone."""
    label: Columns | None = None
    """A column with the class, where no column of `score` stands for one."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            match getattr(self, name):
                case "" | ("", _, _):
                    raise ValueError(f"{name} must name an output, got ''")
                case (output, first, last) if last < first:
                    raise ValueError(
                        f"{name} must be [output, first, last] with first ≤ last, got {output, first, last}"
                    )
        for name, wanted in (("box", BOX_COLUMNS), ("objectness", 1), ("label", 1)):
            count = width(getattr(self, name))
            if count not in (None, wanted):
                raise ValueError(f"{name} must be {wanted} column{'s' * (wanted > 1)}, got {count}")

    def parts(self) -> dict[str, Columns]:
        """Field → where it is, of those that are stated."""
        stated = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: columns for name, columns in stated.items() if columns is not None}


class Boxes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to read detections off the outputs, and which of two answers agree."""

    heads: tuple[Head, ...]
    """One for each group of outputs that share their rows; a detector of several scales may have several."""
    format: Literal["xyxy", "cxcywh", "cxcywh_log"]
    """xyxy: two corners (or y before x); cxcywh: centre and size; cxcywh_log: the sizes as logarithms (YOLOX)."""
    scores: Literal["logits", "probabilities"]
    """What scores and objectness are; logits go through the sigmoid, each by itself."""
    threshold: _Share
    """Least score of a detection, in probability: where the application cuts."""
    overlap: _Share = 0.5
    """Least intersection over union of two boxes that are the same."""
    match: Literal["rows", "overlap"] = "rows"
    """rows: the same row is the same place of the picture in every answer, as before non-maximum suppression; its box
    may be relative to that place. overlap: rows are a list, as after it: boxes are paired, those that overlap most
    first."""
    axis: Literal[-1, -2] = -1
    """Which axis holds the columns; -2 for [1, columns, rows]."""

    def __post_init__(self) -> None:
        if not self.heads:
            raise ValueError("heads must say of one head at least where its boxes and scores are")
        if not (math.isfinite(self.threshold) and math.isfinite(self.overlap)):
            raise ValueError("threshold and overlap must be finite numbers")

    @property
    def name(self) -> str:
        """What is measured so is kept under this name: with other parameters it is another measure."""
        return f"boxes-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]}"

    @property
    def outputs(self) -> frozenset[str]:
        """Those that are looked at."""
        return frozenset(output_of(columns) for head in self.heads for columns in head.parts().values())


def output_of(columns: Columns) -> str:
    """Which output they are of."""
    return columns if isinstance(columns, str) else columns[0]


def width(columns: Columns | None) -> int | None:
    """How many columns are stated; None where it is the output that says, or nothing is."""
    return None if columns is None or isinstance(columns, str) else columns[2] - columns[1] + 1
