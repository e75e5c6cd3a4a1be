"""Measures a model on this device: the whole, both halves of every cut, every codec on what would travel, and how far
lossy codecs move the answers. What cannot be measured does not get into the profile, and so is never chosen.

Each cut is measured against the whole in the same seconds and stated relative to it, so that a clock that rises or
falls meanwhile favours none. Only one cut's halves are open at a time: it takes about twice the model's memory.

Within a budget: where a slow model leaves no time for all cuts, those spread over the model are measured as sessions;
the others are run and compared, their codecs' fidelity is measured, but their times are estimated from the measured
ones (`split/plan/costs.py`) and marked so; what there is no time to compare is left out.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from split.codec.calibration import CALIBRATION_FILE, Calibration, read_calibration
from split.codec.golden import sample
from split.codec.payload import encode
from split.errors import InvalidCalibration
from split.graph.card import FolderBefore, ModelCard
from split.ids import CutId
from split.plan.costs import spread_out
from split.profiles.contract import Contract
from split.profiles.measured import GoldenRuns, ModelProfile, Tuning, write_golden_runs, write_profile
from split.runtime.engine import Engine, Segment
from split.runtime.machine import read_machine
from split.runtime.optimised import WHOLE
from split.runtime.tuning import fastest
from split.tensor import Tensors
from split.workbench.codec_costs import joined, of_cut
from split.workbench.golden import golden_requests, inputs_to_compare, profile_basis, write_golden
from split.workbench.halves import Found, cut_costs, measure_cuts, run_cut, runs, time_cut
from split.workbench.node_times import head_shares
from split.workbench.optimise import Opener, TunedOpener
from split.workbench.spending import THREADS_SHARE, Spending
from split.workbench.whole_costs import WholeCosts, measure_whole, self_difference

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

BUDGET_S: Final = 55.0
"""The whole profile; with the child's start and reading the model a minute."""
ROUNDS_BUDGET_S: Final = 36.0
CUT_BUDGET_S: Final = 1.0
"""Timing of all cuts together, and at most each: a dozen cuts of a 10 ms model get 25 rounds in a quarter of a
minute."""


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
    fidelity = contract.data.fidelity if contract is not None else None
    on_progress("opening the model", 0.0)
    whole: Segment = engine.open(Path(card.path), threads=tunings[0].threads)
    golden = golden_requests(card, whole, inputs=inputs, contract=contract)
    first = golden[0].inputs
    on_progress("choosing threads", 0.01)
    tuning, open_best = _tuned(card, first, tunings, open_tuned or _as_cut(engine), limit_s=THREADS_SHARE * budget_s)
    whole = open_best(WHOLE, Path(card.path), first)
    costs = measure_whole(card, whole, golden, contract=contract, calibration=calibration, on_progress=on_progress)
    compared, must_travel = inputs_to_compare(card, whole, golden, costs.dims)
    on_progress("profiling the model's nodes", 0.04)
    shares = head_shares(card, folder, first, engine=engine, threads=tuning.threads)
    to_run = [compared, *(request.inputs for request in golden[:2])]
    itself = self_difference(card, whole, engine, to_run, has_time=lambda: now_s() - started_s < budget_s / 2)
    order = [card.cuts[place] for place in spread_out([shares[cut.id] for cut in card.cuts])]
    timing_s = min(CUT_BUDGET_S, ROUNDS_BUDGET_S / max(len(order), 1))
    found = measure_cuts(
        order,
        Spending(whole_ms=costs.ms, requests=len(golden), budget_s=budget_s),
        run=lambda cut, opened: run_cut(
            cut, folder, golden, costs.other, compared, open_best, opened, of_cut(calibration, cut.id), fidelity
        ),
        time_halves=lambda halves: time_cut(halves, whole, golden, costs.other, timing_s),
        on_progress=on_progress,
        spent_s=lambda: now_s() - started_s,
    )
    before.require_same(card)
    ran = GoldenRuns(
        offered=joined(compared) if must_travel else b"",
        whole=joined(sample(whole.run(compared))),
        cuts={cut: known.run for cut, known in found.items()},
    )
    profile = _profile(
        card,
        engine,
        tuning,
        costs,
        found,
        shares,
        basis=basis,
        output_bytes=_size(encode(golden[0].outputs, "raw")),
        itself=itself,
        golden=write_golden_runs(ran, folder),
    )
    write_golden(golden, folder / "golden.npz")
    write_profile(profile, folder)
    on_progress("done", 1.0)
    return profile


def _tuned(
    card: ModelCard, first: Tensors, tunings: Sequence[Tuning], open_as: TunedOpener, *, limit_s: float
) -> tuple[Tuning, Opener]:
    """What the whole is fastest with on the first golden request, and how segments are opened with it."""
    best = fastest(
        tunings,
        lambda tuning: runs(open_as(WHOLE, Path(card.path), first, tuning), first),
        limit_s=limit_s,
    )
    return best, lambda name, path, feeds: open_as(name, path, feeds, best)


def _profile(
    card: ModelCard,
    engine: Engine,
    tuning: Tuning,
    costs: WholeCosts,
    found: Mapping[CutId, Found],
    shares: Mapping[str, float],
    *,
    basis: str,
    output_bytes: int,
    itself: float,
    golden: tuple[int, str],
) -> ModelProfile:
    """All that was measured, put together; the cuts in the card's order."""
    typical_ms, other_ms = _typical_ms(costs, found.values())
    return ModelProfile(
        digest=card.digest,
        runtime=engine.name,
        fingerprint=read_machine().digest,
        basis=basis,
        dims=costs.dims,
        sizes=costs.sizes,
        other_sizes=costs.other.sizes if costs.other is not None else (),
        other_whole_ms=other_ms,
        threads=tuning.threads,
        spin_us=tuning.spin_us,
        whole_ms=typical_ms,
        image_ms=costs.image_ms,
        input_codecs=costs.input_codecs,
        encoded_bytes=costs.encoded_bytes,
        output_bytes=output_bytes,
        cuts=cut_costs([cut.id for cut in card.cuts if cut.id in found], found, shares, typical_ms, other_ms),
        self_difference=itself,
        rows_apart=costs.rows_apart,
        golden=golden,
    )


def _typical_ms(costs: WholeCosts, found: Iterable[Found]) -> tuple[float, float]:
    """A run of the whole, beside the cuts and alone, and one at the other sizes (0.0 without any)."""
    beside_cuts = [known.times for known in found if known.times is not None]
    typical_ms = statistics.median([costs.ms, *(times.whole_ms for times in beside_cuts)])
    ratios = [times.other_whole_ms / times.whole_ms for times in beside_cuts]
    ratios.append(costs.other.whole_ms / costs.ms if costs.other is not None else 0.0)
    return typical_ms, typical_ms * statistics.median(ratios)


def _calibration(card: ModelCard) -> Calibration | None:
    """What lies beside the model file; one that is damaged costs the times of codec klt."""
    try:
        return read_calibration(Path(card.path).with_name(CALIBRATION_FILE), card.digest)
    except InvalidCalibration as error:
        log.warning("%s", error)
        return None


def _as_cut(engine: Engine) -> TunedOpener:
    return lambda name, path, feeds, tuning: engine.open(path, threads=tuning.threads, spin_us=tuning.spin_us)


def _size(buffers: Sequence[Any]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
