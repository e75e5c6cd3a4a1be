"""What requests take beside their stages. Times are those of two processes on loopback, Silero-VAD, a device 20 times
slower: 1.6 ms where it stayed, 3.2 where it travelled."""

from __future__ import annotations

import numpy as np
import pytest

from split.plan.rest import Rest

HERE_MS, TRAVELLED_MS = 1.6, 3.2


def drawn(ms: float, count: int, *, seed: int = 7) -> list[float]:
    """Scattered by a tenth, one in twenty ten times as long, as behind a busy event loop."""
    rng = np.random.default_rng(seed)
    found: list[float] = (ms * rng.lognormal(0.0, 0.1, count) * np.where(rng.random(count) < 0.05, 10.0, 1.0)).tolist()
    return found


def test_before_anything_was_seen_nothing_is_expected() -> None:
    rest = Rest()
    assert (rest.here_ms, rest.there_ms) == (0.0, 0.0)


def test_either_kind_is_expected_within_a_tenth_whatever_stalls_between() -> None:
    rest, far = Rest(), []
    for n, both in enumerate(zip(drawn(HERE_MS, 200), drawn(TRAVELLED_MS, 200, seed=8), strict=True)):
        rest.observe(both[0], travelled=False)
        rest.observe(both[1], travelled=True)
        if n >= 8:
            far += [abs(rest.here_ms / HERE_MS - 1), abs((rest.here_ms + rest.there_ms) / TRAVELLED_MS - 1)]
    assert np.mean(far) < 0.05
    assert max(far) < 0.2


def test_four_quiet_requests_are_enough() -> None:
    rest = Rest()
    for _ in range(4):
        rest.observe(HERE_MS, travelled=False)
        rest.observe(TRAVELLED_MS, travelled=True)
    assert rest.here_ms == pytest.approx(HERE_MS)
    assert rest.there_ms == pytest.approx(TRAVELLED_MS - HERE_MS)


@pytest.mark.parametrize("travelled", [False, True])
def test_what_was_seen_of_one_kind_is_expected_of_the_other_so_that_it_decides_nothing(travelled: bool) -> None:
    rest = Rest()
    for _ in range(20):
        rest.observe(HERE_MS, travelled=travelled)
    assert (rest.here_ms, rest.there_ms) == (HERE_MS, 0.0)
    rest.observe(90.0, travelled=not travelled)  # the first that opened something
    assert (rest.here_ms, rest.there_ms) == (HERE_MS, 0.0)


def test_a_stall_moves_nothing_and_five_of_them_are_the_rule() -> None:
    rest = Rest()
    for _ in range(20):
        rest.observe(HERE_MS, travelled=False)
    for stalls in range(1, 6):
        rest.observe(60.0, travelled=False)
        assert rest.here_ms == (60.0 if stalls == 5 else HERE_MS)


def test_one_that_travels_is_never_expected_to_take_less_than_one_that_stays() -> None:
    rest = Rest()
    for _ in range(20):
        rest.observe(5.0, travelled=False)
        rest.observe(1.0, travelled=True)
    assert (rest.here_ms, rest.there_ms) == (5.0, 0.0)
