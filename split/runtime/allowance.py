"""What this process may really use of the machine: cores (affinity and CPU quota) and memory (cgroup v1 and v2).

Read from files below a root directory, so that tests can lay out any machine. Not a measure of speed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 writes "no limit" as the largest number of whole pages."""


def usable_threads(root: Path = Path("/")) -> int:
    """The most threads worth starting: allowed cores, at most the cores of the quota, at least 1.

    A quota is rounded up: 1.5 cores are two threads that now and then wait for the next period. Whether one of them
    less is faster is measured where a model is profiled (`tuning.py`); it is never the cores of the host.
    """
    quota = quota_cores(root)
    allowed = len(allowed_cores(root))
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def allowed_cores(root: Path = Path("/")) -> frozenset[int]:
    """The cores in this process's affinity mask (`taskset`, cpusets and containers narrow it)."""
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Cpus_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2])
    return frozenset(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/")) -> float | None:
    """CPU time per time that the cgroup and its parents grant, in cores; None where nothing limits it."""
    limits: list[float] = []
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _first(folder / "cpu.max", "max").partition(" ")
        limits += _ratio(quota, period)
        limits += _ratio(_first(folder / "cpu.cfs_quota_us", "-1"), _first(folder / "cpu.cfs_period_us", "0"))
    return min(limits, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that the cgroup and its parents allow; None where nothing limits them."""
    limits = [
        int(text)
        for folder in _cgroups(root, "memory")
        for text in (_first(folder / "memory.max", "max"), _first(folder / "memory.limit_in_bytes", "max"))
        if text.isdigit() and int(text) < _UNLIMITED_BYTES
    ]
    return min(limits, default=None)


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-2,5` → {0, 1, 2, 5}, the kernel's notation for sets of cores."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The cgroup folders of this process for a controller and their parents: the tightest limit on the way holds."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0" and not controllers:
            places = [mounts]
        elif controller in controllers.split(","):
            places = [mounts / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        for place in places:
            yield from (place.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _ratio(quota: str, period: str) -> list[float]:
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return []
    return [int(quota) / int(period)]


def _first(path: Path, otherwise: str) -> str:
    return next(iter(_lines(path)), otherwise)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
