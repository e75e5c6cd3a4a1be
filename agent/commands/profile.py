"""`isthmus profile MODEL`: measures this device on a model: the whole, each cut's halves, each codec, lossy fidelity.

The measuring is done in a child process (`split/workbench/profile.py`); here it is asked for, kept and shown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.calibrated import calibrated, fitting, sidecar_again, sidecar_beside
from agent.commands.model_argument import CHILD_TIMEOUT_S, add_inputs_argument, add_model_argument, model_path
from agent.model_cache import find_card
from split.errors import InvalidModel
from split.graph.card import ModelCard
from split.profiles.contract import Contract, Fidelity, contract_beside
from split.profiles.measured import CodecCosts, ModelProfile, Tuning, read_profile
from split.runtime.accelerators import choose
from split.runtime.machine import read_machine
from split.runtime.segment import OrtEngine
from split.workbench.child import run_child_sync
from split.workbench.golden import profile_basis

Progress = Callable[[str, float], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_inputs_argument(parser)
    add_cache_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    """`--cache`: read it with `cache_folder`."""
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="where parts and measurements are kept (default: the configuration's)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the model anew in a child process and print the numbers; always 0."""
    path = model_path(arguments)
    with progress_bar("profile") as on_progress:
        card, profile = profiled(
            path, cache_folder(arguments), inputs=arguments.inputs, again=True, on_progress=on_progress
        )
    if arguments.json:
        shown: dict[str, Any] = {"model": str(path)} | msgspec.to_builtins(profile)
        print(msgspec.json.format(msgspec.json.encode(shown), indent=1).decode())
    else:
        print("\n".join(_table(card, profile, (contract_beside(path) or Contract()).data.fidelity)))
    return 0


def state_folder(arguments: argparse.Namespace) -> Path:
    """The configuration's `state_dir`, else `$XDG_STATE_HOME/isthmus` (~/.local/state/isthmus)."""
    config = arguments.config or os.environ.get("ISTHMUS_CONFIG")
    if config:
        from agent.config import load_config

        return load_config(Path(config), os.environ).state_dir
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "isthmus"


def cache_folder(arguments: argparse.Namespace) -> Path:
    """`--cache`, else the configuration's `cache_dir`, else `$XDG_CACHE_HOME/isthmus` (~/.cache/isthmus)."""
    if arguments.cache is not None:
        return Path(arguments.cache)
    config = arguments.config or os.environ.get("ISTHMUS_CONFIG")
    if config:
        from agent.config import load_config

        return load_config(Path(config), os.environ).cache_dir
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"


def profiled(
    path: Path, cache: Path, *, inputs: Path | None = None, again: bool = False, on_progress: Progress
) -> tuple[ModelCard, ModelProfile]:
    """Card and measurements of a model file: from the cache where they hold for this file and device, else made now;
    with the curves of the calibration beside it.

    `inputs`: an `.npz` to measure on. `again`: measure even when the cache has it. InvalidModel as the workbench says.
    """
    given = [] if inputs is None else ["--inputs", str(inputs)]
    sidecar = sidecar_beside(path, None)
    found = find_card(cache, path, sidecar.calibration)
    if found is None:
        prepare = ["prepare", str(path), "--cache", str(cache), *given]
        run_child_sync(
            prepare, timeout_s=CHILD_TIMEOUT_S, on_progress=lambda stage, ratio: on_progress(stage, 0.1 * ratio)
        )
        sidecar = sidecar_again(path, sidecar)
        found = find_card(cache, path, sidecar.calibration)
    if found is None:
        raise InvalidModel(f"{path} changed while it was being prepared; try again")
    folder, card = found
    profile = None if again or inputs is not None else read_profile(folder)
    contract = contract_beside(path)
    providers = choose((contract or Contract()).resource.accelerators).providers
    runtime, fingerprint = OrtEngine(providers).name, read_machine().digest
    basis = profile_basis(Path(card.path), contract, card.calibrated)
    if profile is None or not profile.holds_for(
        digest=card.digest, runtime=runtime, fingerprint=fingerprint, basis=basis
    ):
        run_child_sync(
            ["profile", str(path), "--folder", str(folder), "--providers", ",".join(providers), *given],
            timeout_s=CHILD_TIMEOUT_S,
            on_progress=lambda stage, ratio: on_progress(stage, 0.1 + 0.9 * ratio),
        )
        profile = read_profile(folder)
    if profile is None:
        raise InvalidModel(f"the measurements of {path} cannot be read back from {folder}; is the disk full?")
    return card, calibrated(card, profile, fitting(path, sidecar, card.digest).calibration)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Progress on stderr: a bar where it is a terminal and `rich` is there, else one line a stage."""
    with contextlib.ExitStack() as stack:
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import Progress as Bar

                bar = stack.enter_context(Bar(console=Console(stderr=True), transient=True))
                task = bar.add_task(title, total=1.0)
                yield lambda stage, ratio: bar.update(task, description=stage, completed=ratio)
                return
        last = [""]

        def line(stage: str, ratio: float) -> None:
            if stage != last[0]:
                print(f"{title}: {stage} ({ratio:.0%})", file=sys.stderr, flush=True)
            last[0] = stage

        yield line


def _threads(tuning: Tuning) -> str:
    threads = f"{tuning.threads} thread{'s' if tuning.threads > 1 else ''}"
    return f"{threads} that spin {tuning.spin_us} µs for the next operator" if tuning.spin_us else threads


def _table(card: ModelCard, profile: ModelProfile, asked: Fidelity) -> Iterator[str]:
    """For people: the whole first, then one line for each payload and codec."""
    yield f"{card.path}  {profile.digest[:19]}…"
    yield f"{profile.runtime}, {_threads(profile.tuning)}, device {profile.fingerprint}"
    if profile.dims:
        yield "measured at " + ", ".join(f"{name} = {size}" for name, size in profile.dims.items())
    yield ""
    yield f"whole model   {profile.whole_ms:9.2f} ms"
    if profile.encoded_bytes:
        yield f"prepare image {profile.image_ms:9.2f} ms   ({_kb(profile.encoded_bytes)} KB as it came)"
    yield f"outputs       {_kb(profile.output_bytes):>9} KB"
    yield ""
    payloads = [(name, [_inside(codec, asked) for codec in codecs]) for name, codecs in _payloads(profile)]
    measures = sorted({name for _, codecs in payloads for codec in codecs for name in codec.fidelity})
    heads = "".join(f"  {name.partition('-')[0]:>9}" for name in measures)  # boxes-… goes by its parameters, too
    yield f"{'cut':12}  {'head ms':>8}  {'tail ms':>8}  codec  {'KB':>8}  {'enc ms':>7}  {'dec ms':>7}{heads}"
    times = {
        str(cut.cut): f"{_ms(cut.head_ms, cut.estimated)}  {_ms(cut.tail_ms, cut.estimated)}" for cut in profile.cuts
    }
    for name, codecs in payloads:
        for number, codec in enumerate(codecs):
            label = name if number == 0 else ""
            ms = times.get(label, f"{'':8}  {'':8}")
            fidelity = "".join(f"  {_value(codec, measure):>9}" for measure in measures)
            yield (
                f"{label:12}  {ms}  {codec.codec:5}  {_kb(codec.bytes):>8}  {codec.encode_ms:7.2f}  "
                f"{codec.decode_ms:7.2f}{fidelity}"
            )
    if any(codec.curve for _, codecs in payloads for codec in codecs):
        yield ""
        yield (
            f"klt, jpeg, webp: as calibrated, the cheapest setting with a mean {asked.measure} of {asked.bound:g} at "
            "most, the contract's bound; the closest one where none is"
        )
    if missing := [cut.id for cut in card.cuts if cut.id not in times]:
        yield ""
        yield (
            "left out, since their halves do not give what the whole gives (see isthmus check) or there was no time to "
            f"see whether they do: {', '.join(missing)}"
        )
    if any(cut.estimated for cut in profile.cuts):
        yield ""
        yield "~ estimated from the cuts that were measured: measuring all would have taken more than a minute"
    if card.no_cuts_reason:
        yield ""
        yield f"no cuts: {card.no_cuts_reason}"
    if card.note:
        yield ""
        yield f"the model is cut as it stands in the file: {card.note}"


def _payloads(profile: ModelProfile) -> Sequence[tuple[str, Sequence[CodecCosts]]]:
    return [("offload", profile.input_codecs), *((str(cut.cut), cut.codecs) for cut in profile.cuts)]


def _inside(codec: CodecCosts, asked: Fidelity) -> CodecCosts:
    """Of a codec with settings the one that would be used."""
    if not codec.curve:
        return codec
    within = [point for point in codec.curve if point.within(asked.name, asked.bound)]
    point = within[0] if within else codec.curve[-1]
    return msgspec.structs.replace(codec, bytes=round(point.mean_bytes), fidelity=point.fidelity)


def _value(codec: CodecCosts, measure: str) -> str:
    return f"{codec.fidelity[measure]:.2g}" if measure in codec.fidelity else ""


def _ms(ms: float, estimated: bool) -> str:
    return f"{f'~{ms:.2f}' if estimated else f'{ms:.2f}':>8}"


def _kb(size: int) -> str:
    return f"{size / 1000:,.1f}"
