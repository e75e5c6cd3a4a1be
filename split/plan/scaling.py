"""What a request's sizes do to the costs of each plan, as ratios to the sizes that were profiled.

Times: the work of a head, a tail or the whole is known at any size (`graph/growth.py`); its time was measured at one
size or two. Two give a line in the work: what a call costs anyway, and what an operation costs. Where that would cost
less than nothing at no work (small work is done in caches), the line is bent at the lesser size. One size gives
proportion.

Bytes: raw payloads as the payload format lays them out, exact where the growth is; those of other codecs in proportion
to what the codec makes of the elements.

A ratio that is wrong costs a worse plan: what is sent, and what may be sent, is checked again by the bytes it has.

All plans are worked out in a few products of arrays, since each request of a camera or a text may have its own size:
sizes → extents of tensors → products of them (elements of each tensor, monomials of the work) → ratios.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from split.graph.card import ModelCard
from split.graph.growth import Elements, Growth
from split.graph.products import Factors, Products
from split.ids import CutId
from split.plan.observation import Floats
from split.plan.plan import Placement, Plan
from split.profiles.measured import CodecCosts, ModelProfile
from split.tensor import TensorSpec

SIZES_KEPT_MAX: Final = 64
"""Sizes whose ratios are kept, those used last: 4 KB each for 100 plans."""
ALIGNMENT: Final = 64
"""Each tensor of a payload begins at a multiple of it (`split/codec/payload.py`)."""
LEAST: Final = 1e-9
"""Instead of no work, no time and no bytes, which have no ratio."""
_LEAST: Final = np.array(LEAST)
"""As numpy need not convert it."""
_CODED_BYTES: Final = {"fp16": 2, "int8": 1}
"""Of an element of a float tensor."""

Sizes = tuple[int, ...]


class Ratio(IntEnum):
    """Rows of what `Scaling.at` gives: costs at some sizes over costs at the profiled ones."""

    SAME = 0
    """1 everywhere."""
    HEAD = 1
    TAIL = 2
    UP = 3
    DOWN = 4


class Scaling:
    """The ratios of the plans of one model. `plans`: of the profile's cuts."""

    def __init__(self, card: ModelCard, profile: ModelProfile, plans: Sequence[Plan]) -> None:
        self._kept: OrderedDict[Sizes, Floats] = OrderedDict()
        self._here = profile.sizes
        growth = card.growth if profile.sizes else None
        self._growth = growth
        if growth is None:
            return
        self._plans = len(plans)
        self._products = products = Products(growth, card.inputs)
        payloads = _Payloads(
            products,
            [_crossing(card, growth, plan) for plan in plans] + [_replied(card, growth, plan) for plan in plans],
        )
        monomials = [products.of_monomial(powers) for powers in growth.monomials]
        products.want([(), *monomials, (), *payloads.products])
        self._work = 1 + len(monomials)
        self._units = np.concatenate([np.ones(self._work + 1), payloads.units])
        here, *other = [self._terms(sizes) for sizes in (profile.sizes, profile.other_sizes) if sizes]
        segments = _Segments(profile, growth, plans, [work[1:] for work, _ in (here, *other)])
        self._lines, self._of_plan = segments.lines, segments.of_plan
        constants, by = payloads.relative_to(here[1][1:], [*_raw_bytes(profile, plans), *[0] * len(plans)])
        # Each row once: many plans send alike, and nearly all are answered alike.
        self._payloads, rows = np.unique(np.column_stack([constants, by]), axis=0, return_inverse=True)
        self._of_payload = rows.reshape(2, -1)
        """[up or down, plan]: the row of `_payloads`."""

    def at(self, sizes: Sizes) -> Floats | None:
        """[Ratio, plan] for a request of these sizes of the open dims, all positive; None where nothing changes. ()
        stands for the profiled sizes. Of what a plan does not run, HEAD and TAIL say whatever the whole's is."""
        if self._growth is None or not sizes or sizes == self._here:
            return None
        if (known := self._kept.get(sizes)) is not None:
            self._kept.move_to_end(sizes)
            return known
        work, tensors = self._terms(sizes)
        segments = np.maximum.reduce(self._lines.dot(work).reshape(3, -1))
        found = np.empty((len(Ratio), self._plans))
        found[Ratio.SAME] = 1.0
        found[Ratio.HEAD : Ratio.UP] = segments.take(self._of_plan)
        found[Ratio.UP :] = self._payloads.dot(tensors).take(self._of_payload)
        self._kept[sizes] = np.maximum(found, _LEAST, out=found)
        if len(self._kept) > SIZES_KEPT_MAX:
            self._kept.popitem(last=False)
        return found

    def _terms(self, sizes: Sizes) -> tuple[Floats, Floats]:
        """1 and the monomials of the work; 1 and the tensors of the payloads in whole units of what each ends at."""
        terms = self._products.at(sizes)
        terms *= self._units
        payloads = terms[self._work :]
        np.ceil(payloads, out=payloads)
        return terms[: self._work], payloads


def _raw_bytes(profile: ModelProfile, plans: Sequence[Plan]) -> list[int]:
    """Of each plan's payload as profiled, with its header; 0 of other codecs."""
    known: dict[CutId | None, Sequence[CodecCosts]] = {cut.cut: cut.codecs for cut in profile.cuts}
    known[None] = profile.input_codecs
    return [sum(codec.bytes for codec in known[plan.cut] if codec.codec == plan.codec == "raw") for plan in plans]


class _Segments:
    """Times of the whole, then of all heads, then of all tails, as lines in their work.

    Each is the larger of two lines, that through both measurements and that from what nothing costs to the measurement
    of less work: they are the same one unless the first would cost less than nothing at no work.
    """

    def __init__(
        self, profile: ModelProfile, growth: Growth, plans: Sequence[Plan], measured_at: Sequence[Floats]
    ) -> None:
        """`measured_at`: the monomials at the sizes that were measured: one or two."""
        known = [cut for cut in profile.cuts if cut.cut in growth.cuts]
        heads = np.array([growth.cuts[cut.cut].head_work for cut in known]).reshape(-1, len(growth.monomials))
        whole = np.array(growth.whole_work)
        coefficients = np.vstack([whole, heads, whole - heads])
        ms = [
            np.array([profile.whole_ms, *(cut.head_ms for cut in known), *(cut.tail_ms for cut in known)]),
            np.array([profile.other_whole_ms, *(c.other_head_ms for c in known), *(c.other_tail_ms for c in known)]),
        ]
        work = [np.maximum(coefficients @ monomials, LEAST) for monomials in measured_at]
        here, other = (work[0], ms[0]), (work[-1], ms[len(work) - 1])
        swapped = other[0] < here[0]
        work_low, ms_low = (np.where(swapped, b, a) for a, b in zip(here, other, strict=True))
        work_high, ms_high = (np.where(swapped, a, b) for a, b in zip(here, other, strict=True))
        apart = work_high > work_low
        rate = np.maximum(np.where(apart, ms_high - ms_low, ms_low), 0.0) / np.where(
            apart, work_high - work_low, work_low
        )
        at_nothing = np.maximum(ms_low - rate * work_low, 0.0)
        through_both = _line(ms_low - rate * work_low, rate, coefficients)
        from_nothing = _line(at_nothing, (ms_low - at_nothing) / work_low, coefficients)
        never_less = _line(at_nothing, np.zeros_like(rate), coefficients)  # where the work would be negative
        lines = np.stack([through_both, from_nothing, never_less])
        ms_here = np.maximum((lines @ [1.0, *measured_at[0]]).max(axis=0), LEAST)
        self.lines = (lines / ms_here[:, None]).reshape(-1, lines.shape[-1])
        """[line and segment, 1 and the monomials]: each segment's time over that at the first sizes is the largest."""
        place = {cut.cut: number for number, cut in enumerate(known, start=1)}
        head = np.array([place[plan.cut] if plan.cut is not None else 0 for plan in plans])
        self.of_plan = np.stack([head, np.where(head > 0, head + len(known), 0)])
        """[head or tail, plan]: the segment."""


def _line(at_nothing: Floats, rate: Floats, coefficients: Floats) -> Floats:
    """[segment, 1 and the monomials]"""
    return np.hstack([at_nothing[:, None], rate[:, None] * coefficients])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor of a payload."""

    elements: Elements | int
    """int: the input of this number."""
    coded_bytes: int
    """Of one element."""


class _Payloads:
    """Several payloads, given their tensors in order. Each tensor but the last ends at a multiple of `ALIGNMENT`."""

    def __init__(self, products: Products, payloads: Sequence[Sequence[_Part]]) -> None:
        tensors: dict[tuple[Factors, float, int], int] = {}
        rows = [
            [tensors.setdefault(_term(products, part, last=part is payload[-1]), len(tensors)) for part in payload]
            for payload in payloads
        ]
        self.products = [factors for factors, _, _ in tensors]
        self.units = np.array([units for _, units, _ in tensors], dtype=np.float64)
        """[tensor]: how many units each product stands for; those begun travel."""
        self._bytes = np.zeros((len(rows), len(tensors)))
        for number, row in enumerate(rows):
            for tensor in row:
                self._bytes[number, tensor] += 1.0
        self._bytes *= [unit for _, _, unit in tensors]

    def relative_to(self, here: Floats, with_header: Sequence[float]) -> tuple[Floats, Floats]:
        """([payload] constants, [payload, tensor] factors) of the bytes over those at `here`, [tensor] in units; 1
        where nothing travels. `with_header`: what each payload has there with its header, which does not grow; 0 where
        only the tensors are known."""
        tensors, known = self._bytes @ here, np.array(with_header, dtype=np.float64)
        total = np.where(known > 0.0, known, tensors)
        travels = total > 0.0
        constants = np.divide(total - tensors, total, out=np.ones_like(total), where=travels)
        return constants, self._bytes * np.divide(1.0, total, out=np.zeros_like(total), where=travels)[:, None]


def _term(products: Products, part: _Part, *, last: bool) -> tuple[Factors, float, int]:
    """(factors, units for each product of them, bytes of a unit)"""
    elements = part.elements
    factors, constant = products.of_input(elements) if isinstance(elements, int) else products.of_elements(elements)
    unit = 1 if last else ALIGNMENT
    return tuple(sorted(factors)), constant * part.coded_bytes / unit, unit


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
