"""`isthmus fingerprint`: what this device is and how fast, kept until what it depends on changes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agent.commands.profile import add_cache_argument, cache_folder, progress_bar, state_folder
from agent.fingerprint import Fingerprint, take_fingerprint, take_full
from agent.fingerprint_file import fingerprint_key, keep, kept
from agent.sensors import throttled
from split.codec.core import core_in_use
from split.profiles.rates import KINDS, Rate
from split.runtime.machine import read_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cache_argument(parser)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="agent configuration whose folders are used ($ISTHMUS_CONFIG)"
    )
    parser.add_argument("--full", action="store_true", help="measure the runtime and the disk, too (up to 30 s)")
    parser.add_argument("--again", action="store_true", help="measure even where nothing has changed")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look at this device and print it with how fast it is, measured where nothing that holds is kept; always 0."""
    fingerprint = known_fingerprint(args, full=args.full, again=args.again)
    if args.json:
        shown = msgspec.to_builtins(fingerprint) | {"digest": fingerprint.digest, "unusable": fingerprint.unusable}
        shown["codec_core"] = core_in_use()
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        for label, value in _lines(fingerprint):
            print(f"{label:<13} {value}")
    return 0


def known_fingerprint(args: argparse.Namespace, *, full: bool = False, again: bool = False) -> Fingerprint:
    """The kept one with the sensors of now, or a new one, which is kept; `args` as `add_cache_argument` has them."""
    folder, key = state_folder(args), fingerprint_key(read_machine())
    found, why = kept(key, folder)
    if found is not None and not again and not (full and found.rates is None):
        return found
    print(
        f"measuring this device: {why or ('asked to' if again else 'the full one was not taken yet')}", file=sys.stderr
    )
    if throttled():
        print("heat or power holds the clocks down now: it is measured again when they rise", file=sys.stderr)
    fingerprint = take_fingerprint()
    if full:
        with progress_bar("fingerprint") as on_progress:
            fingerprint = take_full(cache_folder(args), quick=fingerprint, on_progress=on_progress)
    if note := keep(fingerprint, key, folder):
        print(note, file=sys.stderr)
    return fingerprint


def _lines(device: Fingerprint) -> Iterator[tuple[str, str]]:
    yield "board", device.board or "unknown"
    yield "system", f"{device.system}, Linux {device.kernel}, {device.architecture}"
    yield "processor", device.cpu_model or "unknown"
    yield "features", f"{len(device.cpu_features)}: {' '.join(device.cpu_features)}"
    for group in device.groups:
        clock = f", up to {group.max_mhz} MHz" if group.max_mhz else ""
        yield "cores", f"{', '.join(map(str, group.cores))} (capacity {group.capacity}{clock})"
    quota = "no quota" if device.quota_cores is None else f"quota {device.quota_cores:g} cores"
    yield "threads", f"{device.threads} usable of {device.cores} cores, {quota}"
    if device.governors:
        yield "clock policy", ", ".join(device.governors)
    yield "memory", f"{device.memory_bytes / 2**30:.1f} GiB, copies {device.memory_gb_per_s:.1f} GB/s"
    yield "compute", f"{device.gemm_gflops:.0f} GFLOP/s (float32 matrix product)"
    yield "runtime", f"{device.runtime}: {', '.join(device.providers)}"
    yield "codec klt", core_in_use()
    if device.rates is not None:
        for kind in KINDS:
            rate: Rate = getattr(device.rates, kind)
            yield (
                kind.replace("_", " "),
                f"{_rate(rate.one)} on one thread, {_rate(rate.all)} on {device.rates.threads}",
            )
    if device.disk_read_mb_per_s is not None:
        yield "disk", f"reads {device.disk_read_mb_per_s:.0f} MB/s"
    if device.accelerators:
        yield "accelerators", ", ".join(device.accelerators)
    for sentence in device.unusable:
        yield "", sentence
    sensors = device.sensors
    if sensors.temperature_c is not None:
        throttled = {None: "", True: ", throttled now", False: ", not throttled"}[sensors.throttled]
        yield "temperature", f"{sensors.temperature_c:.0f} °C{throttled}"
    if sensors.frequency_mhz is not None:
        bound = "" if sensors.frequency_ratio is None else f", may rise to {sensors.frequency_ratio:.0%} of its highest"
        yield "clock", f"{sensors.frequency_mhz:.0f} MHz{bound}"
    if sensors.battery_ratio is not None:
        yield "battery", f"{sensors.battery_ratio:.0%}{', discharging' if sensors.on_battery else ''}"
    if sensors.load_ratio is not None:
        yield "load", f"{sensors.load_ratio:.2f} per core"
    yield "digest", device.digest


def _rate(value: float | None) -> str:
    return "cannot be done" if value is None else f"{value:.3g} G/s"
