"""What a request's sizes do to the costs of each plan, as ratios to the sizes that were profiled.

Times: the work of a head, a tail or the whole is known at any size (`graph/growth.py`); its time was measured at one
size or two. Two give a line in the work: what a call costs anyway, and what an operation costs. Where that would cost
less than nothing at no work (small work is done in caches), the line is bent at the lesser size. One size gives
proportion.

Bytes: raw payloads as the payload format lays them out, exact where the growth is; those of other codecs in proportion
to what the codec makes of the elements.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.graph.card import ModelCard
from split.graph.growth import Elements, Growth, open_dims, shapes_at
from split.ids import CutId
from split.plan.observation import Floats
from split.plan.plan import Placement, Plan
from split.profiles.measured import CodecCosts, ModelProfile
from split.tensor import TensorSpec

SIZES_KEPT_MAX: Final = 64
"""Sizes whose ratios are kept, those used last: 4 KB each for 100 plans."""
ALIGNMENT: Final = 64
"""Each tensor of a payload begins at a multiple of it (`split/codec/payload.py`)."""
_CODED_BYTES: Final = {"fp16": 2, "int8": 1}
"""Of an element of a float tensor."""

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """[plan]: costs at some sizes over costs at the profiled ones."""

    head: Floats
    tail: Floats
    finish: Floats
    up: Floats
    down: Floats


class Scaling:
    """The ratios of the plans of one model. `plans`: of the profile's cuts."""

    def __init__(self, card: ModelCard, profile: ModelProfile, plans: Sequence[Plan]) -> None:
        self._kept: OrderedDict[Sizes, Ratios] = OrderedDict()
        self._here = profile.sizes
        self._growth = card.growth if profile.sizes else None
        if self._growth is None:
            return
        self._inputs, self._dims = card.inputs, open_dims(card.inputs)
        self._segments = _Segments(profile, self._growth, plans, [self._variables(at) for at in _measured_at(profile)])
        self._up = _Payloads(_crossing(card, self._growth, plan) for plan in plans)
        self._down = _Payloads(_replied(card, self._growth, plan) for plan in plans)
        self._up_here, self._down_here = self._bytes(self._here)
        known: dict[CutId | None, Sequence[CodecCosts]] = {cut.cut: cut.codecs for cut in profile.cuts}
        known[None] = profile.input_codecs
        raw = [sum(codec.bytes for codec in known[plan.cut] if codec.codec == plan.codec == "raw") for plan in plans]
        self._raw_bytes: Floats = np.array(raw, dtype=np.float64)

    def at(self, sizes: Sizes) -> Ratios | None:
        """For a request of these sizes of the open dims; None where nothing changes. () stands for the profiled
        sizes."""
        if self._growth is None or not sizes or sizes == self._here:
            return None
        if (known := self._kept.get(sizes)) is not None:
            self._kept.move_to_end(sizes)
            return known
        up, down = self._bytes(sizes)
        raw = self._raw_bytes
        head, tail, finish = self._segments.ratios(self._variables(sizes))
        found = self._kept[sizes] = Ratios(
            head=head,
            tail=tail,
            finish=finish,
            # Beside its tensors a payload has a header, which does not grow.
            up=np.where(raw > 0.0, _over(raw + up - self._up_here, raw), _over(up, self._up_here)),
            down=_over(down, self._down_here),
        )
        if len(self._kept) > SIZES_KEPT_MAX:
            self._kept.popitem(last=False)
        return found

    def _variables(self, sizes: Sizes) -> Sizes:
        return (*sizes, sum(self._input_elements(sizes)))

    def _input_elements(self, sizes: Sizes) -> list[int]:
        return [math.prod(shape) for shape in shapes_at(self._inputs, self._dims, sizes).values()]

    def _bytes(self, sizes: Sizes) -> tuple[Floats, Floats]:
        """(payload, reply) of each plan, without headers."""
        assert self._growth is not None
        extents, inputs = self._growth.extents_at(sizes), self._input_elements(sizes)
        return self._up.nbytes(extents, inputs), self._down.nbytes(extents, inputs)


def _measured_at(profile: ModelProfile) -> list[Sizes]:
    return [profile.sizes, profile.other_sizes] if profile.other_sizes else [profile.sizes]


class _Segments:
    """Times of the whole, then of all heads, then of all tails, as lines in their work."""

    def __init__(
        self, profile: ModelProfile, growth: Growth, plans: Sequence[Plan], measured_at: Sequence[Sizes]
    ) -> None:
        self._growth = growth
        known = [cut for cut in profile.cuts if cut.cut in growth.cuts]
        heads = np.array([growth.cuts[cut.cut].head_work for cut in known]).reshape(-1, len(growth.monomials))
        whole = np.array(growth.whole_work)
        self._coefficients = np.vstack([whole, heads, whole - heads])
        ms = [
            np.array([profile.whole_ms, *(cut.head_ms for cut in known), *(cut.tail_ms for cut in known)]),
            np.array([profile.other_whole_ms, *(c.other_head_ms for c in known), *(c.other_tail_ms for c in known)]),
        ]
        work = [self._work(variables) for variables in measured_at]
        here, other = (work[0], ms[0]), (work[-1], ms[len(work) - 1])
        swapped = other[0] < here[0]
        self._work_low, self._ms_low = (np.where(swapped, b, a) for a, b in zip(here, other, strict=True))
        work_high, ms_high = (np.where(swapped, a, b) for a, b in zip(here, other, strict=True))
        apart = work_high > self._work_low
        run = np.where(apart, work_high - self._work_low, self._work_low)
        self._rate = np.maximum(np.where(apart, ms_high - self._ms_low, self._ms_low), 0.0) / run
        self._ms_here = np.maximum(self._ms(work[0]), _LEAST)
        place = {cut.cut: number for number, cut in enumerate(known, start=1)}
        head = [place[plan.cut] if plan.cut is not None else 0 for plan in plans]
        self._of_head = np.array(head)
        self._of_tail = np.array([number + len(known) if number else 0 for number in head])

    def ratios(self, variables: Sizes) -> tuple[Floats, Floats, Floats]:
        """(head, tail, what finishes it here) of each plan; of what a plan does not run, whatever the whole's is."""
        ratio = self._ms(self._work(variables)) / self._ms_here
        return ratio[self._of_head], ratio[self._of_tail], ratio[self._of_tail]

    def _work(self, variables: Sizes) -> Floats:
        work: Floats = self._coefficients @ self._growth.powers(variables)
        return np.maximum(work, _LEAST)

    def _ms(self, work: Floats) -> Floats:
        at_nothing = np.maximum(self._ms_low - self._rate * self._work_low, 0.0)
        below = at_nothing + (self._ms_low - at_nothing) * work / self._work_low
        found: Floats = np.where(work < self._work_low, below, self._ms_low + self._rate * (work - self._work_low))
        return found


_LEAST: Final = 1e-9
"""Instead of no work and no time, which have no ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor of a payload."""

    elements: Elements | int
    """int: the input of this number."""
    coded_bytes: int
    """Of one element."""


class _Payloads:
    """Bytes of several payloads, given their tensors in order."""

    def __init__(self, payloads: Iterable[Sequence[_Part]]) -> None:
        rows = [_numbered(row) for row in payloads]
        columns = {key: column for column, key in enumerate(dict.fromkeys(key for row in rows for key in row))}
        self._tensors = [elements for elements, _ in columns]
        self._coded = np.zeros((len(rows), len(columns)))
        self._last = np.zeros((len(rows), len(columns)), dtype=np.bool_)
        for number, row in enumerate(rows):
            for key, part in row.items():
                self._coded[number, columns[key]] = part.coded_bytes
            if row:
                self._last[number, columns[next(reversed(row))]] = True

    def nbytes(self, extents: Sequence[int], input_elements: Sequence[int]) -> Floats:
        """[payload]; each tensor but the last ends at a multiple of `ALIGNMENT`."""
        total = sum(input_elements)
        counts = np.array(
            [
                input_elements[tensor] if isinstance(tensor, int) else tensor.at(extents, total)
                for tensor in self._tensors
            ],
            float,
        )
        plain = self._coded * counts
        aligned = np.where(self._last, plain, np.ceil(plain / ALIGNMENT) * ALIGNMENT)
        found: Floats = aligned.sum(axis=1)
        return found


def _numbered(parts: Sequence[_Part]) -> dict[tuple[Elements | int, int], _Part]:
    """The parts by how many elements they have, and how many before them have as many."""
    found: dict[tuple[Elements | int, int], _Part] = {}
    for part in parts:
        before = sum(part.elements == elements for elements, _ in found)
        found[part.elements, before] = part
    return found


def _crossing(card: ModelCard, growth: Growth, plan: Plan) -> list[_Part]:
    """What travels up."""
    if plan.codec in (None, "encoded"):
        return []
    if plan.cut is None:
        return [_Part(elements=at, coded_bytes=_coded(spec, plan.codec)) for at, spec in enumerate(card.inputs)]
    cut = card.cut(plan.cut)
    inputs = {spec.name: spec for spec in card.inputs}
    specs = (*cut.boundary, *(inputs[name] for name in cut.tail_inputs))
    return [
        _Part(elements=elements, coded_bytes=_coded(spec, plan.codec))
        for spec, elements in zip(specs, growth.cuts[cut.id].crossing, strict=True)
    ]


def _replied(card: ModelCard, growth: Growth, plan: Plan) -> list[_Part]:
    """What travels down: outputs that the tail makes."""
    if plan.placement is Placement.LOCAL:
        return []
    made = None if plan.cut is None else card.cut(plan.cut).tail_outputs
    return [
        _Part(elements=elements, coded_bytes=spec.element_bytes)
        for spec, elements in zip(card.outputs, growth.outputs, strict=True)
        if made is None or spec.name in made
    ]


def _coded(spec: TensorSpec, codec: str | None) -> int:
    return _CODED_BYTES.get(codec or "", spec.element_bytes) if spec.dtype.startswith("FP") else spec.element_bytes


def _over(now: Floats, here: Floats) -> Floats:
    """The ratio; 1 where nothing travels."""
    found: Floats = np.divide(now, here, out=np.ones_like(now), where=here > 0.0)
    return found
