"""Many requests whose plans are the daemon's to choose, where no single cut keeps device and companion busy.

A tower with a waist early and one late: cut at either, one side does four fifths of the work,
and whole it is all on one side. On a link that takes no longer for a row than half the whole, requests that are spread
over plans keep both sides at work. The best mix is a linear program over device, link and companion
(`agent/replay/bound.py`) of local, both cuts and offload; each plan's stages are measured alone, one request after the
other in the same run. No other plan would make a better mix: both sides are equally fast, each plan has them do the
whole between them, and the best mix keeps both busy.

`single`: every request is forced on one plan, with no finish of it here. `auto`: the default contract, on latency
alone; under backlog it mixes. `throughput`: a contract with all its weight there. They run in turns; the callers use
both processors, since both programs are busy.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from agent.replay.bound import Mix, best_mix
from scripts.benches.figure import CACHE, Figure
from scripts.benches.pipeline_load import (
    PROCESSORS,
    RTT_MS,
    Requests,
    pair_in,
    row_bytes,
    stages_ms,
    start,
    together,
    waist_cut,
)
from scripts.benches.tower import SIDE, write_tower
from scripts.client import Answer, Client
from scripts.pair import Pair
from split.oip.infer import Scalar
from split.plan.plan import LOCAL, Placement, Plan

FOLDER: Final = CACHE / "pipeline-mix"
CONTRACTS: Final[Mapping[str, str]] = {
    "single": "behaviour: {fallback: {strategy: fail}}\n",
    "auto": "behaviour: {}\n",
    "throughput": "behaviour: {weights: {latency: 0, throughput: 1}}\n",
}
"""Name of the model → its contract; the same file three times, so that it is profiled once."""
FIRST: Final = "single"
"""Holds the file and its profile; the others lead to it."""
WIDTH: Final = 48
"""Channels: twice the work of `tower.WIDTH`, so that what HTTP and TLS take of both processors is little."""
LINK_RATIO: Final = 0.45
"""What a row at a waist takes on the link, as a share of the whole: nearly as busy as the sides at their best, and far
too slow for the wide cuts between the waists (eight times as many bytes), which would be balanced alone."""
SINGLES: Final = 2
"""As many of the best single plans run for real; in `--quick` the best one."""

_Wishes = Mapping[str, Scalar]


def prepare() -> None:
    """Profile the model and have the companion hold it, once."""
    _offer(FIRST)
    if not (FOLDER / "companion-cache").exists():
        with pair_in(FOLDER) as pair:  # while it is the only one: names that come later find its profile
            start(pair, FIRST)


def _offer(*names: str) -> None:
    """Have the repository hold these and no others: each is compared with the companion when the daemon starts."""
    models = FOLDER / "models"
    if not (models / FIRST / "1" / "model.onnx").exists():
        write_tower(models / FIRST / "1" / "model.onnx", width=WIDTH)
    for name, contract in CONTRACTS.items():
        if name not in (FIRST, *names):
            (models / name / "contract.yaml").unlink(missing_ok=True)
            (models / name / "1").unlink(missing_ok=True)
            if (models / name).exists():
                (models / name).rmdir()
            continue
        (models / name).mkdir(exist_ok=True)
        (models / name / "contract.yaml").write_text(contract)
        if not (models / name / "1").exists():
            (models / name / "1").symlink_to(models / FIRST / "1")


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    """`mix_over_single`: answers per second of `auto` / of the best single plan, as measured; more than 1 is wanted.
    `mix_of_lp`: of `auto` / of the best mix by the stages measured alone."""
    alone, seconds, rounds = (2, 2.0, 1) if quick else (15, 20.0, 4)
    chosen = ("auto",) if quick else ("auto", "throughput")
    _offer(*chosen)
    requests = Requests(FOLDER / "models" / FIRST / "1" / "model.onnx")
    with pair_in(FOLDER) as pair:
        start(pair, FIRST, *chosen)
        pair.pin("relay", set(PROCESSORS))
        os.sched_setaffinity(0, PROCESSORS)
        plans = _plans()
        with pair.client() as client:
            whole_ms = _alone(client, requests, plans[LOCAL], alone)["device"]
        pair.link(rtt_ms=RTT_MS, rate_mbit=row_bytes(waist_cut(FOLDER, 0)) * 8 / (LINK_RATIO * whole_ms) / 1e3)
        before = _demands(pair, requests, plans, alone, whole_ms)
        singles = sorted(plans, key=lambda plan: max(before[plan]))[: 1 if quick else SINGLES]
        asks = {str(plan): partial(_one, requests, FIRST, plans[plan]) for plan in singles}
        asks |= {name: partial(_one, requests, name, {}) for name in chosen}
        taken_ms: dict[str, list[float]] = {name: [] for name in asks}
        answers: dict[str, list[Answer]] = {name: [] for name in asks}
        for _ in range(rounds):
            for name, ask in asks.items():
                between_ms, answered = together(pair, ask, seconds)
                taken_ms[name].append(statistics.fmean(between_ms))
                answers[name] += answered
        after = _demands(pair, requests, plans, alone, whole_ms)
    demands = {plan: [(a + b) / 2 for a, b in zip(before[plan], after[plan], strict=True)] for plan in plans}
    return _figures(demands, singles, taken_ms, answers)


def _figures(
    demands: Mapping[Plan, list[float]],
    singles: list[Plan],
    taken_ms: Mapping[str, list[float]],
    answers: Mapping[str, list[Answer]],
) -> tuple[list[Figure], list[dict[str, Any]]]:
    mix = best_mix(demands)
    each_ms = {name: statistics.median(taken) for name, taken in taken_ms.items()}
    best_single_ms = min(each_ms[str(plan)] for plan in singles)
    rows: list[dict[str, Any]] = [_bound_row(demands, mix)]
    rows += [
        {
            "run": name,
            "ms_per_request": ms,
            "over_best_single": best_single_ms / ms,
            "of_lp": mix.ms_per_request / ms,
            "hedged": sum(bool(answer.fallback) for answer in answers[name]) / len(answers[name]),
            "plans": _shares(answers[name]),
        }
        for name, ms in each_ms.items()
    ]
    figures = [
        Figure(name="mix_over_single", value=best_single_ms / each_ms["auto"], unit="ratio", at_least=1.0),
        Figure(name="mix_of_lp", value=mix.ms_per_request / each_ms["auto"], unit="ratio", at_least=0.95),
    ]
    return figures, rows


def _bound_row(demands: Mapping[Plan, list[float]], mix: Mix) -> dict[str, Any]:
    """The linear program, and what it is made of: ms of device, link and companion."""
    return {
        "run": "lp",
        "ms_per_request": mix.ms_per_request,
        "best_single_ms": min(map(max, demands.values())),
        "plans": ", ".join(f"{plan} {share:.2f}" for plan, share in mix.shares.items()),
        "stages_ms": "; ".join(f"{plan} {' '.join(f'{ms:.0f}' for ms in took)}" for plan, took in demands.items()),
    }


def _plans() -> dict[Plan, _Wishes]:
    """And how each is asked for."""
    found: dict[Plan, _Wishes] = {LOCAL: {"mode": "local"}}
    for waist in (0, 1):
        cut = waist_cut(FOLDER, waist).id
        plan = Plan(placement=Placement.SPLIT, cut=cut, codec="raw")
        found[plan] = {"mode": "split", "cut": cut, "codec": "raw"}
    found[Plan(placement=Placement.OFFLOAD, codec="raw")] = {"mode": "offload", "codec": "raw"}
    return found


def _one(requests: Requests, model: str, wishes: _Wishes, client: Client, number: int) -> Answer:
    answer = requests.row(client, model, number, **wishes)
    assert answer.placement == wishes.get("mode", answer.placement), answer.fallback
    return answer


def _alone(client: Client, requests: Requests, wishes: _Wishes, count: int) -> dict[str, float]:
    """ms of device and companion; the first request opens what is to be opened."""
    return stages_ms([_one(requests, FIRST, wishes, client, number) for number in range(1 + count)][1:])


def _demands(
    pair: Pair, requests: Requests, plans: Mapping[Plan, _Wishes], count: int, whole_ms: float
) -> dict[Plan, list[float]]:
    """ms of device, link and companion for one request by each plan."""
    row_ms = LINK_RATIO * whole_ms
    crossing_ms = {
        Placement.LOCAL: 0.0,
        Placement.SPLIT: row_ms,
        Placement.OFFLOAD: row_ms * 3 * SIDE * SIDE * 4 / row_bytes(waist_cut(FOLDER, 0)),
    }
    found = {}
    with pair.client() as client:
        for plan, wishes in plans.items():
            took = _alone(client, requests, wishes, count)
            found[plan] = [took["device"], crossing_ms[plan.placement], took["companion"]]
    return found


def _shares(answers: list[Answer]) -> str:
    counts = Counter(answer.plan for answer in answers)
    return ", ".join(f"{plan} {count / len(answers):.2f}" for plan, count in counts.most_common())
