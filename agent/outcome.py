"""What becomes of a request that is answered: the outputs, the plan that made them, what each stage took."""

from __future__ import annotations

from dataclasses import dataclass

from agent.intake import InferenceRequest
from split.errors import EngineFailed
from split.plan.plan import Decision, Plan
from split.tensor import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one answer to a request, and how it came about."""

    outputs: Tensors
    decision: Decision
    ran: Plan
    """The plan that made the answer; LOCAL after a fallback."""
    fallback: str
    """Why the device finished what the companion should have; empty when it did not."""
    stages_ms: dict[str, float]
    """Measured: queue, activate (opening what was not open), image, head or whole, encode, network, cloud_queue,
    cloud_decode, tail, decode, local_tail; and rest, what none of them has, where it ran as planned and in one part."""
    total_ms: float
    sent: bool = False
    """Whether its payload left for the companion."""
    doubled_ms: float = 0.0
    """How long the device had been at a finish when the companion's answer came first."""


def outcome_of(
    request: InferenceRequest,
    decision: Decision,
    outputs: Tensors,
    *,
    ran: Plan,
    fallback: str,
    stages_ms: dict[str, float],
    now_s: float,
) -> Outcome:
    """The answer is there now, with the outputs that the request wants, in its order. EngineFailed where one of them
    was not made."""
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        raise EngineFailed(f"{ran} of model {request.model.name!r} made no output {missing[0]!r}")
    return Outcome(
        outputs={name: outputs[name] for name in request.outputs},
        decision=decision,
        ran=ran,
        fallback=fallback,
        stages_ms=stages_ms,
        total_ms=(now_s - request.received_at_s) * 1000,
    )
