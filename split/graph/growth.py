"""How a model grows with its open dims: what crosses each cut and what each part computes, as functions of their sizes.

Written into the card by the workbench (`growing.py` finds the functions), worked out by the planner for the sizes of a
request; nothing here knows ONNX. Sizes of a tensor are exact wherever shape inference tells them; work is a polynomial
of estimated operations, of which only ratios are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from split.ids import CutId
from split.tensor import Array, TensorSpec

Floats = npt.NDArray[np.float64]


class OpenDim(msgspec.Struct, frozen=True, kw_only=True):
    """A dim of the model's inputs that a request decides: where to read it off. A name has one size wherever it
    stands, its first place is listed; dims without a name are each their own."""

    input: str
    axis: int


def open_dims(inputs: Sequence[TensorSpec]) -> tuple[OpenDim, ...]:
    """The dims of these inputs that have no fixed size, in their order, each name once."""
    found: list[OpenDim] = []
    names: set[str] = set()
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if (isinstance(dim, int) and dim >= 0) or dim in names:
                continue
            if isinstance(dim, str):
                names.add(dim)
            found.append(OpenDim(input=spec.name, axis=axis))
    return tuple(found)


def batch_dim(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int | None:
    """Number (in `open_dims`) of the one name that leads every input and every output and stands nowhere else: what a
    batch looks like. None without such a name."""
    specs = (*inputs, *outputs)
    names = {spec.shape[0] if spec.shape else 0 for spec in specs}
    name = names.pop()
    if names or not isinstance(name, str) or any(name in spec.shape[1:] for spec in specs):
        return None
    return open_dims(inputs).index(OpenDim(input=inputs[0].name, axis=0))


def sizes_of(dims: Sequence[OpenDim], tensors: Mapping[str, Array]) -> tuple[int, ...]:
    """Sizes of the open dims as these inputs have them; the inputs must fit the model."""
    return tuple(tensors[dim.input].shape[dim.axis] for dim in dims)


def shapes_at(
    inputs: Sequence[TensorSpec], dims: Sequence[OpenDim], sizes: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The shape of each input when the open dims have these sizes."""
    by_place = {(dim.input, dim.axis): size for dim, size in zip(dims, sizes, strict=True)}
    by_name: dict[object, int] = {}
    shapes = {}
    for spec in inputs:
        shape = []
        for axis, dim in enumerate(spec.shape):
            size = by_place.get((spec.name, axis))
            if size is None:
                size = by_name[dim] if isinstance(dim, str) else dim
            elif isinstance(dim, str):
                by_name[dim] = size
            shape.append(size)
        shapes[spec.name] = tuple(shape)
    return shapes


class Step(msgspec.Struct, frozen=True, array_like=True):
    """`times` · ⌊(size + add) / by⌋ of one open dim: what chains of strides, paddings and upsampling make of it."""

    dim: int
    """Number of the open dim."""
    times: int
    add: int
    by: int


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """One dim of a tensor: `base` + the sum of the steps."""

    base: int
    steps: tuple[Step, ...] = ()

    def at(self, sizes: Sequence[int]) -> int:
        """The extent for these sizes of the model's open dims."""
        return self.base + sum(step.times * ((sizes[step.dim] + step.add) // step.by) for step in self.steps)


class Elements(msgspec.Struct, frozen=True, array_like=True):
    """How many elements a tensor has: the product of extents, or, where `exact` is false, about so many for each
    element of all inputs."""

    extents: tuple[int, ...] = ()
    """Numbers of `Growth.extents`; none of a scalar."""
    per_input_element: float = 0.0
    """0 where exact."""

    @property
    def exact(self) -> bool:
        """Whether it is the product; else only about so many."""
        return self.per_input_element == 0.0


class CutGrowth(msgspec.Struct, frozen=True, kw_only=True):
    head_work: tuple[float, ...]
    """Coefficients of `Growth.monomials`: estimated operations of the head."""
    crossing: tuple[Elements, ...]
    """Of each tensor that travels: the boundary, then the inputs that the tail reads (`CutCard`)."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A dynamic model's functions. The last variable of the monomials is the elements of all inputs together."""

    monomials: tuple[tuple[tuple[int, int], ...], ...]
    """Products of powers: (number of the variable, power ≥ 1), …; () is the constant."""
    extents: tuple[Extent, ...]
    whole_work: tuple[float, ...]
    """Coefficients of `monomials`: estimated operations of the whole."""
    outputs: tuple[Elements, ...]
    """Of each model output."""
    cuts: dict[CutId, CutGrowth]

    def work(self, inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> float:
        """Estimated operations of the whole. `inputs`: the card's."""
        shapes = shapes_at(inputs, open_dims(inputs), sizes)
        return float(self.powers((*sizes, sum(map(math.prod, shapes.values())))) @ np.array(self.whole_work))

    def powers(self, variables: Sequence[int]) -> Floats:
        """The value of each monomial. `variables`: sizes of the open dims, then the elements of all inputs."""
        return np.array([math.prod(variables[at] ** power for at, power in one) for one in self.monomials], float)
