"""The wait for TCP's window against a sender that is simulated round by round, and against what was measured."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest

from split.plan.slow_start import OPEN, SendWindow, slow_start, slow_start_ms

SEGMENT = 1_448


def sender_ms(size: int, rtt_ms: float, mbit_s: float, window: float) -> float:
    """When the last byte is acknowledged: byte i leaves when the link is free and no more than the window is out.

    A second implementation: segment by segment, the window grows by one segment for each that is acknowledged.
    """
    per_segment_ms = SEGMENT * 0.008 / mbit_s
    room, free_at_ms = int(window / SEGMENT), 0.0
    acked_at_ms: deque[float] = deque()
    for _ in range(math.ceil(size / SEGMENT)):
        if len(acked_at_ms) >= room:
            free_at_ms = max(free_at_ms, acked_at_ms.popleft())
            room += 1
        free_at_ms += per_segment_ms
        acked_at_ms.append(free_at_ms + rtt_ms)
    return acked_at_ms[-1]


def window(**options: float) -> SendWindow:
    facts = {"window_bytes": 300_000.0, "threshold_bytes": math.inf, "timeout_s": 0.24, "sent_at_s": 100.0} | options
    return SendWindow(segment_bytes=SEGMENT, restarts=True, **facts)


def test_a_tensor_of_400_kb_after_silence_takes_what_was_measured() -> None:
    """50 Mbit/s, RTT 40 ms, cubic, ten segments: 234 ms after 2 s of silence, 107 back to back."""
    waits = slow_start((10 * SEGMENT, math.inf), 40.0, 0.008 / 50)
    assert waits is not None
    assert 107 + waits.ms(400_000) == pytest.approx(234, rel=0.02)


@pytest.mark.parametrize(("rtt_ms", "mbit_s"), [(40.0, 50.0), (150.0, 20.0), (5.0, 100.0), (20.0, 5.0)])
@pytest.mark.parametrize("size", [10_000, 40_000, 120_000, 400_000, 1_500_000])
def test_the_wait_is_that_of_a_sender_simulated_segment_by_segment(rtt_ms: float, mbit_s: float, size: int) -> None:
    waits = slow_start((10 * SEGMENT, math.inf), rtt_ms, 0.008 / mbit_s)
    expected_ms = sender_ms(size, rtt_ms, mbit_s, 10 * SEGMENT)
    plain_ms = rtt_ms + size * 0.008 / mbit_s
    assert plain_ms + (waits.ms(size) if waits is not None else 0.0) == pytest.approx(expected_ms, rel=0.05, abs=1.0)


def test_nothing_waits_where_the_window_holds_the_path_or_has_met_its_threshold() -> None:
    assert slow_start(OPEN, 40.0, 0.008 / 50) is None
    assert slow_start((260_000.0, math.inf), 40.0, 0.008 / 50) is None  # 40 ms hold 250,000
    assert slow_start((100_000.0, 80_000.0), 40.0, 0.008 / 50) is None  # what the rate is, that window made it
    waits = slow_start((100_000.0, math.inf), 40.0, 0.008 / 50)
    assert waits is not None
    assert slow_start_ms(np.array([0.0, 100_000.0, 100_001.0]), waits).tolist() == [0.0, 0.0, 24.0]  # 40 - 16


def test_silence_halves_the_window_once_for_each_timeout_down_to_ten_segments() -> None:
    """By hand from `tcp_cwnd_restart`: while ((delta -= rto) > 0) cwnd >>= 1."""
    told = window(window_bytes=320_000.0)
    assert [told.at(100.0 + silent_s)[0] for silent_s in (0.0, 0.24, 0.25, 0.49, 0.73)] == [
        *(320_000.0, 320_000.0, 160_000.0, 80_000.0, 40_000.0)
    ]
    assert told.at(200.0) == (10 * SEGMENT, math.inf)
    assert window(threshold_bytes=100_000.0).at(200.0) == (10 * SEGMENT, 225_000.0)  # three quarters of what it was
    assert window(window_bytes=5_000.0).at(200.0)[0] == 5_000.0
    steady = SendWindow(
        window_bytes=3e5, threshold_bytes=math.inf, segment_bytes=SEGMENT, timeout_s=0.24, restarts=False, sent_at_s=0.0
    )
    assert steady.at(1_000.0) == (3e5, math.inf)


def test_a_link_whose_waits_are_shorter_than_the_model_shortens_them() -> None:
    full, half = (slow_start((14_480.0, math.inf), 40.0, 0.008 / 50, ratio) for ratio in (1.0, 0.5))
    assert full is not None
    assert half is not None
    assert half.ms(400_000) == pytest.approx(full.ms(400_000) / 2)
