"""`isthmus audit`: recorded traffic again, through other ways of deciding: what each would have cost in milliseconds,
missed deadlines, joules, bytes and money, doing nothing included."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.commands.options import daemon_url, not_negative
from agent.http_client import DaemonClient
from agent.record import FILE_BYTES_MAX, BadRecord, Record, unpack
from agent.replay.known import Known
from agent.replay.policies.field import FIELD
from agent.replay.recording import AsItWas, Recording, outcomes_as_they_were, replayable
from agent.replay.simulate import simulate
from agent.replay.tally import Tally, in_words, size_text, tally
from agent.replay.world import Policy
from split.errors import InvalidRequest
from split.plan.objective import Prices
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

SAID: Final = {"local": NOTHING, "ours": OURS}
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
    outcomes = {AS_IT_WAS: outcomes_as_they_were(recording)}
    for name in args.policy or POLICIES:
        outcomes[SAID.get(name, name)] = simulate(recording.world, _policy(name, recording))
    tallies = [tally(name, found, recording.weights) for name, found in outcomes.items()]
    if args.plot is not None:
        from agent.commands.audit_plot import draw

        try:
            draw(recording, outcomes, args.plot)
        except OSError as error:
            raise InvalidRequest(f"--plot: {args.plot} cannot be written: {error.strerror or error}") from None
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(_as_json(record, recording, tallies)), indent=2).decode())
    else:
        for line in _lines(record, recording, tallies):
            print(line)
    return 0


def _policy(name: str, recording: Recording) -> Policy:
    if name == REPLAYED:
        return AsItWas(recording)
    known = {model: Known.of(plans) for model, plans in recording.world.models.items()}
    return FIELD[name](recording.world, known)


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
    try:
        path.write_bytes(data)
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


def _off(tallies: Sequence[Tally]) -> float | None:
    """How far the replay of the chosen plans is from what was measured, of the mean."""
    found = {one.policy: one for one in tallies}
    replayed = found.get(REPLAYED)
    return None if replayed is None else replayed.mean_ms / found[AS_IT_WAS].mean_ms - 1.0


def _sentence(tallies: Sequence[Tally]) -> str:
    found = {one.policy: one for one in tallies}
    if OURS not in found or NOTHING not in found:
        return ""
    return in_words(found[OURS], found[NOTHING])


def _as_json(record: Record, recording: Recording, tallies: Sequence[Tally]) -> dict[str, object]:
    power = recording.world.power
    return {
        "requests": record.seen,
        "recorded": len(recording.happened),
        "lost": record.lost,
        "torn_bytes": record.torn_bytes,
        "from_s": recording.zero_s,
        "hours": _hours(recording),
        "energy": {"measured": power.measured, "source": power.source or None},
        "replay_off_ratio": _off(tallies),
        "policies": [msgspec.structs.asdict(one) for one in tallies],
        "in_words": _sentence(tallies),
    }


def _hours(recording: Recording) -> float:
    return recording.happened[-1].at_s / 3600.0


def _lines(record: Record, recording: Recording, tallies: Sequence[Tally]) -> Iterator[str]:
    power = recording.world.power
    few = "" if record.seen == len(recording.happened) else f", {len(recording.happened)} of them recorded"
    yield f"{record.seen} requests{few} in {_span(_hours(recording))}"
    if record.lost:
        yield f"{record.lost} more are not in the record: of models not measured yet, or the disk was full"
    if record.torn_bytes:
        yield f"the last {record.torn_bytes} bytes are torn or damaged, and left out"
    yield ""
    joules = "JOULES" if power.source else ""
    yield f"{'':<26} {'MEAN MS':>9} {'P95 MS':>9} {'MISSED':>7} {joules:>9} {'BYTES':>9} {'MONEY':>9} {'LOCAL':>6}"
    for one in tallies:
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
    if (off := _off(tallies)) is not None:
        doubt = "" if abs(off) <= AGREES_RATIO else ": take the other rows with that much salt"
        more = "more" if off > 0 else "less"
        yield f"replaying the plans that were chosen gives {abs(off):.1%} {more} than was measured{doubt}"
    if sentence := _sentence(tallies):
        yield sentence


def _span(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1.0 else f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"
