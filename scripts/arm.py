"""Hold an ARM64 device, emulated, against this machine: what both compute, and what an ARM board needs.

    codec      bits of codec klt, per processor: plain Python, and compiled where there is a cross-compiler
    kernels    known answers of integer kernels, per processor (`split/runtime/kernels.py`)
    numbers    real models on both sides: golden requests, halves, head here and tail there; would they be shared?
    daemon     the whole daemon on emulated ARM beside a companion on this machine, forced splits
    pages      the segment store with pages of 16 KiB, as the Raspberry Pi 5's kernel has them
    wheels     every dependency for aarch64, by Python

`scripts/emulated.py` makes the ARM64 userland, `scripts/answers.py` runs on both sides.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import onnx
import onnx.parser
from rich.console import Console
from rich.table import Table

from scripts.arm_numbers import MODELS, Numbers
from scripts.build_native import build
from scripts.emulated import CONSTRAINTS, PROCESSORS, ROOT, Emulated, Processor, Unavailable, wheel_options
from scripts.pair import STATUS, Pair
from split.runtime.kernels import kernel_answers, kernels_differ
from split.runtime.segment import OrtEngine
from split.tensor import worst_difference

SKIPPED: Final = 77
"""Exit code of a check that could not be made."""
CROSS_COMPILER: Final = "aarch64-linux-gnu-gcc"
"""Debian's gcc-aarch64-linux-gnu with libc6-dev-arm64-cross."""
TIMEOUT_S: Final = 1800
"""For one program under emulation."""
PYTHONS: Final = ("3.11", "3.12", "3.13")

Row = dict[str, Any]


def codec(emulated: Emulated, processors: Sequence[Processor]) -> Iterator[Row]:
    """Tables, coefficients and streams of codec klt, here and there: the same digest everywhere, or an error."""
    script = str(ROOT / "scripts" / "codec_bits.py")
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    (expected,) = json.loads(said.stdout).values()
    with tempfile.TemporaryDirectory(prefix="isthmus-arm-") as folder:
        library = Path(folder) / "_native.so"
        why = build(library=library, compiler=CROSS_COMPILER)
        if why is not None:
            print(f"only plain Python is compared ({why})", file=sys.stderr)
        for processor in processors:
            found = json.loads(_emulated(emulated, processor, script, *([] if why else [str(library)])))
            for core, digest in found.items():
                yield {"processor": processor.name, "core": core, "digest": digest[:16], "same": digest == expected}
                if digest != expected:
                    raise SystemExit(f"codec klt has other bits on {processor.name} ({core}) than here")


def kernels(emulated: Emulated, processors: Sequence[Processor]) -> Iterator[Row]:
    """What integer kernels answer, here and there."""
    ours = kernel_answers()
    yield {"processor": f"here: {platform.machine()}", "answers": " ".join(map(str, ours.values())), "differs": ""}
    ask = "import json; from split.runtime.kernels import kernel_answers; print(json.dumps(kernel_answers()))"
    for processor in processors:
        theirs = json.loads(_emulated(emulated, processor, "-c", ask))
        yield {
            "processor": processor.name,
            "answers": " ".join(map(str, theirs.values())),
            "differs": kernels_differ(theirs, ours) or "",
        }


def numbers(emulated: Emulated, processors: Sequence[Processor], names: Sequence[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="isthmus-arm-") as folder:
        asked = Numbers(emulated, Path(folder), names)
        here = asked.here()
        for processor in processors:
            yield from asked.compared(processor, here)


DAEMON_MODELS: Final = {
    "floats": """<ir_version: 8, opset_import: ["" : 17]> g (float[4, 16] x) => (float[4, 8] y)
        <float[16, 8] w = {W}> { a = Relu(x)  b = MatMul(a, w)  y = Tanh(b) }""",
    "integers": """<ir_version: 8, opset_import: ["" : 17]> g (float[4, 16] x) => (float[4, 8] y)
        <int8[16, 8] w = {I}, float step = {0.02}> {
            a = Relu(x)  q, s, z = DynamicQuantizeLinear(a)  m = MatMulInteger(q, w, z)  f = Cast<to = 1>(m)
            r = Mul(f, s)  b = Mul(r, step)  y = Tanh(b)
        }""",
}
SHARED_TIMEOUT_S: Final = 120.0
MODES: Final = ("local", "split", "offload")


class EmulatedDevice(Pair):
    """Companion and link on this machine, the device on emulated ARM."""

    def __init__(self, folder: Path, models: Path, emulated: Emulated, processor: Processor) -> None:
        super().__init__(folder, models)
        self._device = [str(emulated.python(processor)), "-m", "agent.cli"]
        self._environment = dict(emulated.environment())

    def _start(self, name: str, command: Sequence[str]) -> None:
        if name != "agent":
            super()._start(name, command)
            return
        with (self.folder / "agent.log").open("a") as log:
            self._processes[name] = subprocess.Popen(
                [*self._device, *command[1:]], stdout=log, stderr=log, text=True, env=self._environment
            )


def daemon(emulated: Emulated, processor: Processor) -> Iterator[Row]:
    """Forced plans over the whole system, each against the unsplit model on this machine."""
    dice = np.random.default_rng(5)
    weights = {
        "{W}": ",".join(f"{value:.4f}" for value in dice.standard_normal(128)),
        "{I}": ",".join(str(value) for value in dice.integers(-127, 128, 128)),
    }
    x = dice.standard_normal((4, 16)).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="isthmus-arm-") as name:
        folder = Path(name)
        for model, text in DAEMON_MODELS.items():
            path = folder / "models" / model / "1" / "model.onnx"
            path.parent.mkdir(parents=True)
            for mark, values in weights.items():
                text = text.replace(mark, f"{{{values}}}")
            onnx.save(onnx.parser.parse_model(text), path)
        with EmulatedDevice(folder, folder / "models", emulated, processor) as pair:
            pair.start_agent(slowdown=1.0)
            with pair.client() as client:
                deadline_at_s = time.monotonic() + SHARED_TIMEOUT_S
                while time.monotonic() < deadline_at_s:
                    if not any(one["local_only_reason"] for one in client.get(STATUS)["models"]):
                        break
                    time.sleep(0.5)
                for model in DAEMON_MODELS:
                    whole = OrtEngine().open(folder / "models" / model / "1" / "model.onnx", threads=1)
                    expected = whole.run({"x": x})
                    for mode in MODES:
                        answer = client.infer(model, {"x": x}, mode=mode, deadline_ms=30_000)
                        yield {
                            "processor": processor.name,
                            "model": model,
                            "mode": mode,
                            "placement": answer.placement,
                            "fallback": answer.fallback,
                            "rel": worst_difference(answer.outputs, expected, list(expected)),
                        }


PAGE_BYTES: Final = 16384
PAGE_TESTS: Final = ("runtime_kernels", "graph_half", "graph_partition", "workbench_optimise")


def pages(emulated: Emulated, processor: Processor) -> Iterator[Row]:
    """Tests of what maps files, with large pages; and the alignment of every library that would be loaded."""
    smallest = min(alignment for _, alignment in emulated.alignments())
    yield {"processor": processor.name, "what": "smallest alignment of a library's segments", "found": smallest}
    tests = [str(ROOT / "tests" / "split" / f"test_{name}.py") for name in PAGE_TESTS]
    options = [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-k",
        "not real_model",
    ]
    said = _emulated(emulated, processor, "-m", "pytest", *options, *tests, page_bytes=PAGE_BYTES)
    yield {
        "processor": processor.name,
        "what": f"tests with pages of {PAGE_BYTES} bytes",
        "found": said.split("\n")[-1],
    }


def wheels(dependencies: Sequence[str]) -> Iterator[Row]:
    """Whether pip finds a wheel of everything for aarch64, with the pins. It downloads what it resolves by, no more."""
    for python in PYTHONS:
        with tempfile.TemporaryDirectory(prefix="isthmus-arm-") as folder:
            report = Path(folder) / "report.json"
            command = [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"),
                *("--ignore-installed", "--target", folder, "--constraint", str(CONSTRAINTS), "--report", str(report)),
                *wheel_options(python),
                *dependencies,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                yield {"python": python, "packages": "refused", "for_arm": "", "why": " ".join(lines)[:300]}
                continue
            found = json.loads(report.read_text())["install"]
            names = [one["download_info"]["url"].rpartition("/")[2] for one in found]
            native = sum("aarch64" in name for name in names)
            yield {"python": python, "packages": len(names), "for_arm": native, "why": ""}


def _emulated(emulated: Emulated, processor: Processor, *words: str, page_bytes: int = 4096) -> str:
    done = subprocess.run(
        [str(emulated.python(processor, page_bytes=page_bytes)), *words],
        env=dict(emulated.environment()),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(
            f"{words[0]} on {processor.name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout.strip()


def show(console: Console, what: str, rows: Sequence[Row]) -> None:
    table = Table(title=what, title_style="")
    for column in dict.fromkeys(key for row in rows for key in row):
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.2g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


WHAT: Final = ("wheels", "codec", "kernels", "daemon", "pages", "numbers")
"""In the order of their time: seconds, then minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/arm", description="Hold an emulated ARM64 device to this machine.")
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--processors", nargs="+", choices=PROCESSORS, default=["cortex-a72", "cortex-a76", "max"])
    parser.add_argument(
        "--models", nargs="+", default=MODELS, metavar="NAME", help="for numbers; `scripts/models --list`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, too")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = project["dependencies"]
    tests = [each for each in project["optional-dependencies"]["test"] if each.startswith(("pytest", "hypothesis"))]
    chosen = [PROCESSORS[name] for name in options.processors]
    emulated = Emulated(ROOT / ".cache" / "arm")
    try:
        emulated.set_up([*dependencies, *tests])
    except Unavailable as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    checks: dict[str, Callable[[], Iterator[Row]]] = {
        "wheels": lambda: wheels(dependencies),
        "codec": lambda: codec(emulated, chosen),
        "kernels": lambda: kernels(emulated, chosen),
        "daemon": lambda: daemon(emulated, chosen[0]),
        "pages": lambda: pages(emulated, chosen[-1]),
        "numbers": lambda: numbers(emulated, chosen, options.models),
    }
    console = Console()
    report: dict[str, list[Row]] = {}
    for what in (what for what in WHAT if what in options.only):
        report[what] = list(checks[what]())
        show(console, what, report[what])
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
