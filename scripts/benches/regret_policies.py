"""The field's own policies in the cells of `regret`: each chooses from the same measured stages, in the simulator of
`agent/replay`, and is charged what its plans took for real.

A plan that did not run for real in a cell is charged the sum of its stages, as much larger or smaller as the oracle was
than its own sum; the share of such requests is labelled `modelled`. What a policy tries while it learns is not charged,
as `auto`'s is not.

Misses, bytes and joules are the simulator's, of the same requests with a deadline (`DEADLINE`): whoever is late is
finished on the device, which costs twice. Nobody's power was measured: it is that of `DEVICE` and `RADIO`, whatever ran
the stages, so that the joules compare policies and say little of any one device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agent.replay import world as replay
from agent.replay.known import Known
from agent.replay.policies.field import FIELD
from agent.replay.policies.fixed import Fixed
from agent.replay.simulate import simulate
from scripts.benches.figure import percentile
from scripts.benches.regret_cells import Cell, Subject
from scripts.benches.regret_oracle import Measured
from scripts.benches.regret_stages import Offer, Stages, Sums
from scripts.lab_pair import Conditions
from split.plan.plan import Placement, Plan
from split.plan.power import Power, modelled
from split.profiles.device import load_device
from split.profiles.radio import RADIOS, LinkKind

REQUESTS: Final = 90
LEARN: Final = 60
"""Of these, so many are not charged."""
JITTER: Final = 0.05
"""Relative scatter of a stage: about what a quiet machine shows."""
APART: Final = 3.0
"""Requests are so many times the slowest plan apart: none waits for another."""

DEADLINE: Final = 2.0
"""Times what the fastest plan of a cell takes, where misses are counted: whoever is off by so much is of no use."""
DEVICE: Final = "raspberry-pi-4"
RADIO: Final = LinkKind.WIFI

OURS: Final = ("ours", "ours, without hedges", "oracle")
"""Of the simulator's policies: they ran for real here, and requests that are apart are not hedged."""

Make = Callable[[replay.World, Mapping[str, Known]], replay.Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One policy in one cell, a request in the mean."""

    ms: float
    regret: float
    modelled: float
    """Share of requests whose plan never ran for real there."""
    missed: float
    """Share; this and what follows are modelled."""
    bytes: float
    joules: float


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
    """A row for each policy, the least mean regret first; `isthmus` is the chosen plan, `isthmus auto` every request.
    The last row says what is modelled."""
    costs = {one.cell: Costs(one) for one in measured}
    worlds = {one.cell: world_of(one.cell, offers[one.cell.subject], sums.stages(one.cell)) for one in measured}
    known = {str(cell.subject): offers[cell.subject].known for cell in costs}
    static = best_static(costs, worlds)
    field: dict[str, Make] = {name: make for name, make in FIELD.items() if name not in OURS}
    field["best static plan"] = lambda *_: Fixed("best static plan", static)
    rows = [
        _row(name, [_scored(make, world, known, costs[cell]) for cell, world in worlds.items()])
        for name, make in field.items()
    ]
    ran: dict[str, list[Scored]] = {"isthmus": [], "isthmus auto": [], "oracle": []}
    for one in measured:
        world, cost = worlds[one.cell], costs[one.cell]
        chosen = Fixed("isthmus", {str(one.cell.subject): one.chosen})
        ran["isthmus"].append(_ran(one.regret, chosen, world, cost))
        ran["isthmus auto"].append(_ran(one.auto_regret, FIELD["ours"](world, known), world, cost))
        ran["oracle"].append(_ran(1.0, FIELD["oracle"](world, known), world, cost))
    rows += [_row(name, scored) for name, scored in ran.items()]
    rows.sort(key=lambda row: float(row["mean_regret"]))
    source = f"device profile {DEVICE}, {RADIO.value} at each cell's rate"
    return [*rows, {"misses, bytes, joules": f"simulated, deadline {DEADLINE:g} × the fastest plan; power of {source}"}]


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
        power=power_of(link, offer.profile.threads),
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


def _scored(make: Make, world: replay.World, known: Mapping[str, Known], costs: Costs) -> Scored:
    """Over the requests that count."""
    charged = [costs.of(outcome.plan) for outcome in simulate(world, make(world, known))[LEARN:]]
    ms = statistics.fmean(ms for ms, _ in charged)
    missed, bytes_, joules = _beside_time(make(world, known), world)
    return Scored(
        ms=ms,
        regret=ms / costs.oracle_ms,
        modelled=statistics.fmean(modelled for _, modelled in charged),
        missed=missed,
        bytes=bytes_,
        joules=joules,
    )


def _ran(regret: float, policy: replay.Policy, world: replay.World, costs: Costs) -> Scored:
    """What ran for real; `policy`: the same in the simulator."""
    missed, bytes_, joules = _beside_time(policy, world)
    return Scored(ms=regret * costs.oracle_ms, regret=regret, modelled=0.0, missed=missed, bytes=bytes_, joules=joules)


def _beside_time(policy: replay.Policy, world: replay.World) -> tuple[float, float, float]:
    """(share that missed, bytes, joules) of the requests that count, where each has a deadline."""
    deadline_ms = DEADLINE * fastest_ms(world)
    arrivals = [replace(arrival, deadline_ms=deadline_ms) for arrival in world.arrivals]
    counted = simulate(replace(world, arrivals=arrivals), policy)[LEARN:]
    return (
        statistics.fmean(one.missed for one in counted),
        statistics.fmean(one.bytes for one in counted),
        statistics.fmean(one.joules for one in counted),
    )


def fastest_ms(world: replay.World) -> float:
    """What the fastest plan takes, as simulated without scatter."""
    (model, plans), first = next(iter(world.models.items())), world.arrivals[0]
    usable = [plan for plan in plans if plan.codec != "encoded" or first.encoded_bytes]
    calm = replace(world, arrivals=[first], jitter=0.0)
    return min(simulate(calm, Fixed("", {model: plan}))[0].total_ms for plan in usable)


def power_of(link: Conditions, threads: int) -> Power:
    """Of a `DEVICE` that computes on so many threads and sends over such a link."""
    return modelled(load_device(DEVICE), threads, RADIOS[RADIO]).at(link.rate_mbit, link.rate_mbit, threads=threads)


def _row(name: str, scored: Sequence[Scored]) -> dict[str, Any]:
    """Means over the cells."""
    regrets = [one.regret for one in scored]
    return {
        "policy": name,
        "mean_ms": statistics.fmean(one.ms for one in scored),
        "mean_regret": statistics.fmean(regrets),
        "p95_regret": percentile(regrets, 0.95),
        "worst_regret": max(regrets),
        "modelled": statistics.fmean(one.modelled for one in scored),
        "missed_modelled": statistics.fmean(one.missed for one in scored),
        "bytes_modelled": statistics.fmean(one.bytes for one in scored),
        "joules_modelled": statistics.fmean(one.joules for one in scored),
    }
