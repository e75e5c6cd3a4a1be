"""A brake holds what a program ran and stood to the ratio, however late it is itself."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field

import pytest

from scripts.benches.brake import OWED_S, RUNS_S, Brake


@dataclass
class Program:
    """A clock on which sleeps are late, and what the program did meanwhile."""

    late: random.Random
    late_s: float
    now_s: float = 0.0
    ran_s: float = 0.0
    stood_s: float = 0.0
    stands: bool = False
    stretches: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        slept_s = seconds + self.late.uniform(0.0, self.late_s)
        self.now_s += slept_s
        if self.stands:
            self.stood_s += slept_s
        else:
            self.ran_s += slept_s
            self.stretches.append(slept_s)

    def signalled(self, which: signal.Signals) -> None:
        self.stands = which is signal.SIGSTOP


@pytest.mark.parametrize("late_s", [0.0, 0.0002, 0.002])
@pytest.mark.parametrize("ratio", [1.1, 2.0, 5.0])
def test_it_takes_as_many_times_as_long_as_it_is_told(ratio: float, late_s: float) -> None:
    program = Program(random.Random(1), late_s)
    brake = Brake(program.signalled, wakes_s=0.0, now_s=lambda: program.now_s, sleep=program.sleep)
    for _ in range(2000):
        brake.stretch(ratio)
    assert (program.ran_s + program.stood_s) / program.ran_s == pytest.approx(ratio, rel=0.01)


def test_what_passes_before_it_runs_again_is_no_run() -> None:
    program = Program(random.Random(1), 0.0)
    brake = Brake(program.signalled, wakes_s=0.25 * RUNS_S, now_s=lambda: program.now_s, sleep=program.sleep)
    for _ in range(100):
        brake.stretch(3.0)
    assert program.stood_s / program.ran_s == pytest.approx(2.0 / 1.25)


def test_what_a_brake_missed_for_long_is_not_made_up_for() -> None:
    program = Program(random.Random(1), 0.0)
    brake = Brake(program.signalled, wakes_s=0.0, now_s=lambda: program.now_s, sleep=program.sleep)
    brake.stretch(2.0)
    program.late_s = 3.0
    brake.stretch(2.0)
    program.late_s, before_s = 0.0, program.now_s
    brake.stretch(2.0)
    assert program.now_s - before_s <= 2 * (RUNS_S + OWED_S) + 1e-9


def test_one_that_is_let_go_owes_nothing() -> None:
    program = Program(random.Random(1), 0.001)
    brake = Brake(program.signalled, wakes_s=0.0, now_s=lambda: program.now_s, sleep=program.sleep)
    for _ in range(5):
        brake.stretch(5.0)
    brake.release()
    assert not program.stands
    program.late_s, program.now_s = 0.0, program.now_s + 100.0
    brake.release()
    before = program.ran_s, program.stood_s
    brake.stretch(5.0)
    assert (program.ran_s - before[0], program.stood_s - before[1]) == pytest.approx((RUNS_S, 4 * RUNS_S))
