"""One cell for real: what `auto` settles on, against the best of the plans that could have been.

`auto` answers requests until it has settled; what it chose then is the chosen plan. Then the plans that may be the best
run as forced plans in turns, `auto` itself and the chosen plan a second time among them, each turn in another order.
The oracle is the best of the odd turns and scored on the even ones: the minimum of many noisy medians would flatter
it. Requests come one after the other, from one caller; what counts is what this caller waits.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scripts.benches.regret_cells import CONTESTED, Cell
from scripts.benches.regret_stages import FORGIVEN_S, PAUSE_S, SLOW_MS, Offer, best_of_placements, fell_back
from scripts.client import Answer, Client, Refused
from scripts.lab_pair import LabPair
from split.plan.plan import LOCAL, Placement, Plan

BEST: Final = 5
"""Plans of the sums that run for real, beside local, the offloads and the chosen one."""
HOPELESS: Final = 2.0
"""A plan runs once and no more when then, as in the sums, it takes so many times as long as the best."""
LEARN: Final = 30
"""Requests that `auto` has to settle, at least `LEARN_S`, at most a share of the cell's seconds."""
LEARN_S: Final = 2.0
LEARN_SHARE: Final = 0.4
LEARN_MIN: Final = 12
SETTLED: Final = 1 / 3
"""Of these requests, the last: what they chose most often is the chosen plan."""
TURNS: Final = 40
TURNS_MIN: Final = 6
"""Even, so that odd and even turns are as many."""
SURE: Final = 0.02
"""More turns, at most `TURNS`, while what the chosen plan takes is not known so well (standard error of its median)."""
PATIENCE: Final = 3.0
"""And not for more than so many times a cell's seconds: a link with losses scatters by half from turn to turn. A quick
run, which has to end within 50 s, has none."""
LOOKS: Final = 3
"""The first may have to open something, and one after that may be overtaken by the device."""
RUNNING_MIN: Final = 4
"""Plans that take part even where a cell's seconds do not hold `TURNS_MIN` turns of more."""
FAILED: Final = 0.25
"""A plan that fell back more often than so is left out, with its reason."""

AUTO, AGAIN = "auto", "again"
STAGE_SHARE: Final = 0.05
"""Stages shorter than so much of a request change no decision; their predictions are not judged."""
EXPLAINED: Final = 12
"""Requests of `auto` whose predictions are compared."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """A cell as it was."""

    cell: Cell
    chosen: Plan
    learned_plans: Counter[str] = field(default_factory=Counter)
    """What `auto` chose until it had settled."""
    why_chosen: str = ""
    """The daemon's own reason then."""
    ms: dict[str, list[float | None]]
    """Plan, `auto` or `again` → what each turn took; None where it fell back."""
    sums_ms: Mapping[Plan, float]
    excluded: dict[str, str] = field(default_factory=dict)
    """Plan → why it did not take part."""
    predicted_ms: float = 0.0
    stage_errors: dict[str, float] = field(default_factory=dict)
    """Stage → median of |predicted / measured − 1| over `auto`'s requests."""
    stages_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Stage → medians (predicted, measured) of the same."""
    reason: str = ""
    """The daemon's own, of the last request of `auto`."""
    congestion_control: str = ""
    auto_plans: Counter[str] = field(default_factory=Counter)

    def median(self, name: str, odd: bool | None = None) -> float:
        """ms over all turns, or the odd or even ones."""
        values = self.ms[name][{None: slice(None), True: slice(1, None, 2), False: slice(0, None, 2)}[odd]]
        return statistics.median([value for value in values if value is not None])

    def plans(self) -> list[str]:
        return [name for name in self.ms if name not in (AUTO, AGAIN)]

    def oracle(self, pool: Sequence[str] | None = None) -> str:
        """Of all plans, or of the pool: the best of the odd turns."""
        return min(pool or self.plans(), key=lambda name: self.median(name, odd=True))

    @property
    def scored(self) -> str:
        """What stands for the choice: the chosen plan; `auto` where that could not be had as a forced plan."""
        return str(self.chosen) if str(self.chosen) in self.ms else AUTO

    @property
    def regret(self) -> float:
        return self.median(self.scored, odd=False) / self.median(self.oracle(), odd=False)

    @property
    def auto_regret(self) -> float:
        return self.median(AUTO, odd=False) / self.median(self.oracle(), odd=False)

    @property
    def noise(self) -> float:
        """The same plan twice, ≥ 1."""
        again = AGAIN if AGAIN in self.ms else AUTO
        ratio = self.median(again, odd=False) / self.median(self.scored, odd=False)
        return max(ratio, 1 / ratio)

    @property
    def split_value(self) -> float:
        """Best plan that is no split / best plan."""
        others = [name for name in self.plans() if not name.startswith(str(Placement.SPLIT))]
        return self.median(self.oracle(others), odd=False) / self.median(self.oracle(), odd=False)

    def placements(self) -> dict[str, float]:
        """Placement → ms of its best plan; of those that were left out as hopeless what the sums say."""
        best = {str(placement): ms for placement, ms in best_of_placements(self.sums_ms).items()}
        for placement in best:
            ran = [self.median(name) for name in self.plans() if name.startswith(placement)]
            best[placement] = min(ran, default=best[placement])
        return best

    @property
    def contested(self) -> bool:
        best, *others = sorted(self.placements().values())
        return bool(others) and others[0] <= CONTESTED * best


def measure(
    pair: LabPair, cell: Cell, offer: Offer, sums_ms: Mapping[Plan, float], *, seconds: float, patience: float
) -> Measured:
    """Within about so many seconds, as many turns as they hold, and up to `patience` times so many until it is sure.
    Refused, or OSError, where nothing is to be had."""
    pair.condition(cell.link)
    ends_at_s = time.monotonic() + seconds
    with pair.client() as client:
        chosen, plans, why = _learn(client, offer, seconds)
        pool = pool_of(offer.plans, sums_ms, chosen)
        found = Measured(cell=cell, chosen=chosen, learned_plans=Counter(plans), why_chosen=why, ms={}, sums_ms=sums_ms)
        running, turn_s = _first_look(client, offer, pool, found, ends_at_s=ends_at_s)
        at_least = _turn_count(ends_at_s - time.monotonic(), turn_s)
        latest_s = ends_at_s + (patience - 1.0) * seconds
        autos = _turns(client, offer, running, found, at_least, latest_s=latest_s)
        leave_out_failed(found)
        if AUTO not in found.ms:
            raise Refused(f"auto was refused: {found.excluded[AUTO]}")
        _explain(client, autos, found)
        bulk = client.get("/v2/isthmus/status")["companion"]["connections"]
        found.congestion_control = str(bulk[-1]["congestion_control"]) if bulk else ""
    return found


def _learn(client: Client, offer: Offer, seconds: float) -> tuple[Plan, list[str], str]:
    """Requests until `auto` has settled: what it chose then, what each chose, and the last one's reason."""
    started_at_s, plans = time.monotonic(), []
    by_text = {str(plan): plan for plan in offer.plans}
    for number in itertools.count(1):
        took_s = time.monotonic() - started_at_s
        enough = number > LEARN and took_s >= min(LEARN_S, LEARN_SHARE * seconds)
        if enough or (number > LEARN_MIN and took_s >= LEARN_SHARE * seconds):
            break
        time.sleep(PAUSE_S)
        answer = offer.ask_auto(client)
        plans.append(_wanted(client, answer))
    settled = plans[-max(round(len(plans) * SETTLED), 1) :]
    why = str(client.get(f"/v2/isthmus/explain/{answer.request_id}")["reason"])
    return by_text[Counter(settled).most_common(1)[0][0]], plans, why


def _wanted(client: Client, answer: Answer) -> str:
    """The plan that was chosen, which another may have stood in for."""
    if not answer.fallback:
        return answer.plan
    chosen = client.get(f"/v2/isthmus/explain/{answer.request_id}")["chosen"]
    return " ".join(str(chosen[key]) for key in ("placement", "cut", "codec") if chosen[key])


def pool_of(plans: Sequence[Plan], sums_ms: Mapping[Plan, float], chosen: Plan) -> list[Plan]:
    """Without repetitions: the best of the sums, the best of each placement among them, local, raw and encoded offload,
    the chosen plan. `sums_ms`: ascending."""
    first = {plan.placement: plan for plan in reversed(list(sums_ms))}
    ends = [plan for plan in plans if plan is LOCAL or (plan.placement is Placement.OFFLOAD and plan.codec in _ENDS)]
    return list(dict.fromkeys([*list(sums_ms)[:BEST], *first.values(), *ends, chosen]))


_ENDS: Final = ("raw", "encoded")


def _first_look(
    client: Client, offer: Offer, pool: Sequence[Plan], found: Measured, *, ends_at_s: float
) -> tuple[list[Plan], float]:
    """The plans that take part, everything open that they need, and the seconds that a turn of them takes."""
    looks: dict[Plan, float] = {}
    least_ms = min(found.sums_ms.values())
    for plan in sorted(pool, key=lambda plan: found.sums_ms.get(plan, 0.0)):
        modelled = found.sums_ms.get(plan, 0.0)
        if looks and modelled > max(SLOW_MS, HOPELESS**2 * least_ms, HOPELESS**2 * min(looks.values())):
            found.excluded[str(plan)] = f"hopeless: {modelled:.0f} ms by the sums"
            continue
        took_ms, why = _look(client, offer, plan, HOPELESS**2 * min(looks.values(), default=math.inf))
        if took_ms < math.inf:
            looks[plan] = took_ms
        else:
            found.excluded[str(plan)] = why
    if not looks:
        raise Refused(f"no plan ran: {found.excluded}")
    best_ms = min(looks.values())
    ratio = {plan: min(ms / best_ms, found.sums_ms.get(plan, ms) / least_ms) for plan, ms in looks.items()}
    ratio[found.chosen] = 0.0
    running = sorted(looks, key=ratio.__getitem__)

    def turn_s() -> float:
        chosen_ms = looks.get(found.chosen, best_ms)
        return (sum(looks[plan] for plan in running) + 2 * chosen_ms) / 1e3 + (len(running) + 2) * PAUSE_S

    while len(running) > 1 and ratio[running[-1]] > HOPELESS:
        last = running.pop()
        found.excluded[str(last)] = f"hopeless: took {looks[last]:.0f} ms"
    firsts = {plan.placement: plan for plan in reversed(running)}.values()
    others = [plan for plan in running if plan not in firsts and plan != found.chosen]
    while others and len(running) > RUNNING_MIN and TURNS_MIN * turn_s() > ends_at_s - time.monotonic():
        last = others.pop()
        running.remove(last)
        found.excluded[str(last)] = f"no time for it: took {looks[last]:.0f} ms"
    return running, turn_s()


def _look(client: Client, offer: Offer, plan: Plan, hopeless_ms: float) -> tuple[float, str]:
    """ms at best, or inf and why another plan ran in its place each time; once for what is slow or hopeless."""
    best_ms, why = math.inf, ""
    for _ in range(LOOKS):
        time.sleep(PAUSE_S)
        try:
            answer = offer.ask(client, plan)
        except Refused as error:
            return math.inf, str(error)
        why = fell_back(answer, plan)
        best_ms = min(best_ms, math.inf if why else answer.took_ms)
        if why:
            time.sleep(FORGIVEN_S)
        elif answer.took_ms > min(SLOW_MS, hopeless_ms):
            break
    return best_ms, why


def _turn_count(left_s: float, turn_s: float) -> int:
    turns = min(max(int(left_s / turn_s), TURNS_MIN), TURNS)
    return turns - turns % 2


def is_sure(values: Sequence[float | None]) -> bool:
    """Whether the median of these is known to `SURE`: its standard error is 1.2533 σ / √n of a normal distribution, σ
    taken as 1.4826 × the median absolute deviation, which a single stall does not move."""
    known = [value for value in values if value is not None]
    if len(known) < TURNS_MIN:
        return False
    median = statistics.median(known)
    deviation = statistics.median(abs(value - median) for value in known)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(known)) <= SURE * median


def _turns(
    client: Client, offer: Offer, running: Sequence[Plan], found: Measured, at_least: int, *, latest_s: float
) -> list[Answer]:
    """What every plan takes in each turn, into `found`; the answers of `auto`. At least so many turns, and as many more
    as it takes to be sure, but for `latest_s`."""
    work: dict[str, Plan | None] = {str(plan): plan for plan in running}
    work |= {AUTO: None, AGAIN: found.chosen} if found.chosen in running else {AUTO: None}
    found.ms = {name: [] for name in work}
    autos: list[Answer] = []
    for turn in range(TURNS):
        if turn >= at_least and turn % 2 == 0:
            taken = found.ms[found.scored] + found.ms.get(AGAIN, [])
            if is_sure(taken) or time.monotonic() > latest_s:
                break
        names = list(work)
        random.Random(turn).shuffle(names)
        for name in names:
            plan = work[name]
            time.sleep(PAUSE_S)
            try:
                answer = offer.ask_auto(client) if plan is None else offer.ask(client, plan)
            except Refused as error:
                found.ms[name].append(None)
                found.excluded[name] = str(error)
                continue
            if plan is None:
                autos.append(answer)
                found.auto_plans[answer.plan + (" after a fallback" if answer.fallback else "")] += 1
            why = "" if plan is None else fell_back(answer, plan)
            found.ms[name].append(None if why else answer.took_ms)
            if why:
                found.excluded[name] = why
    return autos


def leave_out_failed(found: Measured) -> None:
    """Plans that fell back too often are no plans one could have had; a single time is only said."""
    for name in list(found.ms):
        taken = found.ms[name]
        fell = sum(ms is None for ms in taken)
        ran = [[ms for ms in taken[start::2] if ms is not None] for start in (0, 1)]
        if fell > FAILED * len(taken) or not all(ran):
            del found.ms[name]
        elif fell:
            found.excluded[name] = f"{fell} of {len(taken)} turns left out: {found.excluded[name]}"


def _explain(client: Client, autos: Sequence[Answer], found: Measured) -> None:
    """Predicted against measured, stage by stage, of the last requests."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    predicted = []
    for answer in autos[-EXPLAINED:]:
        explained: Mapping[str, Any] = client.get(f"/v2/isthmus/explain/{answer.request_id}")
        predicted.append(float(explained["chosen"]["predicted_ms"]))
        found.reason = str(explained["reason"])
        if answer.fallback:
            continue
        told, came = explained["chosen"]["stages_ms"], explained["measured_ms"]
        for stage, (told_ms, came_ms) in _pairs(told, came).items():
            if came_ms >= STAGE_SHARE * explained["total_ms"]:
                pairs.setdefault(stage, []).append((told_ms, came_ms))
    found.predicted_ms = statistics.median(predicted)
    for stage, each in pairs.items():
        found.stage_errors[stage] = statistics.median(abs(told_ms / came_ms - 1) for told_ms, came_ms in each)
        told_all, came_all = zip(*each, strict=True)
        found.stages_ms[stage] = (statistics.median(told_all), statistics.median(came_all))


def _pairs(told: Mapping[str, float], came: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Stage → (predicted, measured): the way there and back is measured in one, a whole is predicted as a head."""
    pairs = {stage: (told.get(stage, 0.0), came[stage]) for stage in came if stage not in ("network", "whole")}
    if "network" in came:
        pairs["network"] = (told["up"] + told["down"], came["network"])
    if "whole" in came:
        pairs["whole"] = (told["head"], came["whole"])
    return pairs
