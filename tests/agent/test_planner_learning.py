"""What the planner makes of measurements over time: links, load, silence. What is true comes from simulated worlds."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from agent.planner import Planner
from split.plan.plan import LOCAL, Placement, PlanEstimate
from split.plan.slow_start import SendWindow
from tests.agent.test_planner import CUT, TENSOR, choose, knowing_planner


def test_a_plan_that_waits_for_tcps_window_is_predicted_so_and_small_payloads_win() -> None:
    """100 ms and 100 Mbit/s: 50 KB do not fit into ten segments, so that they pass the way three times; by hand: the
    windows of 14,480 and 28,960 bytes leave 100 − 1.2 and 100 − 2.3 ms unused."""
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    for n in range(10):
        planner.observe_ping(100.0, n * 0.1)
        planner.observe_transfer(50_000, 40, 104.0, n * 0.1 + 0.05)
    forced = dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)
    before = choose(planner, forced).chosen
    planner.observe_window(
        SendWindow(
            window_bytes=14_480.0,
            threshold_bytes=math.inf,
            segment_bytes=1_448.0,
            timeout_s=0.3,
            restarts=False,
            sent_at_s=1.0,
        )
    )
    after = choose(planner, forced).chosen
    assert after.predicted_ms - before.predicted_ms == pytest.approx(196.5, rel=0.03)
    assert after.stages_ms["up"] - before.stages_ms["up"] == pytest.approx(196.5, rel=0.03)
    assert sum(after.stages_ms.values()) == pytest.approx(after.predicted_ms)
    small = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    assert choose(planner, small).chosen.stages_ms["up"] < 60.0  # 4 KB fit into the first window
    planner.connected(max_message_bytes=1 << 28)  # another connection: nothing is known of its window yet
    planner.companion_ready("m", 10.0, 0.5)
    assert choose(planner, forced).chosen.predicted_ms == pytest.approx(before.predicted_ms, rel=0.05)


def test_a_throttle_or_another_clock_is_expected_at_once_and_learned_by_two_runs() -> None:
    planner = knowing_planner()
    for n in range(30):
        choose(planner, now_s=n * 0.2)
        planner.observe_edge("m", LOCAL, "whole", 100.0)
    planner.observe_sensors(throttled=False, frequency_ratio=1.0)
    steady = choose(planner, now_s=6.0).chosen
    planner.observe_sensors(throttled=False, frequency_ratio=0.99)
    assert choose(planner, now_s=6.0).chosen.risk_ms == steady.risk_ms
    planner.observe_sensors(throttled=True, frequency_ratio=0.5)
    warned = choose(planner, now_s=6.1).chosen
    assert warned.predicted_ms == pytest.approx(200.0, rel=0.05)  # half the clock, twice the time
    assert warned.risk_ms - warned.predicted_ms > 3 * (steady.risk_ms - steady.predicted_ms)
    for n in range(2):
        planner.observe_edge("m", LOCAL, "whole", 160.0)  # part of it is memory's
        choose(planner, now_s=6.3 + n * 0.2)
    assert choose(planner, now_s=6.6).chosen.predicted_ms == pytest.approx(160.0, rel=0.06)


def test_sensors_that_tell_nothing_change_nothing() -> None:
    planner = knowing_planner()
    before = choose(planner).chosen
    for throttled in (None, True, None, False):
        planner.observe_sensors(throttled=throttled, frequency_ratio=None)
    assert choose(planner).chosen == before


@dataclass
class Worker:
    """The device in simulated time: one job at a time, in order, so that what waits is known exactly."""

    planner: Planner
    slow: float = 1.0
    """What a run takes as a multiple of the profiled 100 ms."""
    now_s: float = 0.0
    free_at_s: float = 0.0
    expected_s: deque[tuple[float, float]] = field(default_factory=deque)
    """Of each local job: when it ends, and what it was expected to take."""
    errors: list[float] = field(default_factory=list)
    remote: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def queue_ms(self) -> float:
        """As `Compute.queue_ms`: the expected times of what waits, and what is left of the one that runs."""
        while self.expected_s and self.expected_s[0][0] <= self.now_s:
            self.expected_s.popleft()
        left = [expected for _, expected in self.expected_s]
        if left:
            began_s = max(self.now_s, self.expected_s[0][0] - 0.1 * self.slow)
            left[0] = max(left[0] - max(self.now_s - began_s, 0.0), 0.0)
        return sum(left) * 1000

    def request(self) -> float:
        """Serve one that comes now; when it is answered."""
        chosen = choose_at(self.planner, self.queue_ms(), self.now_s)
        self.remote.append(chosen.plan != LOCAL)
        if chosen.plan != LOCAL:
            waited_ms = max(self.free_at_s - self.now_s, 0.0) * 1000  # encoding has its turn on the worker
            ms = 150.0 * float(np.exp(self.rng.normal(0, 0.03)))
            self.planner.observe_transfer(50_000, 40, ms - 10.0, self.now_s)
            self.planner.observe_cloud("m", chosen.plan, 0.0, 10.0)
            self.errors.append(chosen.predicted_ms / (waited_ms + ms) - 1.0)
            return self.now_s + (waited_ms + ms) / 1000
        run_s = 0.1 * self.slow * float(np.exp(self.rng.normal(0, 0.03)))
        self.free_at_s = max(self.free_at_s, self.now_s) + run_s
        self.expected_s.append((self.free_at_s, chosen.stages_ms["head"] / 1000))
        self.planner.observe_edge("m", LOCAL, "whole", run_s * 1000)
        self.errors.append(chosen.predicted_ms / ((self.free_at_s - self.now_s) * 1000) - 1.0)
        return self.free_at_s

    def serve(self, requests: int, concurrency: int) -> None:
        """So many callers, each of which asks again when it is answered."""
        callers = [self.now_s] * concurrency
        heapq.heapify(callers)
        for _ in range(requests):
            self.now_s = heapq.heappop(callers)
            heapq.heappush(callers, self.request())
        self.now_s = max(callers)


def choose_at(planner: Planner, edge_queue_ms: float, now_s: float) -> PlanEstimate:
    return planner.decide("m", TENSOR, edge_queue_ms=edge_queue_ms, now_s=now_s).chosen


@pytest.mark.parametrize("slower", [1.0, 1.8], ids=["queueing alone", "each run slower too"])
def test_o_re_04_load_that_the_estimator_never_saw_is_predicted_and_placed_by(slower: float) -> None:
    alone = Worker(knowing_planner())
    alone.serve(40, 1)
    assert np.median(np.abs(alone.errors)) < 0.3
    alone.slow, alone.errors = slower, []
    alone.serve(60, 4)
    assert np.median(np.abs(alone.errors)) < 0.3
    assert np.median(np.abs(alone.errors[20:])) < 0.1

    planner = knowing_planner()  # with a companion that is worth it only for who would wait
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    for n in range(10):
        planner.observe_transfer(50_000, 40, 140.0, n * 0.01)
    shared = Worker(planner, now_s=1.0)
    shared.serve(40, 1)
    assert not any(shared.remote[-10:])
    shared.slow, shared.remote, shared.errors = slower, [], []
    shared.serve(60, 4)
    assert any(shared.remote[:20])
    assert np.median(np.abs(shared.errors)) < 0.3
    # Back to one caller. The queue tells at once; that runs are quick again, only time does while nothing runs here.
    shared.slow, shared.remote = 1.0, []
    shared.serve(60 if slower == 1.0 else 300, 1)
    local_by = 20 if slower == 1.0 else 260
    assert np.mean(shared.remote[local_by:]) < 0.1  # now and then one is tried
