"""This device as its owner sees it: what it is, what runs on it, how fast. The quick one takes about a second, the full
one adds the runtime's own rates and the disk's (`take_full`, half a minute at most).

The facts are `split/runtime/machine.py`'s; here are the system, the engines, the speed tests and the sensors. What a
model costs is not guessed from it: that is measured (`split/workbench/profile.py`).
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from agent.sensors import Sensors, read_sensors
from split.errors import IsthmusError
from split.profiles.rates import Rates, read_rates
from split.runtime.accelerators import PROVIDERS
from split.runtime.kernel_files import exists, read_text
from split.runtime.machine import Machine, read_machine
from split.runtime.segment import OrtEngine, usable_providers
from split.workbench.child import run_child_sync

log = logging.getLogger(__name__)

SPEED_TEST_S: Final = 0.4
"""Of each of the two tests: long enough for a core to reach its clock (tens of ms), short enough for a start."""

_GEMM_SIDE: Final = 384
_COPY_BYTES: Final = 32 << 20
"""Beyond the last-level cache of every device meant here."""

FULL_S: Final = 12.0
"""Of the runtime's rates, 1.5 s each. With the quick one, the child's start and 32 MB at an SD card's 10 MB/s, written
and read, that makes some 25 s on a slow board."""
FULL_TIMEOUT_S: Final = 60.0
_DISK_BYTES: Final = 32 << 20
_DISK_CHUNK_BYTES: Final = 1 << 20
_DISK_LEFT_RATIO: Final = 16
"""Nothing is written to a disk that has not so many times as much left."""

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
_WORDS_FOR: Final[dict[str, tuple[str, ...]]] = {
    "NVIDIA GPU": ("cuda", "tensorrt", "nv_tensorrt_rtx"),
    "NVIDIA Tegra GPU": ("cuda", "tensorrt"),
    "VeriSilicon NPU": ("vsinpu",),
    "Ascend NPU": ("cann",),
}
"""Words of a contract (`split.runtime.accelerators.PROVIDERS`) that name it, the usual one first; none for the others,
on which ONNX Runtime does not compute."""


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
    """float32 matrix product by numpy, best of several: all allowed cores in `isthmus fingerprint`, one elsewhere."""
    memory_gb_per_s: float
    """Large copy, bytes read plus bytes written."""
    sensors: Sensors
    rates: Rates | None = None
    """By the runtime itself; None: only `take_full` measures them."""
    disk_read_mb_per_s: float | None = None
    """Sequential, of the folder for what can be made again, past the page cache; None: as above, or no room to try."""

    @property
    def matrix_gflops(self) -> float:
        """float32 matrix product on all threads, by the runtime where it was asked."""
        measured = None if self.rates is None else self.rates.gemm_fp32.all
        return self.gemm_gflops if measured is None else measured

    @property
    def unusable(self) -> tuple[str, ...]:
        """A sentence for each accelerator that is seen and does not compute."""
        return unusable_accelerators(self.accelerators, self.providers, self.runtime)


def take_fingerprint(root: Path = Path("/"), *, speed_test_s: float = SPEED_TEST_S) -> Fingerprint:
    """Look at the device below `root` and measure the machine this runs on; about 2 × `speed_test_s` seconds."""
    return Fingerprint(
        **_facts(root),
        runtime=OrtEngine().name,
        providers=usable_providers(),
        gemm_gflops=_gemm_gflops(speed_test_s),
        memory_gb_per_s=_memory_gb_per_s(speed_test_s),
    )


def refreshed(fingerprint: Fingerprint, root: Path = Path("/")) -> Fingerprint:
    """The same measurements with all that is read, not measured, as it is now."""
    return msgspec.structs.replace(fingerprint, **_facts(root))


def _facts(root: Path) -> dict[str, Any]:
    return msgspec.structs.asdict(read_machine(root)) | {
        "kernel": read_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        "system": _system(root),
        "accelerators": seen_accelerators(root),
        "sensors": read_sensors(root),
    }


def take_full(
    cache_dir: Path,
    *,
    quick: Fingerprint,
    seconds: float = FULL_S,
    on_progress: Callable[[str, float], None] = lambda stage, ratio: None,
) -> Fingerprint:
    """`quick` with the runtime's rates (`seconds` in all) and the read rate of `cache_dir`, which is made if need be.

    The rates are None where the workbench's child fails; `on_progress` is told each stage, 0…1 done.
    """
    on_progress("disk", 0.0)
    disk = disk_read_mb_per_s(cache_dir)
    rates: Rates | None = None
    with tempfile.TemporaryDirectory(prefix="isthmus-speed-") as folder:
        out = Path(folder) / "rates.json"
        try:
            run_child_sync(
                ["speed", str(out), "--seconds", str(seconds)],
                timeout_s=FULL_TIMEOUT_S,
                on_progress=lambda stage, ratio: on_progress(stage, 0.1 + 0.9 * ratio),
            )
            rates = read_rates(out)
        except (IsthmusError, OSError, msgspec.MsgspecError) as error:
            log.warning("the runtime's rates cannot be measured: %s", error)
    return msgspec.structs.replace(quick, rates=rates, disk_read_mb_per_s=disk)


def seen_accelerators(root: Path = Path("/")) -> tuple[str, ...]:
    """By their device nodes."""
    return tuple(dict.fromkeys(name for node, name in _ACCELERATOR_NODES.items() if exists(root / node)))


def unusable_accelerators(accelerators: Sequence[str], providers: Sequence[str], runtime: str) -> tuple[str, ...]:
    """A sentence for each accelerator that no engine here computes on."""
    said = []
    for name in accelerators:
        words = _WORDS_FOR.get(name, ())
        if not {PROVIDERS[word] for word in words} & set(providers):
            mend = (
                f"a build of onnxruntime with {PROVIDERS[words[0]]}, and its driver, would use it for models whose "
                f"contract names {words[0]} in resource.accelerators"
                if words
                else "ONNX Runtime has no execution provider for it"
            )
            said.append(f"{name}: seen, but nothing of {runtime} computes on it, models run on the processor; {mend}")
    return tuple(said)


def disk_read_mb_per_s(folder: Path) -> float | None:
    """Read back what was just written there, past the page cache, MB/s; None where it cannot be tried."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < _DISK_LEFT_RATIO * _DISK_BYTES:
            return None
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            chunk = os.urandom(_DISK_CHUNK_BYTES)  # some disks compress
            for _ in range(_DISK_BYTES // _DISK_CHUNK_BYTES):
                file.write(chunk)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started_s = time.perf_counter()
            while file.read(_DISK_CHUNK_BYTES):
                pass
            return _DISK_BYTES / 1e6 / (time.perf_counter() - started_s)
    except OSError:
        return None


def _system(root: Path) -> str:
    for line in read_text(root / "etc/os-release").splitlines():
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
