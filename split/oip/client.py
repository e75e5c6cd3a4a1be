"""The caller's side of the protocol: tensors → request body, answer body → tensors. Pure; for tools and demo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from split.errors import InvalidRequest, RemoteProtocolError
from split.oip.infer import OipResponse, Scalar
from split.oip.tensors import Buffer, from_binary, from_json, to_binary
from split.tensor import Array, Tensors, dtype_name


class _TensorJson(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: object = None


class _ResponseJson(msgspec.Struct):
    model_name: str
    outputs: list[_TensorJson]
    model_version: str = ""
    id: str = ""
    parameters: dict[str, Scalar] = {}


def build_request(
    inputs: Mapping[str, Array], parameters: Mapping[str, Scalar], *, request_id: str = ""
) -> tuple[int, list[Buffer]]:
    """(`Inference-Header-Content-Length`, buffers of the body); all tensors binary, all outputs asked for as binary."""
    tensors: list[dict[str, Any]] = []
    tail: list[Buffer] = []
    for name, array in inputs.items():
        data = to_binary(array)
        tensors.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": dtype_name(array.dtype),
                "parameters": {"binary_data_size": data.nbytes},
            }
        )
        tail.append(data)
    json: dict[str, Any] = {"parameters": {"binary_data_output": True, **parameters}, "inputs": tensors}
    if request_id:
        json["id"] = request_id
    header = msgspec.json.encode(json)
    return len(header), [header, *tail]


def parse_response(body: Buffer, header_length: int | None) -> OipResponse:
    """The answer to an infer request; RemoteProtocolError when it is none."""
    view = memoryview(body)
    binary = memoryview(b"") if header_length is None else view[header_length:]
    try:
        json = msgspec.json.decode(view if header_length is None else view[:header_length], type=_ResponseJson)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the answer is no inference response: {error}") from None
    try:
        outputs = _outputs(json.outputs, binary)
    except InvalidRequest as error:
        raise RemoteProtocolError(f"the answer's tensors are damaged: {error}") from None
    return OipResponse(
        model_name=json.model_name,
        model_version=json.model_version,
        id=json.id,
        parameters=json.parameters,
        outputs=outputs,
    )


def _outputs(tensors: list[_TensorJson], binary: memoryview) -> Tensors:
    outputs: Tensors = {}
    at = 0
    for tensor in tensors:
        size = tensor.parameters.get("binary_data_size")
        shape = tuple(tensor.shape)
        if isinstance(size, int):
            outputs[tensor.name] = from_binary(tensor.name, tensor.datatype, shape, binary[at : at + size])
            at += size
        else:
            outputs[tensor.name] = from_json(tensor.name, tensor.datatype, shape, tensor.data)
    return outputs
