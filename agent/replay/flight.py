"""One request on its way through a simulation: what each station has to do for it, and what became of it so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from agent.replay.course import Course
from agent.replay.world import Arrival, Fate, Outcome, World
from split.plan.plan import LOCAL, Placement, Plan


class Finish(IntEnum):
    """How far the local finish of a remote request is."""

    NONE = 0
    WAITS = 1
    RUNS = 2


@dataclass(slots=True, kw_only=True)
class Flight:
    """Milliseconds with slowdown and the request's own draws in, without the load of the moment."""

    number: int
    arrival: Arrival
    plan: Plan
    is_remote: bool
    deadline_at_s: float
    image_ms: float
    head_ms: float
    encode_ms: float
    payload_bytes: int
    up_load: float
    """Bytes that the uplink is busy for: the payload, and the draw on it."""
    way_up: float
    """Factor on half a round trip."""
    there_ms: float
    there_decode_ms: float
    """The part of `there_ms` that decodes."""
    down_bytes: int
    down_load: float
    way_down: float
    decode_ms: float
    finish_ms: float
    fate: Fate
    expected_here_ms: float = 0.0
    """What the device is thought to need before anything leaves."""
    expected_finish_ms: float = 0.0
    """And for what is missing, once something has left."""
    finish: Finish = Finish.NONE
    is_sent: bool = False
    handed_at_s: float = 0.0
    """When the payload was handed to the uplink."""
    ahead_bytes: int = 0
    reserved_ms: float = 0.0
    """How long before its deadline the finish here must start."""
    in_time: bool = True
    """Whether the finish was expected to be through by the deadline when the payload left."""
    hedge_at_s: float = math.inf
    """From when on it may."""
    there_at_s: float = 0.0
    computed_at_s: float = 0.0
    entered_at_s: float = 0.0
    """When the job under way entered the worker."""
    compute_ms: float = 0.0
    """Of the device, so far."""
    sent_ms: float = 0.0
    received_ms: float = 0.0
    there_took_ms: float = 0.0
    moved_bytes: float = 0.0
    stages_ms: dict[str, float]

    @property
    def here_ms(self) -> float:
        """On the worker before anything leaves."""
        return self.image_ms + self.head_ms + self.encode_ms

    @property
    def waits(self) -> bool:
        """For the companion, with a finish here that has not begun."""
        return self.is_sent and self.finish is Finish.NONE

    @property
    def may_finish(self) -> bool:
        """Whether it ever will be finished here while there is a connection: not where that would be too late."""
        return self.in_time and (self.deadline_at_s < math.inf or self.hedge_at_s < math.inf)

    @staticmethod
    def of(world: World, number: int, plan: Plan, draws: tuple[float, float, float, float], *, sent: bool) -> Flight:
        """`sent`: whether there is a companion to send to; otherwise a remote plan runs here as a local one."""
        arrival = world.arrivals[number]
        plans = world.plans(arrival)
        assert plan in plans, f"{plan} is no plan of {arrival.model}"
        is_remote = plan.placement is not Placement.LOCAL and sent
        stages = plans[plan] if is_remote else plans[LOCAL]
        here, way_up, there, way_down = draws
        here *= world.slowdown
        encoded = plan.codec == "encoded" and is_remote
        payload = arrival.encoded_bytes if encoded and arrival.encoded_bytes else stages.up_bytes
        return Flight(
            number=number,
            arrival=arrival,
            plan=plan,
            is_remote=is_remote,
            deadline_at_s=arrival.at_s + arrival.deadline_ms / 1000.0,
            image_ms=here * stages.image_ms if arrival.encoded_bytes and not encoded else 0.0,
            head_ms=here * stages.head_ms,
            encode_ms=here * stages.encode_ms,
            payload_bytes=payload if is_remote else 0,
            up_load=way_up * payload,
            way_up=way_up,
            there_ms=there * (stages.cloud_decode_ms + stages.tail_ms),
            there_decode_ms=there * stages.cloud_decode_ms,
            down_bytes=stages.down_bytes,
            down_load=way_down * stages.down_bytes,
            way_down=way_down,
            decode_ms=here * stages.decode_ms,
            finish_ms=here * stages.finish_ms,
            fate=Fate.PLANNED if is_remote or plan == LOCAL else Fate.UNSENT,
            stages_ms={},
        )

    def alone_ms(self, course: Course, now_s: float) -> float:
        """What it takes from `now_s` on if nothing else is under way: no more than it will take."""
        here_ms = self.here_ms * course.at(now_s).edge_ratio
        if not self.is_remote:
            return here_ms
        could_end_here = self.deadline_at_s < math.inf or bool(course.outages)
        finished_ms = here_ms + self.finish_ms * course.least_edge_ratio if could_end_here else math.inf
        leaves_s = course.through_at_s(now_s + here_ms / 1000.0, self.up_load)
        if leaves_s == math.inf:
            return finished_ms
        there_s = leaves_s + self.way_up * course.at(leaves_s).rtt_ms / 2000.0
        done_s = there_s + self.there_ms * course.at(there_s).cloud_ratio / 1000.0
        returns_s = course.through_at_s(done_s, self.down_load, down=True)
        if returns_s == math.inf:
            return finished_ms
        returns_s += self.way_down * course.at(returns_s).rtt_ms / 2000.0
        decode_ms = self.decode_ms * course.at(returns_s).edge_ratio
        return min((returns_s - now_s) * 1000.0 + decode_ms, finished_ms)

    def outcome(self, world: World, now_s: float) -> Outcome:
        """Answered at `now_s`."""
        total_ms = (now_s - self.arrival.at_s) * 1000.0
        waited_ms = 0.0
        if self.is_sent:
            here_ms = self.stages_ms.get("queue", 0.0) + self.compute_ms
            waited_ms = total_ms - here_ms - self.sent_ms - self.received_ms
        moved = round(self.moved_bytes)
        prices = world.prices
        return Outcome(
            number=self.number,
            arrival=self.arrival,
            plan=self.plan,
            fate=self.fate,
            total_ms=total_ms,
            stages_ms=self.stages_ms,
            missed=self.fate is Fate.GIVEN_UP or now_s > self.deadline_at_s + 1e-9,
            joules=world.power.joules(
                compute_ms=self.compute_ms,
                send_ms=self.sent_ms,
                receive_ms=self.received_ms,
                wait_ms=max(waited_ms, 0.0),
            ),
            bytes=moved,
            money=prices.per_byte * moved + prices.per_companion_ms * self.there_took_ms,
            ahead_bytes=self.ahead_bytes,
            waited_ms=(now_s - self.handed_at_s) * 1000.0 if self.is_sent else 0.0,
        )
