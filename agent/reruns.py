"""Behind an answer of the companion's, an idle device runs the whole itself, to compare. Nobody waits for it: one at a
time over all models, and never where a request that waits, or one like the last that comes meanwhile, would be late.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, TypeVar

from agent.compute import Compute, Timed
from agent.intake import InferenceRequest, bytes_of
from agent.journal import Outcome
from agent.lateness import Lateness
from agent.stages import Prepared, whole
from split.errors import IsthmusError
from split.tensor import Tensors

MARGIN_MS: Final = 20.0
"""What a request has beyond its local time, as in I3, when a comparison has just begun before it."""

T = TypeVar("T")


class Reruns:
    """Lives on the event loop, as long as the daemon."""

    def __init__(self, *, compute: Compute, lateness: Lateness) -> None:
        self._compute = compute
        self._lateness = lateness
        self.running = False

    def begin(
        self,
        request: InferenceRequest,
        outcome: Outcome,
        local_ms: float,
        compare: Callable[[Tensors], T],
        then: Callable[[T], None],
    ) -> bool:
        """Run the whole if the device is idle for so long; whether it has begun. `compare` gets its outputs, on the
        worker; `then` what that said, on the loop, unless the daemon stops before or the whole fails here."""
        deadline_ms = (request.deadline_at_s - request.received_at_s) * 1000
        if self.running or 2 * local_ms + MARGIN_MS > deadline_ms or not self._idle_for(local_ms):
            return False
        holding = request.holding.beside()

        def ended(job: asyncio.Future[Timed[T]]) -> None:
            self.running = False
            holding.release()
            if not job.cancelled() and job.exception() is None:
                then(job.result().value)

        try:
            holding.made(sum(map(bytes_of, [*request.inputs.values(), *outcome.outputs.values()])))
            job = self._compute.run(
                lambda: compare(whole(request, Prepared.nothing(request))[0]),
                deadline_at_s=math.inf,
                expected_ms=local_ms,
            )
        except IsthmusError:  # no room for it now
            holding.release()
            return False
        self.running = True
        job.add_done_callback(ended)
        return True

    def _idle_for(self, ms: float) -> bool:
        return self._compute.queue_ms == 0.0 and self._lateness.has_room(ms)
