"""An inference request of the Open Inference Protocol v2: body bytes → `OipRequest`. Pure; not the HTTP around it.

Spec: kserve/open-inference-protocol `inference_rest.md`, Triton's `extension_binary_data.md`. Unknown fields
are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from split.errors import InvalidRequest, UnsupportedRequest
from split.oip.infer import ModelMetadata, OipRequest, RequestedOutput, Scalar, plain_shape
from split.oip.tensors import Buffer, from_binary, from_json, shown
from split.tensor import Array, Tensors, TensorSpec

MAX_ID_LENGTH: Final = 1024
MAX_NAME_LENGTH: Final = 1024

_NOT_FINITE: Final = re.compile(rb"-?(NaN|Infinity|Inf|nan|inf)")


class _InputJson(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] | None = None
    data: object = msgspec.UNSET


class _OutputJson(msgspec.Struct):
    name: str
    parameters: dict[str, Scalar] | None = None


class _RequestJson(msgspec.Struct):
    inputs: list[_InputJson]
    id: str | None = None
    parameters: dict[str, Scalar] | None = None
    outputs: list[_OutputJson] | None = None


_DECODER: Final = msgspec.json.Decoder(_RequestJson)


def parse_infer(body: Buffer, header_length: int | None, *, metadata: ModelMetadata | None = None) -> OipRequest:
    """Parse the body of an infer request.

    `header_length`: value of `Inference-Header-Content-Length`, None without that header. 0 is Triton's raw request:
    the whole body is the model's one input, for which `metadata` must be given. InvalidRequest (with the field's
    name) for anything malformed, UnsupportedRequest for shared memory and classification.
    """
    view = memoryview(body).cast("B") if not isinstance(body, memoryview) else body
    if header_length is None:
        return _from_header(view, None)
    if header_length == 0:
        return _raw(view, metadata)
    if not 0 < header_length <= view.nbytes:
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {header_length}, the body has {view.nbytes} bytes; "
            "it must lie within the body"
        )
    return _from_header(view[:header_length], view[header_length:])


def _from_header(header: memoryview, binary: memoryview | None) -> OipRequest:
    json = _decode(header)
    if json.id is not None and len(json.id) > MAX_ID_LENGTH:
        raise InvalidRequest(f"id has {len(json.id)} characters, at most {MAX_ID_LENGTH} are accepted")
    parameters = json.parameters or {}
    outputs = tuple(map(_requested, json.outputs or ()))
    names = [output.name for output in outputs]
    if len(set(names)) != len(names):
        raise InvalidRequest("outputs names an output twice; name each output once")
    inputs: Tensors = {}
    at = 0
    for tensor in json.inputs:
        if not tensor.name or len(tensor.name) > MAX_NAME_LENGTH:
            raise InvalidRequest(f"an input's name must have 1 to {MAX_NAME_LENGTH} characters, got {len(tensor.name)}")
        if tensor.name in inputs:
            raise InvalidRequest(f"input {shown(tensor.name)} is given twice; give each input once")
        inputs[tensor.name], at = _input(tensor, binary, at)
    if binary is not None and at != binary.nbytes:
        raise InvalidRequest(
            f"{binary.nbytes - at} bytes follow the last binary tensor; "
            "the binary_data_size of all inputs must add up to what follows the JSON"
        )
    return OipRequest(
        id=json.id or "",
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        binary_default=_flag(parameters, "binary_data_output", "parameters") or False,
    )


def _input(tensor: _InputJson, binary: memoryview | None, at: int) -> tuple[Array, int]:
    """The tensor and where the next binary one begins."""
    parameters = tensor.parameters or {}
    _check_wishes(f"input {shown(tensor.name)}", parameters)
    size = parameters.get("binary_data_size")
    shape = tuple(tensor.shape)
    if size is None:
        if tensor.data is msgspec.UNSET:
            raise InvalidRequest(f"input {shown(tensor.name)} has neither data nor parameters.binary_data_size")
        return from_json(tensor.name, tensor.datatype, shape, tensor.data), at
    if tensor.data is not msgspec.UNSET:
        raise InvalidRequest(f"input {shown(tensor.name)} has both data and binary_data_size; give one of them")
    if type(size) is not int or size < 0:
        raise InvalidRequest(
            f"input {shown(tensor.name)}: binary_data_size must be a whole number of bytes, got {shown(size)}"
        )
    if binary is None:
        raise InvalidRequest(
            f"input {shown(tensor.name)} has binary_data_size, but the request has no header "
            "Inference-Header-Content-Length"
        )
    if size > binary.nbytes - at:
        raise InvalidRequest(
            f"input {shown(tensor.name)}: binary_data_size is {size}, "
            f"only {binary.nbytes - at} bytes are left in the body"
        )
    return from_binary(tensor.name, tensor.datatype, shape, binary[at : at + size]), at + size


def _raw(body: memoryview, metadata: ModelMetadata | None) -> OipRequest:
    """Triton's raw request: shape and datatype follow from the model; outputs come back as binary."""
    if metadata is None or len(metadata.inputs) != 1:
        count = 0 if metadata is None else len(metadata.inputs)
        raise InvalidRequest(
            f"a raw request (Inference-Header-Content-Length: 0) needs a model with one input, this one has {count}; "
            "send the JSON header and name the inputs"
        )
    (spec,) = metadata.inputs
    shape = _raw_shape(spec, body.nbytes)
    if spec.dtype == "BYTES" or (shape is None and spec.name in metadata.encoded):
        # The body is the one element, without a length before it; so comes a picture for an encoded input too.
        framed = len(body).to_bytes(4, "little") + bytes(body)
        dims = tuple(1 for _ in spec.shape) if spec.dtype == "BYTES" else (1,)
        return OipRequest(
            inputs={spec.name: from_binary(spec.name, "BYTES", dims, memoryview(framed))}, binary_default=True
        )
    if shape is None:
        raise InvalidRequest(
            f"input {shown(spec.name)}: a raw body of {body.nbytes} bytes does not determine shape {plain_shape(spec)} "
            f"of {spec.dtype}; send the JSON header with the shape"
        )
    return OipRequest(inputs={spec.name: from_binary(spec.name, spec.dtype, shape, body)}, binary_default=True)


def _raw_shape(spec: TensorSpec, nbytes: int) -> tuple[int, ...] | None:
    """The one shape of `spec` that has `nbytes` bytes; None when none or many have."""
    fixed = [dim if isinstance(dim, int) and dim >= 0 else None for dim in spec.shape]
    unit = math.prod(dim for dim in fixed if dim is not None) * spec.element_bytes
    match fixed.count(None):
        case 0:
            return tuple(dim for dim in fixed if dim is not None) if unit == nbytes else None
        case 1 if unit and nbytes and nbytes % unit == 0:
            return tuple(nbytes // unit if dim is None else dim for dim in fixed)
        case _:
            return None


def _requested(output: _OutputJson) -> RequestedOutput:
    parameters = output.parameters or {}
    place = f"output {shown(output.name)}"
    _check_wishes(place, parameters)
    if parameters.get("classification"):
        raise UnsupportedRequest(f"{place}: classification is not offered; take the tensor and sort it")
    return RequestedOutput(name=output.name, binary=_flag(parameters, "binary_data", place), parameters=parameters)


def _flag(parameters: Mapping[str, Scalar], key: str, place: str) -> bool | None:
    value = parameters.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{place}: {key} must be true or false, got {shown(value)}")
    return value


def _check_wishes(place: str, parameters: Mapping[str, Scalar]) -> None:
    """Of one tensor. What is asked of Isthmus is asked for the request: a wish in another place (privacy of one input)
    must not pass for a fulfilled one."""
    for key in parameters:
        if key == "shared_memory_region":
            raise UnsupportedRequest(f"{place}: shared memory is not offered; send the data in the body")
        if key[:8].lower() == "isthmus.":
            raise InvalidRequest(f"{place}: {shown(key)} is a parameter of the whole request; give it there")


def _decode(header: memoryview) -> _RequestJson:
    try:
        return _DECODER.decode(header)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is no inference request: {error}") from None
    except msgspec.DecodeError as error:
        at = re.search(r"byte (\d+)", str(error))
        start = max(int(at[1]) - 1, 0) if at else 0
        if at and _NOT_FINITE.search(header[start : start + 10]):
            raise InvalidRequest(
                f"NaN and Infinity are not JSON (byte {at[1]}); send such values as binary data (binary_data_size)"
            ) from None
        raise InvalidRequest(f"the request's JSON cannot be read: {error}") from None
    except RecursionError:
        raise InvalidRequest("the request's JSON is nested too deeply; send data flat") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the request's JSON is not UTF-8 text") from None
