"""split/profiles/device.py and every file in profiles/devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from split.errors import ConfigError
from split.profiles.device import Cores, DeviceProfile, Power, device_names, load_device, recognise

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


def test_the_boards_that_are_to_be_known_are() -> None:
    assert set(device_names()) == {
        "ascend-310",
        "generic-arm64",
        "generic-x86",
        "jetson-orin-nano",
        "raspberry-pi-4",
        "raspberry-pi-5",
        "rk3588",
    }
    assert all(load_device(name).power is not None for name in device_names())


def test_what_a_device_sustains_is_twice_its_linpack_of_the_cores_that_a_segment_uses() -> None:
    assert load_device("raspberry-pi-5").sustained_gflops == pytest.approx(2 * 30.249)
    # RK3588: 4 × 2.4 GHz × 16 of 4 × 2.4 × 16 + 4 × 1.8 × 8 operations a cycle.
    assert load_device("rk3588").sustained_gflops == pytest.approx(2 * 51.382 * 153.6 / (153.6 + 57.6))


def test_without_a_linpack_two_fifths_of_the_peak_are_taken() -> None:
    assert load_device("generic-arm64").sustained_gflops == pytest.approx(0.4 * 4 * 1.5 * 8)


def test_the_share_of_power_is_that_of_the_peak_rate_with_the_fastest_cores_first() -> None:
    rk3588 = load_device("rk3588")
    assert rk3588.busy_share(0) == 0.0
    assert rk3588.busy_share(2) == pytest.approx(76.8 / 211.2)
    assert rk3588.busy_share(5) == pytest.approx((153.6 + 14.4) / 211.2)
    assert rk3588.busy_share(64) == 1.0


@pytest.mark.parametrize(
    ("board", "compatible", "architecture", "name"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4", ("raspberrypi,4-model-b", "brcm,bcm2711"), "aarch64", "raspberry-pi-4"),
        ("Raspberry Pi 5 Model B Rev 1.0", (), "aarch64", "raspberry-pi-5"),
        ("NVIDIA Jetson Orin Nano Developer Kit", (), "aarch64", "jetson-orin-nano"),
        ("Orange Pi 5", ("xunlong,orangepi-5", "rockchip,rk3588s"), "aarch64", "rk3588"),
        ("Huawei Atlas 200 DK", (), "aarch64", "ascend-310"),
        ("Orange Pi 3", ("allwinner,sun50i-h6",), "aarch64", "generic-arm64"),
        ("ThinkPad X1", (), "x86_64", "generic-x86"),
        ("", (), "riscv64", None),
    ],
)
def test_a_device_is_recognised_by_its_board_its_device_tree_or_its_architecture(
    board: str, compatible: tuple[str, ...], architecture: str, name: str | None
) -> None:
    assert recognise(board, compatible, architecture) == name


@pytest.mark.parametrize("name", ["raspberry-pi-17", "", "../devices/rk3588", "RK3588", "/etc/passwd"])
def test_an_unknown_device_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"there are .*raspberry-pi-5"):
        load_device(name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sources": {"memory_bytes": "data sheet", "providers": "data sheet"}}, "where cores come from"),
        ({"throttle_celsius": 80.0}, "where throttle_celsius come from"),
        ({"linpack_gflops": 1.0}, "where linpack_gflops come from"),
        ({"power": Power(idle_w=1.0, busy_w=2.0)}, "where power come from"),
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
        "sources": {"cores": "data sheet", "memory_bytes": "data sheet", "providers": "data sheet"},
    }
    DeviceProfile(**fields)
    with pytest.raises(ValueError, match=complaint):
        DeviceProfile(**fields | change)
