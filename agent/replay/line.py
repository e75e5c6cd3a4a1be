"""The link and the companion in a simulation: one payload at a time each way, in order, half a round trip behind; the
companion computes one request at a time, in order. What no request waits for any more is passed over."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping

from agent.replay.course import Course
from agent.replay.events import Event, Events
from agent.replay.flight import Flight
from agent.replay.world import World


class Line:
    """One connection after the other. `flights`: the requests that are not answered, by number; pings have numbers
    below 0. What ends here are `BACK_HERE` and `PONG`, with `epoch` as their token."""

    def __init__(self, world: World, course: Course, events: Events, flights: Mapping[int, Flight]) -> None:
        self._slow_start = world.slow_start
        self._course, self._events, self._flights = course, events, flights
        self.epoch = 0
        """Of the connection; what belongs to an earlier one is void."""
        self._up: deque[tuple[int, float]] = deque()
        self._sending: tuple[int, float, float] | None = None
        """Number, bytes, since when."""
        self._send_token = 0
        self._sent_at_s = -math.inf
        self._tails: deque[int] = deque()
        self._computing: int | None = None
        self._down: deque[int] = deque()
        self._returning: int | None = None
        self._pongs: dict[int, int] = {}
        """Bytes of those that are to come down, by their pings' numbers."""

    def branch(self, events: Events, flights: Mapping[int, Flight]) -> Line:
        other = copy.copy(self)
        other._events, other._flights = events, flights
        other._up, other._tails, other._down = deque(self._up), deque(self._tails), deque(self._down)
        other._pongs = dict(self._pongs)
        return other

    def ahead_bytes(self, now_s: float) -> int:
        """Handed over, and not on its way yet."""
        waiting = sum(size for _, size in self._up)
        if self._sending is not None:
            _, size, since_s = self._sending
            waiting += max(size - self._course.carried_bytes(since_s, now_s), 0.0)
        return round(waiting)

    def hand(self, number: int, size: float, now_s: float) -> None:
        """A payload, or the padding of a ping, is to go up."""
        self._up.append((number, size))
        self._send_on(now_s)

    def answer(self, number: int, pong_bytes: int, sent_at_s: float) -> None:
        """A ping that passes every queue up is sent then; its pong is to weigh so much."""
        self._pongs[number] = pong_bytes
        half_s = self._course.at(sent_at_s).rtt_ms / 2000.0
        self._events.at(sent_at_s + half_s, Event.REACHED, number, self.epoch)

    def call_off(self, flight: Flight, now_s: float) -> None:
        """Nobody waits for the companion's answer any more: what has not been sent is dropped."""
        if self._sending is not None and self._sending[0] == flight.number:
            since_s = self._sending[2]
            flight.moved_bytes += min(self._course.carried_bytes(since_s, now_s), flight.payload_bytes)
            flight.sent_ms = (now_s - since_s) * 1000.0
            self._sending, self._sent_at_s = None, now_s
            self._send_token += 1
            self._send_on(now_s)

    def lose(self, now_s: float) -> None:
        """The connection is gone, and all that was under way on it and beyond."""
        self._up.clear()
        for flight in self._flights.values():
            self.call_off(flight, now_s)
        self.epoch += 1
        self._send_token += 1
        self._sending = self._computing = self._returning = None
        self._tails.clear()
        self._down.clear()
        self._pongs.clear()
        self._sent_at_s = -math.inf

    # -- up -----------------------------------------------------------------------------------------------------------

    def _send_on(self, now_s: float) -> None:
        while self._sending is None and self._up:
            number, size = self._up.popleft()
            if number >= 0 and number not in self._flights:
                continue
            start = self._slow_start
            if start is not None and now_s - self._sent_at_s > start.idle_s:
                through_s = self._course.slowly_through_at_s(now_s, size, start)
            else:
                through_s = self._course.through_at_s(now_s, size)
            self._sending = (number, size, now_s)
            self._send_token += 1
            self._events.at(through_s, Event.SENT, token=self._send_token)

    def sent(self, token: int, now_s: float) -> None:
        if self._sending is None or token != self._send_token:
            return
        number, _, since_s = self._sending
        self._sending, self._sent_at_s = None, now_s
        rtt_ms = self._course.at(now_s).rtt_ms
        if number < 0:
            self._events.at(now_s + rtt_ms / 1000.0, Event.PONG, number, self.epoch)
        elif (flight := self._flights.get(number)) is not None:
            flight.sent_ms = (now_s - since_s) * 1000.0
            flight.moved_bytes += flight.payload_bytes
            self._events.at(now_s + flight.way_up * rtt_ms / 2000.0, Event.REACHED, number, self.epoch)
        self._send_on(now_s)

    # -- there --------------------------------------------------------------------------------------------------------

    def reached(self, number: int, now_s: float) -> None:
        if number in self._pongs:
            self._down.append(number)
            self._return_on(now_s)
        elif (flight := self._flights.get(number)) is not None:
            flight.there_at_s = now_s
            flight.stages_ms["up"] = (now_s - flight.handed_at_s) * 1000.0
            self._tails.append(number)
            self._compute_on(now_s)

    def _compute_on(self, now_s: float) -> None:
        while self._computing is None and self._tails:
            number = self._tails.popleft()
            if (flight := self._flights.get(number)) is None:
                continue
            load = self._course.at(now_s).cloud_ratio
            flight.stages_ms["cloud_queue"] = (now_s - flight.there_at_s) * 1000.0
            flight.stages_ms["cloud_decode"] = flight.there_decode_ms * load
            flight.stages_ms["tail"] = (flight.there_ms - flight.there_decode_ms) * load
            flight.there_took_ms = flight.there_ms * load
            self._computing = number
            self._events.at(now_s + flight.there_took_ms / 1000.0, Event.COMPUTED, number, self.epoch)

    def computed(self, number: int, now_s: float) -> None:
        self._computing = None
        if (flight := self._flights.get(number)) is not None:
            flight.computed_at_s = now_s
            self._down.append(number)
            self._return_on(now_s)
        self._compute_on(now_s)

    # -- down ---------------------------------------------------------------------------------------------------------

    def _return_on(self, now_s: float) -> None:
        while self._returning is None and self._down:
            number = self._down.popleft()
            if (pong_bytes := self._pongs.get(number)) is not None:
                through_s = self._course.through_at_s(now_s, pong_bytes, down=True)
            elif (flight := self._flights.get(number)) is not None:
                through_s = self._course.through_at_s(now_s, flight.down_load, down=True)
                flight.received_ms = (through_s - now_s) * 1000.0
            else:
                continue
            self._returning = number
            self._events.at(through_s, Event.RETURNED, number, self.epoch)

    def returned(self, number: int, now_s: float) -> None:
        self._returning = None
        if self._pongs.pop(number, None) is not None:
            half_s = self._course.at(now_s).rtt_ms / 2000.0
            self._events.at(now_s + half_s, Event.PONG, number, self.epoch)
        elif (flight := self._flights.get(number)) is not None:
            flight.moved_bytes += flight.down_bytes
            half_ms = flight.way_down * self._course.at(now_s).rtt_ms / 2.0
            self._events.at(now_s + half_ms / 1000.0, Event.BACK_HERE, number, self.epoch)
        self._return_on(now_s)
