"""One cut, open, becomes tables and a curve.

The tables that are kept come from all sources. The curve is measured by cross-validation (Stone 1974): sources are
dealt into folds, each request is coded with tables that come from the other folds alone, so nothing is measured on what
it was learnt from, every source is measured on, and what is kept, learnt from more, is a little better than its curve.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.codec.calibration import (
    GRID_ONE,
    GRID_PER_OCTAVE,
    LAYOUTS,
    LEVEL_MAX,
    Curve,
    CutTables,
    TensorTables,
    WeighedBy,
    step_of,
)
from split.codec.klt import BoundaryTables, encode_klt
from split.codec.payload import decode
from split.graph.cuts import Cut
from split.profiles.contract import Fidelity
from split.profiles.measured import Point
from split.runtime.engine import Segment
from split.tensor import Array, Tensors, TensorSpec
from split.workbench.curves import curve, point, trace
from split.workbench.klt_tables import Scales, Statistics, klt_of, plain_sensitivity
from split.workbench.sensitivity import Probed, gram
from split.workbench.sources import Request
from split.workbench.worth_coding import layout_of

log = logging.getLogger(__name__)

DECODED_BYTES_MAX: Final = 1 << 40
FRAMING_BYTES: Final = 64
"""What is not held against a payload."""
KEPT_BYTES_MAX: Final = 192 << 20
"""Of what crosses for the requests held out; what is more is made again at each level."""
LAYOUT_BY: Final = 3
"""Requests by which a layout is told."""
_NO_DIGEST: Final = "0" * 64
"""Of tables that no file holds yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A cut's two halves, open."""

    cut: Cut
    specs: tuple[TensorSpec, ...]
    """Of what travels, in the order in which it does: the boundary, then the inputs the tail needs."""
    node_bitmap: str
    head: Segment
    tail: Segment
    weights: Callable[[str, int], Array | None]
    """What the tail's weights tell of a boundary tensor whose channels are on that axis (`next_weights.py`)."""

    def crossing(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """What travels, and the model's outputs that the head has."""
        made = self.head.run({name: inputs[name] for name in self.cut.head_inputs})
        travels = {name: made[name] for name in self.cut.boundary}
        travels |= {name: inputs[name] for name in self.cut.tail_inputs}
        return travels, {name: made[name] for name in self.cut.head_outputs if name in made}

    def finish(self, travelled: Tensors) -> Tensors:
        """The outputs that the tail makes."""
        return self.tail.run({name: travelled[name] for name in self.tail.inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A request that a curve is measured on."""

    source: int
    """Its number; the fold is that modulo how many folds there are."""
    inputs: Request
    expected: Tensors
    """The unsplit model's outputs."""
    items: int = 1
    """In its batch."""
    sizes: tuple[int, ...] = ()
    """Of the open dims."""


class CodedCut:
    """`learn`, then `tables` and `curve`."""

    def __init__(self, halves: Halves, folds: int) -> None:
        """`folds`: how many the sources were dealt into, at least 2."""
        self._halves = halves
        self._folds = folds
        self._seen: list[tuple[int, Tensors]] = []
        self._layouts: dict[str, str] = {}
        self._grams: list[tuple[int, Mapping[str, Array]]] = []
        self._powers: dict[str, float] = {}
        self._unasked: dict[str, tuple[Array, WeighedBy]] = {}

    def learn(
        self,
        requests: Sequence[tuple[int, Request]],
        *,
        measure: str,
        probes: int,
        has_time: Callable[[], bool],
    ) -> None:
        """See what crosses for these requests (each with the number of its source), and how the outputs move with it
        for the first `probes` of them, or for as many as there is time."""
        self._seen = [(source % self._folds, self._halves.crossing(request())[0]) for source, request in requests]
        for spec in self._halves.specs:
            tensors = [seen[spec.name] for _, seen in self._seen]
            layout = layout_of(tensors[:LAYOUT_BY], spec) if spec.name in self._halves.cut.boundary else ""
            if layout and all(np.isfinite(tensor).all() for tensor in tensors):
                self._layouts[spec.name] = layout
        probed = [
            Probed(name=name, layout=known.layout, deviation=known.deviation)
            for name, known in self._statistics(-1).items()
        ]
        for number, (fold, crossing) in enumerate(self._seen[:probes]):
            for found in gram(crossing, probed, self._halves.finish, measure, number):
                if found is not None:
                    self._grams.append((fold, found))
                elif not has_time():
                    break
            if not has_time():
                break
        self._log_how(min(probes, len(self._seen)))

    def _log_how(self, wanted: int) -> None:
        """By what the transforms go, of `wanted` inputs that were to be asked."""
        cut, asked = self._halves.cut.id, len(self._grams)
        if any(self._power(name) > 0 for name in self._layouts):
            if asked < wanted:
                log.info("cut=%s: there was time to ask %d of %d inputs how the outputs move", cut, asked, wanted)
            return
        by = {self._unasked_sensitivity(name)[1] for name in self._layouts}
        log.warning(
            "cut=%s: %d of %d inputs were asked how the outputs move with it, and none told; its transform goes by %s",
            cut,
            asked,
            wanted,
            "the weights of the layers that read it" if by == {"weights"} else "variance alone",
        )

    def tables(self, without: int = -1) -> CutTables:
        """From all that was learnt but the fold `without`."""
        statistics = self._statistics(without)
        found = []
        for spec in self._halves.specs:
            known = statistics.get(spec.name)
            if known is None:
                found.append(TensorTables(spec=spec, klt=None))
                continue
            sensitivity, by = self._sensitivity(spec.name, known, without)
            scales = Scales(klt_of(known, sensitivity, exact=by == "weights"))
            for fold, tensors in self._seen:
                if fold != without:
                    scales.add(tensors[spec.name])
            found.append(TensorTables(spec=spec, klt=scales.klt(), weighed_by=by))
        return CutTables(tensors=tuple(found), node_bitmap=self._halves.node_bitmap)

    def curve(
        self, held_out: Sequence[HeldOut], fidelity: Fidelity, *, has_time: Callable[[], bool] = lambda: True
    ) -> Curve:
        """Rate against fidelity around that of the contract, at as many levels as there is time."""
        coders = [BoundaryTables(self.tables(fold), _NO_DIGEST) for fold in range(self._folds)]
        crossing = self._crossing_again(held_out)

        def at(level: int) -> Point:
            sizes, outputs = [], []
            for request, (travels, made) in zip(held_out, crossing(), strict=True):
                coder = coders[request.source % self._folds]
                payload = b"".join(encode_klt(travels, coder, level))
                sizes.append(len(payload))
                back = decode(payload, max_bytes=DECODED_BYTES_MAX, tables=coder)
                outputs.append(made | self._halves.finish(back))
            return point(
                level,
                sizes,
                outputs,
                [request.expected for request in held_out],
                sources=[request.source for request in held_out],
                items=[request.items for request in held_out],
                contract=fidelity,
            )

        components = sum(one.klt.components for one in coders[0].tensors if one.klt is not None)
        # Noise of variance Δ²/12 in each component costs Δ²/24 of it (`sensitivity.py`), in units of half a squared
        # difference: as the other measures have it near 0.
        squared = fidelity.bound**2 / 2 if fidelity.measure in ("relative", "rms", "boxes") else fidelity.bound
        step = max(math.sqrt(24 * squared / max(components, 1)), step_of(0))
        start = round(GRID_ONE + GRID_PER_OCTAVE * math.log2(step))
        points = trace(
            at,
            start=min(max(start, 0), LEVEL_MAX),
            coarsest=LEVEL_MAX,
            finest=0,
            measure=fidelity.name,
            bound=fidelity.bound,
            has_time=has_time,
            bytes_max=FRAMING_BYTES + _nbytes(next(crossing())[0]) / 4,  # int8, which is closer
        )
        return curve(points, len(held_out))

    def _crossing_again(self, held_out: Sequence[HeldOut]) -> Callable[[], Iterator[tuple[Tensors, Tensors]]]:
        """`Halves.crossing` of each request, as often as it is asked for."""
        kept: list[tuple[Tensors, Tensors]] = []
        left = KEPT_BYTES_MAX

        def each() -> Iterator[tuple[Tensors, Tensors]]:
            nonlocal left
            for number, request in enumerate(held_out):
                if number < len(kept):
                    yield kept[number]
                    continue
                found = self._halves.crossing(request.inputs())
                size = sum(map(_nbytes, found))
                if number == len(kept) and size <= left:
                    kept.append(found)
                    left -= size
                yield found

        return each

    def _statistics(self, without: int) -> dict[str, Statistics]:
        found = {name: Statistics(layout=layout) for name, layout in self._layouts.items()}
        for fold, tensors in self._seen:
            if fold != without:
                for name, statistics in found.items():
                    statistics.add(tensors[name])
        return found

    def _sensitivity(self, name: str, statistics: Statistics, without: int) -> tuple[Array, WeighedBy]:
        """M, and by what it is told: the mean over the requests asked, in the same units for every fold (a level means
        the same in all of them); what stands for it where none was asked, or nothing moves the outputs."""
        covariance = statistics.covariance()
        asked = [found[name] for fold, found in self._grams if fold != without]
        found = np.asarray(np.mean(asked, axis=0)) if asked else np.zeros_like(covariance)
        by: WeighedBy = "outputs"
        if not np.trace(found @ covariance) > 0:
            found, by = self._unasked_sensitivity(name)
        power, of_all = float(np.trace(found @ covariance)), self._power(name)
        return (found * (of_all / power) if min(power, of_all) > 0 else found), by

    def _unasked_sensitivity(self, name: str) -> tuple[Array, WeighedBy]:
        """What stands for M, the same for every fold: the weights that read the tensor, else variance alone; in units
        in which all channels together have tr(M Σ) = 1 each on average."""
        if name not in self._unasked:
            covariance = self._statistics(-1)[name].covariance()
            found = self._halves.weights(name, LAYOUTS[self._layouts[name]][1])
            power = 0.0 if found is None else float(np.trace(found @ covariance))
            if found is not None and 0 < power < math.inf:
                self._unasked[name] = found * (len(found) / power), "weights"
            else:
                self._unasked[name] = plain_sensitivity(covariance), "variance"
        return self._unasked[name]

    def _power(self, name: str) -> float:
        """tr(M Σ) over all that was learnt; 0 where no request was asked."""
        if name not in self._powers:
            asked = [found[name] for _, found in self._grams] or [np.zeros(1)]
            covariance = self._statistics(-1)[name].covariance()
            self._powers[name] = float(np.sum(np.mean(asked, axis=0) * covariance))  # both are symmetric
        return self._powers[name]


def _nbytes(tensors: Tensors) -> int:
    return sum(array.nbytes for array in tensors.values())
