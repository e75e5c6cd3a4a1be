"""What a kind of device is, from data sheets: enough to ask "what would be chosen there?" without having one.

Never used for a device that is there: that one is measured (`measured.py`). Each figure has its source beside it, and
an estimate says that it is one.
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
    power: Power | None = None
    throttle_celsius: _Positive | None = None
    """Where it starts to lower its clocks; none stated: not published."""
    sources: dict[str, str]
    """Figure → where it comes from; begins with `estimate:` where nobody measured or published it."""

    def __post_init__(self) -> None:
        if not self.cores:
            raise ValueError("a device needs at least one kind of cores")
        figures = {"cores", "memory_bytes", "power", "throttle_celsius"}
        stated = {figure for figure in figures if getattr(self, figure) is not None}
        if unsourced := sorted(stated - self.sources.keys()):
            raise ValueError(f"sources must say where {', '.join(unsourced)} come from")
        if self.providers[-1:] != ("CPUExecutionProvider",):
            raise ValueError("the last of providers must be CPUExecutionProvider: it takes what no other can")

    @property
    def compute_ratio(self) -> float:
        """Speed of one fastest core relative to the reference core, by peak FP32 rate: a bound, not a measurement."""
        best = self.cores[0]
        return best.clock_mhz * 1e6 * best.flops_per_cycle / REFERENCE_FLOPS_PER_S

    @property
    def threads(self) -> int:
        """Cores of the fastest kind: slower ones beside them make a segment wait."""
        return self.cores[0].count


def device_names() -> tuple[str, ...]:
    """Names that `load_device` knows, sorted."""
    return tuple(sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")}))


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
