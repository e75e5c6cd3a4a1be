"""JSON Schema (2020-12) of a model's infer request and answer, as `OPTIONS /v2/models/M` gives them. Pure.

The schemas describe the JSON form and the JSON header of the binary form; what a schema cannot say (element count =
product of the shape, byte counts) is checked by `request.py`.
"""

from __future__ import annotations

from typing import Any, Final

from split.oip.infer import ModelMetadata
from split.oip.options import CODECS, MAX_DEADLINE_MS, MAX_PRIORITY, MODES
from split.profiles.contract import PRIVACY_ORDER
from split.tensor import TensorSpec

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_ELEMENTS: Final[dict[str, dict[str, Any]]] = {
    "BOOL": {"type": "boolean"},
    "FP32": {"type": "number"},
    "FP64": {"type": "number"},
    "BYTES": {"type": "string"},
}


def request_schema(metadata: ModelMetadata) -> dict[str, Any]:
    """Schema of the body of `POST …/infer` for this model."""
    inputs = [_tensor(spec) for spec in metadata.inputs]
    inputs += [
        _tensor(TensorSpec(name=spec.name, dtype="BYTES", shape=(1,)))
        for spec in metadata.inputs
        if spec.name in metadata.encoded
    ]
    count = len(metadata.inputs)
    return {
        "$schema": _DIALECT,
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object", "properties": _parameters()},
            "inputs": {"type": "array", "minItems": count, "maxItems": count, "items": {"oneOf": inputs}},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"enum": [spec.name for spec in metadata.outputs]},
                        "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
                    },
                },
            },
        },
    }


def response_schema(metadata: ModelMetadata) -> dict[str, Any]:
    """Schema of the answer to an infer request."""
    return {
        "$schema": _DIALECT,
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"const": metadata.name},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {"type": "array", "items": {"oneOf": [_tensor(spec) for spec in metadata.outputs]}},
        },
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    rank = len(spec.shape)
    dims = [
        {"const": dim} if isinstance(dim, int) and dim >= 0 else {"type": "integer", "minimum": 0} for dim in spec.shape
    ]
    shape: dict[str, Any] = {"type": "array", "minItems": rank, "maxItems": rank}
    if dims:  # prefixItems must not be empty
        shape["prefixItems"] = dims
    size: dict[str, Any] = {"type": "object", "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}}
    properties: dict[str, Any] = {
        "name": {"const": spec.name},
        "datatype": {"const": spec.dtype},
        "shape": shape,
        "parameters": size,
    }
    if spec.dtype != "FP16":  # which has no JSON form
        properties["data"] = {"type": "array", "description": "flat in row-major order, or nested as shape"}
        element = _ELEMENTS.get(spec.dtype, {"type": "integer"})
        properties["data"]["items"] = {"anyOf": [element, {"type": "array"}]}
    return {"type": "object", "required": ["name", "datatype", "shape"], "properties": properties}


def _parameters() -> dict[str, Any]:
    return {
        "isthmus.mode": {"enum": list(MODES)},
        "isthmus.cut": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
        "isthmus.codec": {"enum": list(CODECS)},
        "isthmus.fidelity": {"type": "number", "minimum": 0},
        "isthmus.deadline_ms": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_MS},
        "isthmus.privacy": {"enum": list(PRIVACY_ORDER)},
        "priority": {"type": "integer", "minimum": 0, "maximum": MAX_PRIORITY},
        "timeout": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_DEADLINE_MS * 1000,
            "description": "µs; 0 is none",
        },
        "binary_data_output": {"type": "boolean"},
    }
