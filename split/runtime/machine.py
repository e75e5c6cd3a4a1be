"""What kind of machine this is: processor, core groups, limits. Costs measured on it hold for one `digest`.

Facts only, read from /proc and /sys below a root directory, so that tests can lay out any device; nothing is measured
here (`agent/fingerprint.py` does that for a user to see) and nothing raises.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Final

import msgspec

from split.runtime.allowance import allowed_cores, memory_limit_bytes, quota_cores, usable_threads
from split.runtime.kernel_files import read_text

_ARM_PARTS: Final = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd04"): "Cortex-A35",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd09"): "Cortex-A73",
    ("0x41", "0xd0a"): "Cortex-A75",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd0d"): "Cortex-A77",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd44"): "Cortex-X1",
    ("0x41", "0xd46"): "Cortex-A510",
    ("0x41", "0xd47"): "Cortex-A710",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x4e", "0x004"): "Carmel",
}
"""MIDR implementer and part as arm64's /proc/cpuinfo gives them (it has no model name); from the kernel's cputype.h."""


PERFORMANCE_RATIO: Final = 0.8
"""Of the fastest core's capacity. Above: a processor's favoured cores and its others (5 %), a prime core and the big
ones (15 %); below: little cores (40 to 70 %), efficiency cores (25 %)."""


class CoreGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Cores of one kind, among those this process may use."""

    cores: tuple[int, ...]
    capacity: int
    """Relative to the device's fastest core, which has 1024 (as the kernel's cpu_capacity)."""
    max_mhz: int
    """0 where the kernel does not tell."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One device as it presents itself; `digest` says what of it costs depend on."""

    board: str
    """From the device tree or DMI; empty where there is neither."""
    architecture: str
    cpu_model: str
    cpu_features: tuple[str, ...]
    """What all cores have, sorted."""
    cores: int
    """Online in the device."""
    groups: tuple[CoreGroup, ...]
    """Fastest first; more than one where cores differ (big.LITTLE)."""
    quota_cores: float | None
    """CPU time granted by the cgroup, in cores; None = no limit."""
    threads: int
    """Worth starting: allowed cores within the quota."""
    governors: tuple[str, ...]
    """Frequency policies in force."""
    memory_bytes: int
    """Of the device, or what the cgroup allows if that is less; 0 where unknown."""
    compatible: tuple[str, ...] = ()
    """`compatible` of the device tree: board and processor by their makers, the closest first."""

    @property
    def digest(self) -> str:
        """16 hex digits over what costs depend on and a reboot does not change."""
        stable = (
            self.board,
            self.architecture,
            self.cpu_model,
            self.cpu_features,
            self.cores,
            self.groups,
            self.quota_cores,
            self.threads,
            self.governors,
        )
        return hashlib.sha256(msgspec.json.encode(stable)).hexdigest()[:16]

    @property
    def performance_cores(self) -> tuple[int, ...]:
        """The fastest, and those that hardly differ: a thread on a core beyond these makes the others wait."""
        enough = PERFORMANCE_RATIO * max((group.capacity for group in self.groups), default=0)
        return tuple(core for group in self.groups if group.capacity >= enough for core in group.cores)


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine whose /proc and /sys lie below `root`."""
    cpus = _cpus(root)
    allowed = allowed_cores(root)
    limits = [n for n in (meminfo_bytes(root, "MemTotal"), memory_limit_bytes(root)) if n is not None]
    policies = root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
    return Machine(
        board=_tree(root, "model") or read_text(root / "sys/class/dmi/id/product_name"),
        architecture=_architecture(cpus),
        cpu_model=_cpu_model(cpus),
        cpu_features=_cpu_features(cpus),
        cores=max(len(cpus), len(allowed)),
        groups=_groups(root, allowed),
        quota_cores=quota_cores(root),
        threads=usable_threads(root),
        governors=tuple(sorted({read_text(policy) for policy in policies})),
        memory_bytes=min(limits, default=0),
        compatible=tuple(filter(None, _tree(root, "compatible").split("\0"))),
    )


def meminfo_bytes(root: Path, field: str) -> int | None:
    """A field of /proc/meminfo, in bytes; None where it is not there."""
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field and (words := value.split()) and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _tree(root: Path, node: str) -> str:
    """A node of the device tree's root; /proc/device-tree is a link to where the firmware's tree lies in /sys."""
    return read_text(root / "proc/device-tree" / node) or read_text(root / "sys/firmware/devicetree/base" / node)


def _cpus(root: Path) -> list[dict[str, str]]:
    """/proc/cpuinfo: one dict for each processor, keys as the kernel writes them."""
    cpus: list[dict[str, str]] = []
    for block in read_text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in fields:
            cpus.append(fields)
    return cpus


def _architecture(cpus: list[dict[str, str]]) -> str:
    """Of the processors described; arm64 has a `CPU architecture` line, x86 `flags`."""
    if cpus and cpus[0].get("CPU architecture") == "8":
        return "aarch64"
    return platform.machine()


def _cpu_model(cpus: list[dict[str, str]]) -> str:
    names: dict[str, None] = {}
    for cpu in cpus:
        implementer, part = cpu.get("CPU implementer", ""), cpu.get("CPU part", "")
        unnamed = f"ARM {implementer} {part}" if part else ""
        names[cpu.get("model name") or _ARM_PARTS.get((implementer, part)) or unnamed] = None
    return " + ".join(name for name in names if name)


def _cpu_features(cpus: list[dict[str, str]]) -> tuple[str, ...]:
    sets = [set((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in cpus]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def _groups(root: Path, allowed: frozenset[int]) -> tuple[CoreGroup, ...]:
    """Allowed cores by kind: by cpu_capacity where the kernel has it (arm), else by maximum frequency."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for core in sorted(allowed):
        folder = root / f"sys/devices/system/cpu/cpu{core}"
        mhz = _int(folder / "cpufreq/cpuinfo_max_freq") // 1000
        kinds.setdefault((_int(folder / "cpu_capacity"), mhz), []).append(core)
    fastest_mhz = max((mhz for _, mhz in kinds), default=0)
    groups = [
        CoreGroup(
            cores=tuple(cores),
            capacity=capacity or (1024 * mhz // fastest_mhz if fastest_mhz else 1024),
            max_mhz=mhz,
        )
        for (capacity, mhz), cores in kinds.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.capacity, group.cores)))


def _int(path: Path) -> int:
    said = read_text(path)
    return int(said) if said.isdigit() else 0
