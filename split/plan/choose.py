"""The comparison: of the plans that may run, the one with the least value that meets the request's demands, and a
sentence that says so. What a demand excludes gives way in steps: first the rate, then the way out, then the deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from split.ids import CutId
from split.plan.observation import Flags, Floats, Observation
from split.plan.plan import RequestFacts
from split.plan.predict import Prediction
from split.plan.score import Score, score, sustains
from split.plan.table import LOCAL_ROW, PlanTable
from split.plan.values import value

TIGHT: Final = 0.5
"""Of a request's budget: what may take more is not tried without need."""
CLIMB_RATIO: Final = 0.03
CLIMB_MS: Final = 0.2
CLIMB_SIGMAS: Final = 0.25
"""What a plan other than the incumbent must gain, see `_must_gain_ms`."""


@value(frozen=True, slots=True, kw_only=True)
class Compared:
    """Everything that the comparison of one request is made of."""

    table: PlanTable
    observation: Observation
    facts: RequestFacts
    prediction: Prediction
    mask: Flags
    """[plan]: what may run."""
    score: Score
    value_ms: Floats
    """[plan]: that of `score`; inf for what may not run."""

    @staticmethod
    def of(
        table: PlanTable,
        observation: Observation,
        facts: RequestFacts,
        prediction: Prediction,
        mask: Flags,
    ) -> Compared:
        """As `score`."""
        scored = score(table, observation, prediction, mask)
        return Compared(
            table=table,
            observation=observation,
            facts=facts,
            prediction=prediction,
            mask=mask,
            score=scored,
            value_ms=np.where(mask, scored.value_ms, np.inf),
        )

    def best(self, incumbent: int | None) -> tuple[int, Callable[[], str]]:
        """The row to run, and why, put into words when asked. `incumbent`: what a challenger must beat; None compares
        without stickiness."""
        row, notes = self._first_safe()
        if row is None:
            return self._best_chance()
        if incumbent is None or row == incumbent or not self.score.sticks:
            return row, lambda: f"{self._is_first(row)}{notes}"
        if not self.mask[incumbent] or not self._is_safe(incumbent) or not self._sustains(incumbent, row):
            return row, lambda: f"{self._is_first(row)}{notes}"
        if float(self.value_ms[incumbent] - self.value_ms[row]) < self._must_gain_ms(incumbent, row):
            return (
                incumbent,
                lambda: (
                    f"{self.table.labels[incumbent]} is expected in {self._ms(incumbent)}; {self.table.labels[row]} "
                    f"({self._ms(row)}) gains too little for a change{notes}"
                ),
            )
        return row, lambda: f"{self._is_first(row)} ({self.table.labels[incumbent]}: {self._ms(incumbent)}){notes}"

    def ordered(self) -> list[int]:
        """The rows that may run, best first; of equals the fastest, then the thriftiest, then the cheapest."""
        order = np.lexsort((*self._ties(), self.value_ms))
        return [int(row) for row in order[: np.count_nonzero(self.mask)]]

    def leisurely(self) -> Flags:
        """What may be tried without need: all that may run and would be answered in half the budget at worst; nothing
        while requests are spread, or a rate must be sustained."""
        if not self.score.sticks or self.table.objective.rate_min_per_s:
            return np.zeros(len(self.mask), dtype=np.bool_)
        at_worst_ms = np.maximum(self.prediction.risk_ms, self.prediction.way_out_ms)
        found: Flags = self.mask & (at_worst_ms <= TIGHT * self.facts.budget_ms)
        return found

    def _first_safe(self) -> tuple[int | None, str]:
        """The best row that meets the deadline, has its way out and, where one does, sustains the rate; None where no
        row is safe. And what it was preferred to, as a clause."""
        first = self._least(self.value_ms)
        if self._is_safe(first) and not self.table.objective.rate_min_per_s:
            return first, ""
        prediction, budget_ms = self.prediction, self.facts.budget_ms
        safe: Flags = (prediction.risk_ms <= budget_ms) & (prediction.way_out_ms <= budget_ms)
        if (best_safe := self._first(safe)) is None:
            return None, ""
        row, notes = best_safe, "" if best_safe == first else self._unsafe(first)
        if rate := self.table.objective.rate_min_per_s:
            of_contract = f"the {rate:g} requests per second of the contract"
            keeps_up = sustains(self.table, self.observation, self.facts)
            steady = self._first(safe & keeps_up)
            if steady is None:
                notes += f"; no plan sustains {of_contract}"
            elif steady != best_safe:
                row = steady
                notes += f"; {self.table.labels[best_safe]} does not sustain {of_contract}"
        return row, notes

    def _first(self, among: Flags) -> int | None:
        """The best row of these that may run; None where none is."""
        value_ms = np.where(among, self.value_ms, np.inf)
        row = self._least(value_ms)
        return row if value_ms[row] < np.inf else None

    def _least(self, value_ms: Floats) -> int:
        """The row with the least, as `ordered` has it."""
        row = int(value_ms.argmin())
        if self.score.time_alone:
            return row
        others_ms = value_ms.copy()
        others_ms[row] = np.inf
        if not others_ms[others_ms.argmin()] <= value_ms[row]:  # nor where one of the two is NaN
            return row
        equal = np.flatnonzero(value_ms == value_ms[row])
        return int(equal[np.lexsort([one[equal] for one in self._ties()])[0]])

    def _ties(self) -> list[Floats]:
        """What tells plans of equal value apart, what counts first last."""
        score = self.score
        return [one for one in (score.money, score.energy_j, self.prediction.mean_ms) if one is not None]

    def _is_safe(self, row: int) -> bool:
        budget_ms = self.facts.budget_ms
        return bool(self.prediction.risk_ms[row] <= budget_ms and self.prediction.way_out_ms[row] <= budget_ms)

    def _sustains(self, row: int, chosen: int) -> bool:
        """Whether `row` sustains the rate, or `chosen` does not either."""
        if not self.table.objective.rate_min_per_s:
            return True
        keeps_up = sustains(self.table, self.observation, self.facts)
        return bool(keeps_up[row] or not keeps_up[chosen])

    def worth_opening(self, row: int) -> CutId | None:
        """The cut that would be taken instead of `row` if all its halves were open: a request does not wait for what
        only later ones gain, but they shall find it open. None where there is none."""
        opening = self.observation.opening
        if opening is None:
            return None
        prediction, budget_ms = self.prediction, self.facts.budget_ms
        way_out_ms = prediction.way_out_ms - opening.run_ms - self.observation.slowdown * opening.finish_ms
        fits = self.mask & (np.maximum(prediction.risk_ms - opening.run_ms, way_out_ms) <= budget_ms)
        open_ms = self.score.value_ms - self.score.objective.latency * opening.run_ms
        other = int(np.where(fits, open_ms, np.inf).argmin())
        if not fits[other] or opening.run_ms[other] + opening.finish_ms[other] == 0.0:
            return None
        gains_ms = float(self.score.value_ms[row] - open_ms[other])
        return self.table.plans[other].cut if other == row or gains_ms >= self._must_gain_ms(row, other) else None

    def _best_chance(self) -> tuple[int, Callable[[], str]]:
        """The row to run where none is sure to be answered in time whatever the companion does, and why."""
        label, prediction, budget_ms = self.table.labels, self.prediction, self.facts.budget_ms
        row = self._first(prediction.risk_ms <= budget_ms)
        if row is not None:
            return (
                row,
                lambda: (
                    f"{label[row]} is expected in {self._ms(row)}; no plan is sure to be answered here within "
                    f"{budget_ms:.1f} ms should the companion fail (this one after {prediction.way_out_ms[row]:.1f} ms)"
                ),
            )
        # What is no number has no least: where nothing is told of any row, local runs, which nobody else can fail.
        told = self.mask & ~np.isnan(prediction.risk_ms)
        least = int(np.where(told, prediction.risk_ms, np.inf).argmin())
        return (
            least,
            lambda: (
                f"no plan is sure to meet the budget of {budget_ms:.1f} ms; {label[least]} has the least risk: "
                f"expected in {self._ms(least)}, {prediction.risk_ms[least]:.1f} ms at worst"
            ),
        )

    def _must_gain_ms(self, incumbent: int, challenger: int) -> float:
        """How much more the challenger must be worth than the incumbent (which may run and fits the deadline).

        Asymmetric. Back to local: nothing, at once, since local needs nobody. To any other plan the largest of 3 % and
        0.2 ms (below that, two predictions cannot be told apart and a change of segments costs caches) and a quarter of
        the uncertainty that the change would add: after an outage or a long silence the link is uncertain, and remote
        is used again when there is evidence for it, not hope. Milliseconds count by the weight of latency. An incumbent
        that misses the deadline or may not run any more never gets here.
        """
        if challenger == LOCAL_ROW:
            return 0.0
        risk, mean = self.prediction.risk_ms, self.prediction.mean_ms
        added = float((risk[challenger] - mean[challenger]) - (risk[incumbent] - mean[incumbent]))
        added_sigma = max(added, 0.0) / self.table.objective.sigmas
        return max(
            CLIMB_RATIO * float(self.score.value_ms[incumbent]),
            self.score.objective.latency * max(CLIMB_MS, CLIMB_SIGMAS * added_sigma),
        )

    # -- words --------------------------------------------------------------------------------------------------------

    def _ms(self, row: int) -> str:
        return f"{self.prediction.mean_ms[row]:.1f} ms"

    def _is_first(self, row: int) -> str:
        objective, label = self.score.objective, self.table.labels[row]
        if objective.latency == 1.0:
            return f"{label} is expected first, in {self._ms(row)}"
        counts = " and ".join(
            f"{name} {100 * weight:.0f} %" for name, weight in objective.as_mapping().items() if weight >= 0.005
        )
        battery = " while the battery is low" if self.observation.battery_low and objective.energy > 0.0 else ""
        return f"{label} is the best by {counts}{battery}, in {self._ms(row)}{self._costs(row)}"

    def _costs(self, row: int) -> str:
        score = self.score
        energy = f", {score.energy_j[row]:.3g} J" if score.energy_j is not None and score.objective.energy else ""
        money = f", {score.money[row]:.3g} of money" if score.money is not None and score.objective.cost else ""
        return energy + money

    def _unsafe(self, row: int) -> str:
        """Why this better plan does not run."""
        budget_ms, prediction, label = self.facts.budget_ms, self.prediction, self.table.labels[row]
        if prediction.risk_ms[row] > budget_ms:
            return f"; {label} may take {prediction.risk_ms[row]:.1f} ms, over the budget"
        return f"; {label} would end here after {prediction.way_out_ms[row]:.1f} ms should the companion fail"
