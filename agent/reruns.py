"""Behind an answer of the companion's, an idle device runs the whole itself, to compare. Nobody waits for it: one at a
time over all models, not on a battery that is low, and whatever enters the worker meanwhile ends it.

An accelerator may have made one node of the whole, which nothing ends: there it runs only where no request that waits,
nor one like the last that comes meanwhile, would be late by it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Final, TypeVar

from agent.compute import Compute, Timed
from agent.intake import InferenceRequest, bytes_of
from agent.lateness import Lateness
from agent.outcome import Outcome
from agent.stages import Prepared, whole
from split.errors import IsthmusError
from split.runtime.engine import Stop
from split.tensor import Tensors

log = logging.getLogger(__name__)

MARGIN_MS: Final = 20.0
"""What a request has beyond its local time, as in I3, when a comparison has just begun before it."""

T = TypeVar("T")


class Reruns:
    """Lives on the event loop, as long as the daemon."""

    def __init__(self, *, compute: Compute, lateness: Lateness, battery_low: Callable[[], bool]) -> None:
        self._compute = compute
        self._lateness = lateness
        self._battery_low = battery_low
        self.running = False

    def begin(
        self,
        request: InferenceRequest,
        outcome: Outcome,
        local_ms: float,
        compare: Callable[[Tensors], T],
        then: Callable[[T | None], None],
    ) -> bool:
        """Run the whole, which takes `local_ms`, if the device is idle and has it open (opening it may close what
        requests need); whether it has begun. `compare` gets its outputs, on the worker; `then` what that said, on the
        loop, None where the whole fails here. It is not called where something else came first."""
        stoppable = not request.model.choice.accelerated
        if (
            self.running
            or self._battery_low()
            or self._compute.queue_ms > 0.0
            or request.model.activation_ms(None) > 0.0
        ):
            return False
        if not (stoppable or self._harms_nobody(request, local_ms)):
            return False
        holding, stop = request.holding.beside(), Stop()

        def ended(job: asyncio.Future[Timed[T]]) -> None:
            self.running = False
            holding.release()
            if job.cancelled():
                return
            if (error := job.exception()) is None:
                then(job.result().value)
            else:
                log.warning("model=%s an answer was not checked, the whole fails here: %s", request.model.name, error)
                then(None)

        try:
            holding.made(sum(map(bytes_of, [*request.inputs.values(), *outcome.outputs.values()])))
            job = self._compute.run(
                lambda: compare(whole(request, Prepared.nothing(request), stop)[0]),
                deadline_at_s=math.inf,
                expected_ms=local_ms,
                stop=stop,
                yields=stoppable,
            )
        except IsthmusError:  # no room for it now
            holding.release()
            return False
        self.running = True
        job.add_done_callback(ended)
        return True

    def _harms_nobody(self, request: InferenceRequest, local_ms: float) -> bool:
        deadline_ms = (request.deadline_at_s - request.received_at_s) * 1000
        return 2 * local_ms + MARGIN_MS <= deadline_ms and self._lateness.has_room(local_ms)
