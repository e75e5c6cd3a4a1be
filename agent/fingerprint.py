"""This device as its owner sees it: what it is, what runs on it, how fast. Taken in about a second.

The facts are `split/runtime/machine.py`'s; here are the system, the engines, two short speed tests and the sensors.
What a model costs is not guessed from it: that is measured (`split/workbench/profile.py`).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from agent.sensors import Sensors, read_sensors
from split.runtime.machine import Machine, read_machine
from split.runtime.segment import OrtEngine, usable_providers

SPEED_TEST_S: Final = 0.4
"""Of each of the two tests: long enough for a core to reach its clock (tens of ms), short enough for a start."""

_GEMM_SIDE: Final = 384
_COPY_BYTES: Final = 32 << 20
"""Beyond the last-level cache of every device meant here."""

_ACCELERATOR_NODES: Final = {
    "dev/nvidia0": "NVIDIA GPU",
    "dev/nvhost-gpu": "NVIDIA Tegra GPU",
    "dev/nvgpu/igpu0/ctrl": "NVIDIA Tegra GPU",
    "dev/accel/accel0": "kernel accel device",
    "dev/rknpu": "Rockchip NPU",
    "dev/galcore": "VeriSilicon NPU",
    "dev/hailo0": "Hailo",
    "dev/apex_0": "Coral Edge TPU",
    "dev/davinci0": "Ascend NPU",
}


class Fingerprint(Machine, frozen=True, kw_only=True):
    """A machine and what was found out about it just now. `digest` covers the machine's facts alone."""

    kernel: str
    system: str
    """PRETTY_NAME of os-release."""
    accelerators: tuple[str, ...]
    """Seen as device nodes; they compute only where `providers` has an engine for them."""
    runtime: str
    providers: tuple[str, ...]
    """Execution providers that really start and take nodes."""
    gemm_gflops: float
    """float32 matrix product, all allowed cores, best of several."""
    memory_gb_per_s: float
    """Large copy, bytes read plus bytes written."""
    sensors: Sensors


def take_fingerprint(root: Path = Path("/"), *, speed_test_s: float = SPEED_TEST_S) -> Fingerprint:
    """Look at the device below `root` and measure the machine this runs on; about 2 × `speed_test_s` seconds."""
    seen = (name for node, name in _ACCELERATOR_NODES.items() if (root / node).exists())
    return Fingerprint(
        **msgspec.structs.asdict(read_machine(root)),
        kernel=_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        system=_system(root),
        accelerators=tuple(dict.fromkeys(seen)),
        runtime=OrtEngine().name,
        providers=usable_providers(),
        gemm_gflops=_gemm_gflops(speed_test_s),
        memory_gb_per_s=_memory_gb_per_s(speed_test_s),
        sensors=read_sensors(root),
    )


def _system(root: Path) -> str:
    for line in _text(root / "etc/os-release").splitlines():
        key, _, value = line.partition("=")
        if key == "PRETTY_NAME":
            return value.strip('"')
    return os.uname().sysname


def _gemm_gflops(budget_s: float) -> float:
    a = np.full((_GEMM_SIDE, _GEMM_SIDE), 0.5, np.float32)
    b = a.T.copy()
    out = np.empty_like(a)
    return 2 * _GEMM_SIDE**3 / _fastest_s(lambda: np.matmul(a, b, out=out), budget_s) / 1e9


def _memory_gb_per_s(budget_s: float) -> float:
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return 2 * _COPY_BYTES / _fastest_s(lambda: np.copyto(target, source), budget_s) / 1e9


def _fastest_s(work: Callable[[], object], budget_s: float) -> float:
    """The best of as many runs as fit: everything else a machine does only adds time."""
    end_at_s = time.perf_counter() + budget_s
    best_s = float("inf")
    while True:
        started_s = time.perf_counter()
        work()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - started_s)
        if now_s >= end_at_s:
            return best_s


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip().strip("\0")
    except OSError:
        return ""
