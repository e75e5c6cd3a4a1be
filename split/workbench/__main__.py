"""The child process of the workbench: one job a run, JSON lines on stdout for progress and errors (see `child.py`).

python -m split.workbench FORMATS MEMORY_BYTES CPU_S PARENT_PID JOB…, the numbers as `limits.py` has them, JOB one of

prepare MODEL (--folder DIR | --cache DIR) [--dims JSON] [--inputs FILE.npz]
part    MODEL --folder DIR --cut ID --bitmap HEX         the card of the cut goes to DIR/ID.json
probe   MODEL                                            opens it in the runtime and runs it, which may kill either
rehearse MODEL --folder DIR --feeds FILE --names ID,…    runs `offload` or cuts on a raw payload; see `rehearse.py`
cuts    MODEL --out FILE.json [--inputs FILE.npz]        the candidates, nothing is kept but FILE
check   MODEL --out FILE.json [--cuts all|ID,…] [--inputs FILE.npz] [--outputs DIR]
profile MODEL --folder DIR [--inputs FILE.npz]           see `profile.py`
calibrate MODEL --inputs FOLDER|FILE.npz --out FILE      see `calibrate.py`
optimise MODEL --folder DIR [--cuts ID,…]                see `optimise.py`; at low priority
speed   OUT.json --seconds S                             how fast the runtime is here; see `speed.py`
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from split.errors import EngineFailed, InvalidModel, InvalidRequest, IsthmusError, ModelUnavailable
from split.workbench.child import FORMATS, say
from split.workbench.limits import Limits, apply_limits, tells_of_memory

BACKGROUND_NICE: Final = 15
"""What makes later requests faster must not make the present ones slower."""


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 after an error line."""
    if arguments[0] != FORMATS:  # before anything else of the command line is taken to be what this code expects
        return _fail(ModelUnavailable.code, _replaced(arguments[0]))
    parsed = _parser().parse_args(arguments[1:])
    # Native libraries print on file descriptor 1; it belongs to our messages alone.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.getLogger("split").addHandler(_ParentsLog(logging.WARNING))
    open_network = apply_limits(Limits(memory_bytes=parsed.memory_bytes, cpu_s=parsed.cpu_s), parsed.parent)
    if open_network:
        say({"warning": f"the network is open to it: {open_network}"})
    try:
        parsed.job(parsed)
    except IsthmusError as error:
        return _fail(error.code, str(error))
    except MemoryError as error:
        return _fail(InvalidModel.code, f"MemoryError {error}".strip())
    except RecursionError:
        return _fail(InvalidModel.code, f"{parsed.model} is nested too deeply")
    except OSError as error:
        what = f"{error.filename} cannot be used" if error.filename else "a file cannot be used"
        return _fail(
            ModelUnavailable.code,
            f"{what} ({error.strerror or error}); see that its folder is there, may be written and is not full",
        )
    except Exception as error:  # parsers raise nearly anything on hostile bytes
        logging.exception("%s of %s", parsed.name, parsed.model)
        return _fail(InvalidModel.code, f"{parsed.model} cannot be worked on: {_at_the_root(error)}")
    return 0


def _at_the_root(error: BaseException) -> str:
    """What began it, on one line: libraries wrap it in all they were about to do."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _ParentsLog(logging.Handler):
    """What our own code has to say goes into the log of whoever waits for this job."""

    def emit(self, record: logging.LogRecord) -> None:
        say({"warning": record.getMessage()})


def _replaced(formats: str) -> str:
    return (
        f"the files of Isthmus in {Path(__file__).resolve().parents[1]} were replaced while this program runs (they "
        f"write {FORMATS}, it reads {formats}); restart it: systemctl restart isthmus-agent, or isthmus-cloud"
    )


def _fail(code: str, message: str) -> int:
    say({"error": {"code": code, "message": message}})
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m split.workbench")
    for bound in ("memory_bytes", "cpu_s", "parent"):
        parser.add_argument(bound, type=int)
    jobs = parser.add_subparsers(dest="name", required=True)

    def job(name: str, run: Any) -> argparse.ArgumentParser:
        command = jobs.add_parser(name)
        command.add_argument("model", type=Path)
        command.set_defaults(job=run)
        return command

    command = job("prepare", _prepare)
    place = command.add_mutually_exclusive_group(required=True)
    place.add_argument("--folder", type=Path)
    place.add_argument("--cache", type=Path)
    command.add_argument("--dims", type=json.loads, default={})
    command.add_argument("--inputs", type=Path)
    command = job("part", _part)
    command.add_argument("--folder", type=Path, required=True)
    command.add_argument("--cut", required=True)
    command.add_argument("--bitmap", required=True)
    command = job("probe", _probe)
    command.add_argument("--providers", type=_words, default=())
    command = job("rehearse", _rehearse)
    command.add_argument("--folder", type=Path, required=True)
    command.add_argument("--feeds", type=Path, required=True)
    command.add_argument("--names", required=True)
    command = job("cuts", _cuts)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--inputs", type=Path)
    command = job("check", _check)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--cuts", default="candidates")
    command.add_argument("--inputs", type=Path)
    command.add_argument("--outputs", type=Path)
    command = job("profile", _profile)
    command.add_argument("--folder", type=Path, required=True)
    command.add_argument("--providers", type=_words, default=())
    command.add_argument("--inputs", type=Path)
    command = job("calibrate", _calibrate)
    command.add_argument("--inputs", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command = job("speed", _speed)
    command.add_argument("--seconds", type=float, required=True)
    command = job("optimise", _optimise)
    command.add_argument("--folder", type=Path, required=True)
    command.add_argument("--cuts")
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _say_progress(stage: str, ratio: float) -> None:
    say({"progress": [stage, round(ratio, 4)]})


def _prepare(parsed: argparse.Namespace) -> None:
    from split.graph.load import model_digest
    from split.profiles.contract import contract_beside
    from split.workbench.cut import folder_for, prepare
    from split.workbench.golden import inputs_beside
    from split.workbench.inputs import read_inputs

    folder = parsed.folder or folder_for(parsed.cache, model_digest(parsed.model)[0], parsed.model)
    inputs, contract = read_inputs(parsed.inputs), contract_beside(parsed.model)
    if inputs is None and not parsed.dims:
        try:
            beside = inputs_beside(parsed.model)
            prepare(parsed.model, folder, inputs=beside, contract=contract, on_progress=_say_progress)
            return
        except InvalidRequest as error:  # whoever profiles the model will hear of it; it can serve all the same
            say({"warning": f"the sizes of its golden request are not used: {error}"})
    prepare(parsed.model, folder, dims=parsed.dims, inputs=inputs, contract=contract, on_progress=_say_progress)


def _part(parsed: argparse.Namespace) -> None:
    from split.workbench.cut import part

    part(parsed.model, parsed.folder, parsed.cut, parsed.bitmap)


def _speed(parsed: argparse.Namespace) -> None:
    from split.profiles.rates import write_rates
    from split.runtime.allowance import usable_threads
    from split.workbench.speed import measure_rates

    rates = measure_rates(usable_threads(), budget_s=parsed.seconds, on_progress=_say_progress)
    write_rates(rates, parsed.model)


def _probe(parsed: argparse.Namespace) -> None:
    from split.codec.golden import golden_inputs
    from split.runtime.segment import OrtEngine

    segment = OrtEngine(parsed.providers).open(parsed.model, threads=1)
    try:
        segment.run(golden_inputs(segment.input_specs, {}))
    except (EngineFailed, InvalidRequest) as error:  # what it says to made-up inputs is not asked here
        if tells_of_memory(str(error)):
            raise


def _rehearse(parsed: argparse.Namespace) -> None:
    from split.codec.payload import decode
    from split.graph.card import read_card
    from split.runtime.segment import OrtEngine, usable_threads
    from split.workbench.rehearse import rehearse

    feeds = decode(parsed.feeds.read_bytes(), max_bytes=parsed.memory_bytes)
    card, names = read_card(parsed.folder), parsed.names.split(",")
    rehearse(card, parsed.folder, parsed.model, names, feeds, engine=OrtEngine(), threads=usable_threads())


def _cuts(parsed: argparse.Namespace) -> None:
    from split.profiles.contract import contract_beside
    from split.workbench.cut import list_cuts
    from split.workbench.golden import inputs_beside
    from split.workbench.inputs import read_inputs

    inputs = read_inputs(parsed.inputs) or inputs_beside(parsed.model)
    found = list_cuts(parsed.model, inputs=inputs, contract=contract_beside(parsed.model))
    parsed.out.write_text(json.dumps(found))


def _check(parsed: argparse.Namespace) -> None:
    from split.profiles.contract import contract_beside
    from split.workbench.check import check_cuts
    from split.workbench.golden import inputs_beside
    from split.workbench.inputs import read_inputs

    cuts = parsed.cuts if parsed.cuts in {"all", "candidates"} else parsed.cuts.split(",")
    found = check_cuts(
        parsed.model,
        cuts,
        inputs=read_inputs(parsed.inputs) or inputs_beside(parsed.model),
        contract=contract_beside(parsed.model),
        outputs_dir=parsed.outputs,
        on_progress=_say_progress,
    )
    parsed.out.write_text(json.dumps(found))


def _profile(parsed: argparse.Namespace) -> None:
    from split.graph.card import FolderBefore, read_card
    from split.profiles.contract import contract_beside
    from split.runtime.machine import read_machine
    from split.runtime.segment import OrtEngine
    from split.runtime.tuning import tunings
    from split.workbench.inputs import read_inputs
    from split.workbench.optimise import Optimiser
    from split.workbench.profile import profile_model

    inputs = read_inputs(parsed.inputs)
    card, engine, contract = read_card(parsed.folder), OrtEngine(parsed.providers), contract_beside(parsed.model)
    FolderBefore(Path(card.path)).require_model(card)
    to_try = tunings(read_machine(), contract.resource.threads if contract is not None else "auto")
    profile_model(
        card,
        parsed.folder,
        inputs=None if inputs is None else [inputs],
        contract=contract,
        engine=engine,
        tunings=to_try,
        open_tuned=None
        if engine.accelerated
        else Optimiser(card, parsed.folder, engine, threads=to_try[-1].threads).open,
        on_progress=_say_progress,
    )


def _calibrate(parsed: argparse.Namespace) -> None:
    from split.profiles.contract import contract_beside
    from split.runtime.segment import OrtEngine, usable_threads
    from split.workbench.calibrate import calibrate

    calibrate(
        parsed.model,
        parsed.inputs,
        parsed.out,
        contract=contract_beside(parsed.model),
        engine=OrtEngine(),
        threads=usable_threads(),
        on_progress=_say_progress,
    )


def _optimise(parsed: argparse.Namespace) -> None:
    from split.graph.card import read_card, read_cut
    from split.profiles.contract import contract_beside
    from split.runtime.segment import OrtEngine, usable_threads
    from split.workbench.golden import golden_requests, read_golden_inputs
    from split.workbench.optimise import optimise

    os.nice(BACKGROUND_NICE)
    card, engine, threads = read_card(parsed.folder), OrtEngine(), usable_threads()
    # The card names the file as it was when the model was prepared; whoever keeps models may have moved it since.
    card = msgspec.structs.replace(card, path=str(parsed.model.absolute()))
    candidates = {cut.id: cut for cut in card.cuts}
    wanted = list(candidates) if parsed.cuts is None else [cut for cut in parsed.cuts.split(",") if cut]
    inputs = read_golden_inputs(parsed.folder / "golden.npz")
    if inputs is None:
        whole = engine.open(Path(card.path), threads=threads)
        inputs = golden_requests(card, whole, inputs=None, contract=contract_beside(parsed.model))[0].inputs
        whole.close()
    optimise(
        card,
        parsed.folder,
        [candidates.get(cut) or read_cut(parsed.folder, cut) for cut in wanted],
        inputs=inputs,
        engine=engine,
        threads=threads,
        on_progress=_say_progress,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
