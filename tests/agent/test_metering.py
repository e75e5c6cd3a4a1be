"""Bytes by month and interface: what survives which end, what a clock may do, and what the planner makes of it."""

from __future__ import annotations

import calendar
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.metering import AHEAD_BYTES, UNCERTAIN, Meter, interface_of, interface_towards
from split.errors import ConnectionLost, IdentityError, NotReached

GB = 10**9


def at(year: int, month: int, day: int = 15) -> float:
    return float(calendar.timegm((year, month, day, 12, 0, 0)))


@dataclass
class Line:
    """A connection that says what it carried."""

    sent_bytes: int = 0
    received_bytes: int = 0
    queued_bytes: int = 0
    closed_because: str | None = None


@dataclass
class Clock:
    now_s: float = at(2026, 11)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def metered(folder: Path, clock: Clock, *, cap: int | None = GB, interfaces: tuple[str, ...] = ()) -> Meter:
    return Meter(folder / "metering.json", cap_bytes=cap, interfaces=interfaces, wall_s=clock)


def written(meter: Meter, folder: Path) -> bool:
    """One look of `run`, without its sleep."""
    books = meter.due()
    if books is not None:
        (folder / "metering.json").write_bytes(books)
    return books is not None


def test_both_directions_and_what_waits_count_and_a_closed_connection_stays_counted(
    tmp_path: Path, clock: Clock
) -> None:
    meter, line = metered(tmp_path, clock), Line(sent_bytes=1000, received_bytes=200)
    meter.follow(line, "eth0")
    assert meter.used_bytes() == 1200
    line.sent_bytes += 500
    line.queued_bytes = 1000
    assert 1700 + 1000 <= meter.used_bytes() <= 1700 + 1100
    line.queued_bytes, line.closed_because = 0, "gone"
    assert meter.used_bytes() == 1700
    line.sent_bytes = 10**6  # nobody looks there any more
    assert meter.used_bytes() == 1700


def test_an_orderly_end_keeps_the_count_to_the_byte(tmp_path: Path, clock: Clock) -> None:
    meter = metered(tmp_path, clock)
    meter.follow(Line(sent_bytes=123_456), "wwan0")
    assert written(meter, tmp_path)
    meter.close()
    again = metered(tmp_path, clock)
    assert again.used_bytes() == 123_456
    assert again.snapshot()["interfaces"] == {"wwan0": 123_456}


@given(steps=st.lists(st.integers(0, 3_000_000), max_size=30))
def test_a_crash_at_any_moment_never_counts_too_little_under_steady_traffic(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    folder, clock = tmp_path_factory.mktemp("state"), Clock()
    meter, line = metered(folder, clock), Line()
    meter.follow(line, "eth0")
    line.sent_bytes += 1
    written(meter, folder)
    largest = 0
    for step in steps:
        largest = max(largest, step)
        line.sent_bytes += step
        found = metered(folder, clock).used_bytes()  # what a start would find right now
        assert found >= line.sent_bytes - largest
        assert found <= line.sent_bytes + max(2 * largest, AHEAD_BYTES)
        written(meter, folder)
        assert metered(folder, clock).used_bytes() >= line.sent_bytes


def test_an_idle_link_is_written_down_seldom(tmp_path: Path, clock: Clock) -> None:
    meter, line = metered(tmp_path, clock), Line()
    meter.follow(line, "eth0")
    writes = 0
    for _ in range(8640):  # a day of looks; a ping each 15 s are 170 bytes each 10 s
        line.sent_bytes += 170
        writes += written(meter, tmp_path)
    assert writes <= 4


def test_a_new_month_begins_at_utc_and_the_old_one_is_kept(tmp_path: Path, clock: Clock) -> None:
    meter, line = metered(tmp_path, clock), Line(sent_bytes=GB)
    meter.follow(line, "eth0")
    clock.now_s = calendar.timegm((2026, 11, 30, 23, 59, 59))
    assert (left := meter.left()) is not None
    assert left.used_up == "metered bytes used up: 1.0 of 1.0 GB this month"
    clock.now_s += 1
    assert meter.snapshot()["month"] == "2026-12"
    assert (left := meter.left()) is not None
    assert left.used_up == ""
    line.sent_bytes += 700
    assert meter.used_bytes() == 700
    clock.now_s -= 10  # set back over the border: that month is as it was
    assert meter.used_bytes() == GB


def test_a_clock_that_was_never_set_counts_on_where_it_stopped(tmp_path: Path, clock: Clock) -> None:
    meter = metered(tmp_path, clock)
    meter.follow(Line(sent_bytes=900), "eth0")
    meter.close()
    clock.now_s = 60.0  # 1970
    again, line = metered(tmp_path, clock), Line(sent_bytes=50)
    again.follow(line, "eth0")
    assert again.used_bytes() == 950
    clock.now_s = at(2026, 11)
    assert again.used_bytes() == 950
    clock.now_s = at(2036, 1)  # a wrong jump ahead, and back
    line.sent_bytes += 7
    assert again.used_bytes() == 7
    clock.now_s = at(2026, 11)
    assert again.used_bytes() == 950


def test_what_is_counted_before_the_first_date_belongs_to_the_first_month(tmp_path: Path, clock: Clock) -> None:
    clock.now_s = 0.0
    meter, line = metered(tmp_path, clock), Line(sent_bytes=400)
    meter.follow(line, "eth0")
    assert meter.used_bytes() == 400
    clock.now_s = at(2026, 11)
    line.sent_bytes += 1
    assert meter.snapshot() == {
        "month": "2026-11",
        "used_bytes": 401,
        "cap_bytes": GB,
        "interfaces": {"eth0": 401},
        "write_error": "",
        "count_error": "",
    }


def test_months_that_are_long_over_are_forgotten(tmp_path: Path, clock: Clock) -> None:
    meter, line = metered(tmp_path, clock), Line()
    meter.follow(line, "eth0")
    for number in range(40):
        clock.now_s = at(2026 + number // 12, 1 + number % 12)
        line.sent_bytes += 10
        meter.settle()
    meter.close()
    assert len(json.loads((tmp_path / "metering.json").read_text())["months"]) <= 14


def test_only_interfaces_that_are_metered_count_towards_the_cap(tmp_path: Path, clock: Clock) -> None:
    meter = metered(tmp_path, clock, interfaces=("wwan0",))
    home, away = Line(sent_bytes=2 * GB), Line(sent_bytes=400)
    meter.follow(home, "wlan0")
    assert meter.left() is None
    assert meter.used_bytes() == 0
    home.closed_because = "roamed"
    meter.follow(away, "wwan0")
    assert meter.used_bytes() == 400
    assert (left := meter.left()) is not None
    assert 0 < left.left_bytes < GB
    assert meter.snapshot()["interfaces"] == {"wlan0": 2 * GB, "wwan0": 400}
    meter.follow(Line(sent_bytes=GB), "")  # nobody can say: it counts
    assert meter.used_bytes() == GB + 400


async def test_without_a_cap_everything_is_counted_and_nothing_bounded(tmp_path: Path, clock: Clock) -> None:
    meter = metered(tmp_path, clock, cap=None)
    meter.follow(Line(sent_bytes=10 * GB), "eth0")
    assert meter.left() is None
    assert await meter.refuses("127.0.0.1", 1) == ""
    assert meter.snapshot()["used_bytes"] == 10 * GB


async def test_over_the_cap_no_connection_is_made_but_over_an_interface_that_is_not_metered(
    tmp_path: Path, clock: Clock
) -> None:
    everywhere = metered(tmp_path, clock)
    everywhere.follow(Line(sent_bytes=GB), "eth0")
    assert await everywhere.refuses("127.0.0.1", 1) == "metered bytes used up: 1.0 of 1.0 GB this month"
    loopback = interface_of("127.0.0.1")
    elsewhere = metered(tmp_path, clock, interfaces=("wwan7",))
    elsewhere.follow(Line(sent_bytes=GB), "wwan7")
    assert interface_towards("127.0.0.1", 1) == loopback
    assert await elsewhere.refuses("127.0.0.1", 1) == ""
    here = metered(tmp_path, clock, interfaces=("wwan7", loopback))
    here.follow(Line(sent_bytes=GB), "wwan7")
    assert await here.refuses("127.0.0.1", 1)


def test_a_dial_that_the_other_side_answered_and_refused_counts_and_one_into_the_void_does_not(
    tmp_path: Path, clock: Clock
) -> None:
    meter = metered(tmp_path, clock)
    meter.failed(NotReached("TIMEOUT", "nobody there"))
    assert meter.used_bytes() == 0
    meter.failed(IdentityError("a wrong certificate"))
    once = meter.used_bytes()
    assert once > 2000
    meter.failed(ConnectionLost("it hung up before its Hello"))
    assert meter.used_bytes() == 2 * once


@pytest.mark.parametrize("damage", [b"", b"{", b'{"months": {"2026-11": {"eth0": "many"}}}', b"[]"])
def test_a_damaged_count_is_said_and_begun_anew(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    (tmp_path / "metering.json").write_bytes(damage)
    meter = metered(tmp_path, clock)
    assert meter.used_bytes() == 0
    assert "counted from 0" in caplog.text
    assert (tmp_path / "metering.damaged").read_bytes() == damage, "for who wants to look into it"
    assert "metering.json was damaged" in meter.snapshot()["count_error"]
    meter.close()
    caplog.clear()
    again = metered(tmp_path, clock)
    assert not caplog.text, "said once"
    assert "metering.json was damaged" in again.snapshot()["count_error"], "the count of this month stays too low"
    clock.now_s = at(2026, 12)
    assert again.snapshot()["count_error"] == ""


def test_a_count_that_was_damaged_before_the_clock_was_set_is_said_in_the_first_real_month(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "metering.json").write_bytes(b"{")
    clock.now_s = 0.0
    meter = metered(tmp_path, clock)
    assert meter.snapshot()["count_error"]
    clock.now_s = at(2026, 11)
    assert meter.snapshot()["count_error"]
    assert metered(tmp_path / "new", clock).snapshot()["count_error"] == ""


def test_a_full_disk_is_said_once_and_the_count_is_kept_when_room_is_back(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    meter, line = metered(tmp_path, clock), Line(sent_bytes=5)
    meter.follow(line, "eth0")
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    meter.close()
    meter.close()
    assert caplog.text.count("cannot be written") == 1
    assert "No space left" in meter.snapshot()["write_error"]
    assert meter.used_bytes() == 5
    monkeypatch.setattr(Path, "replace", replace)
    meter.close()
    assert "can be written again" in caplog.text
    assert metered(tmp_path, clock).used_bytes() == 5


def test_near_the_cap_nothing_is_spent_on_looking_at_the_link(tmp_path: Path, clock: Clock) -> None:
    meter, line = metered(tmp_path, clock), Line(sent_bytes=94 * GB // 100)
    meter.follow(line, "eth0")
    assert (left := meter.left()) is not None
    assert left.may_probe
    line.sent_bytes = 96 * GB // 100
    assert (left := meter.left()) is not None
    assert not left.may_probe
    assert left.used_up == ""
    assert 0 < left.left_bytes < math.inf


def test_of_a_cap_a_tenth_goes_to_looking_at_the_link_at_most(tmp_path: Path, clock: Clock) -> None:
    left = metered(tmp_path, clock).left()
    assert left is not None
    assert left.probe_bytes_per_hour * 24 * 31 == pytest.approx(GB / 10)


def test_what_was_written_in_advance_before_a_crash_counts_as_metered(tmp_path: Path, clock: Clock) -> None:
    meter = metered(tmp_path, clock, interfaces=("wwan0",))
    meter.follow(Line(sent_bytes=10), "wwan0")
    written(meter, tmp_path)
    again = metered(tmp_path, clock, interfaces=("wwan0",))
    assert again.snapshot()["interfaces"] == {"wwan0": 10, UNCERTAIN: AHEAD_BYTES}
    assert again.used_bytes() == 10 + AHEAD_BYTES
