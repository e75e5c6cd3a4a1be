"""What every candidate has to respect, whatever it costs: pinned nodes, operators that the device lacks, depth, weight,
inputs that must not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.errors import CutRefused
from split.graph.cuts import weights_of
from split.graph.model import Model
from split.graph.weighed import Weighed, bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What every candidate has to respect."""

    weight_bytes_max: int | None = None
    """Most bytes of weights in the head."""
    depth_min_ratio: float = 0.0
    """Least share of the compute on the device before anything leaves it, 0…1."""
    ops_missing: frozenset[str] = frozenset()
    """Operators that the device cannot run (as `GraphNode.op` writes them): they and what needs them stay in the
    tail."""
    on_device: frozenset[str] = frozenset()
    """Keys of nodes that must be in the head."""
    on_cloud: frozenset[str] = frozenset()
    """Keys of nodes that must be in the tail."""
    private: frozenset[str] = frozenset()
    """Inputs that must not be readable off what crosses (`exposure.py`)."""


NO_DEMANDS: Final = Demands()


def meets(model: Model, weighed: Weighed, demands: Demands, members: int) -> bool:
    """Whether these nodes, as a head, are deep and light enough."""
    share = sum(weighed.device[node] for node in bits(members)) / sum(weighed.device)
    if share < demands.depth_min_ratio:
        return False
    most = demands.weight_bytes_max
    return most is None or _head_weight_bytes(model, members) <= most


def pins_of(model: Model, demands: Demands, device: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """(nodes that must be in the head, nodes that must not be) whatever else is."""
    on_device = {number for number, node in enumerate(model.nodes) if node.key in demands.on_device}
    on_cloud = {
        number
        for number, node in enumerate(model.nodes)
        if node.key in demands.on_cloud or node.op in demands.ops_missing
    }
    if demands.weight_bytes_max is not None:
        before = _reach(model)
        counted: set[str] = set()
        own = []
        for number in range(len(model.nodes)):
            found = weights_of(model, (number,))
            own.append(sum(nbytes for name, nbytes in found.items() if name not in counted))
            counted.update(found)
        # A node brings all it needs into the head: where that is too heavy already, the node is in no head. A weight
        # is counted at its first reader, so the sum is never too large.
        heavy = before @ np.array(own, dtype=np.float64) > demands.weight_bytes_max
        on_cloud.update(int(number) for number in np.flatnonzero(heavy))
    if demands.depth_min_ratio > 0.0:
        # Without a node none of those that need it is in the head: where the rest is too little, it must be there.
        after = _reach(model).T
        costs = np.array(device, dtype=np.float64)
        needed = costs.sum() - after @ costs < demands.depth_min_ratio * costs.sum()
        on_device.update(int(number) for number in np.flatnonzero(needed))
    return frozenset(on_device), frozenset(on_cloud)


def _reach(model: Model) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[node, node]: the row's node needs the column's, or is it."""
    makers = {name: number for number, node in enumerate(model.nodes) for name in node.makes}
    reach = np.eye(len(model.nodes), dtype=np.bool_)
    for number, node in enumerate(model.nodes):
        for name in node.reads:
            if name in makers:
                reach[number] |= reach[makers[name]]
    return reach


def require_known(model: Model, demands: Demands) -> None:
    """CutRefused where a demand names a node or an input that the model has not."""
    keys = {node.key for node in model.nodes}
    for name in (*demands.on_device, *demands.on_cloud):
        if name not in keys:
            raise CutRefused(f"{name!r} is not the key of a node of {model.path.name} that computes with its inputs")
    inputs = {spec.name for spec in model.inputs}
    for name in demands.private:
        if name not in inputs:
            raise CutRefused(f"{name!r} is no input of {model.path.name}; it has {', '.join(sorted(inputs))}")


def _head_weight_bytes(model: Model, members: int) -> int:
    """Bytes of the weights that these nodes read, each counted once."""
    return sum(weights_of(model, bits(members)).values())
