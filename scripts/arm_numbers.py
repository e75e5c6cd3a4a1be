"""What real models compute on emulated ARM64 and here: wholes, halves, and halves on different sides, in numbers.

Each model is cut once, on this machine; `answers.py` runs the same files on both sides, one thread each. Relative
differences as DESIGN has them, the worst over requests and cuts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

from scripts import models
from scripts.answers import Question
from scripts.emulated import ROOT, Emulated, Processor
from scripts.natural import NATURAL
from split.codec.golden import bound_of, golden_inputs
from split.errors import EngineFailed, InvalidRequest
from split.graph.card import CutCard, ModelCard
from split.runtime.segment import OrtEngine
from split.tensor import Tensors, bind_dims, worst_difference
from split.workbench.cut import prepare

Row = dict[str, Any]

MODELS: Final = (
    "efficientnet-lite0",
    "efficientnet-lite0:half",
    "open-nsfw-resnet50",
    "ppocrv4-rec",
    "minilm-l6-int8w",
    "silero-vad",
    "ddddocr-rec-int8",
)
HALF: Final = ":half"
"""The same in FLOAT16, converted by onnxruntime's own tool."""
CUTS: Final = 4
"""Spread over each model's candidates."""
TIMEOUT_S: Final = 1800
"""One model on one side."""


class Numbers:
    """Models cut once, run here and on each emulated processor."""

    def __init__(self, emulated: Emulated, folder: Path, names: Sequence[str]) -> None:
        self._emulated = emulated
        self._folder = folder
        self._cards: dict[str, ModelCard] = {}
        self._questions: dict[str, Question] = {}
        for name in names:
            try:
                self._add(name)
            except models.Unavailable as error:
                print(f"skipped {name}: {error}", file=sys.stderr)

    def here(self) -> dict[str, Tensors]:
        """Model → what it answers on this machine, as `answers.py` names it."""
        return {name: self._ask("here", [sys.executable], None, question) for name, question in self._asked()}

    def compared(self, processor: Processor, here: dict[str, Tensors]) -> Iterator[Row]:
        """A row for each model on this processor."""
        python = [str(self._emulated.python(processor))]
        for name, question in self._asked():
            there = self._ask(processor.name, python, dict(self._emulated.environment()), question)
            yield {"processor": processor.name, "model": name, **self._compare(name, question, there, here[name])}

    def _asked(self) -> Iterator[tuple[str, Question]]:
        for name, question in self._questions.items():
            print(f"running {name} …", file=sys.stderr, flush=True)
            yield name, question

    def _add(self, name: str) -> None:
        plain = name.removesuffix(HALF)
        folder = self._folder / name.replace(":", "-")
        folder.mkdir()
        path = models.model_path(plain)
        natural = NATURAL[plain]()
        if name.endswith(HALF):
            path = to_half(path, folder / "model.onnx")
        card = prepare(path, folder, inputs=natural)
        requests = {"natural": natural}
        built_in = golden_inputs(card.inputs, bind_dims(card.inputs, natural))
        try:
            OrtEngine().open(path, threads=1).run(built_in)
            requests = {"golden": built_in, "natural": natural}
        except (InvalidRequest, EngineFailed):
            pass  # then the companion is compared by the natural one
        for request, inputs in requests.items():
            np.savez(folder / f"{request}.npz", **inputs)  # type: ignore[arg-type]  # arrays by name
        self._cards[name] = card
        self._questions[name] = Question(
            model=name,
            path=str(path),
            folder=str(folder),
            cuts=tuple(cut.id for cut in spread(card.cuts, CUTS)),
            requests={request: str(folder / f"{request}.npz") for request in requests},
        )

    def _ask(self, where: str, python: list[str], environment: dict[str, str] | None, question: Question) -> Tensors:
        job, out = self._folder / f"{where}.json", self._folder / f"{where}.npz"
        job.write_bytes(msgspec.json.encode(question))
        command = [*python, str(ROOT / "scripts" / "answers.py"), str(job), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{question.model} on {where} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        with np.load(out) as arrays:
            return {key: arrays[key] for key in arrays.files}

    def _compare(self, name: str, question: Question, there: Tensors, here: Tensors) -> Row:
        """Relative differences, each the worst over requests (and cuts)."""
        card = self._cards[name]
        compared_by = next(iter(question.requests))

        def run(side: Tensors, request: str, which: str) -> Tensors:
            prefix = f"{name}/{request}/{which}/"
            return {key.removeprefix(prefix): array for key, array in side.items() if key.startswith(prefix)}

        def worst(pairs: Iterable[tuple[Tensors, Tensors]]) -> float:
            return max((worst_difference(found, expected, list(expected)) for found, expected in pairs), default=0.0)

        def from_itself(side: Tensors) -> float:
            if card.integer:
                return 0.0
            return worst((run(side, r, "plain"), run(side, r, "whole")) for r in question.requests)

        cuts = question.cuts
        outputs = [spec.name for spec in card.outputs]
        itself = from_itself(there)
        bound = bound_of(itself)
        golden_whole = worst_difference(run(here, compared_by, "whole"), run(there, compared_by, "whole"), outputs)
        golden_cuts = [worst([(run(here, compared_by, cut), run(there, compared_by, cut))]) for cut in cuts]

        def halves(side: Tensors) -> float:
            return worst(
                ({name: run(side, r, cut)[name] for name in outputs}, run(side, r, "whole"))
                for r in question.requests
                for cut in cuts
            )

        split = worst(
            (self._finished_here(card.cut(cut), question, r, run(there, r, cut)), run(there, r, "whole"))  # type: ignore[arg-type]
            for r in question.requests
            for cut in cuts
        )
        return {
            "integer": card.integer,
            "compared_by": compared_by,
            "itself_there": itself,
            "itself_here": from_itself(here),
            "bound": bound,
            "whole_rel": worst((run(here, r, "whole"), run(there, r, "whole")) for r in question.requests),
            "golden_whole_rel": golden_whole,
            "golden_cut_rel": max(golden_cuts, default=0.0),
            "halves_there": halves(there),
            "halves_here": halves(here),
            "split_rel": split,
            "cuts": len(cuts),
            "whole_shared": golden_whole <= bound,
            "cuts_shared": sum(difference <= bound for difference in golden_cuts),
        }

    def _finished_here(self, cut: CutCard, question: Question, request: str, made: Tensors) -> Tensors:
        """The outputs, from the boundary that the device made."""
        inputs = dict(np.load(question.requests[request]))
        tail = OrtEngine().open(Path(question.folder) / f"{cut.id}.tail.onnx", threads=1)
        finished = tail.run({name: (inputs | made)[name] for name in tail.inputs})
        tail.close()
        return {name: made[name] for name in cut.head_outputs} | finished


def spread(cuts: Sequence[CutCard], most: int) -> list[CutCard]:
    """At most that many (two or more), evenly, the first and the last among them."""
    if len(cuts) <= most:
        return list(cuts)
    return [cuts[round(at * (len(cuts) - 1) / (most - 1))] for at in range(most)]


def to_half(path: Path, target: Path) -> Path:
    """The model in FLOAT16 between FP32 inputs and outputs."""
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), target)
    return target
