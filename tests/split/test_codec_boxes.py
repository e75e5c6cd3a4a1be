"""split/codec/boxes.py: which detections of two answers are the same, by numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from split.codec.boxes import MATCHED_MAX, boxes_distance, count_detections, overlap
from split.codec.fidelity import MEASURES, farthest, measures_under
from split.errors import CodecError
from split.profiles.boxes import Boxes
from split.profiles.contract import Fidelity
from split.tensor import Array, Tensors


def boxes_of(**fields: Any) -> Boxes:
    """Corners in the first four columns of y, then a score for each class; 0.5 is a detection."""
    plain = {"heads": [{"box": ["y", 0, 3], "score": ["y", 4, 5]}], "format": "xyxy", "scores": "probabilities"}
    return msgspec.convert(plain | {"threshold": 0.5} | fields, Boxes)


def answer(*rows: tuple[float, ...]) -> Tensors:
    """FP32 [1, rows, 6]."""
    return {"y": np.array(rows, np.float32).reshape(1, len(rows), 6)}


UNIT = (0.0, 0.0, 1.0, 1.0)
PLAIN, LISTED = boxes_of(), boxes_of(match="overlap")


@pytest.mark.parametrize(
    ("other", "ratio"),
    [
        (UNIT, 1.0),
        ((0.5, 0.0, 1.5, 1.0), 1 / 3),  # half of each: 0.5 of 1.5
        ((0.5, 0.5, 1.5, 1.5), 1 / 7),  # a quarter: 0.25 of 1.75
        ((0.0, 0.0, 2.0, 2.0), 1 / 4),  # inside
        ((-1.0, -1.0, 2.0, 2.0), 1 / 9),
        ((1.0, 0.0, 2.0, 1.0), 0.0),  # an edge is no area
        ((3.0, 3.0, 4.0, 4.0), 0.0),
        ((0.5, 0.5, 0.5, 0.5), 0.0),  # a point
        ((1.0, 1.0, 0.0, 0.0), 0.0),  # inside out
    ],
)
def test_overlap_is_the_area_shared_over_the_area_of_both(other: tuple[float, ...], ratio: float) -> None:
    assert overlap(np.array(UNIT), np.array(other)) == pytest.approx(ratio)
    assert overlap(np.array(other), np.array(UNIT)) == pytest.approx(ratio)


def test_equal_boxes_are_the_same_even_without_an_area() -> None:
    point = np.array([2.0, 3.0, 2.0, 3.0])
    assert overlap(point, point) == 1.0
    assert overlap(point, np.array([9.0, 9.0, 9.0, 9.0])) == 0.0


@pytest.mark.parametrize("boxes", [PLAIN, LISTED], ids=["rows", "overlap"])
def test_detections_that_agree_are_counted_against_those_in_either_answer(boxes: Boxes) -> None:
    """By hand: three detections each, of which one is where it was, one moved by half (1/3 < 0.5) and one is of another
    class: 1 of 5 are in both."""
    expected = answer((*UNIT, 0.9, 0.1), (4, 0, 5, 1, 0.9, 0.1), (8, 0, 9, 1, 0.9, 0.1), (12, 0, 13, 1, 0.4, 0.4))
    found = answer((*UNIT, 0.6, 0.3), (4.5, 0, 5.5, 1, 0.9, 0.1), (8, 0, 9, 1, 0.1, 0.9), (12, 0, 13, 1, 0.1, 0.2))
    assert boxes_distance(boxes, found, expected) == pytest.approx(1 - 1 / 5)
    assert count_detections(boxes, expected) == count_detections(boxes, found) == 3


@pytest.mark.parametrize(("least", "distance"), [(0.3333, 0.0), (0.3334, 1.0)])
def test_the_contract_says_by_how_much_boxes_must_overlap(least: float, distance: float) -> None:
    moved = answer((0.5, 0, 1.5, 1, 0.9, 0.1))
    assert boxes_distance(boxes_of(overlap=least), moved, answer((*UNIT, 0.9, 0.1))) == distance
    assert boxes_distance(boxes_of(overlap=least, match="overlap"), moved, answer((*UNIT, 0.9, 0.1))) == distance


def test_one_lost_of_four_is_a_quarter_and_what_stays_below_the_threshold_is_nothing() -> None:
    rows = [(float(x), 0.0, x + 1.0, 1.0, 0.9, 0.0) for x in range(4)]
    weak = (*rows[3][:4], 0.49, 0.0)
    assert boxes_distance(PLAIN, answer(*rows[:3], weak), answer(*rows)) == pytest.approx(1 / 4)
    assert boxes_distance(LISTED, answer(*rows[:3]), answer(*rows)) == pytest.approx(1 / 4)
    assert boxes_distance(PLAIN, answer(weak), answer((*weak[:4], 0.0, 0.3))) == 0.0
    assert boxes_distance(PLAIN, answer(weak), answer(rows[3])) == 1.0


def test_a_list_may_have_another_length_and_order_and_rows_may_not() -> None:
    rows = [(float(x), 0.0, x + 1.0, 1.0, 0.9, 0.0) for x in range(4)]
    assert boxes_distance(LISTED, answer(*reversed(rows)), answer(*rows)) == 0.0
    assert boxes_distance(LISTED, answer(), answer(*rows)) == 1.0
    assert boxes_distance(LISTED, answer(), answer()) == 0.0
    assert boxes_distance(PLAIN, answer(*reversed(rows)), answer(*rows)) == 1.0
    assert boxes_distance(PLAIN, answer(*rows[:3]), answer(*rows)) == math.inf


def test_the_pairs_that_overlap_most_are_made_first() -> None:
    """Of the two expected, the first overlaps both found ones (0.8/1.2 and 0.9/1.1), the second the second one alone
    (0.7/1.3): the best pair leaves two that are too far from each other (0.4/1.6)."""
    expected = answer((0, 0, 1, 1, 0.9, 0), (0.4, 0, 1.4, 1, 0.9, 0))
    found = answer((-0.2, 0, 0.8, 1, 0.9, 0), (0.1, 0, 1.1, 1, 0.9, 0))
    assert boxes_distance(LISTED, found, expected) == pytest.approx(1 - 1 / 3)


def test_only_the_surest_of_very_many_are_paired() -> None:
    """Of 1,010 boxes apart, the ten weakest of each answer are others, and are not looked at."""
    x = np.arange(MATCHED_MAX + 10, dtype=np.float32)
    rows = np.stack([x, 0 * x, x + 1, 0 * x + 1, 0.99 - 0.0004 * x, 0 * x], axis=1)[np.newaxis]
    other = rows.copy()
    other[:, -10:, :4] += 5000
    assert boxes_distance(LISTED, {"y": other}, {"y": rows}) == 0.0
    assert boxes_distance(PLAIN, {"y": other}, {"y": rows}) == pytest.approx(1 - 1000 / 1020)


def test_pictures_of_a_batch_are_apart() -> None:
    one, none = [(*UNIT, 0.9, 0.0)], [(*UNIT, 0.1, 0.0)]
    first, second = np.array([one, none], np.float32), np.array([none, one], np.float32)
    assert boxes_distance(LISTED, {"y": first}, {"y": second}) == 1.0
    half = np.array([one, one], np.float32)
    assert farthest(LISTED, {"y": half}, {"y": first}) == pytest.approx(1 / 2)
    assert farthest(PLAIN, {"y": half}, {"y": first}, 2) == pytest.approx((0 + 1) / 2)
    unlooked = {"z": np.zeros(7)}
    assert farthest(PLAIN, {"y": half} | unlooked, {"y": first} | unlooked, 2) == pytest.approx(1 / 2)


# -- where boxes and scores are ---------------------------------------------------------------------------------------

YOLOX = boxes_of(
    heads=[{"box": ["y", 0, 3], "objectness": ["y", 4, 4], "score": ["y", 5, 6]}], format="cxcywh_log", threshold=0.3
)


def decoded(raw: Array, stride: int, side: int) -> Array:
    """Corners in pixels, as YOLOX's own `demo_postprocess` makes them: (x + column) · stride, exp(w) · stride."""
    row, column = np.divmod(np.arange(side * side), side)
    x, y = (raw[:, 0] + column) * stride, (raw[:, 1] + row) * stride
    w, h = np.exp(raw[:, 2]) * stride, np.exp(raw[:, 3]) * stride
    return np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2, *raw[:, 4:].T], axis=1)


def test_at_the_same_row_cell_and_stride_cancel() -> None:
    dice = np.random.default_rng(5)
    expected = dice.normal(0.5, 0.4, (64, 7))
    expected[:, 4:] = dice.uniform(0.2, 1, (64, 3))
    found = expected + dice.normal(0, 0.15, (64, 7))
    in_pixels = msgspec.structs.replace(YOLOX, format="xyxy")
    raw = boxes_distance(YOLOX, {"y": found[np.newaxis]}, {"y": expected[np.newaxis]})
    assert 0.1 < raw < 0.9
    assert raw == boxes_distance(in_pixels, {"y": decoded(found, 32, 8)}, {"y": decoded(expected, 32, 8)})


def test_objectness_times_the_best_class_is_the_score() -> None:
    """0.5 · 0.7 = 0.35 is a detection, 0.5 · 0.5 none."""
    kept, lost = [0, 0, 0, 0, 0.5, 0.2, 0.7], [0, 0, 0, 0, 0.5, 0.5, 0.5]
    assert count_detections(YOLOX, {"y": np.array([[kept, lost]])}) == 1


def test_a_size_as_a_logarithm_is_its_exponential() -> None:
    """Centres alike, sides 1 and √2: half of the area."""
    small, large = [0.0, 0, 0, 0, 1, 1, 0], [0, 0, math.log(2) / 2, math.log(2) / 2, 1, 1, 0]
    for least, distance in ((0.499, 0.0), (0.501, 1.0)):
        boxes = msgspec.structs.replace(YOLOX, overlap=least)
        assert boxes_distance(boxes, {"y": np.array([[small]])}, {"y": np.array([[large]])}) == distance
    huge = {"y": np.array([[[0, 0, 1e4, 1e4, 1, 1, 0]]])}
    assert boxes_distance(YOLOX, huge, {"y": np.array([[small]])}) == 1.0


def test_heads_of_two_scales_with_scores_as_logits_count_together() -> None:
    """BlazeFace's: regressors of 16 columns, a score each. A logit of 0 is 0.5, of −0.1 less."""
    heads = [{"box": ["r1", 0, 3], "score": "s1"}, {"box": ["r2", 0, 3], "score": "s2"}]
    boxes = boxes_of(heads=heads, format="cxcywh", scores="logits")
    expected = {"r1": np.ones((1, 3, 16)), "s1": np.array([[[0.0], [9.0], [-0.1]]])}
    expected |= {"r2": np.ones((1, 2, 16)), "s2": np.array([[[-1e9], [1e9]]])}
    assert count_detections(boxes, expected) == 3
    moved = expected | {"r2": np.ones((1, 2, 16)) * 3}  # side 3 about (3, 3) against 1 about (1, 1): apart
    moved["r1"] = expected["r1"] + np.arange(16) // 4  # keypoints are nobody's business
    assert boxes_distance(boxes, moved, expected) == pytest.approx(1 - 2 / 4)
    assert boxes.outputs == {"r1", "s1", "r2", "s2"}


def test_columns_may_come_before_rows() -> None:
    """YOLOv8's [1, 84, 8400]."""
    across = boxes_of(heads=[{"box": ["y", 0, 3], "score": ["y", 4, 5]}], axis=-2)
    rows = answer((*UNIT, 0.9, 0.1), (4, 0, 5, 1, 0.9, 0.1))["y"]
    other = answer((*UNIT, 0.9, 0.1), (4, 0, 5, 1, 0.1, 0.9))["y"]
    assert boxes_distance(across, {"y": other.swapaxes(1, 2)}, {"y": rows.swapaxes(1, 2)}) == pytest.approx(1 - 1 / 3)


@pytest.mark.parametrize("batch", [(), (1,)])
def test_boxes_labels_and_scores_may_be_outputs_of_their_own(batch: tuple[int, ...]) -> None:
    """As torchvision gives them: [n, 4], [n], [n]."""
    boxes = boxes_of(heads=[{"box": "b", "label": "l", "score": "s"}], match="overlap")

    def made(corners: list[tuple[float, ...]], labels: list[int], scores: list[float]) -> Tensors:
        shape = (*batch, len(labels))
        return {
            "b": np.array(corners, np.float32).reshape(*shape, 4),
            "l": np.array(labels, np.int64).reshape(shape),
            "s": np.array(scores, np.float32).reshape(shape),
        }

    expected = made([UNIT, (4, 0, 5, 1)], [17, 3], [0.9, 0.8])
    assert boxes_distance(boxes, made([(4, 0, 5, 1), UNIT], [3, 17], [0.7, 0.9]), expected) == 0.0
    assert boxes_distance(boxes, made([(4, 0, 5, 1), UNIT], [17, 3], [0.7, 0.9]), expected) == 1.0
    assert boxes_distance(boxes, made([UNIT], [17], [0.7]), expected) == pytest.approx(1 / 2)


# -- what cannot be judged --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [PLAIN, LISTED], ids=["rows", "overlap"])
def test_what_is_no_detectors_answer_is_infinitely_far(boxes: Boxes) -> None:
    good = answer((*UNIT, 0.9, 0.0))
    nan = {"y": np.where(good["y"] == np.float32(0.9), np.nan, good["y"])}
    assert boxes_distance(boxes, nan, good) == boxes_distance(boxes, good, nan) == math.inf
    assert boxes_distance(boxes, nan, nan) == 0.0  # the same, whatever it is
    assert boxes_distance(boxes, {"y": good["y"].astype("f8")}, good) == math.inf
    assert boxes_distance(boxes, {"y": good["y"][0]}, good) == math.inf
    beside = boxes.heads[0].box, ["y", 4, 4]  # NaN in what is not looked at is nobody's business
    looking = boxes_of(heads=[dict(zip(("box", "score"), beside, strict=True))], match=boxes.match)
    masked = {"y": np.where(np.arange(6) == 5, np.float32(np.nan), good["y"])}
    assert boxes_distance(looking, masked, good) == 0.0
    narrow = {"y": good["y"][..., :5]}  # no second class
    assert boxes_distance(boxes, narrow, {"y": narrow["y"] + 1}) == math.inf
    assert count_detections(boxes, narrow) == count_detections(boxes, nan) == 0
    texts = {"y": np.array([["a"]], object)}
    assert (boxes_distance(boxes, texts, texts), count_detections(boxes, texts)) == (math.inf, 0)
    scalar = {"y": np.float32(1)[...]}
    assert boxes_distance(boxes, scalar, {"y": np.float32(2)[...]}) == math.inf


def test_rows_that_are_not_as_many_hold_no_boxes() -> None:
    boxes = boxes_of(heads=[{"box": "b", "score": "s"}])
    one = {"b": np.zeros((1, 3, 4)), "s": np.ones((1, 2, 1))}
    assert boxes_distance(boxes, one, one | {"s": np.zeros((1, 2, 1))}) == math.inf


def test_an_output_that_is_missing_is_named() -> None:
    with pytest.raises(CodecError, match="looks at output 'y'; of the answer there is only z"):
        boxes_distance(PLAIN, {"z": np.zeros(1)}, answer((*UNIT, 0.9, 0.0)))


# -- properties -------------------------------------------------------------------------------------------------------

COORDINATES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
SCORES = st.sampled_from([0.1, 0.5, 0.7, 0.9])
ROWS = st.lists(st.tuples(*[COORDINATES] * 4, SCORES, SCORES), max_size=7)


def greedily(found: Tensors, expected: Tensors, least: float) -> float:
    """The best pair that is left, again and again, by loops."""
    sides = [[row for row in one["y"][0].astype(float) if max(row[4:]) >= 0.5] for one in (found, expected)]
    pairs = []
    for (a, one), (b, other) in itertools.product(enumerate(sides[0]), enumerate(sides[1])):
        width = max(min(one[2], other[2]) - max(one[0], other[0]), 0)
        height = max(min(one[3], other[3]) - max(one[1], other[1]), 0)
        areas = sum(max(box[2] - box[0], 0) * max(box[3] - box[1], 0) for box in (one, other))
        ratio = 1.0 if (one[:4] == other[:4]).all() else width * height / (areas - width * height or 1)
        if (one[4] >= one[5]) == (other[4] >= other[5]) and ratio >= least:
            pairs.append((-ratio, min(a, b), max(a, b), a, b))
    same: list[tuple[int, int]] = []
    for *_, a, b in sorted(pairs):
        if all(a != x and b != y for x, y in same):
            same.append((a, b))
    either = len(sides[0]) + len(sides[1]) - len(same)
    return 1 - len(same) / either if either else 0.0


def by_score(rows: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """In the order in which they are looked at, so that ties are told alike."""
    return sorted(rows, key=lambda row: -np.float32(max(row[4:])))


@given(one=ROWS, other=ROWS, least=st.sampled_from([0.1, 0.5, 1.0]))
def test_a_list_is_paired_as_a_loop_would(
    one: list[tuple[float, ...]], other: list[tuple[float, ...]], least: float
) -> None:
    found, expected = answer(*by_score(one)), answer(*by_score(other))
    boxes = boxes_of(match="overlap", overlap=least)
    distance = boxes_distance(boxes, found, expected)
    assert distance == pytest.approx(greedily(found, expected, least))
    assert distance == boxes_distance(boxes, expected, found)
    assert 0 <= distance <= 1
    assert boxes_distance(boxes, found, answer(*reversed(by_score(one)))) == 0.0


@given(pairs=st.lists(st.tuples(*[st.tuples(*[COORDINATES] * 4, SCORES, SCORES)] * 2), max_size=7))
def test_rows_are_compared_symmetrically(pairs: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> None:
    found, expected = answer(*(one for one, _ in pairs)), answer(*(other for _, other in pairs))
    distance = boxes_distance(PLAIN, found, expected)
    assert distance == boxes_distance(PLAIN, expected, found)
    assert 0 <= distance <= 1
    assert boxes_distance(PLAIN, found, {"y": found["y"].copy()}) == 0.0
    alone = [boxes_distance(PLAIN, answer(one), answer(other)) for one, other in pairs]
    assert (distance == 0.0) is (max(alone, default=0.0) == 0.0)


# -- its name ---------------------------------------------------------------------------------------------------------


def test_other_parameters_are_another_measure() -> None:
    """So that what was measured by one does not pass as measured by another."""
    column = {"box": ["y", 0, 3], "score": ["y", 4, 4]}
    others = [boxes_of(threshold=0.4), boxes_of(overlap=0.6), boxes_of(format="cxcywh"), boxes_of(scores="logits")]
    others += [LISTED, boxes_of(heads=[column]), boxes_of(axis=-2)]
    names = {one.name for one in (PLAIN, *others)}
    assert len(names) == 8
    assert all(name.startswith("boxes-") for name in names)
    assert boxes_of().name == PLAIN.name == boxes_of(overlap=0.5).name


def test_what_is_measured_under_a_contract_is_every_tensors_measure_and_its_boxes() -> None:
    assert measures_under(None).keys() == measures_under(Fidelity(measure="kl", bound=1.0)).keys() == MEASURES.keys()
    assert measures_under(Fidelity(measure="boxes", bound=0.1, boxes=PLAIN)).keys() == {*MEASURES, PLAIN.name}
