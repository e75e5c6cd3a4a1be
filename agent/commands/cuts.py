"""`isthmus cuts MODEL`: where the model can be parted, what travels there, how much of it the device computes."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from agent.commands.model_argument import (
    CHILD_TIMEOUT_S,
    add_inputs_argument,
    add_model_argument,
    model_path,
    show_progress,
)
from split.errors import InvalidRequest
from split.ids import KLT
from split.tensor import TensorSpec
from split.workbench.child import run_child_sync

_JSON_KEYS: Final = ("model", "digest", "cuts")
_CODECS: Final = ("raw", "fp16", "int8")
_NAME_MAX: Final = 28
_SHOWN_MAX: Final = 3
"""Tensors of a boundary in the table, the biggest; the rest are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_inputs_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw what travels along the model against the input's own size"
    )


def run(arguments: argparse.Namespace) -> int:
    """List the cuts (a child process finds them), draw them where asked; always 0."""
    path = model_path(arguments)
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        out = Path(folder) / "cuts.json"
        command = ["cuts", str(path), "--out", str(out)]
        if arguments.inputs is not None:
            command += ["--inputs", str(arguments.inputs)]
        run_child_sync(command, timeout_s=CHILD_TIMEOUT_S, on_progress=show_progress)
        found: dict[str, Any] = json.loads(out.read_bytes())
    if arguments.plot is not None:
        _plot(found, path, arguments.plot)
    if arguments.json:
        print(json.dumps({key: found[key] for key in _JSON_KEYS}, indent=1))
    else:
        print(_table(found, path))
    return 0


def _table(found: dict[str, Any], path: Path) -> str:
    """For people: the input as the first row, then one row a cut in the order of the model."""
    lines = [f"{_title(path)}  {found['nodes']} nodes  {found['digest'][:19]}…", ""]
    codecs = (*_CODECS, *((KLT,) if any(KLT in cut for cut in found["cuts"]) else ()))
    heads = "  ".join(f"{f'{codec} KB':>9}" for codec in codecs)
    lines.append(f"{'cut':12}  {'node':>5}  {'compute':>7}  {heads}  boundary")
    own = _raw_bytes(found["inputs"])
    lines.append(_row("input", 0, 0.0, [_kb(own), *[""] * (len(codecs) - 1)], found["inputs"]))
    if not found["cuts"]:
        return "\n".join([*lines, f"no cuts: {found['no_cuts_reason']}", *_note(found)])
    for cut in found["cuts"]:
        sizes = [_kb(cut["bytes"][codec]) for codec in _CODECS]
        if KLT in codecs:
            sizes.append(_kb(round(cut[KLT]["mean_bytes"])) if KLT in cut else "")
        lines.append(_row(cut["id"], cut["nodes"], cut["compute_share"], sizes, cut["boundary"]))
    smaller = [cut for cut in found["cuts"] if cut["bytes"]["raw"] < own]
    lines += ["", f"{len(smaller)} of {len(found['cuts'])} cuts send less than the input, both uncoded"]
    if found["dropped"]:
        lines.append(
            f"large blocks were not searched in full ({found['dropped']:,} partial cuts given up): "
            "the fastest cuts are here, some for throughput may be missing"
        )
    if found["beyond_limit"]:
        lines.append(f"{found['beyond_limit']} more cuts that trade compute for bytes found no room")
    return "\n".join([*lines, *_note(found)])


def _note(found: dict[str, Any]) -> list[str]:
    return [f"the model is cut as it stands in the file: {found['note']}"] if found["note"] else []


def _row(name: str, nodes: int, share: float, sizes: list[str], specs: list[dict[str, Any]]) -> str:
    columns = "  ".join(f"{size:>9}" for size in sizes)
    return f"{name:12}  {nodes:>5}  {share:>7.1%}  {columns}  {_tensors(specs)}"


def _tensors(specs: list[dict[str, Any]]) -> str:
    shown = sorted(specs, key=lambda spec: -_raw_bytes([spec]))[:_SHOWN_MAX]
    more = len(specs) - len(shown)
    texts = [f"{_short(spec['name'])} {spec['dtype']}[{','.join(map(str, spec['shape']))}]" for spec in shown]
    return " + ".join([*texts, *([f"{more} more"] if more else [])])


def _short(name: str) -> str:
    """The end of a long name: exporters put the place in the network first and what it is last."""
    return name if len(name) <= _NAME_MAX else f"…{name[1 - _NAME_MAX :]}"


def _title(path: Path) -> str:
    """The name in the repository, or the file's."""
    version = path.absolute().parent
    return version.parent.name if path.name == "model.onnx" and version.name.isdigit() else path.name


def _kb(size: int) -> str:
    return f"{size / 1000:,.1f}" if size >= 100 else f"{size / 1000:.3f}"


def _specs(plain: list[dict[str, Any]]) -> list[TensorSpec]:
    return [TensorSpec(name=spec["name"], dtype=spec["dtype"], shape=tuple(spec["shape"])) for spec in plain]


def _raw_bytes(plain: list[dict[str, Any]]) -> int:
    return sum(spec.nbytes() for spec in _specs(plain))


def _plot(found: dict[str, Any], path: Path, out: Path) -> None:
    from agent.commands.cuts_calibrated import calibrated  # Pillow, which the table does without
    from agent.commands.cuts_plot import Level, draw
    from split.workbench.pictures import JPEG_QUALITY, picture_bytes

    levels = [Level(name="raw", size=_raw_bytes(found["inputs"]))]
    pictures = [picture for spec in _specs(found["inputs"]) if (picture := picture_bytes(spec, path)) is not None]
    note, coded = "", calibrated(found, path)
    if coded is not None:
        levels += coded.levels
        note = coded.note
    elif len(pictures) == 1:
        [picture] = pictures
        levels += [Level(name="PNG", size=picture.png), Level(name=f"JPEG q{JPEG_QUALITY}", size=picture.jpeg)]
        note = f"as PNG and JPEG: {picture.of}"
    title = f"{_title(path)}: what travels where it is cut"
    try:
        draw(found, title, levels, note, out, coded=coded.cuts if coded is not None else ())
    except OSError as error:
        raise InvalidRequest(f"the plot cannot be written to {out}: {error.strerror or error}") from None
