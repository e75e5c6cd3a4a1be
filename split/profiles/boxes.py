"""Where a detector's outputs hold boxes and scores, and when two of its detections are the same: what the fidelity
measure `boxes` goes by. Facts only, `split.codec.boxes` counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from split.errors import ConfigError
from split.tensor import NUMPY_DTYPES, Dim, TensorSpec

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


def check_boxes(boxes: Boxes, outputs: Sequence[TensorSpec], *, where: str) -> None:
    """ConfigError, which begins with `where`, when these outputs of a model cannot be read so: as far as it says what
    they are, columns where the contract has them, and as many rows of each."""
    known = {spec.name: spec for spec in outputs}
    for number, head in enumerate(boxes.heads):
        parts = {f"{where}.heads[{number}].{key}": (key, of) for key, of in head.parts().items()}
        specs: dict[str, TensorSpec] = {}
        for place, (_, columns) in parts.items():
            name = output_of(columns)
            if name not in known:
                raise ConfigError(f"{place}: the model has no output {name!r}; it has {', '.join(known)}")
            specs[place] = known[name]
            if NUMPY_DTYPES[specs[place].dtype].kind not in "fiu":
                raise ConfigError(f"{place}: output {name!r} is {specs[place].dtype} in the model; numbers are needed")
        box = known[output_of(head.box)]
        for place, (key, columns) in parts.items():
            _check_columns(key, columns, specs[place], box, boxes.axis, place)


def _check_columns(key: str, columns: Columns, spec: TensorSpec, box: TensorSpec, axis: int, where: str) -> None:
    """`box`: the output with the boxes, which has the rows that all others must have."""
    said, rank = f"output {spec.name!r} of shape {list(spec.shape)}", len(box.shape)
    rows, there = _rows_of(spec, rank, axis)
    if rank < 2 or (rows, key) == (None, "box"):
        raise ConfigError(f"{where}: {said} has no rows of columns")
    wanted_rows, _ = _rows_of(box, rank, axis)
    if rows is None or any(
        isinstance(a, int) and isinstance(b, int) and min(a, b) > 0 and a != b
        for a, b in zip(rows, wanted_rows or (), strict=True)
    ):
        raise ConfigError(f"{where}: {said} has other rows than the boxes of {box.name!r} of shape {list(box.shape)}")
    if not isinstance(there, int) or there < 1:
        return
    if not isinstance(columns, str) and columns[2] >= there:
        raise ConfigError(f"{where}: {said} has {there} columns on axis {axis}; the last is number {there - 1}")
    wanted, count = {"box": BOX_COLUMNS, "objectness": 1, "label": 1}.get(key), width(columns) or there
    if wanted not in (None, count):
        raise ConfigError(
            f"{where}: {said} has {count} columns on axis {axis}, {wanted} wanted; name them as [output, first, last]"
        )


def _rows_of(spec: TensorSpec, rank: int, axis: int) -> tuple[tuple[Dim, ...] | None, Dim]:
    """The dims of its rows, None where it has none beside boxes of this rank, and how many columns it has."""
    if len(spec.shape) == rank - 1:
        return spec.shape, 1
    if len(spec.shape) != rank or rank < 2:
        return None, -1
    place = rank + axis
    return spec.shape[:place] + spec.shape[place + 1 :], spec.shape[place]
