"""What every plan of a model would cost in the state of this moment: one vectorised sum over the table.

    latency = opening + queue_edge + image + α·head + encode + rtt + up·(ahead + bytes) + slow_start(bytes)
            + queue_cloud + β·(decode + tail) + down·bytes + reply

Encode, decode and reply each are a call and a share by size (`message_cost.py`). Device stages are multiplied by the
emulated slowdown. Risk is the quantile of it that the objective holds against the
deadline, mean + `Objective.sigmas` · σ. The way out is the end of a local finish that begins when nothing has come:

    way out = opening + queue_edge + image + α·head + encode + opening of the rest + α·(what is missing) + margins
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final

import numpy as np

from split.plan.observation import Floats, Observation
from split.plan.plan import RequestFacts
from split.plan.slack import MARGIN_MS, MARGIN_RATIO
from split.plan.slow_start import slow_start_ms
from split.plan.table import Column, PlanTable
from split.plan.values import value

_NOTHING: Final = [0.0] * len(Column)


@value(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One number for each plan of a table, in its order."""

    units: Floats
    """[Column]: ms per unit of each column of `PlanTable.costs`."""
    mean_ms: Floats
    risk_ms: Floats
    way_out_ms: Floats
    """When the device would be through with the request if the companion never answered; zeros where the contract
    wants no such finish."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """Row → parts that the request is served in, where they are several (`parting.py`)."""


def predict(table: PlanTable, observation: Observation, facts: RequestFacts) -> Prediction:
    """All plans of the table at once; it must be the one for this request's sizes (`PlanTable.at`)."""
    expected = _units(observation, facts)
    units = np.array((expected, _way_out_units(expected) if table.finishes_here else _NOTHING))
    mean_ms, way_out_ms = units @ table.costs
    if (opening := observation.opening) is not None:
        mean_ms += opening.run_ms
        if table.finishes_here:
            way_out_ms += opening.run_ms + observation.slowdown * opening.finish_ms
    if observation.remote is not None and (waits := observation.remote.link.slow_start) is not None:
        mean_ms += slow_start_ms(sent_bytes(table, facts), waits)
    variance = _variance_units(observation, facts) @ table.spread
    # Rounding may leave a certain plan a hair below zero.
    risk_ms = mean_ms + table.objective.sigmas * np.sqrt(np.maximum(variance, 0.0))
    return Prediction(units=units[0], mean_ms=mean_ms, risk_ms=risk_ms, way_out_ms=way_out_ms)


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
        here = (observation.edge_queue_ms, image, device, 0.0, 0.0, 0.0, 0.0, 0.0, device, head, 0.0, 0.0)
        return [*here, device, 0.0, device]
    link = remote.link
    return [
        observation.edge_queue_ms,
        image,
        device,
        link.rtt_ms + link.up_ms_per_byte * remote.ahead_bytes + remote.queue_ms,
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
