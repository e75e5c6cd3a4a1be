"""agent/shadowing.py on its own: whether a detector's answers agree. All else of it is in test_serve_shadow.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from agent.intake import InferenceRequest
from agent.journal import Journal
from agent.planner import Planner
from agent.shadowing import Shadowing
from split.ids import CutId
from split.plan.plan import Placement, Plan, RequestFacts
from split.profiles.contract import Behaviour, Contract, Data, Fallback, Fidelity
from split.tensor import Tensors


class Model(SimpleNamespace):
    __hash__ = object.__hash__


def verdict(
    outputs: Tensors, expected: Tensors, *, codec: str = "raw", level: int | None = None, bound: float = 0.1
) -> Any:
    """What is said of an answer that was asked for the outputs in `expected`."""
    told: list[Any] = []

    def begin(request: Any, outcome: Any, local_ms: float, compare: Any, then: Any) -> bool:
        told.append(compare(expected))
        return True

    boxes = {"heads": [{"box": "b", "score": "s"}], "format": "xyxy", "scores": "probabilities", "threshold": 0.5}
    contract = Contract(
        behaviour=Behaviour(fallback=Fallback(strategy="shadow")),
        data=Data(fidelity=msgspec.convert({"measure": "boxes", "bound": bound, "boxes": boxes}, Fidelity)),
    )
    request = InferenceRequest(
        id=cast(Any, "r"),
        model=cast(Any, Model(name="m", profile=None, contract=contract, batch_dim=None)),
        inputs={},
        encoded=(),
        outputs=tuple(expected),
        facts=RequestFacts(budget_ms=1e3),
        received_at_s=0.0,
        deadline_at_s=1.0,
        holding=cast(Any, SimpleNamespace()),
    )
    plan = Plan(placement=Placement.SPLIT, cut=CutId("c"), codec=codec)
    decision = SimpleNamespace(chosen=SimpleNamespace(level=level))
    outcome: Any = SimpleNamespace(ran=plan, fallback="", outputs=outputs, decision=decision)
    reruns = cast(Any, SimpleNamespace(begin=begin, running=False))
    shadowing = Shadowing(
        planner=cast(Planner, SimpleNamespace()), journal=Journal(), reruns=reruns, peer=lambda: "peer"
    )

    async def story() -> None:
        shadowing.answered(request, outcome, lambda: 1.0)

    asyncio.run(story())
    return told[0]


CORNERS = np.array([[[x, 0, x + 1, 1] for x in range(10)]], np.float32)


def detected(*, lost: int = 0, rounding: float = 0.0) -> Tensors:
    """Ten boxes apart, of which the first are not sure enough."""
    scores = np.where(np.arange(10) < lost, 0.4, 0.9).astype(np.float32).reshape(1, 10, 1)
    return {"b": CORNERS + np.float32(rounding), "s": scores}


def test_a_bit_exact_plan_may_move_boxes_as_the_contract_allows() -> None:
    assert verdict(detected(rounding=0.1), detected()) == ""  # overlaps of 0.81 / 1.19
    assert verdict(detected(lost=1), detected()) == ""
    why = verdict(detected(lost=2), detected())
    assert why.startswith("0.2 of split")
    assert why.endswith("detections are others, allowed is 0.1")


@pytest.mark.parametrize(("lost", "agrees"), [(9, True), (10, False)])
def test_one_answer_over_a_codec_with_settings_may_be_farther_off_but_not_another(lost: int, agrees: bool) -> None:
    """Ten times the bound would be all of them."""
    assert (verdict(detected(lost=lost), detected(), codec="klt", level=9) == "") is agrees
    assert verdict(detected(lost=lost), detected(), codec="klt", level=9, bound=1.0) == ""


def test_without_an_output_that_detections_are_read_off_nothing_is_said_but_of_what_is_the_same() -> None:
    scores = {"s": detected()["s"]}
    assert verdict(detected(), scores) == ""
    assert verdict(detected(lost=1), scores) is None
