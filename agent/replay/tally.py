"""What a policy's outcomes come to, and that in a sentence. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from agent.replay.world import Outcome
from split.plan.observation import Floats

SAME_RATIO: Final = 0.01
"""Two policies whose waiting differs by less are as good as each other."""


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests that a record stands for."""

    policy: str
    requests: int
    mean_ms: float
    p95_ms: float
    missed: int
    """Deadlines."""
    joules: float
    bytes: int
    money: float
    local_ratio: float
    """Share of requests that the policy ran on the device alone."""


def tally(policy: str, outcomes: Sequence[Outcome], weights: Floats) -> Tally:
    """`weights`: requests that each outcome stands for."""
    total_ms = np.array([one.total_ms for one in outcomes])

    def summed(values: Sequence[float]) -> float:
        return float(weights @ np.array(values))

    return Tally(
        policy=policy,
        requests=round(float(weights.sum())),
        mean_ms=float(weights @ total_ms / weights.sum()),
        p95_ms=quantile(total_ms, weights, 0.95),
        missed=round(summed([one.missed for one in outcomes])),
        joules=summed([one.joules for one in outcomes]),
        bytes=round(summed([one.bytes for one in outcomes])),
        money=summed([one.money for one in outcomes]),
        local_ratio=summed([one.plan.codec is None for one in outcomes]) / float(weights.sum()),
    )


def quantile(values: Floats, weights: Floats, share: float) -> float:
    """The least value that `share` of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(reached, share * reached[-1]))])


def in_words(ours: Tally, nothing: Tally, *, measured: bool = False) -> str:
    """What Isthmus would have changed over running everything on the device, and what for. `measured`: `ours` is what
    it did."""
    would = "" if measured else "would have "
    saved = 1.0 - ours.mean_ms / nothing.mean_ms if nothing.mean_ms > 0.0 else 0.0
    spared = nothing.missed - ours.missed
    cost = _cost(ours)
    if abs(saved) < SAME_RATIO and spared == 0:
        return f"Doing nothing would have been as good: everything on the device takes {nothing.mean_ms:.3g} ms."
    if saved < SAME_RATIO and spared <= 0:
        more = f"{-saved:.0%} more waiting" if saved <= -SAME_RATIO else "the same waiting"
        late = f" and {-spared} more missed deadlines" if spared else ""
        return f"Doing nothing would have been better: Isthmus {would}cost {more}{late}, and {cost}."
    gains = []
    if saved >= SAME_RATIO:
        gains.append(f"saved {saved:.0%} of the waiting")
    if spared > 0:
        gains.append(f"met {spared} of {nothing.missed} missed deadlines")
    losses = []
    if saved <= -SAME_RATIO:
        losses.append(f"{-saved:.0%} more waiting")
    if spared < 0:
        losses.append(f"{-spared} more missed deadlines")
    gained = f"Isthmus {would}{' and '.join(gains)} over doing nothing"
    return f"{gained}; it {would}cost {', '.join((*losses, cost))}."


def _cost(ours: Tally) -> str:
    money = f" and {ours.money:.3g} in money" if ours.money else ""
    return f"{size_text(ours.bytes)}{money}"


def size_text(count: float) -> str:
    """Bytes as a person says them: 84 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} bytes"
