"""Full jitter against the formula of its source: random_between(0, min(cap, base · 2^attempt))."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from split.transport.retry import Backoff


def test_with_the_largest_draws_the_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(first_s=0.1, cap_s=5.0, draw=lambda: 1.0)
    assert [backoff.failed() for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_success_starts_over() -> None:
    backoff = Backoff(first_s=0.1, cap_s=5.0, draw=lambda: 1.0)
    for _ in range(5):
        backoff.failed()
    backoff.succeeded()
    assert backoff.failed() == 0.1


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 5_000))
def test_no_wait_is_negative_or_over_the_cap_after_any_number_of_failures(draw: float, failures: int) -> None:
    backoff = Backoff(draw=lambda: draw, failures=failures)
    assert 0 <= backoff.failed() <= 1.5


def test_draws_differ_so_that_clients_do_not_return_together() -> None:
    backoffs = [Backoff(failures=10) for _ in range(20)]
    assert len({backoff.failed() for backoff in backoffs}) > 1
