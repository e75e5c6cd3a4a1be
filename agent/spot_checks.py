"""Live spot checks: one in so many answers that came over a lossy codec is computed once more, unsplit, by an idle
device (`reruns.py`), and held against the contract's bound of fidelity.

Where the mean of what is found is over it (`split/plan/kept.py`), that is said (log, `isthmus status`, metrics), and
the codec is not used for the model until it is calibrated again or held to another bound (`broken_bounds.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from agent.intake import InferenceRequest
from agent.journal import Journal
from agent.outcome import Outcome
from agent.planner import Planner
from agent.reruns import Reruns
from agent.served_model import ServedModel
from split.codec.fidelity import farthest
from split.plan.kept import Kept
from split.plan.plan import LOSSLESS_CODECS
from split.profiles.boxes import Boxes
from split.tensor import Tensors

log = logging.getLogger(__name__)

OnBroken = Callable[[ServedModel, str, str], None]
"""Told of the model, the codec, and why it may not be used, when a bound is found to be broken."""


class _Checked:
    def __init__(self) -> None:
        self.unchecked = 0
        """Answers since the last one that was compared."""
        self.failed = 0
        """Of those, the ones that could not be."""
        self.kept = Kept()


class SpotChecks:
    """Lives on the event loop, as long as the daemon. `every`: one in so many answers, per model and codec; 0: none.
    `on_broken` is told beside the planner."""

    def __init__(
        self,
        *,
        every: int,
        planner: Planner,
        journal: Journal,
        reruns: Reruns,
        on_broken: OnBroken,
    ) -> None:
        self._every = every
        self._on_broken = on_broken
        self._planner = planner
        self._journal = journal
        self._reruns = reruns
        self._checked: WeakKeyDictionary[ServedModel, dict[str, _Checked]] = WeakKeyDictionary()
        """By codec; gone with the model."""

    def answered(self, request: InferenceRequest, outcome: Outcome, whole_ms: Callable[[], float]) -> None:
        """A request is answered, and its answer on its way; `whole_ms`: what the whole would take here, opening in.
        One that is due and finds the device busy, or ends for another request, leaves its turn to the next."""
        codec = outcome.ran.codec
        if not self._every or codec is None or codec in LOSSLESS_CODECS or outcome.fallback:  # parts finished here
            return
        by = request.model.contract.data.fidelity.by
        if isinstance(by, Boxes) and not by.outputs <= set(request.outputs):  # not all that detections are read off
            return
        if not self._is_current(request):
            return
        of_model = self._checked.setdefault(request.model, {})
        if (checked := of_model.get(codec)) is None:
            checked = of_model[codec] = _Checked()
            self._journal.checked(request.model.name, codec, checked.kept)
        checked.unchecked += 1
        self._journal.unchecked(request.model.name, codec, checked.unchecked)
        if checked.unchecked - checked.failed < self._every or checked.kept.broken:
            return
        then = partial(self._compared, request, codec, checked, checked.unchecked)
        self._reruns.begin(request, outcome, whole_ms(), partial(_distance, request, outcome), then)

    def _is_current(self, request: InferenceRequest) -> bool:
        """Whether no other calibration was taken up since it came."""
        return self._planner.plans_with(request.model.name, request.model.profile)

    def _compared(
        self, request: InferenceRequest, codec: str, checked: _Checked, answers: int, distance: float | None
    ) -> None:
        """`answers`: how many were unchecked when this one was looked at."""
        if not self._is_current(request):
            return
        if distance is None:
            checked.failed = answers
            return
        checked.unchecked, checked.failed, kept = checked.unchecked - answers, 0, checked.kept
        self._journal.unchecked(request.model.name, codec, checked.unchecked)
        model, fidelity = request.model, request.model.contract.data.fidelity
        bound = fidelity.bound if request.facts.fidelity is None else request.facts.fidelity
        broken = kept.checked(distance, bound)
        self._journal.checked(model.name, codec, kept)
        if broken:
            why = (
                f"live answers over codec {codec} are {kept.mean_ratio:.2f} times as far from the unsplit model's as "
                f"the bound allows ({fidelity.measure} {fidelity.bound:g}; mean of {kept.seen} spot checks); run "
                "isthmus calibrate with inputs like the live ones"
            )
            log.warning("model=%s %s", model.name, why)
            self._planner.codec_broken(model.name, codec, why)
            self._on_broken(model, codec, why)


def _distance(request: InferenceRequest, outcome: Outcome, expected: Tensors) -> float:
    """By the contract's measure, per item of a batch, of the outputs that were asked for."""
    by = request.model.contract.data.fidelity.by
    return farthest(by, {name: outcome.outputs[name] for name in expected}, expected, request.items)
