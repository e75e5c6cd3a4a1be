"""`isthmus status`: the daemon now: models, companion, link, device, counts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from agent.commands.options import add_url_argument
from agent.http_client import DaemonClient
from split.plan.rate import misfit_text

BEST: Final = "bbr"
"""The congestion control that Isthmus asks the kernel for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask the daemon how it is and print it; always 0."""
    status = DaemonClient(args.url).get("/v2/isthmus/status")
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        for line in _lines(status):
            print(line)
    return 0


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    uptime_s = status.get("uptime_s")
    running = f", up {_span(uptime_s)}" if isinstance(uptime_s, int | float) else ""
    yield f"{'daemon':<10} isthmus {status.get('version', '?')}{running}"
    yield f"{'device':<10} {_device(status)}"
    for sentence in (status.get("fingerprint") or {}).get("unusable") or ():
        yield f"{'':<10} {sentence}"
    if condition := ", ".join(_condition(status.get("sensors") or {}, status.get("power") or {})):
        yield f"{'condition':<10} {condition}"
    if power := _power(status.get("power") or {}):
        yield f"{'power':<10} {power}"
    slowdown = (status.get("emulation") or {}).get("slowdown", 1.0)
    if slowdown != 1.0:
        yield f"{'emulation':<10} device stages are slowed down {slowdown:g} times"
    yield f"{'companion':<10} {_companion(status.get('companion') or {})}"
    for line in _connections((status.get("companion") or {}).get("connections") or ()):
        yield f"{'':<10} {line}"
    for other in (status.get("companion") or {}).get("unreached") or ():
        yield f"{'':<10} {other['address']}: {other['code']}, {other['reason']}; next try not before {_next(other)}"
    if identity := status.get("identity"):
        yield f"{'identity':<10} {_identity(identity)}"
    if metering := status.get("metering"):
        yield f"{'metering':<10} {_metering(metering)}"
    counts = [f"{status.get('requests', 0)} answered", f"{status.get('fallbacks', 0)} fell back to the device"]
    if status.get("failures"):
        counts.append(f"{status['failures']} failed")
    yield f"{'requests':<10} {', '.join(counts)}; {_number(status.get('queue_ms'))} ms of work waiting"
    yield ""
    yield (
        f"{'MODEL':<28} {'VERSION':<8} {'STATE':<12} {'LOCAL':>7} {'SPLIT':>7} {'OFFLOAD':>8} {'P50 MS':>8} "
        f"{'JOULES':>8}  NOTE"
    )
    for model in status.get("models") or ():
        placements: Mapping[str, int] = model.get("placements") or {}
        row = (
            f"{model.get('name', '?'):<28} {model.get('version', ''):<8} {model.get('state', '?'):<12} "
            f"{placements.get('local', 0):>7} {placements.get('split', 0):>7} {placements.get('offload', 0):>8} "
            f"{_number(model.get('p50_ms')):>8} {_joules(model.get('joules')):>8}  {_note(model)}"
        )
        yield row.rstrip()
        for cut, why in sorted((model.get("cuts_not_open") or {}).items()):
            yield f"{'':<28} cut {cut} is not open at the companion: {why}"
        for codec, why in sorted((model.get("codecs_why_not") or {}).items()):
            yield f"{'':<28} codec {codec} is not used: {why}"
        for codec, found in sorted((model.get("spot_checks") or {}).items()):
            yield f"{'':<28} codec {codec}: {_checks(found)}"
        for codec in model.get("calibration_misfit") or ():
            yield f"{'':<28} {misfit_text(codec, (model.get('calibration_rate') or {}).get(codec, 0.0))}"
        if model.get("calibration_note"):
            yield f"{'':<28} {model['calibration_note']}"
        if model.get("accelerators_note"):
            yield f"{'':<28} {model['accelerators_note']}"
        if model.get("cuts_note"):
            yield f"{'':<28} cut as it stands in the file: {model['cuts_note']}"


def _checks(found: Mapping[str, float]) -> str:
    """Of `Journal.checks`."""
    unchecked = f"{found['unchecked']} answers since the last check"
    if not found["checked"]:
        return f"{found['unchecked']} answers, none checked yet"
    return f"{found['checked']} answers checked, {found['mean_of_bound']:.2f} of the bound on average; {unchecked}"


def _identity(identity: Mapping[str, Any]) -> str:
    facts = [str(identity.get("name") or "")]
    if identity.get("until"):
        facts.append(f"certificate until {identity['until']}, renewed from {identity.get('renewed_from')} on")
    facts.append(str(identity.get("note") or ""))
    return ", ".join(filter(None, facts))


def _device(status: Mapping[str, Any]) -> str:
    device: Mapping[str, Any] = status.get("device") or {}
    name = device.get("board") or device.get("cpu_model") or "unknown"
    threads = device.get("threads") or status.get("threads")
    facts = [str(name), str(device.get("architecture") or ""), f"{threads} threads" if threads else ""]
    facts.append(str(device.get("runtime") or ""))
    return ", ".join(filter(None, facts))


def _condition(sensors: Mapping[str, Any], power: Mapping[str, Any]) -> Iterator[str]:
    if sensors.get("temperature_c") is not None:
        slower = f" (slows down at {power['throttle_c']:.0f})" if power.get("throttle_c") else ""
        yield f"{sensors['temperature_c']:.0f} °C{slower}"
    if sensors.get("throttled"):
        yield "throttled now"
    if sensors.get("battery_ratio") is not None:
        running = ", discharging" if sensors.get("on_battery") else ""
        low = ", low: energy counts before latency" if power.get("battery_low") else ""
        yield f"battery {sensors['battery_ratio']:.0%}{running}{low}"


def _power(power: Mapping[str, Any]) -> str:
    """Watts above idle, and how they are known; "" where nothing is."""
    if power.get("compute_w") is None:
        return str(power.get("note") or "")
    radio = f", {power['send_w']:.2g} W sending, {power['receive_w']:.2g} W receiving" if power.get("send_w") else ""
    note = f"; {power['note']}" if power.get("note") else ""
    return f"{power['compute_w']:.3g} W computing{radio}, above idle ({power.get('source')}){note}"


def _joules(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "–"


def _companion(companion: Mapping[str, Any]) -> str:
    if not companion.get("address"):
        return "none configured, everything runs here"
    facts = [f"{companion['address']}: {companion.get('state', 'unknown')}"]
    if companion.get("peer"):
        facts.append(str(companion["peer"]))
    link: Mapping[str, Any] = companion.get("link") or companion
    for key, unit in (("rtt_ms", "ms round trip"), ("up_mbit_s", "Mbit/s up"), ("down_mbit_s", "Mbit/s down")):
        if isinstance(link.get(key), int | float):
            facts.append(f"{link[key]:.3g} {unit}")
    if companion.get("reason"):
        facts.append(str(companion["reason"]))
    return ", ".join(facts)


def _connections(connections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each connection as TCP sees it, and what the way of sending costs where it is not the best one."""
    for one in connections:
        yield (
            f"{one['lane'] or 'only'} connection: {one['congestion_control']}, {one['rtt_ms']:.3g} ms round trip, "
            f"{one['rate_bytes_per_s'] * 8 / 1e6:.3g} Mbit/s acknowledged, {one['retransmits']} segments sent again"
        )
    if len(connections) == 1:
        yield "one connection only: an urgent request waits behind what is being sent (the log says why)"
    for name in sorted({str(one["congestion_control"]) for one in connections} - {BEST}):
        yield (
            f"{name}, not {BEST}: an urgent request beside big ones waits for the router's queue, loss costs most "
            "of the rate, and tensors start slowly after a pause unless tcp_slow_start_after_idle is 0; see "
            "deploy/README.md, network settings"
        )


def _next(other: Mapping[str, Any]) -> str:
    left_s = other.get("next_try_s") or 0.0
    return f"{left_s:.0f} s from now" if left_s >= 1.0 else "now"


def _metering(metering: Mapping[str, Any]) -> str:
    used_mb, cap_bytes = metering.get("used_bytes", 0) / 1e6, metering.get("cap_bytes")
    of = f"of {cap_bytes / 1e6:.1f} MB" if cap_bytes else "MB, no cap"
    text = f"{used_mb:.1f} {of} in {metering.get('month', '?')}"
    interfaces: Mapping[str, int] = metering.get("interfaces") or {}
    if interfaces:
        text += f" ({', '.join(f'{name} {count / 1e6:.1f} MB' for name, count in sorted(interfaces.items()))})"
    if metering.get("count_error"):
        text += f"; {metering['count_error']}"
    if metering.get("write_error"):
        text += f"; the count cannot be written down: {metering['write_error']}"
    return text


def _note(model: Mapping[str, Any]) -> str:
    progress = model.get("progress")
    if isinstance(progress, str) and progress:
        return progress
    remote = model.get("remote") or model.get("local_only_reason")
    return str(model.get("reason") or remote or "")


def _number(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, int | float) else "–"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
