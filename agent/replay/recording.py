"""A record of traffic as a world that policies can be replayed in, and the way that was taken in it.

What is known is what was measured along that way: `recorded_costs.py` says what plans cost, `recorded_trace.py` what
link and load were. Queues come about again by replaying.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from agent.record import BadRecord, Record
from agent.replay.happened import Happened, happened_in
from agent.replay.known import Known
from agent.replay.recorded_costs import models_of, thought_of
from agent.replay.recorded_known import known_of
from agent.replay.recorded_trace import MBIT_MS, UNKNOWN_LINK, trace_of
from agent.replay.world import Arrival, Fate, Outcome, Policy, World
from split.plan.objective import Prices
from split.plan.observation import Floats
from split.plan.plan import LOCAL, Plan
from split.plan.power import NO_POWER, Power

REPLAYED_MAX: Final = 8000
"""Requests: over all policies and a hundred plans one takes 5 ms of a desktop, 40 s in all."""
RUN: Final = 400
"""As `agent/recorder.py` records where it cannot record all."""
GAP_S: Final = 86_400.0
"""More without a request is no part of a day's traffic, and may be no time that passed at all."""
LAID_S: Final = 60.0
"""What it is in the world: long enough for all that was under way to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A record, ready to be replayed."""

    world: World
    happened: tuple[Happened, ...]
    """In the order of the world's arrivals."""
    known: Mapping[str, Known]
    """What the device knew of the world's models before the requests came."""
    zero_s: float
    """Wall clock at the world's 0."""
    recorded: int
    """Requests in the record; where that is more than `REPLAYED_MAX`, runs of them stand for all."""
    gaps: int
    """How often more than `GAP_S` passed between two requests; in the world they are `LAID_S` apart."""

    @property
    def weights(self) -> Floats:
        return np.array([one.weight for one in self.happened])

    @property
    def decided_weights(self) -> Floats:
        """Without the requests whose callers asked for a plan: 0 for those."""
        return np.array([0.0 if one.request.forced else one.weight for one in self.happened])


class AsItWas(Policy):
    """Every request by the plan that was chosen for it."""

    name = "as it was, replayed"

    def __init__(self, recording: Recording) -> None:
        self._happened = recording.happened
        self._next = 0

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        chosen = self._happened[self._next].chosen
        self._next += 1
        return chosen


def replayable(record: Record, *, prices: Prices | None = None, power: Power | None = None) -> Recording:
    """The world that a record tells of. `prices`, `power`: instead of the recorded ones. BadRecord where it holds no
    request."""
    happened = happened_in(record)
    if not happened:
        raise BadRecord("the record holds no request: there is nothing to replay; send some, and ask again")
    laid, gaps = _laid(_in_runs(happened))
    head = record.heads[-1]
    thought = thought_of(laid)
    models = models_of(laid, thought, head.slowdown)
    return Recording(
        world=World(
            models=models,
            trace=trace_of(laid, models, head.slowdown),
            arrivals=[
                Arrival(
                    at_s=one.at_s,
                    model=one.model,
                    deadline_ms=one.request.deadline_ms,
                    encoded_bytes=one.request.encoded_bytes,
                )
                for one in laid
            ],
            slowdown=head.slowdown,
            power=power or _power(laid[-1]),
            prices=prices
            or Prices(per_byte=head.price_per_gb / 1e9, per_companion_ms=head.price_per_companion_s / 1e3),
            lost_after_s=0.0,  # the trace says when there was none
            back_after_s=0.0,
            gives_up=True,
        ),
        happened=tuple(laid),
        known=known_of(laid, thought),
        zero_s=happened[0].at_s,
        recorded=len(happened),
        gaps=gaps,
    )


def _in_runs(happened: Sequence[Happened]) -> Sequence[Happened]:
    """At most `REPLAYED_MAX`: the first of equal parts, in a row, since a queue shows only in requests that follow each
    other; each run stands for its part."""
    if len(happened) <= REPLAYED_MAX:
        return happened
    edges = np.linspace(0, len(happened), REPLAYED_MAX // RUN + 1).astype(int).tolist()
    kept: list[Happened] = []
    for first, last in itertools.pairwise(edges):
        part, run = happened[first:last], happened[first : min(first + RUN, last)]
        ratio = sum(one.weight for one in part) / sum(one.weight for one in run)
        kept += [replace(one, weight=one.weight * ratio) for one in run]
    return kept


def _laid(happened: Sequence[Happened]) -> tuple[list[Happened], int]:
    """From 0 s on, and how many gaps were made short: a board without a clock starts in 1970, until NTP sets it."""
    laid: list[Happened] = []
    shift_s, gaps = -happened[0].at_s, 0
    for one in happened:
        if laid and one.at_s + shift_s - laid[-1].at_s > GAP_S:
            shift_s, gaps = laid[-1].at_s + LAID_S - one.at_s, gaps + 1
        laid.append(replace(one, at_s=one.at_s + shift_s))
    return laid, gaps


def outcomes_as_they_were(recording: Recording) -> list[Outcome]:
    """What was measured, with bytes, energy and money reckoned from it as a simulation does."""
    return [_as_it_was(recording.world, number, one) for number, one in enumerate(recording.happened)]


def _power(last: Happened) -> Power:
    said = last.table.power
    if not said.source:
        return NO_POWER
    return Power(
        compute_w=said.compute_w,
        send_w=said.send_w,
        receive_w=said.receive_w,
        wait_w=said.wait_w,
        measured=said.measured,
        source=said.source,
    )


def _as_it_was(world: World, number: int, one: Happened) -> Outcome:
    arrival, ms, link = world.arrivals[number], one.stages_ms, one.request.link or UNKNOWN_LINK
    stages = world.models[one.model][one.chosen]
    sent = one.chosen != LOCAL and (one.ran == one.chosen or one.request.fallback)
    up_bytes = one.payload_bytes(stages.up_bytes) if sent else 0
    down_bytes = stages.down_bytes if one.answered_there else 0
    send_ms, receive_ms = up_bytes * MBIT_MS / link[1], down_bytes * MBIT_MS / link[2]
    here_ms = ms["image"] + ms["head"] + ms["encode"] + ms["decode"] + ms["local_tail"]
    there_ms = ms["cloud_decode"] + ms["tail"]
    return Outcome(
        number=number,
        arrival=arrival,
        plan=one.chosen,
        fate=Fate.LATE if one.chosen != LOCAL and one.request.fallback else Fate.PLANNED,
        total_ms=one.request.total_ms,
        stages_ms=ms,
        missed=one.missed,
        joules=world.power.joules(
            compute_ms=here_ms,
            send_ms=send_ms,
            receive_ms=receive_ms,
            wait_ms=max(one.request.total_ms - ms["queue"] - here_ms - send_ms - receive_ms, 0.0) if sent else 0.0,
        ),
        bytes=up_bytes + down_bytes,
        money=world.prices.per_byte * (up_bytes + down_bytes) + world.prices.per_companion_ms * there_ms,
    )
