"""The field's own policies in the cells of `regret`: each chooses from the same measured stages, in the simulator of
`agent/replay`, and is charged what its plans took for real.

A plan that did not run for real in a cell is charged the sum of its stages, as much larger or smaller as the oracle was
than its own sum; the share of such requests is labelled `modelled`. What a policy tries while it learns is not charged,
as `auto`'s is not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent.replay import world as replay
from agent.replay.policies.field import FIELD
from agent.replay.policies.fixed import Fixed
from agent.replay.simulate import simulate
from scripts.benches.figure import percentile
from scripts.benches.regret_cells import Cell, Subject
from scripts.benches.regret_oracle import Measured
from scripts.benches.regret_stages import Offer, Stages, Sums
from split.plan.plan import Placement, Plan

REQUESTS: Final = 90
LEARN: Final = 60
"""Of these, so many are not charged."""
JITTER: Final = 0.05
"""Relative scatter of a stage: about what a quiet machine shows."""
APART: Final = 3.0
"""Requests are so many times the slowest plan apart: none waits for another."""

OURS: Final = ("ours", "ours, without hedges", "oracle")
"""Of the simulator's policies: they ran for real here, and requests that are apart are not hedged."""


class Costs:
    """What each plan of a cell is charged, ms."""

    def __init__(self, one: Measured) -> None:
        oracle = one.oracle()
        self.oracle_ms = one.median(oracle, odd=False)
        by_text = {str(plan): ms for plan, ms in one.sums_ms.items()}
        self._level = self.oracle_ms / by_text[oracle] if oracle in by_text else 1.0
        self._ran = {plan: one.median(plan, odd=False) for plan in one.plans()}
        self._sums_ms = by_text

    def of(self, plan: Plan) -> tuple[float, bool]:
        """ms, and whether they are modelled."""
        text = str(plan)
        return (self._ran[text], False) if text in self._ran else (self._sums_ms[text] * self._level, True)


def compare(measured: Sequence[Measured], offers: Mapping[Subject, Offer], sums: Sums) -> list[dict[str, Any]]:
    """A row for each policy, the least mean first; `isthmus` is the chosen plan, `isthmus auto` every request."""
    costs = {one.cell: Costs(one) for one in measured}
    worlds = {one.cell: world_of(one.cell, offers[one.cell.subject], sums.stages(one.cell)) for one in measured}
    rows = [
        _row("isthmus", [one.regret for one in measured], 0.0),
        _row("isthmus auto", [one.auto_regret for one in measured], 0.0),
    ]
    known = {str(cell.subject): offers[cell.subject].known for cell in costs}
    static = best_static(costs, worlds)
    field = {name: make for name, make in FIELD.items() if name not in OURS}
    for name, make in {**field, "best static plan": lambda *_: Fixed("best static plan", static)}.items():
        charged = [_charged(make(world, known), world, costs[cell]) for cell, world in worlds.items()]
        rows.append(_row(name, [ratio for ratio, _ in charged], statistics.fmean(share for _, share in charged)))
    return sorted(rows, key=lambda row: float(row["mean_regret"]))


def best_static(costs: Mapping[Cell, Costs], worlds: Mapping[Cell, replay.World]) -> dict[str, Plan]:
    """Per model and form the plan with the least mean regret over all its cells, known afterwards."""
    chosen = {}
    for name in {next(iter(world.models)) for world in worlds.values()}:
        cells = [cell for cell, world in worlds.items() if name in world.models]
        common = set.intersection(*(set(worlds[cell].models[name]) for cell in cells))
        chosen[name] = min(
            common, key=lambda plan: sum(costs[cell].of(plan)[0] / costs[cell].oracle_ms for cell in cells)
        )
    return chosen


def world_of(cell: Cell, offer: Offer, stages: Mapping[Plan, Stages]) -> replay.World:
    """One link that stays as it is, requests that never meet."""
    model, link = str(cell.subject), cell.link
    plans = {plan: as_replayed(plan, one, offer.profile.image_ms, cell.slowdown) for plan, one in stages.items()}
    slowest_ms = max(
        one.computed_ms + link.rtt_ms + (one.up_bytes + one.down_bytes) * 8e-3 / link.rate_mbit
        for one in stages.values()
    )
    gap_s = APART * slowest_ms / 1e3
    return replay.World(
        models={model: plans},
        trace=[replay.Moment(at_s=0.0, up_mbit_s=link.rate_mbit, down_mbit_s=link.rate_mbit, rtt_ms=link.rtt_ms)],
        arrivals=[
            replay.Arrival(at_s=number * gap_s, model=model, encoded_bytes=offer.encoded_bytes)
            for number in range(REQUESTS)
        ],
        slowdown=cell.slowdown,
        jitter=JITTER,
    )


def as_replayed(plan: Plan, one: Stages, picture_ms: float, slowdown: float) -> replay.Stages:
    """The same at speed 1. `picture_ms`: what preparing a picture takes there, should a plan that sends it as it came
    be finished on the device."""
    here_ms = picture_ms if plan.codec == "encoded" else 0.0
    return replay.Stages(
        image_ms=one.image_ms / slowdown,
        head_ms=one.head_ms / slowdown,
        encode_ms=one.encode_ms / slowdown,
        up_bytes=one.up_bytes,
        cloud_decode_ms=one.cloud_decode_ms,
        tail_ms=one.tail_ms,
        down_bytes=one.down_bytes,
        decode_ms=one.decode_ms / slowdown,
        finish_ms=0.0 if plan.placement is Placement.LOCAL else one.tail_ms + here_ms,  # the two are machines alike
    )


def _charged(policy: replay.Policy, world: replay.World, costs: Costs) -> tuple[float, float]:
    """Regret of the requests that count, and the share of them whose plan never ran for real."""
    charged = [costs.of(outcome.plan) for outcome in simulate(world, policy)[LEARN:]]
    return (
        statistics.fmean(ms for ms, _ in charged) / costs.oracle_ms,
        statistics.fmean(modelled for _, modelled in charged),
    )


def _row(name: str, regrets: Sequence[float], modelled: float) -> dict[str, Any]:
    return {
        "policy": name,
        "mean_regret": statistics.fmean(regrets),
        "p95_regret": percentile(list(regrets), 0.95),
        "worst_regret": max(regrets),
        "modelled": modelled,
    }
