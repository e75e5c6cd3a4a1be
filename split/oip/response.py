"""An answer of the Open Inference Protocol v2: `OipResponse` → body buffers. Pure."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from split.errors import InvalidRequest
from split.oip.infer import OipRequest, OipResponse
from split.oip.tensors import Buffer, shown, to_binary, to_json
from split.tensor import dtype_name

_ENCODER: Final = msgspec.json.Encoder()


def build_response(response: OipResponse, request: OipRequest) -> tuple[int | None, list[Buffer]]:
    """Body of the answer: (`Inference-Header-Content-Length` or None when all is JSON, buffers to send in this order).

    Binary tensors are views of the arrays, not copies. Each output comes as the request asked for it; InvalidRequest,
    with the advice to ask for binary, for values that JSON cannot carry (NaN, infinity, FP16, bytes that are no text),
    and for a requested output that is not in `response`.
    """
    wanted = {output.name: output.binary for output in request.outputs}
    missing = wanted.keys() - response.outputs.keys()
    if missing:
        raise InvalidRequest(
            f"output {shown(min(missing))} does not exist; this model has {', '.join(map(shown, response.outputs))}"
        )
    outputs: list[dict[str, Any]] = []
    tail: list[Buffer] = []
    for name, array in response.outputs.items():
        if wanted and name not in wanted:
            continue
        entry: dict[str, Any] = {"name": name, "datatype": dtype_name(array.dtype), "shape": list(array.shape)}
        binary = wanted.get(name)
        if request.binary_default if binary is None else binary:
            data = to_binary(array)
            entry["parameters"] = {"binary_data_size": data.nbytes}
            tail.append(data)
        else:
            entry["data"] = to_json(name, array)
            assert len(entry["data"]) == math.prod(array.shape), name
        outputs.append(entry)
    json: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        json["id"] = response.id
    if response.parameters:
        json["parameters"] = response.parameters
    json["outputs"] = outputs
    header = _ENCODER.encode(json)
    return (len(header) if tail else None), [header, *(data for data in tail if len(data))]
