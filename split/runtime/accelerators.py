"""From a contract's `resource.accelerators` to what this host runs the model on.

The words are ours; the runtime knows them as execution providers. One that the runtime lists is not yet there: what
counts is what takes work here (`split.runtime.segment.usable_providers`). A contract that names nothing this host has
is refused: falling back to the processor without being asked is the classic surprise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from split.errors import InvalidModel
from split.runtime.segment import CPU_PROVIDER, usable_providers

PROVIDERS: Final = {
    "cpu": CPU_PROVIDER,
    "cann": "CANNExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "directml": "DmlExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "nnapi": "NnapiExecutionProvider",
    "nv_tensorrt_rtx": "NvTensorRTRTXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "rknpu": "RknpuExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "vitisai": "VitisAIExecutionProvider",
    "vsinpu": "VSINPUExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
"""Word of a contract → its execution provider (onnxruntime's documentation, "Execution Providers")."""


class Choice(NamedTuple):
    runs_on: tuple[str, ...]
    """Words of the contract, first choice first; `cpu` takes what those before it cannot, named or not."""
    note: str = ""
    """Which better choice this host does not have, as a sentence; "" where it has the first one."""

    @property
    def providers(self) -> tuple[str, ...]:
        """For `OrtEngine`."""
        return tuple(PROVIDERS[word] for word in self.runs_on)

    @property
    def accelerated(self) -> bool:
        """Whether anything but the processor does the work."""
        return self.runs_on[0] != "cpu"


ON_CPU: Final = Choice(("cpu",))


def choose(wanted: Sequence[str], usable: Callable[[], Sequence[str]] = usable_providers) -> Choice:
    """What of `wanted` (`resource.accelerators`) this host has; nothing after `cpu`, which leaves nothing to do.

    `usable`: the providers that work here; asked only where more than the processor is wanted. InvalidModel when the
    host has none of them.
    """
    if wanted[0] == "cpu":
        return ON_CPU
    found = usable()
    here = [word for word, provider in PROVIDERS.items() if provider in found]
    considered = wanted[: wanted.index("cpu") + 1] if "cpu" in wanted else wanted
    runs_on = tuple(word for word in considered if word in here)
    lacking = ", ".join(word for word in considered if word not in here)
    if not runs_on:
        raise InvalidModel(
            f"resource.accelerators of its contract names {lacking}, which this host does not have (it has "
            f"{', '.join(here)}); install driver and runtime for one of them, or add cpu to the list"
        )
    note = f"runs on {', '.join(runs_on)}: this host has no {lacking}" if considered[0] not in here else ""
    return Choice(runs_on, note)
