"""The whole model on this device: what a run takes, at two sizes, what offloading ships, what a picture costs; and how
far the model is from itself when only the order of its sums changes. The cuts are `halves.py`'s.
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from split.codec.calibration import Calibration
from split.codec.image import prepare_image
from split.errors import EngineFailed, InvalidModel, InvalidRequest
from split.graph.card import ModelCard
from split.graph.growth import open_dims, sizes_of
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts
from split.runtime.engine import Engine, Segment
from split.runtime.profiler import measure, measure_interleaved
from split.tensor import Tensors, bind_dims, worst_difference
from split.workbench.codec_costs import codec_costs, of_pictures
from split.workbench.golden import Golden, typical_jpeg
from split.workbench.halves import OtherRequest
from split.workbench.resize import other_sizes, resized
from split.workbench.rows import rows_apart

log = logging.getLogger(__name__)

BUDGET_S: Final = 1.0
"""Of timing runs at one size."""
OTHER_WORK: Final = (0.6, 1.6)
"""Of the golden request's: between them, two sizes would tell little about what depends on size."""
OTHER_MS_MAX: Final = 3000.0
"""A run at other sizes: dearer ones would take too much of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCosts:
    """Of the first golden request, where nothing else is said."""

    ms: float
    dims: dict[str, int]
    """Symbolic dim → its size there."""
    sizes: tuple[int, ...]
    """Of the open dims."""
    image_ms: float
    """Preparing a picture, and typical bytes of one; zeros where the model takes none."""
    encoded_bytes: int
    input_codecs: tuple[CodecCosts, ...]
    """Of what an offload ships."""
    other: OtherRequest | None
    rows_apart: bool
    """Whether the rows of its batch do not depend on each other."""


def measure_whole(
    card: ModelCard,
    whole: Segment,
    golden: Sequence[Golden],
    *,
    contract: Contract | None,
    calibration: Calibration | None,
    on_progress: Callable[[str, float], None],
) -> WholeCosts:
    """`whole`: open as it will be served; `golden`: the first one for times, all for fidelity. A few seconds."""
    first = golden[0]
    image_ms, encoded_bytes = _image_costs(golden, contract)
    on_progress("measuring what offloading ships", 0.02)
    input_codecs = codec_costs(
        [request.inputs for request in golden],
        lambda tensors: whole.run(tensors),
        golden,
        of_pictures(calibration, contract.encoded() if contract is not None else {}),
        contract.data.fidelity if contract is not None else None,
    )
    ms = measure(whole, first.inputs, budget_s=BUDGET_S)
    sizes = sizes_of(open_dims(card.inputs), first.inputs)
    on_progress("measuring at other sizes", 0.03)
    return WholeCosts(
        ms=ms,
        dims=bind_dims(card.inputs, first.inputs),
        sizes=sizes,
        image_ms=image_ms,
        encoded_bytes=encoded_bytes,
        input_codecs=input_codecs,
        other=_other_request(card, whole, first, sizes, ms),
        rows_apart=rows_apart(card, whole, first.inputs),
    )


def self_difference(
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
            ms = measure(whole, inputs, budget_s=BUDGET_S)
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
