"""Fidelity measure `boxes`: how many of a detector's detections are others.

A detection is a row whose score reaches the contract's threshold. Two of them, one of each answer, are the same where
their class is and their boxes overlap (intersection over union, Jaccard 1912) by as much as the contract says. Not a
figure of accuracy: the unsplit model's answer counts as right, whatever is in the picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.errors import CodecError
from split.profiles.boxes import BOX_COLUMNS, Boxes, Columns, Head, output_of
from split.tensor import Array

MATCHED_MAX: Final = 1000
"""Detections of an answer that are paired by overlap, those of the highest scores: ten times what COCO's evaluation
looks at (`maxDets` 100). Bounds the table of overlaps to 8 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detections:
    rows: Array
    """INT64 [n]: number of the row over all heads."""
    kinds: Array
    """FP64 [n, 2]: number of the picture in the batch, and class."""
    corners: Array
    """FP64 [n, 4]: left, top, right, bottom, or as `Boxes.format` xyxy has them."""
    scores: Array
    """FP64 [n]."""

    def take(self, which: Array) -> _Detections:
        return _Detections(
            rows=self.rows[which], kinds=self.kinds[which], corners=self.corners[which], scores=self.scores[which]
        )


class _NoDetector(Exception):
    """These outputs do not hold what the contract says."""


def boxes_distance(boxes: Boxes, found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """1 − (detections in both answers) / (detections in either), 0 … 1; 0.0 where neither has any.

    A box that has moved too far, or is of another class, is one of each answer's: lost, and invented. inf where element
    types differ, where shapes do that may not, where what is looked at is not finite or holds no boxes with scores.
    CodecError where an output that is looked at is missing.
    """
    pairs = [(_of(found, name), _of(expected, name)) for name in sorted(boxes.outputs)]
    for got, wanted in pairs:
        alike = got.ndim == wanted.ndim if boxes.match == "overlap" else got.shape == wanted.shape
        if not alike or got.dtype != wanted.dtype or got.dtype.kind not in "fiu":
            return math.inf
    try:
        one, other = _detections(boxes, found), _detections(boxes, expected)
    except _NoDetector:
        return (
            0.0
            if all(np.array_equal(got, wanted, equal_nan=got.dtype.kind == "f") for got, wanted in pairs)
            else math.inf
        )
    if boxes.match == "overlap":
        one, other = _best(one), _best(other)
        same = _paired(one, other, boxes.overlap)
    else:
        same = _in_place(one, other, boxes.overlap)
    either = len(one.rows) + len(other.rows) - same
    return 1 - same / either if either else 0.0


def count_detections(boxes: Boxes, outputs: Mapping[str, Array]) -> int:
    """How many these outputs hold; 0 where they hold no boxes with scores. CodecError as `boxes_distance`."""
    for name in boxes.outputs:
        if _of(outputs, name).dtype.kind not in "fiu":
            return 0
    try:
        return len(_detections(boxes, outputs).rows)
    except _NoDetector:
        return 0


def overlap(one: Array, other: Array) -> Array:
    """Intersection over union of boxes FP64 [..., 4] of corners, broadcast: FP64 [...]; 1 for equal boxes, even those
    without an area."""
    low, high = np.maximum(one[..., :2], other[..., :2]), np.minimum(one[..., 2:], other[..., 2:])
    with np.errstate(over="ignore", invalid="ignore"):
        shared = np.maximum(high - low, 0.0).prod(axis=-1)
        both = _area(one) + _area(other) - shared
        ratio = np.divide(shared, both, out=np.zeros_like(both), where=both > 0)
    return np.where((one == other).all(axis=-1), 1.0, ratio)


def _area(corners: Array) -> Array:
    return np.asarray(np.maximum(corners[..., 2:] - corners[..., :2], 0.0).prod(axis=-1))


def _in_place(one: _Detections, other: _Detections, least: float) -> int:
    _, left, right = np.intersect1d(one.rows, other.rows, assume_unique=True, return_indices=True)
    one, other = one.take(left), other.take(right)
    alike = (one.kinds == other.kinds).all(axis=1)
    return int((alike & (overlap(one.corners, other.corners) >= least)).sum())


def _best(found: _Detections) -> _Detections:
    return found.take(np.argsort(-found.scores, kind="stable")[:MATCHED_MAX])


def _paired(one: _Detections, other: _Detections, least: float) -> int:
    """Pairs, the best first. Of equal overlaps the one whose numbers are lowest, whichever answer is named first: of
    (a, b) and (b, a), which alone are still equal then, neither takes what the other needs."""
    ratios = overlap(one.corners[:, np.newaxis], other.corners[np.newaxis])
    alike = (one.kinds[:, np.newaxis] == other.kinds[np.newaxis]).all(axis=-1)
    left, right = np.nonzero(alike & (ratios >= least))
    order = np.lexsort((np.maximum(left, right), np.minimum(left, right), -ratios[left, right]))
    taken: tuple[set[int], set[int]] = (set(), set())
    for a, b in zip(left[order].tolist(), right[order].tolist(), strict=True):
        if a not in taken[0] and b not in taken[1]:
            taken[0].add(a)
            taken[1].add(b)
    return len(taken[0])


def _of(outputs: Mapping[str, Array], name: str) -> Array:
    if name not in outputs:
        there = ", ".join(outputs) or "nothing"
        raise CodecError(f"fidelity measure boxes looks at output {name!r}; of the answer there is only {there}")
    return outputs[name]


def _detections(boxes: Boxes, outputs: Mapping[str, Array]) -> _Detections:
    parts: list[_Detections] = []
    before = 0
    for head in boxes.heads:
        rows, found = _of_head(boxes, head, outputs)
        parts.append(
            _Detections(rows=found.rows + before, kinds=found.kinds, corners=found.corners, scores=found.scores)
        )
        before += rows
    return _Detections(
        rows=np.concatenate([one.rows for one in parts]),
        kinds=np.concatenate([one.kinds for one in parts]),
        corners=np.concatenate([one.corners for one in parts]),
        scores=np.concatenate([one.scores for one in parts]),
    )


def _of_head(boxes: Boxes, head: Head, outputs: Mapping[str, Array]) -> tuple[int, _Detections]:
    """Its number of rows, and its detections among them."""
    rank = outputs[output_of(head.box)].ndim
    pictures = outputs[output_of(head.box)].shape[0] if rank > 2 else 1
    box = _columns(outputs, head.box, rank, boxes.axis)
    score = _probabilities(_columns(outputs, head.score, rank, boxes.axis), boxes)
    if box.shape[1] != BOX_COLUMNS or not score.shape[1]:
        raise _NoDetector
    kind = score.argmax(axis=1).astype(np.float64)
    best = score.max(axis=1)
    if head.objectness is not None:
        best = best * _one(_probabilities(_columns(outputs, head.objectness, rank, boxes.axis), boxes))
    if head.label is not None:
        kind = _one(_columns(outputs, head.label, rank, boxes.axis))
    if not len(box) == len(best) == len(kind):
        raise _NoDetector
    which = np.flatnonzero(best >= boxes.threshold)
    picture = which // max(len(box) // max(pictures, 1), 1)
    found = _Detections(
        rows=which,
        kinds=np.stack([picture.astype(np.float64), kind[which]], axis=1),
        corners=_corners(box[which], boxes.format),
        scores=best[which],
    )
    return len(box), found


def _columns(outputs: Mapping[str, Array], columns: Columns, rank: int, axis: int) -> Array:
    """FP64 [rows, columns]. An output of one axis less than that of the boxes, which has `rank`, is a column."""
    array = outputs[output_of(columns)]
    if rank < 2 or array.ndim not in (rank, rank - 1):
        raise _NoDetector
    array = array[..., np.newaxis] if array.ndim < rank else np.moveaxis(array, axis, -1)
    if not isinstance(columns, str):
        _, first, last = columns
        if last >= array.shape[-1]:
            raise _NoDetector
        array = array[..., first : last + 1]
    array = array.reshape(math.prod(array.shape[:-1]), array.shape[-1]).astype(np.float64)
    if not np.isfinite(array).all():
        raise _NoDetector
    return array


def _one(column: Array) -> Array:
    if column.shape[1] != 1:
        raise _NoDetector
    return column[:, 0]


def _probabilities(values: Array, boxes: Boxes) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values))) if boxes.scores == "logits" else values


def _corners(box: Array, form: str) -> Array:
    if form == "xyxy":
        return box
    with np.errstate(over="ignore"):
        half = (np.exp(box[:, 2:]) if form == "cxcywh_log" else box[:, 2:]) / 2
    return np.concatenate([box[:, :2] - half, box[:, :2] + half], axis=1)
