"""The clock is a fake one: every call takes as long as it says."""

import pytest

from split.runtime import profiler
from split.runtime.profiler import ROUNDS_MAX, measure_interleaved


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def takes(self, *seconds: float) -> "Work":
        return Work(self, seconds)


class Work:
    """Takes the given seconds, one after the other, the last one for ever."""

    def __init__(self, clock: Clock, seconds: tuple[float, ...]) -> None:
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def __call__(self) -> None:
        self.clock.now_s += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiler, "time", clock)
    return clock


def test_the_first_call_and_outliers_do_not_count(clock: Clock) -> None:
    work = clock.takes(0.050, 0.002, 0.002, 0.090, 0.090, 0.002)
    assert measure_interleaved({"a": work}, 0.5)["a"] == pytest.approx(2.0)


def test_quick_things_are_measured_at_most_so_often(clock: Clock) -> None:
    work = clock.takes(0.001)
    measure_interleaved({"a": work}, 60.0)
    assert work.calls == 1 + 2 * ROUNDS_MAX


def test_slow_things_get_three_rounds_even_when_the_budget_is_gone(clock: Clock) -> None:
    work = clock.takes(1.0)
    assert measure_interleaved({"a": work}, 1.0)["a"] == pytest.approx(1000.0)
    assert work.calls == 1 + 3


def test_very_slow_things_get_one_round(clock: Clock) -> None:
    work = clock.takes(20.0)
    measure_interleaved({"a": work}, 1.0)
    assert work.calls == 1 + 1


def test_each_name_gets_its_own_time(clock: Clock) -> None:
    ms = measure_interleaved({"a": clock.takes(0.003), "b": clock.takes(0.005)}, 0.1)
    assert ms == pytest.approx({"a": 3.0, "b": 5.0})


def test_on_a_busy_machine_a_long_run_keeps_its_ratio_to_a_short_one(clock: Clock) -> None:
    """Two of three long runs are interrupted for 8 ms, the short one fits in between: 6 ms and 2 ms it remains."""
    # The first call, then two in each round, of which the second counts.
    disturbed = [seconds for turn in range(ROUNDS_MAX) for seconds in (0.006, 0.006 if turn % 3 == 0 else 0.014)]
    ms = measure_interleaved({"whole": clock.takes(0.006, *disturbed), "head": clock.takes(0.002)}, 60.0)
    assert ms == pytest.approx({"whole": 6.0, "head": 2.0})
