"""Golden inputs run on this device: for the comparison with a companion (I10), and to warm a model up.

The built-in ones (the same bits on every machine, so they need not travel) wherever the model takes them; else the
first request the model was profiled with, which then travels in the offer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from agent.compute import Compute
from agent.repository import ServedModel
from split.codec.golden import golden_inputs, sample
from split.codec.payload import encode
from split.errors import EngineFailed, InvalidModel, InvalidRequest
from split.ids import CutId
from split.tensor import Tensors

T = TypeVar("T")

BACKGROUND_S = 2.0
"""Deadline of these runs: requests that are due sooner go first, but under steady load they must not wait for ever,
or a companion that came back would never be used again (I7)."""
OFFERED_BYTES_MAX = 512 * 1024
"""Golden inputs travel in a message's metadata, which holds 1 MiB."""


class Golden:
    """Runs on the worker, after every request that waits."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._known: dict[tuple[str, CutId | None], Tensors] = {}
        """Runs are deterministic: what was computed once need not be again when a companion comes back."""
        self._offered: dict[str, Tensors] = {}
        """Digest → golden inputs of the models that take none of the built-in ones."""

    async def warm_up(self, model: ServedModel) -> None:
        """Open the whole and run it once; InvalidModel when it cannot be opened. Inputs it refuses are no reason."""

        def work() -> None:
            segment = model.whole()
            try:
                segment.run(_built_in(model))
            except (EngineFailed, InvalidRequest):
                return

        await self._in_background(work)

    async def offered(self, model: ServedModel) -> bytes:
        """Golden inputs in payload format for the companion; empty when the built-in ones serve.

        InvalidModel when the model takes no built-in ones and none of the profiled requests is small enough.
        """

        if (model.digest, None) in self._known and model.digest not in self._offered:
            return b""  # compared before, with the built-in ones

        def work() -> Tensors | None:
            try:
                model.whole().run(_built_in(model))
                return None
            except (EngineFailed, InvalidRequest):
                return _profiled_with(model)

        inputs = await self._in_background(work)
        if inputs is None:
            return b""
        if model.privacy != "any":
            raise InvalidModel(
                f"model {model.name!r} takes no built-in golden inputs, and its contract ({model.privacy}) does not "
                "let a real one leave: it cannot be compared with a companion"
            )
        payload = b"".join(encode(inputs, "raw"))
        if len(payload) > OFFERED_BYTES_MAX:
            raise InvalidModel(
                f"the golden inputs of {model.name!r} have {len(payload)} bytes, at most {OFFERED_BYTES_MAX} can be "
                "compared with a companion; lay a smaller request in golden/ beside its versions"
            )
        self._offered[model.digest] = inputs
        return payload

    async def run(self, model: ServedModel, cut: CutId | None) -> Tensors:
        """Sampled golden outputs of the whole (cut None), or sampled boundary and outputs of head ∘ tail."""
        if (known := self._known.get((model.digest, cut))) is not None:
            return known
        inputs = self._offered.get(model.digest) or _built_in(model)

        def work() -> Tensors:
            if cut is None:
                return sample(model.whole().run(inputs))
            card = model.card.cut(cut)
            made = model.head(cut).run({name: inputs[name] for name in card.head_inputs})
            feeds = {spec.name: made[spec.name] for spec in card.boundary}
            feeds |= {name: inputs[name] for name in card.tail_inputs}
            return sample(made | model.tail(cut).run(feeds))

        self._known[model.digest, cut] = found = await self._in_background(work)
        return found

    async def _in_background(self, work: Callable[[], T]) -> T:
        deadline_at_s = asyncio.get_running_loop().time() + BACKGROUND_S
        # Expected 0 ms: what lets most requests pass must not look like a queue to them.
        return (await self._compute.run(work, deadline_at_s=deadline_at_s, expected_ms=0.0)).value


def _built_in(model: ServedModel) -> Tensors:
    return golden_inputs(model.card.inputs, model.profile.dims if model.profile is not None else {})


def _profiled_with(model: ServedModel) -> Tensors:
    """The first request of `golden.npz` (keys `0/input/<name>`), as the workbench wrote it."""
    path = Path(model.folder) / "golden.npz"
    prefix = "0/input/"
    with np.load(path, allow_pickle=False) as arrays:
        found = {key.removeprefix(prefix): arrays[key] for key in arrays.files if key.startswith(prefix)}
    return {name: value.astype(object) if value.dtype.kind == "S" else value for name, value in found.items()}
