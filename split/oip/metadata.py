"""What the protocol says of a model besides its answers: metadata, configuration, statistics, index. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from split.tensor import TensorSpec

PLATFORM: Final = "onnx_onnxv1"

_CONFIG_TYPES: Final[Mapping[str, str]] = {"BYTES": "TYPE_STRING"}
"""Where Triton's ModelConfig calls a datatype otherwise than `TYPE_` and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    """All versions that answer, as strings."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str = PLATFORM
    encoded: frozenset[str] = frozenset()
    """Inputs that also come as a BYTES tensor of shape [1] (a picture as JPEG or PNG)."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words for the classes of an output, where the contract gives a file of them."""

    def as_json(self) -> dict[str, Any]:
        """Body of `GET /v2/models/M`."""
        return {
            "name": self.name,
            "versions": self.versions,
            "platform": self.platform,
            "inputs": [_tensor_json(spec) for spec in self.inputs],
            "outputs": [_tensor_json(spec) for spec in self.outputs],
        }

    def config_json(self) -> dict[str, Any]:
        """Body of `GET /v2/models/M/config`: Triton's ModelConfig as far as it means something here."""
        return {
            "name": self.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": 0,
            "input": [_config_tensor(spec) for spec in self.inputs],
            "output": [_config_tensor(spec) for spec in self.outputs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """How often a stage ran and how long in all."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """One version of a model since it was loaded (Triton's statistics extension)."""

    name: str
    version: str
    last_inference_ms: int = 0
    """Wall clock, milliseconds since 1970; 0 before the first."""
    inference_count: int = 0
    execution_count: int = 0
    success: StageTime = StageTime()
    fail: StageTime = StageTime()
    queue: StageTime = StageTime()
    compute_input: StageTime = StageTime()
    compute_infer: StageTime = StageTime()
    compute_output: StageTime = StageTime()

    def as_json(self) -> dict[str, Any]:
        stages = {
            name: {"count": time.count, "ns": time.ns}
            for name, time in (
                ("success", self.success),
                ("fail", self.fail),
                ("queue", self.queue),
                ("compute_input", self.compute_input),
                ("compute_infer", self.compute_infer),
                ("compute_output", self.compute_output),
                ("cache_hit", StageTime()),
                ("cache_miss", StageTime()),
            )
        }
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": stages,
            "batch_stats": [],
            "memory_usage": [],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A row of the repository index."""

    name: str
    version: str
    state: str
    """READY | UNAVAILABLE | LOADING | UNLOADING."""
    reason: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "version": self.version, "state": self.state, "reason": self.reason}


def _tensor_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype, "shape": plain_shape(spec)}


def _config_tensor(spec: TensorSpec) -> dict[str, Any]:
    kind = _CONFIG_TYPES.get(spec.dtype, f"TYPE_{spec.dtype}")
    return {"name": spec.name, "data_type": kind, "dims": plain_shape(spec)}


def plain_shape(spec: TensorSpec) -> list[int]:
    """The shape as the protocol writes it: -1 for a dim that is not fixed."""
    return [dim if isinstance(dim, int) else -1 for dim in spec.shape]
