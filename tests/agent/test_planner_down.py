"""Replies of 600 KB whose way down alone becomes ten times slower, and recovers: how soon requests stay here, and how
soon they leave again. In simulated time with a seed; what is best is told by the world itself. What pongs with weight
may cost, and that replies of a few bytes cost none.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import numpy as np
import pytest

from agent.planner import Planner
from agent.replay.known import Known
from agent.replay.world import Stages
from split.plan.observation import Metered
from split.plan.plan import LOCAL, Placement, Plan, RequestFacts
from split.plan.power import PowerModel
from split.plan.probing import PING_COST_BYTES
from split.profiles.radio import Radio

SEEDS = 12
TICK_S = 0.25
"""So often the uplink asks for a ping while no request waits for the companion."""
REPLY_BYTES = 600_000
OFFLOAD = Plan(placement=Placement.OFFLOAD, codec="raw")


@dataclass(frozen=True)
class Path:
    rtt_ms: float
    up: float
    down: float
    """Mbit/s."""

    def exact_ms(self, up_bytes: int, down_bytes: int) -> float:
        return self.rtt_ms + up_bytes * 0.008 / self.up + down_bytes * 0.008 / self.down

    def ms(self, rng: np.random.Generator, up_bytes: int, down_bytes: int) -> float:
        """4 % and a third of a millisecond of jitter."""
        return float(self.exact_ms(up_bytes, down_bytes) * (1 + 0.04 * rng.normal()) + 0.3 * abs(rng.normal()))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model of so many ms here, whose requests weigh so much, one every so often."""

    here_ms: float
    up_bytes: int = 150_000
    there_ms: float = 20.0
    down_bytes: int = REPLY_BYTES
    budget_ms: float
    every_s: float
    good: Path
    bad: Path

    def remote_ms(self, path: Path) -> float:
        return self.there_ms + path.exact_ms(self.up_bytes, self.down_bytes)


@dataclass
class Device:
    """A planner, and a link that carries what it wants to know. `weighs`: the companion answers pings with weight."""

    cell: Cell
    seed: int
    weighs: bool = True
    now_s: float = 0.0
    pong_bytes: int = 0
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        cell = self.cell
        stages = Stages(
            up_bytes=cell.up_bytes, tail_ms=cell.there_ms, down_bytes=cell.down_bytes, finish_ms=cell.here_ms
        )
        self.planner = Planner(**self.options)  # type: ignore[arg-type]  # of the planner's own
        known = Known.of({LOCAL: Stages(head_ms=cell.here_ms), OFFLOAD: stages}, {})
        self.planner.add_model("m", known.card, known.profile, known.contract)
        self.planner.connected(max_message_bytes=1 << 28)
        self.planner.companion_ready("m", cell.there_ms, 0.0)

    def ping(self, path: Path) -> None:
        """As the heartbeat does in one tick: again at once where the planner wants to know more."""
        for _ in range(4):
            padding, pong_bytes = 64, self.planner.pong_wanted(self.now_s) if self.weighs else 0
            if not pong_bytes and not (padding := self.planner.probe_wanted(self.now_s)):
                return
            rtt_ms = path.ms(self.rng, padding, pong_bytes)
            self.now_s += rtt_ms / 1000.0
            self.pong_bytes += pong_bytes + PING_COST_BYTES * bool(pong_bytes)
            self.planner.observe_ping(rtt_ms, self.now_s, padding_bytes=padding, pong_bytes=pong_bytes)

    def ask(self, path: Path, seconds: float) -> list[tuple[float, bool]]:
        """(when, whether it left) of each request."""
        cell, asked, until_s = self.cell, list[tuple[float, bool]](), self.now_s + seconds
        while self.now_s < until_s:
            began_s = self.now_s
            facts = RequestFacts(budget_ms=cell.budget_ms)
            plan = self.planner.decide("m", facts, edge_queue_ms=0.0, now_s=began_s).chosen.plan
            asked.append((began_s, plan != LOCAL))
            if plan == LOCAL:
                self.wait(began_s + cell.here_ms / 1000.0, path)
                self.planner.observe_edge("m", LOCAL, "whole", cell.here_ms)
            else:
                self._travel(path)
                self.ping(path)
            self.wait(began_s + cell.every_s, path)
        return asked

    def wait(self, until_s: float, path: Path) -> None:
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + TICK_S)
            self.ping(path)

    def _travel(self, path: Path) -> None:
        """Where the companion is late, the device finishes."""
        cell = self.cell
        ms, latest_ms = path.ms(self.rng, cell.up_bytes, cell.down_bytes), cell.budget_ms - 1.05 * cell.here_ms - 18.0
        if ms + cell.there_ms <= latest_ms:
            self.now_s += (ms + cell.there_ms) / 1000.0
            self.planner.observe_transfer(cell.up_bytes, cell.down_bytes, ms, self.now_s)
        else:
            self.now_s += latest_ms / 1000.0
            self.planner.observe_late(cell.up_bytes, cell.down_bytes, latest_ms - cell.there_ms, self.now_s)
            self.now_s += cell.here_ms / 1000.0


def requests_until(asked: list[tuple[float, bool]], leaves: bool) -> tuple[int, float]:
    """Before the first three in a row that do: how many, and how long since the first of all."""
    left = [one for _, one in asked]
    first = next((n for n in range(len(left) - 2) if left[n : n + 3] == [leaves] * 3), None)
    return (len(left), math.inf) if first is None else (first, asked[first][0] - asked[0][0])


CELLS = {
    "50 to 5 Mbit/s": Cell(
        here_ms=250.0, budget_ms=1_500.0, every_s=0.5, good=Path(20.0, 50.0, 50.0), bad=Path(20.0, 50.0, 5.0)
    ),
    "200 to 20 Mbit/s near by": Cell(
        here_ms=80.0, budget_ms=800.0, every_s=0.25, good=Path(5.0, 200.0, 200.0), bad=Path(5.0, 200.0, 20.0)
    ),
    "20 to 2 Mbit/s, always late": Cell(
        here_ms=700.0, budget_ms=3_000.0, every_s=1.0, good=Path(40.0, 20.0, 20.0), bad=Path(40.0, 20.0, 2.0)
    ),
    "80 to 8 Mbit/s beside 10 up": Cell(
        here_ms=250.0,
        up_bytes=50_000,
        budget_ms=1_500.0,
        every_s=0.5,
        good=Path(30.0, 10.0, 80.0),
        bad=Path(30.0, 10.0, 8.0),
    ),
    "2 MB up": Cell(
        here_ms=800.0,
        up_bytes=2_000_000,
        there_ms=40.0,
        budget_ms=4_000.0,
        every_s=1.0,
        good=Path(20.0, 50.0, 50.0),
        bad=Path(20.0, 50.0, 5.0),
    ),
}


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_two_requests_after_the_way_down_alone_became_slow_they_stay_and_it_back_they_leave_within_five_seconds(
    cell: Cell,
) -> None:
    assert 1.2 * cell.remote_ms(cell.good) < cell.here_ms < cell.remote_ms(cell.bad) / 1.2
    stayed, left, weighed = [], [], []
    for seed in range(SEEDS):
        device = Device(cell, seed)
        assert device.ask(cell.good, 20.0)[-1][1]
        stayed.append(requests_until(device.ask(cell.bad, 20.0), leaves=False))
        left.append(requests_until(device.ask(cell.good, 20.0), leaves=True))
        weighed.append(device.pong_bytes)
    assert statistics.median(number for number, _ in stayed) <= 2
    assert max(number for number, _ in stayed) <= 3
    assert statistics.median(seconds for _, seconds in left) <= 2.5
    assert max(seconds for _, seconds in left) < 5.0
    assert max(weighed) < 500_000


def test_without_weight_in_pongs_the_way_down_that_is_back_is_not_seen() -> None:
    """As of an older companion: requests stay as soon all the same, by what the replies themselves have told."""
    cell = CELLS["50 to 5 Mbit/s"]
    for seed in range(3):
        device = Device(cell, seed, weighs=False)
        assert device.ask(cell.good, 20.0)[-1][1]
        assert requests_until(device.ask(cell.bad, 20.0), leaves=False)[0] <= 3
        assert requests_until(device.ask(cell.good, 20.0), leaves=True)[0] > 20


SLOW_DOWN = CELLS["50 to 5 Mbit/s"]


def staying(**options: object) -> Device:
    """Requests stay here for what their replies take, since the companion was used."""
    device = Device(SLOW_DOWN, 1, options=options)
    device.ask(SLOW_DOWN.good, 5.0)
    assert not device.ask(SLOW_DOWN.bad, 10.0)[-1][1]
    return device


@pytest.mark.parametrize("per_hour", [100_000, 2_000_000])
def test_an_hour_of_pongs_and_pings_costs_no_more_than_what_is_allowed_for_probes(per_hour: int) -> None:
    """And what was full at the start, and two percent of what requests moved."""
    device = Device(SLOW_DOWN, 1, options={"probe_bytes_per_hour": per_hour})
    device.ask(SLOW_DOWN.good, 5.0)
    moved = device.now_s * 2.0 * (SLOW_DOWN.up_bytes + SLOW_DOWN.down_bytes) + 4 * 750_000
    planner, spent, now_s = device.planner, 0, device.now_s
    while now_s < 3600.0:
        now_s += TICK_S
        planner.decide("m", RequestFacts(budget_ms=1_500.0), edge_queue_ms=0.0, now_s=now_s)
        padding, pong_bytes = 64, planner.pong_wanted(now_s)
        if pong_bytes or (padding := planner.probe_wanted(now_s)):
            spent += padding + pong_bytes + PING_COST_BYTES - 64
            rtt_ms = SLOW_DOWN.bad.exact_ms(padding, pong_bytes)
            planner.observe_ping(rtt_ms, now_s, padding_bytes=padding, pong_bytes=pong_bytes)
    assert spent <= 2 * per_hour + 0.02 * moved


def test_receiving_counts_against_the_joules_that_probes_may_take() -> None:
    """2 W while bytes come, next to nothing while they go: a pong of 12,500 bytes at 5 Mbit/s is 20 ms, 40 mJ. An hour
    of 1 J is 25 of them, beside what was full at the start."""

    def an_hour_of(joules: float) -> float:
        radio = Radio(base_w=2.0, send_w_per_mbit_s=0.0, receive_w_per_mbit_s=0.0, wait_w=0.0, source="a test")
        model = PowerModel(compute_w=1.0, radio=radio, measured=False, source="a test")
        device = Device(SLOW_DOWN, 1, options={"power": lambda: model, "probe_joules_per_hour": joules})
        device.ask(SLOW_DOWN.bad, 600.0)
        return device.pong_bytes

    free, bounded = an_hour_of(math.inf), an_hour_of(1.0)
    assert bounded < free / 3


def test_no_pong_is_asked_for_where_probes_may_cost_nothing_or_no_model_stays_for_its_reply() -> None:
    none = Metered(left_bytes=1e12, probe_bytes_per_hour=0.0)
    options: list[dict[str, object]] = [{"probe_bytes_per_hour": 0}, {"metered": lambda: none}]
    for given in options:
        device = staying(**given)
        assert device.pong_bytes == 0
    assert staying().pong_bytes > 0
    assert Planner().pong_wanted(0.0) == 0
    device = staying()
    device.planner.companion_lost("gone")
    device.now_s += 5.0
    device.planner.decide("m", RequestFacts(budget_ms=1_500.0), edge_queue_ms=0.0, now_s=device.now_s)
    assert device.planner.pong_wanted(device.now_s) == 0


@pytest.mark.parametrize(("down_bytes", "up", "most"), [(40, 2.0, 0), (4_000, 2.0, 0), (REPLY_BYTES, 0.5, 14_256)])
def test_labels_and_replies_behind_a_way_up_that_is_too_slow_cost_no_pong(
    down_bytes: int, up: float, most: int
) -> None:
    """150 KB at 2 Mbit/s are 600 ms, which here takes 250: what comes down decides nothing. The first look at a
    connection comes before that is known."""
    path = Path(20.0, up, 20.0)
    cell = Cell(here_ms=250.0, down_bytes=down_bytes, budget_ms=5_000.0, every_s=0.5, good=path, bad=path)
    device = Device(cell, 3)
    assert not device.ask(path, 30.0)[-1][1]
    assert sum(left for _, left in device.ask(path, 60.0)) <= 2  # tried, not chosen
    assert device.pong_bytes <= most
