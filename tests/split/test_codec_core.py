"""split/codec/core.py and scripts/build_native.py: which core is taken, and what is said where there is none."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts import build_native
from split.codec import core as cores
from split.codec.core import ABI, VARIABLE, Native, core, core_in_use, load
from split.codec.fallback import Fallback

ROOT = Path(__file__).resolve().parents[2]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    core.cache_clear()
    yield
    core.cache_clear()


def library(folder: Path, source: str) -> Path:
    (folder / "some.c").write_text(source)
    made = folder / f"{abs(hash(source))}.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(folder / "some.c"), "-o", str(made)], check=True, timeout=60)
    return made


def test_the_environment_does_without_the_compiled_core(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    assert isinstance(core(), Fallback)
    assert core_in_use() == f"plain Python: {VARIABLE}=0 in the environment"
    assert caplog.records == []


def test_without_a_compiled_core_the_codec_runs_in_python_and_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(cores, "load", lambda: load(tmp_path / "none.so"))
    with caplog.at_level(logging.WARNING):
        assert isinstance(core(), Fallback)
        core()
    (record,) = caplog.records
    assert "scripts/build_native.py" in record.message
    assert "none.so" in core_in_use()


def test_a_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"\x7fELF and no more")
    found = load(path)
    assert isinstance(found, str)
    assert "cannot be loaded" in found


@needs_cc
def test_a_library_of_another_abi_or_of_something_else_is_not_used(tmp_path: Path) -> None:
    other = load(library(tmp_path, f"int klt_abi(void) {{ return {ABI + 1}; }}"))
    assert isinstance(other, str)
    assert f"ABI {ABI + 1}, not {ABI}" in other
    foreign = load(library(tmp_path, "int something(void) { return 1; }"))
    assert isinstance(foreign, str)
    assert "cannot be loaded" in foreign


def test_header_and_loader_name_the_same_abi() -> None:
    header = (ROOT / "split" / "codec" / "native" / "klt.h").read_text()
    assert f"#define KLT_ABI {ABI}\n" in header


def test_the_core_that_was_built_is_the_one_that_is_loaded(native: Native) -> None:
    assert native.name == f"compiled (ABI {ABI})"


@needs_cc
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    sources = sorted(map(str, (ROOT / "split" / "codec" / "native").glob("*.c")))
    strict = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Wvla", "-Werror")
    command = ["cc", *build_native.FLAGS, *strict, *sources, "-o", str(tmp_path / "x.so"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_nothing_is_left_of_an_older_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there --flag")
    old = tmp_path / "_native.so"
    old.write_bytes(b"old")
    why = build_native.build(library=old)
    assert why is not None
    assert "a-compiler-that-is-not-there" in why
    assert list(tmp_path.iterdir()) == []


def project(folder: Path) -> Path:
    """A project's root with the sources of the core and nothing else."""
    shutil.copytree(ROOT / "split" / "codec" / "native", folder / "split" / "codec" / "native")
    return folder


def wheel_of(root: Path, target: str = "wheel") -> tuple[dict[str, Any], list[str]]:
    """What the hook makes of a build there, and what it warns of."""
    pytest.importorskip("hatchling", reason="installed with the project, not with its wheels")
    warnings: list[str] = []
    app = SimpleNamespace(display_warning=warnings.append)
    nothing: Any = None
    hook = build_native.NativeHook(str(root), {}, nothing, nothing, str(root / "dist"), target, cast(Any, app))
    build_data: dict[str, Any] = {"pure_python": True}
    hook.initialize("standard", build_data)
    return build_data, warnings


@needs_cc
def test_a_wheel_with_the_core_is_for_its_platform_and_any_python(tmp_path: Path) -> None:
    build_data, warnings = wheel_of(project(tmp_path))
    assert warnings == []
    assert build_data["pure_python"] is False
    assert build_data["tag"].startswith("py3-none-linux_")
    assert isinstance(load(tmp_path / "split" / "codec" / cores.LIBRARY.name), Native)


def test_a_wheel_without_a_compiler_is_for_all_platforms_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    build_data, warnings = wheel_of(project(tmp_path))
    assert build_data == {"pure_python": True}
    assert "without its compiled core" in warnings[0]


def test_a_source_archive_compiles_nothing(tmp_path: Path) -> None:
    assert wheel_of(project(tmp_path), target="sdist") == ({"pure_python": True}, [])
    assert list((tmp_path / "split" / "codec").iterdir()) == [tmp_path / "split" / "codec" / "native"]
