"""Makes a model's calibration: which cuts are worth coding, their tables, and curves measured on held-out inputs.

Blocking and heavy: runs in a child process, on the device or on any machine that has model, contract and inputs. What
is done depends on the inputs alone, not on the clock, while it fits the budget: the same inputs give the same file. A
model that is too slow for it gets tables from fewer runs, and says so.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from split.codec.boxes import count_detections
from split.codec.calibration import (
    Calibration,
    Curve,
    CutTables,
    check_place,
    decode_calibration,
    encode_calibration,
    write_calibration,
)
from split.errors import CodecError, EngineFailed, InvalidCalibration, InvalidModel, InvalidRequest
from split.graph.card import FolderBefore
from split.graph.cuts import (
    Cut,
    all_prefix_cuts,
    bitmap_of,
    boundary_specs,
    compute_shares,
    crossing_bytes,
    cut_card,
)
from split.graph.growth import batch_dim, open_dims, sizes_of
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import share_weights, whole_with, write_parts, write_whole
from split.ids import CutId
from split.profiles.contract import Contract, Fidelity
from split.profiles.demands import ContractDemands, demands_of
from split.runtime.engine import Engine, Segment
from split.tensor import Tensors
from split.workbench.calibration_budget import Spending, affordable, held_out_count, probe_flops
from split.workbench.coded_cut import CodedCut, Halves, HeldOut
from split.workbench.coded_pictures import picture_curves
from split.workbench.cut import candidate_cuts, describe, settle
from split.workbench.next_weights import weights_gram
from split.workbench.sources import FOLDS, Request, Source, dealt, folds_of, read_sources, spread
from split.workbench.worth_coding import PICTURE_BYTES, Worth, rank

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

BUDGET_S: Final = 55.0
"""With the child's start and reading the model a minute."""
RANKED_ON: Final = 3
"""Requests that boundaries are compared on."""
RANKED_BYTES_MAX: Final = 128 << 20
"""Activations looked at in one run."""
LEARNT_MAX: Final = 128
LEARNT_BYTES_MAX: Final = 192 << 20
"""Requests (views of sources) that statistics come from, and their memory, one of each fold at least."""
USUAL: Final = Fidelity(measure="relative", bound=0.05)
"""What curves are laid around where the contract allows nothing lossy."""


def calibrate(
    model_path: Path,
    inputs: Path,
    out: Path,
    *,
    contract: Contract | None,
    engine: Engine,
    threads: int,
    on_progress: Progress = lambda stage, ratio: None,
    budget_s: float = BUDGET_S,
    now_s: Callable[[], float] | None = None,
) -> Calibration:
    """Calibrate the model on these `inputs` (as `read_sources` takes them) and write the sidecar to `out`, in one step
    at the end: nothing is left of what failed.

    `now_s`: what the budget is counted by; this thread's processor time if none is given (the runtime's other threads
    work beside it), so that what else the machine does changes nothing. What there is no time for is left out.

    InvalidRequest for inputs that do not fit, by name; InvalidModel when no cut of it can be coded, or the file cannot
    be used; ModelUnavailable when it was replaced meanwhile, or `out` cannot be written.
    """
    clock = now_s or time.thread_time
    until_s = clock() + budget_s
    check_place(out)  # now, not after a minute
    before = FolderBefore(model_path)
    on_progress("reading the model", 0.0)
    model = load_model(model_path)
    on_progress("reading the inputs", 0.02)
    sources = dealt(read_sources(inputs, model.inputs, contract))
    with tempfile.TemporaryDirectory(prefix="isthmus-calibrate-") as name:
        folder = Path(name)
        share_weights(model, folder)
        feeds = settle(model, folder, inputs=sources[0].views[0]())
        bench = _Bench(model=model, folder=folder, engine=engine, threads=threads, contract=contract, sources=sources)
        on_progress("looking at every boundary", 0.06)
        chosen = bench.choose(feeds)
        held_out = bench.held_out(held_out_count(model, chosen, len(sources)))
        _require_detections(bench.fidelity, held_out)
        tables: dict[CutId, CutTables] = {}
        curves: dict[CutId, Curve] = {}
        spending = Spending(
            budget_s=budget_s,
            until_s=until_s,
            flops=[probe_flops(model, worth) for worth in chosen],
            now_s=clock,
        )
        for number, worth in enumerate(chosen):
            on_progress(f"cut {number + 1} of {len(chosen)}", 0.15 + 0.7 * number / len(chosen))
            if tables and clock() >= until_s:
                log.warning("cut=%s is left out: there was no time for it", worth.cut.id)
                continue
            try:
                with bench.opened(worth.cut) as halves:
                    coded = CodedCut(halves, folds_of(sources))
                    with spending.on(number) as has_time:
                        coded.learn(
                            bench.learnt(worth.cut), measure=bench.measure, probes=spending.probes, has_time=has_time
                        )
                    has_time = spending.part_of(len(chosen) - number + 1)  # those that follow, and the pictures
                    curve_of = coded.curve(held_out, bench.fidelity, has_time=has_time)
                    tables_of = coded.tables()
                    _check(model, worth.cut.id, tables_of, curve_of)
                    curves[worth.cut.id], tables[worth.cut.id] = curve_of, tables_of
            except (EngineFailed, InvalidModel, CodecError, InvalidCalibration) as error:
                log.warning("cut=%s is left out: %s", worth.cut.id, error)
        if not tables:
            raise InvalidModel(f"{model_path}: no cut of it could be coded; isthmus check says which cuts it has")
        on_progress("pictures", 0.85)
        pictures = bench.pictures(held_out, spending)
    sizes = tuple((min(dim), max(dim)) for dim in zip(*(request.sizes for request in held_out), strict=True))
    calibration = Calibration(
        model=model.digest, inputs=len(sources), tables=tables, curves=curves, sizes=sizes, pictures=pictures
    )
    before.require_same(describe(model, [worth.cut for worth in chosen]))
    calibration = _write(calibration, out)
    on_progress("done", 1.0)
    return calibration


def _require_detections(fidelity: Fidelity, held_out: Sequence[HeldOut]) -> None:
    """InvalidRequest where detections are to be compared and the model finds none."""
    boxes = fidelity.boxes
    if boxes is not None and not any(count_detections(boxes, request.expected) for request in held_out):
        raise InvalidRequest(
            f"the model finds nothing with a score of {boxes.threshold:g} or more in {len(held_out)} of these inputs: "
            "what codecs do to its detections cannot be told; give it inputs that show it something, or correct "
            "data.fidelity.boxes in the contract"
        )


def _check(model: Model, cut: CutId, tables: CutTables, measured: Curve) -> None:
    """InvalidCalibration for a cut that could not be read again."""
    alone = Calibration(model=model.digest, inputs=1, tables={cut: tables}, curves={cut: measured})
    decode_calibration(encode_calibration(alone), model.digest)


def _write(calibration: Calibration, out: Path) -> Calibration:
    """What was written: without the largest cuts where it could not be read otherwise."""
    while True:
        try:
            write_calibration(calibration, out)
            return calibration
        except InvalidCalibration as error:
            if len(calibration.tables) < 2:
                raise
            largest = max(calibration.tables, key=lambda cut: _table_bytes(calibration.tables[cut]))
            log.warning("cut=%s, whose tables are the largest, is left out: %s", largest, error)
            tables = {cut: found for cut, found in calibration.tables.items() if cut != largest}
            calibration = replace(calibration, tables=tables, curves={cut: calibration.curves[cut] for cut in tables})


def _table_bytes(tables: CutTables) -> int:
    return sum(2 * one.klt.transform.nbytes + one.klt.scales.nbytes for one in tables.tensors if one.klt is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """One model, its inputs, and where its parts are written."""

    model: Model
    folder: Path
    engine: Engine
    threads: int
    contract: Contract | None
    sources: Sequence[Source]

    # -- which cuts ---------------------------------------------------------------------------------------------------

    def choose(self, feeds: Tensors) -> list[Worth]:
        """The cuts to calibrate; InvalidModel where the model has none."""
        asked = demands_of(self.contract, [spec.name for spec in self.model.inputs])
        found = {cut.id: cut for cut in all_prefix_cuts(self.model) if cut.legal and cut.boundary}
        found |= {cut.id: cut for cut in candidate_cuts(self.model, feeds, asked).cuts}
        cuts = list(found.values())
        pairs = [
            (cut, share)
            for cut, share in zip(cuts, compute_shares(self.model, cuts), strict=True)
            if _meets(self.model, cut, share, asked)
        ]
        if not pairs:
            why = self.model.no_cuts_reason or "none meets what the contract asks of it"
            raise InvalidModel(f"{self.model.path}: there is no cut to calibrate: {why}")
        requests = [request for _, request in spread(self.sources, RANKED_ON)]
        worth = rank(
            self.model,
            [cut for cut, _ in pairs],
            [share for _, share in pairs],
            lambda names: self._seen(names, requests),
            bytes_max=RANKED_BYTES_MAX,
        )
        chosen = affordable(self.model, worth, self._input_bytes(requests[0]()))
        if not chosen:
            raise InvalidModel(f"{self.model.path}: no cut of it leaves the device anything to do")
        return chosen

    def _input_bytes(self, request: Tensors) -> float:
        """What offload sends, about."""
        encoded = self.contract.encoded() if self.contract is not None else {}
        return sum(PICTURE_BYTES * one.size if name in encoded else one.nbytes for name, one in request.items())

    def _seen(self, names: Sequence[str], requests: Sequence[Request]) -> list[Tensors]:
        path = self.folder / "seen.onnx"
        write_whole(path, whole_with(self.model, names))
        segment = self.engine.open(path, threads=self.threads)
        try:
            return [segment.run(request(), list(names)) for request in requests]
        finally:
            segment.close()
            path.unlink()

    def held_out(self, count: int) -> list[HeldOut]:
        """At most `count` requests that curves are measured on, with the unsplit model's outputs."""
        whole = self.engine.open(self.model.path, threads=self.threads)
        try:
            return [self._answered(whole, source, request) for source, request in spread(self.sources, count)]
        finally:
            whole.close()

    def _answered(self, whole: Segment, source: int, request: Request) -> HeldOut:
        feeds, dims = request(), open_dims(self.model.inputs)
        batch = batch_dim(self.model.inputs, self.model.outputs)
        sizes = sizes_of(dims, feeds)
        items = 1 if batch is None else sizes[batch]
        return HeldOut(source=source, inputs=request, expected=whole.run(feeds), items=items, sizes=sizes)

    def learnt(self, cut: Cut) -> list[tuple[int, Request]]:
        """The requests that this cut's statistics come from, with the numbers of their sources."""
        size = max(crossing_bytes(self.model, cut), 1)
        return spread(self.sources, max(min(LEARNT_MAX, LEARNT_BYTES_MAX // size), FOLDS))

    @contextmanager
    def opened(self, cut: Cut) -> Iterator[Halves]:
        """Its halves, written and opened."""
        head, tail = self.folder / f"{cut.id}.head.onnx", self.folder / f"{cut.id}.tail.onnx"
        write_parts(self.model, cut, head, tail)
        inputs = {spec.name: spec for spec in self.model.inputs}
        segments: list[Segment] = []
        try:
            segments += [self.engine.open(path, threads=self.threads) for path in (head, tail)]
            yield Halves(
                cut=cut,
                specs=(
                    *boundary_specs(self.model, cut),
                    *(inputs[name] for name in cut.tail_inputs),
                ),
                node_bitmap=bitmap_of(cut.mask, len(self.model.nodes)),
                head=segments[0],
                tail=segments[1],
                weights=partial(weights_gram, self.model, cut),
            )
        finally:
            for segment in segments:
                segment.close()
            head.unlink(missing_ok=True)
            tail.unlink(missing_ok=True)

    # -- curves -------------------------------------------------------------------------------------------------------

    @property
    def fidelity(self) -> Fidelity:
        """What curves are laid around: the contract's, or a usual one where it allows nothing lossy."""
        stated = self.contract.data.fidelity if self.contract is not None else USUAL
        return stated if stated.bound > 0 else USUAL

    @property
    def measure(self) -> str:
        """By which outputs' changes are weighed; "" where the contract does not say."""
        return self.fidelity.measure if self.fidelity is not USUAL else ""

    def pictures(self, held_out: Sequence[HeldOut], spending: Spending) -> dict[str, Curve]:
        """Of the picture input; {} where there is none, or the sources are no pictures."""
        encoded = self.contract.encoded() if self.contract is not None else {}
        encoded = {
            name: spec for name, spec in encoded.items() if all(source.picture == name for source in self.sources)
        }
        if not encoded:
            return {}
        whole = self.engine.open(self.model.path, threads=self.threads)
        try:
            return picture_curves(whole, held_out, encoded, self.fidelity, part_of=spending.part_of)
        finally:
            whole.close()


def _meets(model: Model, cut: Cut, share: float, asked: ContractDemands) -> bool:
    if asked.depth_min_ratio <= share and asked.memory_bytes is None and not asked.private:
        return True
    card = cut_card(model, cut, share)
    return (
        share >= asked.depth_min_ratio
        and (asked.memory_bytes is None or card.head_weight_bytes <= asked.memory_bytes)
        and not set(card.shown_inputs) & set(asked.private)
    )
