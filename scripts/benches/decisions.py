"""One decision over a hundred plans, as the planner makes it: in a plain state, with requests waiting, with a low
battery, with both, and for a dynamic model whose every request has sizes that are new.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.planner import Planner
from split.graph.card import CutCard, ModelCard
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step
from split.ids import CutId, ModelDigest
from split.plan.plan import RequestFacts
from split.plan.power import PowerModel
from split.profiles.contract import Contract, Data, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.profiles.radio import RADIOS, LinkKind
from split.tensor import TensorSpec

PLANS: Final = 100
WARM: Final = 600
"""Requests that are answered before decisions are timed: the planner has seen each plan it tries off by a little."""
TURN: Final = 100
"""Decisions of one state in a row: long enough for its caches, short beside what else the machine does."""
SCATTER: Final = 0.03
"""Of what they take about what was predicted."""
CODECS: Final = ("raw", "fp16", "int8")
POWER: Final = PowerModel(compute_w=4.0, threads=2, radio=RADIOS[LinkKind.WIFI], measured=False, source="a bench")
QUEUE_MS: Final = 40.0
AHEAD_BYTES: Final = 60_000
"""What waits on the device and for the link where there is a backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What decisions are timed in."""

    waiting: bool = False
    battery_low: bool = False
    dynamic: bool = False
    """Height and width are open, and of 36,863 requests no two have the same."""


STATES: Final[Mapping[str, State]] = MappingProxyType(
    {
        "plain": State(),
        "backlog": State(waiting=True),
        "low battery": State(battery_low=True),
        "backlog, low battery": State(waiting=True, battery_low=True),
        "each at a size that is new": State(dynamic=True),
    }
)


class Decisions:
    """`Planner.decide` over a hundred plans in one state: local, the input in three codecs and as a picture, 32 cuts in
    three."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._planner = _planner(state)
        self._random = random.Random(7)
        self._asked = 0
        for _ in range(WARM):
            self.once_us()

    def once_us(self) -> float:
        """One more decision, which is then learned from; what deciding took."""
        self._asked += 1
        n, planner = self._asked, self._planner
        sizes = (129 + n % 193, 129 + n % 191) if self._state.dynamic else ()
        facts = RequestFacts(budget_ms=1000.0, sizes=sizes)
        queue_ms = QUEUE_MS if self._state.waiting else 0.0
        started_s = time.perf_counter()
        chosen = planner.decide("m", facts, edge_queue_ms=queue_ms, now_s=2.0 + n * 1e-3).chosen
        taken_us = (time.perf_counter() - started_s) * 1e6
        measured_ms = chosen.predicted_ms * math.exp(self._random.gauss(0.0, SCATTER))
        planner.observe_total("m", chosen.plan, measured_ms, chosen.predicted_ms)
        return taken_us


def decisions_us(rounds: int) -> Mapping[str, list[float]]:
    """Each state's, all in turns of `TURN`."""
    every = {name: Decisions(state) for name, state in STATES.items()}
    taken: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds // TURN):
        for name, one in every.items():
            taken[name] += [one.once_us() for _ in range(TURN)]
    return taken


def _planner(state: State) -> Planner:
    cuts = [CutId(f"{number:012x}") for number in range((PLANS - 5) // len(CODECS) + 1)]
    tensor = TensorSpec(name="x", dtype="FP32", shape=(1, 3, *(("height", "width") if state.dynamic else (224, 224))))
    digest = ModelDigest("sha256:" + "0" * 64)
    card = ModelCard(
        digest=digest,
        path="/nowhere/model.onnx",
        files=(),
        inputs=(tensor,),
        outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 1000)),),
        nodes=100,
        opset=18,
        cuts=tuple(
            CutCard(
                id=cut,
                boundary=(TensorSpec(name="t", dtype="FP32", shape=(1, 50_000)),),
                head_inputs=("x",),
                head_outputs=(),
                tail_inputs=(),
                shown_inputs=(),
                tail_outputs=("y",),
                nodes=number + 1,
                compute_share=(number + 1) / (len(cuts) + 1),
                node_bitmap="00",
            )
            for number, cut in enumerate(cuts)
        ),
        growth=_growth(cuts) if state.dynamic else None,
    )

    def codecs(size: int) -> tuple[CodecCosts, ...]:
        return tuple(
            CodecCosts(codec=c, bytes=size // (2**n), encode_ms=0.3, decode_ms=0.2, fidelity={"kl": 0.01 * n})
            for n, c in enumerate(CODECS)
        )

    profile = ModelProfile(
        digest=digest,
        runtime="bench",
        fingerprint="bench",
        dims={"height": 224, "width": 224} if state.dynamic else {},
        sizes=(224, 224) if state.dynamic else (),
        threads=2,
        whole_ms=100.0,
        image_ms=5.0,
        input_codecs=codecs(602_112),
        encoded_bytes=40_000,
        output_bytes=4_000,
        cuts=tuple(
            CutCosts(cut=cut, head_ms=3.0 * (n + 1), tail_ms=100 - 3.0 * (n + 1), codecs=codecs(200_000 - 5_000 * n))
            for n, cut in enumerate(cuts)
        ),
    )
    image = InputContract(name="x", encoded=ImageSpec(resize=256, crop=224))
    planner = Planner(power=lambda: POWER, battery_low=lambda: state.battery_low)
    planner.add_model("m", card, profile, Contract(data=Data(inputs=(image,), codecs=(*CODECS, "encoded"))))
    planner.connected(max_message_bytes=1 << 28, ahead_bytes=lambda: AHEAD_BYTES if state.waiting else 0)
    planner.companion_ready("m", 10.0, 0.5)
    for n, cut in enumerate(cuts):
        planner.segment_ready("m", cut, 10.0 - 0.3 * n)
    for n in range(10):
        planner.observe_ping(20.0, n * 0.1)
        planner.observe_transfer(50_000, 4_000, 60.0, n * 0.1 + 0.05)
    decision = planner.decide("m", RequestFacts(budget_ms=1000.0), edge_queue_ms=0.0, now_s=1.0)
    assert decision.candidates >= PLANS - 5, decision.candidates
    return planner


def _growth(cuts: list[CutId]) -> Growth:
    """Work in proportion to the area; boundaries of about half and a quarter of the sides, no two alike."""
    sides = [Extent(n, (Step(dim, 1, 1, by),)) for n in range(len(cuts) // 2 + 1) for by in (2, 4) for dim in (0, 1)]
    return Growth(
        monomials=((), ((0, 1), (1, 1))),
        extents=tuple(sides),
        whole_work=(0.0, 100.0),
        outputs=(Elements(),),
        cuts={
            cut: CutGrowth(head_work=(0.0, 3.0 * n), crossing=(Elements(extents=(2 * n, 2 * n + 1)),))
            for n, cut in enumerate(cuts)
        },
    )
