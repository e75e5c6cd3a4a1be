"""agent/device_watch.py over laid-out devices, looked at by hand: no clock runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.commands.status import _lines as status_lines
from agent.device_watch import DeviceWatch
from agent.sensors import Sensors
from split.plan.power import NO_POWER
from split.profiles.device import load_device, recognise
from split.profiles.radio import RADIOS, LinkKind
from split.runtime.machine import read_machine
from tests.agent import boards


class Worker:
    busy_s = 0.0


def watching(root: Path, worker: Worker | None = None, *, battery_ratio_min: float = 0.15) -> DeviceWatch:
    machine, worker = read_machine(root), worker or Worker()
    name = recognise(machine.board, machine.compatible, machine.architecture)
    return DeviceWatch(
        profile=None if name is None else load_device(name),
        threads=machine.threads,
        battery_ratio_min=battery_ratio_min,
        busy_s=lambda: worker.busy_s,
        root=root,
    )


@pytest.mark.parametrize(
    ("board", "name"),
    [
        (boards.raspberry_pi_4, "raspberry-pi-4"),
        (boards.raspberry_pi_5, "raspberry-pi-5"),
        (boards.jetson_orin_nano, "jetson-orin-nano"),
        (boards.orange_pi_5, "rk3588"),
        (boards.laptop, "generic-x86"),
    ],
)
def test_each_board_begins_with_the_power_of_its_profile_and_says_so(
    board: boards.Board, name: str, tmp_path: Path
) -> None:
    watch = watching(board(tmp_path))
    assert watch.power.source.startswith(f"modelled: {name}")
    assert not watch.power.measured
    assert watch.power.compute_w > 0.0


def test_a_board_without_a_profile_is_told_so_until_something_is_measured(tmp_path: Path) -> None:
    root = boards.laptop(tmp_path)
    profile = load_device("generic-arm64")
    watch = DeviceWatch(profile=profile, threads=4, battery_ratio_min=0.15, busy_s=lambda: 0.0, generic=True, root=root)
    power = watch.power.at(1.0, 1.0)
    assert str(watch.snapshot(power)["source"]).startswith("modelled: generic-arm64, ")
    assert any("no profile for this board" in line for line in status_lines({"power": watch.snapshot(power)}))


async def test_a_counter_over_busy_and_idle_time_replaces_the_profile(tmp_path: Path) -> None:
    """12 W idle, 20 W more while the worker computes."""
    root, worker = boards.laptop(tmp_path), Worker()
    watch, uj = watching(root, worker), 5_000_000.0
    for n in range(20):
        await watch.look(10.0 * n)
        worker.busy_s += (busy_s := 10.0 if n % 3 == 0 else 1.0)
        uj += 1e6 * (12.0 * 10.0 + 20.0 * busy_s)
        boards.lay_out(root, {"sys/class/powercap/intel-rapl:0/energy_uj": f"{uj:.0f}\n"})
    assert watch.power.measured
    assert watch.power.compute_w == pytest.approx(20.0, rel=1e-3)
    assert watch.power.source == "measured: RAPL, processor package, without the rest of the board"


async def test_samples_of_a_monitor_are_averaged_over_the_window(tmp_path: Path) -> None:
    """3 W idle, 4 W more while the worker computes, seen ten times a window."""
    root, worker = boards.raspberry_pi_4(tmp_path), Worker()
    watch = watching(root, worker)
    for n in range(20):
        await watch.look(10.0 * n)
        for second in range(10):
            busy = second < (n % 5) * 2
            worker.busy_s += float(busy)
            boards.lay_out(root, {"sys/class/hwmon/hwmon1/power1_input": f"{7_000_000 if busy else 3_000_000}\n"})
            await watch.sample()
    assert watch.power.measured
    assert watch.power.compute_w == pytest.approx(4.0, rel=1e-3)


async def test_a_time_that_the_device_slept_through_teaches_nothing(tmp_path: Path) -> None:
    root, worker = boards.laptop(tmp_path), Worker()
    watch, now_s, uj = watching(root, worker), 0.0, 5_000_000.0
    for n in range(40):
        await watch.look(now_s)
        now_s += 3600.0
        worker.busy_s += 10.0 * (n % 2)
        uj += 1e6
        boards.lay_out(root, {"sys/class/powercap/intel-rapl:0/energy_uj": f"{uj:.0f}\n"})
    assert not watch.power.measured


def test_the_link_that_is_used_gives_the_radio(tmp_path: Path) -> None:
    watch = watching(boards.raspberry_pi_4(tmp_path))
    assert watch.power.radio is None
    watch.linked("wwan0")
    assert watch.power.radio == RADIOS[LinkKind.LTE]
    watch.linked("lo")
    assert watch.power.radio is None


async def test_the_battery_is_low_below_its_bound_until_well_above_it_or_charged(tmp_path: Path) -> None:
    watch = watching(boards.orange_pi_5(tmp_path))  # at 14 %, the bound at 15 %

    async def at(percent: int, status: str = "Discharging") -> bool:
        supply = "sys/class/power_supply/cw2015"
        boards.lay_out(tmp_path, {f"{supply}/capacity": f"{percent}\n", f"{supply}/status": f"{status}\n"})
        await watch.look(0.0)
        return watch.battery_low

    assert not watch.battery_low
    assert [await at(p) for p in (15, 14, 16, 17, 16, 14)] == [False, True, True, False, False, True]
    assert not await at(14, "Charging")
    assert await at(14)


async def test_a_device_without_a_battery_is_never_low(tmp_path: Path) -> None:
    watch = watching(boards.raspberry_pi_5(tmp_path), battery_ratio_min=1.0)
    await watch.look(0.0)
    assert not watch.battery_low


async def test_each_look_tells_of_heat_and_clock(tmp_path: Path) -> None:
    watch, told = watching(boards.raspberry_pi_5(tmp_path)), list[Sensors]()
    watch.on_sensors = told.append
    await watch.look(0.0)
    assert watch.sensors is not None
    assert told == [watch.sensors]
    assert watch.sensors.temperature_c == 61.45
    assert watch.sensors.frequency_mhz == 1500.0
    assert watch.sensors.frequency_ratio == pytest.approx(1500 / 2400)


async def test_a_container_knows_nothing_and_says_so(tmp_path: Path) -> None:
    watch = DeviceWatch(
        profile=None,
        threads=2,
        battery_ratio_min=0.15,
        busy_s=lambda: 0.0,
        root=boards.container(tmp_path),
    )
    await watch.look(0.0)
    watch.linked("eth0")
    power = watch.power.at(10.0, 10.0)
    assert power == NO_POWER
    assert watch.snapshot(power) == {
        "compute_w": None,
        "send_w": None,
        "receive_w": None,
        "wait_w": None,
        "measured": False,
        "source": "",
        "gauge": None,
        "note": "",
        "battery_low": False,
        "throttle_c": None,
    }
