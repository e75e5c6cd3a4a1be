"""The most requests per second that device, link and companion can serve, if plans may be mixed over requests.

With c[k, s] the time that plan k takes of station s, and p[k] the share of the requests it serves, a request takes at
least z of the busiest station:

    minimise z    subject to    Σ_k p[k] · c[k, s] ≤ z for every station s,    Σ_k p[k] = 1,    p ≥ 0

and 1/z is the bound: no schedule does better, and a queue in front of each station reaches it. Tarnawski et al.
(NeurIPS 2020) minimise the busiest station over single splits; over shares of requests it is a linear program, whose
optimum lies in a vertex, with no more plans than stations (Bertsimas and Tsitsiklis 1997, ch. 2). Those are few, so all
are looked at: exact, and without a solver. By duality z = max over weights w of the stations (w ≥ 0, Σ w = 1) of
min_k w · c[k], which the tests hold it against.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from agent.replay.course import BYTES_PER_MBIT
from agent.replay.world import Moment, Stages
from split.plan.observation import Floats
from split.plan.plan import Plan

_SINGULAR: Final = 1e-12
_ABOVE: Final = 1e-9
"""What rounding may put a station above z, relative to it."""


class Station(IntEnum):
    """Columns of what a plan takes: each serves one request at a time."""

    DEVICE = 0
    UP = 1
    COMPANION = 2
    DOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The best mix of plans and what bounds it."""

    ms_per_request: float
    """z: of the busiest station."""
    shares: Mapping[Plan, float]
    """Of the requests; those above 0."""

    @property
    def rate_per_s(self) -> float:
        return 1000.0 / self.ms_per_request


def demands_ms(stages: Stages, moment: Moment, *, slowdown: float = 1.0, encoded_bytes: int = 0) -> list[float]:
    """What one request by this plan takes of each `Station`, ms. `encoded_bytes`: size of the input where it came
    encoded; a plan that sends it as it came weighs what `Stages.up_bytes` says."""
    device = slowdown * moment.edge_ratio
    image_ms = stages.image_ms if encoded_bytes else 0.0
    return [
        device * (image_ms + stages.head_ms + stages.encode_ms),
        1000.0 * stages.up_bytes / (BYTES_PER_MBIT * moment.up_mbit_s),
        moment.cloud_ratio * (stages.cloud_decode_ms + stages.tail_ms),
        1000.0 * stages.down_bytes / (BYTES_PER_MBIT * moment.down_mbit_s),
    ]


def best_mix(demands: Mapping[Plan, Sequence[float]]) -> Mix:
    """The bound over these plans; every plan takes as many stations as the others, some time of at least one."""
    plans = _undominated(demands)
    costs = np.array([demands[plan] for plan in plans], dtype=np.float64)
    stations = costs.shape[1]
    best_ms, best = float("inf"), (np.ones(1), (0,))
    for count in range(1, min(len(plans), stations) + 1):
        chosen = np.array(list(itertools.combinations(range(len(plans)), count)))
        for busy in itertools.combinations(range(stations), count):
            ms, shares = _vertices(costs[chosen], list(busy))
            row = int(ms.argmin())
            if ms[row] < best_ms:
                best_ms, best = float(ms[row]), (shares[row], tuple(chosen[row].tolist()))
    mixed = {plans[k]: float(p) for k, p in zip(best[1], best[0].tolist(), strict=True) if p > _ABOVE}
    return Mix(ms_per_request=best_ms, shares=mixed)


def best_single(demands: Mapping[Plan, Sequence[float]]) -> Mix:
    """The same where all requests take one plan."""
    plan = min(demands, key=lambda plan: max(demands[plan]))
    return Mix(ms_per_request=max(demands[plan]), shares={plan: 1.0})


def _undominated(demands: Mapping[Plan, Sequence[float]]) -> list[Plan]:
    """Without plans that take no less of any station than another."""
    kept: list[Plan] = []
    for plan in sorted(demands, key=lambda plan: tuple(demands[plan])):
        mine = demands[plan]
        if not any(all(a <= b for a, b in zip(demands[other], mine, strict=True)) for other in kept):
            kept.append(plan)
    return kept


def _vertices(costs: Floats, busy: list[int]) -> tuple[Floats, Floats]:
    """For each set of plans (costs [sets, plans, stations]) the mix that makes just these stations equally busy: ms per
    request, inf where there is none, and shares [sets, plans]."""
    sets, count, _ = costs.shape
    # unknowns: shares, z; rows: each busy station's time − z = 0, shares sum up to 1
    system = np.zeros((sets, count + 1, count + 1))
    system[:, :count, :count] = costs[:, :, busy].transpose(0, 2, 1)
    system[:, :count, count] = -1.0
    system[:, count, :count] = 1.0
    scale = np.maximum(np.abs(system).max(axis=(1, 2)), 1e-30)
    regular = np.abs(np.linalg.det(system / scale[:, None, None])) > _SINGULAR
    system[~regular] = np.eye(count + 1)
    right = np.zeros((sets, count + 1, 1))
    right[:, count] = 1.0
    found = np.linalg.solve(system, right)[:, :, 0]
    shares, ms = found[:, :count], found[:, count]
    most = np.einsum("sk,skt->st", shares, costs).max(axis=1)
    valid = regular & (shares >= -_ABOVE).all(axis=1) & (most <= ms * (1.0 + _ABOVE) + 1e-12)
    return np.where(valid, np.maximum(ms, most), np.inf), np.clip(shares, 0.0, 1.0)
