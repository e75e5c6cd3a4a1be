"""Measures a model on this device: the whole, both halves of every cut, every codec on what would travel, and how far
lossy codecs move the answers. What cannot be measured does not get into the profile, and so is never chosen.

Each cut is measured against the whole in the same seconds and stated relative to it, so that a clock that rises or
falls meanwhile favours none. Only one cut's halves are open at a time: it takes about twice the model's memory.

Within a budget: where a slow model leaves no time for all cuts, those spread over the model are measured as sessions;
the others are run and compared, their codecs' fidelity is measured, but their times are estimated from the measured
ones (`split/plan/costs.py`) and marked so; what there is no time to compare is left out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from split.codec.fidelity import MEASURES, divergence
from split.codec.golden import SAME, sample
from split.codec.image import prepare_image
from split.codec.payload import decode, encode
from split.errors import CodecError, EngineFailed, InvalidModel, InvalidRequest
from split.graph.card import CutCard, ModelCard
from split.graph.growth import open_dims, sizes_of
from split.ids import CutId
from split.plan.costs import CutTimes, MeasuredCut, spread_out
from split.profiles.contract import Contract
from split.profiles.measured import (
    CodecCosts,
    CutCosts,
    GoldenRuns,
    ModelProfile,
    Tuning,
    write_golden_runs,
    write_profile,
)
from split.runtime.engine import Engine, Segment
from split.runtime.machine import read_machine
from split.runtime.optimised import WHOLE
from split.runtime.profiler import measure, measure_interleaved
from split.runtime.tuning import fastest
from split.tensor import Tensors, bind_dims, worst_difference
from split.workbench.golden import Golden, golden_requests, inputs_to_compare, profile_basis, typical_jpeg, write_golden
from split.workbench.node_times import head_shares
from split.workbench.optimise import Opener, TunedOpener, open_halves
from split.workbench.resize import other_sizes, resized
from split.workbench.rows import rows_apart
from split.workbench.spending import THREADS_SHARE, Care, Spending

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

LOSSY: Final = ("fp16", "int8")
BUDGET_S: Final = 55.0
"""The whole profile; with the child's start and reading the model a minute."""
ROUNDS_BUDGET_S: Final = 36.0
CUT_BUDGET_S: Final = 1.0
"""Timing of all cuts together, and at most each: a dozen cuts of a 10 ms model get 25 rounds in a quarter of a
minute."""
OTHER_WORK: Final = (0.6, 1.6)
"""Of the golden request's: between them, two sizes would tell little about what depends on size."""
OTHER_MS_MAX: Final = 3000.0
"""A run at other sizes: dearer ones would take too much of the budget."""
_PAYLOAD_BYTES_MAX: Final = 1 << 40


def profile_model(
    card: ModelCard,
    folder: Path,
    *,
    inputs: Sequence[Tensors] | None = None,
    contract: Contract | None = None,
    engine: Engine,
    tunings: Sequence[Tuning],
    open_tuned: TunedOpener | None = None,
    on_progress: Progress = lambda stage, ratio: None,
    budget_s: float = BUDGET_S,
    now_s: Callable[[], float] = time.monotonic,
) -> ModelProfile:
    """Measure, write `folder/profile.json` with its golden runs, and `folder/golden.npz`.

    Blocking, a quarter of a minute for a dozen cuts of a quick model, about `budget_s` at most (a cut is not begun that
    would go beyond it, as far as earlier ones tell; the whole is always measured).

    `folder` holds the halves as the workbench cut them. `inputs`: requests to measure on (the first one for times, all
    for fidelity); without them see `split/workbench/golden.py`. `tunings`: of which the whole is fastest with is
    measured first, if there are several; everything else is measured with that one. `open_tuned`: how segments are
    opened for measuring (as the daemon will: an `Optimiser`'s `open`); without it as they were cut. InvalidModel when
    there is nothing to measure on or the runtime refuses the whole; a cut that does not open or computes something else
    is left out with a warning.
    """
    started_s = now_s()
    basis = profile_basis(Path(card.path), contract)
    on_progress("opening the model", 0.0)
    whole: Segment = engine.open(Path(card.path), threads=tunings[0].threads)
    golden = golden_requests(card, whole, inputs=inputs, contract=contract)
    first = golden[0]
    open_as = open_tuned or _as_cut(engine)
    on_progress("choosing threads", 0.01)
    tuning = fastest(
        tunings,
        lambda tuning: _runs(open_as(WHOLE, Path(card.path), first.inputs, tuning), first.inputs),
        limit_s=THREADS_SHARE * budget_s,
    )

    def open_best(name: str, path: Path, feeds: Tensors) -> Segment:
        return open_as(name, path, feeds, tuning)

    whole = open_best(WHOLE, Path(card.path), first.inputs)
    image_ms, encoded_bytes = _image_costs(golden, contract)
    on_progress("measuring what offloading ships", 0.02)
    input_codecs = _codecs([request.inputs for request in golden], lambda tensors: whole.run(tensors), golden)
    whole_ms = measure(whole, first.inputs, budget_s=CUT_BUDGET_S)
    dims = bind_dims(card.inputs, first.inputs)
    sizes = sizes_of(open_dims(card.inputs), first.inputs)
    on_progress("measuring at other sizes", 0.03)
    other = _other_request(card, whole, first, sizes, whole_ms)
    apart = rows_apart(card, whole, first.inputs)
    compared, must_travel = inputs_to_compare(card, whole, golden, dims)
    on_progress("profiling the model's nodes", 0.04)
    shares = head_shares(card, folder, first.inputs, engine=engine, threads=tuning.threads)
    to_run = [compared, *(request.inputs for request in golden[:2])]
    self_difference = _self_difference(card, whole, engine, to_run, has_time=lambda: now_s() - started_s < budget_s / 2)
    order = [card.cuts[place] for place in spread_out([shares[cut.id] for cut in card.cuts])]
    timing_s = min(CUT_BUDGET_S, ROUNDS_BUDGET_S / max(len(order), 1))
    found = _measure_cuts(
        order,
        Spending(whole_ms=whole_ms, requests=len(golden), budget_s=budget_s),
        run=lambda cut, opened: _run_cut(cut, folder, golden, other, compared, open_best, opened),
        time_halves=lambda halves: _time_cut(halves, whole, golden, other, timing_s),
        on_progress=on_progress,
        spent_s=lambda: now_s() - started_s,
    )
    golden_file = write_golden_runs(
        GoldenRuns(
            offered=_joined(compared) if must_travel else b"",
            whole=_joined(sample(whole.run(compared))),
            cuts={cut: known.run for cut, known in found.items()},
        ),
        folder,
    )
    beside_cuts = [known.times for known in found.values() if known.times is not None]
    typical_ms = statistics.median([whole_ms, *(times.whole_ms for times in beside_cuts)])
    other_ratios = [times.other_whole_ms / times.whole_ms for times in beside_cuts]
    other_ratios.append(other.whole_ms / whole_ms if other is not None else 0.0)
    other_ms = typical_ms * statistics.median(other_ratios)
    profile = ModelProfile(
        digest=card.digest,
        runtime=engine.name,
        fingerprint=read_machine().digest,
        basis=basis,
        dims=dims,
        sizes=sizes,
        other_sizes=other.sizes if other is not None else (),
        other_whole_ms=other_ms,
        threads=tuning.threads,
        spin_us=tuning.spin_us,
        whole_ms=typical_ms,
        image_ms=image_ms,
        input_codecs=input_codecs,
        encoded_bytes=encoded_bytes,
        output_bytes=_size(encode(first.outputs, "raw")),
        cuts=_cut_costs([cut.id for cut in card.cuts if cut.id in found], found, shares, typical_ms, other_ms),
        self_difference=self_difference,
        rows_apart=apart,
        golden=golden_file,
    )
    write_golden(golden, folder / "golden.npz")
    write_profile(profile, folder)
    on_progress("done", 1.0)
    return profile


def _as_cut(engine: Engine) -> TunedOpener:
    return lambda name, path, feeds, tuning: engine.open(path, threads=tuning.threads, spin_us=tuning.spin_us)


def _runs(segment: Segment, feeds: Tensors) -> Callable[[], object]:
    return lambda: segment.run(feeds)


def _self_difference(
    card: ModelCard, whole: Segment, engine: Engine, requests: Sequence[Tensors], *, has_time: Callable[[], bool]
) -> float:
    """How far the whole is from itself as it stands in the file, one thread and nothing fused, on these requests: on
    the first, and on the others while there is time.

    0.0 for a model that computes in integers: they sum alike in any order, and unfused it would compute in floats.
    """
    if card.integer:
        return 0.0
    worst = 0.0
    try:
        plain = engine.open_optimised(Path(card.path), threads=1, prepack=True)
        for number, inputs in enumerate(requests):
            if number and not has_time():
                break
            expected = whole.run(inputs)
            worst = max(worst, worst_difference(plain.run(inputs), expected, list(expected)))
        plain.close()
    except (InvalidModel, EngineFailed) as error:
        log.warning("it is not known how far the model is from itself, it does not run unfused: %s", error)
    return min(worst, sys.float_info.max)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """The first golden request at other sizes of the open dims, and the whole on it."""

    sizes: tuple[int, ...]
    inputs: Tensors
    outputs: Tensors
    whole_ms: float


def _other_request(
    card: ModelCard, whole: Segment, first: Golden, sizes: tuple[int, ...], whole_ms: float
) -> _Other | None:
    """At the first of `other_sizes` that the model takes and whose work is clearly another; None without one."""
    if card.growth is None or any(array.size == 0 for array in first.inputs.values()):
        return None
    dims = open_dims(card.inputs)
    for other in other_sizes(sizes):
        inputs = resized(card.inputs, dims, first.inputs, other)
        ratio = card.growth.work(card.inputs, other) / card.growth.work(card.inputs, sizes)
        if OTHER_WORK[0] < ratio < OTHER_WORK[1] or ratio * whole_ms > OTHER_MS_MAX:
            continue
        try:
            outputs = whole.run(inputs)
            ms = measure(whole, inputs, budget_s=CUT_BUDGET_S)
        except (InvalidRequest, EngineFailed) as error:
            log.info("%s does not run at sizes %s: %s", card.path, other, error)
            continue
        return _Other(sizes=other, inputs=inputs, outputs=outputs, whole_ms=ms)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Medians, measured in turns; `other_…` at other sizes, 0 without any."""

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
class _Found:
    codecs: tuple[CodecCosts, ...]
    boundary_bytes: int
    other_boundary_bytes: int
    run: bytes
    times: _Times | None


def _measure_cuts(
    order: Sequence[CutCard],
    spending: Spending,
    *,
    run: Callable[[CutCard, contextlib.ExitStack], _Halves],
    time_halves: Callable[[_Halves], _Times],
    on_progress: Progress,
    spent_s: Callable[[], float],
) -> dict[CutId, _Found]:
    """What is found out about each cut, in this order, with the care that the budget leaves for it; one that fails is
    left out with a warning, and so are those there is no time for."""
    found: dict[CutId, _Found] = {}
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
        found[cut.id] = _Found(
            codecs=halves.codecs,
            boundary_bytes=halves.boundary_bytes,
            other_boundary_bytes=halves.other_boundary_bytes,
            run=halves.run,
            times=times,
        )
        timing_s = spent_s() - run_at_s if times is not None else None
        spending.took(run_s=run_at_s - begun_s, timing_s=timing_s)
    return found


def _run_cut(
    cut: CutCard,
    folder: Path,
    golden: Sequence[Golden],
    other: _Other | None,
    compared: Tensors,
    open_best: Opener,
    opened: contextlib.ExitStack,
) -> _Halves:
    """The cut's halves, run on every request and compared; `opened` closes them."""
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
        time[f"{name}head"] = _runs(head, head_feeds)
        time[f"{name}tail"] = _runs(tail, tail_feeds)
    codecs = _codecs(
        travels[: len(golden)], lambda tensors: tail.run({name: tensors[name] for name in tail.inputs}), golden
    )
    made = head.run({name: compared[name] for name in cut.head_inputs})
    run = made | tail.run({name: (made if name in made else compared)[name] for name in tail.inputs})
    sizes = [sum(crossing[spec.name].nbytes for spec in cut.boundary) for crossing in travels]
    return _Halves(
        time=time,
        codecs=codecs,
        boundary_bytes=sizes[0],
        other_boundary_bytes=sizes[-1],
        run=_joined(sample(run)),
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


def _time_cut(
    halves: _Halves, whole: Segment, golden: Sequence[Golden], other: _Other | None, budget_s: float
) -> _Times:
    wholes = {"whole": _runs(whole, golden[0].inputs)}
    if other is not None:
        wholes["other whole"] = _runs(whole, other.inputs)
    ms = measure_interleaved({**wholes, **halves.time}, budget_s)
    return _Times(
        whole_ms=ms["whole"],
        head_ms=ms["head"],
        tail_ms=ms["tail"],
        other_whole_ms=ms.get("other whole", 0.0),
        other_head_ms=ms.get("other head", 0.0),
        other_tail_ms=ms.get("other tail", 0.0),
    )


def _cut_costs(
    cuts: Sequence[CutId],
    found: Mapping[CutId, _Found],
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


def _codecs(
    payloads: Sequence[Tensors], finish: Callable[[Tensors], Tensors], golden: Sequence[Golden]
) -> tuple[CodecCosts, ...]:
    """Every codec on what travels (one payload for each golden request); a lossy one that saves no byte is left out."""
    wires = {codec: [b"".join(encode(tensors, codec)) for tensors in payloads] for codec in ("raw", *LOSSY)}
    sizes = {codec: int(statistics.median(map(len, wire))) for codec, wire in wires.items()}
    kept = [codec for codec in wires if codec == "raw" or sizes[codec] < sizes["raw"]]
    work: dict[str, Callable[[], Any]] = {}
    for codec in kept:
        work[f"encode {codec}"] = functools.partial(encode, payloads[0], codec)
        work[f"decode {codec}"] = functools.partial(decode, wires[codec][0], max_bytes=_PAYLOAD_BYTES_MAX)
    ms = measure_interleaved(work, 0.1)
    return tuple(
        CodecCosts(
            codec=codec,
            bytes=sizes[codec],
            encode_ms=ms[f"encode {codec}"],
            decode_ms=ms[f"decode {codec}"],
            fidelity=_fidelity(wires[codec], finish, golden) if codec in LOSSY else {},
        )
        for codec in kept
    )


def _fidelity(
    wires: Sequence[bytes], finish: Callable[[Tensors], Tensors], golden: Sequence[Golden]
) -> dict[str, float]:
    """Each measure's worst value over golden requests and outputs; one that is not finite is left out: not allowed."""
    worst = dict.fromkeys(MEASURES, 0.0)
    for wire, request in zip(wires, golden, strict=True):
        outputs = finish(decode(wire, max_bytes=_PAYLOAD_BYTES_MAX))
        for name, found in outputs.items():
            for measure_name in worst:
                value = divergence(measure_name, found, request.outputs[name])
                worst[measure_name] = max(worst[measure_name], value)
    return {name: value for name, value in worst.items() if math.isfinite(value)}


def _image_costs(golden: Sequence[Golden], contract: Contract | None) -> tuple[float, int]:
    """(milliseconds to prepare a picture, typical bytes of one); zeros where the model takes none."""
    images = contract.encoded() if contract is not None else {}
    if not images:
        return 0.0, 0
    pictures = [request.picture for request in golden if request.picture] or [typical_jpeg()]
    work: Mapping[str, Callable[[], Any]] = {
        str(number): functools.partial(prepare_image, picture, next(iter(images.values())))
        for number, picture in enumerate(pictures)
    }
    ms = measure_interleaved(work, 1.0)
    return statistics.median(ms.values()), int(statistics.median(map(len, pictures)))


def _joined(tensors: Tensors) -> bytes:
    return b"".join(encode(tensors, "raw"))


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
