"""Under backlog: a stream of requests, decided one by one, against the linear program of the best mix of plans.

Three stations in tandem (device, link, companion), each first come first served and one request at a time; what a plan
takes of each is (E, b, C). The bound is solved here by enumeration: a basic solution of min z, Σ p = 1, Σ p·d_r ≤ z has
at most three plans.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest
from split.plan.decide import decide
from split.plan.objective import NO_BACKLOG, Backlog
from split.plan.observation import LinkEstimate, Observation, RemoteView
from split.plan.plan import Decision, RequestFacts
from split.plan.table import PlanTable
from split.plan.underway import Underway
from split.profiles.contract import Contract
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec

MS_PER_BYTE = 0.001
RTT_MS = 10.0
FACTS = RequestFacts(budget_ms=1e9)

Demands = npt.NDArray[np.float64]
"""[plan, station] ms: local first, one split a cut, offload last, as the table has them."""


def table_of(demands: Demands) -> PlanTable:
    """A model whose plans take exactly this; encoding, decoding and replies cost nothing."""
    cuts = [CutId(f"{n:012x}") for n in range(len(demands) - 2)]

    def raw(link_ms: float) -> tuple[CodecCosts, ...]:
        return (CodecCosts(codec="raw", bytes=round(link_ms / MS_PER_BYTE), encode_ms=0.0, decode_ms=0.0),)

    card = ModelCard(
        digest=ModelDigest("sha256:" + "0" * 64),
        path="/models/m.onnx",
        files=(("m.onnx", 1, "0" * 64),),
        inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, 8)),),
        outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 8)),),
        nodes=100,
        opset=17,
        cuts=tuple(
            CutCard(
                id=cut,
                boundary=(TensorSpec(name=f"at-{cut}", dtype="FP32", shape=(8,)),),
                head_inputs=("x",),
                head_outputs=(),
                tail_inputs=(),
                shown_inputs=(),
                tail_outputs=("y",),
                nodes=1,
                compute_share=0.5,
                node_bitmap="07",
            )
            for cut in cuts
        ),
    )
    profile = ModelProfile(
        digest=card.digest,
        runtime="onnxruntime 1",
        fingerprint="f",
        dims={},
        threads=1,
        whole_ms=float(demands[0, 0]),
        image_ms=0.0,
        input_codecs=raw(float(demands[-1, 1])),
        encoded_bytes=0,
        output_bytes=0,
        cuts=tuple(
            CutCosts(cut=cut, head_ms=float(e), tail_ms=float(c), codecs=raw(float(b)))
            for cut, (e, b, c) in zip(cuts, demands[1:-1], strict=True)
        ),
    )
    table = PlanTable.build(card, profile, Contract())
    tail_ms = np.array([c for _, _, c in demands])
    return table.with_compute(tail_ms=tail_ms)


def chain(seed: int) -> Demands:
    """A network of layers: the later the cut, the more runs here; bytes as they come."""
    rng = np.random.default_rng(seed)
    whole, speed = rng.uniform(40.0, 200.0), rng.uniform(0.3, 1.0)
    depth = np.sort(rng.random(8))
    splits = [[whole * x, rng.lognormal(np.log(0.4 * whole), 0.8), whole * speed * (1.0 - x)] for x in depth]
    return np.array([[whole, 0.0, 0.0], *splits, [0.0, rng.lognormal(np.log(0.9 * whole), 0.5), whole * speed]])


def mix_bound_ms(demands: Demands) -> float:
    """Least time between two requests that any mix of plans sustains: the value of the linear program."""
    best = float(demands.max(axis=1).min())
    for pair in itertools.combinations(demands, 2):
        for r, s in itertools.combinations(range(3), 2):
            # p·a_r + (1 − p)·b_r = p·a_s + (1 − p)·b_s
            slope = (pair[0][r] - pair[1][r]) - (pair[0][s] - pair[1][s])
            if slope and 0.0 <= (p := (pair[1][s] - pair[1][r]) / slope) <= 1.0:
                best = min(best, float((p * pair[0] + (1.0 - p) * pair[1]).max()))
    for triple in itertools.combinations(demands, 3):
        system = np.vstack([np.column_stack([np.array(triple).T, -np.ones(3)]), [1.0, 1.0, 1.0, 0.0]])
        if abs(np.linalg.det(system)) > 1e-9:
            *shares, z = np.linalg.solve(system, [0.0, 0.0, 0.0, 1.0]).tolist()
            if min(shares) >= 0.0:
                best = min(best, z)
    return best


class Stations:
    """The simulation. Time in ms; decisions by `decide` over what the device would know."""

    def __init__(self, demands: Demands, *, shares: bool = True) -> None:
        self._demands, self._table, self._shares = demands, table_of(demands), shares
        self._waiting: list[deque[int]] = [deque(), deque(), deque()]
        self._ends_ms: list[float | None] = [None, None, None]
        self._rows: dict[int, int] = {}
        self._began_ms: dict[int, float] = {}
        self._underway = Underway()
        self._events: list[tuple[float, int, int, int]] = []
        self._numbers: Iterator[int] = itertools.count()
        self.now_ms = 0.0
        self.chosen: Counter[int] = Counter()
        self.latencies_ms: list[float] = []
        self.ended_ms: list[float] = []

    def closed(self, outstanding: int, requests: int) -> Stations:
        """Always so many requests under way, until so many have been answered."""
        for _ in range(outstanding):
            self._arrive()
        while len(self.ended_ms) < requests:
            if self._step():
                self._arrive()
        return self

    def open(self, every_ms: float, requests: int) -> Stations:
        """A request every so often."""
        for number in range(requests):
            while self._events and self._events[0][0] <= number * every_ms:
                self._step()
            self.now_ms = number * every_ms
            self._arrive()
        while self._events:
            self._step()
        return self

    def between_ms(self) -> float:
        """Mean time between two answers, the first fifth left out."""
        ends = self.ended_ms[len(self.ended_ms) // 5 :]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def decide(self) -> Decision:
        left_ms = [self._left_ms(station) for station in range(3)]
        ahead_bytes = round(left_ms[1] / MS_PER_BYTE)
        remote = RemoteView(
            link=LinkEstimate(
                rtt_ms=RTT_MS,
                up_ms_per_byte=MS_PER_BYTE,
                down_ms_per_byte=MS_PER_BYTE,
                covariance=(0.0,) * 6,
                age_s=0.0,
            ),
            beta=1.0,
            beta_sigma=0.0,
            speed_ratio=1.0,
            image_ms=0.0,
            queue_ms=0.0,
            queue_sigma_ms=0.0,
            opened=np.ones(len(self._table), dtype=np.bool_),
            ahead_bytes=ahead_bytes,
        )
        now_s, underway = self.now_ms / 1000.0, self._underway
        backlog = Backlog(
            device_ms=left_ms[0],
            link_ms=max(underway.link_ms(now_s), left_ms[1]),
            companion_ms=underway.companion_ms(now_s),
        )
        state = Observation(
            edge_queue_ms=left_ms[0],
            slowdown=1.0,
            alpha=1.0,
            alpha_sigma=0.0,
            image_ms=0.0,
            image_ratio=1.0,
            remote=remote,
            backlog=backlog if self._shares else NO_BACKLOG,
        )
        return decide(self._table, state, FACTS)

    def _arrive(self) -> None:
        number = next(self._numbers)
        row = self._table.row_of[self.decide().chosen.plan]
        self.chosen[row] += 1
        self._rows[number], self._began_ms[number] = row, self.now_ms
        _, link_ms, companion_ms = self._demands[row].tolist()
        self._underway.began(number, link_ms=link_ms, companion_ms=companion_ms, now_s=self.now_ms / 1000.0)
        self._enter(number, 0)

    def _enter(self, number: int, station: int) -> None:
        demand = self._demands[self._rows[number]]
        while station < 3 and demand[station] == 0.0:
            station += 1
        if station == 3:
            away = bool(demand[1:].any())
            heapq.heappush(self._events, (self.now_ms + away * RTT_MS, number, 3, number))
            return
        self._waiting[station].append(number)
        self._start(station)

    def _start(self, station: int) -> None:
        if self._ends_ms[station] is None and self._waiting[station]:
            number = self._waiting[station].popleft()
            ends_ms = self._ends_ms[station] = self.now_ms + float(self._demands[self._rows[number], station])
            heapq.heappush(self._events, (ends_ms, number, station, number))

    def _step(self) -> bool:
        """The next event; whether a request was answered."""
        self.now_ms, _, station, number = heapq.heappop(self._events)
        if station == 3:
            self._underway.done(number)
            self.latencies_ms.append(self.now_ms - self._began_ms[number])
            self.ended_ms.append(self.now_ms)
            return True
        self._ends_ms[station] = None
        self._start(station)
        self._enter(number, station + 1)
        return False

    def _left_ms(self, station: int) -> float:
        waiting = sum(float(self._demands[self._rows[number], station]) for number in self._waiting[station])
        ends_ms = self._ends_ms[station]
        return waiting + (ends_ms - self.now_ms if ends_ms is not None else 0.0)


HAND = np.array([[100.0, 0.0, 0.0], [10.0, 60.0, 90.0], [60.0, 40.0, 20.0], [0.0, 200.0, 100.0]])
"""Local, two cuts, offload."""


def test_the_bound_of_a_mix_is_the_one_worked_out_by_hand() -> None:
    # Of the two cuts, p of the first: device 60 − 50p, companion 20 + 70p; they meet at p = 1/3, in 43.3 ms. The link
    # takes 40 + 20p, 46.7 there; it meets the device at p = 2/7, in 45.7 ms, where the companion takes 40.
    assert mix_bound_ms(HAND[1:3]) == pytest.approx(60 - 50 * 2 / 7)
    # 2/27 local, 10/27 and 15/27 of the cuts load all three alike: (2·100 + 10·10 + 15·60) / 27,
    # (10·60 + 15·40) / 27, (10·90 + 15·20) / 27; no basis with offload is feasible and better.
    assert mix_bound_ms(HAND) == pytest.approx(400 / 9)


CHAINS = [chain(seed) for seed in (1, 2, 3, 4, 5, 8)]


@pytest.mark.parametrize("demands", [HAND, *CHAINS])
def test_a_closed_loop_reaches_the_bound_of_the_best_mix_and_beats_every_single_plan(demands: Demands) -> None:
    bound_ms, single_ms = mix_bound_ms(demands), float(demands.max(axis=1).min())
    ran = Stations(demands).closed(outstanding=16, requests=400)
    assert bound_ms / ran.between_ms() >= 0.97
    assert ran.between_ms() < 0.97 * single_ms
    assert sum(count > 20 for count in ran.chosen.values()) in (2, 3, 4)


@pytest.mark.parametrize("demands", [HAND, *CHAINS])
def test_a_stream_that_no_single_plan_could_carry_is_carried_with_bounded_queues(demands: Demands) -> None:
    bound_ms, single_ms = mix_bound_ms(demands), float(demands.max(axis=1).min())
    every_ms = bound_ms / 0.95
    assert every_ms < single_ms
    ran = Stations(demands).open(every_ms, requests=600)
    unloaded_ms = float(demands.sum(axis=1).min())
    first, last = np.mean(ran.latencies_ms[100:200]), np.mean(ran.latencies_ms[-100:])
    assert last < 2.0 * first  # a queue that grows without end would have grown fivefold
    assert last < 10.0 * unloaded_ms


@pytest.mark.parametrize("demands", [HAND, *CHAINS])
def test_at_low_load_sharing_costs_no_latency(demands: Demands) -> None:
    every_ms = 5.0 * mix_bound_ms(demands)
    shared, selfish = (Stations(demands, shares=shares).open(every_ms, requests=100) for shares in (True, False))
    assert np.mean(shared.latencies_ms) <= 1.02 * np.mean(selfish.latencies_ms)


def test_without_backlog_the_choice_is_that_of_latency_alone() -> None:
    for demands in CHAINS:
        idle = Stations(demands)
        away = demands[:, 1:].any(axis=1) * RTT_MS
        decision = idle.decide()
        assert decision.chosen.predicted_ms == pytest.approx(float((demands.sum(axis=1) + away).min()))
        assert decision.objective["latency"] == 1.0


def test_the_reason_says_that_throughput_counted() -> None:
    crowd = Stations(HAND)
    for _ in range(8):
        crowd._arrive()
    decision = crowd.decide()
    assert decision.objective["throughput"] > 0.5
    assert "throughput" in decision.reason


# -- the virtual queues ---------------------------------------------------------------------------------------------


def test_work_under_way_is_done_by_the_clock_and_no_more_than_belongs_to_requests_in_flight() -> None:
    underway = Underway()
    underway.began("a", link_ms=10.0, companion_ms=40.0, now_s=1.0)
    underway.began("b", link_ms=20.0, companion_ms=30.0, now_s=1.0)
    assert (underway.link_ms(1.0), underway.companion_ms(1.0)) == pytest.approx((30.0, 70.0))
    assert (underway.link_ms(1.025), underway.companion_ms(1.025)) == pytest.approx((5.0, 45.0))
    assert underway.link_ms(2.0) == 0.0
    underway.done("a")
    assert underway.companion_ms(1.025) == pytest.approx(30.0)
    underway.done("a")  # twice, and unknown ones, are nothing
    underway.done("b")
    assert underway.companion_ms(1.0) == 0.0
    underway.began("c", link_ms=1.0, companion_ms=2.0, now_s=1.0)  # nothing is left of the others
    assert (underway.link_ms(1.0), underway.companion_ms(1.0)) == pytest.approx((1.0, 2.0))
