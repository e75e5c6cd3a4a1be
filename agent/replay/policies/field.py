"""All policies that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agent.replay.known import Known
from agent.replay.policies.ans import Ans
from agent.replay.policies.fixed import Local, Offload, best_static
from agent.replay.policies.oracle import Oracle
from agent.replay.policies.ours import Ours
from agent.replay.policies.surgeons import Dads, Neurosurgeon
from agent.replay.policies.threshold import Threshold
from agent.replay.policies.two_way import TwoWay
from agent.replay.world import Policy, World

FIELD: Final[Mapping[str, Callable[[World, Mapping[str, Known]], Policy]]] = {
    "ours": lambda world, known: Ours(known),
    "ours, without hedges": lambda world, known: Ours(known, hedges=False),
    "oracle": lambda world, known: Oracle(),
    "local": lambda world, known: Local(),
    "offload raw": lambda world, known: Offload("raw"),
    "offload encoded": lambda world, known: Offload("encoded"),
    "two-way rule": lambda world, known: TwoWay(),
    "best static plan": lambda world, known: best_static(world),
    "Neurosurgeon": lambda world, known: Neurosurgeon(known),
    "DADS": lambda world, known: Dads(known),
    "ANS": lambda world, known: Ans(known),
    "threshold with hysteresis": lambda world, known: Threshold(),
}
"""Name → the policy for a world, whose models are known so. Made afresh for each run: policies learn."""
