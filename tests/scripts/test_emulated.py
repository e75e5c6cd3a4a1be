from __future__ import annotations

import itertools
import struct
import sys
from pathlib import Path

import pytest

from scripts.emulated import PROCESSORS, Emulated, Unavailable, load_alignment, wheel_options


def elf(*segments: tuple[int, int]) -> bytes:
    """An ELF file of nothing but (type, alignment) program headers: 64 bit, little-endian."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 3, 183, 1, 0, 64, 0, 0, 64, 56, len(segments), 64, 0, 0)
    return (
        ident + header + b"".join(struct.pack("<IIQQQQQQ", kind, 5, 0, 0, 0, 0, 0, align) for kind, align in segments)
    )


def test_the_alignment_is_the_smallest_of_what_is_loaded() -> None:
    load, note = 1, 4
    assert load_alignment(elf((load, 0x10000), (note, 4), (load, 0x4000))) == 0x4000


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(60), elf()])
def test_what_loads_nothing_has_no_alignment(content: bytes) -> None:
    assert load_alignment(content) is None


def test_wheels_are_asked_for_a_board_with_glibc_2_28_or_newer_and_never_built() -> None:
    options = wheel_options("3.12")
    platforms = {after for option, after in itertools.pairwise(options) if option == "--platform"}
    assert {"manylinux_2_28_aarch64", "manylinux2014_aarch64"} <= platforms
    assert not any("2_29" in name or "2_34" in name for name in platforms)
    assert "--only-binary=:all:" in options


def test_without_apt_it_is_unavailable_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt-get is missing"):
        Emulated(tmp_path / "arm").set_up(["numpy"])
    assert not (tmp_path / "arm").exists()


def test_a_processors_python_names_it_and_the_kernel_describes_it(tmp_path: Path) -> None:
    emulated = Emulated(tmp_path)
    (emulated.root / "usr" / "bin").mkdir(parents=True)
    text = emulated.python(PROCESSORS["cortex-a72"], page_bytes=16384).read_text()
    assert "-cpu cortex-a72 -p 16384" in text
    assert "CPU part\t: 0xd08\n" in (emulated.root / "proc" / "cpuinfo").read_text()


def test_an_emulated_program_sees_nothing_of_the_hosts_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", sys.prefix)
    environment = Emulated(tmp_path).environment()
    assert "PYTHONHOME" not in environment
    assert environment["PYTHONPATH"].endswith(f"{tmp_path}/packages")
