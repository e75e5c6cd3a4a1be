"""What calibrated codecs send, as the planner uses it: a codec is not lost to one payload, nor for good."""

from __future__ import annotations

import msgspec
import pytest

from agent.planner import Planner
from split.plan.plan import Placement, Plan
from split.profiles.contract import Behaviour, Contract, Data, Fidelity
from split.profiles.measured import CodecCosts, CutCosts, Point
from tests.agent.planner_world import CARD, PROFILE, TENSOR, codec
from tests.agent.tiny_card import CUT

KLT = Plan(placement=Placement.SPLIT, cut=CUT, codec="klt")
BYTES = 2400
CURVE = (Point(level=100, mean_bytes=BYTES, p95_bytes=3000.0, fidelity={"kl": 0.03}, fidelity_high={"kl": 0.03}),)
CODED = CodecCosts(codec="klt", bytes=BYTES, encode_ms=0.3, decode_ms=0.3, curve=CURVE)
CUT_COSTS = CutCosts(cut=CUT, head_ms=20.0, tail_ms=130.0, codecs=(codec(60_000), CODED))


class Story:
    """A device that takes 150 ms, a companion that takes 10, between them 30 ms and 0.8 Mbit/s; class gold tries
    nothing out."""

    def __init__(self) -> None:
        self.planner = Planner()
        contract = Contract(
            data=Data(codecs=("raw", "klt"), fidelity=Fidelity(measure="kl", bound=0.05)),
            behaviour=Behaviour(service_class="gold"),
        )
        profile = msgspec.structs.replace(PROFILE, whole_ms=150.0, cuts=(CUT_COSTS,))
        self.planner.add_model("m", CARD, profile, contract)
        self.planner.connected(max_message_bytes=1 << 24)
        self.planner.companion_ready("m", 10.0, 0.0)
        self.planner.segment_ready("m", CUT, 7.0)
        self.planner.codec_ready("m", "klt")
        self.now_s = 0.0
        for _ in range(5):
            self.planner.observe_ping(30.0, self.now_s)
            self.planner.observe_transfer(50_000, 40, 530.0, self.now_s)

    def request(self, *, times_as_large: float) -> bool:
        """One is decided, served and learned from; whether klt was chosen."""
        self.now_s += 0.2
        self.planner.observe_ping(30.0, self.now_s)
        decision = self.planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=self.now_s)
        plan = decision.chosen.plan
        size = round(BYTES * times_as_large) if plan == KLT else {None: 0, CUT: 60_000}.get(plan.cut, 50_000)
        total_ms = 150.0
        if plan.placement is not Placement.LOCAL:
            network_ms = 30.0 + size * 0.01
            total_ms = network_ms + (27.0 if plan.cut else 10.0)
            self.planner.observe_transfer(size, 40, network_ms, self.now_s)
            self.planner.observe_cloud("m", plan, 0.0, 7.0 if plan.cut else 10.0, 0.3)
        if plan == KLT:
            self.planner.observe_sent("m", TENSOR, plan, decision.chosen.level, size)
        if plan.cut:
            self.planner.observe_edge("m", plan, "head", 20.0)
        if plan.placement is Placement.LOCAL:
            self.planner.observe_edge("m", plan, "whole", 150.0)
        self.planner.observe_total("m", plan, total_ms, decision.chosen.predicted_ms)
        return plan == KLT


@pytest.mark.parametrize("odd", [1, 2, 5])
def test_one_payload_that_fell_back_to_lossless_does_not_end_a_codec(odd: int) -> None:
    story, coded = Story(), 0
    for _ in range(300):
        coded += story.request(times_as_large=25.0 if coded == odd - 1 else 1.0)
    assert coded > 290


def test_a_codec_that_was_left_for_what_it_sent_is_tried_again_in_minutes() -> None:
    story = Story()
    while story.request(times_as_large=25.0):
        assert story.now_s < 60.0
    left_at_s = story.now_s
    while not story.request(times_as_large=1.0):
        assert story.now_s < left_at_s + 600.0
    assert sum(story.request(times_as_large=1.0) for _ in range(300)) > 250
