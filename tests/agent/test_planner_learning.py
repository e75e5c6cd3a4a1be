"""What the planner makes of measurements over time: links, load, silence. What is true comes from simulated worlds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from split.plan.plan import Placement
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
