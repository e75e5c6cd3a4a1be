"""When a fingerprint holds: each thing that it depends on, changed alone, has it taken again, and is named."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent import fingerprint as fingerprints
from agent.commands import fingerprint as command
from agent.commands import plan as plan_command
from agent.fingerprint import Fingerprint, disk_read_mb_per_s, take_fingerprint, unusable_accelerators
from agent.fingerprint_file import FILE, fingerprint_key, keep, kept
from agent.fingerprinting import Fingerprinting
from split.errors import InvalidModel
from split.profiles.rates import KINDS, Rate, Rates, read_rates
from split.runtime.machine import read_machine
from split.workbench.child import run_child_sync
from tests.agent import boards

CPU = "sys/devices/system/cpu"


def key_of(root: Path, runtime: str = "onnxruntime 1.32.0 aarch64") -> dict[str, str]:
    return fingerprint_key(read_machine(root), root, runtime=runtime)


def pi(tmp_path: Path) -> Path:
    return boards.lay_out(boards.raspberry_pi_4(tmp_path / "pi"), {f"{CPU}/online": "0-3\n"})


@pytest.fixture
def taken(tmp_path: Path) -> Fingerprint:
    return take_fingerprint(pi(tmp_path), speed_test_s=0.0)


@pytest.mark.parametrize(
    ("part", "files"),
    [
        ("hardware", {"proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.5\0"}),
        ("hardware", {"proc/meminfo": "MemTotal: 7884372 kB\n"}),
        ("governor", {f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n"}),
        ("highest clock", {f"{CPU}/cpu0/cpufreq/scaling_max_freq": "1000000\n"}),
        ("accelerators", {"dev/apex_0": ""}),
        ("online cores", {f"{CPU}/online": "0-2\n"}),
        (
            "quota",
            {"proc/self/cgroup": "0::/isthmus\n", "sys/fs/cgroup/isthmus/cpu.max": "150000 100000\n"},
        ),
    ],
)
def test_a_change_of_one_thing_has_it_taken_again_and_is_named(
    part: str, files: dict[str, str], tmp_path: Path, taken: Fingerprint
) -> None:
    root = pi(tmp_path)
    assert keep(taken, key_of(root), tmp_path) == ""
    assert kept(key_of(root), tmp_path, root) == (taken, "")
    boards.lay_out(root, files)
    assert kept(key_of(root), tmp_path) == (None, f"changed since the last one: {part}")


def test_another_runtime_has_it_taken_again(tmp_path: Path, taken: Fingerprint) -> None:
    root = pi(tmp_path)
    keep(taken, key_of(root), tmp_path)
    assert kept(key_of(root, "onnxruntime 1.33.0 aarch64"), tmp_path) == (None, "changed since the last one: runtime")


def test_heat_load_and_charge_change_nothing(tmp_path: Path, taken: Fingerprint) -> None:
    root = pi(tmp_path)
    keep(taken, key_of(root), tmp_path)
    boards.lay_out(
        root,
        {
            "proc/loadavg": "9.00 1 1 1/1 1\n",
            "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "79000\n",
            f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "1800000\n",
        },
    )
    found, _ = kept(key_of(root), tmp_path, root)
    assert found is not None
    assert found.gemm_gflops == taken.gemm_gflops
    assert (taken.sensors.temperature_c, found.sensors.temperature_c) == (None, 79.0)


def test_a_clock_that_heat_holds_down_is_no_changed_policy(tmp_path: Path, taken: Fingerprint) -> None:
    root = pi(tmp_path)
    keep(taken, key_of(root), tmp_path)
    zone = "sys/class/thermal/cooling_device0"
    hot = {f"{zone}/type": "cpufreq-cpu0\n", f"{zone}/cur_state": "3\n", "dev/x": ""}
    boards.lay_out(root, hot | {f"{CPU}/cpu0/cpufreq/scaling_max_freq": "1000000\n"})
    assert kept(key_of(root), tmp_path, root)[0] is not None
    keep(taken, key_of(root), tmp_path)  # as it would be taken in the heat
    boards.lay_out(root, {f"{zone}/cur_state": "0\n", f"{CPU}/cpu0/cpufreq/scaling_max_freq": "1800000\n"})
    assert kept(key_of(root), tmp_path, root) == (None, "changed since the last one: highest clock")


async def test_none_is_taken_while_heat_holds_the_clock_down(tmp_path: Path) -> None:
    root = pi(tmp_path)
    zone = "sys/class/thermal/cooling_device0"
    boards.lay_out(root, {f"{zone}/type": "cpufreq-cpu0\n", f"{zone}/cur_state": "1\n"})
    here = Fingerprinting(machine=read_machine(root), folder=tmp_path / "state", idle=lambda: True, root=root)
    await here.look()
    assert here.fingerprint is None
    boards.lay_out(root, {f"{zone}/cur_state": "0\n"})
    await here.look()
    assert here.fingerprint is not None


def test_a_node_that_may_not_be_looked_for_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)  # root may look everywhere
    assert fingerprints.seen_accelerators(Path("/nowhere")) == ()


def test_what_could_not_be_put_in_place_leaves_nothing_behind(tmp_path: Path, taken: Fingerprint) -> None:
    (tmp_path / "state" / FILE).mkdir(parents=True)
    assert "cannot be kept" in keep(taken, {}, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state").iterdir()] == [FILE]


def test_none_and_a_damaged_one_are_said_apart(tmp_path: Path) -> None:
    assert kept({}, tmp_path) == (None, "none was taken yet")
    (tmp_path / FILE).write_text("{")
    found, why = kept({}, tmp_path)
    assert found is None
    assert why.startswith("the last one cannot be read")


def test_a_folder_that_cannot_be_written_is_a_note_and_no_error(tmp_path: Path, taken: Fingerprint) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be kept" in keep(taken, {}, tmp_path / "file" / "state")


def rates(gemm: float | None) -> Rates:
    rate = Rate(one=1.0, all=gemm)
    return Rates(threads=2, gemm_fp32=rate, gemm_int8=rate, conv_fp32=rate, conv_int8=rate)


def test_the_runtimes_own_rate_counts_before_numpys(taken: Fingerprint) -> None:
    assert taken.matrix_gflops == taken.gemm_gflops
    assert msgspec.structs.replace(taken, rates=rates(77.0)).matrix_gflops == 77.0
    assert msgspec.structs.replace(taken, rates=rates(None)).matrix_gflops == taken.gemm_gflops


def test_the_workbench_measures_every_kind_on_one_thread_and_on_all(tmp_path: Path) -> None:
    stages: list[str] = []
    out = tmp_path / "rates.json"
    run_child_sync(
        ["speed", str(out), "--seconds", "0.01"], timeout_s=60.0, on_progress=lambda stage, _: stages.append(stage)
    )
    measured = read_rates(out)
    assert stages == list(KINDS)
    for kind in KINDS:
        rate: Rate = getattr(measured, kind)
        assert rate.one is not None
        assert rate.all is not None
        assert min(rate.one, rate.all) > 0.0


def test_a_workbench_that_fails_leaves_the_rates_unknown(
    taken: Fingerprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise InvalidModel("the child took too long")

    monkeypatch.setattr(fingerprints, "run_child_sync", fail)
    full = fingerprints.take_full(tmp_path / "cache", quick=taken)
    assert full.rates is None
    assert full.disk_read_mb_per_s is not None
    assert "the child took too long" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_nearly_full_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100 << 20

    monkeypatch.setattr(fingerprints.shutil, "disk_usage", lambda _: Usage)
    assert disk_read_mb_per_s(tmp_path) is None


@pytest.mark.parametrize(
    ("accelerator", "providers", "end"),
    [
        ("Rockchip NPU", ("CPUExecutionProvider",), "ONNX Runtime has no execution provider for it"),
        (
            "Ascend NPU",
            ("CPUExecutionProvider",),
            "a build of onnxruntime with CANNExecutionProvider, and its driver, would use it for models whose contract "
            "names cann in resource.accelerators",
        ),
        (
            "VeriSilicon NPU",
            ("CPUExecutionProvider",),
            "a build of onnxruntime with VSINPUExecutionProvider, and its driver, would use it for models whose "
            "contract names vsinpu in resource.accelerators",
        ),
    ],
)
def test_an_accelerator_that_does_not_compute_is_one_clear_sentence(
    accelerator: str, providers: tuple[str, ...], end: str
) -> None:
    (sentence,) = unusable_accelerators((accelerator,), providers, "onnxruntime 1.32.0 aarch64")
    assert sentence == (
        f"{accelerator}: seen, but nothing of onnxruntime 1.32.0 aarch64 computes on it, models run on the processor; "
        f"{end}"
    )


def test_an_accelerator_that_computes_needs_no_sentence() -> None:
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert unusable_accelerators(("NVIDIA Tegra GPU",), providers, "onnxruntime 1") == ()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_measures_once_and_shows_what_is_kept_until_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)
    measured = 0

    def take() -> Fingerprint:
        nonlocal measured
        measured += 1
        return take_fingerprint(speed_test_s=0.0)

    monkeypatch.setattr(command, "take_fingerprint", take)
    shown: list[Any] = []
    for words in (["--json"], ["--json"], ["--json", "--again"]):
        assert command.run(arguments(*words)) == 0
        captured = capsys.readouterr()
        shown.append(json.loads(captured.out))
    assert measured == 2
    assert shown[0]["gemm_gflops"] == shown[1]["gemm_gflops"]
    assert {"rates", "disk_read_mb_per_s", "sensors", "unusable", "digest", "codec_core"} <= shown[0].keys()
    assert shown[0]["rates"] is None


def test_the_full_one_is_taken_where_only_a_quick_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ISTHMUS_CONFIG", raising=False)
    monkeypatch.setattr(command, "take_fingerprint", lambda: take_fingerprint(speed_test_s=0.0))

    def measured_rates(words: list[str], **_: object) -> None:
        Path(words[1]).write_bytes(msgspec.json.encode(rates(50.0)))

    monkeypatch.setattr(fingerprints, "run_child_sync", measured_rates)
    command.run(arguments("--json"))
    capsys.readouterr()
    command.run(arguments("--full"))
    out, err = capsys.readouterr()
    assert "gemm fp32     1 G/s on one thread, 50 G/s on 2" in out.splitlines()
    assert any(line.startswith("disk") for line in out.splitlines())
    assert "the full one was not taken yet" in err
    command.run(arguments("--full"))
    assert "measuring" not in capsys.readouterr().err


def test_another_device_is_slower_by_what_was_measured_here_over_what_it_sustains(
    monkeypatch: pytest.MonkeyPatch, taken: Fingerprint
) -> None:
    full = msgspec.structs.replace(taken, rates=rates(121.0))
    monkeypatch.setattr(command, "known_fingerprint", lambda _: full)
    # A Raspberry Pi 5 sustains 2 × 30.249 GFLOP/s in single precision.
    assert plan_command._slowdown_of("raspberry-pi-5", argparse.Namespace()) == pytest.approx(2.0, rel=1e-3)


async def test_the_daemon_takes_it_when_nobody_waits_and_finds_it_the_next_time(tmp_path: Path) -> None:
    root, busy = pi(tmp_path), True
    machine = read_machine(root)

    def daemon() -> Fingerprinting:
        return Fingerprinting(machine=machine, folder=tmp_path / "state", idle=lambda: not busy, root=root)

    first = daemon()
    await first.look()
    assert first.snapshot() is None
    busy = False
    await first.look()
    shown = first.snapshot()
    assert shown is not None
    assert not shown["full"]
    second = daemon()
    await second.look()
    assert second.snapshot() == shown
