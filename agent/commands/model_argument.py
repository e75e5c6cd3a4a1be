"""The argument MODEL of the tools: a file, or a name in the model repository; and what else they share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from split.errors import InvalidModel, UnknownModel
from split.ids import ModelName

CHILD_TIMEOUT_S = 3600.0
"""A tool may take its time (the one who waits can press Ctrl-C); a child that hangs for an hour is ended."""


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, and where names are looked up."""
    parser.add_argument("model", metavar="MODEL", help="an ONNX file, or a name in the model repository")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="agent configuration that names the repository ($ISTHMUS_CONFIG)"
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="the model repository itself")


def add_inputs_argument(parser: argparse.ArgumentParser) -> None:
    """`--inputs`: read it with `split.workbench.inputs.read_inputs`."""
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE.npz",
        help="the model's inputs by name; without them symbolic dims are 1 and golden inputs are made",
    )


def model_path(arguments: argparse.Namespace) -> Path:
    """The file that MODEL means: the newest version where it is a name. UnknownModel when there is none."""
    given = Path(arguments.model)
    if given.is_file():
        return given
    folder = _repository(arguments)
    if folder is None:
        raise UnknownModel(
            f"{arguments.model!r} is no file; to use a name in a repository, say which: --models DIR or --config FILE"
        )
    if not folder.is_dir():
        raise UnknownModel(f"the model repository {folder} is not a folder; expected {folder}/NAME/VERSION/model.onnx")
    from agent.model_folders import find_models

    found = find_models(folder)
    if arguments.model not in found:
        known = ", ".join(sorted(found)) or "none"
        raise UnknownModel(f"{arguments.model!r} is neither a file nor a model in {folder}; known there: {known}")
    place = found[ModelName(arguments.model)]
    if place.why_not:
        raise InvalidModel(f"model {arguments.model!r} cannot be used: {place.why_not}")
    return place.path


def _repository(arguments: argparse.Namespace) -> Path | None:
    if arguments.models is not None:
        return Path(arguments.models)
    config = arguments.config or os.environ.get("ISTHMUS_CONFIG")
    if not config:
        return None
    from agent.config import load_config

    return load_config(Path(config), os.environ).models


def show_progress(stage: str, ratio: float) -> None:
    """One line on a terminal's stderr, drawn over; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        line = "" if stage == "done" else f"{stage} {ratio:.0%}"
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
