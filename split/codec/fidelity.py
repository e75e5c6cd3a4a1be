"""How far a lossy plan's outputs are from the unsplit model's: lower is better, 0 is the same.

Every measure judges one output tensor and reports its worst row (what the last axis spans), so that one bad score or
token cannot hide behind good ones; `top1` is a share by nature, and `rms` is of the whole tensor. Of a batch that is
not enough: its worst row is the farther off the more there are, and a bound would mean another thing for each size. So
a bound holds for the mean over *items* (`farthest`): for curves, which are measured one by one, as for live batches.
Of a detector's outputs that says little: what counts there are its detections, whose measure (`split/codec/boxes.py`)
judges the outputs together. Not a correctness check of lossless plans: that is `split.tensor.relative_difference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from split.codec.boxes import boxes_distance
from split.errors import CodecError
from split.profiles.boxes import Boxes
from split.profiles.contract import Fidelity
from split.tensor import Array, Tensors, relative_difference

_FLOOR: Final = 1e-12
"""Smallest probability used where the model gives probabilities: keeps the logarithm finite."""


def divergence(measure: str, found: Array, expected: Array) -> float:
    """`measure` of `found` (the lossy plan's output) against `expected` (the unsplit model's), 0 … inf.

    inf where shapes or element types differ, or where values are not finite at different places; 0.0 where both are
    equal or empty. CodecError for a measure that is not in `MEASURES`.
    """
    if measure not in MEASURES:
        raise CodecError(f"fidelity measure {measure!r} is not known; known are {', '.join(MEASURES)}")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    if found.dtype.kind not in "fiu" or np.array_equal(found, expected, equal_nan=found.dtype.kind == "f"):
        return 0.0 if np.array_equal(found, expected, equal_nan=found.dtype.kind == "f") else math.inf
    if measure != "relative" and not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return math.inf
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        value = MEASURES[measure](found, expected)
    return math.inf if math.isnan(value) else value  # where sums overflow, nothing is known


def farthest(measure: str | Boxes, found: Tensors, expected: Tensors, items: int = 1) -> float:
    """How far an answer to `items` items, which its tensors' first axis counts, is from that of the unsplit model: of
    each item the output that is farthest off, or its detections, of those the mean. Tensors that are no batch of so
    many count whole.

    As `divergence`, of which it is the largest over outputs where there is one item, or `boxes_distance`.
    """
    names = measure.outputs & expected.keys() if isinstance(measure, Boxes) else expected.keys()
    if items < 2 or any(answer[name].shape[:1] != (items,) for answer in (found, expected) for name in names):
        return _farthest(measure, found, expected)
    one_by_one = (
        _farthest(
            measure,
            {name: found[name][at : at + 1] for name in names},
            {name: expected[name][at : at + 1] for name in names},
        )
        for at in range(items)
    )
    return math.fsum(one_by_one) / items


def _farthest(measure: str | Boxes, found: Tensors, expected: Tensors) -> float:
    if isinstance(measure, Boxes):
        return boxes_distance(measure, found, expected)
    return max((divergence(measure, found[name], wanted) for name, wanted in expected.items()), default=0.0)


def measures_under(fidelity: Fidelity | None) -> dict[str, str | Boxes]:
    """All that is measured of a model under a contract (None: without one), by the name it is kept under: each of
    `MEASURES`, and its detections where the contract says where they are."""
    by_name: dict[str, str | Boxes] = {name: name for name in MEASURES}
    return by_name if fidelity is None else by_name | {fidelity.name: fidelity.by}


def _rows(array: Array) -> Array:
    """[rows, last axis] in FP64."""
    return array.reshape(-1, array.shape[-1] if array.ndim else 1).astype(np.float64)


def _log_probabilities(rows: Array, *, already: bool) -> Array:
    if already:
        floored = np.maximum(rows, _FLOOR)
        return np.asarray(np.log(floored / floored.sum(axis=1, keepdims=True)))
    shifted = rows - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _kl(found: Array, expected: Array) -> float:
    """Kullback–Leibler divergence KL(expected ‖ found) in nats of the class distributions over the last axis.

    Rows that are distributions already (none negative, sums within 1e-3 of 1, in the expected tensor) are taken as
    they are, anything else as logits through softmax.
    """
    wanted, got = _rows(expected), _rows(found)
    already = bool((wanted >= 0).all() and (np.abs(wanted.sum(axis=1) - 1) <= 1e-3).all())
    log_p = _log_probabilities(wanted, already=already)
    log_q = _log_probabilities(got, already=already)
    return max(float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).max()), 0.0)


def _cosine(found: Array, expected: Array) -> float:
    """1 − cosine of the angle between rows, 0 … 2; a zero row against another counts 1."""
    wanted, got = _rows(expected), _rows(found)
    product = np.linalg.norm(wanted, axis=1) * np.linalg.norm(got, axis=1)
    cosine = np.where(product > 0, (wanted * got).sum(axis=1) / np.where(product > 0, product, 1), 0)
    cosine = np.where((wanted == got).all(axis=1), 1, cosine)
    return max(float((1 - cosine).max()), 0.0)


def _rms(found: Array, expected: Array) -> float:
    """Root mean square of the difference over that of the expected tensor: how much of a map, or of a detector's boxes
    and scores, is another. Over the whole tensor, since most rows of such outputs stand for nothing."""
    wanted, got = expected.astype(np.float64), found.astype(np.float64)
    size = float(np.linalg.norm(wanted))
    off = float(np.linalg.norm(got - wanted))
    return off / size if size > 0 else off


def _top1(found: Array, expected: Array) -> float:
    """Share of rows whose largest element (the first of equals) is at another place, 0 … 1."""
    return float((_rows(found).argmax(axis=1) != _rows(expected).argmax(axis=1)).mean())


MEASURES: Final[Mapping[str, Callable[[Array, Array], float]]] = {
    "kl": _kl,
    "relative": relative_difference,
    "rms": _rms,
    "cosine": _cosine,
    "top1": _top1,
}
"""Name in the contract → measure of one tensor. `relative` is max|a − b| / max|b| over the tensor."""
