"""split/profiles/boxes.py: a contract that reads detections where the model has none is refused by name."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from split.errors import ConfigError
from split.profiles.boxes import Boxes, check_boxes
from split.tensor import TensorSpec

OUTPUTS = (
    TensorSpec(name="rows", dtype="FP32", shape=("n", 3549, 6)),
    TensorSpec(name="across", dtype="FP32", shape=(1, 84, 8400)),
    TensorSpec(name="boxes", dtype="FP32", shape=("found", 4)),
    TensorSpec(name="labels", dtype="INT64", shape=("found",)),
    TensorSpec(name="scores", dtype="FP32", shape=("found",)),
    TensorSpec(name="regressors", dtype="FP16", shape=(1, 896, 16)),
    TensorSpec(name="faces", dtype="FP16", shape=(1, 896, 1)),
    TensorSpec(name="open", dtype="FP32", shape=(-1, -1, -1)),
    TensorSpec(name="names", dtype="BYTES", shape=(1, 896, 1)),
    TensorSpec(name="many", dtype="FP32", shape=(7,)),
)


def boxes_of(head: dict[str, Any], axis: int = -1) -> Boxes:
    plain = {"heads": [head], "format": "xyxy", "scores": "logits", "threshold": 0.5, "axis": axis}
    return msgspec.convert(plain, Boxes)


@pytest.mark.parametrize(
    ("head", "axis"),
    [
        ({"box": ["rows", 0, 3], "objectness": ["rows", 4, 4], "score": ["rows", 5, 5]}, -1),
        ({"box": ["across", 0, 3], "score": ["across", 4, 83]}, -2),
        ({"box": "boxes", "label": "labels", "score": "scores"}, -1),
        ({"box": ["regressors", 0, 3], "score": "faces"}, -1),
        ({"box": ["open", 0, 3], "score": ["open", 4, 999]}, -1),  # it does not say
        ({"box": ["rows", 0, 3], "score": "open"}, -1),
    ],
)
def test_what_the_model_has_is_taken(head: dict[str, Any], axis: int) -> None:
    check_boxes(boxes_of(head, axis), OUTPUTS, where="boxes")


@pytest.mark.parametrize(
    ("head", "axis", "sentence"),
    [
        ({"box": ["row", 0, 3], "score": "faces"}, -1, "box: the model has no output 'row'; it has rows, across,"),
        ({"box": ["regressors", 0, 3], "score": "names"}, -1, "score: output 'names' is BYTES in the model; numbers"),
        ({"box": "regressors", "score": "faces"}, -1, "box: output 'regressors' of shape [1, 896, 16] has 16 columns"),
        ({"box": ["rows", 3, 6], "score": ["rows", 4, 4]}, -1, "has 6 columns on axis -1; the last is number 5"),
        ({"box": ["across", 0, 3], "score": ["across", 4, 84]}, -2, "has 84 columns on axis -2; the last is number 83"),
        ({"box": ["rows", 0, 3], "score": "faces"}, -1, "other rows than the boxes of 'rows' of shape ['n', 3549, 6]"),
        ({"box": "boxes", "score": "faces"}, -1, "score: output 'faces' of shape [1, 896, 1] has other rows than"),
        (
            {"box": "boxes", "score": "scores", "label": "boxes"},
            -1,
            "label: output 'boxes' of shape ['found', 4] has 4",
        ),
        ({"box": "many", "score": "many"}, -1, "box: output 'many' of shape [7] has no rows of columns"),
    ],
)
def test_what_it_has_not_is_refused_by_name(head: dict[str, Any], axis: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=r"^boxes\.heads\[0\]\..*" + re.escape(sentence)):
        check_boxes(boxes_of(head, axis), OUTPUTS, where="boxes")


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ({"box": ["y", 0, 4], "score": "s"}, "box must be 4 columns, got 5"),
        ({"box": ["y", 3, 0], "score": "s"}, "with first ≤ last, got ('y', 3, 0)"),
        ({"box": "y", "score": "s", "objectness": ["s", 0, 1]}, "objectness must be 1 column, got 2"),
        ({"box": "y", "score": "s", "label": ""}, "label must name an output, got ''"),
    ],
)
def test_what_makes_no_sense_by_itself_is_refused_when_it_is_read(head: dict[str, Any], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(sentence)):
        boxes_of(head)
