"""Measures a model on this device: the whole, both halves of every cut, every codec on what would travel, and how far
lossy codecs move the answers. What cannot be measured does not get into the profile, and so is never chosen.

Each cut is measured against the whole in the same seconds and stated relative to it, so that a clock that rises or
falls meanwhile favours none. Only one cut's halves are open at a time: it takes about twice the model's memory.

Within a budget: where a slow model leaves no time for all cuts, those spread over the model are measured as sessions;
the others are run and compared, their codecs' fidelity is measured, but their times are estimated from the measured
ones (`split/plan/costs.py`) and marked so; what there is no time to compare is left out.
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from split.codec.calibration import CALIBRATION_FILE, Calibration, read_calibration
from split.codec.golden import sample
from split.codec.image import prepare_image
from split.codec.payload import encode
from split.errors import EngineFailed, InvalidCalibration, InvalidModel, InvalidRequest
from split.graph.card import FolderBefore, ModelCard
from split.graph.growth import open_dims, sizes_of
from split.plan.costs import spread_out
from split.profiles.contract import Contract
from split.profiles.measured import (
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
from split.workbench.codec_costs import codec_costs, joined, of_cut, of_pictures
from split.workbench.golden import Golden, golden_requests, inputs_to_compare, profile_basis, typical_jpeg, write_golden
from split.workbench.halves import OtherRequest, cut_costs, measure_cuts, run_cut, runs, time_cut
from split.workbench.node_times import head_shares
from split.workbench.optimise import TunedOpener
from split.workbench.resize import other_sizes, resized
from split.workbench.rows import rows_apart
from split.workbench.spending import THREADS_SHARE, Spending

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

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
    there is nothing to measure on or the runtime refuses the whole, ModelUnavailable when its files were replaced
    meanwhile; a cut that does not open or computes something else
    is left out with a warning.
    """
    started_s = now_s()
    before = FolderBefore(Path(card.path))
    basis = profile_basis(Path(card.path), contract, card.calibrated)
    calibration = _calibration(card)
    on_progress("opening the model", 0.0)
    whole: Segment = engine.open(Path(card.path), threads=tunings[0].threads)
    golden = golden_requests(card, whole, inputs=inputs, contract=contract)
    first = golden[0]
    open_as = open_tuned or _as_cut(engine)
    on_progress("choosing threads", 0.01)
    tuning = fastest(
        tunings,
        lambda tuning: runs(open_as(WHOLE, Path(card.path), first.inputs, tuning), first.inputs),
        limit_s=THREADS_SHARE * budget_s,
    )

    def open_best(name: str, path: Path, feeds: Tensors) -> Segment:
        return open_as(name, path, feeds, tuning)

    whole = open_best(WHOLE, Path(card.path), first.inputs)
    image_ms, encoded_bytes = _image_costs(golden, contract)
    on_progress("measuring what offloading ships", 0.02)
    input_codecs = codec_costs(
        [request.inputs for request in golden],
        lambda tensors: whole.run(tensors),
        golden,
        of_pictures(calibration, contract.encoded() if contract is not None else {}),
    )
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
    found = measure_cuts(
        order,
        Spending(whole_ms=whole_ms, requests=len(golden), budget_s=budget_s),
        run=lambda cut, opened: run_cut(
            cut, folder, golden, other, compared, open_best, opened, of_cut(calibration, cut.id)
        ),
        time_halves=lambda halves: time_cut(halves, whole, golden, other, timing_s),
        on_progress=on_progress,
        spent_s=lambda: now_s() - started_s,
    )
    before.require_same(card)
    golden_file = write_golden_runs(
        GoldenRuns(
            offered=joined(compared) if must_travel else b"",
            whole=joined(sample(whole.run(compared))),
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
        cuts=cut_costs([cut.id for cut in card.cuts if cut.id in found], found, shares, typical_ms, other_ms),
        self_difference=self_difference,
        rows_apart=apart,
        golden=golden_file,
    )
    write_golden(golden, folder / "golden.npz")
    write_profile(profile, folder)
    on_progress("done", 1.0)
    return profile


def _calibration(card: ModelCard) -> Calibration | None:
    """What lies beside the model file; one that is damaged costs the times of codec klt."""
    try:
        return read_calibration(Path(card.path).with_name(CALIBRATION_FILE), card.digest)
    except InvalidCalibration as error:
        log.warning("%s", error)
        return None


def _as_cut(engine: Engine) -> TunedOpener:
    return lambda name, path, feeds, tuning: engine.open(path, threads=tuning.threads, spin_us=tuning.spin_us)


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


def _other_request(
    card: ModelCard, whole: Segment, first: Golden, sizes: tuple[int, ...], whole_ms: float
) -> OtherRequest | None:
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
        return OtherRequest(sizes=other, inputs=inputs, outputs=outputs, whole_ms=ms)
    return None


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


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
