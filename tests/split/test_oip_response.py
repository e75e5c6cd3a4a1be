"""Answers of the Open Inference Protocol, read by tritonclient's decoder and by a strict JSON reader."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from split.errors import InvalidRequest, RemoteProtocolError
from split.oip.client import build_request, parse_response
from split.oip.infer import OipRequest, OipResponse, RequestedOutput
from split.oip.request import parse_infer
from split.oip.response import build_response
from split.oip.tensors import Buffer
from split.tensor import NUMPY_DTYPES

ArrayOf = np.ndarray[Any, Any]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def answer(**outputs: ArrayOf) -> OipResponse:
    return OipResponse(model_name="m", model_version="1", outputs=outputs)


def asked(*outputs: RequestedOutput, binary: bool = False) -> OipRequest:
    return OipRequest(inputs={}, outputs=outputs, binary_default=binary)


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(buffers)


def strict_json(text: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_by_triton(length: int | None, buffers: list[Buffer], name: str) -> ArrayOf:
    return triton.InferenceServerClient.parse_response_body(joined(buffers), header_length=length).as_numpy(name)


def words(elements: list[object]) -> ArrayOf:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("datatype", list(NUMPY_DTYPES))
def test_tritonclient_reads_the_tensor_that_was_answered(datatype: str, binary: bool, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    if datatype == "BYTES":
        array = words([f"wört {i}".encode() for i in range(count)]).reshape(shape)
    else:
        array = (
            np.random.default_rng(5).integers(0, 2 if datatype == "BOOL" else 100, shape).astype(NUMPY_DTYPES[datatype])
        )
    if datatype == "FP16" and not binary:
        with pytest.raises(InvalidRequest, match="no JSON form; ask for it as binary data"):
            build_response(answer(y=array), asked())
        return
    found = read_by_triton(*build_response(answer(y=array), asked(binary=binary)), "y")
    assert found.shape == shape
    if datatype == "BYTES":  # the client gives JSON strings back as str
        found = words([one.encode() if isinstance(one, str) else one for one in found.reshape(-1)]).reshape(shape)
    else:
        assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=4), elements=FINITE))
def test_finite_floats_survive_json_bit_for_bit(array: ArrayOf) -> None:
    length, buffers = build_response(answer(y=array), asked())
    assert length is None
    data = strict_json(joined(buffers))["outputs"][0]["data"]
    assert np.array(data, np.float32).tobytes() == array.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_json_cannot_carry_is_refused_with_the_advice_to_ask_for_binary(value: float) -> None:
    array = np.array([1, value, 3], np.float32)
    with pytest.raises(InvalidRequest, match=r"'y' holds NaN or infinity.*binary_data true") as refused:
        build_response(answer(y=array), asked())
    assert refused.value.status == 400


def test_not_a_number_and_infinities_keep_their_bits_as_binary() -> None:
    bits = bytes.fromhex("0000c07f 0000807f 000080ff")
    _, buffers = build_response(answer(y=np.frombuffer(bits, "<f4")), asked(binary=True))
    assert bytes(buffers[-1]) == bits


def test_bytes_that_are_no_text_are_refused_as_json_and_carried_as_binary() -> None:
    array = words([b"\xff\xd8"])
    with pytest.raises(InvalidRequest, match="not UTF-8 text; ask for it as binary"):
        build_response(answer(y=array), asked())
    assert bytes(build_response(answer(y=array), asked(binary=True))[1][-1]) == b"\2\0\0\0\xff\xd8"


def test_text_of_the_engine_is_carried_as_its_utf8_bytes() -> None:
    _, buffers = build_response(answer(y=words(["ä"])), asked(binary=True))
    assert bytes(buffers[-1]) == b"\2\0\0\0\xc3\xa4"


def test_a_contiguous_tensor_is_sent_from_where_it_lies() -> None:
    array = np.zeros(4, np.float32)
    _, buffers = build_response(answer(y=array), asked(binary=True))
    array[0] = 1.0
    assert bytes(buffers[-1])[:4] == b"\0\0\x80\x3f"


@pytest.mark.parametrize("array", [np.arange(6, dtype=">i2").reshape(2, 3), np.arange(6, dtype="i2").reshape(3, 2).T])
def test_big_endian_and_transposed_tensors_are_sent_little_endian_and_row_major(array: ArrayOf) -> None:
    found = read_by_triton(*build_response(answer(y=array), asked(binary=True)), "y")
    assert found.tolist() == array.tolist()


def test_each_output_comes_as_it_was_asked_for() -> None:
    outputs = {"y1": np.array([1.5], np.float32), "y2": np.array([7], np.int64), "y3": np.array([True])}
    request = asked(RequestedOutput(name="y1", binary=False), RequestedOutput(name="y2"), binary=True)
    length, buffers = build_response(answer(**outputs), request)
    body = joined(buffers)
    assert length is not None
    first, second = strict_json(body[:length])["outputs"]
    assert first == {"name": "y1", "datatype": "FP32", "shape": [1], "data": [1.5]}
    assert second == {"name": "y2", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}}
    assert body[length:] == b"\7" + b"\0" * 7


def test_only_the_output_asked_for_is_answered() -> None:
    outputs = {"y1": np.array([1]), "y2": np.array([2])}
    _, buffers = build_response(answer(**outputs), asked(RequestedOutput(name="y2")))
    assert [output["name"] for output in strict_json(joined(buffers))["outputs"]] == ["y2"]


def test_an_output_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidRequest, match="'zz' does not exist; this model has 'y1', 'y2'"):
        build_response(answer(y1=np.array([1]), y2=np.array([2])), asked(RequestedOutput(name="zz")))


@pytest.mark.parametrize("name", ["", "request ü 1"])
def test_the_callers_id_is_echoed_and_no_id_stays_no_id(name: str) -> None:
    _, buffers = build_response(OipResponse(model_name="m", model_version="1", id=name, outputs={}), asked())
    assert strict_json(joined(buffers)).get("id", "") == name


def test_the_answer_says_what_the_service_says_in_its_parameters() -> None:
    said = {"isthmus.placement": "split", "isthmus.predicted_ms": 1.5}
    _, buffers = build_response(OipResponse(model_name="m", model_version="1", parameters=said, outputs={}), asked())
    assert strict_json(joined(buffers))["parameters"] == said


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6),
        hnp.arrays(
            st.sampled_from(["<f4", "<f2", "?", "<u8", "i1"]), hnp.array_shapes(min_dims=0, min_side=0, max_dims=3)
        ),
        max_size=3,
    )
)
def test_what_our_client_sends_our_server_reads_and_the_other_way_round(tensors: dict[str, ArrayOf]) -> None:
    length, buffers = build_request(tensors, {"isthmus.mode": "local"}, request_id="r")
    request = parse_infer(joined(buffers), length)
    assert (request.id, request.parameters["isthmus.mode"]) == ("r", "local")
    length_back, buffers_back = build_response(answer(**request.inputs), request)
    back = parse_response(joined(buffers_back), length_back)
    for name, array in tensors.items():
        assert back.outputs[name].tobytes() == array.tobytes()
        assert (back.outputs[name].shape, back.outputs[name].dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (b"<html>", None),
        (b"{}", None),
        (b'{"model_name":"m","outputs":[{"name":"y","shape":[2],"datatype":"FP32","data":[1]}]}', None),
        (b'{"model_name":"m","outputs":[]}', 10),
    ],
)
def test_an_answer_that_is_none_is_the_peers_fault(body: bytes, length: int | None) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_response(body, length)
