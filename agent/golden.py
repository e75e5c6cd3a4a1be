"""This device's side of the comparison with a companion (I10): what golden inputs gave here, as the workbench measured
it together with the profile. So the worker computes nothing for it, however often a companion comes and goes.

The built-in inputs (the same bits on every machine, so they need not travel) wherever the model takes them; else one of
the requests that the model was profiled on, which then travels in the offer.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from agent.compute import Compute
from agent.served_model import ServedModel
from split.codec.golden import golden_inputs
from split.codec.payload import decode
from split.errors import CutRefused, EngineFailed, InvalidModel, InvalidRequest, Overloaded
from split.ids import CutId
from split.profiles.measured import GoldenRuns, ModelProfile, read_golden_runs
from split.tensor import Tensors

OFFERED_BYTES_MAX = 512 * 1024
"""Golden inputs travel in a message's metadata, which holds 1 MiB."""
SAMPLES_BYTES_MAX = 1 << 26
"""Sampled outputs of one segment: 4096 elements of each tensor, of a few hundred tensors at most."""
WARM_UP_S = 5.0
"""How long the first run of a model waits for a worker that is never idle. It only makes the next one faster."""


class Golden:
    """Reads what was measured, and opens what is going to be used; only `warm_up` runs anything."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._read: dict[Path, tuple[ModelProfile, GoldenRuns]] = {}
        """By the model's folder: what was read and checked, until `forget`."""

    async def warm_up(self, model: ServedModel) -> None:
        """Open the whole, and run it once when the worker has nothing else to do; InvalidModel when it cannot be
        opened. Inputs it refuses are no reason."""
        segment = await model.opened_finish(None)
        profile = model.profile
        inputs = golden_inputs(model.card.inputs, profile.dims if profile is not None else {})
        expected_ms = profile.whole_ms * self._compute.slowdown if profile is not None else 0.0
        try:
            async with asyncio.timeout(WARM_UP_S):
                await self._compute.run(lambda: segment.run(inputs), deadline_at_s=math.inf, expected_ms=expected_ms)
        except (EngineFailed, InvalidRequest, Overloaded, TimeoutError):
            return

    async def offered(self, model: ServedModel) -> bytes:
        """Golden inputs in payload format for the companion; empty when the built-in ones serve.

        InvalidModel when the model takes no built-in ones and the profiled request may not leave or is too large.
        """
        payload = (await self._runs(model)).offered
        if payload and model.privacy != "any":
            raise InvalidModel(
                f"model {model.name!r} takes no built-in golden inputs, and its contract ({model.privacy}) does not "
                "let a real one leave: it cannot be compared with a companion"
            )
        if len(payload) > OFFERED_BYTES_MAX:
            raise InvalidModel(
                f"the golden inputs of {model.name!r} have {len(payload)} bytes, at most {OFFERED_BYTES_MAX} can be "
                "compared with a companion; lay a smaller request in golden/ beside its versions"
            )
        return payload

    async def run(self, model: ServedModel, cut: CutId | None) -> Tensors:
        """Sampled golden outputs of the whole (cut None), or sampled boundary and outputs of head ∘ tail.

        What they were computed with is open here afterwards, as far as there is room. CutRefused for a cut that was
        left out of the profile.
        """
        runs = await self._runs(model)
        if cut is not None and cut not in runs.cuts:
            raise CutRefused(f"cut {cut} of model {model.name!r} was left out when this device was measured on it")
        if cut is not None:
            await model.opened_head(cut)
        await model.opened_finish(cut)
        return decode(runs.whole if cut is None else runs.cuts[cut], max_bytes=SAMPLES_BYTES_MAX)

    def forget(self, model: ServedModel) -> None:
        """Nothing more is compared for now; give the memory back."""
        self._read.pop(model.folder, None)

    async def _runs(self, model: ServedModel) -> GoldenRuns:
        assert model.profile is not None, "a model is shared once it is profiled"
        profile, runs = self._read.get(model.folder, (None, None))
        if runs is None or profile != model.profile:
            runs = await asyncio.to_thread(read_golden_runs, model.profile, model.folder)
            self._read[model.folder] = model.profile, runs
        return runs
