"""Plans that are tried to learn something, as the planner has it: when, how often, and never for whom."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from agent.planner import Planner
from split.plan.observation import Metered
from split.plan.plan import LOCAL, Decision, Placement, RequestFacts
from split.profiles.contract import Behaviour, Fallback
from tests.agent.planner_world import CARD, CONTRACT, PROFILE, TENSOR, choose, knowing_planner
from tests.agent.tiny_card import OFFLOAD


def slow_companion(*, service_class: str = "silver", strategy: str = "local", **options: Any) -> Planner:
    """A companion that takes 130 ms for what the device does in 100."""
    planner = Planner(**options)
    behaviour = Behaviour(service_class=service_class, fallback=Fallback(strategy=strategy))  # type: ignore[arg-type]
    contract = msgspec.structs.replace(CONTRACT, behaviour=behaviour)
    planner.add_model("m", CARD, PROFILE, contract)
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 130.0, 0.5)
    for n in range(10):
        planner.observe_transfer(50_000, 40, 1.0 + 4.0, n * 0.1)
    return planner


def requests(planner: Planner, count: int, facts: RequestFacts = TENSOR) -> list[Decision]:
    decisions = []
    for n in range(count):
        decisions.append(choose(planner, facts, now_s=1.0 + n * 0.05))
        planner.observe_total("m", decisions[-1].chosen.plan, 100.0, 100.0)
    return decisions


def test_a_companion_that_is_not_worth_it_is_tried_now_and_then_and_the_reason_says_so() -> None:
    planner = slow_companion()
    decisions = requests(planner, 160)
    tried = [number for number, one in enumerate(decisions) if one.tried]
    assert tried == [49, 149]  # the fiftieth, and then a hundred later
    decision = decisions[49]
    assert decision.chosen.plan == OFFLOAD
    assert "to see whether it is as slow as predicted" in decision.reason
    over_ms = decision.chosen.predicted_ms - 100.0
    assert f"{over_ms:.1f} ms over the best" in decision.reason
    assert decisions[50].chosen.plan == LOCAL  # what is tried is no incumbent: the next one is compared as before
    assert "gains too little" not in decisions[50].reason
    over_ms += decisions[149].chosen.predicted_ms - 100.0
    account = planner.snapshot(10.0)["models"]["m"]["tried"]
    assert account["cost_ms"] == pytest.approx(over_ms, rel=0.01)
    assert account["share"] == pytest.approx(over_ms / 16_000.0, rel=0.02)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"service_class": "gold"}, TENSOR),
        ({"strategy": "fail"}, TENSOR),
        ({"battery_low": lambda: True}, TENSOR),
        ({"metered": lambda: Metered(left_bytes=1e9, may_probe=False)}, TENSOR),
        ({}, dataclasses.replace(TENSOR, mode=Placement.LOCAL)),
        ({}, dataclasses.replace(TENSOR, codec="raw")),
        (
            {},
            dataclasses.replace(TENSOR, budget_ms=250.0),
        ),  # 137 ms, and 240 ms until the device would have it after all
    ],
    ids=["gold", "no way out", "battery", "metered", "mode", "codec", "deadline"],
)
def test_nothing_is_tried_with(options: dict[str, Any], facts: RequestFacts) -> None:
    assert not any(one.tried for one in requests(slow_companion(**options), 300, facts))


def test_another_companion_is_tried_as_soon_as_the_first_one_was() -> None:
    planner = slow_companion()
    requests(planner, 400)  # the first is asked every 400 by now
    for way, tries in (("elsewhere", [49]), ("elsewhere", [])):  # dialled again it is no other one
        planner.connected(max_message_bytes=1 << 28, way=way)
        planner.companion_ready("m", 130.0, 0.5)
        for n in range(10):
            planner.observe_transfer(50_000, 40, 1.0 + 4.0, 30.0 + n * 0.1)
        assert [number for number, one in enumerate(requests(planner, 60)) if one.tried] == tries


def test_nothing_is_tried_without_a_companion() -> None:
    assert not any(one.tried for one in requests(knowing_planner(), 300))
