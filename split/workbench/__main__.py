"""The child process of the workbench: one job a run, JSON lines on stdout for progress and errors (see `child.py`).

prepare MODEL (--folder DIR | --cache DIR) [--dims JSON] [--inputs FILE.npz]
part    MODEL --folder DIR --cut ID --bitmap HEX         the card of the cut goes to DIR/ID.json
probe   MODEL                                            opens it in the runtime, which may die of it
cuts    MODEL --out FILE.json [--inputs FILE.npz]        the candidates, nothing is kept but FILE
check   MODEL --out FILE.json [--cuts all|ID,…] [--inputs FILE.npz] [--outputs DIR]
profile MODEL --folder DIR [--inputs FILE.npz]           see `profile.py`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from split.errors import InvalidModel, IsthmusError
from split.workbench.child import say


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 after an error line."""
    parsed = _parser().parse_args(arguments)
    # Native libraries print on file descriptor 1; it belongs to our messages alone.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        parsed.job(parsed)
    except IsthmusError as error:
        say({"error": {"code": error.code, "message": str(error)}})
        return 1
    except MemoryError:
        say({"error": {"code": InvalidModel.code, "message": f"{parsed.model} needs more memory than there is"}})
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m split.workbench")
    jobs = parser.add_subparsers(required=True)

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
    job("probe", _probe)
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
    command.add_argument("--inputs", type=Path)
    return parser


def _say_progress(stage: str, ratio: float) -> None:
    say({"progress": [stage, round(ratio, 4)]})


def _prepare(parsed: argparse.Namespace) -> None:
    from split.graph.load import model_digest
    from split.workbench.cut import folder_for, prepare
    from split.workbench.inputs import read_inputs

    folder = parsed.folder or folder_for(parsed.cache, model_digest(parsed.model)[0], parsed.model)
    prepare(parsed.model, folder, dims=parsed.dims, inputs=read_inputs(parsed.inputs), on_progress=_say_progress)


def _part(parsed: argparse.Namespace) -> None:
    from split.workbench.cut import part

    part(parsed.model, parsed.folder, parsed.cut, parsed.bitmap)


def _probe(parsed: argparse.Namespace) -> None:
    from split.runtime.segment import OrtEngine

    OrtEngine().open(parsed.model, threads=1)


def _cuts(parsed: argparse.Namespace) -> None:
    from split.workbench.cut import list_cuts
    from split.workbench.inputs import read_inputs

    parsed.out.write_text(json.dumps(list_cuts(parsed.model, inputs=read_inputs(parsed.inputs))))


def _check(parsed: argparse.Namespace) -> None:
    from split.workbench.check import check_cuts
    from split.workbench.inputs import read_inputs

    cuts = parsed.cuts if parsed.cuts in {"all", "candidates"} else parsed.cuts.split(",")
    found = check_cuts(
        parsed.model,
        cuts,
        inputs=read_inputs(parsed.inputs),
        outputs_dir=parsed.outputs,
        on_progress=_say_progress,
    )
    parsed.out.write_text(json.dumps(found))


def _profile(parsed: argparse.Namespace) -> None:
    from split.graph.card import read_card
    from split.profiles.contract import load_contract
    from split.runtime.segment import OrtEngine, usable_threads
    from split.workbench.inputs import read_inputs
    from split.workbench.profile import profile_model

    inputs = read_inputs(parsed.inputs)
    # In a repository the contract lies beside the version folders: NAME/contract.yaml, NAME/1/model.onnx.
    contract = parsed.model.absolute().parent.parent / "contract.yaml"
    profile_model(
        read_card(parsed.folder),
        parsed.folder,
        inputs=None if inputs is None else [inputs],
        contract=load_contract(contract) if contract.is_file() else None,
        engine=OrtEngine(),
        threads=usable_threads(),
        on_progress=_say_progress,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
