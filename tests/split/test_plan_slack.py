"""Latest starts against brute force over all orders, on one worker that is not interrupted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from split.plan.slack import first_to_run, latest_starts, margin_ratio, reserved_ms

Pending = list[tuple[int, float, float]]

pending_requests = st.lists(st.tuples(st.integers(1, 2_000), st.integers(1, 500)), min_size=1, max_size=5).map(
    lambda rows: [(key, deadline_ms / 1000, float(local_ms)) for key, (deadline_ms, local_ms) in enumerate(rows)]
)


def feasible(start_s: float, pending: Pending) -> bool:
    """Some order, begun at `start_s` without a gap, meets every deadline."""
    for order in itertools.permutations(pending):
        clock_s = start_s
        for _, deadline_at_s, local_ms in order:
            clock_s += local_ms / 1000
            if clock_s > deadline_at_s + 1e-9:
                break
        else:
            return True
    return False


@given(pending_requests)
def test_starts_as_given_meet_every_deadline_without_overlap(pending: Pending) -> None:
    starts = latest_starts(-1e6, pending)
    spans = sorted(
        (starts[key], starts[key] + local_ms / 1000, deadline_at_s) for key, deadline_at_s, local_ms in pending
    )
    for (_, end_s, deadline_at_s), following in itertools.zip_longest(spans, spans[1:]):
        assert end_s <= deadline_at_s + 1e-9
        assert following is None or end_s <= following[0] + 1e-9


@given(pending_requests, st.floats(0.002, 1.0))
def test_nobody_who_starts_everything_later_meets_all_deadlines(pending: Pending, later_s: float) -> None:
    """Over every group of requests: begun later than its first start says, no order of the group works."""
    starts = latest_starts(-1e6, pending)
    first = min(starts.values())
    # The first gap-free block decides: what follows a gap starts at its own deadline less its own work.
    block = sorted(pending, key=lambda item: starts[item[0]])
    end_s, group = first, []
    for item in block:
        if starts[item[0]] > end_s + 1e-9:
            break
        group.append(item)
        end_s = starts[item[0]] + item[2] / 1000
    assert feasible(first, group)
    assert not feasible(first + later_s, group)


def test_what_is_late_already_starts_now_in_order_of_deadlines() -> None:
    assert latest_starts(10.0, [("b", 10.02, 50.0), ("a", 10.01, 50.0)]) == {"b": 10.0, "a": 10.0}


def test_one_request_starts_its_local_time_before_its_deadline() -> None:
    assert latest_starts(0.0, [("a", 1.0, 300.0)]) == pytest.approx({"a": 0.7})
    assert latest_starts(0.0, []) == {}


def test_a_finish_whose_runs_scatter_is_given_the_quantile_of_a_log_normal() -> None:
    assert margin_ratio(0.05, 2.0) == pytest.approx(0.05)  # what every run scatters by is in the five percent
    # σ = 0.4 two above the median: exp(2 · √(0.4² − 0.05²)) = exp(0.7937) = 2.2116
    assert margin_ratio(0.4, 2.0) == pytest.approx(1.2616, abs=1e-4)
    assert margin_ratio(1e300, 3.0) == margin_ratio(float("inf"), 3.0) == 10.0
    # 29 ms · 2.2616 + 8 ms + 5 % of the 371 ms beyond
    assert reserved_ms(29.0, 400.0, margin_ratio(0.4, 2.0)) == pytest.approx(92.14, abs=0.01)
    assert reserved_ms(29.0, 400.0) == pytest.approx(57.0)


def met(order: list[tuple[float, float, int]]) -> set[tuple[float, float, int]]:
    """Those that end by their deadline when run in this order from 0 on; each takes 5 % longer, and 8 ms are kept."""
    end_s, found = 0.0, set()
    for job in order:
        end_s += job[1] * 1.05 / 1000
        if end_s + 0.008 <= job[0]:
            found.add(job)
    return found


@given(
    st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 500), st.integers(0, 3)),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[0],
    )
)
def test_a_better_rank_goes_first_where_nobody_it_passes_is_made_late(rows: list[tuple[int, int, int]]) -> None:
    waiting = sorted((deadline_ms / 1000, float(expected_ms), rank) for deadline_ms, expected_ms, rank in rows)
    taken = first_to_run(0.0, waiting)
    best = min(range(len(waiting)), key=lambda index: (waiting[index][2], waiting[index][0]))
    assert taken in (0, best)
    passed = set(waiting[:best])
    reordered = [waiting[best], *waiting[:best], *waiting[best + 1 :]]
    # the one that goes first may take a few percent longer, too: here its time as expected counts
    longer = (waiting[best][0], waiting[best][1] / 1.05, waiting[best][2])
    still_met = met([longer, *reordered[1:]]) & passed
    if taken == best:
        assert still_met >= met(waiting) & passed
    else:
        assert not still_met >= met(waiting) & passed


@pytest.mark.parametrize(
    ("waiting", "first"),
    [
        ([(1.0, 100.0, 1), (2.0, 100.0, 0)], 1),  # gold behind silver that has time
        ([(0.25, 100.0, 1), (2.0, 100.0, 0)], 1),  # 205 ms + 8 < 250
        ([(0.2, 100.0, 1), (2.0, 100.0, 0)], 0),  # the silver one would be late
        ([(0.05, 100.0, 1), (2.0, 100.0, 0)], 1),  # it is late in any case
        ([(1.0, 100.0, 0), (2.0, 100.0, 0)], 0),
        ([(1.0, 100.0, 0), (2.0, 100.0, 1)], 0),
        ([(1.0, 100.0, 2), (1.5, 100.0, 1), (2.0, 100.0, 0), (3.0, 100.0, 0)], 2),
        ([(float("-inf"), 5.0, -1), (1.0, 100.0, 0)], 0),  # what goes before all requests
        ([(1.0, 100.0, 8), (float("inf"), 100.0, 99)], 0),
    ],
)
def test_which_of_those_waiting_goes_first(waiting: list[tuple[float, float, int]], first: int) -> None:
    assert first_to_run(0.0, waiting) == first
