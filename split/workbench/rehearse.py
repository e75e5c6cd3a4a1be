"""Runs what a daemon is about to open, in the child that may die of it: the whole on given inputs, head ∘ tail of cuts.

What a segment answers is not looked at, and that it refuses the inputs is no failure here: the daemon hears both by
itself. A crash of the runtime is what it must not hear.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from split.errors import EngineFailed, InvalidRequest
from split.graph.card import CutCard, ModelCard, read_cut
from split.ids import OFFLOAD_CUT, CutId
from split.runtime.engine import Engine
from split.tensor import Tensors
from split.workbench.limits import tells_of_memory

log = logging.getLogger(__name__)


def rehearse(
    card: ModelCard, folder: Path, whole: Path, names: Iterable[str], feeds: Tensors, *, engine: Engine, threads: int
) -> None:
    """Open and run each of `names` once: `offload` for the file `whole`, else a cut's halves in `folder`.

    `feeds`: the model's inputs. InvalidModel when the runtime refuses a file; EngineFailed only for want of memory.
    """
    for name in names:
        try:
            if name == OFFLOAD_CUT:
                engine.open(whole, threads=threads).run(feeds)
            else:
                _run_cut(_card_of(card, folder, CutId(name)), folder, feeds, engine, threads)
        except (EngineFailed, InvalidRequest) as error:
            if tells_of_memory(str(error)):
                raise
            log.info("%s does not take these inputs: %s", name, error)


def _card_of(card: ModelCard, folder: Path, cut: CutId) -> CutCard:
    return next((one for one in card.cuts if one.id == cut), None) or read_cut(folder, cut)


def _run_cut(cut: CutCard, folder: Path, feeds: Tensors, engine: Engine, threads: int) -> None:
    head = engine.open(folder / f"{cut.id}.head.onnx", threads=threads)
    made = head.run(_only(feeds, cut.head_inputs))
    tail = engine.open(folder / f"{cut.id}.tail.onnx", threads=threads)
    tail.run(_only(made, [spec.name for spec in cut.boundary]) | _only(feeds, cut.tail_inputs))


def _only(tensors: Tensors, names: Iterable[str]) -> Tensors:
    try:
        return {name: tensors[name] for name in names}
    except KeyError as error:
        raise InvalidRequest(f"there is no tensor {error.args[0]!r} among {', '.join(tensors)}") from None
