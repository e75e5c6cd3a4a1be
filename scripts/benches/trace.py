"""Links and loads that change: what ours makes of them, held against the best that was possible at each moment, and
against the two-way rule {local, offload as it came} on the same trace.

Real daemon, real companion, an emulated link between (`scripts/lab_pair.py`); link and load follow the traces of
`agent/replay/traces.py` in real time. One caller asks at a steady pace; the rule runs through the same daemon, by
forced plans, and ours again where the trace has steps: how soon it is back from one is a matter of chance. The oracle
is no run: for each request the measured stages of every plan are replayed through the known trace from the moment that
the request came, and the least of them is the best. Those of `regret` say which plans; what they take is measured
before the first trace, between traces and after the last, and the median counts: stages of another hour made local up
to 20 % longer than it was.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from agent.replay import traces
from agent.replay.policies.fixed import Fixed
from agent.replay.policies.two_way import TwoWay
from agent.replay.simulate import simulate
from agent.replay.world import Arrival, Fate, Moment, Outcome, Stages, World
from scripts.benches import regret, trace_plot
from scripts.benches.figure import Figure
from scripts.benches.regret_cells import LINKS, SUBJECTS, Cell
from scripts.benches.regret_cells import QUICK as PREPARED
from scripts.benches.regret_stages import (
    PAUSE_S,
    Offer,
    Sums,
    measured_now,
    median_stages,
    wait_until_open,
)
from scripts.benches.regret_stages import Stages as Measured
from scripts.benches.trace_course import driven
from scripts.client import Answer, Client, Refused
from scripts.lab_pair import Conditions, LabPair, lab_pair
from split.plan.plan import LOCAL, Placement, Plan

LAB: Final = "trace"
FOLDER: Final = regret.folder_of(PREPARED)
SUBJECT: Final = SUBJECTS[0]
SLOWDOWN: Final = 5.0
"""At it the trace's links lead through places where local, a split and offload are best."""
DEADLINE_MS: Final = 400.0
"""Some six times what the device needs: a fault may cost a wait, not the answer."""
EVERY_S: Final = 0.1
"""Between requests, from start to start."""
POOL: Final = 12
"""Plans of the sums that are replayed, beside local and the offloads."""
NEAR: Final = 1.10
"""A plan that is within so much of the best counts as recovered."""
STEP: Final = 1.5
"""A value of the trace that changes by so much at once is a step."""
WARM_S: Final = 3.0
STAGE_RUNS, STAGE_RUNS_QUICK = 2, 1
"""Of each plan, each time that the stages are measured, and one before that warms up: 4 s for the pool, or 3."""

SCALE, SCALE_QUICK = 0.5, 0.25
"""The traces' seconds last so long: their steps are as steep, the time between them shorter."""
QUICK: Final = ("rate steps",)
AGAIN: Final = 2
"""So often ours runs again on each trace with steps: three times eight of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as it was."""

    at_s: float
    """Of the trace."""
    plan: Plan
    """As chosen."""
    fallback: str
    took_ms: float
    missed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One trace under one policy."""

    trace: str
    policy: str
    asked: Sequence[Asked]
    best_ms: Sequence[float]
    """Per request, the best plan's replay."""
    plan_ms: Sequence[float]
    """Per request, the replay of the plan that was chosen."""
    best: Sequence[Plan]
    recovered: Sequence[int]
    """Per step, the requests until a chosen plan was within `NEAR` of the best."""

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(one.took_ms for one in self.asked)

    @property
    def regret(self) -> float:
        """Replay of what was chosen / replay of the best: the choices alone, without the noise of either run."""
        return sum(self.plan_ms) / sum(self.best_ms)

    @property
    def measured_regret(self) -> float:
        """What callers waited / replay of the best: the error of the replay is in it."""
        return sum(one.took_ms for one in self.asked) / sum(self.best_ms)

    @property
    def replay_error(self) -> float:
        """What callers waited / replay of the same plans."""
        return sum(one.took_ms for one in self.asked) / sum(self.plan_ms)


def prepare() -> None:
    """The stages that `regret` measures."""
    regret.prepare(quick=True)


def run(*, quick: bool, plot: Path | None = None) -> tuple[list[Figure], list[dict[str, Any]]]:
    offers = regret.prepared(PREPARED, [SUBJECT])
    offer, scale = offers[SUBJECT], SCALE_QUICK if quick else SCALE
    replay = Replay(offer, Sums(FOLDER, offers), runs=STAGE_RUNS_QUICK if quick else STAGE_RUNS)
    courses = {name: _scaled(traces.TRACES[name](), scale) for name in (QUICK if quick else traces.TRACES)}
    asked: dict[tuple[str, str], Sequence[Asked]] = {}
    stepped = [] if quick else [name for name, course in courses.items() if list(_steps(course))]
    with lab_pair(FOLDER, FOLDER / "models", name=LAB) as pair:
        pair.start_agent(slowdown=SLOWDOWN)
        wait_until_open(pair, offers)
        replay.measure(pair)
        for name, course in courses.items():
            for policy in ("ours", "two-way rule"):
                asked[name, policy] = one = _ask_through(pair, offer, course, policy, replay)
                waited_ms = statistics.fmean(request.took_ms for request in one)
                print(f"{name}, {policy}: {waited_ms:.1f} ms", flush=True)
            replay.measure(pair, [one.plan for one in asked[name, "ours"]])
        again = [(name, _ask_through(pair, offer, courses[name], "ours", replay)) for name in AGAIN * stepped]
        replay.measure(pair, [one.plan for _, requests in again for one in requests])
    ran = [replay.judged(name, policy, courses[name], answers) for (name, policy), answers in asked.items()]
    ran_again = [replay.judged(name, "ours", courses[name], answers) for name, answers in again]
    print(*map(_line, [*ran, *ran_again]), sep="\n", flush=True)
    if plot is not None:
        trace_plot.draw(ran, plot)
    return figures(ran, ran_again), [_row(one) for one in (*ran, *ran_again)]


def figures(ran: Sequence[Ran], again: Sequence[Ran] = ()) -> list[Figure]:
    """Those of DESIGN §9; each mean is over traces, which count alike. `again`: more runs of ours, for what is a matter
    of chance: recoveries and misses."""
    ours = [one for one in ran if one.policy == "ours"]
    rule = {one.trace: one for one in ran if one.policy != "ours"}
    recovered = [count for one in (*ours, *again) for count in one.recovered]
    against = statistics.fmean(one.mean_ms / rule[one.trace].mean_ms for one in ours)
    return [
        Figure(name="mean", value=statistics.fmean(one.regret for one in ours), unit="ratio", at_most=1.05),
        Figure(name="recover_requests", value=max(recovered, default=0), unit="requests", at_most=5),
        Figure(name="vs_rule", value=against, unit="ratio", at_most=0.999),
        Figure(
            name="missed",
            value=sum(asked.missed for one in (*ours, *again) for asked in one.asked),
            unit="requests",
            at_most=0,
        ),
    ]


class Replay:
    """The measured stages of the subject's plans, through any moment of a trace."""

    def __init__(self, offer: Offer, sums: Sums, *, runs: int = STAGE_RUNS) -> None:
        """`runs`: of each plan, each time that it is measured."""
        self._offer, self._runs = offer, runs
        cells = [Cell(subject=SUBJECT, link=link, slowdown=SLOWDOWN) for link in LINKS]
        ranked = [list(sums.of(cell)) for cell in cells]
        self._kept = sums.stages(cells[0])
        ends = [plan for plan in self._kept if plan.placement is not Placement.SPLIT]
        # The best over each of the links: what the traces lead through lies between them.
        splits = [plan for place in range(POOL) for plans in ranked for plan in plans[place : place + 1]]
        self._pool = list(dict.fromkeys([*ends, *splits]))[: POOL + len(ends)]
        self._measured: dict[Plan, list[Measured]] = {}
        self._take(self._kept)

    def measure(self, pair: LabPair, chosen: Sequence[Plan] = ()) -> None:
        """What each plan of the pool, and each of those that were chosen, takes now."""
        for plan, stages in measured_now(
            pair, self._offer, dict.fromkeys((*self._pool, *self._measured, *chosen)), runs=self._runs
        ).items():
            self._measured.setdefault(plan, []).append(stages)
        self._take(self._kept | {plan: median_stages(stages) for plan, stages in self._measured.items()})

    def _take(self, measured: Mapping[Plan, Measured]) -> None:
        local = measured[LOCAL]
        self._overhead_ms = {plan: stages.overhead_ms for plan, stages in measured.items()}
        self._plans = {
            plan: Stages(
                image_ms=stages.image_ms,
                head_ms=stages.head_ms,
                encode_ms=stages.encode_ms,
                up_bytes=stages.up_bytes,
                cloud_decode_ms=stages.cloud_decode_ms,
                tail_ms=stages.tail_ms,
                down_bytes=stages.down_bytes,
                decode_ms=stages.decode_ms,
                finish_ms=max(local.head_ms - stages.head_ms, 0.0)
                + (local.image_ms if plan.codec == "encoded" else 0.0),
            )
            for plan, stages in measured.items()
        }

    def world(self, course: Sequence[Moment], arrivals: Sequence[Arrival]) -> World:
        return World(models={SUBJECT.model: self._plans}, trace=course, arrivals=arrivals)

    def arrival(self, at_s: float) -> Arrival:
        return Arrival(at_s=at_s, model=SUBJECT.model, deadline_ms=DEADLINE_MS, encoded_bytes=self._offer.encoded_bytes)

    def ms(self, course: Sequence[Moment], at_s: float, plan: Plan) -> float:
        """What one request would take that comes at `at_s` to an idle device."""
        world = self.world(course, [self.arrival(at_s)])
        [outcome] = simulate(world, Fixed(str(plan), {SUBJECT.model: plan}))
        return outcome.total_ms + self._overhead_ms[plan]

    def judged(self, trace: str, policy: str, course: Sequence[Moment], asked: Sequence[Asked]) -> Ran:
        best_ms, plan_ms, best = [], [], []
        for one in asked:
            taken = {plan: self.ms(course, one.at_s, plan) for plan in (*self._pool, one.plan)}
            best.append(min(taken, key=taken.__getitem__))
            best_ms.append(taken[best[-1]])
            plan_ms.append(taken[one.plan])
        near = [mine <= NEAR * least for mine, least in zip(plan_ms, best_ms, strict=True)]
        return Ran(
            trace=trace,
            policy=policy,
            asked=asked,
            best_ms=best_ms,
            plan_ms=plan_ms,
            best=best,
            recovered=[_until_near(asked, near, step_s) for step_s in _steps(course)],
        )


def _until_near(asked: Sequence[Asked], near: Sequence[bool], step_s: float) -> int:
    """Requests after the step until one is near the best, that one not counted."""
    after = [is_near for one, is_near in zip(asked, near, strict=True) if one.at_s >= step_s]
    return next((number for number, is_near in enumerate(after) if is_near), len(after))


def _steps(course: Sequence[Moment]) -> Iterator[float]:
    """Where link or load change at once; none in a walk, which never stands still."""
    found = []
    for before, after in itertools.pairwise(course):
        values = ((m.up_mbit_s, m.rtt_ms, m.edge_ratio, m.cloud_ratio) for m in (before, after))
        ratio = max(max(a / b, b / a) for a, b in zip(*values, strict=True))
        if ratio >= STEP or before.connected != after.connected:
            found.append(after.at_s)
    return iter(found if len(found) <= 4 else [])


def _scaled(course: Sequence[Moment], scale: float) -> tuple[Moment, ...]:
    return tuple(replace(moment, at_s=moment.at_s * scale) for moment in course)


# -- one run ----------------------------------------------------------------------------------------------------------


def _ask_through(pair: LabPair, offer: Offer, course: Sequence[Moment], policy: str, replay: Replay) -> Sequence[Asked]:
    """One trace from its beginning to its end, after some seconds of its first moment."""
    rule = TwoWay()
    rule.begin(_OnlyWorld(replay.world(course, [])))
    first = course[0]
    pair.condition(Conditions(rate_mbit=first.up_mbit_s, rtt_ms=first.rtt_ms))
    asked: list[Asked] = []
    with pair.client() as client:

        def ask(at_s: float) -> Asked:
            if policy == "ours":
                return _ask(client, offer, None, at_s)
            plan = rule.choose(replay.arrival(at_s), at_s, 0.0)
            one = _ask(client, offer, plan, at_s)
            rule.observe(_told(replay.arrival(at_s), one))
            return one

        _paced(ask, WARM_S)
        with driven(pair, course) as clock_s:
            while (at_s := clock_s()) < course[-1].at_s:
                asked.append(ask(at_s))
                time.sleep(max(at_s + EVERY_S - clock_s(), PAUSE_S))
    return asked


def _paced(ask: Callable[[float], Asked], seconds: float) -> None:
    started_s = time.monotonic()
    while (now_s := time.monotonic() - started_s) < seconds:
        ask(0.0)
        time.sleep(max(now_s + EVERY_S - (time.monotonic() - started_s), PAUSE_S))


def _ask(client: Client, offer: Offer, plan: Plan | None, at_s: float) -> Asked:
    wishes: dict[str, str | float] = {"deadline_ms": DEADLINE_MS}
    if plan is not None:
        wishes |= {"mode": str(plan.placement)} | ({} if plan.codec is None else {"codec": plan.codec})
    started_s = time.perf_counter()
    try:
        answer = client.infer(offer.subject.model, offer.inputs, **wishes)
    except Refused:
        took_ms = (time.perf_counter() - started_s) * 1e3
        return Asked(at_s=at_s, plan=plan or LOCAL, fallback="refused", took_ms=took_ms, missed=True)
    return Asked(
        at_s=at_s,
        plan=plan or _chosen(client, answer),
        fallback=answer.fallback,
        took_ms=answer.took_ms,
        missed=answer.took_ms > DEADLINE_MS,
    )


def _chosen(client: Client, answer: Answer) -> Plan:
    """The plan that was chosen, which another may have stood in for."""
    if not answer.fallback:
        return _plan(answer.placement, answer.cut, answer.codec)
    chosen: Mapping[str, Any] = client.get(f"/v2/isthmus/explain/{answer.request_id}")["chosen"]
    return _plan(chosen["placement"], chosen["cut"], chosen["codec"])


def _plan(placement: str, cut: Any, codec: Any) -> Plan:
    return Plan(placement=Placement(placement), cut=cut, codec=codec)


class _OnlyWorld:
    """What the two-way rule looks at."""

    is_connected = True

    def __init__(self, world: World) -> None:
        self.world = world

    def ahead_bytes(self) -> int:
        return 0

    def foresee(self, plan: Plan) -> Outcome:
        raise NotImplementedError

    def least_ms(self, plan: Plan) -> float:
        raise NotImplementedError


def _told(arrival: Arrival, asked: Asked) -> Outcome:
    return Outcome(
        number=0,
        arrival=arrival,
        plan=asked.plan,
        fate=Fate.PLANNED,
        total_ms=asked.took_ms,
        stages_ms={},
        missed=asked.missed,
        joules=0.0,
        bytes=0,
        money=0.0,
    )


def _line(one: Ran) -> str:
    return (
        f"{one.trace}, {one.policy}: {one.mean_ms:.1f} ms, regret {one.regret:.3f} (measured "
        f"{one.measured_regret:.3f}, replay off by {one.replay_error:.3f}), recovered after {list(one.recovered)}, "
        f"{sum(asked.missed for asked in one.asked)} missed of {len(one.asked)}"
    )


def _row(one: Ran) -> dict[str, Any]:
    plans = [asked.plan for asked in one.asked]
    return {
        "trace": one.trace,
        "policy": one.policy,
        "requests": len(one.asked),
        "mean_ms": one.mean_ms,
        "best_ms": statistics.fmean(one.best_ms),
        "regret": one.regret,
        "measured_regret": one.measured_regret,
        "replay_error": one.replay_error,
        "recovered": list(one.recovered),
        "missed": sum(asked.missed for asked in one.asked),
        "fallbacks": sum(bool(asked.fallback) for asked in one.asked),
        "switches": sum(a != b for a, b in itertools.pairwise(plans)),
        "plans": {str(plan): plans.count(plan) for plan in dict.fromkeys(plans)},
    }
