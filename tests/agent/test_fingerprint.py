"""Devices laid out as files below a directory: what is read must be what was written."""

import argparse
import json
from pathlib import Path

import pytest

from agent.commands import fingerprint as command
from agent.fingerprint import take_fingerprint
from agent.sensors import read_sensors
from split.runtime.machine import read_machine


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def arm_cpu(number: int, implementer: str, part: str, features: str) -> str:
    return (
        f"processor\t: {number}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: {implementer}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: {part}\nCPU revision\t: 1\n"
    )


A76 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"


@pytest.fixture
def raspberry_pi_5(tmp_path: Path) -> Path:
    files = {
        "proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        "proc/cpuinfo": "\n".join(arm_cpu(n, "0x41", "0xd0b", A76) for n in range(4)) + "\nRevision\t: c04170\n",
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "proc/self/cgroup": "0::/system.slice/isthmus.service\n",
        "proc/meminfo": "MemTotal:        8245696 kB\nMemFree: 100 kB\nMemAvailable:    7000000 kB\n",
        "proc/loadavg": "1.00 0.50 0.25 1/200 1234\n",
        "proc/sys/kernel/osrelease": "6.6.31+rpt-rpi-2712\n",
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        "sys/fs/cgroup/system.slice/isthmus.service/cpu.max": "max 100000\n",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "61450\n",
        "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
        "sys/class/thermal/cooling_device0/cur_state": "3\n",
        "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled": "0\n",
    }
    for core in range(4):
        folder = f"sys/devices/system/cpu/cpu{core}"
        files |= {
            f"{folder}/cpu_capacity": "1024\n",
            f"{folder}/cpufreq/cpuinfo_max_freq": "2400000\n",
            f"{folder}/cpufreq/scaling_governor": "ondemand\n",
        }
    return lay_out(tmp_path, files)


@pytest.fixture
def orange_pi_5(tmp_path: Path) -> Path:
    """RK3588: four small cores first, then two pairs of big ones that differ by their clock; on a battery, hot."""
    files = {
        "proc/device-tree/model": "Orange Pi 5\0",
        "proc/cpuinfo": "\n".join(
            arm_cpu(n, "0x41", "0xd05" if n < 4 else "0xd0b", A76 if n < 4 else A76 + " sb") for n in range(8)
        ),
        "proc/self/status": "Cpus_allowed_list:\t0-7\n",
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemTotal: 4000000 kB\n",
        "dev/rknpu": "",
        "sys/class/thermal/thermal_zone0/type": "gpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "91000\n",
        "sys/class/thermal/thermal_zone1/type": "bigcore0-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "84900\n",
        "sys/class/thermal/thermal_zone2/type": "littlecore-thermal\n",
        "sys/class/thermal/thermal_zone2/temp": "-274000\n",
        "sys/class/thermal/cooling_device1/type": "cpufreq-cpu4\n",
        "sys/class/thermal/cooling_device1/cur_state": "2\n",
        "sys/class/power_supply/mouse/type": "Battery\n",
        "sys/class/power_supply/mouse/scope": "Device\n",
        "sys/class/power_supply/mouse/capacity": "3\n",
        "sys/class/power_supply/bat/type": "Battery\n",
        "sys/class/power_supply/bat/status": "Discharging\n",
        "sys/class/power_supply/bat/energy_now": "22000000\n",
        "sys/class/power_supply/bat/energy_full": "40000000\n",
        "sys/class/power_supply/usb/type": "USB\n",
        "sys/class/power_supply/usb/online": "0\n",
    }
    for core, (capacity, khz) in enumerate([(414, 1800000)] * 4 + [(1010, 2256000)] * 2 + [(1024, 2304000)] * 2):
        files[f"sys/devices/system/cpu/cpu{core}/cpu_capacity"] = f"{capacity}\n"
        files[f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq"] = f"{khz}\n"
    return lay_out(tmp_path, files)


@pytest.fixture
def jetson(tmp_path: Path) -> Path:
    """Orin Nano: six equal cores, a GPU on the SoC."""
    files = {
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
        "proc/cpuinfo": "\n".join(arm_cpu(n, "0x41", "0xd42", A76) for n in range(6)),
        "proc/self/status": "Cpus_allowed_list:\t0-5\n",
        "proc/meminfo": "MemTotal: 7800000 kB\n",
        "dev/nvhost-gpu": "",
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48000\n",
        "sys/class/thermal/thermal_zone1/type": "tj-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "49500\n",
    }
    for core in range(6):
        files[f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq"] = "1510400\n"
        files[f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"] = "schedutil\n"
    return lay_out(tmp_path, files)


@pytest.fixture
def x86_container(tmp_path: Path) -> Path:
    """Eight hyperthreads, a cpuset of four, a quota of 2.5 cores, 512 MiB."""
    block = "processor\t: {}\nmodel name\t: Intel(R) Xeon(R) Gold 6338\nflags\t\t: fpu avx2 avx512f\n"
    return lay_out(
        tmp_path,
        {
            "proc/cpuinfo": "\n".join(block.format(n) for n in range(8)),
            "proc/self/status": "Cpus_allowed_list:\t2-5\n",
            "proc/self/cgroup": "0::/\n",
            "proc/meminfo": "MemTotal: 65000000 kB\n",
            "sys/fs/cgroup/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/memory.max": "536870912\n",
            "sys/class/dmi/id/product_name": "PowerEdge R650\n",
            "sys/class/hwmon/hwmon0/name": "nvme\n",
            "sys/class/hwmon/hwmon0/temp1_input": "70000\n",
            "sys/class/hwmon/hwmon1/name": "coretemp\n",
            "sys/class/hwmon/hwmon1/temp1_input": "55000\n",
            "sys/class/hwmon/hwmon1/temp2_input": "57000\n",
        },
    )


def test_a_raspberry_pi_5_is_recognised(raspberry_pi_5: Path) -> None:
    machine = read_machine(raspberry_pi_5)
    assert machine.board == "Raspberry Pi 5 Model B Rev 1.0"
    assert machine.architecture == "aarch64"
    assert machine.cpu_model == "Cortex-A76"
    assert "asimddp" in machine.cpu_features
    assert (machine.cores, machine.threads, machine.quota_cores) == (4, 4, None)
    [group] = machine.groups
    assert (group.cores, group.capacity, group.max_mhz) == ((0, 1, 2, 3), 1024, 2400)
    assert machine.governors == ("ondemand",)
    assert machine.memory_bytes == 8245696 * 1024
    sensors = read_sensors(raspberry_pi_5)
    assert sensors.temperature_c == 61.45
    assert sensors.throttled is False
    assert sensors.battery_ratio is None
    assert sensors.on_battery is None
    assert sensors.load_ratio == 0.25
    assert sensors.memory_available_bytes == 7000000 * 1024


@pytest.mark.parametrize(
    ("flags", "throttled"), [("0", False), ("0x50000", False), ("0x1", False), ("0x4", True), ("e0008", True)]
)
def test_the_firmware_of_a_raspberry_pi_tells_throttling_now_from_throttling_once(
    raspberry_pi_5: Path, flags: str, throttled: bool
) -> None:
    lay_out(raspberry_pi_5, {"sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled": f"{flags}\n"})
    assert read_sensors(raspberry_pi_5).throttled is throttled


def test_unequal_cores_form_groups_with_the_fastest_first(orange_pi_5: Path) -> None:
    machine = read_machine(orange_pi_5)
    assert [(group.cores, group.capacity) for group in machine.groups] == [
        ((6, 7), 1024),
        ((4, 5), 1010),
        ((0, 1, 2, 3), 414),
    ]
    assert machine.performance_cores == (6, 7, 4, 5)  # one kind, of two bins
    assert machine.cpu_model == "Cortex-A55 + Cortex-A76"
    assert "sb" not in machine.cpu_features  # the small cores lack it


def test_the_battery_that_counts_is_the_devices_own_and_an_implausible_zone_is_left_out(orange_pi_5: Path) -> None:
    sensors = read_sensors(orange_pi_5)
    assert sensors.temperature_c == 84.9
    assert sensors.throttled is True
    assert sensors.battery_ratio == pytest.approx(0.55)
    assert sensors.on_battery is True


def test_a_jetson_is_recognised_and_its_gpu_seen(jetson: Path) -> None:
    fingerprint = take_fingerprint(jetson, speed_test_s=0.0)
    assert fingerprint.board == "NVIDIA Jetson Orin Nano Developer Kit"
    assert fingerprint.cpu_model == "Cortex-A78AE"
    assert fingerprint.accelerators == ("NVIDIA Tegra GPU",)
    assert [(group.cores, group.capacity, group.max_mhz) for group in fingerprint.groups] == [
        ((0, 1, 2, 3, 4, 5), 1024, 1510)
    ]
    assert fingerprint.sensors.temperature_c == 49.5
    assert fingerprint.providers[-1] == "CPUExecutionProvider"
    assert fingerprint.gemm_gflops > 0
    assert fingerprint.memory_gb_per_s > 0


def test_a_container_is_seen_as_what_it_may_use(x86_container: Path) -> None:
    machine = read_machine(x86_container)
    assert machine.board == "PowerEdge R650"
    assert machine.cpu_model == "Intel(R) Xeon(R) Gold 6338"
    assert machine.cpu_features == ("avx2", "avx512f", "fpu")
    assert (machine.cores, machine.threads, machine.quota_cores) == (8, 3, 2.5)
    assert machine.groups[0].cores == (2, 3, 4, 5)
    assert machine.memory_bytes == 512 * 2**20
    assert read_sensors(x86_container).temperature_c == 57.0


def test_the_digest_changes_with_the_quota_and_not_with_the_weather(x86_container: Path) -> None:
    before = read_machine(x86_container).digest
    lay_out(x86_container, {"sys/class/hwmon/hwmon1/temp1_input": "90000\n", "proc/loadavg": "9.00 1 1 1/1 1\n"})
    assert read_machine(x86_container).digest == before
    assert take_fingerprint(x86_container, speed_test_s=0.0).digest == before
    lay_out(x86_container, {"sys/fs/cgroup/cpu.max": "100000 100000\n"})
    assert read_machine(x86_container).digest != before


def test_an_empty_root_gives_unknowns_and_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.board == ""
    assert machine.cpu_model == ""
    assert machine.threads >= 1
    sensors = read_sensors(tmp_path)
    assert sensors.temperature_c is None
    assert sensors.throttled is None
    assert sensors.load_ratio is None


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)


def test_the_command_prints_json_with_the_digest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--json"])) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["digest"] == read_machine().digest
    assert shown["threads"] >= 1
    assert shown["runtime"].startswith("onnxruntime ")


def test_the_command_prints_one_fact_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("threads") for line in lines)
    assert lines[-1].split() == ["digest", read_machine().digest]
