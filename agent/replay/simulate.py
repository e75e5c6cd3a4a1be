"""Requests through a world: arrivals, a policy's choices, one worker, one link, one companion. Deterministic.

    decide → worker (picture, head, encode) → uplink → companion → downlink → answer
                     └ no reply by the latest start, or the connection lost: the worker finishes from the boundary

As in the product: the worker serves one job at a time, earliest deadline first; a remote request has a latest start for
its finish here (`split/plan/slack.py`); the first answer wins, the other is withdrawn unless it runs already. The link
carries one payload at a time each way, in order, half a round trip behind; the companion computes one request at a
time, in order. A compute stage lasts as the load at its start says. A link that comes back carries on at once: TCP's
own pause before it notices is not simulated.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Final, Literal

from agent.replay.course import Course
from agent.replay.events import Event, Events
from agent.replay.finishing import due_finishes
from agent.replay.flight import Finish, Flight
from agent.replay.line import Line
from agent.replay.worker import Work, Worker
from agent.replay.world import Fate, Outcome, Policy, World
from split.plan.plan import LOCAL, Plan
from split.plan.probing import PING_BYTES, PING_COST_BYTES
from split.plan.slack import reserved_ms

TICK_S: Final = 0.25
"""How often a policy may ping (`agent/uplink.py`)."""
PINGS_OUT: Final = 4
"""Unanswered pings at once (`agent/uplink.py`)."""
QUIET_S: Final = 60.0
"""Without a request for so long nothing is asked of the link until the next one: a record may have days of that."""
LIGHT_BYTES: Final = 256
"""A ping of so little padding passes every queue."""


class Simulation:
    """One run. `run` once; `probe_bytes` afterwards: what the policy's pings weighed."""

    def __init__(self, world: World, policy: Policy) -> None:
        self.world = world
        self.probe_bytes = 0
        self.outcomes: list[Outcome] = []
        self._policy: Policy | None = policy
        self._course = Course(world.trace)
        self._draws = world.draws()
        self._now_s = 0.0
        self._events = Events()
        self._flights: dict[int, Flight] = {}
        self._worker = Worker()
        self._due_token = self._look_token = 0
        self._line = Line(world, self._course, self._events, self._flights)
        self._pings: dict[int, tuple[float, int, int, bool]] = {}
        """Number → when it was sent, its padding and its pong's, whether no request waited for the companion then."""
        self._ping_number = 0
        self._heard_at_s = 0.0
        self._link_is: Literal["up", "silent", "lost"] = "up"
        """As far as this side knows."""
        self._may_ping = type(policy).probe is not Policy.probe
        self._is_ticking = False
        self._asked_at_s = 0.0
        """When the last request came or was answered."""
        self._choosing: int | None = None

    # -- what a policy may look at ------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._link_is == "up"

    def ahead_bytes(self) -> int:
        return self._line.ahead_bytes(self._now_s)

    def foresee(self, plan: Plan) -> Outcome:
        assert self._choosing is not None, "nothing is being chosen"
        number, other = self._choosing, self._branch()
        other._begin(number, plan)
        while number in other._flights and other._events:
            other._step()
        found = next((outcome for outcome in other.outcomes if outcome.number == number), None)
        # without an end, neither the deadline nor the link will ever give it one
        return found or other._flights[number].outcome(self.world, math.inf)

    def least_ms(self, plan: Plan) -> float:
        assert self._choosing is not None, "nothing is being chosen"
        return self._flight(self._choosing, plan).alone_ms(self._course, self._now_s)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> list[Outcome]:
        """Outcomes in the order of arrivals."""
        policy = self._policy
        assert policy is not None, "a fork is stepped, not run"
        assert not self.outcomes, "a simulation runs once"
        for from_s, to_s in self._course.outages:
            if to_s - from_s > self.world.lost_after_s:
                self._events.at(from_s + self.world.lost_after_s, Event.LOST)
            if to_s < math.inf:
                is_short = to_s - from_s <= self.world.lost_after_s
                heard_s = self._course.at(to_s).rtt_ms / 1000.0 if is_short else self.world.back_after_s
                self._events.at(to_s + heard_s, Event.BACK)
        policy.begin(self)
        self._say_paces()
        self._start_ticking()
        for number, arrival in enumerate(self.world.arrivals):
            while self._events.next_at_s <= arrival.at_s:
                self._step()
            self._now_s = self._asked_at_s = arrival.at_s
            self._start_ticking()
            self._choosing = number
            plan = policy.choose(arrival, arrival.at_s, self._worker.queue_ms(self._now_s))
            self._choosing = None
            self._begin(number, plan)
        self._may_ping = False
        while self._flights and self._events:
            self._step()
        assert not self._flights, f"request {min(self._flights)} has no deadline, and the link never comes back"
        self.outcomes.sort(key=lambda outcome: outcome.number)
        return self.outcomes

    def _flight(self, number: int, plan: Plan) -> Flight:
        return Flight.of(self.world, number, plan, self._draws[number], sent=self.is_connected)

    def _branch(self) -> Simulation:
        """The same from here on, without a policy: nobody listens, nobody pings."""
        other = copy.copy(self)
        other._policy, other._choosing, other._may_ping, other.outcomes = None, None, False, []
        other._events = self._events.branch()
        other._flights = {number: replace(flight) for number, flight in self._flights.items()}
        for flight in other._flights.values():
            flight.stages_ms = dict(flight.stages_ms)
        other._worker, other._pings = self._worker.branch(), dict(self._pings)
        other._line = self._line.branch(other._events, other._flights)
        return other

    def _step(self) -> None:
        """The next event."""
        self._now_s, event, number, token = self._events.take()
        line = self._line
        match event:
            case Event.WORKED:
                self._worked()
            case Event.SENT:
                line.sent(token, self._now_s)
            case Event.REACHED if token == line.epoch:
                line.reached(number, self._now_s)
            case Event.COMPUTED if token == line.epoch:
                line.computed(number, self._now_s)
            case Event.RETURNED if token == line.epoch:
                line.returned(number, self._now_s)
            case Event.BACK_HERE if token == line.epoch:
                self._back_here(number)
            case Event.DECODED:
                self._decoded(number)
            case Event.DUE if token == self._due_token:
                self._make_room()
            case Event.PONG if token == line.epoch:
                self._pong(number)
            case Event.LOST:
                self._lose()
            case Event.BACK:
                self._back()
            case Event.TICK if self._may_ping:
                self._tick()
            case Event.LOOK if self._may_ping and token == self._look_token:
                self._ping_if_wanted()
            case Event.PACED if self._policy is not None:
                self._policy.paced(
                    self._course.at(self._now_s).cloud_ratio, self.world.paced_after_s or 0.0, self._now_s
                )
            case Event.GIVE_UP if number in self._flights:
                self._give_up(self._flights[number])
            case _:
                pass  # void

    # -- the device ---------------------------------------------------------------------------------------------------

    def _begin(self, number: int, plan: Plan) -> None:
        flight = self._flights[number] = self._flight(number, plan)
        flight.expected_here_ms = self._expected_ms(flight, finishes=False)
        if self.world.gives_up and flight.deadline_at_s < math.inf:
            self._events.at(flight.deadline_at_s, Event.GIVE_UP, number)
        self._enter(flight, Work.PREPARE)

    def _enter(self, flight: Flight, work: Work) -> None:
        """Hand a job to the worker; what must be finished before it goes first."""
        expected_ms = flight.expected_here_ms if work is Work.PREPARE else flight.expected_finish_ms
        self._make_room(expected_ms, flight.deadline_at_s)
        flight.entered_at_s = self._now_s
        self._worker.enter(flight.number, work, deadline_at_s=flight.deadline_at_s, expected_ms=expected_ms)
        self._work_on()
        self._make_room()

    def _expected_ms(self, flight: Flight, *, finishes: bool) -> float:
        """As the policy has it; a remote plan that cannot be sent runs here as a local one."""
        plan = flight.plan if flight.is_remote else LOCAL
        if self._policy is None:
            return self.world.device_ms(flight.arrival, plan, finishes=finishes)
        return self._policy.expected_ms(flight.arrival, plan, finishes=finishes)

    def _work_on(self) -> None:
        """The worker takes its next job, where it is free."""
        while self._worker.running is None and self._worker:
            number, work, expected_ms = self._worker.take()
            flight = self._flights.get(number)
            if flight is None:
                continue  # withdrawn: its answer came from elsewhere
            load = self._course.at(self._now_s).edge_ratio
            waited_ms = (self._now_s - flight.entered_at_s) * 1000.0
            if work is Work.PREPARE:
                job_ms, flight.stages_ms["queue"] = flight.here_ms, waited_ms
                stages = (("image", flight.image_ms), ("head", flight.head_ms), ("encode", flight.encode_ms))
                for stage, ms in stages:
                    if ms > 0.0:
                        flight.stages_ms[stage] = ms * load
            else:
                job_ms, flight.finish = flight.finish_ms, Finish.RUNS
                flight.stages_ms["finish_queue"], flight.stages_ms["finish"] = waited_ms, job_ms * load
            flight.compute_ms += job_ms * load
            self._worker.begin(number, work, expected_ms, self._now_s)
            self._events.at(self._now_s + job_ms * load / 1000.0, Event.WORKED)

    def _worked(self) -> None:
        number, work = self._worker.done()
        flight = self._flights.get(number)
        if flight is not None:
            if work is Work.FINISH or not flight.is_remote:
                self._answer(flight)
            else:
                self._send(flight)
        self._work_on()
        if self._worker:
            self._make_room()

    def _make_room(self, entering_ms: float = 0.0, deadline_at_s: float = math.inf) -> None:
        """Begin every local finish that could not start in time behind what the worker has, a job of so many expected
        ms that is about to enter included, and one that may begin early where the worker is free: as
        `agent/lateness.py`."""
        while due := self._due(entering_ms, deadline_at_s):
            for flight, fate in due:
                if flight.waits:
                    self._finish(flight, fate)

    def _due(self, entering_ms: float, deadline_at_s: float) -> list[tuple[Flight, Fate]]:
        watched = [one for one in self._flights.values() if one.waits and one.may_finish]
        if not watched:
            return []
        free_at_s = self._now_s + self._worker.queue_ms(self._now_s) / 1000.0
        behind_at_s = free_at_s + entering_ms / 1000.0
        due, next_at_s = due_finishes(
            watched, now_s=self._now_s, free_at_s=free_at_s, behind_at_s=behind_at_s, deadline_at_s=deadline_at_s
        )
        if not due:
            self._due_token += 1
            self._events.at(next_at_s, Event.DUE, token=self._due_token)
        return due

    def _finish(self, flight: Flight, fate: Fate) -> None:
        flight.fate, flight.finish = fate, Finish.WAITS
        if fate is Fate.LATE:
            self._suspect()
        self._enter(flight, Work.FINISH)

    def _give_up(self, flight: Flight) -> None:
        """Its deadline is here: an error is its answer; what of it has not begun never will."""
        flight.fate = Fate.GIVEN_UP
        if "queue" not in flight.stages_ms:
            flight.stages_ms["queue"] = (self._now_s - flight.entered_at_s) * 1000.0
            self._worker.withdraw(flight.expected_here_ms)
        self._answer(flight)

    def _answer(self, flight: Flight) -> None:
        """The first answer is the answer; the rest is called off."""
        del self._flights[flight.number]
        if flight.finish is Finish.WAITS:
            self._worker.withdraw(flight.expected_finish_ms)
        if flight.is_remote:
            self._line.call_off(flight, self._now_s)
        self._asked_at_s = self._now_s
        outcome = flight.outcome(self.world, self._now_s)
        self.outcomes.append(outcome)
        if flight.fate is Fate.HEDGED:
            self._suspect()
        if self._policy is not None:
            self._policy.observe(outcome)
            if flight.is_remote and flight.fate is Fate.PLANNED:
                self._ping_if_wanted()
        self._make_room()

    # -- the link and the companion -----------------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        flight.expected_finish_ms = self._expected_ms(flight, finishes=True)
        if not self.is_connected:
            self._finish(flight, Fate.UNSENT)
            return
        flight.ahead_bytes, flight.handed_at_s, flight.is_sent = self.ahead_bytes(), self._now_s, True
        finish_ms = flight.expected_finish_ms
        left_ms = (flight.deadline_at_s - self._now_s) * 1000.0
        flight.in_time = finish_ms <= left_ms
        if left_ms < math.inf:
            flight.reserved_ms = reserved_ms(finish_ms, left_ms)
        if self._policy is not None:
            hedge_ms = self._policy.sent(flight.number, flight.plan, self._now_s, finish_ms)
            flight.hedge_at_s = self._now_s + hedge_ms / 1000.0
        self._line.hand(flight.number, flight.up_load, self._now_s)
        self._make_room()

    def _back_here(self, number: int) -> None:
        self._heard_at_s = self._now_s
        if (flight := self._flights.get(number)) is None:
            return
        flight.stages_ms["down"] = (self._now_s - flight.computed_at_s) * 1000.0
        decode_ms = flight.decode_ms * self._course.at(self._now_s).edge_ratio
        flight.stages_ms["decode"] = decode_ms
        flight.compute_ms += decode_ms
        self._events.at(self._now_s + decode_ms / 1000.0, Event.DECODED, number)

    def _decoded(self, number: int) -> None:
        if (flight := self._flights.get(number)) is not None:
            flight.fate = Fate.PLANNED  # even where a finish here has begun: this is the first answer
            flight.stages_ms.pop("finish_queue", None)
            flight.stages_ms.pop("finish", None)
            self._answer(flight)

    def _suspect(self) -> None:
        """A reply is overdue. Only a link that is down keeps silent from then on: another is heard a round trip later,
        which is not simulated."""
        if self._link_is == "up" and not self._course.at(self._now_s).connected:
            self._link_is = "silent"
            if self._policy is not None:
                self._policy.silent(self._now_s)

    def _say_paces(self) -> None:
        """The companion says that its load has changed, some time after; what it says in an outage comes when that is
        over."""
        if self.world.paced_after_s is None:
            return
        self._events.at(self._now_s, Event.PACED)
        for before, moment in itertools.pairwise(self.world.trace):
            if moment.cloud_ratio != before.cloud_ratio:
                said_at_s = self._course.passes_from_s(moment.at_s + self.world.paced_after_s)
                self._events.at(said_at_s + self._course.at(said_at_s).rtt_ms / 2000.0, Event.PACED)

    # -- the connection -----------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        """What was under way there is gone; every request that waits is finished here at once."""
        self._link_is = "lost"
        if self._policy is not None:
            self._policy.lost(self._now_s)
        self._line.lose(self._now_s)
        self._pings.clear()
        waiting = [one for one in self._flights.values() if one.waits]
        for flight in sorted(waiting, key=lambda one: one.deadline_at_s):
            if flight.waits:  # entering one may have begun others
                self._finish(flight, Fate.LOST)

    def _back(self) -> None:
        if self._link_is != "up" and self._course.at(self._now_s).connected:
            self._link_is = "up"
            self._heard_at_s = self._now_s
            if self._policy is not None:
                self._policy.back(self._now_s)

    def _start_ticking(self) -> None:
        if self._may_ping and not self._is_ticking:
            self._is_ticking = True
            self._events.at(self._now_s, Event.TICK)

    def _tick(self) -> None:
        """The heartbeat: a light ping while the companion owes an answer, else whatever the policy wants."""
        if not self._flights and self._now_s - self._asked_at_s > QUIET_S:
            self._is_ticking = False
            return
        self._events.at(self._now_s + TICK_S, Event.TICK)
        owes = self._link_is == "silent" or self._is_owed
        if not owes:
            self._ping_if_wanted()
        elif self._now_s - self._heard_at_s > TICK_S and self._link_is != "lost" and len(self._pings) < PINGS_OUT:
            self._ping(0)

    @property
    def _is_owed(self) -> bool:
        """Whether a request waits for the companion."""
        return any(flight.is_sent for flight in self._flights.values())

    def _ping_if_wanted(self) -> None:
        if self._policy is None or not self.is_connected or self._is_owed or len(self._pings) >= PINGS_OUT:
            return
        if (pong_bytes := self._policy.pong(self._now_s)) > 0:
            self._ping(PING_BYTES, pong_bytes)
        elif (padding := self._policy.probe(self._now_s)) > 0:
            self._ping(padding)
        else:
            self._look_token += 1  # what was to be asked before is asked then
            at_s = self._now_s + self._policy.looks_again_s(self._now_s)
            self._events.at(at_s, Event.LOOK, token=self._look_token)

    def _ping(self, padding: int, pong_bytes: int = 0) -> None:
        self._ping_number -= 1
        self._pings[self._ping_number] = (self._now_s, padding, pong_bytes, not self._is_owed)
        self.probe_bytes += padding + pong_bytes + PING_COST_BYTES
        if padding > LIGHT_BYTES:
            self._line.hand(self._ping_number, padding, self._now_s)
            return
        passes_s = self._course.passes_from_s(self._now_s)
        if passes_s < math.inf and pong_bytes:
            self._line.answer(self._ping_number, pong_bytes, passes_s)
        elif passes_s < math.inf:
            self._events.at(
                passes_s + self._course.at(passes_s).rtt_ms / 1000.0, Event.PONG, self._ping_number, self._line.epoch
            )

    def _pong(self, number: int) -> None:
        sent_at_s, padding, pong_bytes, alone = self._pings.pop(number)
        self._heard_at_s = self._now_s
        if self._policy is not None and alone:
            self._policy.ponged((self._now_s - sent_at_s) * 1000.0, padding, pong_bytes, self._now_s)
            self._policy.loaded(self._course.at(self._now_s).cloud_ratio)
            self._ping_if_wanted()


def simulate(world: World, policy: Policy) -> list[Outcome]:
    """What becomes of every request of this world under this policy, in the order of arrivals."""
    return Simulation(world, policy).run()
