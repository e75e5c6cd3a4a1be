"""Who is let in: table tests around each bound."""

from __future__ import annotations

import pytest

from cloud.admission import Admission, Bounds
from split.errors import DeadlineExceeded, Overloaded


def enter(admission: Admission, size: int, wait_ms: float = 0.0, budget_ms: float = 100.0) -> None:
    admission.enter(size, wait_ms=wait_ms, budget_ms=budget_ms)


@pytest.mark.parametrize(
    ("wait_ms", "budget_ms", "let_in"),
    [(0, 0, False), (0, -1, False), (0, 0.1, True), (99.9, 100, True), (100, 100, False), (101, 100, False)],
)
def test_a_request_enters_only_if_it_would_start_before_its_deadline(wait_ms, budget_ms, let_in):
    admission = Admission(Bounds(inflight_bytes=10))
    if let_in:
        enter(admission, 1, wait_ms, budget_ms)
    else:
        with pytest.raises(DeadlineExceeded):
            enter(admission, 1, wait_ms, budget_ms)
    assert admission.inflight_requests == int(let_in)


def test_bytes_are_bounded_up_to_the_last_one():
    admission = Admission(Bounds(inflight_bytes=10))
    enter(admission, 4)
    enter(admission, 6)
    with pytest.raises(Overloaded, match="inflight_bytes"):
        enter(admission, 1)
    admission.leave(4)
    enter(admission, 4)
    assert admission.inflight_bytes == 10


def test_a_request_larger_than_the_bound_enters_an_empty_house_only():
    admission = Admission(Bounds(inflight_bytes=10))
    enter(admission, 11)
    with pytest.raises(Overloaded):
        enter(admission, 0)
    admission.leave(11)
    enter(admission, 1)
    with pytest.raises(Overloaded):
        enter(admission, 11)


def test_the_number_of_requests_is_bounded_too():
    admission = Admission(Bounds(inflight_bytes=10, inflight_requests=2))
    enter(admission, 0)
    enter(admission, 0)
    with pytest.raises(Overloaded):
        enter(admission, 0)


def test_leaving_without_having_entered_is_a_bug_of_ours():
    with pytest.raises(AssertionError):
        Admission(Bounds(inflight_bytes=10)).leave(1)
