"""The words of a replay: what there is to choose from, what happens to link and load, what is asked, what came out.

Only values. `course.py` says when bytes are through a link that changes, `simulate.py` lets requests run through.
Seconds are simulated ones from 0, milliseconds spans.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from split.plan.objective import FREE, Prices
from split.plan.plan import LOCAL, Plan
from split.plan.power import NO_POWER, Power


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What one plan costs: device times on the device as it was profiled (slowdown 1), companion times on the
    companion as it was measured. Milliseconds and bytes."""

    image_ms: float = 0.0
    """Decoding a picture on the device; only for requests that come encoded."""
    head_ms: float = 0.0
    """The head, or the whole for local."""
    encode_ms: float = 0.0
    up_bytes: int = 0
    """Codec `encoded`: what such an input usually weighs; a request's own `encoded_bytes` count."""
    cloud_decode_ms: float = 0.0
    """At the companion: payload or picture."""
    tail_ms: float = 0.0
    """At the companion: the tail, or the whole for offload."""
    down_bytes: int = 0
    decode_ms: float = 0.0
    """Of the reply, on the device."""
    finish_ms: float = 0.0
    """On the device, should the companion fail: the tail, or the whole for offload; where a picture travels as it
    came, preparing it included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of link and load from `at_s` until the next moment."""

    at_s: float
    up_mbit_s: float
    down_mbit_s: float
    rtt_ms: float
    connected: bool = True
    """False: nothing passes, whatever the rates."""
    edge_ratio: float = 1.0
    """How much slower the device computes than profiled, beside the world's slowdown: heat, load."""
    cloud_ratio: float = 1.0
    """The same for the companion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request."""

    at_s: float
    model: str
    deadline_ms: float = math.inf
    """From `at_s`."""
    encoded_bytes: int = 0
    """Size of the encoded input as it came; 0: it came as tensors."""
    sizes: tuple[int, ...] = ()
    """Of the model's open dims; () for the profiled ones."""


class Fate(StrEnum):
    """How a remote plan ended; a local one is always `PLANNED` or `GIVEN_UP`."""

    PLANNED = "planned"
    LATE = "late"
    """No reply until the latest start of the local finish, which was then first."""
    HEDGED = "hedged"
    """The finish here began before it had to, and was first."""
    LOST = "lost"
    """The connection went away, the finish began at once."""
    UNSENT = "unsent"
    """There was no companion to send to: it ran here from the start."""
    GIVEN_UP = "given up"
    """No answer by its deadline, in a world that gives up then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request."""

    number: int
    """Place of its arrival in the world's."""
    arrival: Arrival
    plan: Plan
    """As chosen."""
    fate: Fate
    total_ms: float
    """From arrival to answer."""
    stages_ms: Mapping[str, float]
    """Of those that ran: queue, image, head (whole for local), encode, up, cloud_queue, cloud_decode, tail, down,
    decode; finish_queue, finish. `up` and `down` hold the waiting for the link and half a round trip each. When the
    companion answered or the plan was local they sum up to `total_ms`."""
    missed: bool
    joules: float
    bytes: int
    """Payload bytes that crossed, both ways (what was sent before a connection was lost included)."""
    money: float
    ahead_bytes: int = 0
    """What the uplink had to carry first when this request's payload was handed to it."""
    waited_ms: float = 0.0
    """From sending to the answer, whoever gave it; 0.0 where nothing was sent."""

    @property
    def network_ms(self) -> float:
        """What a device sees of the link: round trip less the companion's own time."""
        return self.stages_ms.get("up", 0.0) + self.stages_ms.get("down", 0.0)

    @property
    def done_at_s(self) -> float:
        return self.arrival.at_s + self.total_ms / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """What TCP does after a pause (RFC 5681 §4.1, RFC 6928): the congestion window starts again at ten segments and
    doubles each round trip, until the link is full."""

    idle_s: float = 0.3
    """Linux begins to shrink the window after one retransmission timeout, 200 ms and the round trip."""
    window_bytes: int = 10 * 1448


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All that a policy is measured in. The same world and the same policy give the same outcomes."""

    models: Mapping[str, Mapping[Plan, Stages]]
    """Per model the plans that may run, local among them."""
    trace: Sequence[Moment]
    """In order of time, the first at 0 or before; the last one holds for ever."""
    arrivals: Sequence[Arrival]
    """In order of time."""
    slowdown: float = 1.0
    """Multiplies every device stage."""
    power: Power = NO_POWER
    prices: Prices = FREE
    jitter: float = 0.0
    """Standard deviation of log(stage time), of compute and transfers each; the draws belong to the request, so that
    every policy and plan meets the same ones."""
    seed: int = 0
    slow_start: SlowStart | None = None
    gives_up: bool = False
    """Whether a request ends at its deadline with an error, as in the daemon; otherwise late answers count as late as
    they come, which tells policies apart."""
    lost_after_s: float = 5.0
    """A link that is down for longer loses its connection (`SILENCE_S` of `agent/heartbeat.py`)."""
    back_after_s: float = 1.0
    """From the link's return until requests can be sent again: dialling and opening."""
    paced_after_s: float | None = 0.3
    """From a change of the companion's load until it says so: it looks four times a second (`cloud/pace.py`). None: one
    of an earlier version, which says nothing."""
    sized: Mapping[tuple[str, tuple[int, ...]], Mapping[Plan, Stages]] = field(default_factory=dict)
    """Plans of a model at other sizes than the profiled ones; what is not here costs as in `models`."""

    def __post_init__(self) -> None:
        assert self.trace[0].at_s <= 0.0, "a trace begins at 0 s or before"
        assert all(a.at_s < b.at_s for a, b in zip(self.trace, self.trace[1:], strict=False)), "a trace has an order"
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        assert all(a.at_s <= b.at_s for a, b in pairs), "arrivals have an order"
        assert all(LOCAL in plans for plans in (*self.models.values(), *self.sized.values())), "local may always run"

    def plans(self, arrival: Arrival) -> Mapping[Plan, Stages]:
        """What this request may be served by."""
        return self.sized.get((arrival.model, arrival.sizes)) or self.models[arrival.model]

    def device_ms(self, arrival: Arrival, plan: Plan, *, finishes: bool) -> float:
        """What the device takes for a request before anything leaves (a local one: in all), or (`finishes`) for what is
        missing then; without load and draws."""
        stages = self.plans(arrival)[plan]
        if finishes:
            return self.slowdown * stages.finish_ms
        image_ms = stages.image_ms if arrival.encoded_bytes and plan.codec != "encoded" else 0.0
        return self.slowdown * (image_ms + stages.head_ms + stages.encode_ms)

    def draws(self) -> list[tuple[float, float, float, float]]:
        """Per arrival the factors on its device stages, its way up, its companion stages and its way down."""
        if self.jitter == 0.0:
            return [(1.0, 1.0, 1.0, 1.0)] * len(self.arrivals)
        normal = np.random.default_rng(self.seed).normal(size=(len(self.arrivals), 4))
        drawn = np.exp(self.jitter * normal - self.jitter**2 / 2.0)  # with mean 1
        return [(a, b, c, d) for a, b, c, d in drawn.tolist()]


class View(Protocol):
    """What a policy may look at while it chooses, beside what it was told."""

    @property
    def world(self) -> World: ...

    @property
    def is_connected(self) -> bool:
        """Whether a remote plan would be sent."""

    def ahead_bytes(self) -> int:
        """Bytes that were handed to the uplink and have not left yet."""

    def foresee(self, plan: Plan) -> Outcome:
        """What would become of the request that is being chosen for, given all under way. Only an oracle asks."""

    def least_ms(self, plan: Plan) -> float:
        """What it would take if nothing else was under way: never more than that, and cheap."""


class Policy(ABC):
    """What chooses. Most need `choose` and `observe` alone."""

    name: str
    _view: View

    def begin(self, view: View) -> None:
        """Before the first request. `view` stays good until the last."""
        self._view = view

    @abstractmethod
    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        """The plan of one request; one of `World.plans`. What is remote is run here where `View.is_connected` is not.

        `edge_queue_ms`: what the device's worker has still to do, as far as it was expected (`expected_ms`)."""

    def expected_ms(self, arrival: Arrival, plan: Plan, *, finishes: bool) -> float:
        """What the device is expected to take, as `World.device_ms`: what queues and latest starts are reckoned with.
        Who knows of load or of a wrong profile says otherwise."""
        return self._view.world.device_ms(arrival, plan, finishes=finishes)

    def sent(self, number: int, plan: Plan, now_s: float, finish_ms: float) -> float:
        """The payload of a request was handed to the uplink: from when on, in ms from now, the device begins to finish
        it if it has nothing else to do; inf: not before it must. `finish_ms`: what the device is expected to need."""
        return math.inf

    def observe(self, outcome: Outcome) -> None:
        """A request was answered."""
        return

    def silent(self, now_s: float) -> None:
        """A reply is overdue while the link is down: no request is sent until `back`."""
        return

    def lost(self, now_s: float) -> None:
        """The connection is gone: no request is sent until `back`."""
        return

    def back(self, now_s: float) -> None:
        """Requests are sent again."""
        return

    def probe(self, now_s: float) -> int:
        """Bytes of padding of a ping to be sent now; 0: none. Asked four times a second and after replies and pongs,
        while no request waits for the companion; not in long pauses. For a policy that does not say, no ping is ever
        sent."""
        return 0

    def looks_again_s(self, now_s: float) -> float:
        """In so many seconds it wants to be asked for a probe again, whatever happens; inf: not because of that."""
        return math.inf

    def pong(self, now_s: float) -> int:
        """Bytes of padding that a ping sent now should ask for in its pong; 0: none. Asked before each `probe`."""
        return 0

    def ponged(self, rtt_ms: float, padding_bytes: int, pong_bytes: int, now_s: float) -> None:
        """A ping came back that was sent while no request waited for the companion; the bytes it carried up, and those
        that came down with its pong."""
        return

    def paced(self, cloud_ratio: float, since_s: float, now_s: float) -> None:
        """The companion said that it computes so much slower than alone now, and that it had not `since_s` ago."""
        return

    def loaded(self, cloud_ratio: float) -> None:
        """With that ping the companion said how much slower than alone it computes now. Papers take that as known; the
        daemon's pings carry none of it, and our policy does not listen: it is told of changes (`paced`)."""
        return
