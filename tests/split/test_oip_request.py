"""Requests of the Open Inference Protocol: tritonclient encodes the good ones, a table holds the bad ones."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from split.errors import InvalidRequest, IsthmusError
from split.oip.infer import ModelMetadata
from split.oip.request import parse_infer
from split.tensor import NUMPY_DTYPES, TensorSpec

NUMBERS = [name for name in NUMPY_DTYPES if name != "BYTES"]
SHAPES = [(), (0,), (1,), (2, 0, 3), (3, 4)]


def sample(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values that a wrong byte order, sign or rounding would change."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        words = np.empty(count, object)
        words[:] = [f"wört {i}".encode() for i in range(count)]
        return words.reshape(shape)
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind == "b":
        return (np.arange(count) % 3 == 1).reshape(shape)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        values = [bounds.min, bounds.max, 1, 2]
        return np.array([values[i % 4] for i in range(count)], dtype).reshape(shape)
    return (np.arange(count) / 7 - 0.3).astype(dtype).reshape(shape)


def triton_body(array: np.ndarray[Any, Any], datatype: str, *, binary: bool) -> tuple[bytes, int | None]:
    tensor = triton.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return triton.InferenceServerClient.generate_request_body([tensor], request_id="r7")


def binary_body(header: object, tail: bytes = b"") -> tuple[bytes, int]:
    text = json.dumps(header).encode()
    return text + tail, len(text)


def fp32_header(size: int, shape: list[int]) -> dict[str, Any]:
    tensor = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}
    return {"inputs": [tensor]}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("datatype", [*NUMBERS, "BYTES"])
def test_a_tensor_that_tritonclient_sends_as_binary_arrives_bit_for_bit(datatype: str, shape: tuple[int, ...]) -> None:
    array = sample(datatype, shape)
    request = parse_infer(*triton_body(array, datatype, binary=True))
    assert request.id == "r7"
    assert request.binary_default
    found = request.inputs["x"]
    assert found.dtype == NUMPY_DTYPES[datatype]
    assert found.shape == shape
    assert found.tolist() == array.tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("datatype", [name for name in [*NUMBERS, "BYTES"] if name != "FP16"])
def test_a_tensor_that_tritonclient_sends_as_json_arrives_bit_for_bit(datatype: str, shape: tuple[int, ...]) -> None:
    array = sample(datatype, shape)
    found = parse_infer(*triton_body(array, datatype, binary=False)).inputs["x"]
    assert found.dtype == NUMPY_DTYPES[datatype]
    assert found.shape == shape
    assert found.tolist() == array.tolist()


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=5), elements=st.floats(width=32)))
def test_any_float_tensor_keeps_its_bits_as_binary(array: np.ndarray[Any, Any]) -> None:
    found = parse_infer(*triton_body(array, "FP32", binary=True)).inputs["x"]
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_any_bytes_elements_arrive_as_they_were_sent(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    assert parse_infer(*triton_body(array, "BYTES", binary=True)).inputs["x"].tolist() == elements


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 250)))
def test_no_bytes_at_all_bring_anything_but_a_typed_error(body: bytes, header_length: int | None) -> None:
    with pytest.raises(InvalidRequest):
        parse_infer(body, header_length)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES, JSON_VALUES, st.sampled_from([*NUMBERS, "BYTES"]))
def test_no_json_brings_anything_but_tensors_or_a_typed_error(
    shape: object, data: object, parameters: object, outputs: object, datatype: str
) -> None:
    tensor = {"name": "x", "shape": shape, "datatype": datatype, "data": data, "parameters": parameters}
    body = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    refusal: IsthmusError | None = None
    try:
        request = parse_infer(body, None)
        assert list(request.inputs["x"].shape) == shape
    except IsthmusError as error:
        refusal = error
    assert refusal is None or (refusal.status in (400, 501) and len(str(refusal)) < 500)


def test_a_binary_tensor_that_lies_aligned_is_not_copied() -> None:
    body = bytearray(b" " * 4096)
    header = json.dumps(fp32_header(16, [4])).encode()
    header += b" " * (-len(header) % 16)
    whole = header + np.arange(4, dtype="<f4").tobytes()
    body[: len(whole)] = whole
    found = parse_infer(memoryview(body)[: len(whole)], len(header)).inputs["x"]
    body[len(header) : len(header) + 4] = struct.pack("<f", 9.0)
    assert found.tolist() == [9.0, 1.0, 2.0, 3.0]


def test_a_binary_tensor_that_lies_unaligned_is_aligned_by_a_copy() -> None:
    header = json.dumps(fp32_header(8, [2])).encode()
    header += b" " * (1 - len(header) % 4)
    found = parse_infer(header + np.array([1, 2], "<f4").tobytes(), len(header)).inputs["x"]
    assert found.flags.aligned
    assert found.tolist() == [1.0, 2.0]


def test_nested_and_flat_data_are_the_same_tensor() -> None:
    rows = [[6.8, 2.8, 4.8, 1.4], [6, 3.4, 4.5, 1.6]]

    def parsed(data: object) -> list[Any]:
        tensor = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": data}
        return parse_infer(json.dumps({"inputs": [tensor]}).encode(), None).inputs["x"].tolist()

    assert parsed(rows) == parsed(rows[0] + rows[1]) == np.array(rows, np.float32).tolist()


@pytest.mark.parametrize("data", [[], [[], []]])
def test_a_tensor_without_elements_keeps_its_shape_and_datatype(data: list[Any]) -> None:
    tensor = {"name": "x", "shape": [2, 0, 3], "datatype": "FP32", "data": data}
    found = parse_infer(json.dumps({"inputs": [tensor]}).encode(), None).inputs["x"]
    assert (found.shape, found.dtype) == ((2, 0, 3), np.float32)


def test_inputs_of_both_kinds_may_come_in_one_request_and_keep_their_order() -> None:
    header = {
        "inputs": [
            {"name": "b", "shape": [2], "datatype": "INT16", "parameters": {"binary_data_size": 4}},
            {"name": "a", "shape": [1], "datatype": "BOOL", "data": [True]},
            {"name": "c", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 7}},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}],
    }
    tail = struct.pack("<hh", -1, 2) + struct.pack("<I", 3) + b"abc"
    request = parse_infer(*binary_body(header, tail))
    assert {name: array.tolist() for name, array in request.inputs.items()} == {
        "b": [-1, 2],
        "a": [True],
        "c": [b"abc"],
    }
    assert list(request.inputs) == ["b", "a", "c"]
    assert [(output.name, output.binary) for output in request.outputs] == [("y", True), ("z", None)]
    assert not request.binary_default


def test_fields_that_the_protocol_does_not_know_are_ignored_and_optional_ones_may_be_null() -> None:
    tensor = {"name": "x", "shape": [1], "datatype": "INT8", "data": [5], "colour": "red", "parameters": None}
    request = parse_infer(
        json.dumps({"inputs": [tensor], "id": None, "outputs": None, "parameters": None, "extra": {}}).encode(), None
    )
    assert request.id == ""
    assert request.inputs["x"].tolist() == [5]


def one(**changes: object) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
    tensor.update(changes)
    return {"inputs": [{key: value for key, value in tensor.items() if value is not ...}]}


HUGE = 1 << 62
NO_DATA: Any = ...
MALFORMED_JSON: list[tuple[str, object, int, str]] = [
    ("not JSON", b"{", 400, "cannot be read"),
    ("no bytes", b"", 400, "cannot be read"),
    ("a list", [], 400, "object"),
    ("a v1 body", {"instances": [[1]]}, 400, "inputs"),
    ("inputs null", {"inputs": None}, 400, "inputs"),
    ("inputs a map", {"inputs": {}}, 400, "inputs"),
    ("no name", one(name=NO_DATA), 400, "name"),
    ("a name that is a number", one(name=7), 400, "name"),
    ("an empty name", one(name=""), 400, "name"),
    ("a name of 2000 letters", one(name="n" * 2000), 400, "name"),
    ("no shape", one(shape=NO_DATA), 400, "shape"),
    ("a shape in a string", one(shape="-1"), 400, "shape"),
    ("a shape null", one(shape=None), 400, "shape"),
    ("a fractional dim", one(shape=[1.5]), 400, "shape"),
    ("a dim true", one(shape=[True]), 400, "shape"),
    ("a dim in a string", one(shape=["2"]), 400, "shape"),
    ("a negative dim", one(shape=[-1, 2]), 400, "negative dim"),
    ("10 000 dims", one(shape=[1] * 10_000), 400, "10000 dims"),
    ("a huge product", one(shape=[HUGE, HUGE]), 400, "more elements"),
    ("a huge product beside a zero", one(shape=[0, HUGE, HUGE], data=[]), 400, "more elements"),
    ("a dim beyond 64 bits", one(shape=[1 << 70]), 400, "shape"),
    ("no datatype", one(datatype=NO_DATA), 400, "datatype"),
    ("a datatype of no one", one(datatype="STRING"), 400, "'STRING' is not supported"),
    ("BF16", one(datatype="BF16"), 400, "'BF16' is not supported"),
    ("a datatype in small letters", one(datatype="fp32"), 400, "supported are BOOL"),
    ("no data", one(data=NO_DATA), 400, "neither data"),
    ("data null", one(data=None), 400, "must be an array, got null"),
    ("data a number", one(data=3), 400, "must be an array"),
    ("data a map", one(data={"b64": ""}), 400, "must be an array, got an object"),
    ("too few elements", one(data=[1]), 400, "needs 2 elements, data has 1"),
    ("too many elements", one(data=[1, 2, 3]), 400, "needs 2 elements, data has 3"),
    ("null among numbers", one(data=[1, None]), 400, "got null at index 1"),
    ("a string among numbers", one(data=[1, "2"]), 400, "must be a number"),
    ("true among numbers", one(data=[1, True]), 400, "must be a number, got true"),
    ("FP16 as JSON", one(datatype="FP16"), 400, "no JSON form"),
    ("NaN", b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}]}', 400, "NaN and Infinity"),
    ("Infinity", b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[Infinity]}]}', 400, "NaN and Inf"),
    ("-Infinity", b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[-Infinity]}]}', 400, "NaN and Inf"),
    ("1e400", b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP64","data":[1e400]}]}', 400, "out of range"),
    ("1e300 as FP32", one(data=[1e300, 0]), 400, "out of range for FP32"),
    ("an integer beyond FP64", one(datatype="FP64", data=[10**320, 0]), 400, "out of range"),
    ("INT8 300", one(datatype="INT8", data=[300, 1]), 400, "300 is out of range for INT8 (-128 to 127)"),
    ("UINT8 -1", one(datatype="UINT8", data=[1, -1]), 400, "out of range for UINT8"),
    ("INT64 beyond", one(datatype="INT64", data=[1 << 63, 0]), 400, "out of range for INT64"),
    ("UINT64 beyond", one(datatype="UINT64", data=[1 << 64, 0]), 400, "out of range for UINT64"),
    ("a float for INT32", one(datatype="INT32", data=[1.0, 2]), 400, "must be an integer"),
    ("true for INT32", one(datatype="INT32", data=[True, 2]), 400, "must be an integer, got true"),
    ("1 for BOOL", one(datatype="BOOL", data=[1, 0]), 400, "must be true or false"),
    ("a number for BYTES", one(datatype="BYTES", data=["a", 1]), 400, "must be a string"),
    ("a lone surrogate", b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}', 400, "read"),
    ("bytes that are no UTF-8", b'{"inputs":[{"name":"\xff"}]}', 400, "UTF-8"),
    ("ragged rows", one(shape=[2, 2], data=[[1, 2], [3]]), 400, "ragged"),
    ("rows and numbers", one(shape=[2, 1], data=[[1], 2]), 400, "ragged"),
    ("numbers and rows", one(shape=[2], data=[1, [2]]), 400, "must be a number, got an array"),
    ("deeper than the shape", one(shape=[2], data=[[1], [2]]), 400, "deeper than shape"),
    ("nested otherwise than the shape", one(shape=[4, 1], data=[[1, 2], [3, 4]]), 400, "nested as [2, 2]"),
    ("nested 100 000 deep", b'{"inputs":' + b"[" * 100_000, 400, "inputs"),
    ("data nested 100 000 deep", b'{"inputs":[{"data":' + b"[" * 100_000, 400, "too deeply"),
    ("an input twice", {"inputs": one()["inputs"] * 2}, 400, "given twice"),
    ("an output twice", one() | {"outputs": [{"name": "y"}, {"name": "y"}]}, 400, "twice"),
    ("an output without name", one() | {"outputs": [{}]}, 400, "outputs"),
    (
        "binary_data in a string",
        one() | {"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]},
        400,
        "true",
    ),
    (
        "classification",
        one() | {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        501,
        "classification",
    ),
    ("shared memory", one(data=NO_DATA, parameters={"shared_memory_region": "r"}), 501, "shared memory"),
    (
        "shared memory out",
        one() | {"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
        501,
        "shared",
    ),
    ("a wish for one input", one(parameters={"isthmus.privacy": "local-only"}), 400, "of the whole request"),
    (
        "a wish for one output",
        one() | {"outputs": [{"name": "y", "parameters": {"isthmus.codec": "raw"}}]},
        400,
        "of the whole request",
    ),
    ("an id that is a number", one() | {"id": 7}, 400, "id"),
    ("an id of 64 KiB", one() | {"id": "i" * 65536}, 400, "id has 65536 characters"),
    ("parameters a list", one() | {"parameters": []}, 400, "parameters"),
    ("a parameter that is a map", one() | {"parameters": {"a": {}}}, 400, "parameters"),
    ("binary_data_output 1", one() | {"parameters": {"binary_data_output": 1}}, 400, "true or false"),
    (
        "a binary size without the header",
        one(data=NO_DATA, parameters={"binary_data_size": 8}),
        400,
        "Inference-Header",
    ),
]


@pytest.mark.parametrize(
    ("body", "status", "phrase"), [row[1:] for row in MALFORMED_JSON], ids=[r[0] for r in MALFORMED_JSON]
)
def test_a_malformed_json_request_is_refused_with_a_sentence_that_names_the_fault(
    body: object, status: int, phrase: str
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(IsthmusError) as refused:
        parse_infer(raw, None)
    assert refused.value.status == status
    assert phrase in str(refused.value)
    assert len(str(refused.value)) < 500


def bytes_header(size: int, shape: list[int]) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": size}}]}


MALFORMED_BINARY: list[tuple[str, dict[str, Any], bytes, str]] = [
    ("bytes after the last tensor", fp32_header(4, [1]), b"\0" * 5, "1 bytes follow"),
    ("bytes after no tensor", one(), b"\0", "1 bytes follow"),
    ("a size beyond the body", fp32_header(8, [2]), b"\0" * 4, "only 4 bytes are left"),
    ("a size of 2^62", fp32_header(HUGE, [1]), b"\0" * 4, "only 4 bytes are left"),
    ("a size that is not the shape's", fp32_header(8, [1]), b"\0" * 8, "takes 4 bytes, got 8"),
    ("a shape of 2^39 elements", fp32_header(4, [1 << 39]), b"\0" * 4, "got 4"),
    ("a negative size", fp32_header(-4, [1]), b"", "binary_data_size must be"),
    ("a size true", one(data=NO_DATA, parameters={"binary_data_size": True}), b"\0", "binary_data_size must be"),
    ("a size in a string", one(data=NO_DATA, parameters={"binary_data_size": "8"}), b"\0" * 8, "binary_data_size must"),
    ("a fractional size", one(data=NO_DATA, parameters={"binary_data_size": 8.5}), b"\0" * 8, "binary_data_size must"),
    ("data and a size", one(parameters={"binary_data_size": 8}), b"\0" * 8, "both data and binary_data_size"),
    ("a boolean of 2", one(datatype="BOOL", data=NO_DATA, parameters={"binary_data_size": 2}), b"\1\2", "byte 0 or 1"),
    ("an element of 4 GiB", bytes_header(8, [1]), b"\xff\xff\xff\xffabcd", "element 0 length exceeds buffer"),
    ("a second element too long", bytes_header(10, [2]), b"\1\0\0\0a\2\0\0\0b", "element 1 length exceeds buffer"),
    ("half a length", bytes_header(9, [2]), b"\2\0\0\0ab\1\0\0", "element 1 of 2 has no length"),
    ("more elements than bytes", bytes_header(8, [1 << 39]), b"\0" * 8, "do not fit into 8 bytes"),
    ("fewer elements than bytes", bytes_header(10, [1]), b"\1\0\0\0a\1\0\0\0b", "5 bytes follow the last of 1"),
]


@pytest.mark.parametrize(
    ("header", "tail", "phrase"), [row[1:] for row in MALFORMED_BINARY], ids=[row[0] for row in MALFORMED_BINARY]
)
def test_a_malformed_binary_request_is_refused_with_a_sentence_that_names_the_fault(
    header: dict[str, Any], tail: bytes, phrase: str
) -> None:
    body, length = binary_body(header, tail)
    with pytest.raises(InvalidRequest) as refused:
        parse_infer(body, length)
    assert refused.value.status == 400
    assert phrase in str(refused.value)


@pytest.mark.parametrize("length", [3, 10_000, -1])
def test_a_header_length_that_is_not_the_json_is_refused(length: int) -> None:
    body, _ = binary_body(fp32_header(4, [1]), b"\0" * 4)
    with pytest.raises(InvalidRequest, match=r"cannot be read|must lie within"):
        parse_infer(body, length)


def metadata(*inputs: TensorSpec, encoded: frozenset[str] = frozenset()) -> ModelMetadata:
    return ModelMetadata(name="m", versions=("1",), platform="p", inputs=inputs, outputs=(), encoded=encoded)


PICTURE = TensorSpec(name="x", dtype="FP32", shape=("N", 3, 2, 2))


def test_a_raw_request_takes_its_shape_from_the_model() -> None:
    array = np.arange(24, dtype="<f4").reshape(2, 3, 2, 2)
    request = parse_infer(array.tobytes(), 0, metadata=metadata(PICTURE))
    assert request.inputs["x"].tolist() == array.tolist()
    assert request.binary_default


def test_a_raw_request_for_an_encoded_input_may_be_the_picture_itself() -> None:
    jpeg = b"\xff\xd8\xff\xe0 and so on"
    request = parse_infer(jpeg, 0, metadata=metadata(PICTURE, encoded=frozenset({"x"})))
    assert request.inputs["x"].tolist() == [jpeg]


def test_a_raw_request_for_a_bytes_input_is_its_one_element() -> None:
    text = TensorSpec(name="t", dtype="BYTES", shape=(1, 1))
    assert parse_infer(b"hello", 0, metadata=metadata(text)).inputs["t"].tolist() == [[b"hello"]]


@pytest.mark.parametrize(
    ("known", "body", "phrase"),
    [
        (None, b"", "a model with one input, this one has 0"),
        (metadata(PICTURE, TensorSpec(name="y", dtype="FP32", shape=(1,))), b"", "this one has 2"),
        (metadata(PICTURE), b"\0" * 50, "does not determine shape [-1, 3, 2, 2]"),
        (metadata(PICTURE), b"", "does not determine shape"),
        (metadata(TensorSpec(name="x", dtype="FP32", shape=(-1, "M"))), b"\0" * 4, "does not determine shape [-1, -1]"),
        (metadata(TensorSpec(name="x", dtype="FP32", shape=(2,))), b"\0" * 4, "does not determine shape [2]"),
    ],
)
def test_a_raw_request_that_the_model_does_not_determine_is_refused(
    known: ModelMetadata | None, body: bytes, phrase: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_infer(body, 0, metadata=known)
    assert phrase in str(refused.value)
