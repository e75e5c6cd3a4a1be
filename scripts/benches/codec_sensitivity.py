"""What it is worth to ask a model how its outputs move: EfficientNet-Lite0's cut at 14 × 14 × 80 with the transform by
runs of the tail, by the weights of the layers that read it, and by variance alone; bytes at equal divergence on
photographs that nothing was learnt from. `python -m scripts.benches.codec_sensitivity`: a minute or two on one core.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from scripts import models
from scripts.benches.codec_curves import Measurements, bytes_at, ratio_at
from scripts.benches.codec_splits import Parted, measure_klt
from scripts.benches.codec_subjects import MAIN, MAIN_BOUND, Sample, subject
from split.codec.calibration import GRID_ONE
from split.codec.klt import BoundaryTables
from split.graph.cuts import all_prefix_cuts, boundary_specs, compute_shares
from split.graph.load import load_model
from split.graph.partition import share_weights, write_parts
from split.runtime.segment import OrtEngine
from split.tensor import Array, Tensors
from split.workbench.calibration_budget import PROBES_MAX
from split.workbench.coded_cut import CodedCut, Halves
from split.workbench.cut import settle
from split.workbench.next_weights import weights_gram
from split.workbench.sources import FOLDS

BOUNDARY: Final = (80, 14, 14)
CROPS_LEARNT, CROPS_TEST = 4, 4
LEVELS: Final = range(GRID_ONE - 32, GRID_ONE + 1, 4)
"""Eight halve the step; the divergence falls to about a quarter then."""


def main() -> None:
    one = subject(MAIN)
    learnt, test = one.samples("calibration", crops=CROPS_LEARNT), one.samples("test", crops=CROPS_TEST)
    path, engine = models.model_path(MAIN), OrtEngine()
    whole = engine.open(path, threads=1)
    expected = [whole.run(sample.tensors) for sample in test]
    model = load_model(path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share_weights(model, folder)
        settle(model, folder, inputs=test[0].tensors)
        cuts = [
            cut for cut in all_prefix_cuts(model) if [model.shapes[made][1:] for made in cut.boundary] == [BOUNDARY]
        ]
        cut, share = min(zip(cuts, compute_shares(model, cuts), strict=True), key=lambda pair: pair[1])
        head_path, tail_path = folder / "head.onnx", folder / "tail.onnx"
        write_parts(model, cut, head_path, tail_path)
        head, tail = engine.open(head_path, threads=1), engine.open(tail_path, threads=1)
        first: Measurements | None = None
        for by, weights, probes in (
            ("outputs", _none, PROBES_MAX),
            ("weights", partial(weights_gram, model, cut), 0),
            ("variance", _none, 0),
        ):
            halves = Halves(
                cut=cut, specs=tuple(boundary_specs(model, cut)), node_bitmap="", head=head, tail=tail, weights=weights
            )
            coded = CodedCut(halves, FOLDS)
            coded.learn(
                [(sample.source, partial(_tensors, sample)) for sample in _by_turns(learnt)],
                measure=one.measure,
                probes=probes,
                has_time=lambda: True,
            )
            tables = coded.tables()
            assert [tensor.weighed_by for tensor in tables.tensors] == [by]
            parted = Parted(
                cut=cut.id,
                share=share,
                shapes="x".join(map(str, BOUNDARY)),
                tables=BoundaryTables(tables, "0" * 64),
                head=head,
                tail=tail,
                outputs=tuple(model.output_names),
            )
            measured = measure_klt(parted, LEVELS, test, expected, one.measure)
            first = first or measured
            print(
                f"by {by:8}: {bytes_at(measured, MAIN_BOUND)} bytes at {one.measure} {MAIN_BOUND}; "
                f"{ratio_at(measured, first, MAIN_BOUND)} of those by outputs",
                flush=True,
            )


def _by_turns(samples: list[Sample]) -> list[Sample]:
    """One of each source, then the second of each, as `sources.spread` has them."""
    return [sample for turn in range(CROPS_LEARNT) for sample in samples[turn::CROPS_LEARNT]]


def _tensors(sample: Sample) -> Tensors:
    return sample.tensors


def _none(_name: str, _axis: int) -> Array | None:
    return None


if __name__ == "__main__":
    main()
