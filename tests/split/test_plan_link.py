"""The link estimator against synthetic links whose truth is known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest

from split.plan.link import Link

SIZES = (20_000, 150_000, 60_000, 400_000, 9_000)


@dataclass
class Wire:
    """The truth: rtt, and a rate in Mbit/s both ways; `jitter` is relative."""

    rtt_ms: float
    mbit_s: float
    jitter: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def ms(self, up: int, down: int) -> float:
        exact = self.rtt_ms + (up + down) * 0.008 / self.mbit_s / 1000 * 1000
        return exact * (1 + self.jitter * float(self._rng.normal()))


def connect(link: Link, wire: Wire) -> float:
    """A ping and a probe, as at every connect; the time afterwards."""
    link.observe(64, 64, wire.ms(64, 64), 0.0)
    link.observe(32_768, 64, wire.ms(32_768, 64), 0.1)
    return 0.1


def serve(link: Link, wire: Wire, requests: int, now_s: float, *, every_s: float = 0.2) -> float:
    for n in range(requests):
        now_s += every_s
        up = SIZES[n % len(SIZES)]
        link.observe(up, 4_000, wire.ms(up, 4_000), now_s)
    return now_s


LINKS = [(5.0, 1.0), (20.0, 10.0), (40.0, 50.0), (5.0, 200.0), (150.0, 5.0), (0.3, 1000.0)]


@pytest.mark.parametrize(("rtt_ms", "mbit_s"), LINKS)
def test_a_ping_and_a_probe_predict_a_transfer_within_a_quarter(rtt_ms: float, mbit_s: float) -> None:
    link, wire = Link(), Wire(rtt_ms, mbit_s)
    now_s = connect(link, wire)
    truth = wire.ms(100_000, 4_000)
    assert link.estimate(now_s).transfer_ms(100_000, 4_000) == pytest.approx(truth, rel=0.25, abs=1.0)


@pytest.mark.parametrize(("rtt_ms", "mbit_s"), LINKS)
def test_rtt_and_rate_are_told_apart_after_some_transfers(rtt_ms: float, mbit_s: float) -> None:
    link, wire = Link(), Wire(rtt_ms, mbit_s, jitter=0.03)
    now_s = serve(link, wire, 20, connect(link, wire))
    found = link.estimate(now_s)
    for up in (1_000, 600_000):
        assert found.transfer_ms(up, 4_000) == pytest.approx(Wire(rtt_ms, mbit_s).ms(up, 4_000), rel=0.15, abs=1.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((20.0, 50.0), (20.0, 5.0)),
        ((20.0, 5.0), (20.0, 50.0)),
        ((5.0, 50.0), (150.0, 50.0)),
        ((150.0, 50.0), (5.0, 50.0)),
        ((10.0, 20.0), (10.0, 12.0)),
        ((5.0, 100.0), (80.0, 2.0)),
    ],
)
def test_a_step_is_followed_within_five_observations(before: tuple[float, float], after: tuple[float, float]) -> None:
    link = Link()
    now_s = connect(link, Wire(*before))
    now_s = serve(link, Wire(*before, jitter=0.02), 30, now_s)
    new = Wire(*after, jitter=0.02, seed=7)
    now_s = serve(link, new, 5, now_s)
    truth = Wire(*after).ms(100_000, 4_000)
    assert link.estimate(now_s).transfer_ms(100_000, 4_000) == pytest.approx(truth, rel=0.15)


def test_one_stall_does_not_poison_the_estimate() -> None:
    link, wire = Link(), Wire(20.0, 20.0, jitter=0.02)
    now_s = serve(link, wire, 30, connect(link, wire))
    truth = Wire(20.0, 20.0).ms(100_000, 4_000)
    link.observe(100_000, 4_000, 3_000.0, now_s + 0.2)
    assert link.estimate(now_s + 0.2).transfer_ms(100_000, 4_000) == pytest.approx(truth, rel=0.15)
    now_s = serve(link, wire, 3, now_s + 0.2)
    assert link.estimate(now_s).transfer_ms(100_000, 4_000) == pytest.approx(truth, rel=0.1)


def test_uncertainty_grows_while_nothing_is_seen_and_shrinks_when_something_is() -> None:
    link, wire = Link(), Wire(20.0, 20.0)
    wide = link.estimate(0.0).sigma_ms(100_000, 0)
    now_s = serve(link, wire, 10, connect(link, wire))
    sigmas = [link.estimate(now_s + idle_s).sigma_ms(100_000, 0) for idle_s in (0.0, 1.0, 10.0, 100.0)]
    assert sigmas == sorted(sigmas)
    assert sigmas[0] < 5.0 < sigmas[3] < wide
    later_s = serve(link, wire, 3, now_s + 100.0)
    assert link.estimate(later_s).sigma_ms(100_000, 0) < 0.3 * sigmas[3]


def test_nothing_is_known_of_a_link_that_was_never_used() -> None:
    found = Link().estimate(5.0)
    assert found.age_s == math.inf
    assert found.sigma_ms(100_000, 0) > found.transfer_ms(100_000, 0)


def test_estimates_stay_positive_and_covariances_real_under_arbitrary_measurements() -> None:
    rng = np.random.default_rng(3)
    link, now_s = Link(), 0.0
    for _ in range(2_000):
        now_s += float(rng.exponential(0.5))
        link.observe(
            int(rng.integers(0, 2_000_000)), int(rng.integers(0, 50_000)), float(np.exp(rng.normal(3, 3))), now_s
        )
        found = link.estimate(now_s)
        assert min(found.rtt_ms, found.up_ms_per_byte, found.down_ms_per_byte) > 0.0
        rr, ru, rd, uu, ud, dd = found.covariance
        # Scaled to 100 KB, so that the eigenvalues are of one size.
        scaled = np.array(
            [[rr, ru * 1e5, rd * 1e5], [ru * 1e5, uu * 1e10, ud * 1e10], [rd * 1e5, ud * 1e10, dd * 1e10]]
        )
        eigenvalues = np.linalg.eigvalsh(scaled)
        assert eigenvalues[0] > -1e-6 * max(eigenvalues[2], 1.0)


@pytest.mark.parametrize("mbit_s", [2.0, 50.0])
def test_before_anything_came_down_it_is_told_as_uncertain_as_half_of_what_up_takes(mbit_s: float) -> None:
    link = Link()
    for n in range(6):
        link.observe(0, 0, 10.0, n * 0.5)
        link.observe(32_768, 0, 10.0 + 32_768 * 0.008 / mbit_s, n * 0.5 + 0.25)
    told = link.estimate(2.75)
    reply_ms = 1_000_000 * 0.008 / mbit_s
    assert told.transfer_ms(0, 1_000_000) == pytest.approx(10.0 + reply_ms, rel=0.05)
    assert told.sigma_ms(0, 1_000_000) == pytest.approx(0.5 * reply_ms, rel=0.05)


@pytest.mark.parametrize(("before", "after"), [(0.00016, 0.0016), (0.0016, 0.00016)], ids=["slower", "faster"])
def test_a_change_that_no_reply_has_shown_is_one_of_both_directions(before: float, after: float) -> None:
    """50 and 5 Mbit/s both ways, then probes without replies show the other rate: down is not told as before."""
    link = Link()
    for n, (up, down) in enumerate([(0, 0), (200_000, 20_000), (20_000, 200_000), (60_000, 60_000)] * 4):
        link.observe(up, down, 10.0 + (up + down) * before, 0.3 * n)
    for n, up in enumerate([32_768, 0, 20_000, 0, 32_768]):
        link.observe(up, 0, 10.0 + up * after, 5.5 + 0.5 * n)
    estimate = link.estimate(8.0)
    assert estimate.up_ms_per_byte == pytest.approx(after, rel=0.1)
    assert estimate.down_ms_per_byte == pytest.approx(after, rel=0.1)


@pytest.mark.parametrize("seed", [70, 205, 311, 383])
def test_waits_longer_than_the_model_and_links_that_change_leave_an_estimate(seed: int) -> None:
    """A wait learned as 1.5 times the model's spares more bytes of a transfer than it has: none are left, not fewer."""
    rng = np.random.default_rng(seed)
    link, now_s = Link(), 0.0
    rtt_ms, up_ms = 10 ** rng.uniform(-1, 3.2), 10 ** rng.uniform(-6.5, -3)
    for _ in range(40):
        if rng.random() < 0.03:
            rtt_ms, up_ms = 10 ** rng.uniform(-1, 3.2), 10 ** rng.uniform(-6.5, -3)
        up = int(rng.choice([100, 3_000, 100_000, 1_000_000]))
        now_s += 1.0
        stalled = float(np.exp(rng.normal(0, 0.2)) * rng.choice([1, 1, 1, 10]))
        link.observe(up, 64, (rtt_ms + up * up_ms) * stalled, now_s, (14_600.0, 1e9))
        found = link.estimate(now_s)
        assert min(found.rtt_ms, found.up_ms_per_byte, found.down_ms_per_byte) > 0.0


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_observed_the_estimate_stays_a_number(seed: int) -> None:
    rng = random.Random(seed)
    link, now_s = Link(), 0.0
    windows = [(math.inf, math.inf), (14_600.0, 1e9), (1.0, 1.0), (1460.0, 2920.0)]
    for _ in range(rng.randint(1, 40)):
        now_s += rng.choice([0.0, 0.01, 1.0, 100.0, 1e9, -10.0, -1e6])
        up, down = (rng.choice([0.0, 64.0, 1e3, 1e6, 1e9, 1e12, rng.uniform(0, 1e9)]) for _ in range(2))
        ms = rng.choice([-1e12, 0.0, 1e-3, 20.0, 1e6, 1e12, math.inf, math.nan, rng.uniform(0, 1e4)])
        link.observe(up, down, ms, now_s, rng.choice(windows))
        found = link.estimate(now_s + rng.choice([0.0, 1.0, -5.0, 1e6]), rng.choice(windows))
        assert all(map(math.isfinite, (*found.covariance, found.rtt_ms, found.up_ms_per_byte, found.down_ms_per_byte)))
        assert min(found.rtt_ms, found.up_ms_per_byte, found.down_ms_per_byte) > 0.0
        rr, _, _, uu, _, dd = found.covariance
        assert min(rr, uu, dd) >= 0.0


@pytest.mark.parametrize(
    ("up", "down", "ms"),
    [(64.0, 64.0, 1e12), (64.0, 64.0, math.nan), (-1.0, 64.0, 20.0), (64.0, 2.0**41, 1e3), (math.inf, 64.0, 1e3)],
)
def test_of_what_no_link_can_have_done_nothing_is_learned(up: float, down: float, ms: float) -> None:
    link, wire = Link(), Wire(20.0, 10.0)
    now_s = connect(link, wire)
    before, count = link.estimate(now_s + 1.0), link.observations
    link.observe(up, down, ms, now_s + 0.5)
    assert (link.estimate(now_s + 1.0), link.observations) == (before, count)


def test_a_clock_that_goes_back_is_one_that_stood_still() -> None:
    back, still = Link(), Link()
    for link, at_s in ((back, -50.0), (still, 0.1)):
        connect(link, Wire(20.0, 10.0))
        link.observe(100_000, 64, 100.0, at_s)
    assert back.estimate(5.0) == still.estimate(5.0)


def test_a_request_that_was_given_up_is_a_bound_and_not_a_time() -> None:
    """From 50 to 1 Mbit/s: 100 KB take 820 ms and are given up after 269, 32 KB take 273; as times of their own the two
    would be a longer round trip, which no ping of 20 ms takes back."""
    link = Link()
    now_s = serve(link, Wire(20.0, 50.0), 20, connect(link, Wire(20.0, 50.0)))
    link.observe(100_000, 4_000, 269.0, now_s + 0.3, at_least=True)
    link.observe(31_666, 0, 273.3, now_s + 0.6)
    link.observe(64, 0, 20.5, now_s + 0.9)
    link.observe(32_768, 0, 282.1, now_s + 1.2)
    found = link.estimate(now_s + 1.3)
    assert found.rtt_ms == pytest.approx(20.0, rel=0.2)
    assert 0.008 / found.up_ms_per_byte == pytest.approx(1.0, rel=0.2)
