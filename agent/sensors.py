"""What changes about the device from second to second: temperature, throttling, battery, load; from /sys and /proc.

Every reader takes a root directory. What a machine does not have is None, never a guess; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from agent.energy import batteries
from split.runtime.allowance import allowed_cores
from split.runtime.kernel_files import as_number, read_number, read_text
from split.runtime.machine import meminfo_bytes

_CPU_ZONES: Final = ("cpu", "soc", "x86_pkg", "core", "bigcore", "littlecore", "package", "tj")
"""How kernels name the thermal zones over the processor (Raspberry Pi, Rockchip, Jetson, x86)."""
_CPU_CHIPS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_PLAUSIBLE_C: Final = (-40.0, 150.0)
_RASPBERRY_CAPPED: Final = 0b1110
"""`get_throttled`: bit 1 frequency capped, bit 2 throttled, bit 3 soft temperature limit, each "now"."""


class Sensors(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. Temperatures in °C, ratios 0…1."""

    temperature_c: float | None
    """The hottest zone over the processor, else the hottest there is."""
    throttled: bool | None
    """Whether heat or power holds the clock down now; None where the kernel does not tell."""
    battery_ratio: float | None
    """Charge of the weakest battery that powers the device."""
    on_battery: bool | None
    frequency_mhz: float | None
    """The fastest core's clock now; None where the kernel does not tell."""
    frequency_ratio: float | None
    """What the clock may rise to now over what the processor can, the fastest core: heat and power limits lower it."""
    load_ratio: float | None
    """Runnable threads of the last minute per core that this process may use."""
    memory_available_bytes: int | None


def read_sensors(root: Path = Path("/")) -> Sensors:
    """Read everything once; a few file reads, below a millisecond where the drivers answer at once."""
    battery_ratio, on_battery = _battery(root)
    load = as_number(read_text(root / "proc/loadavg").split(" ")[0])
    frequency_mhz, frequency_ratio = _frequency(root)
    return Sensors(
        temperature_c=_temperature_c(root),
        throttled=throttled(root),
        battery_ratio=battery_ratio,
        on_battery=on_battery,
        frequency_mhz=frequency_mhz,
        frequency_ratio=frequency_ratio,
        load_ratio=None if load is None else load / max(1, len(allowed_cores(root))),
        memory_available_bytes=meminfo_bytes(root, "MemAvailable"),
    )


def _temperature_c(root: Path) -> float | None:
    thermal = _below(root, "sys/class/thermal", "thermal_zone*")
    zones = [(read_text(zone / "type").lower(), _milli(zone / "temp")) for zone in thermal]
    chips = [
        (chip_name, _milli(sensor))
        for chip in _below(root, "sys/class/hwmon", "hwmon*")
        if (chip_name := read_text(chip / "name"))
        for sensor in sorted(chip.glob("temp*_input"))
    ]
    of_cpu = [c for kind, c in zones if kind.startswith(_CPU_ZONES)] + [c for chip, c in chips if chip in _CPU_CHIPS]
    hottest = _hottest(of_cpu)
    return hottest if hottest is not None else _hottest([c for _, c in zones + chips])


def _hottest(found: Iterable[float | None]) -> float | None:
    low, high = _PLAUSIBLE_C
    return max((c for c in found if c is not None and low < c < high), default=None)


def throttled(root: Path = Path("/")) -> bool | None:
    """As `Sensors.throttled`."""
    firmware = root.glob("sys/devices/platform/soc*/soc*:firmware/get_throttled")
    signs = [bool(_hex(read_text(flags)) & _RASPBERRY_CAPPED) for flags in firmware]
    signs += [
        (read_number(device / "cur_state") or 0) > 0
        for device in _below(root, "sys/class/thermal", "cooling_device*")
        if any(word in read_text(device / "type").lower() for word in ("cpufreq", "processor"))
    ]
    return any(signs) if signs else None


def _battery(root: Path) -> tuple[float | None, bool | None]:
    """(charge of the weakest battery, whether the device runs on it)."""
    charges: list[float] = []
    discharging: list[bool] = []
    for supply in batteries(root):
        charge = read_number(supply / "capacity")
        if charge is None:
            for kind in ("energy", "charge"):
                now, full = read_number(supply / f"{kind}_now"), read_number(supply / f"{kind}_full")
                if now is not None and full:
                    charge = 100.0 * now / full
        if charge is not None:
            charges.append(min(max(charge / 100.0, 0.0), 1.0))
            discharging.append(read_text(supply / "status") == "Discharging")
    return (min(charges), any(discharging)) if charges else (None, None)


def _frequency(root: Path) -> tuple[float | None, float | None]:
    """(clock now in MHz, highest allowed / highest possible) of the core that can run fastest among those allowed."""
    found: list[tuple[float, float | None, float | None]] = []
    for core in sorted(allowed_cores(root)):
        policy = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        if (can_khz := read_number(policy / "cpuinfo_max_freq")) is not None and can_khz > 0.0:
            may_khz = read_number(policy / "scaling_max_freq")
            found.append((can_khz, may_khz, read_number(policy / "scaling_cur_freq")))
    if not found:
        return None, None
    can_khz, may_khz, now_khz = max(found, key=lambda one: one[0])
    return now_khz / 1000.0 if now_khz else None, min(may_khz / can_khz, 1.0) if may_khz else None


def _below(root: Path, folder: str, pattern: str) -> list[Path]:
    return sorted((root / folder).glob(pattern))


def _milli(path: Path) -> float | None:
    value = read_number(path)
    return None if value is None else value / 1000.0


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
