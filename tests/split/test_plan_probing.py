"""When the rate is looked at, up and down, and by how much: by hand, on a link of 20 ms whose rates are known."""

from __future__ import annotations

import math

import pytest

from split.plan.observation import LinkEstimate
from split.plan.probing import PING_COST_BYTES, Probing


def link(*, down_mbit_s: float = 5.0, up_mbit_s: float = 50.0, age_s: float = 0.2) -> LinkEstimate:
    return LinkEstimate(
        rtt_ms=20.0,
        up_ms_per_byte=0.008 / up_mbit_s,
        down_ms_per_byte=0.008 / down_mbit_s,
        covariance=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        age_s=age_s,
    )


SLOW = link(up_mbit_s=5.0, age_s=1.0)


def under_traffic(bytes_per_hour: float = 2_000_000.0) -> Probing:
    probing = Probing(bytes_per_hour)
    probing.connected()
    probing.decided(0.0)
    return probing


@pytest.mark.parametrize(("down_mbit_s", "pong_bytes"), [(5.0, 12_500), (1.0, 8_192), (50.0, 14_000)])
def test_the_first_is_what_comes_in_20_ms_within_bounds_and_the_next_is_due_after_three_seconds(
    down_mbit_s: float, pong_bytes: int
) -> None:
    """5 Mbit/s are 625 bytes in a millisecond."""
    probing, asked = under_traffic(), list[tuple[float, int]]()
    for tick in range(26):
        now_s = tick * 0.25
        probing.decided(now_s)
        if size := probing.pong_wanted(link(down_mbit_s=down_mbit_s), surprised=False, now_s=now_s):
            asked.append((now_s, size))
            probing.carried(64, size, now_s)
    assert asked == [(0.0, pong_bytes), (3.0, pong_bytes), (6.0, pong_bytes)]


def test_a_pong_that_surprises_is_asked_again_behind_a_light_ping_and_once_more_where_it_showed_another_rate() -> None:
    probing = under_traffic()
    probing.carried(32_768, 0, 0.0)  # the rate up was looked at
    assert probing.pong_wanted(link(), surprised=False, now_s=0.0) == 12_500
    probing.carried(64, 12_500, 0.03)
    assert probing.pong_wanted(link(), surprised=True, now_s=0.25) == 0
    assert probing.wanted(link(), surprised=True, now_s=0.25) == 64, "light: it was the way down that surprised"
    probing.carried(64, 0, 0.27)
    assert probing.pong_wanted(link(), surprised=True, now_s=0.3) == 0, "0.1 s apart"
    assert probing.pong_wanted(link(), surprised=True, now_s=0.5) == 12_500
    probing.carried(64, 12_500, 0.52)
    assert probing.pong_wanted(link(down_mbit_s=50.0), surprised=False, now_s=0.75) == 14_000
    probing.carried(64, 14_000, 0.78)
    assert probing.pong_wanted(link(down_mbit_s=50.0), surprised=False, now_s=1.0) == 0


def test_what_a_reply_has_shown_is_not_asked_for_nor_anything_without_traffic() -> None:
    probing = under_traffic()
    probing.carried(150_000, 600_000, 0.1)
    probing.moved(750_000, 0.1)
    assert probing.pong_wanted(link(), surprised=False, now_s=1.0) == 0
    assert probing.pong_wanted(link(), surprised=False, now_s=10.0) == 0, "nobody has asked for 10 s"
    probing.decided(10.0)
    assert probing.pong_wanted(link(), surprised=False, now_s=10.1) == 12_500


def test_a_byte_that_costs_five_takes_five_out_of_what_is_allowed() -> None:
    """1,000,000 bytes an hour: 250,000 at once for a link that became another one, and half of them for pongs; and
    131,072 for probes, of each quarter. A pong costs 12,500 and 256."""
    counts = []
    for costs in (1.0, 5.0):
        probing, count = under_traffic(1_000_000.0), 0
        probing.spend_at_most(math.inf, down_byte_costs=costs)
        for _ in range(200):
            probing.connected()  # a first look each time, of what is for another link
            count += probing.pong_wanted(link(), surprised=False, now_s=0.5) > 0
        counts.append(count)
    assert counts == [250_000 // (12_500 + PING_COST_BYTES), 250_000 // (5 * 12_500 + PING_COST_BYTES)]


def on_another_link() -> Probing:
    """A connection that has carried a request; at 2 s pings have shown another link, and the first look is out."""
    probing = under_traffic()
    probing.moved(1_000.0, 1.0)
    probing.carried(1_000, 0, 1.0)
    probing.carried(32_768, 0, 1.1)
    probing.decided(2.0)
    probing.changed()
    assert probing.wanted(link(), surprised=False, now_s=2.0) == 32_768  # 20 ms carry 125,000
    return probing


def test_a_second_look_is_taken_once_the_first_is_back_and_was_a_surprise() -> None:
    probing = on_another_link()
    assert probing.wanted(link(), surprised=False, now_s=2.15) == 0
    probing.carried(64, 0, 2.2)  # a light ping from before
    assert probing.wanted(link(), surprised=False, now_s=2.25) == 0
    probing.carried(32_768, 0, 2.3)
    assert probing.wanted(link(), surprised=True, now_s=2.35) == 32_768
    probing.carried(32_768, 0, 2.4)
    assert probing.wanted(link(), surprised=False, now_s=2.5) == 0


def test_a_first_look_that_is_no_surprise_is_the_only_one() -> None:
    probing = on_another_link()
    probing.carried(32_768, 0, 2.2)
    asked = [probing.wanted(link(), surprised=False, now_s=2.25 + 0.05 * tick) for tick in range(4)]
    assert asked == [0, 0, 0, 0]


def test_looks_at_new_connections_leave_changed_links_their_bytes_while_they_can() -> None:
    """A quarter of an hour's bytes is there for changes, and of the 128 KB of steady probes the first look."""
    probing, spent = Probing(2_000_000.0), 0
    for number in range(40):
        probing.connected()
        spent += probing.wanted(link(), surprised=False, now_s=float(number))
    assert 500_000 < spent + 40 * PING_COST_BYTES < 700_000  # an hour's quarter for changes, and what steady ones had


@pytest.mark.parametrize(
    ("moved_bytes", "pause_s", "every_s"),
    [
        (100_000_000, 0.1, 0.25),  # 1 MB is kept, for 2.5 pauses
        (100_000_000, 0.4, 1.0),
        (4_000_000, 0.1, 0.435),  # 60,000 bytes shall last for six seconds, a look costs 4,096 and a ping's 256
        (0, 0.1, 3.0),
    ],
)
def test_the_rate_is_looked_at_as_often_as_requests_have_earned_and_no_more_than_they_need(
    moved_bytes: int, pause_s: float, every_s: float
) -> None:
    probing, asked = Probing(2_000_000.0), list[float]()
    probing.connected()
    probing.carried(32_768, 0, 0.0)
    probing.moved(moved_bytes, 0.0)
    for tick in range(1, 8000):
        now_s = tick * 0.001
        if tick % round(pause_s / 0.001) == 0:
            probing.decided(now_s)
        if (size := probing.wanted(SLOW, surprised=False, now_s=now_s)) > 64:
            asked.append(now_s)
            probing.carried(size, 0, now_s)
    later = [at_s for at_s in asked if at_s >= 2.9]
    assert later[1] - later[0] == pytest.approx(every_s, abs=0.01)


def test_a_surprise_is_looked_into_after_a_tenth_of_a_second_and_not_without_bytes_or_traffic() -> None:
    probing = under_traffic()
    probing.carried(32_768, 0, 0.0)
    assert probing.wanted(SLOW, surprised=True, now_s=1.0) > 64
    assert probing.again_s(SLOW, surprised=True, now_s=1.01) == math.inf, "that look is not back"
    probing.carried(4_096, 0, 1.02)
    assert probing.again_s(SLOW, surprised=True, now_s=1.02) == pytest.approx(0.08)
    assert probing.again_s(SLOW, surprised=False, now_s=1.02) == pytest.approx(3.0), "the next steady one"
    probing.decided(1.0)
    assert probing.wanted(SLOW, surprised=True, now_s=5.0) == 0
    assert probing.again_s(SLOW, surprised=True, now_s=5.02) == math.inf, "no request came for seconds"
    assert under_traffic(bytes_per_hour=0.0).again_s(SLOW, surprised=True, now_s=0.02) == math.inf


def test_no_look_is_sent_while_the_last_one_is_on_its_way() -> None:
    """A link that became so slow that a look takes seconds: more of them would only queue, and requests behind them."""
    probing = under_traffic()
    probing.carried(32_768, 0, 0.0)
    probing.moved(100_000_000, 0.0)
    sent = []
    for tick in range(11, 60):  # until 6 s
        probing.decided(tick * 0.1)
        sent.append((tick, probing.wanted(SLOW, surprised=True, now_s=tick * 0.1)))
        if tick == 20:
            probing.carried(4_096, 0, 2.0)
    assert [tick for tick, size in sent if size > 64] == [11, 21, 51], (
        "at once, once it is back, and after three seconds"
    )
    assert probing.again_s(SLOW, surprised=True, now_s=6.0) == math.inf


def test_looks_take_a_tenth_of_the_link_at_most() -> None:
    """0.05 Mbit/s are 6,250 bytes a second: a look of 4,096 and a ping's 256 take 0.7 s of it."""
    probing, slow, asked = Probing(2_000_000.0), link(up_mbit_s=0.05, age_s=1.0), list[float]()
    probing.connected()
    probing.carried(32_768, 0, 0.0)
    probing.moved(100_000_000, 0.0)
    for tick in range(1, 160):
        now_s = tick * 0.1
        probing.decided(now_s)
        if (size := probing.wanted(slow, surprised=False, now_s=now_s)) > 64:
            asked.append(now_s)
            probing.carried(size, 0, now_s)
    assert asked == [pytest.approx(7.0), pytest.approx(14.0)]


def test_requests_that_cross_light_as_they_are_leave_no_look_to_be_taken() -> None:
    """700 bytes up ten times a second, which show no rate; then they stay."""
    probing, asked = Probing(2_000_000.0), list[float]()
    probing.connected()
    probing.carried(32_768, 0, 0.0)
    for tick in range(1, 100):
        now_s = tick * 0.1
        probing.decided(now_s)
        if tick <= 60:
            probing.carried(700, 4_064, now_s)
            probing.moved(4_764, now_s)
        elif (size := probing.wanted(link(up_mbit_s=5.0, age_s=now_s - 6.0), surprised=False, now_s=now_s)) > 64:
            asked.append(now_s)
            probing.carried(size, 0, now_s)
        if tick <= 60:
            assert probing.wanted(link(up_mbit_s=5.0, age_s=0.0), surprised=False, now_s=now_s) == 0
    assert asked == [pytest.approx(6.5), pytest.approx(9.5)], "half a second later, then every three"
