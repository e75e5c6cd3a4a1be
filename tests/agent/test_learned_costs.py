"""agent/learned_costs.py through the planner: what measured stages teach of a model's costs, at any sizes."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from agent.planner import Planner
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step
from split.plan.plan import LOCAL, Placement, Plan, PlanEstimate, RequestFacts
from split.tensor import TensorSpec
from tests.agent.planner_world import (
    CARD,
    CONTRACT,
    ENCODED,
    PICTURE,
    PROFILE,
    TENSOR,
    choose,
    connected_planner,
    knowing_planner,
)
from tests.agent.tiny_card import CUT, OFFLOAD, SPLIT


def test_what_a_request_of_other_sizes_teaches_holds_for_all_sizes() -> None:
    by_n = Elements(extents=(0,))
    growth = Growth(
        monomials=(((0, 1),), ((0, 2),)),
        extents=(Extent(0, (Step(0, 1, 0, 1),)),),
        whole_work=(64.0, 1.0),
        outputs=(by_n,),
        cuts={CUT: CutGrowth(head_work=(64.0, 0.0), crossing=(by_n,))},
    )
    card = msgspec.structs.replace(CARD, inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, "n")),), growth=growth)
    planner = Planner()
    planner.add_model("m", card, msgspec.structs.replace(PROFILE, dims={"n": 64}, sizes=(64,)), CONTRACT)
    large = RequestFacts(budget_ms=10_000.0, sizes=(192,))
    assert planner.as_profiled_ms("m", large, SPLIT, "head", 30.0) == pytest.approx(10.0)
    assert planner.as_profiled_ms("m", large, SPLIT, "local_tail", 90.0) == pytest.approx(10.0)
    assert planner.as_profiled_ms("m", large, SPLIT, "tail", 90.0) == pytest.approx(10.0)
    whole_ms = planner.as_profiled_ms("m", large, LOCAL, "whole", 1_200.0)
    assert whole_ms == pytest.approx(200.0)  # 1,200 · 2·64² / (64·192 + 192²)
    assert planner.as_profiled_ms("m", large, SPLIT, "image", 5.0) == 5.0
    assert planner.finish_ms("m", CUT, large) == pytest.approx(9 * 70.0)
    assert planner.prepare_ms("m", SPLIT, large) == pytest.approx(3 * 20.0 + 0.5 * 4_512 / 4_000, rel=1e-2)
    for _ in range(30):  # twice as slow as profiled
        planner.observe_edge("m", LOCAL, "whole", whole_ms)
    assert choose(planner, large).chosen.predicted_ms == pytest.approx(1_200.0, rel=0.05)
    assert choose(planner).chosen.predicted_ms == pytest.approx(200.0, rel=0.05)
    assert planner.finish_ms("m", None, large) == pytest.approx(1_200.0, rel=0.05)


def test_a_reply_whose_bytes_were_told_far_from_the_profiled_sizes_corrects_them() -> None:
    """Profiled with one element, whose 4,000 bytes of output were taken to grow with it: of a million, 4 GB are told.
    They are 8,000 bytes whatever the size."""
    by_n = Elements(extents=(0,))
    growth = Growth(
        monomials=((),),
        extents=(Extent(0, (Step(0, 1, 0, 1),)),),
        whole_work=(1.0,),
        outputs=(by_n,),
        cuts={CUT: CutGrowth(head_work=(0.5,), crossing=(Elements(),))},
    )
    planner, n = connected_planner(), 1_000_000
    card = msgspec.structs.replace(CARD, inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, "n")),), growth=growth)
    profile = msgspec.structs.replace(PROFILE, dims={"n": 1}, sizes=(1,), output_bytes=4_000)
    planner.add_model("m", card, profile, CONTRACT)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    large = RequestFacts(budget_ms=1e9, sizes=(n,), mode=Placement.SPLIT)
    assert choose(planner, large).chosen.stages_ms["down"] > 30_000.0
    planner.observe_reply_bytes("m", large, SPLIT, 8_000)
    decision = choose(planner, large)
    assert planner.reply_bytes("m", SPLIT, large) == pytest.approx(8_000, rel=0.1)
    half_rtt_ms = decision.link["rtt_ms"] / 2
    down_ms = 8_000 * 0.008 / decision.link["down_mbit_s"]
    assert decision.chosen.stages_ms["down"] == pytest.approx(half_rtt_ms + down_ms, rel=0.1)


def test_sizes_far_from_the_profiled_ones_teach_nothing_about_those() -> None:
    planner = Planner()
    by_n = Elements(extents=(0,))
    growth = Growth(
        monomials=(((0, 1),),),
        extents=(Extent(0, (Step(0, 1, 0, 1),)),),
        whole_work=(1.0,),
        outputs=(by_n,),
        cuts={CUT: CutGrowth(head_work=(0.5,), crossing=(by_n,))},
    )
    card = msgspec.structs.replace(CARD, inputs=(TensorSpec(name="x", dtype="FP32", shape=(1, "n")),), growth=growth)
    planner.add_model("m", card, msgspec.structs.replace(PROFILE, dims={"n": 64}, sizes=(64,)), CONTRACT)
    for sizes in ((0,), (64 * 1_000,)):  # nothing at all, and a thousand times as much
        facts = RequestFacts(budget_ms=1e9, sizes=sizes)
        for plan, stage in ((LOCAL, "whole"), (SPLIT, "head"), (SPLIT, "tail")):
            assert planner.as_profiled_ms("m", facts, plan, stage, 0.2) is None
    planner.observe_cloud("m", SPLIT, 1.0, None)
    assert choose(planner).chosen.predicted_ms == pytest.approx(100.0)


def test_times_to_finish_on_the_device_hold_drift_and_slowdown() -> None:
    planner = knowing_planner(slowdown=5.0)
    assert planner.finish_ms("m", None, TENSOR) == pytest.approx(500.0)
    assert planner.finish_ms("m", CUT, TENSOR) == pytest.approx(350.0)
    assert planner.prepare_ms("m", SPLIT, TENSOR) == pytest.approx(5 * (20.0 + 0.5))
    for _ in range(30):
        planner.observe_edge("m", LOCAL, "whole", 1_000.0)
    assert planner.finish_ms("m", None, TENSOR) == pytest.approx(1_000.0, rel=0.05)
    assert planner.finish_ms("m", CUT, TENSOR) == pytest.approx(
        700.0, rel=0.1
    )  # the same drift, without that plan's residual


def planner_with_cut(*, estimated: bool) -> Planner:
    """One whose companion is ready; nothing is known of the link."""
    cuts = tuple(msgspec.structs.replace(cut, estimated=estimated) for cut in PROFILE.cuts)
    planner = Planner()
    planner.add_model("m", CARD, msgspec.structs.replace(PROFILE, cuts=cuts), CONTRACT)
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    planner.segment_ready("m", CUT, 7.0)
    return planner


def forced_split(planner: Planner) -> PlanEstimate:
    split = dataclasses.replace(TENSOR, mode=Placement.SPLIT)
    return planner.decide("m", split, edge_queue_ms=0.0, now_s=1.0).chosen


def test_an_estimated_head_is_less_certain_until_it_was_seen_and_then_as_it_was_seen() -> None:
    planner = planner_with_cut(estimated=True)
    assert forced_split(planner).estimated
    assert not forced_split(planner_with_cut(estimated=False)).estimated
    for _ in range(3):  # 30 ms where 20 were estimated, on a device that is as fast as it was
        planner.observe_edge("m", LOCAL, "whole", 100.0)
        planner.observe_edge("m", SPLIT, "head", 30.0)
    after = forced_split(planner)
    assert not after.estimated
    assert 26.0 < after.stages_ms["head"] < 31.0
    for _ in range(40):
        planner.observe_edge("m", LOCAL, "whole", 100.0)
        planner.observe_edge("m", SPLIT, "head", 30.0)
    assert forced_split(planner).stages_ms["head"] == pytest.approx(30.0, rel=0.03)
    assert planner.finish_ms("m", None, TENSOR) == pytest.approx(100.0, rel=0.05)


def test_of_two_equal_predictions_the_estimated_one_has_the_higher_risk() -> None:
    measured, guessed = (forced_split(planner_with_cut(estimated=estimated)) for estimated in (False, True))
    assert guessed.predicted_ms == measured.predicted_ms
    assert guessed.risk_ms > measured.risk_ms


def test_a_hot_device_hands_its_work_over_and_takes_it_back_when_cool() -> None:
    planner = knowing_planner()
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 90.0, 5.0)
    for n in range(10):
        planner.observe_ping(20.0, n * 0.1)
        planner.observe_transfer(50_000, 40, 60.0, n * 0.1)
    assert choose(planner).chosen.plan == LOCAL
    for _ in range(5):
        planner.observe_edge("m", LOCAL, "whole", 300.0)
    assert choose(planner).chosen.plan == OFFLOAD
    for _ in range(5):
        planner.observe_edge("m", LOCAL, "whole", 100.0)
    assert choose(planner).chosen.plan == LOCAL


def test_replies_teach_how_fast_the_companion_computes() -> None:
    planner = connected_planner()
    for _ in range(10):
        planner.observe_cloud("m", OFFLOAD, 0.0, 30.0)
    assert choose(planner).chosen.stages_ms["tail"] == pytest.approx(30.0, rel=0.1)


def test_a_cut_that_is_opened_later_leaves_what_replies_have_taught_of_others() -> None:
    planner = connected_planner()
    planner.companion_ready("m", 10.0, 0.5)  # its cut is to be opened again
    for _ in range(30):
        planner.observe_cloud("m", OFFLOAD, 0.0, 12.5)
    offloaded = dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)
    before = choose(planner, offloaded).chosen
    assert before.stages_ms["tail"] == pytest.approx(12.5, rel=0.05)
    planner.segment_ready("m", CUT, 7.0)
    assert choose(planner, offloaded).chosen == before


def test_replies_teach_what_decoding_them_costs_here() -> None:
    planner = connected_planner(slowdown=5.0)
    # raw decodes in 0.1 ms per 50 KB here: the 40 bytes of this model's reply should take 0.08 µs, emulation apart
    assert choose(planner).chosen.stages_ms["decode"] == pytest.approx(5 * 40 * 0.1 / 50_000)
    for _ in range(10):
        planner.observe_reply(CARD.digest, down_bytes=40, decode_ms=0.1)
    assert choose(planner).chosen.stages_ms["decode"] == pytest.approx(5 * 0.1, rel=0.1)
    assert choose(planner, PICTURE).chosen.stages_ms["cloud_decode"] == pytest.approx(0.5)  # no picture went there


def test_a_fixed_cost_per_message_is_learned_on_both_sides_within_ten_requests() -> None:
    """Encoding takes 0.3 ms more than profiled (five times that on a slow device), the companion's decoding 0.4 ms: for
    the 4 KB of the split as for the 50 KB of the offload."""
    planner = connected_planner(slowdown=5.0)
    for plan in (SPLIT, OFFLOAD) * 5:
        planner.observe_edge("m", plan, "encode", 5 * (0.3 + 0.5))
        planner.observe_cloud("m", plan, 0.0, None, 0.4 + 0.1 * 0.1)  # profiled 0.1, the companion ten times as fast
        planner.observe_reply(CARD.digest, down_bytes=40, decode_ms=0.1)
    for mode in (Placement.SPLIT, Placement.OFFLOAD):
        found = choose(planner, dataclasses.replace(TENSOR, mode=mode)).chosen
        assert found.stages_ms["encode"] == pytest.approx(4.0, rel=0.1)
        assert found.stages_ms["cloud_decode"] == pytest.approx(0.41, rel=0.1)
        assert sum(found.stages_ms.values()) == pytest.approx(found.predicted_ms)
    local = choose(planner, dataclasses.replace(TENSOR, mode=Placement.LOCAL)).chosen
    assert local.predicted_ms == pytest.approx(5 * 100.0, rel=0.05)
    planner.companion_ready("m", 10.0, 0.5)  # perhaps another one: nothing is known of its decoding
    again = choose(planner, dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)).chosen
    assert again.stages_ms["cloud_decode"] == pytest.approx(0.01)
    assert again.stages_ms["encode"] == pytest.approx(4.0, rel=0.1)


def test_replies_teach_what_a_picture_costs_there() -> None:
    planner = connected_planner()
    for _ in range(20):
        planner.observe_cloud("m", ENCODED, 0.0, 10.0, 20.0)
    forced = RequestFacts(budget_ms=10_000.0, encoded_bytes=5_000, codec="encoded", mode=Placement.OFFLOAD)
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(20.0, rel=0.1)


def tail_ms(planner: Planner, plan: Plan = OFFLOAD, name: str = "m") -> float:
    facts = dataclasses.replace(TENSOR, mode=plan.placement, cut=plan.cut)
    return planner.decide(name, facts, edge_queue_ms=0.0, now_s=100.0).chosen.stages_ms["tail"]


def test_what_the_companion_says_first_of_its_pace_is_what_its_times_hold_for() -> None:
    planner = connected_planner()
    planner.companion_paced(1.6, 0.0, 1.0)
    assert tail_ms(planner) == pytest.approx(10.0, rel=0.01)
    planner.companion_paced(8.0, 0.3, 2.0)
    assert tail_ms(planner) == pytest.approx(50.0, rel=0.01)


@pytest.mark.parametrize("way", ["", "another"])
def test_times_measured_while_the_companion_is_slow_are_not_made_longer_by_its_word(way: str) -> None:
    """1.1 ms a piece, then 3.3, then a new connection; the whole takes 30 ms there instead of 10."""
    planner = connected_planner()
    planner.companion_paced(1.1, 0.0, 1.0)
    planner.companion_paced(3.3, 0.3, 2.0)
    planner.connected(max_message_bytes=1 << 28, way=way)
    planner.companion_ready("m", 30.0, 0.5)
    assert tail_ms(planner) == pytest.approx(30.0, rel=0.01)
    planner.companion_paced(3.3, 0.0, 11.0)
    assert tail_ms(planner) == pytest.approx(30.0, rel=0.01)
    planner.companion_paced(1.1, 9.0, 20.0)
    assert tail_ms(planner) == pytest.approx(10.0, rel=0.01)


def test_a_model_and_a_cut_that_are_ready_later_are_taken_at_the_pace_of_then() -> None:
    planner = connected_planner()
    planner.companion_paced(1.0, 0.0, 1.0)
    planner.companion_paced(3.0, 0.1, 2.0)
    planner.add_model("n", CARD, PROFILE, CONTRACT)
    planner.companion_ready("n", 30.0, 0.5)
    planner.segment_ready("m", CUT, 21.0)
    assert tail_ms(planner, name="n") == pytest.approx(30.0, rel=0.01)
    assert tail_ms(planner, SPLIT) == pytest.approx(21.0, rel=0.01)
    planner.companion_paced(1.0, 9.0, 12.0)
    assert tail_ms(planner, name="n") == pytest.approx(10.0, rel=0.01)
    assert tail_ms(planner, SPLIT) == pytest.approx(7.0, rel=0.01)


def test_a_picture_that_was_slow_there_is_quick_again_with_whatever_else_runs_there() -> None:
    planner = connected_planner()
    for tail_ms, picture_ms in ((10.0, 0.5),) * 10 + ((50.0, 2.5),) * 4:  # five times slower, all that it does
        planner.observe_cloud("m", ENCODED, 0.0, tail_ms, picture_ms)
    forced = RequestFacts(budget_ms=10_000.0, encoded_bytes=5_000, codec="encoded", mode=Placement.OFFLOAD)
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(2.5, rel=0.2)
    for _ in range(3):
        planner.observe_cloud("m", SPLIT, 0.0, 7.0)  # as profiled; no picture went there
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(0.5, rel=0.2)


def test_a_load_that_a_picture_met_there_is_gone_when_the_companion_says_so() -> None:
    """One request meets it before the companion says so: five times slower, tail and picture."""
    planner = connected_planner()
    planner.companion_paced(1.0, 0.0, 1.0)
    for n, (tail_ms, picture_ms) in enumerate(((10.0, 0.5),) * 3 + ((50.0, 2.5),)):
        planner.observe_transfer(5_000, 40, 2.0, 1.0 + 0.1 * n)
        planner.observe_cloud("m", ENCODED, 0.0, tail_ms, picture_ms)
    planner.companion_paced(5.0, 0.2, 1.35)
    forced = RequestFacts(budget_ms=10_000.0, encoded_bytes=5_000, codec="encoded", mode=Placement.OFFLOAD)
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(2.5, rel=0.2)
    planner.companion_paced(1.0, 0.2, 21.0)
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(0.5, rel=0.2)


def test_what_a_call_adds_to_a_short_tail_is_not_taken_for_a_load_that_its_picture_escaped() -> None:
    planner = connected_planner()
    planner.companion_ready("m", 0.3, 0.5)
    for _ in range(10):
        planner.observe_cloud("m", ENCODED, 0.0, 1.0, 5.0)
    forced = RequestFacts(budget_ms=10_000.0, encoded_bytes=5_000, codec="encoded", mode=Placement.OFFLOAD)
    assert choose(planner, forced).chosen.stages_ms["cloud_decode"] == pytest.approx(5.0, rel=0.15)
