"""What is being made small: latency, throughput, energy and money, each with a weight. Values only.

    score(plan) = Σ weight · quantity(plan) / reference,    weights ≥ 0, their sum 1, in every state

Each quantity is linear in the columns of `PlanTable.costs`, each reference a positive number of the same request, so
that weights are pure numbers and a plan that is better in nothing never has the smaller score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from split.plan.values import value
from split.profiles.contract import Weights

ServiceClass = Literal["gold", "silver", "bronze"]

SIGMAS: Final[Mapping[ServiceClass, float]] = MappingProxyType({"gold": 3.0902, "silver": 2.0, "bronze": 1.2816})
"""What is held against the deadline, as mean + this · σ of a normal distribution: its 99.9 %, 97.7 % and 90 % quantile.
Silver, the default, is two sigma: a contract speaks of p99, and the local finish is started in time anyway."""

PRESETS: Final[Mapping[ServiceClass, Weights]] = MappingProxyType(
    {
        "gold": Weights(latency=1.0),
        "silver": Weights(latency=1.0),
        "bronze": Weights(latency=0.6, energy=0.2, cost=0.2),
    }
)
"""What counts where the contract weighs nothing but latency, which is what it does when it says nothing. Gold and
silver spend joules and money as it takes; bronze gives a tenth of a request's latency for a third of its energy."""

BATTERY_SHARE: Final = 0.9
"""Share of the whole weight that goes to energy while the battery is low: a tenth of the energy is then worth nine
tenths of the latency, as long as the deadline holds. Not all of it: between plans that spend the same, the fast one."""

PATIENCE: Final = 0.5
"""V of drift-plus-penalty (Neely 2010, Stochastic Network Optimization, §4), in unloaded requests: with so much work
waiting, sharing the stations out counts as much as all that a request costs itself. Small enough that the ten requests
of a busy caller are a backlog, large enough that a short wait is none. With 1, 0.5, 0.3 and 0.1 the planner in
simulation (30 networks of three stations, ten requests under way) reaches at worst 0.96, 0.99, 1.00 and 0.99 of the
best mix; mean latency at 0.4 of that rate is 1, 1.03, 1.04 and 1.11 times that at 1, at 0.9 of it 1, 0.91, 0.89 and
0.92 times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Money, in the unit of the configuration."""

    per_byte: float
    """Of what crosses the link, both ways."""
    per_companion_ms: float
    """Of what the companion computes."""

    def __post_init__(self) -> None:
        assert min(self.per_byte, self.per_companion_ms) >= 0.0, self


FREE: Final = Prices(per_byte=0.0, per_companion_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Work that earlier requests have brought and that is not done, ms of each station."""

    device_ms: float
    link_ms: float
    companion_ms: float

    @property
    def total_ms(self) -> float:
        """Of all stations."""
        return self.device_ms + self.link_ms + self.companion_ms


NO_BACKLOG: Final = Backlog(device_ms=0.0, link_ms=0.0, companion_ms=0.0)


@value(frozen=True, slots=True, kw_only=True)
class Objective:
    """Normalised weights, the quantile held against the deadline, and the rate to sustain."""

    latency: float
    throughput: float
    energy: float
    cost: float
    sigmas: float
    """Standard deviations beyond the mean that are held against the deadline."""
    rate_min_per_s: float = 0.0
    """A plan with a stage that cannot sustain this rate gives way to one without."""

    @staticmethod
    def of(weights: Weights, service_class: ServiceClass, *, throughput_min_per_s: float = 0.0) -> Objective:
        """What a contract says: its weights, or its class's where it weighs latency alone."""
        said = PRESETS[service_class] if weights == Weights() else weights
        ratio = said.normalised()
        return Objective(
            latency=ratio.latency,
            throughput=ratio.throughput,
            energy=ratio.energy,
            cost=ratio.cost,
            sigmas=SIGMAS[service_class],
            rate_min_per_s=throughput_min_per_s,
        )

    @property
    def time_alone(self) -> bool:
        """Whether neither energy nor money counts."""
        return self.energy == 0.0 and self.cost == 0.0

    def at(self, *, energy_known: bool, priced: bool, battery_low: bool, waiting: float) -> Objective:
        """The weights of this moment, normalised again.

        What is not known (no power model) or costs nothing (no price) weighs nothing. Where nothing waits, throughput
        is latency. Where requests wait (`waiting`: their work in unloaded requests, ≥ 0), throughput gets the share
        waiting / (waiting + V) of everything, V = `PATIENCE` · (1 − its weight in the contract), and what a request
        costs itself (latency, energy, money) the rest: drift-plus-penalty, divided by V + waiting. A low battery moves
        `BATTERY_SHARE` of all that to energy.
        """
        energy = self.energy if energy_known else 0.0
        cost = self.cost if priced else 0.0
        time = self.latency + self.throughput
        if time + energy + cost <= 0.0:
            time = 1.0  # nothing that is weighed is known
        total = time + energy + cost
        share = 0.0
        if waiting > 0.0:
            share = waiting / (waiting + PATIENCE * (1.0 - min(self.throughput / total, 1.0)))
        left = 1.0 - BATTERY_SHARE if battery_low and energy_known else 1.0
        each = left * (1.0 - share) / total
        return Objective(
            latency=each * time,
            throughput=left * share,
            energy=1.0 - left + each * energy,
            cost=each * cost,
            sigmas=self.sigmas,
            rate_min_per_s=self.rate_min_per_s,
        )

    def as_mapping(self) -> Mapping[str, float]:
        """For explanations: latency, throughput, energy, cost."""
        return {"latency": self.latency, "throughput": self.throughput, "energy": self.energy, "cost": self.cost}
