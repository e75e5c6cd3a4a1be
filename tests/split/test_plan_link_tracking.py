"""Links that change, stall, wander and rest, simulated with a seed; what is true comes from the simulated world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from split.plan.link import Link
from split.plan.links import LINKS_KEPT, Links
from split.plan.slow_start import SendWindow

MIXED = (20_000, 150_000, 60_000, 400_000, 9_000)
ONE_SIZE = (150_000,)
TWO_SIZES = (400_000, 20_000)
REPLY = 4_000
SEEDS = 12


@dataclass(frozen=True)
class Path:
    """The truth: ms of a round trip, Mbit/s up and down."""

    rtt_ms: float
    up: float
    down: float

    def ms(self, up_bytes: int, down_bytes: int = REPLY) -> float:
        return self.rtt_ms + up_bytes * 0.008 / self.up + down_bytes * 0.008 / self.down


@dataclass
class World:
    """A link and what carries its transfers: 4 % jitter, now and then a retransmission that stalls one."""

    path: Path
    seed: int
    stalls: float = 0.0
    every_s: float = 0.2
    link: Link = field(default_factory=Link)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        for size in (64, 32_768):  # as at every connect
            self.carry(size, 64)

    def carry(self, up_bytes: int, down_bytes: int = REPLY) -> None:
        ms = self.path.ms(up_bytes, down_bytes) * (1.0 + 0.04 * float(self.rng.normal()))
        if self.rng.random() < self.stalls:
            ms += float(self.rng.choice((200.0, 300.0, 600.0)))  # TCP's timer, once or doubled
        self.link.observe(up_bytes, down_bytes, max(ms, 0.01), self.now_s)
        self.now_s += self.every_s

    def error(self, up_bytes: int) -> float:
        """Relative, of the prediction of the next transfer."""
        truth = self.path.ms(up_bytes)
        return abs(self.link.estimate(self.now_s).transfer_ms(up_bytes, REPLY) / truth - 1.0)


def transfers_until_right(before: Path, after: Path, sizes: Sequence[int], seed: int, *, pings: bool) -> int:
    """After a step: how many transfers until the predictions of the next three are within 10 %."""
    world = World(before, seed)
    first = int(world.rng.integers(len(sizes)))
    size = [sizes[(first + n) % len(sizes)] for n in range(60)]
    for n in range(30):
        world.carry(size[n])
    world.path = after
    errors = []
    for n in range(30, 45):
        if pings:
            world.carry(64, 64)
        world.carry(size[n])
        errors.append(world.error(size[n + 1]))
    return next((n + 1 for n in range(12) if max(errors[n : n + 3]) <= 0.1), 99)


STEPS = {
    "a tenth of the rate": (Path(20, 50, 50), Path(20, 5, 5)),
    "ten times the rate": (Path(20, 5, 5), Path(20, 50, 50)),
    "2,000 to 5 Mbit/s": (Path(5, 2000, 2000), Path(5, 5, 5)),
    "5 to 2,000 Mbit/s": (Path(5, 5, 5), Path(5, 2000, 2000)),
    "a longer way": (Path(10, 50, 50), Path(150, 50, 50)),
    "a shorter way": (Path(150, 50, 50), Path(10, 50, 50)),
    "a worse network": (Path(5, 100, 100), Path(80, 2, 2)),
    "a better network": (Path(80, 2, 2), Path(5, 100, 100)),
    "up alone": (Path(20, 50, 50), Path(20, 5, 50)),
    "somewhat slower": (Path(10, 20, 20), Path(10, 12, 12)),
}


@pytest.mark.parametrize("sizes", [MIXED, ONE_SIZE, TWO_SIZES], ids=["mixed", "one size", "two sizes"])
@pytest.mark.parametrize("pings", [False, True], ids=["transfers", "pings between"])
@pytest.mark.parametrize("step", STEPS)
def test_after_a_step_predictions_are_right_within_three_transfers(
    step: str, pings: bool, sizes: Sequence[int]
) -> None:
    before, after = STEPS[step]
    needed = [transfers_until_right(before, after, sizes, seed, pings=pings) for seed in range(SEEDS)]
    assert np.median(needed) <= 3
    assert np.quantile(needed, 0.9) <= 5.5


@pytest.mark.parametrize("sizes", [MIXED, ONE_SIZE, TWO_SIZES], ids=["mixed", "one size", "two sizes"])
@pytest.mark.parametrize(
    ("stalls", "error", "off", "changes"),
    [(0.0, 0.025, 0.001, 0.001), (0.01, 0.025, 0.003, 0.002), (0.05, 0.08, 0.02, 0.01)],
)
def test_noise_and_stalls_are_no_changes(
    sizes: Sequence[int], stalls: float, error: float, off: float, changes: float
) -> None:
    errors: list[float] = []
    found = 0
    for seed in range(SEEDS):
        world = World(Path(20, 20, 20), seed, stalls)
        for n in range(400):
            size = sizes[int(world.rng.integers(len(sizes)))]
            if n > 10:
                errors.append(world.error(size))
            world.carry(size)
        found += world.link.changes
    assert np.mean(errors) < error
    assert np.mean(np.array(errors) > 0.1) <= off
    assert found / (SEEDS * 400) <= changes


def test_a_wandering_link_is_followed_as_closely_as_it_wanders() -> None:
    """The rate changes by 5 % from one transfer to the next, so that nobody can know the next one's better."""
    errors = []
    for seed in range(SEEDS):
        world = World(Path(20, 20, 20), seed)
        for _ in range(300):
            rate = min(max(world.path.up * math.exp(0.05 * float(world.rng.normal())), 2.0), 100.0)
            world.path = Path(20, rate, rate)
            size = MIXED[int(world.rng.integers(len(MIXED)))]
            errors.append(world.error(size))
            world.carry(size)
    assert np.mean(errors[SEEDS:]) < 0.06


@pytest.mark.parametrize("path", [Path(20, 5, 50), Path(20, 50, 5), Path(60, 8, 80)])
def test_both_directions_are_told_apart_by_replies_that_differ(path: Path) -> None:
    world = World(path, 1)
    for n in range(60):
        world.carry(MIXED[n % 5], (4_000, 40_000, 1_000, 200_000)[n % 4])
    found = world.link.estimate(world.now_s)
    assert 0.008 / found.up_ms_per_byte == pytest.approx(path.up, rel=0.15)
    assert 0.008 / found.down_ms_per_byte == pytest.approx(path.down, rel=0.15)


def test_small_replies_leave_the_rate_down_to_what_the_rate_up_says() -> None:
    world = World(Path(20, 10, 10), 2)
    for n in range(40):
        world.carry(MIXED[n % 5], 40)
    found = world.link.estimate(world.now_s)
    assert 0.008 / found.down_ms_per_byte == pytest.approx(10.0, rel=0.3)


# -- slow start ---------------------------------------------------------------------------------------------------


def carried(size: int, path: Path, window: float) -> tuple[float, float]:
    """(ms, the window afterwards) of one transfer, window by window."""
    ms, left = 0.0, float(size)
    per_byte = 0.008 / path.up
    while left > window and window * per_byte < path.rtt_ms:
        ms, left, window = ms + path.rtt_ms, left - window, 2 * window
    return ms + left * per_byte + path.rtt_ms, window


@pytest.mark.parametrize("path", [Path(40, 50, 50), Path(150, 20, 20), Path(20, 100, 100)])
def test_what_waits_for_the_window_neither_surprises_nor_spoils_the_rate(path: Path) -> None:
    rng = np.random.default_rng(5)
    link, now_s, window = Link(), 0.0, 14_480.0
    link.observe(64, 64, path.ms(64, 64), now_s)
    errors, rates = [], []
    for n in range(40):
        resting_s = 0.1 if n % 3 else 3.0
        now_s += resting_s
        told = SendWindow(
            window_bytes=window,
            threshold_bytes=math.inf,
            segment_bytes=1_448,
            timeout_s=0.2 + path.rtt_ms / 1000,
            restarts=True,
            sent_at_s=now_s - resting_s,
        ).at(now_s)
        size = (32_768, 150_000, 60_000, 400_000)[n % 4]
        ms, window = carried(size, path, told[0])
        if n >= 4:
            errors.append(abs(link.estimate(now_s, told).transfer_ms(size, 0) / ms - 1.0))
        now_s += ms / 1000
        link.observe(size, 64, ms * (1.0 + 0.04 * float(rng.normal())), now_s, told)
        rates.append(0.008 / link.estimate(now_s).up_ms_per_byte)
    assert np.mean(errors) < 0.05
    assert max(errors) < 0.2
    assert rates[5:] == pytest.approx([path.up] * len(rates[5:]), rel=0.35)


def test_a_probe_right_after_connecting_does_not_pass_for_a_slow_link() -> None:
    """32 KB at 50 Mbit/s and 40 ms wait for the window once: 82 ms, which would be 6 Mbit/s."""
    path = Path(40, 50, 50)
    link, window = Link(), (14_480.0, math.inf)
    link.observe(64, 64, path.ms(64, 64), 0.0, window)
    link.observe(32_768, 64, carried(32_768, path, window[0])[0], 0.5, window)
    assert 0.008 / link.estimate(0.5).up_ms_per_byte > 15.0


def test_a_link_that_never_waits_although_the_window_says_so_is_predicted_without() -> None:
    """A proxy near by acknowledges everything: the kernel's window is that of the way to it."""
    path = Path(40, 50, 50)
    link, window, now_s = Link(), (14_480.0, math.inf), 0.0
    link.observe(64, 64, path.ms(64, 64), 0.0)
    for n in range(30):
        size = MIXED[n % 4]
        now_s += 0.3
        link.observe(size, 64, path.ms(size, 64), now_s, window)
        if n % 5 == 0:
            link.observe(64, 64, path.ms(64, 64), now_s)
    for size in MIXED:
        assert link.estimate(now_s, window).transfer_ms(size, 64) == pytest.approx(path.ms(size, 64), rel=0.2)


# -- several links ------------------------------------------------------------------------------------------------


def test_each_way_has_its_own_link_and_the_one_come_back_to_is_known() -> None:
    links = Links()
    assert links.use("companion from wifi")
    for n in range(20):
        links.observe(MIXED[n % 5], REPLY, Path(5, 100, 100).ms(MIXED[n % 5]), n * 0.2)
    assert links.use("companion from lte")
    assert links.observations == 0
    links.observe(64, 64, 80.0, 5.0)
    assert not links.use("companion from lte")  # the same way again
    assert links.observations == 1
    assert links.use("companion from wifi")
    assert links.estimate(10.0).transfer_ms(100_000, REPLY) == pytest.approx(Path(5, 100, 100).ms(100_000), rel=0.1)


def test_no_more_ways_are_remembered_than_are_used() -> None:
    links = Links()
    links.use("first")
    links.observe(64, 64, 10.0, 0.0)
    for n in range(LINKS_KEPT):
        links.use(f"way {n}")
    links.use("first")
    assert links.observations == 0


def test_the_window_goes_with_its_connection() -> None:
    links = Links()
    for n in range(10):
        links.observe(MIXED[n % 5], REPLY, Path(40, 50, 50).ms(MIXED[n % 5]), n * 0.2)
    links.windowed(
        SendWindow(
            window_bytes=14_480.0,
            threshold_bytes=math.inf,
            segment_bytes=1_448,
            timeout_s=0.24,
            restarts=True,
            sent_at_s=2.0,
        )
    )
    slow = links.estimate(2.0).transfer_ms(400_000, 0)
    links.use("another")
    links.use("")
    assert slow - links.estimate(2.0).transfer_ms(400_000, 0) == pytest.approx(125.0, rel=0.05)  # as computed by hand


# -- the way down -------------------------------------------------------------------------------------------------


def known(path: Path, *, replies: bool = True) -> tuple[Link, float]:
    """A link that is known, without jitter; and the time."""
    link, now_s = Link(), 0.0
    for n in range(20):
        now_s += 0.2
        size, down = ((64, 64), (32_768, 64), (150_000, 600_000 if replies else 64))[n % 3]
        link.observe(size, down, path.ms(size, down), now_s)
    return link, now_s


def test_pongs_with_weight_tell_the_rate_down_that_no_reply_has_shown() -> None:
    """20 ms and 14,000 bytes at 4 Mbit/s (0.002 ms each): 48 ms and what 64 bytes take at 50; light ones between."""
    link, now_s = known(Path(20, 50, 50), replies=False)
    for n in range(6):
        link.observe(64, 14_000, 48.0 + 64 * 0.00016, now_s + 0.4 * n)
        link.observe(64, 0, 20.0 + 64 * 0.00016, now_s + 0.4 * n + 0.2)
    found = link.estimate(now_s + 2.2)
    assert found.down_ms_per_byte == pytest.approx(0.002, rel=0.1)
    assert found.up_ms_per_byte == pytest.approx(0.00016, rel=0.15)
    assert found.rtt_ms == pytest.approx(20.0, rel=0.1)


def test_two_slow_replies_and_a_probe_up_that_fits_between_are_a_slower_way_down_alone() -> None:
    """150 KB up at 50 Mbit/s (24 ms), 600 KB down at 5 (960 ms), a round trip of 20."""
    link, now_s = known(Path(20, 50, 50))
    assert link.estimate(now_s).down_ms_per_byte == pytest.approx(0.00016, rel=0.1)
    link.observe(150_000, 600_000, 1_004.0, now_s + 1.0)
    assert link.estimate(now_s + 1.0).down_ms_per_byte < 0.0002, "one may be a stall"
    link.observe(32_768, 0, 25.24, now_s + 1.1)
    assert link.surprised, "what went up and fits says nothing of the way down"
    link.observe(150_000, 600_000, 1_004.0, now_s + 2.1)
    found = link.estimate(now_s + 2.1)
    assert found.down_ms_per_byte == pytest.approx(0.0016, rel=0.1)
    assert found.up_ms_per_byte == pytest.approx(0.00016, rel=0.15)


def test_a_slow_reply_is_a_stall_once_a_probe_each_way_has_fitted() -> None:
    link, now_s = known(Path(20, 50, 50))
    link.observe(150_000, 600_000, 1_004.0, now_s + 1.0)
    link.observe(32_768, 0, 25.24, now_s + 1.1)
    link.observe(64, 14_000, 22.25, now_s + 1.2)
    assert not link.surprised
    link.observe(150_000, 600_000, 1_004.0, now_s + 2.2)
    assert link.estimate(now_s + 2.2).down_ms_per_byte < 0.0002, "the second is a first again"


@pytest.mark.parametrize(
    ("before", "after"), [(Path(20, 50, 50), Path(20, 50, 5)), (Path(30, 10, 8), Path(30, 10, 80))]
)
def test_after_a_step_of_the_way_down_alone_two_replies_are_enough(before: Path, after: Path) -> None:
    needed = []
    for seed in range(SEEDS):
        world = World(before, seed)
        for _ in range(20):
            world.carry(150_000, 600_000)
            world.carry(64, 0)
        world.path = after
        for number in range(1, 9):
            world.carry(150_000, 600_000)
            world.carry(8_192, 0)
            found = world.link.estimate(world.now_s)
            if abs(found.transfer_ms(150_000, 600_000) / after.ms(150_000, 600_000) - 1.0) < 0.1:
                needed.append(number)
                break
        else:
            needed.append(99)
    assert np.median(needed) <= 2
    assert max(needed) <= 4
