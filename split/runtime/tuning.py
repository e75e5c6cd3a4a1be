"""How many threads run a model here, and whether they spin between the operators of a run: candidates and the choice.

A thread that sleeps between two operators must be woken for each, which on some machines (virtual ones above all) costs
more than the second core gains; one that spins costs processor time. Neither is known beforehand, so it is measured.
What spins does so inside a run only: `OrtEngine` stops it at the run's end. Names no runtime; runs on a worker thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

from split.profiles.measured import Tuning
from split.runtime.machine import Machine
from split.runtime.profiler import QUICK_S

log = logging.getLogger(__name__)

SPINS_US: Final = (200, 2000)
"""Longer than most gaps between parallel operators; longer than nearly all. A run that has no gap pays for neither."""
BUDGET_S: Final = 4.0
"""All candidates together, of a model that runs within 50 ms."""
ROUNDS_MIN: Final = 5
ROUNDS_MAX: Final = 25
SLOW_RATIO: Final = 1.25
"""What is so much slower after `ROUNDS_MIN` rounds is looked at no longer."""
ALIKE_RATIO: Final = 1.02
"""Within so much of the fastest, the one that takes least processor time is better: it is cheaper in energy."""
ALONE_RATIO: Final = 0.8
"""Processor time per time of a single thread below which others held it up."""
PAUSE_S: Final = 0.005
"""Between runs, as between requests: threads fall asleep, and what spun on is charged to the run before."""


class Cost(NamedTuple):
    """Of one run, relative to the first candidate's wall time."""

    wall: float
    cpu: float


def default_tuning(machine: Machine, threads: int | Literal["auto"] = "auto") -> Tuning:
    """What to run with before anything was measured: every core that helps, spinning where that cannot do harm.

    `threads`: as the contract or the configuration has it. A core has nothing to wait for alone; below a quota,
    spinning uses up the time that the work needs (88 ms instead of 31 for one run under a quarter of a core).
    """
    wanted = _helping(machine) if threads == "auto" else threads
    return Tuning(threads=wanted, spin_us=SPINS_US[0] if wanted > 1 and _may_spin(machine, wanted) else 0)


def tunings(machine: Machine, threads: int | Literal["auto"] = "auto") -> tuple[Tuning, ...]:
    """What to try, at least one: 1, 2, 4 … threads up to every core that helps (or `threads` alone), sleeping and
    spinning."""
    helping = _helping(machine)
    counts = [n for n in (1 << power for power in range(helping.bit_length())) if n < helping] + [helping]
    return tuple(
        Tuning(threads=count, spin_us=spin_us)
        for count in (counts if threads == "auto" else [threads])
        for spin_us in (0, *(SPINS_US if count > 1 and _may_spin(machine, count) else ()))
    )


def fastest(
    candidates: Sequence[Tuning],
    open_with: Callable[[Tuning], Callable[[], object]],
    *,
    budget_s: float = BUDGET_S,
    limit_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    sleep: Callable[[float], None] = time.sleep,
) -> Tuning:
    """The candidate whose runs are the shortest by lower quartile; among those that are within 2 %, the one with the
    least processor time. A warning where so much else ran meanwhile that the choice may be another at rest.

    `open_with`: opens the model so and gives what runs it once. Two are open at a time: the fastest so far and the
    next, which run in turns, each after a pause. `budget_s`: seconds, all of them together, after `ROUNDS_MIN` rounds
    each; a model of a second per run takes about five times as long. `limit_s`: no round is begun that would go beyond
    it, whatever has been measured; what there is no time to open and run twice is not tried, spinning first, then fewer
    threads. The first two always run once.
    """
    best, *others = candidates
    if not others:
        return best
    costs = {best: Cost(1.0, 1.0)}
    run_best = open_with(best)
    each_s = budget_s / len(others)
    measure = _Turns(clock, cpu_clock, sleep, clock() + limit_s)
    round_s = 0.0
    order = sorted(others, key=lambda tuning: (tuning.spin_us > 0, -tuning.threads))
    for number, other in enumerate(order):
        if round_s and measure.left_s < 2 * round_s:
            break
        run_other = open_with(other)
        one, two = measure.pair(run_best, run_other, each_s, measure.left_s / (len(order) - number))
        round_s = one.wall + two.wall
        if len(costs) == 1:
            costs[best] = Cost(1.0, one.cpu / one.wall)
        known = costs[best]
        costs[other] = Cost(known.wall * two.wall / one.wall, known.wall * two.cpu / one.wall)
        if costs[other].wall < known.wall:
            best, run_best = other, run_other
        del run_other
    first = candidates[0]
    if first.threads == 1 and costs[first].cpu < ALONE_RATIO:
        log.warning(
            "threads were chosen while other processes held one up for %.0f %% of the time; run isthmus profile again "
            "when the machine is at rest",
            100 * (1 - costs[first].cpu),
        )
    alike = [tuning for tuning in costs if costs[tuning].wall <= ALIKE_RATIO * costs[best].wall]
    return min(alike, key=lambda tuning: costs[tuning].cpu)


class _Turns(NamedTuple):
    clock: Callable[[], float]
    cpu_clock: Callable[[], float]
    sleep: Callable[[float], None]
    end_at_s: float
    """On `clock`: no round is begun that would last longer."""

    @property
    def left_s(self) -> float:
        return self.end_at_s - self.clock()

    def pair(
        self, one: Callable[[], object], two: Callable[[], object], budget_s: float, share_s: float
    ) -> tuple[Cost, Cost]:
        """Typical seconds of both, wall and processor, every other round with the other one first; of their first runs,
        with cold caches, where there is no time for a round. No second round is begun that would go beyond `share_s`.
        """
        works = (one, two)
        share_ends_at_s = self.clock() + share_s
        cold = self._once(one), self._once(two)
        round_s = cold[0].wall + cold[1].wall
        warms_up = round_s < 2 * QUICK_S
        taken: tuple[list[Cost], list[Cost]] = ([], [])
        begun_s = self.clock()
        for number in range(ROUNDS_MAX):
            now_s = self.clock()
            spent_s = now_s - begun_s
            first, second = _typical(taken[0]), _typical(taken[1])
            if number >= ROUNDS_MIN and (spent_s >= budget_s or second.wall > SLOW_RATIO * first.wall):
                break
            if number >= 2 and spent_s >= 5 * budget_s:
                break
            if now_s + (2 * round_s if warms_up else round_s) > (share_ends_at_s if number else self.end_at_s):
                break
            for which in (0, 1) if number % 2 else (1, 0):
                if warms_up:
                    works[which]()
                taken[which].append(self._once(works[which]))
        if not taken[0]:
            return cold
        return _typical(taken[0]), _typical(taken[1])

    def _once(self, run: Callable[[], object]) -> Cost:
        """One run after a pause."""
        self.sleep(PAUSE_S)
        cpu_at_s, started_s = self.cpu_clock(), self.clock()
        run()
        wall = self.clock() - started_s
        self.sleep(PAUSE_S)
        return Cost(wall, self.cpu_clock() - cpu_at_s)


def _typical(costs: Sequence[Cost]) -> Cost:
    """The lower quartile of each: what other processes take away in some of the rounds is not this choice's doing."""
    if not costs:
        return Cost(0.0, 0.0)
    walls, cpus = (sorted(values) for values in zip(*costs, strict=True))
    return Cost(walls[len(walls) // 4], cpus[len(cpus) // 4])


def _helping(machine: Machine) -> int:
    """Cores worth a thread each: where they differ, a thread on a slower one makes the others wait."""
    return max(1, min(machine.threads, len(machine.performance_cores) or machine.threads))


def _may_spin(machine: Machine, threads: int) -> bool:
    """A core for each thread and no quota that ends before: else who spins takes the time of one who works."""
    allowed = sum(len(group.cores) for group in machine.groups)
    return threads <= allowed and (machine.quota_cores is None or machine.quota_cores >= allowed)
