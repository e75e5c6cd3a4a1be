"""The two policies that most papers compare themselves with: Neurosurgeon and DADS. Both predict every layer, add up,
and take the least sum; they differ in what they cut and in where the times come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agent.replay.known import Known
from agent.replay.policies.monitor import Monitoring
from agent.replay.world import Arrival, Outcome, View
from split.plan.plan import LOCAL, Placement, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predicted:
    here_ms: float
    up_bytes: int
    there_ms: float


class _Surgeon(Monitoring):
    """Least of: device + bytes / rate + load · server. Device and server are known from profiles (the server's as a
    multiple of the device's, by their times for the whole model), rate and load as observed last: by the last answer,
    or told with a ping since. The server's profile is right, which is more than the device is told of it. No round
    trip, no reply, no queue, no codec and no encoded input: none of the papers has them."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        super().__init__()
        self._known = known
        self._plans: dict[str, dict[Plan, _Predicted]] = {}
        self._load: dict[str, float] = {}

    def begin(self, view: View) -> None:
        super().begin(view)
        self._load = {}
        self._plans = {}
        for name, plans in view.world.models.items():
            known = self._known[name]
            whole_ms = known.profile.whole_ms
            offload = plans.get(Plan(placement=Placement.OFFLOAD, codec="raw"))
            server_ms = offload.tail_ms if offload is not None else whole_ms
            predicted = {}
            for plan, share in self._shares(known).items():
                if plan in plans:
                    predicted[plan] = _Predicted(
                        here_ms=view.world.slowdown * share * whole_ms,
                        up_bytes=plans[plan].up_bytes,
                        there_ms=(1.0 - share) * server_ms,
                    )
            self._plans[name] = predicted

    def _shares(self, known: Known) -> Mapping[Plan, float]:
        """Each plan's predicted device time, as a share of the whole model's."""
        raise NotImplementedError

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        plans, rate, load = self._plans[arrival.model], self.rate_bytes_per_ms, self._load.get(arrival.model, 1.0)
        if math.isnan(rate):
            return LOCAL
        return min(plans, key=lambda plan: self._latency_ms(plans[plan], rate, load))

    @staticmethod
    def _latency_ms(plan: _Predicted, rate: float, load: float) -> float:
        return plan.here_ms + plan.up_bytes / rate + load * plan.there_ms

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        known = self._plans[outcome.arrival.model].get(outcome.plan)
        if "down" in outcome.stages_ms and known is not None and known.there_ms > 0.0:
            self._load[outcome.arrival.model] = outcome.stages_ms["tail"] / known.there_ms

    def loaded(self, cloud_ratio: float) -> None:
        self._load = dict.fromkeys(self._plans, cloud_ratio)


class Neurosurgeon(_Surgeon):
    """Kang et al., ASPLOS 2017: chains only, so cuts that cross one tensor; times by regression on the layers'
    configurations instead of measurements.

    The paper has one regression per layer type, over layers of many models. Here one line per model, through the
    measured heads over their share of the operations, stands for them: what it gets wrong is what operations do not
    tell about time, as in the paper. "Current" bandwidth and server load are those observed last.
    """

    name = "Neurosurgeon"

    def _shares(self, known: Known) -> Mapping[Plan, float]:
        shares = {cut.id: cut.compute_share for cut in known.card.cuts if len(cut.boundary) + len(cut.tail_inputs) == 1}
        measured = [(shares[cut.cut], cut.head_ms) for cut in known.profile.cuts if cut.cut in shares]
        points = np.array([*measured, (1.0, known.profile.whole_ms)])
        found = {LOCAL: 1.0, Plan(placement=Placement.OFFLOAD, codec="raw"): 0.0}
        slope, level = (
            np.polyfit(points[:, 0], points[:, 1], 1) if np.ptp(points[:, 0]) > 1e-3 else (known.profile.whole_ms, 0.0)
        )
        for cut, share in shares.items():
            predicted_ms = float(np.clip(level + slope * share, 0.0, known.profile.whole_ms))
            found[Plan(placement=Placement.SPLIT, cut=cut, codec="raw")] = predicted_ms / known.profile.whole_ms
        return found


class Dads(_Surgeon):
    """Hu et al., INFOCOM 2019, DADS in light mode (few requests: least latency), by a minimum cut over a graph whose
    edges are node times on either side and bytes / rate.

    Any set of nodes may be the head, so cuts of several tensors are in; costs are sums of node times, so that head and
    tail are taken to need together what the whole needs. The candidates are the sets a minimum cut can give for some
    rate and speeds; the least sum among them is what its minimum cut would be.
    """

    name = "DADS"

    def _shares(self, known: Known) -> Mapping[Plan, float]:
        found = {LOCAL: 1.0, Plan(placement=Placement.OFFLOAD, codec="raw"): 0.0}
        for cut in known.profile.cuts:
            share = cut.head_ms / max(cut.head_ms + cut.tail_ms, 1e-9)
            found[Plan(placement=Placement.SPLIT, cut=cut.cut, codec="raw")] = share
        return found
