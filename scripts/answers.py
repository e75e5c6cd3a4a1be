"""What this machine's runtime answers to given requests: one side of `scripts/arm`, run on both with the same files.

    python scripts/answers.py QUESTION.json OUT.npz

QUESTION names a model's file, the folder of its halves (as the workbench cut them), cuts and requests; OUT gets each
tensor under `<model>/<request>/<run>/<tensor>`. A run is `whole`, `plain` (nothing fused) or a cut's id, under
which the boundary stands beside the outputs. Needs what the serving programs need, and no `onnx`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from split.graph.card import read_card
from split.runtime.segment import OrtEngine
from split.tensor import Tensors


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One model and what it is to be run on."""

    model: str
    path: str
    folder: str
    cuts: tuple[str, ...]
    requests: dict[str, str]
    """Name → `.npz` with the inputs."""


def answers(question: Question) -> Tensors:
    """Every tensor of every run of one model, one thread each."""
    engine = OrtEngine()
    path, folder = Path(question.path), Path(question.folder)
    card = read_card(folder)
    assert card is not None, folder
    requests = {name: dict(np.load(file)) for name, file in question.requests.items()}
    found: Tensors = {}

    def keep(run: str, request: str, tensors: Tensors) -> None:
        found.update({f"{question.model}/{request}/{run}/{name}": array for name, array in tensors.items()})

    for run, segment in (
        ("whole", engine.open(path, threads=1)),
        ("plain", engine.open_optimised(path, threads=1, prepack=True)),
    ):
        for request, inputs in requests.items():
            keep(run, request, segment.run(inputs))
        segment.close()
    for cut in (card.cut(wanted) for wanted in question.cuts):  # type: ignore[arg-type]  # ids out of a card
        head = engine.open(folder / f"{cut.id}.head.onnx", threads=1)
        tail = engine.open(folder / f"{cut.id}.tail.onnx", threads=1)
        for request, inputs in requests.items():
            made = head.run({name: inputs[name] for name in head.inputs})
            keep(cut.id, request, made | tail.run({name: (inputs | made)[name] for name in tail.inputs}))
        head.close()
        tail.close()
    return found


def main() -> None:
    question = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Question)
    np.savez(sys.argv[2], **answers(question))  # type: ignore[arg-type]  # arrays by name


if __name__ == "__main__":
    main()
