"""A model's values and costs as the integers that candidates are found with (`weighed.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from split.graph.model import Model
from split.graph.weighed import INPUT, Crossable, Weighed
from split.tensor import TensorSpec

COST_UNITS: Final = 10**9
"""The whole model's compute as an integer: a node counts to a billionth."""


def weigh(
    model: Model,
    device: Sequence[int],
    cloud: Sequence[int],
    *,
    locked: frozenset[str] = frozenset(),
    pins: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
    coded: bool = False,
) -> Weighed:
    """The model as numbers, `model.nodes` numbered in their order. `locked`: values that must not cross; `coded`:
    floats count one byte each, as int8 ships them; else raw bytes. Only values that some node reads are tensors
    here."""
    return weigh_values(read_values(model), device, cloud, locked=locked, pins=pins, coded=coded)


@dataclass(frozen=True, slots=True)
class Value:
    """A value that some node reads; all that several weighings of one model have in common."""

    name: str
    maker: int
    readers: tuple[int, ...]
    nbytes: int
    coded_bytes: int


def read_values(model: Model) -> list[Value]:
    """All of them, the makers and readers by number."""
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(model.nodes):
        for name in node.reads:
            readers.setdefault(name, []).append(number)
    makers = {name: number for number, node in enumerate(model.nodes) for name in node.makes}
    return [Value(name, makers.get(name, INPUT), tuple(found), *_sizes(model, name)) for name, found in readers.items()]


def weigh_values(
    values: Iterable[Value],
    device: Sequence[int],
    cloud: Sequence[int],
    *,
    locked: frozenset[str],
    pins: tuple[frozenset[int], frozenset[int]],
    coded: bool = False,
) -> Weighed:
    """As `weigh`, of values that were read before."""
    return Weighed(
        device=device,
        cloud=cloud,
        tensors=[
            Crossable(
                maker=value.maker,
                readers=value.readers,
                nbytes=value.coded_bytes if coded else value.nbytes,
                locked=value.name in locked,
            )
            for value in values
        ],
        on_device=pins[0],
        on_cloud=pins[1],
    )


def in_units(costs: Sequence[float]) -> list[int]:
    """Costs as integers that sum up to about `COST_UNITS`; none is 0, so that of equal cuts the shallower one is
    less."""
    total = sum(costs) or 1.0
    return [1 + round(cost / total * COST_UNITS) for cost in costs]


def _sizes(model: Model, name: str) -> tuple[int, int]:
    """Bytes of a value as it crosses: raw, and in int8 if it is a float."""
    spec = model.crossing(name)
    nbytes = model.nbytes(name)
    if isinstance(spec, TensorSpec) and spec.dtype.startswith("FP"):
        return nbytes, nbytes // spec.element_bytes
    return nbytes, nbytes
