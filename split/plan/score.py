"""What each plan is worth by the objective, in one number: milliseconds where latency alone counts.

    value = T · Σ weight · quantity / reference,    T = what the whole takes here, unloaded

The quantities are rows of one matrix product over the plan table, like latency is: joules, money, and the work that a
plan brings to the stations that have work waiting. With a backlog the time part is drift-plus-penalty (Neely 2010,
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
from split.plan.predict import Prediction, sent_bytes
from split.plan.slow_start import slow_start_ms
from split.plan.table import LOCAL_ROW, Column, PlanTable
from split.plan.values import value

REQUEST_METADATA_BYTES: Final = 4096
"""What a request's message has beside its payload: ids, the names of outputs, how to prepare a picture."""

SPREADS_FROM: Final = 0.1
"""Weight of throughput: below, nothing of a request's size waits, and a change of segments costs more than it gains.
Two and three callers that ask again at once are above it most of the time; to keep the last choice and to try plans up
to 0.5 gave them 0.999 and 0.998 times as many answers (simulated: rate steps and the LTE walk, devices 2 and 10 times
slower)."""

_DEVICE: Final = (Column.IMAGE, Column.HEAD, Column.ENCODE, Column.ENCODE_CALL, Column.REPLY, Column.REPLY_CALL)
_COMPANION: Final = (Column.CLOUD_DECODE, Column.DECODE_CALL, Column.TAIL)
STATIONS: Final = np.array(
    [[float(column in one) for column in Column] for one in (_DEVICE, (Column.UP,), _COMPANION, (Column.DOWN,))]
)
"""[station, Column]: device, link up, companion, link down; what each does one request at a time. `Column.ENCODED` is
of two stations and added by `station_units`."""


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


def weighs_energy(table: PlanTable, observation: Observation) -> bool:
    """Whether joules count for this request."""
    return observation.battery_low or table.objective.energy > 0.0


def score(
    table: PlanTable,
    observation: Observation,
    facts: RequestFacts,
    prediction: Prediction,
    mask: Flags,
    energy_j: Floats | None,
) -> Score:
    """Every plan's value; `table` as for `predict`, `mask`: the plans that may run (at least one), `energy_j`: of
    `energies_j`, None where it counts nothing."""
    objective, backlog = table.objective, observation.backlog
    waits_ms = backlog.total_ms
    if waits_ms == 0.0 and not observation.battery_low and objective.time_alone:
        return Score(value_ms=prediction.mean_ms, objective=table.unloaded)
    stations = station_units(observation, facts, prediction.units)
    money = demand_ms = None
    energy_ref = money_ref = waiting = 0.0
    latency_ms = prediction.mean_ms
    if energy_j is not None:
        if (opening := observation.opening) is not None:
            energy_j = energy_j + observation.power.compute_w / 1000.0 * opening.run_ms
        energy_ref = _reference(energy_j, LOCAL_ROW)
    if objective.cost > 0.0:
        money = money_units(observation, facts, stations) @ table.costs
        money_ref = _reference(money, int(table.offloads.argmax()))
    if waits_ms > 0.0:
        prices = np.array((backlog.device_ms, backlog.link_ms, backlog.companion_ms, 0.0)) / waits_ms
        demand_ms = prices @ stations @ table.costs
        # What waits already is counted by the demand on it.
        latency_ms = latency_ms - observation.edge_queue_ms
        if (remote := observation.remote) is not None:
            ahead_ms = remote.ahead_bytes * remote.link.up_ms_per_byte
            ours_ms = min(remote.queue_ms, backlog.companion_ms)  # the rest of its queue is other devices'
            latency_ms -= (ahead_ms + ours_ms) * table.costs[Column.REMOTE]
        waiting = waits_ms / _positive(float(latency_ms[mask].min()))
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


def sustains(table: PlanTable, observation: Observation, facts: RequestFacts, prediction: Prediction) -> Flags:
    """Plans none of whose stations takes longer for a request than the contract's `throughput_min_per_s` leaves it."""
    demand_ms = station_units(observation, facts, prediction.units) @ table.costs
    found: Flags = demand_ms.max(axis=0) * table.objective.rate_min_per_s <= 1000.0
    return found


def station_units(observation: Observation, facts: RequestFacts, units: Floats) -> Floats:
    """[station, Column]: ms of device, link up, companion and link down per unit of each column."""
    stations: Floats = STATIONS * units
    if (remote := observation.remote) is not None:
        stations[1, Column.ENCODED] = remote.link.up_ms_per_byte * facts.encoded_bytes
        stations[2, Column.ENCODED] = remote.image_ms
    return stations


def energies_j(table: PlanTable, observation: Observation, facts: RequestFacts, units: Floats) -> Floats:
    """[plan]: `Power.joules` of each, once everything is open. Device work computes, bytes are sent and received, all
    the rest waits for the companion, for TCP's window too, but for the worker's queue, which costs nothing. `table` as
    for `predict`, `units`: of its `Prediction`."""
    power, stations = observation.power, station_units(observation, facts, units)
    wait_w = power.wait_w
    above_waiting = np.array((power.compute_w - wait_w, power.send_w - wait_w, 0.0, power.receive_w - wait_w))
    waiting = units.copy()
    waiting[Column.ALL] = 0.0
    found: Floats = (above_waiting @ stations + wait_w * waiting) @ table.costs
    if observation.remote is not None and (waits := observation.remote.link.slow_start) is not None:
        found += wait_w * slow_start_ms(sent_bytes(table, facts), waits)
    return found / 1000.0


def money_units(observation: Observation, facts: RequestFacts, stations: Floats) -> Floats:
    """[Column]: money per unit, for what crosses the link and what the companion computes."""
    prices = observation.prices
    found: Floats = prices.per_companion_ms * stations[2] + prices.per_byte * crossing_units(facts)
    return found


def crossing_units(facts: RequestFacts) -> Floats:
    """[Column]: bytes over the link, request and reply with their metadata."""
    units = np.zeros(len(Column))
    units[[Column.UP, Column.DOWN]] = 1.0
    units[Column.ENCODED], units[Column.REMOTE] = facts.encoded_bytes, 2 * REQUEST_METADATA_BYTES
    return units


def _reference(quantity: Floats, row: int) -> float:
    """What this plan takes; the most that any does where that is nothing."""
    return float(quantity[row]) or float(quantity.max())


def _positive(value: float) -> float:
    return value if value > 0.0 else 1.0
