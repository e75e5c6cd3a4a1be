"""The words of the Open Inference Protocol v2 as values: request, answer, a model's metadata. Parsing is `request.py`,
writing `response.py`, what Isthmus adds to the parameters `options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from split.tensor import Tensors, TensorSpec

Scalar = bool | int | float | str
"""What a parameter of the protocol may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    name: str
    binary: bool | None = None
    """How this output shall come back; None: as the request says for all (`binary_default`)."""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OipRequest:
    """One request, checked in itself; whether it fits a model is not looked at here."""

    id: str = ""
    """The caller's own id, echoed; empty when there was none."""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    inputs: Tensors
    """By name, in the order given. May be read-only views into the body; BYTES are object arrays of `bytes`."""
    outputs: tuple[RequestedOutput, ...] = ()
    """Empty: all outputs of the model."""
    binary_default: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OipResponse:
    model_name: str
    model_version: str
    id: str = ""
    """The caller's id; left out of the answer when empty."""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    outputs: Tensors
    """In the order they shall have in the answer; shapes are the real ones, not the declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    """All versions that answer."""
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    encoded: frozenset[str] = frozenset()
    """Inputs that also come as a BYTES tensor of shape [1] (a picture as JPEG or PNG)."""

    def as_json(self) -> dict[str, Any]:
        """Body of `GET /v2/models/M`."""
        return {
            "name": self.name,
            "versions": self.versions,
            "platform": self.platform,
            "inputs": [_tensor_json(spec) for spec in self.inputs],
            "outputs": [_tensor_json(spec) for spec in self.outputs],
        }


def _tensor_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype, "shape": plain_shape(spec)}


def plain_shape(spec: TensorSpec) -> list[int]:
    """The shape as the protocol writes it: -1 for a dim that is not fixed."""
    return [dim if isinstance(dim, int) else -1 for dim in spec.shape]
