"""`isthmus audit`: recorded traffic again, through other ways of deciding: what each would have cost in milliseconds,
missed deadlines, joules, bytes and money, doing nothing included."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from agent.commands.options import daemon_url, not_negative
from agent.http_client import DaemonClient
from agent.record import FILE_BYTES_MAX, BadRecord, Record, unpack
from agent.replay.policies.field import FIELD
from agent.replay.recording import AsItWas, Recording, outcomes_as_they_were, replayable
from agent.replay.simulate import simulate
from agent.replay.tally import Tally, in_words, size_text, tally
from agent.replay.world import Outcome, Policy
from split.errors import InvalidRequest
from split.plan.objective import Prices
from split.plan.observation import Floats
from split.plan.power import Power, modelled
from split.profiles.device import load_device
from split.profiles.radio import RADIOS, LinkKind

PATH: Final = "/v2/isthmus/record"
AS_IT_WAS: Final = "as it was"
REPLAYED: Final = "as it was, replayed"
NOTHING: Final = "do nothing"
OURS: Final = "isthmus"
AGREES_RATIO: Final = 0.1
"""What the replay of the plans that were chosen may be off from what was measured before it is called doubtful."""

SAID: Final = {"local": NOTHING, "ours": OURS, "ours, without hedges": f"{OURS}, without hedges"}
"""How the table calls some of the policies."""
POLICIES: Final = (REPLAYED, *SAID, *(name for name in FIELD if name not in SAID))
"""By the names that `--policy` takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "record", nargs="?", type=Path, metavar="RECORD", help="a record of traffic, or a folder of them"
    )
    source.add_argument(
        "--url", type=daemon_url, help="the last hour of a running daemon: http://HOST:PORT or unix:///PATH"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="with --url: keep what was fetched")
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        metavar="NAME",
        help=f"replay only this one, again for more (default, all: {', '.join(POLICIES)})",
    )
    parser.add_argument("--price-per-gb", type=not_negative, metavar="MONEY", help="instead of the configured one")
    parser.add_argument(
        "--price-per-companion-s", type=not_negative, metavar="MONEY", help="instead of the configured one"
    )
    parser.add_argument("--device", metavar="NAME", help="energy of this device (profiles/devices), not the recorded")
    parser.add_argument(
        "--radio", choices=[str(kind) for kind in LinkKind], default="wifi", help="with --device: its link"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latency over time")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Replay and print; always 0. BadRecord for what is no record."""
    if args.save is not None and args.url is None:
        raise InvalidRequest("--save keeps what --url fetches; a RECORD is a file already")
    record = _record(args)
    recording = replayable(record, prices=_prices(args, record), power=_power(args))
    found = _replayed(recording, args.policy or POLICIES)
    if args.plot is not None:
        from agent.commands.audit_plot import draw

        try:
            draw(recording, found.total_ms, args.plot)
        except OSError as error:
            raise InvalidRequest(f"--plot: {args.plot} cannot be written: {error.strerror or error}") from None
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(record, recording, found)), indent=2).decode())
    else:
        for line in _lines(record, recording, found):
            print(line)
    return 0


# -- replaying --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """What is kept of the replays, by the names of the table: outcomes are 20 KB a request over all policies."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    decided: dict[str, Tally] = field(default_factory=dict)
    """Over the requests whose callers asked for no plan; empty where there are none."""
    total_ms: dict[str, Floats] = field(default_factory=dict)

    def add(self, name: str, outcomes: Sequence[Outcome], recording: Recording) -> None:
        self.tallies[name] = tally(name, outcomes, recording.weights)
        if (weights := recording.decided_weights).any():
            self.decided[name] = tally(name, outcomes, weights)
        self.total_ms[name] = np.array([one.total_ms for one in outcomes])


def _replayed(recording: Recording, policies: Sequence[str]) -> _Found:
    found = _Found()
    found.add(AS_IT_WAS, outcomes_as_they_were(recording), recording)
    for number, name in enumerate(policies, 1):
        said = SAID.get(name, name)
        _progress(f"replaying {len(recording.happened)} requests, {number} of {len(policies)}: {said}")
        found.add(said, simulate(recording.world, _policy(name, recording)), recording)
    _progress("")
    return found


def _progress(text: str) -> None:
    """One line, written over, where somebody looks at it."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _policy(name: str, recording: Recording) -> Policy:
    if name == REPLAYED:
        return AsItWas(recording)
    return FIELD[name](recording.world, recording.known)


# -- reading ----------------------------------------------------------------------------------------------------------


def _record(args: argparse.Namespace) -> Record:
    if args.url is not None:
        data = DaemonClient(args.url).fetch(PATH)
        if args.save is not None:
            _save(args.save, data)
        return unpack(data, name=f"what {args.url} answers")
    path: Path = args.record
    try:
        files = sorted(path.glob("*.zst")) if path.is_dir() else [path]
        if not files:
            raise BadRecord(f"{path} has no records (*.zst); `record: {{enabled: true}}` lets a daemon write them")
        if (size := sum(file.stat().st_size for file in files)) > FILE_BYTES_MAX:
            raise BadRecord(f"{path} has {size} bytes of records, at most {FILE_BYTES_MAX} are read at once")
        return unpack(*(file.read_bytes() for file in files), name=str(path))
    except OSError as error:
        raise BadRecord(f"{path} cannot be read: {error.strerror or error}") from None


def _save(path: Path, data: bytes) -> None:
    """Whole or not at all, readable by the owner alone, as the files that a daemon writes."""
    try:
        file, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with open(file, "wb") as stream:
                stream.write(data)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise InvalidRequest(f"--save: {path} cannot be written: {error.strerror or error}") from None


def _prices(args: argparse.Namespace, record: Record) -> Prices | None:
    if args.price_per_gb is None and args.price_per_companion_s is None:
        return None
    head = record.heads[-1]
    per_gb = head.price_per_gb if args.price_per_gb is None else args.price_per_gb
    per_s = head.price_per_companion_s if args.price_per_companion_s is None else args.price_per_companion_s
    return Prices(per_byte=per_gb / 1e9, per_companion_ms=per_s / 1e3)


def _power(args: argparse.Namespace) -> Power | None:
    """All cores of the named device; its radio at the rates where the source has measured it."""
    if args.device is None:
        return None
    device = load_device(args.device)
    return modelled(device, sum(group.count for group in device.cores), RADIOS[LinkKind(args.radio)]).at(10.0, 10.0)


# -- what it came to --------------------------------------------------------------------------------------------------


def _off(found: _Found) -> float | None:
    """How far the replay of the chosen plans is from what was measured, of the mean; None where that is 0."""
    replayed, measured_ms = found.tallies.get(REPLAYED), found.tallies[AS_IT_WAS].mean_ms
    return None if replayed is None or measured_ms <= 0.0 else replayed.mean_ms / measured_ms - 1.0


def _sentence(recording: Recording, found: _Found) -> str:
    """What Isthmus did, where it decided; what it would have done, where callers did."""
    if NOTHING in found.decided:
        forced = sum(one.request.forced for one in recording.happened)
        without = f" Without the {forced} recorded requests whose callers asked for a plan." if forced else ""
        return in_words(found.decided[AS_IT_WAS], found.decided[NOTHING], measured=True) + without
    if OURS in found.tallies and NOTHING in found.tallies:
        return in_words(found.tallies[OURS], found.tallies[NOTHING])
    return ""


def _as_json(record: Record, recording: Recording, found: _Found) -> dict[str, object]:
    power = recording.world.power
    return {
        "requests": record.seen,
        "recorded": recording.recorded,
        "replayed": len(recording.happened),
        "lost": record.lost,
        "torn_bytes": record.torn_bytes,
        "from_s": recording.zero_s,
        "hours": _hours(recording),
        "gaps": recording.gaps,
        "energy": {"measured": power.measured, "source": power.source or None},
        "replay_off_ratio": _off(found),
        "policies": [msgspec.structs.asdict(one) for one in found.tallies.values()],
        "in_words": _sentence(recording, found),
    }


def _hours(recording: Recording) -> float:
    return recording.happened[-1].at_s / 3600.0


def _lines(record: Record, recording: Recording, found: _Found) -> Iterator[str]:
    power = recording.world.power
    few = "" if record.seen == recording.recorded else f", {recording.recorded} of them recorded"
    if recording.recorded > len(recording.happened):
        few += f", {len(recording.happened)} of those replayed, in runs that stand for all,"
    yield f"{record.seen} requests{few} in {_span(_hours(recording))}"
    if recording.gaps:
        said = f"{recording.gaps} gaps of more than a day are" if recording.gaps > 1 else "a gap of more than a day is"
        yield f"{said} left out: nothing was asked, or the clock was set"
    if record.lost:
        yield f"{record.lost} more are not in the record: of models not measured yet, or the disk was full"
    if record.torn_bytes:
        yield f"the last {record.torn_bytes} bytes are torn or damaged, and left out"
    yield ""
    joules = "JOULES" if power.source else ""
    yield f"{'':<26} {'MEAN MS':>9} {'P95 MS':>9} {'MISSED':>7} {joules:>9} {'BYTES':>9} {'MONEY':>9} {'LOCAL':>6}"
    for one in found.tallies.values():
        energy = f"{one.joules:.4g}" if power.source else ""
        money = f"{one.money:.3g}" if one.money else "–"
        yield (
            f"{one.policy:<26} {one.mean_ms:>9.2f} {one.p95_ms:>9.2f} {one.missed:>7} {energy:>9} "
            f"{size_text(one.bytes):>9} {money:>9} {one.local_ratio:>6.0%}"
        )
    yield ""
    if power.source:
        how = "compute measured on this device" if power.measured else "modelled"
        yield f"energy above idle, {how}: {power.source.removeprefix('modelled: ')}"
    else:
        yield "energy is not known: --device NAME takes a device's data sheet"
    if (off := _off(found)) is not None:
        doubt = "" if abs(off) <= AGREES_RATIO else ": take the other rows with that much salt"
        more = "more" if off > 0 else "less"
        yield f"replaying the plans that were chosen gives {abs(off):.1%} {more} than was measured{doubt}"
    if OURS in found.tallies:
        yield f"{OURS} decides without what it had learned before, meter, battery and shadow runs (docs/audit.md)"
    if sentence := _sentence(recording, found):
        yield sentence


def _span(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1.0 else f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"
