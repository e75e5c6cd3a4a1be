"""One model, two cuts, round numbers, a device whose power is known: for tests of the objective."""

from __future__ import annotations

from typing import Final

import numpy as np

from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest
from split.plan.decide import estimate_all
from split.plan.objective import Prices
from split.plan.observation import LinkEstimate, Observation, RemoteView
from split.plan.plan import Plan, PlanEstimate, RequestFacts
from split.plan.power import Power
from split.plan.table import PlanTable
from split.profiles.contract import Behaviour, Contract, Data, Fidelity, InputContract, Weights
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec

EARLY, LATE = CutId("aaaaaaaaaaaa"), CutId("bbbbbbbbbbbb")


def cut_card(
    name: CutId,
    share: float,
    *,
    boundary: int = 2_500,
    tail_inputs: tuple[str, ...] = (),
    tail_outputs: tuple[str, ...] = ("y",),
    head_outputs: tuple[str, ...] = (),
) -> CutCard:
    return CutCard(
        id=name,
        boundary=(TensorSpec(name=f"at-{name}", dtype="FP32", shape=(boundary,)),),
        head_inputs=("x",),
        head_outputs=head_outputs,
        tail_inputs=tail_inputs,
        shown_inputs=tail_inputs,
        tail_outputs=tail_outputs,
        nodes=3,
        compute_share=share,
        node_bitmap="07",
    )


CARD = ModelCard(
    digest=ModelDigest("sha256:" + "0" * 64),
    path="/models/tiny.onnx",
    files=(("tiny.onnx", 1, "0" * 64),),
    inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, 3, 8, 8)),),
    outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 100)),),
    nodes=10,
    opset=17,
    cuts=(cut_card(EARLY, 0.2), cut_card(LATE, 0.7)),
)
PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="onnxruntime 1",
    fingerprint="f",
    dims={},
    threads=2,
    whole_ms=100.0,
    image_ms=7.0,
    input_codecs=(CodecCosts(codec="raw", bytes=100_000, encode_ms=1.0, decode_ms=2.0),),
    encoded_bytes=9_000,
    output_bytes=400,
    cuts=(
        CutCosts(
            cut=EARLY,
            head_ms=20.0,
            tail_ms=80.0,
            codecs=(
                CodecCosts(codec="raw", bytes=40_000, encode_ms=0.5, decode_ms=0.25),
                CodecCosts(codec="int8", bytes=10_000, encode_ms=2.0, decode_ms=1.5, fidelity={"kl": 0.04}),
            ),
        ),
        CutCosts(
            cut=LATE,
            head_ms=70.0,
            tail_ms=30.0,
            codecs=(CodecCosts(codec="raw", bytes=10_000, encode_ms=0.5, decode_ms=0.25),),
        ),
    ),
)


def at_weights(weights: Weights, service_class: str = "silver", *, rate: float = 0.0) -> PlanTable:
    """The table of a contract with these."""
    behaviour = Behaviour(
        weights=weights,
        service_class=service_class,  # type: ignore[arg-type]  # the word of each test
        throughput_min_per_s=rate,
    )
    data = Data(
        inputs=(InputContract(name="x", encoded=ImageSpec(resize=8, crop=8)),),
        codecs=("raw", "int8", "encoded"),
        fidelity=Fidelity(measure="kl", bound=0.05),
    )
    return PlanTable.build(CARD, PROFILE, Contract(behaviour=behaviour, data=data))


TABLE: Final = at_weights(Weights())
LINK: Final = LinkEstimate(
    rtt_ms=10.0, up_ms_per_byte=0.001, down_ms_per_byte=0.002, covariance=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), age_s=0.1
)
REMOTE: Final = RemoteView(
    link=LINK,
    beta=1.5,
    beta_sigma=0.0,
    speed_ratio=0.5,
    image_ms=4.0,
    queue_ms=3.0,
    queue_sigma_ms=0.0,
    opened=np.ones(len(TABLE), dtype=np.bool_),
)
STATE: Final = Observation(
    edge_queue_ms=5.0,
    slowdown=2.0,
    alpha=1.25,
    alpha_sigma=0.0,
    image_ms=7.0,
    image_ratio=1.5,
    remote=REMOTE,
    power=Power(compute_w=5.0, send_w=2.0, receive_w=3.0, wait_w=1.0, measured=False, source="round numbers"),
    prices=Prices(per_byte=1e-6, per_companion_ms=1e-3),
)
LOCAL_J: Final = 1.25
"""Local in `STATE`: 5 W for 2 · 1.25 · 100 ms; 5 ms in the queue cost nothing."""


def named(label: str) -> Plan:
    return next(plan for plan in TABLE.plans if str(plan) == label)


def estimates(table: PlanTable, state: Observation, facts: RequestFacts) -> dict[Plan, PlanEstimate]:
    return {estimate.plan: estimate for estimate in estimate_all(table, state, facts)}
