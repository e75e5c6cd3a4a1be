"""What one request does on the worker thread: picture → tensors, head, encoding, tail. Blocking; decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from agent.intake import InferenceRequest, bytes_of
from agent.served_model import ServedModel
from split.codec.image import prepare_image
from split.codec.klt import encode_klt
from split.codec.payload import encode
from split.errors import CodecError
from split.ids import KLT, CutId
from split.plan.plan import REENCODED, Placement, Plan
from split.runtime.engine import Segment, Stop
from split.tensor import Tensors
from split.transport.channel import Buffer

Finished = tuple[Tensors, dict[str, float]]
"""The answer's outputs, and the stages measured on the way to them."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """How far a request has come on the device: enough to finish it here at any time."""

    inputs: Tensors
    """The model's inputs as tensors where pictures were prepared already, else as they came."""
    encoded: tuple[str, ...]
    """Inputs that are still pictures."""
    pictures: tuple[str, ...] = ()
    """Inputs that were pictures and have become tensors."""
    cut: CutId | None = None
    """Set when the head has run: what follows starts from the boundary."""
    boundary: Tensors = field(default_factory=dict)
    """Boundary tensors, and the model inputs that the tail needs."""
    outputs: Tensors = field(default_factory=dict)
    """Model outputs that the head has made."""
    payload: Sequence[Buffer] = ()
    stages_ms: dict[str, float] = field(default_factory=dict)

    @property
    def made_bytes(self) -> int:
        """What the device has made of the request so far, as tensors and payload; what they share counts twice."""
        made = [array for name, array in self.inputs.items() if name in self.pictures]
        made += [*self.boundary.values(), *self.outputs.values()]
        return sum(map(bytes_of, made)) + sum(memoryview(part).nbytes for part in self.payload)

    def start_again(self, request: InferenceRequest) -> None:
        """Let go of all that was made."""
        self.inputs, self.encoded, self.pictures = request.inputs, request.encoded, ()
        self.cut, self.boundary, self.outputs, self.payload = None, {}, {}, ()

    @classmethod
    def nothing(cls, request: InferenceRequest) -> Self:
        """Nothing done yet."""
        return cls(inputs=request.inputs, encoded=request.encoded)


@contextmanager
def _clocked(stages_ms: dict[str, float], stage: str) -> Iterator[None]:
    started_s = time.perf_counter()
    yield
    stages_ms[stage] = stages_ms.get(stage, 0.0) + (time.perf_counter() - started_s) * 1000


def _opened(get: Callable[[], Segment], expected_ms: float, stages_ms: dict[str, float]) -> Segment:
    """The segment; where it is not open (something is expected), opening it is a stage."""
    if expected_ms == 0.0:
        return get()
    with _clocked(stages_ms, "activate"):
        return get()


def _pictures_to_tensors(request: InferenceRequest, prepared: Prepared) -> None:
    if not prepared.encoded:
        return
    with _clocked(prepared.stages_ms, "image"):
        images = request.model.images
        ready = {name: prepare_image(prepared.inputs[name][0], images[name]) for name in prepared.encoded}
    prepared.inputs, prepared.encoded, prepared.pictures = prepared.inputs | ready, (), prepared.encoded


def prepare(
    request: InferenceRequest,
    plan: Plan,
    prepared: Prepared,
    stop: Stop | None = None,
    *,
    level: int | None = None,
) -> None:
    """All that the device does before a remote plan's bytes leave: picture, head, encoding; `level`: the setting of a
    codec that has some.

    `prepared` holds after each step what that step made, so that a later step that fails costs only itself.
    """
    if plan.codec != "encoded":
        _pictures_to_tensors(request, prepared)
    if plan.placement is Placement.SPLIT:
        assert plan.cut is not None
        card = request.model.card.cut(plan.cut)
        head = request.model.head(plan.cut)
        with _clocked(prepared.stages_ms, "head"):
            made = head.run({name: prepared.inputs[name] for name in card.head_inputs}, stop=stop)
        prepared.outputs = {name: made[name] for name in card.head_outputs}
        prepared.boundary = {spec.name: made[spec.name] for spec in card.boundary}
        prepared.boundary |= {name: prepared.inputs[name] for name in card.tail_inputs}
        prepared.cut = plan.cut
    with _clocked(prepared.stages_ms, "encode"):
        prepared.payload = _payload(request.model, plan, level, prepared)


def _payload(model: ServedModel, plan: Plan, level: int | None, prepared: Prepared) -> Sequence[Buffer]:
    assert plan.codec is not None
    if plan.cut is None:
        pictures = model.images if plan.codec in REENCODED else None
        return encode(prepared.inputs, plan.codec, pictures=pictures, level=level)
    if plan.codec != KLT:
        return encode(prepared.boundary, plan.codec)
    tables = model.sidecar.tables.get(plan.cut)
    if tables is None or level is None:
        raise CodecError(f"model {model.name!r} has no calibration of cut {plan.cut}; run isthmus calibrate")
    return encode_klt(prepared.boundary, tables, level)


def whole(request: InferenceRequest, prepared: Prepared, stop: Stop | None = None) -> Finished:
    """The whole model on the device."""
    here = Prepared(inputs=prepared.inputs, encoded=prepared.encoded)
    _pictures_to_tensors(request, here)
    segment = _opened(request.model.whole, request.model.activation_ms(None), here.stages_ms)
    with _clocked(here.stages_ms, "whole"):
        outputs = segment.run(here.inputs, request.outputs, stop=stop)
    return outputs, here.stages_ms


def finish(request: InferenceRequest, prepared: Prepared, stop: Stop | None = None) -> Finished:
    """The tail on the device, from the boundary that the head has made."""
    assert prepared.cut is not None
    stages_ms: dict[str, float] = {}
    model, cut = request.model, prepared.cut
    segment = _opened(lambda: model.tail(cut), model.activation_ms(cut), stages_ms)
    with _clocked(stages_ms, "local_tail"):
        made = segment.run({name: prepared.boundary[name] for name in segment.inputs}, stop=stop)
    return made | prepared.outputs, stages_ms
