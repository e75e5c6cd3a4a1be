"""Simulated runs under our policy, recorded by the real recorder: for tests of what is made of records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from agent.journal import Entry
from agent.planner import Known as PlannerKnown
from agent.recorder import Recorder
from agent.replay import traces
from agent.replay.known import Known
from agent.replay.policies.ours import Ours
from agent.replay.simulate import Simulation
from agent.replay.world import Arrival, Fate, Moment, Outcome, Stages, World
from split.ids import CutId
from split.plan.plan import LOCAL, Decision, Placement, Plan, RequestFacts
from split.plan.power import Power

SPLIT = Plan(placement=Placement.SPLIT, cut=CutId("aaaaaaaaaaaa"), codec="int8")
RAW = Plan(placement=Placement.OFFLOAD, codec="raw")
PICTURE = Plan(placement=Placement.OFFLOAD, codec="encoded")
PLANS = {
    LOCAL: Stages(image_ms=4.0, head_ms=60.0),
    SPLIT: Stages(
        image_ms=4.0,
        head_ms=15.0,
        encode_ms=1.0,
        up_bytes=25_000,
        cloud_decode_ms=0.5,
        tail_ms=6.0,
        down_bytes=4_000,
        decode_ms=0.1,
        finish_ms=46.0,
    ),
    RAW: Stages(
        image_ms=4.0,
        encode_ms=0.2,
        up_bytes=602_112,
        cloud_decode_ms=0.2,
        tail_ms=8.0,
        down_bytes=4_000,
        decode_ms=0.1,
        finish_ms=60.0,
    ),
    PICTURE: Stages(up_bytes=30_000, cloud_decode_ms=2.0, tail_ms=8.0, down_bytes=4_000, decode_ms=0.1, finish_ms=64.0),
}
KNOWN = replace(Known.of(PLANS), told=PLANS)
WRONG = {
    plan: replace(one, head_ms=1.3 * one.head_ms, finish_ms=1.3 * one.finish_ms, tail_ms=1.3 * one.tail_ms)
    for plan, one in PLANS.items()
}
"""What the same plans take where the profile, and what the companion told, are 30 % too low."""
POWER = Power(compute_w=2.0, send_w=1.5, receive_w=1.0, wait_w=0.5, measured=False, source="a test")
STAGE_NAMES = {"finish": "local_tail"}


class Watched(Ours):
    """Ours, and what it said of each request."""

    def __init__(self) -> None:
        super().__init__({"m": KNOWN})
        self.said: dict[int, Decision] = {}

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        plan = super().choose(arrival, now_s, edge_queue_ms)
        self.said[self._number - 1] = self._decided[self._number - 1]
        return plan

    def known(self, model: str, now_s: float) -> PlannerKnown | None:
        return self.planner.known(model, now_s)


def entry(outcome: Outcome, decision: Decision) -> Entry:
    """What the daemon would have noted of it."""
    stages_ms = {STAGE_NAMES.get(stage, stage): ms for stage, ms in outcome.stages_ms.items()}
    stages_ms["queue"] = stages_ms.get("queue", 0.0) + stages_ms.pop("finish_queue", 0.0)
    stages_ms["network"] = stages_ms.pop("up", 0.0) + stages_ms.pop("down", 0.0)
    here = outcome.plan == LOCAL or outcome.fate is not Fate.PLANNED
    arrival, failed = outcome.arrival, outcome.fate is Fate.GIVEN_UP
    return Entry(
        model=arrival.model,
        received_at_s=arrival.at_s,
        deadline_ms=min(arrival.deadline_ms, 30_000.0),
        facts=RequestFacts(budget_ms=min(arrival.deadline_ms, 30_000.0), encoded_bytes=arrival.encoded_bytes),
        decision=decision,
        total_ms=outcome.total_ms,
        ran=None if failed else LOCAL if here else outcome.plan,
        fallback="" if failed or outcome.fate is Fate.PLANNED else str(outcome.fate),
        stages_ms={} if failed else stages_ms,
        error="DEADLINE_EXCEEDED" if failed else "",
    )


def arrivals(count: int, every_s: float, *, deadline_ms: float = 500.0, seed: int = 1) -> list[Arrival]:
    """Tensors and pictures in turn, at random times."""
    dice = np.random.default_rng(seed)
    times = np.cumsum(dice.exponential(every_s, count))
    sizes = dice.integers(15_000, 60_000, count)
    return [
        Arrival(at_s=float(at_s), model="m", deadline_ms=deadline_ms, encoded_bytes=int(size) if n % 2 else 0)
        for n, (at_s, size) in enumerate(zip(times, sizes, strict=True))
    ]


GOOD = (Moment(at_s=0.0, up_mbit_s=20.0, down_mbit_s=40.0, rtt_ms=20.0),)
WORLDS: dict[str, Callable[[], World]] = {
    "steady": lambda: World(gives_up=True, models={"m": PLANS}, trace=GOOD, arrivals=arrivals(400, 0.2)),
    "scattered": lambda: World(
        gives_up=True, models={"m": PLANS}, trace=GOOD, arrivals=arrivals(400, 0.2), jitter=0.15
    ),
    "busy": lambda: World(gives_up=True, models={"m": PLANS}, trace=GOOD, arrivals=arrivals(600, 0.04), jitter=0.1),
    "slow device": lambda: World(
        gives_up=True,
        models={"m": PLANS},
        trace=GOOD,
        arrivals=arrivals(400, 0.5, deadline_ms=2000.0),
        slowdown=5.0,
        jitter=0.1,
    ),
    "steps of the rate": lambda: World(
        gives_up=True, models={"m": PLANS}, trace=traces.rate_steps(), arrivals=arrivals(400, 0.2), jitter=0.1
    ),
    "outage": lambda: World(
        gives_up=True, models={"m": PLANS}, trace=traces.outage(), arrivals=arrivals(400, 0.2), jitter=0.1
    ),
    "wrong profile": lambda: World(
        gives_up=True, models={"m": WRONG}, trace=GOOD, arrivals=arrivals(400, 0.2), jitter=0.1
    ),
    "mobile": lambda: World(
        gives_up=True, models={"m": PLANS}, trace=traces.lte_walk(), arrivals=arrivals(600, 0.2), jitter=0.1
    ),
}


@cache
def recorded(name: str) -> tuple[World, list[Outcome], bytes]:
    """One of `WORLDS`, what came of it under our policy, and the record that the daemon would have kept of it."""
    world, policy, now = WORLDS[name](), Watched(), [0.0]
    outcomes = Simulation(world, policy).run()
    recorder = Recorder(
        knows=policy.known,
        power=lambda now_s, model: POWER,
        slowdown=world.slowdown,
        price_per_gb=4.0,
        now_s=lambda: now[0],
        wall_s=lambda: 1_800_000_000.0 + now[0],
    )
    for outcome in sorted(outcomes, key=lambda one: one.done_at_s):
        if outcome.done_at_s > now[0] + 10.0:
            now[0] = outcome.done_at_s
            recorder.close_batch()
        recorder.note(entry(outcome, policy.said[outcome.number]))
    return world, outcomes, recorder.last_hour()
