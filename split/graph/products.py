"""A growth's functions worked out together, for the planner: what a request brings are its sizes, and everything that
is a product of extents and sizes (`growth.py`) comes from them in a dozen operations on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from split.graph.growth import Elements, Floats, Growth, Step, open_dims, shapes_at
from split.tensor import TensorSpec

Factors = tuple[int, ...]
"""Their numbers."""

_NOTHING: Final = Step(0, 0, 0, 1)
_ZERO: Final = np.zeros((), dtype=np.int64)


class Products:
    """Products of some of these factors: the growth's extents, and its variables (the sizes of the open dims, then the
    elements of all inputs). `want` them once, then `at` gives them for any sizes, in the order they were wanted.

    `inputs`: the card's. An extent is never less than 0: sizes below what strides and kernels take are the model's to
    refuse.
    """

    def __init__(self, growth: Growth, inputs: Sequence[TensorSpec]) -> None:
        dims = open_dims(inputs)
        shapes = shapes_at(inputs, dims, [-1 - number for number in range(len(dims))])
        self._inputs = [_constant_and_dims(shape) for shape in shapes.values()]
        self._extents = len(growth.extents)
        self._variables = len(dims) + 1
        deep = max((len(extent.steps) for extent in growth.extents), default=0)
        numbers = np.empty((4, deep, self._extents), dtype=np.int64)
        self._dim, self._times, self._add, self._by = numbers  # each [step, extent]
        for number, extent in enumerate(growth.extents):
            for place in range(deep):
                step = extent.steps[place] if place < len(extent.steps) else _NOTHING
                numbers[:, place, number] = step.dim, step.times, step.add, step.by
        self._base = np.array([extent.base for extent in growth.extents], dtype=np.int64)
        self._factors = np.zeros((0, 0), dtype=np.intp)
        """[factor, product], filled up with the factor 1."""

    def of_monomial(self, powers: Sequence[tuple[int, int]]) -> Factors:
        """The factors of one of `Growth.monomials`; none of the constant."""
        return tuple(self._extents + variable for variable, power in powers for _ in range(power))

    def of_elements(self, elements: Elements) -> tuple[Factors, float]:
        """(factors, constant) of the elements of a tensor."""
        if not elements.exact:
            return (self._extents + self._variables - 1,), elements.per_input_element
        return elements.extents, 1.0

    def of_input(self, number: int) -> tuple[Factors, float]:
        """The same of an input of the model."""
        constant, dims = self._inputs[number]
        return tuple(self._extents + dim for dim in dims), float(constant)

    def want(self, products: Sequence[Factors]) -> None:
        """Lay out these products, for `at` to give in this order."""
        one = self._extents + self._variables
        most = max(map(len, products), default=0)
        filled = [[*factors, *[one] * (most - len(factors))] for factors in products]
        self._factors = np.array(filled, dtype=np.intp).reshape(len(products), most).T.copy()

    def at(self, sizes: Sequence[int]) -> Floats:
        """[product] for these sizes of the open dims."""
        found = np.empty(self._extents + self._variables + 1)
        given = np.array(sizes, dtype=np.int64)
        steps = given.take(self._dim)
        steps += self._add
        steps //= self._by
        steps *= self._times
        extents = steps[0] if len(steps) == 1 else np.add.reduce(steps)
        extents += self._base
        found[: self._extents] = np.maximum(extents, _ZERO, out=extents)
        found[self._extents : -2] = given
        found[-2] = sum(constant * math.prod([sizes[dim] for dim in dims]) for constant, dims in self._inputs)
        found[-1] = 1.0
        products: Floats = np.multiply.reduce(found[self._factors])
        return products


def _constant_and_dims(shape: Sequence[int]) -> tuple[int, list[int]]:
    """The product of the fixed dims, and the numbers of the open ones, which stand here as -1, -2, …"""
    return math.prod(dim for dim in shape if dim >= 0), [-1 - dim for dim in shape if dim < 0]
