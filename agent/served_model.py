"""A model that answers requests: what is known of it, and its segments, opened as they are needed. How it comes to be
READY is `agent/bringing_up.py`'s business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from agent.calibrated import NO_SIDECAR, Sidecar
from split.codec.image import ImageSpec
from split.graph.card import CutCard, ModelCard
from split.graph.growth import OpenDim, batch_dim, open_dims
from split.ids import CutId, ModelDigest, ModelName
from split.oip.infer import plain_shape
from split.plan.plan import Placement
from split.profiles.contract import Contract, Privacy
from split.profiles.measured import ModelProfile
from split.runtime.accelerators import ON_CPU, Choice
from split.runtime.engine import Segment
from split.runtime.store import SegmentStore
from split.tensor import Tensors, TensorSpec

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class ServedModel:
    """A model that answers requests, from its loading on until it is unloaded or loaded anew."""

    name: ModelName
    version: str
    card: ModelCard
    contract: Contract
    images: dict[str, ImageSpec]
    """Inputs that may come as encoded pictures, and how to prepare them."""
    labels: dict[str, tuple[str, ...]]
    folder: Path
    """Where its segments, profile and golden inputs lie."""
    profile: ModelProfile | None
    store: SegmentStore
    sidecar: Sidecar = NO_SIDECAR
    """For codec klt; the profile has its curves."""
    choice: Choice = ON_CPU
    """What of the contract's accelerators this host has."""
    _warming: Future[None] | None = field(default=None, init=False, repr=False)
    _opening_known: int = field(default=-1, init=False, repr=False)
    """`SegmentStore.changes` when `_opening_ms` was worked out."""
    _opening_ms: dict[CutId | Placement, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def digest(self) -> ModelDigest:
        """Of its files."""
        return self.card.digest

    @cached_property
    def input_specs(self) -> dict[str, TensorSpec]:
        """By name, in the model's order."""
        return {spec.name: spec for spec in self.card.inputs}

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """As the file declares them, with open dims where an answer has contradicted it (`noted`)."""
        return self.card.outputs

    def noted(self, made: Tensors) -> None:
        """What a run has made: the runtime answers with another shape than the file declares rather than not at all."""
        for spec in self.outputs:
            if spec.name in made and not spec.fits(shape := made[spec.name].shape):
                seen = spec.opened_for(shape)
                self.outputs = tuple(seen if one is spec else one for one in self.outputs)
                log.warning(
                    "model %s: output %r is declared with shape %s and came with %s; from now on it is %s",
                    *(self.name, spec.name, plain_shape(spec), list(shape), plain_shape(seen)),
                )

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """In the model's order."""
        return tuple(spec.name for spec in self.card.outputs)

    @cached_property
    def open_dims(self) -> tuple[OpenDim, ...]:
        """What of the inputs' shapes a request decides."""
        return open_dims(self.card.inputs)

    @cached_property
    def batch_dim(self) -> int | None:
        """Number of the open dim that is a batch (`graph.growth.batch_dim`)."""
        return batch_dim(self.card.inputs, self.card.outputs)

    @property
    def measured_cuts(self) -> list[CutCard]:
        """Cuts that this device can split at: those of the profile."""
        measured = {cut.cut for cut in self.profile.cuts} if self.profile is not None else set()
        return [cut for cut in self.card.cuts if cut.id in measured]

    @property
    def calibration_note(self) -> str:
        """Why the calibration beside it, or part of it, is not used; "" otherwise."""
        known = {cut.id for cut in self.measured_cuts}
        if self.profile is None or not (lacking := self.sidecar.tables.keys() - known):
            return self.sidecar.note
        return (
            f"its calibration has cuts that are not measured here ({', '.join(sorted(lacking))}): load the model again "
            "to have them cut and measured"
        )

    @cached_property
    def privacy(self) -> Privacy:
        """The strictest word of the contract."""
        return self.contract.strictest_privacy()

    def image_rules(self) -> dict[str, dict[str, object]]:
        """How each encoded input is prepared, as it travels to the companion."""
        return {name: msgspec.to_builtins(spec) for name, spec in self.images.items()}

    @cached_property
    def _whole_path(self) -> Path:
        return Path(self.card.path)

    def whole(self) -> Segment:
        """The whole model, opened if it is not (blocking)."""
        return self.store.get(self._whole_path)

    def head(self, cut: CutId) -> Segment:
        """The head of `cut`, opened if it is not (blocking)."""
        return self.store.get(self._head_path(cut))

    def tail(self, cut: CutId) -> Segment:
        """The tail, in the same way."""
        return self.store.get(self._finish_path(cut))

    async def opened_head(self, cut: CutId) -> Segment:
        """The head of `cut`; opened beside the worker where it is not open, so that nobody else's work waits for it."""
        return await self._opened(self._head_path(cut))

    async def opened_finish(self, cut: CutId | None) -> Segment:
        """The tail of `cut`, or (None) the whole, in the same way."""
        return await self._opened(self._finish_path(cut))

    async def _opened(self, path: Path) -> Segment:
        segment = self.store.opened(path)
        return segment if segment is not None else await asyncio.wrap_future(self.store.opening(path))

    def activation_ms(self, cut: CutId | None) -> float:
        """What opening the tail of `cut`, or the whole (None), is expected to take now; 0.0 while it is open."""
        return self.store.activation_ms(self._finish_path(cut))

    def head_activation_ms(self, cut: CutId) -> float:
        """The same for the head of `cut`."""
        return self.store.activation_ms(self._head_path(cut))

    def halves_activation_ms(self, cut: CutId) -> float:
        """The same for both halves of `cut`."""
        return sum(self.store.activation_ms(path) for path in self._halves(cut))

    def opening_ms(self) -> Mapping[CutId | Placement, tuple[float, float]]:
        """What opening takes now that is not open, for the planner: what runs first on the device, what finishes there.
        The same object until something opens or closes."""
        if self._opening_known != self.store.changes:
            self._opening_known = self.store.changes
            whole_ms = self.activation_ms(None)
            self._opening_ms = {Placement.LOCAL: (whole_ms, 0.0), Placement.OFFLOAD: (0.0, whole_ms)}
            for card in self.measured_cuts:
                ms = (self.head_activation_ms(card.id), self.activation_ms(card.id))
                self._opening_ms[card.id] = ms
        return self._opening_ms

    def way_out(self, cut: CutId | None) -> AbstractContextManager[None]:
        """Within the block the tail of `cut`, or the whole (None), stays open if it is: a request that waits for the
        companion may need it at once."""
        return self.store.held(self._finish_path(cut))

    def warm(self, cut: CutId) -> None:
        """Have both halves open soon: in the background, one cut at a time."""
        self.keep_warm((cut,))

    def keep_warm(self, cuts: Iterable[CutId]) -> None:
        """Have the whole and the halves of these cuts open soon: in the background, the most wanted first."""
        wanted = [self._whole_path, *(path for cut in cuts for path in self._halves(cut))]
        closed = [path for path in wanted if self.store.activation_ms(path) > 0.0]
        if closed and (self._warming is None or self._warming.done()):
            self._warming = self.store.warm(closed)

    def _halves(self, cut: CutId) -> tuple[Path, Path]:
        return self._head_path(cut), self._finish_path(cut)

    def _head_path(self, cut: CutId) -> Path:
        return self.folder / f"{cut}.head.onnx"

    def _finish_path(self, cut: CutId | None) -> Path:
        return self._whole_path if cut is None else self.folder / f"{cut}.tail.onnx"
