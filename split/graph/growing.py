"""Finds how a model grows with its open dims (`growth.py`), by asking shape inference at a few dozen sizes.

ONNX shape inference tells the shape of nearly every value at *given* sizes, but gives up names at the first stride:
`(H + 1) / 2` is `unk__3` to it. So each dim of each value is sampled and explained: the samples along one open dim tell
the slope, those at odd sizes between multiples of 64 which of the floors ⌊(size + add) / by⌋ it is. An explanation
counts only if it gives every sample exactly. Work (`cost.py`) is sampled at multiples of 64, where strides leave no
rest, as a product of one quadratic for each dim: convolutions are linear in height and in width, attention is between
linear and quadratic in the length. What inference does not tell, runs show; what they do not show either is taken to
grow as the inputs do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.graph.cost import node_flops
from split.graph.cuts import Cut
from split.graph.growth import CutGrowth, Elements, Extent, Floats, Growth, OpenDim, Step, open_dims, shapes_at
from split.graph.model import Model
from split.graph.shapes import shape_teller

STRIDE: Final = 64
"""Total strides that divide it are told apart; networks have 32 at most, two of them 64."""
OFFSETS: Final = (1, 63, 32, 31, 33, 16, 15, 17, 47, 48, 8, 7, 9, 4, 3, 5, 2, 55, 24, 40, 62, 12, 20, 28)
"""Sizes above a multiple of `STRIDE` at which all dims are sampled together; what tells most comes first."""
SAMPLED_NODES_MAX: Final = 10_000
"""Nodes times samples at odd sizes: inference takes 0.1 ms a node, so they take about a second."""
OFFSETS_MIN: Final = 4
RUN_OFFSETS: Final = (1, 3, 6)
"""The same where each sample is a run: few, since only values that inference does not tell depend on them."""
JOINED_MAX: Final = 32
"""Open dims of which a Reshape may have joined two: 528 pairs, a millisecond for each dim that is no such product."""
ROUNDING: Final = 1e-9
OPEN_DIMS_MAX: Final = 8
"""Further ones are taken to stay as they are."""
BY: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 64)

Sizes = tuple[int, ...]
Shapes = Mapping[str, tuple[int, ...]]
Powers = tuple[tuple[int, int], ...]
"""A product of powers: (number of the variable, power ≥ 1), …"""


Show = Callable[[Sizes, Sequence[str]], Shapes]
"""Runs the whole at these sizes and tells the shapes of these values, as far as it could."""


def growth(model: Model, cuts: Sequence[Cut], at: Sizes, show: Show = lambda sizes, names: {}) -> Growth | None:
    """The functions of a settled model, its shapes being those at the sizes `at`; None where no dim is open, or where
    nothing computes with the inputs: an output may be an input or a constant.

    `show`: asked at sizes around `at` for the values that inference does not tell.
    """
    dims = open_dims(model.inputs)
    if not dims or not model.nodes:
        return None
    looks = _looks(model, dims, at, show)
    extents = _Extents(looks)
    input_elements = sum(math.prod(shape) for shape in shapes_at(model.inputs, dims, at).values())

    def elements(name: str) -> Elements:
        known = extents.of(name)
        if known is not None:
            return Elements(extents=known)
        return Elements(per_input_element=math.prod(model.shapes.get(name, ())) / max(input_elements, 1))

    monomials, coefficients = _work(model, looks, input_elements)
    place_of = {node.bit: place for place, node in enumerate(model.nodes)}
    heads = {
        cut.id: CutGrowth(
            head_work=_summed(coefficients, [place for bit, place in place_of.items() if cut.mask >> bit & 1]),
            crossing=tuple(elements(name) for name in (*cut.boundary, *cut.tail_inputs)),
        )
        for cut in cuts
    }
    outputs = tuple(elements(name) for name in model.output_names)
    return Growth(
        monomials=monomials,
        extents=tuple(extents.known),
        whole_work=_summed(coefficients, range(len(model.nodes))),
        outputs=outputs,
        cuts=heads,
    )


def _looks(model: Model, dims: tuple[OpenDim, ...], at: Sizes, show: Show) -> list[_Look]:
    """By inference, and where it does not tell all, by runs."""

    tell = shape_teller(model.source)

    def inferred(sizes: Sizes) -> Shapes:
        return tell(shapes_at(model.inputs, dims, sizes))

    count = max(OFFSETS_MIN, min(len(OFFSETS), SAMPLED_NODES_MAX // max(len(model.nodes), 1)))
    first = _Look(model, dims, at, inferred, stride=STRIDE, offsets=OFFSETS[:count])
    untold = [name for name in model.values if not first.tells(name)]
    if not untold or not (shown := show(at, untold)):
        return [first]

    def run(sizes: Sizes) -> Shapes:
        return {**inferred(sizes), **(shown if sizes == at else show(sizes, untold))}

    return [first, _Look(model, dims, at, run, stride=1, offsets=RUN_OFFSETS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    sizes: Sizes
    shapes: Shapes


class _Look:
    """A model's shapes at chosen sizes, as far as `shapes_of` tells them.

    `base`: a multiple of `stride` for each open dim, the size in `at` where the model takes no other one. `along`: for
    each group of dims that can vary, samples at twice and three times the base of it alone. `odd`: with all groups
    `offsets` above it.
    """

    def __init__(
        self,
        model: Model,
        dims: tuple[OpenDim, ...],
        at: Sizes,
        shapes_of: Callable[[Sizes], Shapes],
        *,
        stride: int,
        offsets: Sequence[int],
    ) -> None:
        self._model, self._shapes_of = model, shapes_of
        self._seen: dict[Sizes, _Sample] = {}
        told = self._told(self._sample(at))
        sizes = list(at)
        held: list[int] = []
        groups: list[tuple[int, ...]] = []
        for dim in range(min(len(dims), OPEN_DIMS_MAX)):
            rounded = _rounded(sizes, (dim,), stride)
            # Twice that, too: the rounded size may be the one it has.
            if min(self._told(self._sample(_grown(rounded, (dim,), times))) for times in (1, 2)) >= told:
                sizes = rounded
                groups.append((dim,))
            else:
                held.append(dim)
        # Exports that leave names off write the length of ids and mask apart: they only vary together.
        for together in _alike(held, dims, at):
            rounded = _rounded(sizes, together, stride)
            if len(together) > 1 and self._told(self._sample(tuple(rounded))) >= told:
                sizes = rounded
                groups.append(together)
        self.base = self._sample(tuple(sizes))
        told = self._told(self.base)
        self.along: dict[tuple[int, ...], tuple[_Sample, _Sample]] = {}
        for group in groups:
            twice, thrice = (self._sample(_grown(sizes, group, times)) for times in (2, 3))
            if min(self._told(twice), self._told(thrice)) >= told:
                self.along[group] = twice, thrice
        odd = [self._sample(self._shifted(sizes, offset)) for offset in offsets]
        self.odd = [sample for sample in odd if self._told(sample) >= told]

    @property
    def names(self) -> list[str]:
        """Values whose shape is known in every sample."""
        return [name for name in self._model.values if self.tells(name)]

    @property
    def every(self) -> list[_Sample]:
        return [*self.straight, *self.odd]

    @property
    def straight(self) -> list[_Sample]:
        """The base, then two samples for each group in the order of `along`."""
        return [self.base, *(sample for pair in self.along.values() for sample in pair)]

    def tells(self, name: str) -> bool:
        """Whether the value's shape is known in every sample."""
        return all(name in sample.shapes for sample in self.every)

    def _sample(self, sizes: Sizes) -> _Sample:
        found = self._seen.get(sizes)
        if found is None:
            found = self._seen[sizes] = _Sample(sizes=sizes, shapes=self._shapes_of(sizes))
        return found

    def _told(self, sample: _Sample) -> int:
        return sum(name in sample.shapes for name in self._model.values)

    def _shifted(self, sizes: Sequence[int], offset: int) -> Sizes:
        """Every group by another offset, so that one sample tells of all."""
        shifted = list(sizes)
        for number, group in enumerate(self.along):
            for dim in group:
                shifted[dim] += offset * (2 * number + 1) % STRIDE
        return tuple(shifted)


def _rounded(sizes: Sequence[int], group: Sequence[int], stride: int) -> list[int]:
    """The dims of the group at the next multiple of `stride`."""
    return [max(-(-size // stride), 1) * stride if dim in group else size for dim, size in enumerate(sizes)]


def _grown(sizes: Sequence[int], group: Sequence[int], times: int) -> Sizes:
    return tuple(size * times if dim in group else size for dim, size in enumerate(sizes))


def _alike(held: Sequence[int], dims: Sequence[OpenDim], at: Sizes) -> list[tuple[int, ...]]:
    """Dims of the same axis and size."""
    groups: dict[tuple[int, int], list[int]] = {}
    for dim in held:
        groups.setdefault((dims[dim].axis, at[dim]), []).append(dim)
    return [tuple(together) for together in groups.values()]


class _Extents:
    """Explains dims of values; `known` holds each explanation once."""

    def __init__(self, looks: Sequence[_Look]) -> None:
        self._pools = [(look, _pool(look)) for look in looks]
        self._numbers: dict[Extent, int] = {}

    @property
    def known(self) -> list[Extent]:
        return list(self._numbers)

    def of(self, name: str) -> tuple[int, ...] | None:
        """Numbers of the extents whose product the value's elements are; None where that is not known."""
        for look, pool in self._pools:
            found = [_factors(values, pool) for values in _dims_of(look, name)] if look.tells(name) else [None]
            if None not in found:
                return tuple(self._number(extent) for factors in found for extent in factors or ())
        return None

    def _number(self, extent: Extent) -> int:
        return self._numbers.setdefault(extent, len(self._numbers))


def _pool(look: _Look) -> dict[Sizes, Extent]:
    """All dims of all values that can be explained, by their samples."""
    distinct = dict.fromkeys(values for name in look.names for values in _dims_of(look, name))
    explained = {values: _explain(look, values) for values in distinct}
    return {values: extent for values, extent in explained.items() if extent is not None}


def _dims_of(look: _Look, name: str) -> list[Sizes]:
    """For each dim of a value that is told its sizes in all samples."""
    shapes = [sample.shapes[name] for sample in look.every]
    if len({len(shape) for shape in shapes}) != 1:
        return [(-1,)]  # its rank varies: nothing explains it
    return list(zip(*shapes, strict=True))


def _factors(values: Sizes, pool: Mapping[Sizes, Extent]) -> tuple[Extent, ...] | None:
    """What explains a dim: one extent, or, where a Reshape has joined two, both and a constant."""
    if (found := pool.get(values)) is not None:
        return (found,)
    open_ones = [(np.array(samples), extent) for samples, extent in pool.items() if extent.steps][:JOINED_MAX]
    wanted = np.array(values)
    for place, (one, first) in enumerate(open_ones):
        for other, second in open_ones[place:]:
            product = one * other
            if product.shape != wanted.shape or not product.all():
                continue
            factor = int(wanted[0] // product[0])
            if factor and (product * factor == wanted).all():
                return first, second, Extent(factor)
    return None


def _explain(look: _Look, values: tuple[int, ...]) -> Extent | None:
    """The extent that gives these values at the samples of `look.every`; None where none of its form does."""
    if values == (-1,):
        return None
    if len(set(values)) == 1:
        return Extent(values[0])
    sizes = [sample.sizes for sample in look.every]
    base = look.base.sizes
    slopes: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(look.along):
        dim, rise = group[0], values[1 + 2 * number] - values[0]
        if rise:
            slopes[dim] = rise, base[dim]
    forms: list[tuple[Step, ...]] = []
    if len(slopes) == 1:
        [(dim, (rise, run))] = slopes.items()
        forms = [(Step(dim, round(rise * by / run), add, by),) for by in BY for add in range(by)]
    elif all(rise % run == 0 for rise, run in slopes.values()):
        forms = [tuple(Step(dim, rise // run, 0, 1) for dim, (rise, run) in slopes.items())]
    for steps in forms:
        extent = Extent(values[0] - Extent(0, steps).at(base), steps)
        if all(extent.at(one) == value for one, value in zip(sizes, values, strict=True)):
            return extent
    return None


def _work(model: Model, looks: Sequence[_Look], input_elements: int) -> tuple[tuple[Powers, ...], Floats]:
    """(monomials, [node, monomial] coefficients) of the estimated operations of each node."""
    here = node_flops(model)
    as_inputs: Powers = ((len(looks[0].base.sizes), 1),)
    rows: list[Mapping[Powers, float]] = [{as_inputs: flops / max(input_elements, 1)} for flops in here]
    for look in reversed(looks):  # the first one's word counts most
        base, *along = [node_flops(model, sample.shapes) for sample in look.straight]
        told = set(look.names)
        for place, node in enumerate(model.nodes):
            if base[place] <= 0.0 or not told.issuperset((*node.reads, *node.makes)):
                continue
            terms: Mapping[Powers, float] = {(): base[place]}
            for number, group in enumerate(look.along):
                quadratic = _quadratic(base[place], along[2 * number][place], along[2 * number + 1][place])
                terms = _times(terms, group[0], quadratic, look.base.sizes[group[0]])
            rows[place] = terms
    monomials = tuple(dict.fromkeys(powers for row in rows for powers in row))
    return monomials, np.array([[row.get(powers, 0.0) for powers in monomials] for row in rows])


def _quadratic(once: float, twice: float, thrice: float) -> tuple[float, float, float]:
    """Coefficients of the quadratic in t that is 1, twice / once and thrice / once at t = 1, 2, 3."""
    y2, y3 = twice / once, thrice / once
    c = (1.0 - 2.0 * y2 + y3) / 2.0
    b = y2 - 1.0 - 3.0 * c
    return 1.0 - b - c, b, c


def _times(terms: Mapping[Powers, float], dim: int, quadratic: Sequence[float], base: int) -> dict[Powers, float]:
    """Terms times a quadratic in size / base of a dim; what rounding left of a zero is dropped."""
    return {
        ((*powers, (dim, power)) if power else powers): value * factor / base**power
        for powers, value in terms.items()
        for power, factor in enumerate(quadratic)
        if abs(factor) > ROUNDING
    }


def _summed(coefficients: Floats, rows: Sequence[int]) -> tuple[float, ...]:
    return tuple(coefficients[list(rows)].sum(axis=0).tolist())
