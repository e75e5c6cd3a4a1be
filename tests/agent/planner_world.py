"""A tiny model as measured, and planners that know it, with a companion or without: no clock, no socket."""

from __future__ import annotations

from typing import Any

from agent.planner import Planner
from split.plan.plan import Decision, Placement, Plan, RequestFacts
from split.profiles.contract import Contract, Data, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from tests.agent.tiny_card import CUT, tiny_card

ENCODED = Plan(placement=Placement.OFFLOAD, codec="encoded")
CARD = tiny_card()


def codec(size: int) -> CodecCosts:
    return CodecCosts(codec="raw", bytes=size, encode_ms=0.5, decode_ms=0.1)


PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="onnxruntime 1",
    fingerprint="f",
    dims={},
    threads=2,
    whole_ms=100.0,
    image_ms=5.0,
    input_codecs=(codec(50_000),),
    encoded_bytes=5_000,
    output_bytes=40,
    cuts=(CutCosts(cut=CUT, head_ms=20.0, tail_ms=70.0, codecs=(codec(4_000),)),),
)
CONTRACT = Contract(
    data=Data(
        inputs=(InputContract(name="x", encoded=ImageSpec(resize=64, crop=64)),),
        codecs=("raw", "encoded"),
        fidelity=Fidelity(measure="kl", bound=0.05),
    )
)
TENSOR = RequestFacts(budget_ms=10_000.0)
PICTURE = RequestFacts(budget_ms=10_000.0, encoded_bytes=5_000)


def knowing_planner(**options: Any) -> Planner:
    planner = Planner(**options)
    planner.add_model("m", CARD, PROFILE, CONTRACT)
    return planner


def connected_planner(**options: Any) -> Planner:
    """A companion ten times as fast behind a LAN of 1 ms and 100 Mbit/s."""
    planner = knowing_planner(**options)
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    for n in range(10):
        planner.observe_ping(1.0, n * 0.1)
        planner.observe_transfer(50_000, 40, 1.0 + 4.0, n * 0.1 + 0.05)
    return planner


def choose(planner: Planner, facts: RequestFacts = TENSOR, now_s: float = 1.0) -> Decision:
    return planner.decide("m", facts, edge_queue_ms=0.0, now_s=now_s)
