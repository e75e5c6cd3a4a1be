"""An ARM64 userland in a folder, run by qemu's user emulation: nothing is installed into the machine, no root needed.

Debian packages are fetched with apt-get under a state of its own (its keyring checks them) and only unpacked; wheels
are those of the project's pins for aarch64. Programs are the emulated kernel's: processor features and page size are
qemu's, files, sockets and the clock the host's. Slow, by a factor of about 50 in arithmetic.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CONSTRAINTS: Final = ROOT / "scripts" / "constraints.txt"

SUITE: Final = "bookworm"
"""Raspberry Pi OS bookworm has the same Python and libc. qemu 7.2: the last one whose page size can be chosen."""
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES: Final = ("python3.11", "libstdc++6")
GLIBC: Final = range(28, 16, -1)
"""Minor versions of manylinux wheels that run on glibc 2.28 and newer: what the oldest supported board has."""
FETCH_TIMEOUT_S: Final = 600


class Unavailable(Exception):
    """The emulation cannot be set up here; the text says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """One that qemu emulates, and a board that has it (or one like it)."""

    name: str
    part: str
    """As in /proc/cpuinfo; the implementer is ARM."""
    features: str
    board: str


PROCESSORS: Final = {
    one.name: one
    for one in (
        Processor(
            name="cortex-a53", part="0xd03", features="fp asimd evtstrm crc32 cpuid", board="Raspberry Pi 3, Zero 2 W"
        ),
        Processor(name="cortex-a72", part="0xd08", features="fp asimd evtstrm crc32 cpuid", board="Raspberry Pi 4"),
        Processor(
            name="cortex-a76",
            part="0xd0b",
            features="fp asimd evtstrm aes sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp",
            board="Raspberry Pi 5, Jetson Orin (A78AE), RK3588",
        ),
        Processor(
            name="max",
            part="0xd49",
            features="fp asimd evtstrm crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve sve2 i8mm bf16",
            board="ARMv9: i8mm, bf16, SVE2",
        ),
    )
}


def debian_archive() -> str:
    """Where this host's own apt gets `SUITE` from; Unavailable where it knows no such source."""
    asked = ("Created-By: Packages", "Label: Debian", f"Codename: {SUITE}", "Component: main")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", *asked]
    found = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    if not found:
        raise Unavailable(f"apt on this host has no source of Debian {SUITE} (main), from which qemu and ARM64 come")
    return found[0]


class Emulated:
    """The userland in `folder`, made there on first use; `Unavailable` when it cannot be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.packages = folder / "packages"
        self._qemu = folder / "qemu" / "usr" / "bin" / "qemu-aarch64-static"
        self._stamp = folder / "made-of"

    def set_up(self, dependencies: Sequence[str]) -> None:
        """Fetch and unpack what is not there yet: half a minute and 400 MB."""
        made_of = "\n".join((SUITE, *PACKAGES, *dependencies, CONSTRAINTS.read_text()))
        if self._stamp.exists() and self._stamp.read_text() == made_of:
            return
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise Unavailable(f"{tool} is missing: qemu and the ARM64 packages come from Debian's archive")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._fetch_debian("arm64", PACKAGES, self.root)
        self._fetch_debian(_host_architecture(), ("qemu-user-static",), self._qemu.parents[2])
        wheels = self.folder / "wheels"
        _run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *wheel_options("3.11"),
            *("--constraint", str(CONSTRAINTS), "--dest", str(wheels)),
            *dependencies,
        )
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.packages)
        shutil.rmtree(wheels)
        self._stamp.write_text(made_of)

    def python(self, processor: Processor, *, page_bytes: int = 4096) -> Path:
        """A program that is this processor's Python, also for its own child processes (`sys.executable`).

        One at a time: what the kernel would tell of the processor lies in the userland.
        """
        self._describe(processor)
        path = self.root / "usr" / "bin" / f"python-{processor.name}-{page_bytes}"
        path.write_text(
            "#!/bin/sh\n"
            f'exec "{self._qemu}" -cpu {processor.name} -p {page_bytes} -L "{self.root}" -0 "$0" '
            f'"{self.root}/usr/bin/python3.11" "$@"\n'
        )
        path.chmod(0o755)
        return path

    def environment(self) -> Mapping[str, str]:
        """For `python`: this project and its packages for ARM64, nothing of the host's Python."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "QEMU", "LD_"))}
        return outside | {"PYTHONPATH": f"{ROOT}{os.pathsep}{self.packages}", "ORT_DISABLE_TELEMETRY": "1"}

    def alignments(self) -> Iterator[tuple[Path, int]]:
        """(library, alignment of its segments in memory): one below the kernel's page size cannot be loaded."""
        for path in (*self.packages.rglob("*.so*"), *self.root.rglob("*.so*")):
            if path.is_file() and not path.is_symlink() and (found := load_alignment(path.read_bytes())):
                yield path, found

    def _fetch_debian(self, architecture: str, names: Sequence[str], target: Path) -> None:
        """Download with dependencies, under an apt state of its own that knows no installed package, and unpack."""
        state = self.folder / f"apt-{architecture}"
        for name in ("lists/partial", "archives/partial"):
            (state / name).mkdir(parents=True)
        (state / "status").touch()
        (state / "sources.list").write_text(f"deb [signed-by={KEYRING}] {debian_archive()} {SUITE} main\n")
        settings = {
            "Dir::State": state,
            "Dir::State::lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "Dir::Cache::archives": state / "archives",
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
        }
        if os.geteuid() == 0:
            settings["APT::Sandbox::User"] = "root"  # else it would want to own these folders
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        _run("apt-get", "--quiet", *options, "update")
        _run("apt-get", "--quiet", *options, "--yes", "--download-only", "install", *names)
        target.mkdir(parents=True)
        for package in sorted((state / "archives").glob("*.deb")):
            _run("dpkg-deb", "--extract", str(package), str(target))
        shutil.rmtree(state)

    def _describe(self, processor: Processor) -> None:
        """/proc/cpuinfo as this processor's kernel has it. qemu 7.2 shows the host's, and onnxruntime's cpuinfo dies
        of it (a segmentation fault on import)."""
        text = "".join(
            f"processor\t: {core}\nBogoMIPS\t: 108.00\nFeatures\t: {processor.features}\nCPU implementer\t: 0x41\n"
            f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {processor.part}\nCPU revision\t: 1\n\n"
            for core in range(os.cpu_count() or 1)
        )
        path = self.root / "proc" / "cpuinfo"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def wheel_options(python: str) -> list[str]:
    """For pip: only wheels, of this Python on aarch64 Linux."""
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["manylinux2014_aarch64"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return options + [word for name in platforms for word in ("--platform", name)]


def load_alignment(content: bytes) -> int | None:
    """The smallest alignment of a 64-bit little-endian ELF file's PT_LOAD segments (elf(5)); None for other files."""
    if content[:6] != b"\x7fELF\x02\x01":
        return None
    (start,) = struct.unpack_from("<Q", content, 32)  # e_phoff
    size, count = struct.unpack_from("<HH", content, 54)  # e_phentsize, e_phnum
    headers = [start + number * size for number in range(count)]
    aligned = [struct.unpack_from("<Q", content, at + 48)[0] for at in headers if content[at : at + 4] == b"\1\0\0\0"]
    return min(aligned, default=None)


def _host_architecture() -> str:
    return subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:3])} … did not end within {FETCH_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{command[0]} failed: {error.stderr.strip()[-400:]}") from None
