"""agent/spot_checks.py on its own: what is held against the bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from agent.intake import InferenceRequest
from agent.journal import Journal
from agent.planner import Planner
from agent.spot_checks import SpotChecks
from split.ids import CutId
from split.plan.plan import Placement, Plan, RequestFacts
from split.profiles.contract import Contract, Data, Fidelity

KLT = Plan(placement=Placement.SPLIT, cut=CutId("c"), codec="klt")


class Model(SimpleNamespace):
    __hash__ = object.__hash__


def distance_of(outputs: np.ndarray, expected: np.ndarray, *, batch_dim: int | None) -> float:
    """What a check of one answer says of it."""
    told: list[float] = []

    def begin(request: Any, outcome: Any, local_ms: float, compare: Any, then: Any) -> bool:
        told.append(compare({"y": expected}))
        return True

    checks = SpotChecks(
        every=1,
        planner=cast(Planner, SimpleNamespace(plans_with=lambda name, profile: True)),
        journal=Journal(),
        reruns=cast(Any, SimpleNamespace(begin=begin)),
    )
    contract = Contract(data=Data(fidelity=Fidelity(measure="relative", bound=0.1)))
    request = InferenceRequest(
        id=cast(Any, "r"),
        model=cast(Any, Model(name="m", profile=None, contract=contract, batch_dim=batch_dim)),
        inputs={},
        encoded=(),
        outputs=("y",),
        facts=RequestFacts(budget_ms=1e3, sizes=(len(outputs),)),
        received_at_s=0.0,
        deadline_at_s=1.0,
        holding=cast(Any, SimpleNamespace()),
    )
    outcome: Any = SimpleNamespace(ran=KLT, fallback="", outputs={"y": outputs, "of another": outputs})
    checks.answered(request, outcome, lambda: 1.0)
    return told[0]


@pytest.mark.parametrize(("batch_dim", "distance"), [(0, 0.2 / 4), (None, 0.2)])
def test_a_batch_is_judged_by_its_items_as_the_curve_is(batch_dim: int | None, distance: float) -> None:
    expected = np.full((4, 2), 10.0)
    outputs = expected.copy()
    outputs[2] = 12.0
    assert distance_of(outputs, expected, batch_dim=batch_dim) == pytest.approx(distance)
