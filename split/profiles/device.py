"""What a kind of device is, from data sheets: enough to ask "what would be chosen there?" without having one.

Speed is never taken from here for a device that is there: that one is measured (`measured.py`). Its power is, until it
has been measured, too (`split/plan/power.py`). Each figure has its source beside it, and an estimate says that it is
one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import msgspec

from split.errors import ConfigError
from split.profiles.load import load_yaml

REFERENCE_FLOPS_PER_S: Final = 3.0e9 * 32
"""FP32 operations per second of the core that has `compute_ratio` 1: 3 GHz × two 256-bit fused multiply-adds a cycle,
an x86-64 server core with AVX2 (`generic-x86`)."""

SUSTAINED_RATIO: Final = 0.4
"""Of the peak rate, where no Linpack is known: Raspberry Pi 4 and 5 reach 0.41 and 0.39, RK3588 boards 0.49."""

_FOLDERS: Final = (
    Path(__file__).parent / "data" / "devices",  # as installed
    Path(__file__).parents[2] / "profiles" / "devices",  # as checked out
)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class Cores(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cores of one kind."""

    kind: str
    """As its maker calls it: Cortex-A76."""
    count: _Count
    clock_mhz: _Positive
    """Highest sustained clock."""
    flops_per_cycle: _Positive
    """FP32 operations a cycle: vector units × lanes × 2 (a fused multiply-add is two)."""

    @property
    def gflops(self) -> float:
        """Peak FP32 rate of one core, GFLOP/s."""
        return 0.001 * self.clock_mhz * self.flops_per_cycle


class Power(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of the whole board, at its supply."""

    idle_w: _Positive
    busy_w: _Positive
    """All cores at work."""

    def __post_init__(self) -> None:
        if self.busy_w < self.idle_w:
            raise ValueError(f"busy_w ({self.busy_w}) must not be below idle_w ({self.idle_w})")


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str
    cores: tuple[Cores, ...]
    """Fastest kind first; a segment runs on that kind."""
    memory_bytes: _Count
    providers: tuple[str, ...]
    """ONNX Runtime execution providers that exist for it, first choice first; the last one is the CPU's."""
    recognised_by: tuple[str, ...] = ()
    """Words in the board's name or in its device tree's `compatible` that only such a device has; none: never taken
    for it (`recognise`)."""
    power: Power | None = None
    linpack_gflops: _Positive | None = None
    """High Performance Linpack on all cores, double precision, as measured on one: what of the peak comes out."""
    throttle_celsius: _Positive | None = None
    """Where it starts to lower its clocks; none stated: not published."""
    sources: dict[str, str]
    """Figure → where it comes from; begins with `estimate:` where nobody measured or published it."""

    def __post_init__(self) -> None:
        if not self.cores:
            raise ValueError("a device needs at least one kind of cores")
        figures = {"cores", "memory_bytes", "providers", "power", "linpack_gflops", "throttle_celsius"}
        stated = {figure for figure in figures if getattr(self, figure) is not None}
        if unsourced := sorted(stated - self.sources.keys()):
            raise ValueError(f"sources must say where {', '.join(unsourced)} come from")
        if self.providers[-1:] != ("CPUExecutionProvider",):
            raise ValueError("the last of providers must be CPUExecutionProvider: it takes what no other can")

    @property
    def compute_ratio(self) -> float:
        """Speed of one fastest core relative to the reference core, by peak FP32 rate: a bound, not a measurement."""
        return 1e9 * self.cores[0].gflops / REFERENCE_FLOPS_PER_S

    @property
    def sustained_gflops(self) -> float:
        """FP32 matrix products on the cores that a segment uses, GFLOP/s: twice the Linpack figure (a vector holds two
        floats for each double), those cores' share of it; `SUSTAINED_RATIO` of the peak where there is none."""
        used, peak = self.cores[0].gflops * self.threads, sum(kind.gflops * kind.count for kind in self.cores)
        sustained = SUSTAINED_RATIO * peak if self.linpack_gflops is None else 2.0 * self.linpack_gflops
        return sustained * used / peak

    def busy_share(self, threads: int) -> float:
        """Share of `busy_w` − `idle_w` that a segment on so many threads draws, 0…1: by peak rate, fastest cores
        first. Linear in the cores: what they share (memory, clock tree) is counted to them by parts."""
        peak, rate = 0.0, 0.0
        for kind in self.cores:
            used = min(threads, kind.count)
            threads -= used
            rate += used * kind.gflops
            peak += kind.count * kind.gflops
        return rate / peak

    @property
    def threads(self) -> int:
        """Cores of the fastest kind: slower ones beside them make a segment wait."""
        return self.cores[0].count


def device_names() -> tuple[str, ...]:
    """Names that `load_device` knows, sorted."""
    return tuple(sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")}))


def recognise(board: str, compatible: tuple[str, ...], architecture: str) -> str | None:
    """The name of the profile that fits a device: `board` and `compatible` as `split.runtime.machine` reads them, else
    the generic one of its architecture; None for an architecture without one.

    The longest word that fits wins, so that a later board of a family is not taken for an earlier one.
    """
    texts = (board, *compatible)
    found = [
        (len(word), name)
        for name in device_names()
        for word in load_device(name).recognised_by
        if any(word in text for text in texts)
    ]
    if found:
        return max(found)[1]
    return {"aarch64": "generic-arm64", "arm64": "generic-arm64", "x86_64": "generic-x86"}.get(architecture)


def load_device(name: str) -> DeviceProfile:
    """The profile called `name` (see `device_names`); ConfigError when there is none or it is wrong."""
    if _NAME.fullmatch(name):
        for folder in _FOLDERS:
            path = folder / f"{name}.yaml"
            if path.is_file():
                profile = load_yaml(path, DeviceProfile)
                if profile.name != name:
                    raise ConfigError(f"{path}: name must be that of the file, {name}, got {profile.name}")
                return profile
    raise ConfigError(f"there is no device profile {name!r}; there are {', '.join(device_names())}")
