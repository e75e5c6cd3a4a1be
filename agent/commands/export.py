"""`isthmus export PKG.MODULE:FACTORY`: a PyTorch module as an ONNX file that computes the same (extra `torch`)."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from split.errors import EngineFailed, InvalidRequest
from split.workbench.export import parse_input

_HERE: Final = str(Path(__file__).resolve().parents[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The factory, one `--input` for each parameter of `forward`, the file to write."""
    parser.add_argument(
        "factory", metavar="PKG.MODULE:FACTORY", help="a function without arguments (or class) that makes the module"
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        required=True,
        type=_input,
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="of one input, as 1x3x224x224 or ids=1x16:INT64; once for each parameter of forward, in its order",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the ONNX file to write")
    parser.add_argument(
        "--fixed-batch", action="store_true", help="fix all sizes as given (default: the first dim stays open)"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="ONNX operator set (default: the exporter's own)")


def run(arguments: argparse.Namespace) -> int:
    """Export in a process of its own and say what was written and how far it is from the module; always 0.

    InvalidRequest with what is wrong about factory, inputs or module; EngineFailed when the exporter died.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        result = Path(folder) / "result.json"
        # -P: a folder `split` of the user's must not stand in for ours. What he prints is no data of ours: to stderr.
        command = [sys.executable, "-P", "-m", "split.workbench.export", arguments.factory]
        command += [f"--input={text}" for text in arguments.inputs]
        command += ["--out", str(arguments.out), "--result", str(result)]
        command += ["--fixed-batch"] if arguments.fixed_batch else []
        command += ["--opset", str(arguments.opset)] if arguments.opset is not None else []
        path = os.pathsep.join(filter(None, (_HERE, os.environ.get("PYTHONPATH"))))
        status = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=sys.stderr, check=False
        ).returncode
        if not result.exists():
            raise EngineFailed(f"the export of {arguments.factory} {_death(status)}; nothing was written")
        report: dict[str, Any] = json.loads(result.read_bytes())
    if "error" in report:
        raise InvalidRequest(report["error"])
    print(_summary(arguments.out, report))
    return 0


def _input(text: str) -> str:
    try:
        parse_input(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _death(status: int) -> str:
    return f"died by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _summary(path: Path, report: dict[str, Any]) -> str:
    batches = ", ".join(map(str, report["batches"]))
    return "\n".join(
        (
            f"{path}  opset {report['opset']}",
            f"input   {', '.join(report['inputs'])}",
            f"output  {', '.join(report['outputs'])}",
            f"equal to the module: relative difference at most {report['max_rel']:.1e} at batch {batches}",
            f"where it can be cut: isthmus cuts {path}",
        )
    )
