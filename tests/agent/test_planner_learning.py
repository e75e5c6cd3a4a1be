"""What the planner makes of measurements over time: links, load, silence. What is true comes from simulated worlds."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from agent.planner import Planner
from split.plan.plan import LOCAL, Placement, PlanEstimate
from split.plan.power import PowerModel
from split.plan.probing import PING_BURST_BYTES, PING_COST_BYTES, PROBE_BURST_BYTES
from split.plan.slow_start import SendWindow
from split.plan.table import PlanTable
from split.profiles.measured import CodecCosts, Point
from split.profiles.radio import Radio
from tests.agent.planner_world import CARD, CONTRACT, PROFILE, TENSOR, choose, connected_planner, knowing_planner
from tests.agent.tiny_card import CUT, OFFLOAD, SPLIT


def test_a_plan_that_waits_for_tcps_window_is_predicted_so_and_small_payloads_win() -> None:
    """100 ms and 100 Mbit/s: 50 KB do not fit into ten segments, so that they pass the way three times; by hand: the
    windows of 14,480 and 28,960 bytes leave 100 − 1.2 and 100 − 2.3 ms unused."""
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    for n in range(10):
        planner.observe_ping(100.0, n * 0.1)
        planner.observe_transfer(50_000, 40, 104.0, n * 0.1 + 0.05)
    forced = dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)
    before = choose(planner, forced).chosen
    planner.observe_window(
        SendWindow(
            window_bytes=14_480.0,
            threshold_bytes=math.inf,
            segment_bytes=1_448.0,
            timeout_s=0.3,
            restarts=False,
            sent_at_s=1.0,
        )
    )
    after = choose(planner, forced).chosen
    assert after.predicted_ms - before.predicted_ms == pytest.approx(196.5, rel=0.03)
    assert after.stages_ms["up"] - before.stages_ms["up"] == pytest.approx(196.5, rel=0.03)
    assert sum(after.stages_ms.values()) == pytest.approx(after.predicted_ms)
    small = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    assert choose(planner, small).chosen.stages_ms["up"] < 60.0  # 4 KB fit into the first window
    planner.connected(max_message_bytes=1 << 28)  # another connection: nothing is known of its window yet
    planner.companion_ready("m", 10.0, 0.5)
    assert choose(planner, forced).chosen.predicted_ms == pytest.approx(before.predicted_ms, rel=0.05)


def test_a_tiny_model_whose_difference_lies_beside_all_stages_stays_here() -> None:
    """Silero-VAD, 200 Mbit/s, a device 20 times slower, as `bench regret` found it: by stages 11.0 ms here and 9.9 at
    the companion, where callers waited 14.4 and 16.2: 3.4 and 6.3 ms lay in none."""
    profile = msgspec.structs.replace(
        PROFILE,
        whole_ms=11.0 / 20,
        cuts=(),
        input_codecs=(CodecCosts(codec="raw", bytes=3_000, encode_ms=3.2 / 20, decode_ms=0.05),),
    )

    def silero() -> Planner:
        planner = Planner(slowdown=20.0)
        planner.add_model("m", CARD, profile, CONTRACT)
        planner.connected(max_message_bytes=1 << 28)
        planner.companion_ready("m", 0.55, 0.0)
        for n in range(10):
            planner.observe_ping(6.0, n * 0.1)
            planner.observe_transfer(3_000, 40, 6.13, n * 0.1 + 0.05)
        return planner

    assert choose(silero()).chosen.plan == OFFLOAD
    planner = silero()
    for _ in range(6):
        planner.observe_rest("m", LOCAL, 3.4)
        planner.observe_rest("m", OFFLOAD, 6.3)
    planner.observe_rest("other", OFFLOAD, 1.0)  # unloaded meanwhile
    here = choose(planner).chosen
    assert here.plan == LOCAL
    assert here.stages_ms["rest"] == pytest.approx(3.4)
    there = choose(planner, dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)).chosen
    assert there.stages_ms["rest"] == pytest.approx(6.3)
    for one in (here, there):
        assert sum(one.stages_ms.values()) == pytest.approx(one.predicted_ms)
    planner.companion_lost("gone")  # without a companion it is the same sum, in scalars
    alone = choose(planner).chosen
    assert alone.stages_ms == pytest.approx(dict(here.stages_ms))
    assert alone.predicted_ms == pytest.approx(here.predicted_ms)


def test_a_head_that_is_all_call_is_learned_as_it_is_served_and_says_nothing_of_the_device() -> None:
    """0.03 ms in the profile's loop, 0.12 when served, as those of Silero-VAD; the whole takes what was profiled."""
    cut = msgspec.structs.replace(PROFILE.cuts[0], head_ms=0.03)
    planner = Planner(slowdown=20.0)
    planner.add_model("m", CARD, msgspec.structs.replace(PROFILE, cuts=(cut,)), CONTRACT)
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    forced = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    assert choose(planner, forced).chosen.stages_ms["head"] == pytest.approx(0.6)
    for _ in range(12):
        planner.observe_edge("m", SPLIT, "head", 20 * 0.12)
    assert choose(planner, forced).chosen.stages_ms["head"] == pytest.approx(2.4, rel=0.15)
    for _ in range(3):  # taken off the processor
        planner.observe_edge("m", SPLIT, "head", 20 * 40.0)
    assert choose(planner, forced).chosen.stages_ms["head"] < 20 * (0.03 + 0.2) * 1.01
    here = dataclasses.replace(TENSOR, mode=Placement.LOCAL)
    assert choose(planner, here).chosen.stages_ms["head"] == pytest.approx(2_000.0, rel=0.01)


def test_replies_that_weigh_a_thousand_times_what_was_told_are_expected_so_after_one() -> None:
    """The profile tells 40 bytes down; 40,000 come. At 100 Mbit/s they take 3.2 ms."""
    planner = connected_planner()
    forced = dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)
    told_ms, to_decode_ms = (choose(planner, forced).chosen.stages_ms[stage] for stage in ("down", "decode"))
    rate = choose(planner, forced).link["down_mbit_s"]
    planner.observe_reply_bytes("m", TENSOR, OFFLOAD, 40_000)
    found = choose(planner, forced).chosen
    assert found.stages_ms["down"] - told_ms == pytest.approx((40_000 - 40) * 0.008 / rate, rel=0.1)
    assert found.stages_ms["decode"] == pytest.approx(1000 * to_decode_ms, rel=0.1)
    assert planner.reply_bytes("m", OFFLOAD, TENSOR) == 40_000
    assert planner.reply_bytes("m", SPLIT, TENSOR) == 40_000  # the same outputs, made behind the cut
    assert sum(found.stages_ms.values()) == pytest.approx(found.predicted_ms)
    profiled_so = PlanTable.build(CARD, msgspec.structs.replace(PROFILE, output_bytes=40_000), CONTRACT)
    of_bytes = [n for n in range(len(profiled_so.spread)) if n not in (8, 9)]  # without compute, of another companion
    np.testing.assert_allclose(planner._model("m").costs.table.spread[of_bytes], profiled_so.spread[of_bytes])


def test_replies_that_vary_are_expected_at_their_mean() -> None:
    """A detector that answers with 20 to 60 KB, by what it sees; 40 bytes were told."""
    planner = connected_planner()
    for came_bytes in (20_000, 60_000, 40_000, 24_000, 56_000):
        planner.observe_reply_bytes("m", TENSOR, SPLIT, came_bytes)
    assert planner.reply_bytes("m", SPLIT, TENSOR) == 40_000
    planner.observe_reply_bytes("m", TENSOR, LOCAL, 1)  # nothing travels
    planner.observe_reply_bytes("other", TENSOR, SPLIT, 1)  # unloaded meanwhile
    assert planner.reply_bytes("m", SPLIT, TENSOR) == 40_000


def test_a_plan_that_was_left_after_slow_runs_is_not_held_to_them_for_good() -> None:
    """Local takes 100 ms; it is slow for a while, then the companion answers and it is never measured again."""
    planner = connected_planner()
    here = dataclasses.replace(TENSOR, mode=Placement.LOCAL)

    def expected_ms(now_s: float) -> float:
        return choose(planner, here, now_s=now_s).chosen.stages_ms["head"]

    for n in range(20):
        assert expected_ms(2.0 + 0.1 * n) == pytest.approx(100.0, rel=0.01)
        planner.observe_edge("m", LOCAL, "whole", 100.0)
    for n in range(6):
        planner.observe_edge("m", LOCAL, "whole", 140.0)
        expected_ms(4.0 + 0.1 * n)
    assert expected_ms(5.0) > 125.0
    for n in range(180):
        rested_ms = expected_ms(6.0 + n)
    # six of all runs were 40 % slower, and the profile counts as ten more
    assert 100.0 < rested_ms < 100.0 * (1.0 + 0.4 * 6 / 26)


def test_a_throttle_or_another_clock_is_expected_at_once_and_learned_by_two_runs() -> None:
    planner = knowing_planner()
    for n in range(30):
        choose(planner, now_s=n * 0.2)
        planner.observe_edge("m", LOCAL, "whole", 100.0)
    planner.observe_sensors(throttled=False, frequency_ratio=1.0)
    steady = choose(planner, now_s=6.0).chosen
    planner.observe_sensors(throttled=False, frequency_ratio=0.99)
    assert choose(planner, now_s=6.0).chosen.risk_ms == steady.risk_ms
    planner.observe_sensors(throttled=True, frequency_ratio=0.5)
    warned = choose(planner, now_s=6.1).chosen
    assert warned.predicted_ms == pytest.approx(200.0, rel=0.05)  # half the clock, twice the time
    assert warned.risk_ms - warned.predicted_ms > 3 * (steady.risk_ms - steady.predicted_ms)
    for n in range(2):
        planner.observe_edge("m", LOCAL, "whole", 160.0)  # part of it is memory's
        choose(planner, now_s=6.3 + n * 0.2)
    assert choose(planner, now_s=6.6).chosen.predicted_ms == pytest.approx(160.0, rel=0.06)


def test_a_clock_that_stays_changed_is_not_forgotten_while_nothing_runs_here_and_its_return_is_no_overshoot() -> None:
    """A run takes 100 ms at the full clock, 200 at half of it; meanwhile another place runs everything, for minutes."""
    planner = knowing_planner()
    for n in range(30):
        choose(planner, now_s=n * 0.2)
        planner.observe_edge("m", LOCAL, "whole", 100.0)
    planner.observe_sensors(throttled=False, frequency_ratio=1.0)
    choose(planner, now_s=6.0)
    planner.observe_sensors(throttled=True, frequency_ratio=0.5)
    for now_s in (6.1, 36.0, 126.0):
        assert choose(planner, now_s=now_s).chosen.predicted_ms == pytest.approx(200.0, rel=0.05)
    planner.observe_sensors(throttled=False, frequency_ratio=1.0)
    for now_s in (126.1, 250.0):
        assert choose(planner, now_s=now_s).chosen.predicted_ms == pytest.approx(100.0, rel=0.05)


def test_a_clock_that_falls_in_small_steps_and_rises_in_one_is_back_where_it_was() -> None:
    planner = knowing_planner()
    ratio = 1.0
    while ratio > 0.5:
        planner.observe_sensors(throttled=False, frequency_ratio=ratio)
        ratio *= 0.96  # each less than what counts as a change
    assert choose(planner).chosen.predicted_ms == pytest.approx(200.0, rel=0.1)
    planner.observe_sensors(throttled=False, frequency_ratio=1.0)
    assert choose(planner).chosen.predicted_ms == pytest.approx(100.0, rel=0.05)


def test_what_a_pause_adds_is_not_taken_for_its_cuts_own() -> None:
    """A split alternates with pauses, after which its head takes 20 % longer, there as here: what was never run is
    still predicted as profiled, and so is what is missing of a request, which decides when it must begin."""
    planner, now_s = connected_planner(), 1.0
    forced = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    for n in range(60):
        factor = 1.2 if n % 2 == 0 else 1.0
        now_s += 3.0 if n % 2 == 0 else 0.2
        choose(planner, forced, now_s)
        planner.observe_transfer(4_000, 40, 1.0 + 0.32, now_s)
        planner.observe_edge("m", SPLIT, "head", 20.0 * factor)
        planner.observe_cloud("m", SPLIT, 0.0, 7.0 * factor)
    now_s += 0.05
    local = choose(planner, dataclasses.replace(TENSOR, mode=Placement.LOCAL), now_s).chosen
    assert local.predicted_ms == pytest.approx(100.0, rel=0.05)
    assert planner.finish_ms("m", CUT, TENSOR) == pytest.approx(70.0, rel=0.05)
    offload = choose(planner, dataclasses.replace(TENSOR, mode=Placement.OFFLOAD), now_s).chosen
    assert offload.stages_ms["tail"] == pytest.approx(10.0, rel=0.05)


def test_a_new_calibration_keeps_what_was_learned_and_what_is_open_there() -> None:
    """The head takes 30 ms, profiled 20, the tail there 14, said to be 7; the calibration adds a codec before the
    others, so that every row lies elsewhere."""
    planner, now_s = connected_planner(), 1.0
    forced = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    for _ in range(60):
        now_s += 0.2
        choose(planner, forced, now_s)
        planner.observe_transfer(4_000, 40, 1.0 + 0.32, now_s)
        planner.observe_edge("m", SPLIT, "head", 30.0)
        planner.observe_cloud("m", SPLIT, 0.0, 14.0)
    for _ in range(5):
        choose(planner, now_s=now_s)
    decisions, before = planner.recent_cuts("m"), choose(planner, forced, now_s).chosen
    planner.codec_broken("m", "klt", "was too far off")
    point = Point(level=64, mean_bytes=900.0, p95_bytes=900.0, fidelity={"kl": 0.01}, fidelity_high={"kl": 0.01})
    klt = CodecCosts(codec="klt", bytes=900, encode_ms=0.5, decode_ms=0.1, curve=(point,))
    cut = PROFILE.cuts[0]
    profile = msgspec.structs.replace(PROFILE, cuts=(msgspec.structs.replace(cut, codecs=(klt, *cut.codecs)),))
    allowing = msgspec.structs.replace(
        CONTRACT, data=msgspec.structs.replace(CONTRACT.data, codecs=("raw", "encoded", "klt"))
    )
    planner.recalibrated("m", CARD, profile, allowing)
    assert planner.recent_cuts("m") == decisions
    after = choose(planner, dataclasses.replace(forced, codec="raw"), now_s).chosen
    assert (after.plan, after.predicted_ms) == (SPLIT, pytest.approx(before.predicted_ms))
    assert planner.snapshot(now_s)["models"]["m"]["codecs_why_not"] == {"klt": "the companion has no calibration yet"}
    planner.codec_ready("m", "klt")
    chosen = choose(planner, dataclasses.replace(forced, codec="klt"), now_s).chosen
    assert (chosen.plan.codec, chosen.bytes, chosen.level) == ("klt", 900, 64)
    assert chosen.stages_ms["head"] == pytest.approx(30.0, rel=0.03)
    assert chosen.stages_ms["tail"] == pytest.approx(14.0, rel=0.03)
    planner.recalibrated("m", CARD, PROFILE, CONTRACT)
    assert choose(planner, forced, now_s).chosen.predicted_ms == pytest.approx(before.predicted_ms)


def test_sensors_that_tell_nothing_change_nothing() -> None:
    planner = knowing_planner()
    before = choose(planner).chosen
    for throttled in (None, True, None, False):
        planner.observe_sensors(throttled=throttled, frequency_ratio=None)
    assert choose(planner).chosen == before


@dataclass
class Worker:
    """The device in simulated time: one job at a time, in order, so that what waits is known exactly."""

    planner: Planner
    slow: float = 1.0
    """What a run takes as a multiple of the profiled 100 ms."""
    now_s: float = 0.0
    free_at_s: float = 0.0
    expected_s: deque[tuple[float, float]] = field(default_factory=deque)
    """Of each local job: when it ends, and what it was expected to take."""
    errors: list[float] = field(default_factory=list)
    remote: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def queue_ms(self) -> float:
        """As `Compute.queue_ms`: the expected times of what waits, and what is left of the one that runs."""
        while self.expected_s and self.expected_s[0][0] <= self.now_s:
            self.expected_s.popleft()
        left = [expected for _, expected in self.expected_s]
        if left:
            began_s = max(self.now_s, self.expected_s[0][0] - 0.1 * self.slow)
            left[0] = max(left[0] - max(self.now_s - began_s, 0.0), 0.0)
        return sum(left) * 1000

    def request(self) -> float:
        """Serve one that comes now; when it is answered."""
        chosen = choose_at(self.planner, self.queue_ms(), self.now_s)
        self.remote.append(chosen.plan != LOCAL)
        if chosen.plan != LOCAL:
            waited_ms = max(self.free_at_s - self.now_s, 0.0) * 1000  # encoding has its turn on the worker
            ms = 150.0 * float(np.exp(self.rng.normal(0, 0.03)))
            self.planner.observe_transfer(50_000, 40, ms - 10.0, self.now_s)
            self.planner.observe_cloud("m", chosen.plan, 0.0, 10.0)
            self.planner.observe_total("m", chosen.plan, waited_ms + ms, chosen.predicted_ms)
            self.errors.append(chosen.predicted_ms / (waited_ms + ms) - 1.0)
            return self.now_s + (waited_ms + ms) / 1000
        run_s = 0.1 * self.slow * float(np.exp(self.rng.normal(0, 0.03)))
        self.free_at_s = max(self.free_at_s, self.now_s) + run_s
        self.expected_s.append((self.free_at_s, chosen.stages_ms["head"] / 1000))
        self.planner.observe_edge("m", LOCAL, "whole", run_s * 1000)
        total_ms = (self.free_at_s - self.now_s) * 1000
        self.planner.observe_total("m", LOCAL, total_ms, chosen.predicted_ms)
        self.errors.append(chosen.predicted_ms / total_ms - 1.0)
        return self.free_at_s

    def serve(self, requests: int, concurrency: int) -> None:
        """So many callers, each of which asks again when it is answered."""
        callers = [self.now_s] * concurrency
        heapq.heapify(callers)
        for _ in range(requests):
            self.now_s = heapq.heappop(callers)
            heapq.heappush(callers, self.request())
        self.now_s = max(callers)


def choose_at(planner: Planner, edge_queue_ms: float, now_s: float) -> PlanEstimate:
    return planner.decide("m", TENSOR, edge_queue_ms=edge_queue_ms, now_s=now_s).chosen


@pytest.mark.parametrize("slower", [1.0, 1.8], ids=["queueing alone", "each run slower too"])
def test_o_re_04_load_that_the_estimator_never_saw_is_predicted_and_placed_by(slower: float) -> None:
    alone = Worker(knowing_planner())
    alone.serve(40, 1)
    assert np.median(np.abs(alone.errors)) < 0.3
    alone.slow, alone.errors = slower, []
    alone.serve(60, 4)
    assert np.median(np.abs(alone.errors)) < 0.3
    assert np.median(np.abs(alone.errors[20:])) < 0.1

    planner = knowing_planner()  # with a companion that is worth it only for who would wait
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    for n in range(10):
        planner.observe_transfer(50_000, 40, 140.0, n * 0.01)
    shared = Worker(planner, now_s=1.0)
    shared.serve(40, 1)
    assert not any(shared.remote[-10:])
    shared.slow, shared.remote, shared.errors = slower, [], []
    shared.serve(60, 4)
    assert any(shared.remote[:20])
    assert np.median(np.abs(shared.errors)) < 0.3
    # Back to one caller. The queue tells at once; that runs are quick again, a try does while nothing runs here.
    shared.slow, shared.remote = 1.0, []
    shared.serve(120, 1)
    assert np.mean(shared.remote[20:]) < 0.1  # now and then one is tried


class Wire:
    """A link of one payload at a time: what is sent waits for what was sent before."""

    def __init__(self, rtt_ms: float, mbit_s: float) -> None:
        self.rtt_ms, self.ms_per_byte, self.free_at_ms = rtt_ms, 0.008 / mbit_s, 0.0

    def ms(self, size: int, at_ms: float) -> float:
        """Until the reply of a payload that is sent then."""
        self.free_at_ms = max(self.free_at_ms, at_ms) + size * self.ms_per_byte
        return self.free_at_ms + self.rtt_ms - at_ms


@pytest.mark.parametrize("known", [True, False], ids=["the kernel says what is ahead", "it says nothing"])
def test_parts_of_a_batch_on_a_link_that_has_just_fallen_do_not_make_it_seem_slower_than_it_is(known: bool) -> None:
    """From 2,000 to 5 Mbit/s: four parts of 100 KB are sent 10 ms apart and wait behind each other, 160 ms each."""
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    wire = Wire(2.0, 2_000.0)
    for n in range(20):
        planner.observe_transfer(100_000, 40, wire.ms(100_000, n * 1000.0), float(n))
    wire = Wire(2.0, 5.0)
    replies = []
    for part in range(4):
        at_ms = 30_000.0 + part * 10.0
        ms = wire.ms(100_000, at_ms)
        replies.append((at_ms + ms, 100_000 * (part + 1) if known else 100_000, ms, 100_000 * (part + 1)))
    for number, (done_ms, up_bytes, ms, most) in enumerate(replies, 1):
        planner.observe_transfer(up_bytes, 40, ms, done_ms / 1000, up_bytes_max=most)
        if number >= 2:
            assert planner.snapshot(done_ms / 1000)["link"]["up_mbit_s"] == pytest.approx(5.0, rel=0.25)
            assert planner.snapshot(done_ms / 1000)["link"]["rtt_ms"] < 30.0


def test_probes_are_bounded_by_the_joules_that_sending_them_takes() -> None:
    """An hour of traffic that stays here, on a link of 1 Mbit/s: a byte is 8 µs of sending, at 2 W 16 µJ."""
    radio = Radio(base_w=2.0, send_w_per_mbit_s=0.0, receive_w_per_mbit_s=0.0, wait_w=0.0, source="a test")
    model = PowerModel(compute_w=1.0, radio=radio, measured=False, source="a test")

    def probed_bytes(joules_per_hour: float) -> int:
        planner = knowing_planner(power=lambda: model, probe_joules_per_hour=joules_per_hour)
        planner.connected(max_message_bytes=1 << 28)
        planner.observe_ping(20.0, 0.0)
        total, now_s = 0, 0.0
        while now_s < 3600.0:
            now_s += 0.5
            choose(planner, now_s=now_s)
            if padding := planner.probe_wanted(now_s):
                total += padding + PING_COST_BYTES
                planner.observe_ping(20.0 + padding * 0.008, now_s, padding_bytes=padding)
        return total

    free, bounded = probed_bytes(math.inf), probed_bytes(4.0)
    burst = PROBE_BURST_BYTES + PING_BURST_BYTES
    assert free > 2 * bounded
    assert bounded <= 4.0 / 16e-6 * 1.2 + burst  # the rate is known within some percent
    assert probed_bytes(0.0) <= burst


def test_every_stage_is_predicted_within_a_tenth_once_the_world_holds_still() -> None:
    """Companion, link and device differ from what was profiled, and scatter by 4 %."""
    rng = np.random.default_rng(11)
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    truth = {"head": 20.0 * 1.4, "up": 15.0 + 4_000 * 0.008 / 12, "tail": 7.0 * 1.7, "down": 15.0 + 40 * 0.008 / 12}
    errors: dict[str, list[float]] = {stage: [] for stage in truth}
    for n in range(120):
        now_s = n * 0.2
        chosen = choose(planner, dataclasses.replace(TENSOR, mode=Placement.SPLIT), now_s).chosen
        real = {stage: ms * float(np.exp(rng.normal(0, 0.04))) for stage, ms in truth.items()}
        planner.observe_edge("m", SPLIT, "head", real["head"])
        planner.observe_transfer(4_000, 40, real["up"] + real["down"], now_s + 0.1)
        if n % 3 == 0:
            planner.observe_transfer(50_000, 40, 30.0 + 50_000 * 0.008 / 12, now_s + 0.15)
        planner.observe_cloud("m", SPLIT, 0.0, real["tail"])
        if n >= 20:
            for stage, ms in real.items():
                errors[stage].append(abs(chosen.stages_ms[stage] / ms - 1.0))
    for stage, found in errors.items():
        assert np.mean(found) <= 0.1, stage


def test_under_traffic_that_stays_here_probes_still_find_a_link_that_recovers_after_long() -> None:
    """5 Mbit/s for so long that what could be spent at once is gone, then 50."""
    planner = connected_planner()
    for n in range(3):
        planner.observe_transfer(50_000, 40, 1.0 + 50_000 * 0.0016, 1.0 + n)
    now_s, ms_per_byte = 4.0, 0.0016
    while now_s < 604.0:
        now_s += 0.25
        if size := planner.probe_wanted(now_s):
            planner.observe_ping(1.0 + size * ms_per_byte, now_s, padding_bytes=size)
        assert choose(planner, now_s=now_s).chosen.plan != OFFLOAD
    ms_per_byte, recovered_at_s = 0.00016, now_s
    while choose(planner, now_s=now_s).chosen.plan != OFFLOAD:
        now_s += 0.25
        if size := planner.probe_wanted(now_s):
            planner.observe_ping(1.0 + size * ms_per_byte, now_s, padding_bytes=size)
        assert now_s < recovered_at_s + 60.0
