"""When a companion says that it has become slower or faster, and when it looks at all."""

from __future__ import annotations

import math

import pytest

from cloud import pace as pace_module
from cloud.pace import AGAIN_S, LOOK_S, LOOK_SLOW_S, USED_S, Pace, PaceWatch, Pieces


def watch() -> PaceWatch:
    """After three looks at a quiet machine, until 0.5 s."""
    found = PaceWatch()
    assert [found.looked(ms, at_s) for ms, at_s in ((1.1, 0.0), (1.0, 0.25), (1.2, 0.5))] == [None, None, 0.0]
    assert found.told_ms == 1.0
    return found


def test_the_least_of_the_first_looks_is_what_it_begins_with() -> None:
    assert not watch().is_slow


def test_a_stall_is_not_told_and_a_change_with_its_second_look() -> None:
    found = watch()
    assert found.looked(4.0, 1.0) is None
    assert found.is_surprised
    assert found.looked(1.1, 1.03) == 0.0
    assert not found.is_surprised
    assert found.looked(4.0, 2.0) is None
    assert found.looked(9.0, 2.03) == pytest.approx(2.03 - 1.03)
    assert found.told_ms == pytest.approx(6.0)  # √(4 · 9)
    assert found.is_slow
    assert found.looked(6.5, 3.0) == 0.0
    assert found.looked(1.0, 4.0) is None
    assert found.looked(1.0, 4.03) == pytest.approx(1.03)
    assert found.told_ms == pytest.approx(1.0)
    assert not found.is_slow


def test_surprises_in_both_directions_are_no_change() -> None:
    found = watch()
    assert [found.looked(ms, 1.0 + n) for n, ms in enumerate((3.0, 0.5, 3.0, 0.5))] == [None] * 4
    assert found.told_ms == 1.0


class Machine(Pieces):
    """Takes what it is told."""

    def __init__(self) -> None:
        self.ms = 1.0
        self.looks = 0

    async def took_ms(self) -> float:
        self.looks += 1
        return self.ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: now_s[0])
    return now_s


async def test_it_looks_while_it_is_used_and_on_while_it_has_said_that_it_is_slow(clock: list[float]) -> None:
    machine, told, busy = Machine(), list[tuple[float, float]](), False
    pace = Pace(machine, is_busy=lambda: busy)
    pace.tell = lambda work_ms, since_s: told.append((work_ms, since_s))
    await pace.look()
    assert machine.looks == 0, "nobody has asked for anything yet"
    pace.used_at_s = clock[0]
    busy = True
    await pace.look()
    assert machine.looks == 0, "a request is computed"
    busy = False
    for _ in range(3):
        await pace.look()
        clock[0] += 0.25
    assert told == [(1.0, 0.0)]
    assert pace.pause_s(clock[0]) == LOOK_S
    machine.ms = 5.0
    await pace.look()
    assert pace.pause_s(clock[0]) == AGAIN_S
    await pace.look()
    assert told[-1][0] == 5.0
    clock[0] = pace.used_at_s + USED_S + 1.0
    assert pace.pause_s(clock[0]) == LOOK_SLOW_S
    machine.ms = 1.0
    await pace.look()
    await pace.look()
    assert told[-1][0] == 1.0, "a device that had left is told, however long that was ago"
    looks = machine.looks
    await pace.look()
    assert machine.looks == looks, "unused, and not slow"


async def test_a_piece_takes_time_on_every_thread() -> None:
    pieces = Pieces(2)
    assert 0.0 < await pieces.took_ms() < math.inf
    pieces.close()
