"""split/profiles/device.py and every file in profiles/devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from split.errors import ConfigError
from split.profiles.device import Cores, DeviceProfile, device_names, load_device

FOLDER = Path(__file__).parents[2] / "profiles" / "devices"


def test_the_devices_are_the_files() -> None:
    assert device_names() == tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    assert {"generic-arm64", "generic-x86", "raspberry-pi-5"} <= set(device_names())


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_device_loads_and_states_where_its_figures_come_from(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert 0 < device.compute_ratio <= 2
    assert device.threads >= 1
    assert all(source.strip() for source in device.sources.values())


def test_the_reference_device_has_ratio_one() -> None:
    assert load_device("generic-x86").compute_ratio == 1.0


def test_a_ratio_is_clock_times_width() -> None:
    # 4 × 128-bit FMA lanes × 2 pipes at 2.4 GHz against 8 × 256-bit lanes × 2 pipes at 3 GHz.
    assert load_device("raspberry-pi-5").compute_ratio == pytest.approx((2.4 * 2 * 4 * 2) / (3.0 * 2 * 8 * 2))


@pytest.mark.parametrize("name", ["raspberry-pi-17", "", "../devices/rk3588", "RK3588", "/etc/passwd"])
def test_an_unknown_device_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there are .*raspberry-pi-5"):
        load_device(name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sources": {"memory_bytes": "data sheet"}}, "where cores come from"),
        ({"throttle_celsius": 80.0}, "where throttle_celsius come from"),
        ({"cores": ()}, "at least one kind of cores"),
        ({"providers": ("CUDAExecutionProvider",)}, "last of providers"),
    ],
)
def test_a_device_without_sources_cores_or_a_cpu_cannot_be_built(change: dict[str, Any], complaint: str) -> None:
    fields: dict[str, Any] = {
        "name": "x",
        "description": "x",
        "cores": (Cores(kind="a", count=1, clock_mhz=1.0, flops_per_cycle=1.0),),
        "memory_bytes": 1,
        "providers": ("CPUExecutionProvider",),
        "sources": {"cores": "data sheet", "memory_bytes": "data sheet"},
    }
    DeviceProfile(**fields)
    with pytest.raises(ValueError, match=complaint):
        DeviceProfile(**fields | change)
