"""`isthmus cuts MODEL`: where the model can be parted, what travels there, how much of it the device computes."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from agent.commands.model_argument import (
    CHILD_TIMEOUT_S,
    add_inputs_argument,
    add_model_argument,
    model_path,
    show_progress,
)
from split.errors import UnsupportedRequest
from split.tensor import TensorSpec
from split.workbench.child import run_child_sync

_JSON_KEYS = ("model", "digest", "cuts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_inputs_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw compute share and bytes along the model")


def run(arguments: argparse.Namespace) -> int:
    path = model_path(arguments)
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        out = Path(folder) / "cuts.json"
        command = ["cuts", str(path), "--out", str(out)]
        if arguments.inputs is not None:
            command += ["--inputs", str(arguments.inputs)]
        run_child_sync(command, timeout_s=CHILD_TIMEOUT_S, on_progress=show_progress)
        found: dict[str, Any] = json.loads(out.read_bytes())
    if arguments.plot is not None:
        _plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps({key: found[key] for key in _JSON_KEYS}, indent=1))
    else:
        print(_table(found))
    return 0


def _table(found: dict[str, Any]) -> str:
    """For people: one line a cut, and the input's own size to compare with."""
    inputs = ", ".join(f"{_tensor(spec)}" for spec in found["inputs"])
    lines = [
        f"{found['model']}  {found['digest'][:19]}…",
        f"input  {inputs}  {_kb(_raw_bytes(found['inputs']))} KB",
        "",
    ]
    if not found["cuts"]:
        return "\n".join([*lines, f"no cuts: {found['no_cuts_reason']}"])
    lines.append(
        f"{'cut':12}  {'after node':>10}  {'compute':>7}  {'raw KB':>8}  {'fp16 KB':>8}  {'int8 KB':>8}  boundary"
    )
    for cut in found["cuts"]:
        sizes = "  ".join(f"{_kb(cut['bytes'][codec]):>8}" for codec in ("raw", "fp16", "int8"))
        boundary = " + ".join(_tensor(spec) for spec in cut["boundary"])
        lines.append(f"{cut['id']:12}  {cut['nodes']:>10}  {cut['compute_share']:>7.1%}  {sizes}  {boundary}")
    return "\n".join(lines)


def _tensor(spec: dict[str, Any]) -> str:
    return f"{spec['name']} {spec['dtype']}[{','.join(str(dim) for dim in spec['shape'])}]"


def _kb(size: int) -> str:
    return f"{size / 1000:,.1f}"


def _raw_bytes(specs: list[dict[str, Any]]) -> int:
    return sum(
        TensorSpec(name=spec["name"], dtype=spec["dtype"], shape=tuple(spec["shape"])).nbytes() for spec in specs
    )


def _plot(found: dict[str, Any], path: Path) -> None:
    """Bytes over compute share, one line a codec, the raw input's size as a level to be under."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedRequest("--plot needs matplotlib; install it with: pip install matplotlib") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    shares = [100 * cut["compute_share"] for cut in found["cuts"]]
    for codec in ("raw", "fp16", "int8"):
        axes.plot(shares, [cut["bytes"][codec] / 1000 for cut in found["cuts"]], marker="o", label=codec)
    axes.axhline(_raw_bytes(found["inputs"]) / 1000, linestyle="--", color="grey", label="input, raw")
    axes.set(xlabel="% of compute on the device", ylabel="KB that travel", title=found["model"], yscale="log")
    axes.legend()
    figure.savefig(path)
