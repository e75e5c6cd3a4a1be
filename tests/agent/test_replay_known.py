"""A model that was made up is known to the device as it was made up."""

from __future__ import annotations

import pytest

from agent.replay.example import ENCODED_BYTES, example, known_example
from agent.replay.known import Known
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.table import Column
from split.profiles.contract import Contract, Data


@pytest.mark.parametrize("encoded", [True, False])
def test_what_follows_from_card_and_profile_is_what_they_were_made_of(encoded: bool) -> None:
    plans = example(encoded=encoded)
    found = known_example(encoded=encoded).stages(1.0)
    assert found.keys() == plans.keys()
    for plan, stages in plans.items():
        for field in ("image_ms", "head_ms", "encode_ms", "up_bytes", "tail_ms", "cloud_decode_ms", "finish_ms"):
            assert getattr(found[plan], field) == pytest.approx(getattr(stages, field)), (plan, field)
        assert found[plan].down_bytes == stages.down_bytes


def test_a_faster_companion_needs_a_share_of_what_the_device_needs_and_the_device_what_it_needed() -> None:
    slow, fast = known_example().stages(1.0), known_example().stages(0.1)
    for plan, stages in slow.items():
        assert fast[plan].tail_ms == pytest.approx(0.1 * stages.tail_ms)
        assert fast[plan].cloud_decode_ms == pytest.approx(0.1 * stages.cloud_decode_ms)
        assert (fast[plan].head_ms, fast[plan].finish_ms) == (stages.head_ms, stages.finish_ms)


def test_a_plan_that_the_contract_forbids_is_none() -> None:
    known = known_example()
    strict = Known(card=known.card, profile=known.profile, contract=Contract(data=Data(codecs=("raw",))))
    assert {plan.codec for plan in strict.stages(1.0)} == {None, "raw"}


def test_the_planner_knows_what_the_world_charges() -> None:
    known, plans = known_example(), example()
    table = known.table
    encoded = Plan(placement=Placement.OFFLOAD, codec="encoded")
    assert table.whole_ms == plans[LOCAL].head_ms
    assert known.profile.encoded_bytes == ENCODED_BYTES == plans[encoded].up_bytes
    for plan, stages in plans.items():
        if plan not in (LOCAL, encoded):
            assert table.costs[Column.UP, table.row_of[plan]] == stages.up_bytes
