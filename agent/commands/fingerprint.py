"""`isthmus fingerprint`: what this device is and how fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from agent.fingerprint import Fingerprint, take_fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look at this device, measure it for a second, print both; always 0."""
    fingerprint = take_fingerprint()
    if args.json:
        shown = msgspec.to_builtins(fingerprint) | {"digest": fingerprint.digest}
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        for label, value in _lines(fingerprint):
            print(f"{label:<13} {value}")
    return 0


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
    if device.accelerators:
        yield "accelerators", ", ".join(device.accelerators)
    sensors = device.sensors
    if sensors.temperature_c is not None:
        throttled = {None: "", True: ", throttled now", False: ", not throttled"}[sensors.throttled]
        yield "temperature", f"{sensors.temperature_c:.0f} °C{throttled}"
    if sensors.battery_ratio is not None:
        yield "battery", f"{sensors.battery_ratio:.0%}{', discharging' if sensors.on_battery else ''}"
    if sensors.load_ratio is not None:
        yield "load", f"{sensors.load_ratio:.2f} per core"
    yield "digest", device.digest
