"""Codecs with settings: one plan each, whose setting is the cheapest measured one inside the bound.

Expected levels and bytes are read off the curve by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from split.errors import InvalidRequest
from split.plan.decide import decide, estimate_all
from split.plan.message_cost import MessageCosts
from split.plan.plan import Placement, Plan, PlanEstimate, RequestFacts
from split.plan.rate import Rate
from split.plan.rows import BOUNDS_KEPT_MAX
from split.plan.table import BOUND_TABLES_MAX, Column, PlanTable
from split.profiles.boxes import Boxes
from split.profiles.contract import Contract, Data, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, ModelProfile, Point
from tests.split import plan_world
from tests.split.plan_world import EARLY, LATE

FACTS = RequestFacts(budget_ms=1000.0)
STATE = replace(plan_world.STATE, incumbent=None, remote=replace(plan_world.REMOTE, opened=np.ones(7, dtype=np.bool_)))
KLT = Plan(placement=Placement.SPLIT, cut=EARLY, codec="klt")


def measured(level: int, mean_bytes: float, p95_bytes: float, *, kl: float, top1: float) -> Point:
    """With that kl and top1 at most, in the mean half of it."""
    high = {"kl": kl, "top1": top1}
    mean = {name: value / 2 for name, value in high.items()}
    return Point(level=level, mean_bytes=mean_bytes, p95_bytes=p95_bytes, fidelity=mean, fidelity_high=high)


CURVE = (
    measured(140, 1000.0, 1164.5, kl=0.2, top1=0.3),
    measured(132, 2000.0, 2329.0, kl=0.04, top1=0.01),
    measured(128, 2500.0, 2911.25, kl=0.03, top1=0.02),
    measured(120, 4000.0, 4658.0, kl=0.01, top1=0.0),
)


def profile_with(curve: Sequence[Point], pictures: Mapping[str, Sequence[Point]] | None = None) -> ModelProfile:
    profile = plan_world.PROFILE
    klt = CodecCosts(codec="klt", bytes=1000, encode_ms=0.4, decode_ms=0.3, curve=tuple(curve))
    cuts = tuple(
        msgspec.structs.replace(cut, codecs=(*cut.codecs, klt)) if cut.cut == EARLY else cut for cut in profile.cuts
    )
    more = tuple(
        CodecCosts(codec=codec, bytes=1, encode_ms=1.0, decode_ms=1.0, curve=tuple(points))
        for codec, points in (pictures or {}).items()
    )
    return msgspec.structs.replace(profile, cuts=cuts, input_codecs=(*profile.input_codecs, *more))


def table_of(bound: float, *, measure: str = "kl", curve: Sequence[Point] = CURVE, **more: Any) -> PlanTable:
    data = Data(
        inputs=(InputContract(name="x", encoded=ImageSpec(resize=8, crop=8)),),
        codecs=("raw", "fp16", "int8", "klt", "encoded", "jpeg", "webp"),
        fidelity=msgspec.convert({"measure": measure, "bound": bound} | more, Fidelity),
    )
    contract = Contract(data=data)
    return PlanTable.build(plan_world.CARD, profile_with(curve), contract)


def klt_of(table: PlanTable, fidelity: float | None = None) -> PlanEstimate:
    facts = replace(FACTS, fidelity=fidelity)
    return next(one for one in estimate_all(table, STATE, facts) if one.plan == KLT)


@pytest.mark.parametrize(
    ("bound", "level", "bytes_", "kl"),
    [(0.5, 140, 1000, 0.2), (0.2, 140, 1000, 0.2), (0.036, 128, 2500, 0.03), (0.0299, 120, 4000, 0.01)],
)
def test_the_setting_is_the_cheapest_that_was_measured_inside_the_bound(
    bound: float, level: int, bytes_: int, kl: float
) -> None:
    found = klt_of(table_of(bound))
    assert (found.level, found.bytes, found.fidelity, found.allowed) == (level, bytes_, kl / 2, True)


def test_a_curve_that_is_not_monotonous_gives_what_was_measured_cheapest_by_the_measure_asked_for() -> None:
    assert klt_of(table_of(0.015, measure="top1")).level == 132  # which 128, for more bytes, does not keep


def test_where_no_setting_is_inside_the_closest_measured_is_named_and_nothing_is_allowed() -> None:
    found = klt_of(table_of(0.005))
    assert not found.allowed
    assert "the closest measured is 0.005 in the mean, 0.01 at most, with 4000 bytes" in found.why_not
    assert "0.005" in found.why_not


def test_a_measure_that_the_curve_does_not_have_allows_nothing() -> None:
    found = klt_of(table_of(1.0, measure="cosine"))
    assert (found.allowed, found.fidelity) == (False, None)
    assert "not measured (cosine of codec klt); run isthmus calibrate" in found.why_not


def test_boxes_measured_by_other_parameters_allow_nothing() -> None:
    boxes = {"heads": [{"box": "b", "score": "s"}], "format": "xyxy", "scores": "logits", "threshold": 0.5}
    name = msgspec.convert(boxes, Boxes).name
    curve = [msgspec.structs.replace(one, fidelity=one.fidelity, fidelity_high={name: 0.04}) for one in CURVE]
    allowed = klt_of(table_of(0.05, measure="boxes", curve=curve, boxes=boxes))
    assert (allowed.allowed, allowed.level) == (True, 140)
    refused = klt_of(table_of(0.05, measure="boxes", curve=curve, boxes=boxes | {"threshold": 0.4}))
    assert not refused.allowed
    assert "not measured (boxes of codec klt); run isthmus calibrate with inputs that show" in refused.why_not


def test_a_distance_that_is_no_number_keeps_no_bound() -> None:
    curve = [msgspec.structs.replace(CURVE[0], fidelity_high={"kl": math.nan})]
    assert not klt_of(table_of(10.0, curve=curve)).allowed


def test_a_contract_that_does_not_list_it_allows_it_at_no_bound() -> None:
    contract = Contract(data=Data(codecs=("raw",), fidelity=Fidelity(measure="kl", bound=1.0)))
    table = PlanTable.build(plan_world.CARD, profile_with(CURVE), contract)
    assert "does not allow codec klt" in klt_of(table).why_not


def test_a_request_that_asks_for_closer_gets_another_setting_of_the_same_plan() -> None:
    table = table_of(0.2)
    assert klt_of(table).level == 140
    closer = klt_of(table, 0.035)
    assert (closer.level, closer.bytes) == (128, 2500)
    none = klt_of(table, 0.001)
    assert not none.allowed
    assert "the request's kl of 0.001" in none.why_not
    assert table.within(0.035) is table.within(0.035)
    assert table.within(0.2) is table is table.within(None)


def test_bounds_between_two_points_share_a_table_and_each_is_named_in_its_own_words() -> None:
    table = table_of(0.2)
    assert table.within(0.0301) is table.within(0.0399)
    assert table.within(0.0399) is not table.within(0.04)
    fine = table.within(0.005)
    assert fine is table.within(0.001)
    for bound in (0.005, 0.001):
        assert f"the request's kl of {bound:g}" in klt_of(table, bound).why_not
    assert table.within(0.1999) is not table  # 0.2 is a point's own


def test_tables_within_many_bounds_are_kept_for_a_while_and_not_for_ever() -> None:
    curve = [measured(number, 9000.0 - number, 9000.0, kl=0.002 * (100 - number), top1=0.0) for number in range(100)]
    curve.sort(key=lambda point: point.mean_bytes)
    table = table_of(0.2, curve=[msgspec.structs.replace(one, mean_bytes=1.0 + one.level) for one in curve])
    first = table.within(0.1)
    for number in range(100):
        table.within(0.002 * number)
    assert table.within(0.1) is not first
    assert table.within(0.1).bounded.levels == first.bounded.levels
    assert len(table.rows._kept) == BOUNDS_KEPT_MAX
    assert len(table._within) == BOUND_TABLES_MAX


def test_payloads_that_scatter_widen_what_the_transfer_may_take() -> None:
    """A rate of 1 ms a KB that is known: σ of the transfer is σ of the bytes, (p95 − mean) / 1.645 = 100 bytes."""
    table = table_of(0.5)
    state = STATE
    assert state.remote is not None
    link = replace(state.remote.link, up_ms_per_byte=0.001, covariance=(0.0,) * 6)
    certain = replace(
        state, alpha_sigma=0.0, remote=replace(state.remote, link=link, beta_sigma=0.0, queue_sigma_ms=0.0)
    )
    found = next(one for one in estimate_all(table, certain, FACTS) if one.plan == KLT)
    assert found.sigma_ms == pytest.approx(0.1, rel=1e-3)


def test_what_is_really_sent_corrects_the_bytes_of_every_setting() -> None:
    table, learned = table_of(0.2), MessageCosts()
    rate = learned.rates["klt"] = Rate()
    for _ in range(500):
        rate.observe(1500.0, 1000.0)
    now = table.with_messages(table, learned)
    row = now.row_of[KLT]
    assert now.costs[Column.UP, row] == pytest.approx(1500.0, rel=0.01)
    assert now.within(0.036).costs[Column.UP, row] == pytest.approx(3750.0, rel=0.01)
    others = [i for i in range(len(now)) if i != row]
    np.testing.assert_array_equal(now.costs[:, others], table.costs[:, others])
    np.testing.assert_array_equal(now.spread[:, others], table.spread[:, others])


def test_a_setting_is_told_with_its_plan() -> None:
    facts = replace(FACTS, mode=Placement.SPLIT, cut=EARLY, codec="klt")
    decision = decide(table_of(0.036), STATE, facts)
    assert decision.chosen.level == 128
    assert "klt at level 128: 2.5 KB, kl 0.015, at most 0.03 of 0.036 allowed" in decision.reason


def test_a_codec_that_may_not_be_used_now_is_not_chosen_and_says_why() -> None:
    state = STATE
    assert state.remote is not None
    without = replace(
        state, remote=replace(state.remote, codecs_why_not={"klt": "the companion has no calibration yet"})
    )
    table = table_of(0.2)
    found = {one.plan: one for one in estimate_all(table, without, FACTS)}
    assert found[KLT].why_not == "the companion has no calibration yet"
    raw = Plan(placement=Placement.SPLIT, cut=EARLY, codec="raw")
    assert found[raw].allowed == {one.plan: one for one in estimate_all(table, state, FACTS)}[raw].allowed
    forced = replace(FACTS, mode=Placement.SPLIT, cut=EARLY, codec="klt")
    decision = decide(table, without, forced)
    assert decision.chosen.plan.placement is Placement.LOCAL
    assert "no calibration yet" in decision.reason


def test_a_forced_codec_without_a_calibration_is_refused_with_what_makes_one() -> None:
    facts = replace(FACTS, mode=Placement.SPLIT, cut=LATE, codec="klt")
    with pytest.raises(InvalidRequest, match="isthmus calibrate"):
        decide(table_of(0.2), STATE, facts)


def test_every_bound_is_kept_by_what_it_allows() -> None:
    dice = np.random.default_rng(4)
    for _, measure in itertools.product(range(20), ("kl", "top1")):
        points = sorted(
            (
                Point(
                    level=int(level),
                    mean_bytes=float(dice.uniform(100, 9000)),
                    p95_bytes=9000.0,
                    fidelity={"kl": float(dice.uniform(0, 1)), "top1": float(dice.uniform(0, 1))},
                    fidelity_high={"kl": float(dice.uniform(0, 1)), "top1": float(dice.uniform(0, 1))},
                )
                for level in range(9)
            ),
            key=lambda point: point.mean_bytes,
        )
        bound = float(dice.uniform(0, 1))
        found = klt_of(table_of(bound, measure=measure, curve=points))
        inside = [point for point in points if point.fidelity_high[measure] <= bound]
        assert found.allowed == bool(inside)
        if inside:
            assert found.bytes == round(inside[0].mean_bytes)
