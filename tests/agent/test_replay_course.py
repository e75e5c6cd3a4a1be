"""When bytes are through a link that changes, against integration in steps of a tenth of a millisecond."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.replay.course import Course
from agent.replay.world import Moment

STEP_S = 1e-4

moments = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.booleans()), min_size=1, max_size=5
)


def course(parts: list[tuple[int, float, bool]]) -> Course:
    """Parts of so many milliseconds at a rate, the last one for ever at 5 Mbit/s."""
    trace, at_ms = [], 0
    for length_ms, rate, connected in parts:
        trace.append(
            Moment(at_s=at_ms / 1000.0, up_mbit_s=rate, down_mbit_s=2.0 * rate, rtt_ms=10.0, connected=connected)
        )
        at_ms += length_ms
    trace.append(Moment(at_s=at_ms / 1000.0, up_mbit_s=5.0, down_mbit_s=10.0, rtt_ms=10.0))
    return Course(trace)


def stepped(asked: Course, from_s: float, size: float, *, down: bool) -> float:
    now_s = from_s
    while size > 0.0:
        at = asked.at(now_s + STEP_S / 2)
        rate = (at.down_mbit_s if down else at.up_mbit_s) * 125_000.0 if at.connected else 0.0
        size -= rate * STEP_S
        now_s += STEP_S
    return now_s


@settings(max_examples=60, deadline=None)
@given(parts=moments, from_ms=st.integers(0, 120), size=st.integers(1, 40_000), down=st.booleans())
def test_a_transfer_ends_when_as_many_bytes_were_carried(
    parts: list[tuple[int, float, bool]], from_ms: int, size: int, down: bool
) -> None:
    asked = course(parts)
    through_s = asked.through_at_s(from_ms / 1000.0, size, down=down)
    assert through_s == pytest.approx(stepped(asked, from_ms / 1000.0, size, down=down), abs=2.5 * STEP_S)
    assert asked.carried_bytes(from_ms / 1000.0, through_s, down=down) == pytest.approx(size)


def test_what_begins_in_an_outage_waits_for_its_end_and_without_one_never_ends() -> None:
    asked = course([(10, 8.0, True), (20, 8.0, False)])
    assert asked.outages == [(0.010, 0.030)]
    assert asked.through_at_s(0.015, 625) == pytest.approx(0.031)  # 625 bytes at 5 Mbit/s: 1 ms
    assert asked.passes_from_s(0.015) == 0.030
    assert asked.passes_from_s(0.030) == 0.030
    gone = Course(
        [
            Moment(at_s=0.0, up_mbit_s=8.0, down_mbit_s=8.0, rtt_ms=1.0),
            Moment(at_s=0.010, up_mbit_s=8.0, down_mbit_s=8.0, rtt_ms=1.0, connected=False),
        ]
    )
    assert gone.through_at_s(0.0, 10_000) == pytest.approx(0.010)  # the very last byte it carries
    assert gone.through_at_s(0.0, 10_001) == math.inf
    assert gone.outages == [(0.010, math.inf)]


def test_moments_without_connection_that_follow_each_other_are_one_outage() -> None:
    asked = course([(10, 8.0, True), (20, 8.0, False), (5, 3.0, False), (5, 3.0, True)])
    assert asked.outages == [(0.010, 0.035)]
