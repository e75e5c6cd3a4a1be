"""Runs and times the two halves of each cut, beside the whole; a half that gives something else costs its cut.

Only one cut's halves are open at a time. Where a slow model leaves no time to time all of them, the times of the others
are estimated from those that were (`split/plan/costs.py`) and marked so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from split.codec.golden import SAME, sample
from split.errors import CodecError, EngineFailed, InvalidModel, InvalidRequest
from split.graph.card import CutCard
from split.ids import CutId
from split.plan.costs import CutTimes, MeasuredCut
from split.profiles.contract import Fidelity
from split.profiles.measured import CodecCosts, CutCosts
from split.runtime.engine import Segment
from split.runtime.profiler import measure_interleaved
from split.tensor import Tensors, worst_difference
from split.workbench.codec_costs import Coding, codec_costs, joined
from split.workbench.golden import Golden
from split.workbench.optimise import Opener, open_halves
from split.workbench.spending import Care, Spending

log = logging.getLogger(__name__)


def runs(segment: Segment, feeds: Tensors) -> Callable[[], object]:
    """What is timed: a run of the segment on these inputs."""
    return lambda: segment.run(feeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRequest:
    """The first golden request at other sizes of the open dims, and the whole on it."""

    sizes: tuple[int, ...]
    inputs: Tensors
    outputs: Tensors
    whole_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Lower quartiles, measured in turns; `other_…` at other sizes, 0 without any."""

    whole_ms: float
    head_ms: float
    tail_ms: float
    other_whole_ms: float
    other_head_ms: float
    other_tail_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halves:
    """A cut's halves, open, found to compute what the whole computes."""

    time: Mapping[str, Callable[[], Any]]
    codecs: tuple[CodecCosts, ...]
    boundary_bytes: int
    other_boundary_bytes: int
    run: bytes
    """What the golden inputs give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found out about a cut that computes what the whole computes; `times` None where they were not taken."""

    codecs: tuple[CodecCosts, ...]
    boundary_bytes: int
    other_boundary_bytes: int
    run: bytes
    times: _Times | None


def measure_cuts(
    order: Sequence[CutCard],
    spending: Spending,
    *,
    run: Callable[[CutCard, contextlib.ExitStack], _Halves],
    time_halves: Callable[[_Halves], _Times],
    on_progress: Callable[[str, float], None],
    spent_s: Callable[[], float],
) -> dict[CutId, Found]:
    """What is found out about each cut, in this order, with the care that the budget leaves for it; one that fails is
    left out with a warning, and so are those there is no time for."""
    found: dict[CutId, Found] = {}
    for number, cut in enumerate(order):
        begun_s = spent_s()
        care = spending.care(begun_s, len(order) - number)
        if care is Care.NONE:
            log.warning(
                "%d of %d cuts are left out: a run takes %.0f ms, so that measuring them would take more than %.0f s",
                len(order) - number,
                len(order),
                spending.whole_ms,
                spending.budget_s,
            )
            break
        on_progress(f"cut {number + 1} of {len(order)}", 0.05 + 0.95 * number / len(order))
        try:
            with contextlib.ExitStack() as opened:
                halves = run(cut, opened)
                run_at_s = spent_s()
                times = time_halves(halves) if care is Care.MEASURED else None
        except (InvalidModel, InvalidRequest, EngineFailed, CodecError) as error:
            log.warning("cut=%s is left out: %s", cut.id, error)
            continue
        found[cut.id] = Found(
            codecs=halves.codecs,
            boundary_bytes=halves.boundary_bytes,
            other_boundary_bytes=halves.other_boundary_bytes,
            run=halves.run,
            times=times,
        )
        timing_s = spent_s() - run_at_s if times is not None else None
        spending.took(run_s=run_at_s - begun_s, timing_s=timing_s)
    return found


def run_cut(
    cut: CutCard,
    folder: Path,
    golden: Sequence[Golden],
    other: OtherRequest | None,
    compared: Tensors,
    open_best: Opener,
    opened: contextlib.ExitStack,
    calibrated: Mapping[str, Coding] | None = None,
    contract: Fidelity | None = None,
) -> _Halves:
    """The cut's halves, run on every request and compared; `opened` closes them. `calibrated`, `contract`: as for
    `codec_costs`."""
    head, tail, _ = open_halves(cut, folder, golden[0].inputs, open_best)
    opened.callback(head.close)
    opened.callback(tail.close)
    requests = [(request.inputs, request.outputs) for request in golden]
    if other is not None:
        requests.append((other.inputs, other.outputs))
    travels = [_compare(cut, head, tail, inputs, outputs) for inputs, outputs in requests]
    time: dict[str, Callable[[], Any]] = {}
    for name, place in (("", 0), ("other ", len(golden)))[: 1 if other is None else 2]:
        head_feeds = {taken: requests[place][0][taken] for taken in cut.head_inputs}
        tail_feeds = {taken: travels[place][taken] for taken in tail.inputs}
        time[f"{name}head"] = runs(head, head_feeds)
        time[f"{name}tail"] = runs(tail, tail_feeds)
    codecs = codec_costs(
        travels[: len(golden)],
        lambda tensors: tail.run({name: tensors[name] for name in tail.inputs}),
        golden,
        calibrated,
        contract,
    )
    made = head.run({name: compared[name] for name in cut.head_inputs})
    run = made | tail.run({name: (made if name in made else compared)[name] for name in tail.inputs})
    sizes = [sum(crossing[spec.name].nbytes for spec in cut.boundary) for crossing in travels]
    return _Halves(
        time=time,
        codecs=codecs,
        boundary_bytes=sizes[0],
        other_boundary_bytes=sizes[-1],
        run=joined(sample(run)),
    )


def _compare(cut: CutCard, head: Segment, tail: Segment, inputs: Tensors, outputs: Tensors) -> Tensors:
    """What crosses for these inputs; EngineFailed where head ∘ tail gives other outputs than the whole."""
    made = head.run({name: inputs[name] for name in cut.head_inputs})
    crossing = {spec.name: made[spec.name] for spec in cut.boundary}
    crossing |= {name: inputs[name] for name in cut.tail_inputs}
    again = made | tail.run({name: crossing[name] for name in tail.inputs})
    difference = worst_difference(again, outputs, list(outputs))
    if difference > SAME:
        raise EngineFailed(f"head and tail differ from the whole by {difference:.2g} (relative), allowed is {SAME:g}")
    return crossing


def time_cut(
    halves: _Halves, whole: Segment, golden: Sequence[Golden], other: OtherRequest | None, budget_s: float
) -> _Times:
    """Both halves and the whole in turns, on the first golden request and the other, for about `budget_s` seconds."""
    wholes = {"whole": runs(whole, golden[0].inputs)}
    if other is not None:
        wholes["other whole"] = runs(whole, other.inputs)
    ms = measure_interleaved({**wholes, **halves.time}, budget_s)
    return _Times(
        whole_ms=ms["whole"],
        head_ms=ms["head"],
        tail_ms=ms["tail"],
        other_whole_ms=ms.get("other whole", 0.0),
        other_head_ms=ms.get("other head", 0.0),
        other_tail_ms=ms.get("other tail", 0.0),
    )


def cut_costs(
    cuts: Sequence[CutId],
    found: Mapping[CutId, Found],
    shares: Mapping[str, float],
    whole_ms: float,
    other_whole_ms: float,
) -> tuple[CutCosts, ...]:
    """As measured relative to the whole beside, times `whole_ms`; estimated from those where not measured."""
    measured, other = {}, {}
    for cut in cuts:
        times = found[cut].times
        if times is None:
            continue
        factor = whole_ms / times.whole_ms
        measured[cut] = MeasuredCut(
            share=shares[cut],
            boundary_bytes=found[cut].boundary_bytes,
            head_ms=times.head_ms * factor,
            tail_ms=times.tail_ms * factor,
        )
        other[cut] = MeasuredCut(
            share=shares[cut],
            boundary_bytes=found[cut].other_boundary_bytes,
            head_ms=times.other_head_ms * factor,
            tail_ms=times.other_tail_ms * factor,
        )
    estimate = CutTimes.fit(whole_ms, list(measured.values()))
    other_estimate = CutTimes.fit(other_whole_ms, list(other.values()))
    costs = []
    for cut in cuts:
        share, of = shares[cut], found[cut]
        head_ms, tail_ms = estimate.head_ms(share, of.boundary_bytes), estimate.tail_ms(share, of.boundary_bytes)
        other_bytes = of.other_boundary_bytes
        other_head_ms = other_estimate.head_ms(share, other_bytes) if other_whole_ms else 0.0
        other_tail_ms = other_estimate.tail_ms(share, other_bytes) if other_whole_ms else 0.0
        known, other_known = measured.get(cut), other.get(cut)
        if known is not None and other_known is not None:
            head_ms, tail_ms = known.head_ms, known.tail_ms
            other_head_ms, other_tail_ms = other_known.head_ms, other_known.tail_ms
        costs.append(
            CutCosts(
                cut=cut,
                head_ms=head_ms,
                tail_ms=tail_ms,
                other_head_ms=other_head_ms,
                other_tail_ms=other_tail_ms,
                codecs=of.codecs,
                estimated=known is None,
            )
        )
    return tuple(costs)
