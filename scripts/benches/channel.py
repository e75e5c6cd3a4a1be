"""What the channel makes of a link: two processes in two network namespaces, an emulated link between (scripts/netlab).

The congestion control is set explicitly, for bbr and for cubic. Beside the rates of an emulated link there are two
ratios against a bare pair of TLS protocols, on the loopback and in turns. Side by side in the same run: gRPC streaming
and aioquic, in a venv of their own. Needs root, /dev/net/tun and gcc.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from scripts.benches import channel_peers
from scripts.benches.figure import CACHE, Figure
from scripts.lab_pair import netlab
from scripts.models import Unavailable
from split.identity.certificates import issue, make_authority

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = CACHE / "channel"
ENDS: Final = "scripts.benches.channel_ends"
LAB: Final = "bench"
DELAY_MS: Final = 20
"""Each way: RTT 40 ms."""
SEGMENT_SHARE: Final = 1448 / 1500
"""Of a link's rate that TCP's payload can take; the rest are headers of IP and TCP with time stamps."""
SECONDS_QUICK, SECONDS = 1.0, 6.0


def prepare() -> None:
    """Certificates; the emulator is compiled. In the full run's venv: gRPC and aioquic, where they can be had."""
    if not (FOLDER / "companion" / "cert.pem").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        make_authority(FOLDER / "ca")
        issue(FOLDER / "ca", "device", "device", FOLDER / "device")
        issue(FOLDER / "ca", "companion", "companion", FOLDER / "companion")
    netlab(LAB)
    channel_peers.prepare(FOLDER)


class Ends:
    """The two processes, on the loopback or in the lab's namespaces."""

    def __init__(self, module: str, host: str, enter: dict[str, list[str]], python: str = sys.executable) -> None:
        self._host = host
        self._enter = enter
        self._command = [python, "-m", module]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ends:
        ports = json.loads(self._line(self._start("cloud", "companion", self._host)))
        self._device = self._start("edge", "device", self._host, *map(str, ports.values()))
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes):
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def step(self, name: str, **arguments: Any) -> Any:
        """What one method of the device's end returns."""
        assert self._device.stdin is not None
        print(json.dumps([name, arguments]), file=self._device.stdin, flush=True)
        return json.loads(self._line(self._device))

    def _start(self, side: str, role: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._enter[side], *self._command, role, str(FOLDER), *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"scripts/bench: {' '.join(map(str, process.args))} ended")  # type: ignore[arg-type]  # a list of texts
        return line


class Link:
    """The lab while it is up."""

    def __init__(self, lab: ModuleType) -> None:
        self._lab = lab

    def set(self, *, rate: float, loss: float = 0.0) -> None:
        words = self._lab.link_words({"rate": str(rate), "loss": str(loss)})
        self._lab.ctl("set " + " ".join(words))

    def sysctl(self, name: str, value: str) -> None:
        for side in ("edge", "cloud"):
            subprocess.run(self._lab.exec_argv(side, ["sysctl", "-qw", f"{name}={value}"]), check=True)

    def ends(self, module: str = ENDS, python: str = sys.executable) -> Ends:
        enter = {side: self._lab.exec_argv(side, []) for side in ("edge", "cloud")}
        return Ends(module, self._lab.ADDR["cloud"], enter, python)


@contextlib.contextmanager
def link_up() -> Iterator[Link]:
    lab = netlab(LAB)
    for cc in ("bbr", "cubic"):
        if modprobe := shutil.which("modprobe"):
            subprocess.run([modprobe, f"tcp_{cc}"], check=False, capture_output=True)
        try:
            lab.allow_cc(cc)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"the rows of {cc} cannot be measured: {error}") from error
    lab.up({"delay": str(DELAY_MS), "rate": "50"})
    try:
        yield Link(lab)
    finally:
        lab.down()


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    figures = _loopback(quick, rows)
    with link_up() as link:
        with link.ends() as ends:
            figures += _goodput(link, ends, quick, rows)
            figures += _urgent(link, ends, quick, rows)
            figures += _after_idle(link, ends, quick, rows)
            figures.append(_connect(link, ends, quick, rows))
        _peers(link, quick, rows)
    return figures, rows


def _loopback(quick: bool, rows: list[dict[str, Any]]) -> list[Figure]:
    with Ends(ENDS, "127.0.0.1", {"cloud": [], "edge": []}) as ends:
        found = ends.step("loopback", rounds=3 if quick else 12, messages=50 if quick else 300)
    rows += (
        {
            "path": f"loopback, 1 MB messages, {name}",
            "mb_per_s": statistics.median(found["bytes_per_s"][name]) / 1e6,
            "cpu_ms_per_mb": statistics.median(found["cpu_s_per_byte"][name]) * 1e9,
        }
        for name in ("ours", "bare")
    )
    rate = _median_ratio(found["bytes_per_s"])
    cpu = _median_ratio(found["cpu_s_per_byte"])
    return [
        Figure(name="loopback_ratio", value=rate, unit="ratio", at_least=0.7),
        Figure(name="cpu_per_mb_ratio", value=cpu, unit="ratio", at_most=1.5),
    ]


def _median_ratio(taken: dict[str, list[float]]) -> float:
    return statistics.median(a / b for a, b in zip(taken["ours"], taken["bare"], strict=True))


def _goodput(link: Link, ends: Ends, quick: bool, rows: list[dict[str, Any]]) -> list[Figure]:
    figures = []
    for name, rate, loss, reach in (
        ("goodput_10", 10, 0.0, 0.95),
        ("goodput_50", 50, 0.0, 0.95),
        ("goodput_200", 200, 0.0, 0.90),
        ("goodput_50_loss1", 50, 0.01, 0.85),
    ):
        for cc in ("bbr",) if quick else ("bbr", "cubic"):
            link.set(rate=rate, loss=loss)
            seconds = (SECONDS_QUICK if quick else SECONDS) * (2 if rate == 10 else 1)
            found = ends.step("goodput", cc=cc, seconds=seconds)
            share = _share(found, rate)
            rows.append({"path": f"{rate} Mbit/s, loss {loss:g}, {cc}", "goodput": share, **found})
            if cc == "bbr":
                figures.append(Figure(name=name, value=share, unit="ratio", at_least=reach))
    return figures


def _share(found: dict[str, Any], rate_mbit_s: float) -> float:
    share: float = found["bytes_per_s"] * 8 / (rate_mbit_s * 1e6 * SEGMENT_SHARE)
    return share


def _urgent(link: Link, ends: Ends, quick: bool, rows: list[dict[str, Any]]) -> list[Figure]:
    link.set(rate=10)
    figures = []
    for cc, name, reach in (("bbr", "urgent_ms", 60), ("cubic", "urgent_cubic_ms", 130)):
        found = ends.step("urgent", cc=cc, seconds=1.0 if quick else 12)
        rows.append({"path": f"1 KB behind three of 2 MB, 10 Mbit/s, {cc}", **found})
        figures.append(Figure(name=name, value=found["median_ms"], unit="ms", at_most=reach))
    return figures


def _after_idle(link: Link, ends: Ends, quick: bool, rows: list[dict[str, Any]]) -> list[Figure]:
    link.set(rate=50)
    figures = []
    for cc, slow_start, name in (
        ("bbr", "1", "after_idle_ratio"),
        ("cubic", "0", "after_idle_cubic_ratio"),
        ("cubic", "1", ""),
    ):
        if quick and not name:
            continue
        link.sysctl("net.ipv4.tcp_slow_start_after_idle", slow_start)
        found = ends.step("after_idle", cc=cc, rounds=2 if quick else 6, back_to_back=4 if quick else 8)
        ratio = found["after_idle_ms"] / found["back_to_back_ms"]
        path = f"400 KB after 2 s, 50 Mbit/s, {cc}, tcp_slow_start_after_idle={slow_start}"
        rows.append({"path": path, "ratio": ratio, **found})
        if name:
            figures.append(Figure(name=name, value=ratio, unit="ratio", at_most=1.15))
    return figures


def _connect(link: Link, ends: Ends, quick: bool, rows: list[dict[str, Any]]) -> Figure:
    link.set(rate=50)
    found = ends.step("connect", cc="bbr", rounds=3 if quick else 15)
    rows.append({"path": "nothing to first answer, bbr", **found})
    rtts = found["first_answer_ms"] / found["round_trip_ms"]
    return Figure(name="connect_rtts", value=rtts, unit="RTT", at_most=3.5)


def _peers(link: Link, quick: bool, rows: list[dict[str, Any]]) -> None:
    """The same 256 KiB tensors at 50 Mbit/s, and 1 KB beside them, through other libraries."""
    for peer in channel_peers.PEERS:
        why = "left out by --quick" if quick else channel_peers.missing(peer)
        if why:
            rows.append({"path": f"{peer}", "skipped": why})
            continue
        for cc, loss in (("bbr", 0.0), ("cubic", 0.0), ("bbr", 0.01)):
            if peer == "aioquic" and cc == "bbr":
                continue  # it has its own congestion control, over UDP
            link.set(rate=50, loss=loss)
            link.sysctl("net.ipv4.tcp_congestion_control", cc)
            with link.ends(f"scripts.benches.channel_{peer}", channel_peers.PYTHON) as ends:
                found = ends.step("goodput", seconds=SECONDS)
            rows.append({"path": f"{peer}, 50 Mbit/s, loss {loss:g}, {cc}", "goodput": _share(found, 50), **found})
