"""agent/spot_checks.py on its own: what is held against the bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from agent.intake import InferenceRequest
from agent.journal import Journal
from agent.planner import Planner
from agent.spot_checks import SpotChecks
from split.ids import CutId
from split.plan.plan import Placement, Plan, RequestFacts
from split.profiles.contract import Contract, Data, Fidelity
from split.tensor import Tensors

KLT = Plan(placement=Placement.SPLIT, cut=CutId("c"), codec="klt")


class Model(SimpleNamespace):
    __hash__ = object.__hash__


def distances_of(
    outputs: Tensors, expected: Tensors, fidelity: Fidelity, *, batch_dim: int | None = None
) -> list[float]:
    """What a check of one answer, which was asked for the outputs in `expected`, says of it; [] where there is none."""
    told: list[float] = []

    def begin(request: Any, outcome: Any, local_ms: float, compare: Any, then: Any) -> bool:
        told.append(compare(expected))
        return True

    checks = SpotChecks(
        every=1,
        planner=cast(Planner, SimpleNamespace(plans_with=lambda name, profile: True)),
        journal=Journal(),
        reruns=cast(Any, SimpleNamespace(begin=begin)),
        on_broken=lambda model, codec, why: None,
    )
    contract = Contract(data=Data(fidelity=fidelity))
    request = InferenceRequest(
        id=cast(Any, "r"),
        model=cast(Any, Model(name="m", profile=None, contract=contract, batch_dim=batch_dim)),
        inputs={},
        encoded=(),
        outputs=tuple(expected),
        facts=RequestFacts(budget_ms=1e3, sizes=(len(next(iter(outputs.values()))),)),
        received_at_s=0.0,
        deadline_at_s=1.0,
        holding=cast(Any, SimpleNamespace()),
    )
    outcome: Any = SimpleNamespace(ran=KLT, fallback="", outputs=outputs | {"of another": next(iter(outputs.values()))})
    checks.answered(request, outcome, lambda: 1.0)
    return told


@pytest.mark.parametrize(("batch_dim", "distance"), [(0, 0.2 / 4), (None, 0.2)])
def test_a_batch_is_judged_by_its_items_as_the_curve_is(batch_dim: int | None, distance: float) -> None:
    expected = np.full((4, 2), 10.0)
    outputs = expected.copy()
    outputs[2] = 12.0
    found = distances_of({"y": outputs}, {"y": expected}, Fidelity(measure="relative", bound=0.1), batch_dim=batch_dim)
    assert found == [pytest.approx(distance)]


def test_a_detectors_answer_is_judged_by_its_detections_and_not_at_all_without_an_output_they_are_read_off() -> None:
    """Two of two boxes, one of them lost: of the two in either answer one is in both."""
    boxes = {"heads": [{"box": "b", "score": "s"}], "format": "xyxy", "scores": "probabilities", "threshold": 0.5}
    fidelity = msgspec.convert({"measure": "boxes", "bound": 0.1, "boxes": boxes}, Fidelity)
    corners = np.array([[[0, 0, 1, 1], [5, 5, 6, 6]]], np.float32)
    expected = {"b": corners, "s": np.array([[[0.9], [0.8]]], np.float32)}
    outputs = {"b": corners, "s": np.array([[[0.9], [0.4]]], np.float32)}
    assert distances_of(outputs, expected, fidelity) == [pytest.approx(0.5)]
    assert distances_of(outputs, {"s": expected["s"]}, fidelity) == []
