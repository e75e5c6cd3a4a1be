"""Devices laid out as files below a directory, as their kernels show them. What a test adds, it writes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Board = Callable[[Path], Path]


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def arm_cpus(*parts: str) -> str:
    """/proc/cpuinfo of Arm Ltd.'s cores with these part numbers."""
    return "\n".join(
        f"processor\t: {number}\nFeatures\t: fp asimd aes crc32\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU part\t: {part}\n"
        for number, part in enumerate(parts)
    )


def clocks(core: int, *, can_mhz: int, may_mhz: int, now_mhz: int, governor: str = "ondemand") -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
    return {
        f"{folder}/cpuinfo_max_freq": f"{can_mhz}000\n",
        f"{folder}/scaling_max_freq": f"{may_mhz}000\n",
        f"{folder}/scaling_cur_freq": f"{now_mhz}000\n",
        f"{folder}/scaling_governor": f"{governor}\n",
    }


def raspberry_pi_4(root: Path) -> Path:
    """With an INA219 board on its supply."""
    files = {
        "proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0",
        "proc/device-tree/compatible": "raspberrypi,4-model-b\0brcm,bcm2711\0",
        "proc/cpuinfo": arm_cpus(*["0xd08"] * 4),
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "proc/meminfo": "MemTotal: 3884372 kB\n",
        "sys/class/hwmon/hwmon1/name": "ina219\n",
        "sys/class/hwmon/hwmon1/in0_input": "12\n",
        "sys/class/hwmon/hwmon1/in1_input": "5100\n",
        "sys/class/hwmon/hwmon1/curr1_input": "1200\n",
        "sys/class/hwmon/hwmon1/power1_input": "6120000\n",
    }
    for core in range(4):
        files |= clocks(core, can_mhz=1800, may_mhz=1800, now_mhz=600)
    return lay_out(root, files)


def raspberry_pi_5(root: Path) -> Path:
    """No energy anywhere; the firmware's device tree only in /sys."""
    files = {
        "sys/firmware/devicetree/base/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        "sys/firmware/devicetree/base/compatible": "raspberrypi,5-model-b\0brcm,bcm2712\0",
        "proc/cpuinfo": arm_cpus(*["0xd0b"] * 4),
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "sys/class/hwmon/hwmon0/name": "cpu_thermal\n",
        "sys/class/hwmon/hwmon0/temp1_input": "61450\n",
    }
    for core in range(4):
        files |= clocks(core, can_mhz=2400, may_mhz=1500, now_mhz=1500)
    return lay_out(root, files)


def jetson_orin_nano(root: Path) -> Path:
    """Its INA3221 has three rails; it gives mV and mA."""
    files = {
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
        "proc/cpuinfo": arm_cpus(*["0xd42"] * 6),
        "proc/self/status": "Cpus_allowed_list:\t0-5\n",
        "dev/nvgpu/igpu0/ctrl": "",
        "sys/class/hwmon/hwmon1/name": "ina3221\n",
    }
    for channel, (label, millivolt, milliampere) in enumerate(
        [("VDD_IN", 5048, 1360), ("VDD_CPU_GPU_CV", 5048, 240), ("VDD_SOC", 5048, 288)], 1
    ):
        files |= {
            f"sys/class/hwmon/hwmon1/in{channel}_label": f"{label}\n",
            f"sys/class/hwmon/hwmon1/in{channel}_input": f"{millivolt}\n",
            f"sys/class/hwmon/hwmon1/curr{channel}_input": f"{milliampere}\n",
        }
    return lay_out(root, files)


def orange_pi_5(root: Path) -> Path:
    """RK3588, four little cores first; on a battery that gives volts and amperes, the amperes below zero."""
    files = {
        "proc/device-tree/model": "Orange Pi 5\0",
        "proc/device-tree/compatible": "xunlong,orangepi-5\0rockchip,rk3588s\0",
        "proc/cpuinfo": arm_cpus(*["0xd05"] * 4, *["0xd0b"] * 4),
        "proc/self/status": "Cpus_allowed_list:\t0-7\n",
        "dev/rknpu": "",
        "sys/class/power_supply/cw2015/type": "Battery\n",
        "sys/class/power_supply/cw2015/status": "Discharging\n",
        "sys/class/power_supply/cw2015/capacity": "14\n",
        "sys/class/power_supply/cw2015/voltage_now": "7600000\n",
        "sys/class/power_supply/cw2015/current_now": "-900000\n",
    }
    for core in range(8):
        files |= clocks(core, can_mhz=1800 if core < 4 else 2400, may_mhz=1800 if core < 4 else 2400, now_mhz=408)
    return lay_out(root, files)


def laptop(root: Path) -> Path:
    """x86 with RAPL and a battery, plugged in; a mouse has a battery of its own."""
    zones = "sys/class/powercap"
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i7-1260P\nflags\t: fpu avx2 fma\n",
        "proc/self/status": "Cpus_allowed_list:\t0\n",
        "sys/class/dmi/id/product_name": "ThinkPad X1\n",
        f"{zones}/intel-rapl:0/name": "package-0\n",
        f"{zones}/intel-rapl:0/energy_uj": "5000000\n",
        f"{zones}/intel-rapl:0/max_energy_range_uj": "262143328850\n",
        f"{zones}/intel-rapl:0:0/name": "core\n",
        f"{zones}/intel-rapl:0:0/energy_uj": "3000000\n",
        f"{zones}/intel-rapl:0:1/name": "dram\n",
        f"{zones}/intel-rapl:0:1/energy_uj": "1000000\n",
        f"{zones}/intel-rapl:0:1/max_energy_range_uj": "65712999613\n",
        f"{zones}/intel-rapl-mmio:0/name": "package-0\n",
        f"{zones}/intel-rapl-mmio:0/energy_uj": "5000000\n",
        "sys/class/power_supply/BAT0/type": "Battery\n",
        "sys/class/power_supply/BAT0/status": "Charging\n",
        "sys/class/power_supply/BAT0/capacity": "9\n",
        "sys/class/power_supply/BAT0/power_now": "12500000\n",
        "sys/class/power_supply/hid-mouse/type": "Battery\n",
        "sys/class/power_supply/hid-mouse/scope": "Device\n",
        "sys/class/power_supply/hid-mouse/capacity": "3\n",
        "sys/class/power_supply/hid-mouse/status": "Discharging\n",
    }
    return lay_out(root, files | clocks(0, can_mhz=4700, may_mhz=4700, now_mhz=2100, governor="powersave"))


def container(root: Path) -> Path:
    """Nothing but what its processes must have."""
    return lay_out(root, {"proc/self/status": "Cpus_allowed_list:\t0-1\n"})
