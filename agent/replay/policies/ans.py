"""Autodidactic Neurosurgeon (ANS): Zhang, Chen and Xu, WWW 2021, arXiv 2102.02638. A bandit that learns what lies
behind the cut without a profile of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from agent.replay.known import Known
from agent.replay.world import Arrival, Fate, Outcome, Policy, View
from split.plan.observation import Floats
from split.plan.plan import LOCAL, Placement, Plan

ALPHA: Final = 0.1
"""Weight of the confidence bound, in units of the whole model's time on the device: the best of 0.01, 0.1 and 1 on the
trace with rate steps."""
RIDGE: Final = 1.0
OVERTAKEN: Final = (Fate.LATE, Fate.HEDGED, Fate.GIVEN_UP)
MU: Final = 0.25
"""Every T^μ-th request is forced to leave the device; the paper's bound is least for μ = 1/4."""


class Ans(Policy):
    """μLinUCB with equally important frames. Arms: local, raw offload, each cut of one tensor, raw.

    The device's part of each arm is known (profiled); the delay from there on is θ · x with seven features of the part
    behind the cut: operations and number of layers by kind (convolution, fully connected, activation), and the size of
    what travels. Local gives no feedback on θ, hence the forced requests, every T^μ-th with T the number of all
    requests. Where the kinds of layers are not told apart, as in a model's card, all count as the first kind. The paper
    has no deadlines: of a reply that was overtaken the delay was at least what was waited, which is learned where it is
    more than was expected.
    """

    name = "ANS"

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = known
        self._arms: dict[str, _Arms] = {}
        self._every = 1

    def begin(self, view: View) -> None:
        super().begin(view)
        slowdown = view.world.slowdown
        self._arms = {name: _Arms(self._known[name], plans, slowdown) for name, plans in view.world.models.items()}
        self._every = max(round(len(view.world.arrivals) ** MU), 2)

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        return self._arms[arrival.model].choose(self._every)

    def observe(self, outcome: Outcome) -> None:
        arms, stages_ms = self._arms[outcome.arrival.model], outcome.stages_ms
        if "down" in stages_ms:
            here_ms = stages_ms["queue"] + stages_ms.get("image", 0.0) + stages_ms.get("head", 0.0)
            arms.learn(outcome.plan, outcome.total_ms - here_ms)
        elif outcome.fate in OVERTAKEN and outcome.waited_ms > 0.0:
            arms.learn_least(outcome.plan, stages_ms.get("encode", 0.0) + outcome.waited_ms)


class _Arms:
    """One model's."""

    def __init__(self, known: Known, plans: Mapping[Plan, object], slowdown: float) -> None:
        self._unit_ms = whole_ms = known.profile.whole_ms * slowdown
        heads = {cut.cut: cut.head_ms * slowdown for cut in known.profile.cuts}
        rows: list[tuple[Plan, float, float, float, int]] = []
        raw = next((codec for codec in known.profile.input_codecs if codec.codec == "raw"), None)
        if raw is not None:
            rows.append((Plan(placement=Placement.OFFLOAD, codec="raw"), 0.0, 1.0, 1.0, raw.bytes))
        for cut in known.card.cuts:
            plan = Plan(placement=Placement.SPLIT, cut=cut.id, codec="raw")
            if cut.id in heads and len(cut.boundary) + len(cut.tail_inputs) == 1 and plan in plans:
                behind, layers = 1.0 - cut.compute_share, 1.0 - cut.nodes / max(known.card.nodes, 1)
                size = cut.boundary[0].nbytes(known.profile.dims) if cut.boundary else 0
                rows.append((plan, heads[cut.id], behind, layers, size))
        self._plans = [LOCAL, *(row[0] for row in rows)]
        self._here = np.array([whole_ms, *(row[1] for row in rows)]) / self._unit_ms
        most = max([1, *(row[4] for row in rows)])
        self._x = np.array([[0.0] * 7] + [[row[2], 0.0, 0.0, row[3], 0.0, 0.0, row[4] / most] for row in rows])
        self._row_of = {plan: row for row, plan in enumerate(self._plans)}
        self._a: Floats = RIDGE * np.eye(7)
        self._b: Floats = np.zeros(7)
        self._requests = 0

    def choose(self, every: int) -> Plan:
        self._requests += 1
        inverse = np.linalg.inv(self._a)
        spread = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", self._x, inverse, self._x), 0.0))
        bound = self._here + self._x @ (inverse @ self._b) - ALPHA * spread
        if self._requests % every == 0 and len(self._plans) > 1:
            bound[0] = math.inf
        return self._plans[int(bound.argmin())]

    def learn(self, plan: Plan, behind_ms: float) -> None:
        """What lies behind this plan's cut took so long."""
        x = self._x[self._row_of[plan]]
        self._a += np.outer(x, x)
        self._b += x * behind_ms / self._unit_ms

    def learn_least(self, plan: Plan, behind_ms: float) -> None:
        """It took so long at least."""
        if behind_ms > self._unit_ms * float(self._x[self._row_of[plan]] @ np.linalg.solve(self._a, self._b)):
            self.learn(plan, behind_ms)
