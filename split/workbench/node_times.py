"""Times of the original graph's nodes by the runtime's profile of the whole, and what lies before each cut.

The runtime fuses nodes, renames them, and takes names from files where they are missing or given twice. So it profiles
a copy in which every node is called by its number. What is fused keeps the number of a node in it, or is called by the
tensor it makes (ONNX Runtime's blocked convolutions: `<tensor>_nchwc`). What has neither name (a change of layout, say)
belongs to the node before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx

from split.errors import IsthmusError
from split.graph.card import CutCard, ModelCard
from split.graph.cuts import mask_of
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, whole_with, write_whole
from split.runtime.engine import Engine
from split.tensor import Tensors

log = logging.getLogger(__name__)

_NUMBERED: Final = re.compile(r"isthmus(\d+)")
_BLOCKED: Final = "_nchwc"


def head_shares(
    card: ModelCard, folder: Path, feeds: Tensors, *, engine: Engine, threads: int, budget_s: float = 2.0
) -> dict[str, float]:
    """Share of the whole's node times that lies in each cut's head, 0…1, by cut id.

    `folder`: where the model's shared weights lie. Where the runtime's profile cannot be had, the estimated operations
    (`CutCard.compute_share`) must do, and the log says why.
    """
    try:
        model = load_model(Path(card.path))
        node_ms = measured_node_ms(model, folder, feeds, engine=engine, threads=threads, budget_s=budget_s)
    except IsthmusError as error:
        log.info("%s: shares are estimated from operations: %s", card.path, error)
        node_ms = []
    total = sum(node_ms)
    if total <= 0.0:
        return {cut.id: cut.compute_share for cut in card.cuts}
    return {cut.id: _inside(cut, node_ms) / total for cut in card.cuts}


def measured_node_ms(
    model: Model, folder: Path, feeds: Tensors, *, engine: Engine, threads: int, budget_s: float
) -> list[float]:
    """Milliseconds of each of the model's nodes, by their `bit`; errors as `Engine.node_times`."""
    share_weights(model, folder)
    path = folder / f".{os.getpid()}.numbered.onnx"
    write_whole(path, _numbered(model))
    try:
        times = engine.node_times(path, feeds, threads=threads, budget_s=budget_s)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return by_node(times, {name: node.bit for node in model.nodes for name in node.makes}, len(model.nodes))


def by_node(times: Iterable[tuple[str, float]], makers: Mapping[str, int], nodes: int) -> list[float]:
    """Times by node number. `makers`: which node makes a tensor, by its name; `nodes` ≥ 1: how many there are."""
    taken = [0.0] * nodes
    current = 0
    for name, ms in times:
        numbered = _NUMBERED.search(name)
        found = int(numbered[1]) if numbered is not None else makers.get(name.removesuffix(_BLOCKED), -1)
        if 0 <= found < nodes:
            current = found
        taken[current] += ms
    return taken


def _numbered(model: Model) -> bytes:
    proto = onnx.load_from_string(whole_with(model, model.output_names))
    ours = list(proto.graph.node)[len(proto.graph.node) - len(model.nodes) :]  # constants come first
    for node, source in zip(ours, model.nodes, strict=True):
        node.name = f"isthmus{source.bit}"
    data = proto.SerializeToString()
    assert isinstance(data, bytes)
    return data


def _inside(cut: CutCard, node_ms: Sequence[float]) -> float:
    mask = mask_of(cut.node_bitmap)
    return sum(ms for bit, ms in enumerate(node_ms) if mask >> bit & 1)
