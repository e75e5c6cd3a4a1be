"""Golden inputs at the companion: what is opened for a device runs on them first, so that the device can compare (I10),
and is timed meanwhile. The counterpart of `agent/golden.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from cloud.executor import Done, TailExecutor, Work
from cloud.opened import Opened, check_feeds
from cloud.segments import PreparedModel
from split.codec.golden import golden_inputs, sample
from split.codec.payload import decode, encode
from split.errors import InvalidRequest
from split.graph.card import CutCard
from split.tensor import Tensors, TensorSpec
from split.wire.messages import ModelOffer

GOLDEN_RUNS = 3
"""Timed golden runs after one that opens and warms up; the median of three shrugs off one disturbance."""
MAX_GOLDEN_BYTES = 64 << 20
"""Golden inputs as decoded: a few pictures."""


class GoldenRuns:
    """Of one session."""

    def __init__(self, device: str, executor: TailExecutor) -> None:
        self._device = device
        self._executor = executor

    async def whole(self, model: PreparedModel, golden: Tensors) -> tuple[Opened, bytes]:
        """The whole, opened and timed, and its outputs as the device compares them."""
        outputs = tuple(spec.name for spec in model.card.outputs)
        whole = Opened(path=model.path, feeds=model.card.inputs, outputs=outputs, model_outputs=frozenset(outputs))
        return whole, _sampled(await self._run(whole, golden))

    async def cut(self, model: PreparedModel, card: CutCard, golden: Tensors) -> tuple[Opened, bytes]:
        """A cut's tail, opened and timed behind its head, and what both make as the device compares it."""
        by_name = {spec.name: spec for spec in model.card.inputs}
        boundary = tuple(spec.name for spec in card.boundary)
        model_outputs = frozenset(spec.name for spec in model.card.outputs)
        head = Opened(
            path=model.head(card.id),
            feeds=tuple(by_name[name] for name in card.head_inputs),
            outputs=tuple(dict.fromkeys((*boundary, *card.head_outputs))),
            model_outputs=model_outputs,
        )
        tail = Opened(
            path=model.tail(card.id),
            feeds=(*card.boundary, *(by_name[name] for name in card.tail_inputs)),
            outputs=card.tail_outputs,
            model_outputs=model_outputs,
        )
        made = await self._run(head, {name: golden[name] for name in card.head_inputs}, times=0)
        feeds = {name: made[name] for name in boundary} | {name: golden[name] for name in card.tail_inputs}
        check_feeds(feeds, tail.feeds)
        outputs = await self._run(tail, feeds)
        self._executor.forget(head.path)  # heads run on devices
        return tail, _sampled(made | outputs)

    async def _run(self, opened: Opened, feeds: Tensors, *, times: int = GOLDEN_RUNS) -> Tensors:
        """Open and run once, then `times` more for `opened.expected_ms` (their median); the first run's outputs."""
        await self._executor.open(opened.path)
        runs: list[Done] = []
        for _ in range(1 + times):
            work = Work(
                path=opened.path,
                feeds=feeds,
                outputs=opened.outputs,
                device=self._device,
                deadline_at_s=math.inf,
                expected_ms=opened.expected_ms,
            )
            runs.append(await self._executor.run(work))
        opened.expected_ms = statistics.median(run.run_ms for run in runs[1:] or runs)
        return runs[0].outputs


def golden_of(offer: ModelOffer, inputs: Sequence[TensorSpec]) -> Tensors:
    """The golden inputs that came with the offer, or the built-in ones of its dims."""
    if offer.golden:
        golden = decode(memoryview(offer.golden), max_bytes=MAX_GOLDEN_BYTES)
        check_feeds(golden, inputs)
        return golden
    size = sum(spec.nbytes(offer.dims) for spec in inputs)
    if size > MAX_GOLDEN_BYTES or any(dim < 0 for dim in offer.dims.values()):
        raise InvalidRequest(
            f"golden inputs of these dims would have {size} bytes, at most {MAX_GOLDEN_BYTES} are; give smaller ones"
        )
    return golden_inputs(inputs, offer.dims)


def _sampled(outputs: Tensors) -> bytes:
    return b"".join(bytes(part) for part in encode(sample(outputs), "raw"))
