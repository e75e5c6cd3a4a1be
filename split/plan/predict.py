"""What every plan of a model would cost in the state of this moment: one matrix product over the table's columns.

    latency = opening + queue_edge + image + α·head + encode + rtt + up·(ahead + bytes) + slow_start(bytes)
            + queue_cloud + β·(decode + tail) + down·bytes + reply + rest

Encode, decode and reply each are a call and a share by size (`message_cost.py`), the rest is what no stage has
(`rest.py`): as much for every plan, and more for those that travel. Device stages are multiplied by the
emulated slowdown. Risk is the quantile of it that the objective holds against the
deadline, mean + `Objective.sigmas` · σ. The way out is the end of a local finish that begins when nothing has come:

    way out = opening + queue_edge + rest + image + α·head + encode + opening and α·(what is missing) + margins

Joules, money and the work that a plan brings to busy stations are sums over what each station does for it, so much for
every ms of it (`STATIONS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final

import numpy as np

from split.plan.objective import Backlog, Prices
from split.plan.observation import Floats, Observation
from split.plan.plan import RequestFacts
from split.plan.power import Power
from split.plan.slack import MARGIN_MS, MARGIN_RATIO
from split.plan.slow_start import slow_start_ms
from split.plan.table import Column, PlanTable
from split.plan.values import value

REQUEST_METADATA_BYTES: Final = 4096
"""What a request's message has beside its payload: ids, the names of outputs, how to prepare a picture."""

_NOTHING: Final = [0.0] * len(Column)
_ZERO: Final = np.zeros(())
"""An operand that numpy need not convert, which takes as long as the rest."""


@value(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One number for each plan of a table, in its order; None for what counts nothing now."""

    units: Floats
    """[Column]: ms per unit of each column of `PlanTable.costs`."""
    mean_ms: Floats
    risk_ms: Floats
    way_out_ms: Floats
    """When the device would be through with the request if the companion never answered; zeros where the contract
    wants no such finish."""
    energy_j: Floats | None = None
    """`Power.joules`, once everything is open: device work computes, bytes are sent and received, all the rest waits
    for the companion, for TCP's window too, but for the worker's queue, which costs nothing."""
    money: Floats | None = None
    """For what crosses the link and what the companion computes."""
    demand_ms: Floats | None = None
    """The plan's work at each station, weighed by that station's share of all work that waits."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """Row → parts that the request is served in, where they are several (`parting.py`)."""


def predict(table: PlanTable, observation: Observation, facts: RequestFacts) -> Prediction:
    """All plans of the table at once; it must be the one for this request's sizes (`PlanTable.at`)."""
    expected, objective, backlog = _units(observation, facts), table.objective, observation.backlog
    rows = [expected, _way_out_units(expected) if table.finishes_here else _NOTHING]
    weighs_energy, priced = observation.battery_low or objective.energy > 0.0, objective.cost > 0.0
    waits = backlog.total_ms > 0.0
    if weighs_energy or priced or waits:
        encoded_ms = _encoded_ms(observation, facts)
        if weighs_energy:
            rows.append(_joules(observation.power, expected, encoded_ms))
        if priced:
            rows.append(_money(observation.prices, facts, expected, encoded_ms))
        if waits:
            rows.append(_demand(backlog, expected, encoded_ms))
    units = np.array(rows)
    found = units.dot(table.costs)
    mean_ms, way_out_ms = found[0], found[1]
    if (opening := observation.opening) is not None:
        mean_ms += opening.run_ms
        if table.finishes_here:
            way_out_ms += opening.run_ms + observation.slowdown * opening.finish_ms
    if observation.remote is not None and (window := observation.remote.link.slow_start) is not None:
        window_ms = slow_start_ms(sent_bytes(table, facts), window)
        mean_ms += window_ms
        if weighs_energy:
            found[2] += observation.power.wait_w / 1000.0 * window_ms
    risk_ms = _variance_units(observation, facts).dot(table.spread)
    # Rounding may leave a certain plan a hair below zero.
    np.sqrt(np.maximum(risk_ms, _ZERO, out=risk_ms), out=risk_ms)
    risk_ms *= objective.sigmas
    risk_ms += mean_ms
    return Prediction(
        units=units[0],
        mean_ms=mean_ms,
        risk_ms=risk_ms,
        way_out_ms=way_out_ms,
        energy_j=found[2] if weighs_energy else None,
        money=found[2 + weighs_energy] if priced else None,
        demand_ms=found[-1] if waits else None,
    )


def station_ms(table: PlanTable, observation: Observation, facts: RequestFacts) -> Floats:
    """[station, plan]: what each plan takes of device, link up, companion and link down."""
    found: Floats = _each(_units(observation, facts), _encoded_ms(observation, facts)).dot(table.costs)
    return found


def crossing_units(facts: RequestFacts) -> list[float]:
    """[Column]: bytes over the link, request and reply with their metadata."""
    units = [0.0] * len(Column)
    units[Column.UP] = units[Column.DOWN] = 1.0
    units[Column.ENCODED], units[Column.REMOTE] = facts.encoded_bytes, 2 * REQUEST_METADATA_BYTES
    return units


def sent_bytes(table: PlanTable, facts: RequestFacts) -> Floats:
    """What each plan sends up; 0 for local, and for encoded where nothing came so."""
    sent: Floats = table.costs[Column.UP]
    return sent + facts.encoded_bytes * table.costs[Column.ENCODED] if facts.encoded_bytes else sent


def _units(observation: Observation, facts: RequestFacts) -> list[float]:
    """Milliseconds per unit of every `Column`, in its order; the cloud's are 0 without a companion."""
    device = observation.slowdown
    head = device * observation.alpha
    image = observation.slowdown * observation.image_ratio * observation.image_ms if facts.encoded_bytes else 0.0
    remote = observation.remote
    if remote is None:
        here = (
            observation.edge_queue_ms + observation.rest_ms,
            image,
            device,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            device,
            head,
            0.0,
            0.0,
        )
        return [*here, device, 0.0, device]
    link = remote.link
    return [
        observation.edge_queue_ms + observation.rest_ms,
        image,
        device,
        link.rtt_ms + link.up_ms_per_byte * remote.ahead_bytes + remote.queue_ms + remote.rest_ms,
        link.up_ms_per_byte,
        link.down_ms_per_byte,
        remote.beta * remote.speed_ratio,
        remote.image_ms + link.up_ms_per_byte * facts.encoded_bytes,
        device,
        head,
        remote.beta,
        0.0,
        device,
        1.0,
        device,
    ]


def _at_rates(
    expected: list[float],
    encoded_ms: tuple[float, float],
    *,
    device: float = 0.0,
    up: float = 0.0,
    companion: float = 0.0,
    down: float = 0.0,
    waiting: float = 0.0,
) -> list[float]:
    """[Column]: of something that a plan takes so much of for every ms of each station, which does one request at a
    time, and of waiting for round trip, queue and rest beside them. `expected`: `_units`; `encoded_ms`: of
    `_encoded_ms`."""
    _, image, encode, remote, sent, received, decode, _, reply, head, tail, _, encode_call, decode_call, reply_call = (
        expected
    )
    return [
        0.0,
        device * image,
        device * encode,
        waiting * remote,
        up * sent,
        down * received,
        companion * decode,
        up * encoded_ms[0] + companion * encoded_ms[1],
        device * reply,
        device * head,
        companion * tail,
        0.0,
        device * encode_call,
        companion * decode_call,
        device * reply_call,
    ]


def _encoded_ms(observation: Observation, facts: RequestFacts) -> tuple[float, float]:
    """What an input as it came takes of the link up, and of the companion."""
    remote = observation.remote
    if remote is None:
        return 0.0, 0.0
    return remote.link.up_ms_per_byte * facts.encoded_bytes, remote.image_ms


def _each(expected: list[float], encoded_ms: tuple[float, float]) -> Floats:
    """[station, Column]: ms of device, link up, companion and link down."""
    return np.array(
        [
            _at_rates(expected, encoded_ms, device=1.0),
            _at_rates(expected, encoded_ms, up=1.0),
            _at_rates(expected, encoded_ms, companion=1.0),
            _at_rates(expected, encoded_ms, down=1.0),
        ]
    )


STATIONS: Final = _each([1.0] * len(Column), (0.0, 0.0))
"""[station, Column]: 1 where that station does what the column says; `Column.ENCODED` is of two and left out."""


def _joules(power: Power, expected: list[float], encoded_ms: tuple[float, float]) -> list[float]:
    """[Column]"""
    wait_j = power.wait_w / 1000.0
    return _at_rates(
        expected,
        encoded_ms,
        device=power.compute_w / 1000.0,
        up=power.send_w / 1000.0,
        companion=wait_j,
        down=power.receive_w / 1000.0,
        waiting=wait_j,
    )


def _money(prices: Prices, facts: RequestFacts, expected: list[float], encoded_ms: tuple[float, float]) -> list[float]:
    """[Column]"""
    computed = _at_rates(expected, encoded_ms, companion=prices.per_companion_ms)
    return [one + prices.per_byte * crossing for one, crossing in zip(computed, crossing_units(facts), strict=True)]


def _demand(backlog: Backlog, expected: list[float], encoded_ms: tuple[float, float]) -> list[float]:
    """[Column]; something waits."""
    total_ms = backlog.total_ms
    return _at_rates(
        expected,
        encoded_ms,
        device=backlog.device_ms / total_ms,
        up=backlog.link_ms / total_ms,
        companion=backlog.companion_ms / total_ms,
    )


def _way_out_units(expected: list[float]) -> list[float]:
    """The same for `Prediction.way_out_ms`: only what the device does, a picture that travelled prepared here after
    all, and the margins that `slack.py` keeps."""
    queue, image, encode, *_, head, _, _, encode_call, _, _ = expected
    missing = head * (1 + MARGIN_RATIO)
    return [queue, image, encode, MARGIN_MS, 0.0, 0.0, 0.0, image, 0.0, head, 0.0, missing, encode_call, 0.0, 0.0]


def _variance_units(observation: Observation, facts: RequestFacts) -> Floats:
    """σ² per unit of every row of `PlanTable.spread`.

    Compute: (α·σ_α·head)² + (β·σ_β·tail)². Link: h·P·h for h = (1, up + encoded, down), expanded; the queue's σ² on
    top. Bytes that scatter by σ_b at a rate of x ms each add σ_b²·(x² + σ_x²), the variance of a product of
    independents less what is in h·P·h already. Device, link and cloud are independent, so that their variances add up.
    """
    head = observation.alpha * observation.alpha_sigma * observation.slowdown
    remote = observation.remote
    if remote is None:
        return np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, head * head, 0.0, 0.0])
    rr, ru, rd, uu, ud, dd = remote.link.covariance
    e = float(facts.encoded_bytes)
    tail = remote.beta * remote.beta_sigma
    return np.array(
        [
            rr + remote.queue_sigma_ms * remote.queue_sigma_ms,
            2.0 * ru,
            2.0 * rd,
            uu,
            2.0 * ud,
            dd,
            2.0 * ru * e + uu * e * e,
            2.0 * ud * e,
            head * head,
            tail * tail,
            remote.link.up_ms_per_byte * remote.link.up_ms_per_byte + uu,
        ]
    )
