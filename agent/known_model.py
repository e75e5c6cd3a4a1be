"""One model as the planner knows it: what its plans cost as known now (`learned_costs.py`), which of them the companion
holds ready (`readiness.py`), what is open here, and what was chosen last. Of the link it knows nothing.

No I/O, no clock, one thread (the event loop's), as the planner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from agent.learned_costs import LearnedCosts, segment_of
from agent.readiness import Readiness
from split.graph.card import ModelCard
from split.ids import CutId
from split.plan.exploring import Explorer
from split.plan.objective import SIGMAS
from split.plan.observation import Floats, Opening
from split.plan.plan import Decision, Placement, Plan
from split.plan.probing import BUSY_MAX_S
from split.plan.slack import margin_ratio
from split.plan.table import LOCAL_ROW, PlanTable
from split.profiles.contract import Behaviour, Contract
from split.profiles.measured import ModelProfile

RECENT_CUTS: Final = 2
"""To be kept open: the one in use, and the one before it, to which a link that changes to and fro leads back."""

OpeningMs = Mapping[CutId | Placement, tuple[float, float]]
"""Cut, local or offload → ms to open what runs first on the device, and what finishes there; what is not in it is
open. Another object whenever something has changed."""


class Known(NamedTuple):
    """What is known of one model at this moment, for a record of what happened."""

    table: PlanTable
    """As profiled."""
    cloud_ms: Floats
    """Per plan, the companion's compute as it said itself; before it did, this device's."""
    alpha: float
    """Drift of the device's compute; of its codecs and pictures not."""
    beta: float
    """Drift of the companion's."""
    speed_ratio: float
    """Companion / device on the same work."""
    image_ms: float
    """Preparing an encoded input on the device, and at the companion."""
    cloud_image_ms: float
    cloud_queue_ms: float
    behaviour: Behaviour
    """As the contract has it."""


@dataclass(slots=True, kw_only=True)
class KnownModel:
    """Made by `of`."""

    behaviour: Behaviour
    costs: LearnedCosts
    there: Readiness
    """At the companion."""
    incumbent: int = LOCAL_ROW
    """Before the first choice, remote plans must beat local as if it had been chosen."""
    decisions: int = 0
    recent_cuts: tuple[CutId, ...] = ()
    opening_ms: Callable[[], OpeningMs]
    explorer: Explorer | None
    """None for class gold, whose requests try nothing out, and where a try that fails would have no answer."""
    _reply_decides: Callable[[], bool] = lambda: False
    _decided_at_s: float = -math.inf
    _opening_known: OpeningMs | None = None
    _opening: Opening | None = None

    @classmethod
    def of(
        cls,
        card: ModelCard,
        profile: ModelProfile,
        contract: Contract,
        *,
        opening_ms: Callable[[], OpeningMs],
        slowdown: float,
    ) -> KnownModel:
        """As profiled, nothing learned yet. `opening_ms`: as of `Planner.add_model`."""
        table = PlanTable.build(card, profile, contract)
        tries = contract.behaviour.service_class != "gold" and table.finishes_here
        return cls(
            behaviour=contract.behaviour,
            costs=LearnedCosts.of(profile, table, slowdown),
            there=Readiness.of(table),
            opening_ms=opening_ms,
            explorer=Explorer(table.splits | table.offloads) if tries else None,
        )

    def recalibrated(
        self, card: ModelCard, profile: ModelProfile, contract: Contract, opening_ms: Callable[[], OpeningMs]
    ) -> None:
        """As `Planner.recalibrated`: the segments are the same, the codecs' rows are others."""
        before, now = self.costs.table, PlanTable.build(card, profile, contract)
        alike = self.costs.recalibrated(profile, now)
        self.there.recalibrated(now, alike)
        if self.explorer is not None:
            self.explorer.rearrange(now.splits | now.offloads, [before.row_of.get(plan) for plan in now.plans])
        self.incumbent = now.row_of.get(before.plans[self.incumbent], LOCAL_ROW)
        self.opening_ms, self._opening_known = opening_ms, None

    # -- decisions ----------------------------------------------------------------------------------------------------

    def opening(self) -> Opening | None:
        """What is to be opened now, per plan; worked out when something has opened or closed."""
        known = self.opening_ms()
        if known is not self._opening_known:
            both = np.array([known.get(segment_of(plan), (0.0, 0.0)) for plan in self.costs.table.plans])
            self._opening = Opening(run_ms=both[:, 0], finish_ms=both[:, 1]) if both.any() else None
            self._opening_known = known
        return self._opening

    def decided(self, decision: Decision, now_s: float) -> None:
        """A request was decided freely, and nothing tried with it."""
        self._reply_decides, self._decided_at_s = decision.reply_decides, now_s
        self.incumbent = self.costs.table.row_of[decision.chosen.plan]
        self.decisions += 1
        for cut in (decision.chosen.plan.cut, decision.worth_opening):
            if cut is not None and self.recent_cuts[:1] != (cut,):
                self.recent_cuts = (cut, *(other for other in self.recent_cuts if other != cut))[:RECENT_CUTS]

    def stays_for_reply(self, now_s: float) -> bool:
        """Whether the last request, which is not long ago, stayed here only for what its reply would have taken."""
        return now_s - self._decided_at_s < BUSY_MAX_S and self._reply_decides()

    def finish_margin_ratio(self) -> float:
        """As `Planner.finish_margin_ratio`."""
        return margin_ratio(self.costs.edge.scatter, SIGMAS[self.behaviour.service_class])

    def observe_total(self, plan: Plan, measured_ms: float, predicted_ms: float) -> None:
        """As `Planner.observe_total`."""
        row = self.costs.table.row_of.get(plan)
        if self.explorer is not None and row is not None:
            self.explorer.observe(row, measured_ms, predicted_ms)

    # -- the companion ------------------------------------------------------------------------------------------------

    def connected(self, peer: str, *, another_way: bool) -> None:
        """To a companion of this name; `another_way`: it is another one, or reached another way."""
        self.there.another_connection()
        self.there.peer = peer
        if another_way and self.explorer is not None:
            self.explorer.forget_remote()

    def companion_ready(self, whole_ms: float, image_ms: float, pace: float) -> None:
        """As `Planner.companion_ready`; `pace`: the companion's when it measured these times, as it says."""
        self.there.model_ready(self.costs.groups.get(Placement.OFFLOAD))
        self.costs.companion_ready(whole_ms, image_ms, pace)

    def companion_paced(self, pace: float, from_s: float) -> None:
        """The companion's pace on this connection is another one, since some time after `from_s`."""
        if self.there.ready:
            self.costs.companion_paced(pace, from_s)

    def segment_ready(self, cut: CutId, tail_ms: float) -> None:
        """As `Planner.segment_ready`."""
        rows = self.costs.groups.get(cut)  # None: a cut of the card that was never measured here; no plan uses it
        self.there.segment_ready(cut, rows)
        if rows is not None:
            self.costs.segment_ready(rows, tail_ms)

    # -- status -------------------------------------------------------------------------------------------------------

    def known(self, cloud_queue_ms: float) -> Known:
        """For a record, beside a request."""
        costs = self.costs
        return Known(
            table=costs.measured,
            cloud_ms=costs.cloud_ms,
            alpha=costs.edge.ratio,
            beta=costs.cloud.ratio,
            speed_ratio=costs.speed_ratio,
            image_ms=costs.profile.image_ms,
            cloud_image_ms=costs.cloud_image_ms,
            cloud_queue_ms=cloud_queue_ms,
            behaviour=self.behaviour,
        )

    def snapshot(self, local_only_reason: str) -> Mapping[str, object]:
        """For `isthmus status`."""
        costs, there = self.costs, self.there
        return {
            "plans": len(costs.table),
            "allowed_now": int(np.count_nonzero(there.opened & costs.table.allowed[0])),
            "edge_drift": costs.edge.ratio,
            "cloud_drift": costs.cloud.ratio,
            "local_only_reason": local_only_reason,
            "cuts_not_open": dict(there.cuts_not_open),
            "codecs_why_not": dict(there.codecs_why_not),
            "calibration_rate": {codec: round(rate.ratio, 3) for codec, rate in costs.messages.rates.items()},
            "calibration_misfit": sorted(codec for codec, rate in costs.messages.rates.items() if rate.misfit),
            "self_difference": costs.profile.self_difference,
            "tried": {} if self.explorer is None else self.explorer.as_mapping(),
        }
