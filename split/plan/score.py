"""What each plan is worth by the objective, in one number: milliseconds where latency alone counts.

    value = T · Σ weight · quantity / reference,    T = what the whole takes here, unloaded

The quantities are predicted like latency is (`predict.py`): joules, money, and the work that a plan brings to the
stations that have work waiting. With a backlog the time part is drift-plus-penalty (Neely 2010,
Stochastic Network Optimization, §4): the latency that the plan would have on empty stations, plus each station's
waiting work times the plan's demand on it. What waits for everybody alike then counts by how much is added to it, and a
stream of requests spreads over the plans as the linear program of the best mix would (`objective.py`: the weights).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from split.plan.objective import Objective
from split.plan.observation import Flags, Floats, Observation
from split.plan.plan import RequestFacts
from split.plan.predict import Prediction, station_ms
from split.plan.table import LOCAL_ROW, PlanTable
from split.plan.values import value

SPREADS_FROM: Final = 0.1
"""Weight of throughput: below, nothing of a request's size waits, and a change of segments costs more than it gains.
Two and three callers that ask again at once are above it most of the time; to keep the last choice and to try plans up
to 0.5 gave them 0.999 and 0.998 times as many answers (simulated: rate steps and the LTE walk, devices 2 and 10 times
slower)."""


@value(frozen=True, slots=True, kw_only=True)
class Score:
    """How the plans of a table compare, in its order."""

    value_ms: Floats
    """[plan] less is better; the predicted latency itself where nothing else counts."""
    objective: Objective
    """With the weights of this moment."""
    energy_j: Floats | None = None
    """[plan]; None where it counts nothing."""
    money: Floats | None = None

    @property
    def time_alone(self) -> bool:
        """Whether neither energy nor money counts."""
        return self.energy_j is None and self.money is None

    @property
    def sticks(self) -> bool:
        """Whether the last choice is worth keeping: not while requests are to be spread."""
        return not spreads(self.objective.throughput)


def spreads(throughput: float) -> bool:
    """Whether requests are spread where throughput weighs so much. What one takes then is its load's, and says nothing
    of its plan."""
    return throughput >= SPREADS_FROM


def score(table: PlanTable, observation: Observation, prediction: Prediction, mask: Flags) -> Score:
    """Every plan's value; `mask`: the plans that may run (at least one)."""
    objective, latency_ms, energy_j, money = table.objective, prediction.mean_ms, prediction.energy_j, prediction.money
    demand_ms = prediction.demand_ms
    if energy_j is None and money is None and demand_ms is None:
        return Score(value_ms=latency_ms, objective=table.unloaded)
    energy_ref = money_ref = waiting = 0.0
    if energy_j is not None:
        if (opening := observation.opening) is not None:
            energy_j = energy_j + observation.power.compute_w / 1000.0 * opening.run_ms
        energy_ref = _reference(energy_j, LOCAL_ROW)
    if money is not None:
        money_ref = _reference(money, int(table.offloads.argmax()))
    if demand_ms is not None:
        latency_ms = _alone_ms(observation, latency_ms)
        possible_ms = np.where(mask, latency_ms, np.inf)
        waiting = observation.backlog.total_ms / _positive(float(possible_ms[possible_ms.argmin()]))
    now = objective.at(
        energy_known=energy_ref > 0.0, priced=money_ref > 0.0, battery_low=observation.battery_low, waiting=waiting
    )
    here_ms = _positive(observation.slowdown * observation.alpha * table.whole_ms)
    value_ms = now.latency * latency_ms
    for weight, quantity, reference in (
        (now.throughput, demand_ms, here_ms),
        (now.energy, energy_j, energy_ref),
        (now.cost, money, money_ref),
    ):
        if quantity is not None and weight > 0.0:
            value_ms += weight * here_ms / reference * quantity
    return Score(value_ms=value_ms, objective=now, energy_j=energy_j, money=money)


def _alone_ms(observation: Observation, latency_ms: Floats) -> Floats:
    """Latency without what of our own waits already, which is counted by the demand on it; the rest of the companion's
    queue is other devices'."""
    if (remote := observation.remote) is None:
        return latency_ms - observation.edge_queue_ms
    ours_ms = min(remote.queue_ms, observation.backlog.companion_ms) + remote.ahead_bytes * remote.link.up_ms_per_byte
    found: Floats = latency_ms - (observation.edge_queue_ms + ours_ms)
    found[LOCAL_ROW] += ours_ms
    return found


def sustains(table: PlanTable, observation: Observation, facts: RequestFacts) -> Flags:
    """Plans none of whose stations takes longer for a request than the contract's `throughput_min_per_s` leaves it."""
    demand_ms = station_ms(table, observation, facts)
    found: Flags = demand_ms.max(axis=0) * table.objective.rate_min_per_s <= 1000.0
    return found


def _reference(quantity: Floats, row: int) -> float:
    """What this plan takes; the most that any does where that is nothing."""
    return float(quantity[row]) or float(quantity.max())


def _positive(value: float) -> float:
    return value if value > 0.0 else 1.0
