"""Who is let in: table tests around each bound."""

from __future__ import annotations

import pytest

from cloud.admission import Admission, Bounds
from split.errors import DeadlineExceeded, Overloaded


def enter(
    admission: Admission, size: int, wait_ms: float = 0.0, budget_ms: float = 100.0, device: str = "camera-1"
) -> None:
    admission.enter(device, size, wait_ms=wait_ms, budget_ms=budget_ms)


@pytest.mark.parametrize(
    ("wait_ms", "budget_ms", "let_in"),
    [(0, 0, False), (0, -1, False), (0, 0.1, True), (99.9, 100, True), (100, 100, False), (101, 100, False)],
)
def test_a_request_enters_only_if_it_would_start_before_its_deadline(wait_ms, budget_ms, let_in):
    admission = Admission(Bounds(inflight_bytes=10, device_bytes=1000))
    if let_in:
        enter(admission, 1, wait_ms, budget_ms)
    else:
        with pytest.raises(DeadlineExceeded):
            enter(admission, 1, wait_ms, budget_ms)
    assert admission.inflight_requests == int(let_in)


def test_bytes_are_bounded_up_to_the_last_one():
    admission = Admission(Bounds(inflight_bytes=10, device_bytes=1000))
    enter(admission, 4)
    enter(admission, 6)
    with pytest.raises(Overloaded, match="inflight_bytes"):
        enter(admission, 1)
    admission.leave("camera-1", 4)
    enter(admission, 4)
    assert admission.inflight_bytes == 10


def test_a_request_larger_than_the_bound_enters_an_empty_house_only():
    admission = Admission(Bounds(inflight_bytes=10, device_bytes=1000))
    enter(admission, 11)
    with pytest.raises(Overloaded):
        enter(admission, 0)
    admission.leave("camera-1", 11)
    enter(admission, 1)
    with pytest.raises(Overloaded):
        enter(admission, 11)


def test_the_number_of_requests_is_bounded_too():
    admission = Admission(Bounds(inflight_bytes=10, device_bytes=1000, inflight_requests=2))
    enter(admission, 0)
    enter(admission, 0)
    with pytest.raises(Overloaded):
        enter(admission, 0)


def test_leaving_without_having_entered_is_a_bug_of_ours():
    with pytest.raises(AssertionError):
        Admission(Bounds(inflight_bytes=10, device_bytes=1000)).leave("camera-1", 1)


def test_one_device_has_its_own_bound_in_bytes_and_the_others_enter_beside_it():
    admission = Admission(Bounds(inflight_bytes=100, device_bytes=10))
    enter(admission, 4)
    enter(admission, 6)
    with pytest.raises(Overloaded, match=r"limits\.device_bytes"):
        enter(admission, 1)
    enter(admission, 10, device="camera-2")
    admission.leave("camera-1", 4)
    enter(admission, 4)


def test_one_device_has_its_own_bound_in_requests():
    admission = Admission(Bounds(inflight_bytes=100, device_bytes=100, device_requests=2))
    enter(admission, 0)
    enter(admission, 0)
    with pytest.raises(Overloaded, match="camera-1"):
        enter(admission, 0)
    enter(admission, 0, device="camera-2")


def test_a_request_over_its_devices_bound_enters_while_that_device_has_no_other():
    admission = Admission(Bounds(inflight_bytes=1000, device_bytes=10))
    enter(admission, 5, device="camera-2")
    enter(admission, 50)
    with pytest.raises(Overloaded):
        enter(admission, 1)
    admission.leave("camera-1", 50)
    admission.leave("camera-2", 5)
    assert (admission._device_bytes, admission._device_requests) == ({}, {})  # nothing is kept of who was here
