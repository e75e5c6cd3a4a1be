"""Request parameters of Isthmus, their limits, and the schemas that tell callers of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from split.codec.payload import SPOKEN
from split.errors import InvalidRequest
from split.oip.infer import ModelMetadata, OipRequest
from split.oip.options import CODECS, RequestOptions, isthmus_options
from split.oip.schema import request_schema, response_schema
from split.tensor import TensorSpec


def options(parameters: Mapping[str, bool | int | float | str]) -> RequestOptions:
    return isthmus_options(OipRequest(inputs={}, parameters=parameters))


def test_a_request_without_wishes_leaves_everything_to_the_daemon() -> None:
    assert options({"binary_data_output": True, "sequence_id": 4}) == RequestOptions()


def test_wishes_arrive_as_they_were_given() -> None:
    found = options(
        {
            "isthmus.mode": "split",
            "isthmus.cut": "0123456789ab",
            "isthmus.codec": "fp16",
            "isthmus.fidelity": 0.01,
            "isthmus.privacy": "no-raw-input",
            "priority": 3,
        }
    )
    assert (found.mode, found.cut, found.codec, found.fidelity, found.privacy, found.priority) == (
        "split",
        "0123456789ab",
        "fp16",
        0.01,
        "no-raw-input",
        3,
    )
    assert options({"isthmus.fidelity": 0}).fidelity == 0.0


@pytest.mark.parametrize(
    ("parameters", "deadline_ms"),
    [
        ({"isthmus.deadline_ms": 80}, 80.0),
        ({"timeout": 50_000}, 50.0),
        ({"isthmus.deadline_ms": 80, "timeout": 50_000}, 50.0),
        ({"isthmus.deadline_ms": 20.5, "timeout": 50_000}, 20.5),
        ({"isthmus.deadline_ms": 80, "timeout": 0}, 80.0),
        ({"timeout": 0}, None),
    ],
)
def test_the_smaller_of_the_two_deadlines_holds_and_a_timeout_of_zero_is_none(
    parameters: dict[str, float], deadline_ms: float | None
) -> None:
    assert options(parameters).deadline_ms == deadline_ms


@pytest.mark.parametrize(
    ("parameters", "phrase"),
    [
        ({"isthmus.mode": "cloud"}, "must be one of auto, local, split, offload, got 'cloud'"),
        ({"isthmus.mode": 1}, "isthmus.mode must be one of"),
        ({"isthmus.codec": "zip"}, "must be one of raw, fp16, int8, klt, encoded, jpeg, webp"),
        ({"isthmus.privacy": ""}, "must be one of any, no-raw-input, local-only"),
        ({"isthmus.cut": "0123"}, "12 hex digits"),
        ({"isthmus.cut": 123456789012}, "12 hex digits"),
        ({"isthmus.cut": "0123456789ab", "isthmus.mode": "local"}, "does not go with isthmus.mode local"),
        ({"isthmus.cut": "0123456789ab", "isthmus.mode": "offload"}, "does not go with isthmus.mode offload"),
        ({"isthmus.codec": "raw", "isthmus.mode": "local"}, "nothing travels"),
        ({"isthmus.codec": "encoded", "isthmus.mode": "split"}, "use isthmus.mode offload"),
        ({"isthmus.codec": "webp", "isthmus.cut": "0123456789ab"}, "use isthmus.mode offload"),
        ({"isthmus.codec": "klt", "isthmus.mode": "offload"}, "use isthmus.mode split"),
        *(
            ({"isthmus.fidelity": value}, "isthmus.fidelity must be a finite number, 0 or more")
            for value in (-0.1, math.inf, math.nan, True, "0.1", 10**400, -(10**400))
        ),
        ({"isthmus.modus": "local"}, "'isthmus.modus' is not known; known are isthmus.codec"),
        ({"Isthmus.Privacy": "local-only"}, "'Isthmus.Privacy' is not known; known are isthmus.codec"),
        *(
            ({"isthmus.deadline_ms": value}, "above 0, at most 3600000")
            for value in (0, -1, 10_000_000_000, True, "", "80")
        ),
        *(({"timeout": value}, "from 0 to 3600000000") for value in (-1, 10_000_000_000, True, "", 1.5)),
        *(({"priority": value}, "from 0 to 4294967295") for value in (-1, 10_000_000_000, True, "", 1.5)),
    ],
)
def test_a_wish_that_cannot_be_is_refused_with_what_can(parameters: dict[str, float], phrase: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        options(parameters)
    assert refused.value.status == 400
    assert phrase in str(refused.value)


def test_the_codecs_that_may_be_asked_for_are_those_that_there_are() -> None:
    assert sorted(CODECS) == sorted(SPOKEN)


MODEL = ModelMetadata(
    name="m",
    versions=("1",),
    platform="onnx_onnxv1",
    inputs=(TensorSpec(name="x", dtype="FP32", shape=("N", 3)), TensorSpec(name="h", dtype="FP16", shape=())),
    outputs=(TensorSpec(name="y", dtype="INT64", shape=(-1,)),),
    encoded=frozenset({"x"}),
)


def test_the_request_schema_names_each_input_and_the_picture_form_of_an_encoded_one() -> None:
    schema = request_schema(MODEL)
    inputs = schema["properties"]["inputs"]
    forms = [one["properties"] for one in inputs["items"]["oneOf"]]
    assert [(form["name"]["const"], form["datatype"]["const"]) for form in forms] == [
        ("x", "FP32"),
        ("h", "FP16"),
        ("x", "BYTES"),
    ]
    assert inputs["minItems"] == inputs["maxItems"] == 2
    assert forms[0]["shape"]["prefixItems"] == [{"type": "integer", "minimum": 0}, {"const": 3}]
    assert "data" not in forms[1]  # FP16 is binary only
    assert schema["properties"]["outputs"]["items"]["properties"]["name"]["enum"] == ["y"]


def test_the_response_schema_names_the_model_and_its_outputs() -> None:
    schema = response_schema(MODEL)
    (output,) = schema["properties"]["outputs"]["items"]["oneOf"]
    assert schema["properties"]["model_name"] == {"const": "m"}
    assert output["properties"]["data"]["items"]["anyOf"][0] == {"type": "integer"}


def test_metadata_shows_dims_that_are_not_fixed_as_minus_one() -> None:
    assert MODEL.as_json() == {
        "name": "m",
        "versions": ("1",),
        "platform": "onnx_onnxv1",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "h", "datatype": "FP16", "shape": []},
        ],
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
    }
