"""Making the parts of a model: from a file to a card, candidate cuts and their halves in one folder.

Blocking and heavy: runs in a child process (`child.py`). `split.graph` says where and how to cut; this module knows the
files, the dims one works with, and what only a run can tell (types and sizes that shape inference does not know).
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from split.codec.calibration import CALIBRATION_FILE, Calibration, read_calibration
from split.codec.golden import golden_inputs
from split.codec.payload import payload_bytes
from split.errors import CutRefused, InvalidCalibration, InvalidModel, IsthmusError
from split.graph.candidates import Candidates, find_candidates, find_candidates_at_both
from split.graph.card import CutCard, FolderBefore, ModelCard, write_card, write_cut
from split.graph.cuts import (
    Cut,
    all_prefix_cuts,
    compute_shares,
    crossing_bytes,
    cut_card,
    cut_from_mask,
    mask_of,
)
from split.graph.demands import Demands
from split.graph.growing import Show, growth
from split.graph.growth import Growth, OpenDim, open_dims, shapes_at, sizes_of
from split.graph.load import load_model
from split.graph.model import Model
from split.graph.partition import WEIGHTS_FILE, share_weights, whole_with, write_parts, write_whole
from split.graph.quantised import computes_in_integers
from split.graph.shapes import concrete_shapes
from split.ids import KLT, CutId, ModelDigest
from split.profiles.contract import Contract
from split.profiles.demands import NOTHING_ASKED, ContractDemands, demands_of
from split.profiles.measured import Point
from split.runtime.engine import Segment
from split.runtime.segment import OrtEngine
from split.tensor import Tensors, TensorSpec, bind_dims, dtype_name
from split.workbench.resize import resized

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

TENSOR_CODECS: Final = ("raw", "fp16", "int8")
"""Codecs of a boundary; `encoded` is for inputs."""

OTHER_SIZE: Final = 64
"""Of a dim that is 1, where candidates are looked for a second time; what is more is taken four times."""
SHOWING_S: Final = 5.0
"""Runs at other sizes, all together; one under way is not stopped."""

DRY_RUNS_MAX: Final = 64
"""Sessions opened to learn what shape inference does not tell: halving finds the few values that cannot be shown."""


def prepare(
    model_path: Path,
    folder: Path,
    *,
    dims: Mapping[str, int] | None = None,
    inputs: Tensors | None = None,
    contract: Contract | None = None,
    on_progress: Progress = lambda stage, ratio: None,
) -> ModelCard:
    """Find the candidate cuts; write `card.json`, `weights.bin`, `<cut>.head.onnx` and `<cut>.tail.onnx` to `folder`.

    `dims`: sizes of symbolic dims to weigh the cuts at (1 where missing), or `inputs` that show them. `contract`: what
    it asks of cuts is asked of the candidates. The card comes
    last: a folder with one is complete. InvalidModel when the file cannot be served, InvalidRequest when the inputs do
    not fit it, ModelUnavailable when the disk is full or the file was replaced meanwhile.
    """
    on_progress("read", 0.0)
    before = FolderBefore(model_path)
    model = load_model(model_path)
    folder.mkdir(parents=True, exist_ok=True)
    on_progress("weights", 0.1)
    share_weights(model, folder)
    on_progress("shapes", 0.3)
    feeds = settle(model, folder, dims=dims, inputs=inputs)
    asked = demands_of(contract, [spec.name for spec in model.inputs])
    calibrated = _bitmaps(_calibration(model))
    cuts = _with_calibrated(model, candidate_cuts(model, feeds, asked), calibrated).cuts
    on_progress("sizes", 0.35)
    grows = _growth(model, cuts, feeds, folder)
    for done, cut in enumerate(cuts):
        on_progress("cut", 0.4 + 0.6 * done / len(cuts))
        write_parts(model, cut, folder / f"{cut.id}.head.onnx", folder / f"{cut.id}.tail.onnx")
    card = msgspec.structs.replace(
        describe(model, cuts, asked),
        calibrated=tuple(sorted(calibrated)),
        made=_fingerprints(folder, (WEIGHTS_FILE, *_halves(cuts))),
        growth=grows,
    )
    before.require_same(card)
    write_card(card, folder)
    on_progress("done", 1.0)
    return card


def part(model_path: Path, folder: Path, cut: CutId, node_bitmap: str) -> CutCard:
    """Make the halves of one given cut in `folder`, with its card as `<cut>.json`.

    CutRefused when the bitmap is no closed set of this model's nodes, hashes to another id, or may not be cut.
    """
    model = load_model(model_path)
    found = cut_from_mask(model, mask_of(node_bitmap))
    if found.id != cut:
        here = f" (here {model.note})" if model.note else ""
        raise CutRefused(f"the node bitmap of cut {cut} means {found.id} in {model.digest}; the models differ{here}")
    folder.mkdir(parents=True, exist_ok=True)
    share_weights(model, folder)
    if any(name in model.unknown for name in found.boundary):
        settle(model, folder)
        found = cut_from_mask(model, found.mask)
    write_parts(model, found, folder / f"{cut}.head.onnx", folder / f"{cut}.tail.onnx")
    [share] = compute_shares(model, [found])
    card = cut_card(model, found, share)
    write_cut(card, _fingerprints(folder, _halves([found])), folder)
    return card


def _halves(cuts: Sequence[Cut]) -> list[str]:
    return [f"{cut.id}.{part}.onnx" for cut in cuts for part in ("head", "tail")]


def _fingerprints(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    found = {}
    for path in (folder / name for name in names):
        if path.is_file():
            with path.open("rb") as file:
                found[path.name] = (path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def describe(model: Model, cuts: Sequence[Cut], asked: ContractDemands = NOTHING_ASKED) -> ModelCard:
    """The card of a settled model with these cuts, which meet what was `asked`."""
    shares = compute_shares(model, cuts)
    return ModelCard(
        digest=model.digest,
        path=str(model.path.resolve()),
        files=model.files,
        inputs=model.inputs,
        outputs=model.outputs,
        nodes=len(model.nodes),
        opset=model.opset,
        integer=computes_in_integers(model),
        cuts=tuple(cut_card(model, cut, share) for cut, share in zip(cuts, shares, strict=True)),
        no_cuts_reason="" if cuts else _why_none(model, asked),
        note=model.note,
        demands=str(asked),
    )


def list_cuts(model_path: Path, *, inputs: Tensors | None = None, contract: Contract | None = None) -> dict[str, Any]:
    """The candidates as `isthmus cuts --json` prints them (DESIGN §7), and what table and plot show; keeps no files.

    `bytes` is the payload of one request (boundary and the inputs the tail needs) for each codec, at the shapes of
    `inputs`, or with 1 for symbolic dims. `klt`, of calibrated cuts: the cheapest point of the curve inside the
    contract's bound. Beside: the model's `inputs`, its number of `nodes`, and `along`, one
    `[nodes, compute share, bytes uncoded]` for each legal boundary of a topological order; `dropped` and
    `beyond_limit`, what the search gave up (`candidates.Candidates`); `no_cuts_reason` and
    `note` as in the card. Errors as in `prepare`.
    """
    model = load_model(model_path)
    with tempfile.TemporaryDirectory(prefix="isthmus-cuts-") as name:
        folder = Path(name)
        share_weights(model, folder)
        feeds = settle(model, folder, inputs=inputs)
    asked = demands_of(contract, [spec.name for spec in model.inputs])
    calibration = _calibration(model)
    found = _with_calibrated(model, candidate_cuts(model, feeds, asked), _bitmaps(calibration))
    cuts = found.cuts
    inside = _inside(calibration, contract)
    everywhere = all_prefix_cuts(model)
    return {
        "model": str(model_path),
        "digest": model.digest,
        "nodes": len(model.nodes),
        "along": [
            [cut.nodes, round(share, 6), crossing_bytes(model, cut)]
            for cut, share in zip(everywhere, compute_shares(model, everywhere), strict=True)
            if cut.legal and cut.boundary
        ],
        "inputs": [_plain(spec) for spec in _real(model, [spec.name for spec in model.inputs])],
        "no_cuts_reason": "" if cuts else _why_none(model, asked),
        "note": model.note,
        "dropped": found.dropped,
        "beyond_limit": found.beyond_limit,
        "cuts": [
            {
                "id": cut.id,
                "boundary": [_plain(spec) for spec in _real(model, cut.boundary)],
                "bytes": {codec: payload_bytes(_real(model, _crossing(cut)), codec, {}) for codec in TENSOR_CODECS},
                "compute_share": round(share, 6),
                "nodes": cut.nodes,
            }
            | ({KLT: msgspec.to_builtins(inside[cut.id])} if cut.id in inside else {})
            for cut, share in zip(cuts, compute_shares(model, cuts), strict=True)
        ],
    }


def _crossing(cut: Cut) -> tuple[str, ...]:
    return (*cut.boundary, *cut.tail_inputs)


def _real(model: Model, names: Sequence[str]) -> list[TensorSpec]:
    """Specs of what travels, with the shapes one works with."""
    specs = [model.crossing(name) for name in names]
    return [
        TensorSpec(name=spec.name, dtype=spec.dtype, shape=model.shapes.get(spec.name, spec.shape))
        for spec in specs
        if isinstance(spec, TensorSpec)
    ]


def _plain(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def folder_for(cache_dir: Path, digest: ModelDigest, model_path: Path) -> Path:
    """Where a model's parts lie in a cache: one folder for each content at each place."""
    key = hashlib.sha256(f"{digest}\0{model_path.resolve()}".encode()).hexdigest()[:16]
    return cache_dir / "models" / key


def settle(
    model: Model, folder: Path, *, dims: Mapping[str, int] | None = None, inputs: Tensors | None = None
) -> Tensors:
    """Fix the dims to work with: fill `model.shapes`, learn unknown types by running; returns the inputs used.

    Comes after `share_weights(model, folder)`. Without `inputs`, golden ones of the dims given are used. What a run
    does not tell either stays unknown, and cuts there are not legal. InvalidRequest when the inputs do not fit the
    model.
    """
    if inputs is None:
        feeds = golden_inputs(model.inputs, dims or {})
    else:
        bind_dims(model.inputs, inputs)
        feeds = {spec.name: inputs[spec.name] for spec in model.inputs}
    model.shapes = concrete_shapes(model.source, {name: array.shape for name, array in feeds.items()})
    unsettled = [name for name in model.values if name not in model.shapes and _showable(model, name)]
    names = list(dict.fromkeys((*model.unknown, *unsettled)))
    if names:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".dry-run-", suffix=".onnx") as file:
            _observe(model, names, feeds, Path(file.name))
    for name in model.output_names:
        if name in model.unknown:
            raise InvalidModel(f"{model.path}: output {name!r} has a type that neither shape inference nor a run tells")
    return feeds


def candidate_cuts(model: Model, feeds: Tensors, asked: ContractDemands) -> Candidates:
    """Of a settled model, at the sizes one works with (those of `feeds`), and for a dynamic model at others."""
    demands = Demands(
        weight_bytes_max=asked.memory_bytes,
        depth_min_ratio=asked.depth_min_ratio,
        private=frozenset(asked.private),
    )
    dims = open_dims(model.inputs)
    if not dims:
        return find_candidates(model, demands=demands)
    other = tuple(OTHER_SIZE if size <= 1 else 4 * size for size in sizes_of(dims, feeds))
    return find_candidates_at_both(
        model, concrete_shapes(model.source, shapes_at(model.inputs, dims, other)), demands=demands
    )


def served_cuts(model: Model, feeds: Tensors, asked: ContractDemands) -> Candidates:
    """The candidates, and the cuts that the calibration beside the model has tables for: what `prepare` makes."""
    return _with_calibrated(model, candidate_cuts(model, feeds, asked), _bitmaps(_calibration(model)))


def _calibration(model: Model) -> Calibration | None:
    """What lies beside the model; None without one that can be used."""
    try:
        return read_calibration(model.path.with_name(CALIBRATION_FILE), model.digest)
    except InvalidCalibration as error:
        log.warning("%s", error)
        return None


def _bitmaps(calibration: Calibration | None) -> dict[CutId, str]:
    return {} if calibration is None else {cut: tables.node_bitmap for cut, tables in calibration.tables.items()}


def _inside(calibration: Calibration | None, contract: Contract | None) -> dict[CutId, Point]:
    """The cheapest point inside the contract's bound, of the cuts that have one."""
    if calibration is None or contract is None:
        return {}
    fidelity = contract.data.fidelity
    found = {cut: curve.within(fidelity.name, fidelity.bound) for cut, curve in calibration.curves.items()}
    return {cut: point for cut, point in found.items() if point is not None}


def _with_calibrated(model: Model, found: Candidates, calibrated: Mapping[CutId, str]) -> Candidates:
    """The same with these cuts, in the order of depth; one that may not be made is left out with a warning."""
    cuts = {cut.id: cut for cut in found.cuts}
    for cut_id, bitmap in calibrated.items():
        if cut_id in cuts:
            continue
        try:
            cut = cut_from_mask(model, mask_of(bitmap))
        except CutRefused as error:
            log.warning("cut %s of the calibration is left out: %s", cut_id, error)
            continue
        if cut.id != cut_id or not cut.legal or not cut.boundary:
            log.warning("cut %s of the calibration is left out: %s", cut_id, cut.reason or "it means another cut here")
            continue
        cuts[cut_id] = cut
    if len(cuts) == len(found.cuts):
        return found
    return replace(found, cuts=tuple(sorted(cuts.values(), key=lambda cut: cut.nodes)))


def _growth(model: Model, cuts: Sequence[Cut], feeds: Tensors, folder: Path) -> Growth | None:
    """What the model's open dims do to these cuts; `feeds` is what the model was settled with."""
    dims = open_dims(model.inputs)
    if not dims or any(array.size == 0 for array in feeds.values()):
        return None
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dry-run-", suffix=".onnx") as file:
        return growth(model, cuts, sizes_of(dims, feeds), _shower(model, dims, feeds, Path(file.name)))


def _shower(model: Model, dims: tuple[OpenDim, ...], feeds: Tensors, path: Path) -> Show:
    """Shapes by running the model at other sizes, for `SHOWING_S` at most: they are wanted of few values."""
    opened: dict[tuple[str, ...], Segment] = {}
    until_s = time.monotonic() + SHOWING_S

    def show(sizes: tuple[int, ...], names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        if time.monotonic() > until_s:
            return {}
        wanted = tuple(name for name in names if name in model.shapes)  # what no run shows is not asked again
        try:
            if wanted not in opened:
                write_whole(path, whole_with(model, wanted))
                opened[wanted] = OrtEngine().open(path, threads=1)
            seen = opened[wanted].run(resized(model.inputs, dims, feeds, sizes), list(wanted))
        except IsthmusError as error:
            log.info("%s: a dry run at %s failed: %s", model.path, sizes, error)
            return {}
        return {name: array.shape for name, array in seen.items()}

    return show


def _showable(model: Model, name: str) -> bool:
    spec = model.spec(name)
    inside = all(spec.name != name for spec in model.inputs)
    return inside and isinstance(spec, TensorSpec) and any(not isinstance(dim, int) or dim < 0 for dim in spec.shape)


def _observe(model: Model, names: list[str], feeds: Tensors, path: Path) -> None:
    """Run the whole with these values as outputs and note what they are; where that fails, with halves of them."""
    engine = OrtEngine()
    waiting = [names]
    for attempt, group in enumerate(waiting):  # grows while it is read
        if attempt == DRY_RUNS_MAX:
            log.info("%s: gave up after %d dry runs", model.path, attempt)
            return
        try:
            write_whole(path, whole_with(model, group))
            segment = engine.open(path, threads=1)
            seen = segment.run(feeds, group)
            segment.close()
        except IsthmusError as error:
            log.info("%s: a dry run that shows %d values failed: %s", model.path, len(group), error)
            middle = len(group) // 2
            waiting += [half for half in (group[:middle], group[middle:]) if 0 < len(half) < len(group)]
            continue
        declared = {spec.name: spec.shape for spec in segment.output_specs}
        for name, array in seen.items():
            model.shapes[name] = array.shape
            model.learn(name, dtype_name(array.dtype), array.shape, declared[name])


def _why_none(model: Model, asked: ContractDemands) -> str:
    if model.no_cuts_reason:
        return model.no_cuts_reason
    if said := asked.said():
        return f"no cut meets what the contract asks of it: {said}"
    reasons = Counter(cut.reason for cut in all_prefix_cuts(model) if cut.reason)
    return reasons.most_common(1)[0][0] if reasons else "no cut has a tensor that crosses it"
