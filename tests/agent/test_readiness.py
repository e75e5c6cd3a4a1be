"""agent/readiness.py through the planner: what of a model may be used at the companion, and when no more."""

from __future__ import annotations

from split.plan.plan import LOCAL, RequestFacts
from tests.agent.planner_world import (
    CARD,
    CONTRACT,
    ENCODED,
    PICTURE,
    PROFILE,
    choose,
    connected_planner,
    knowing_planner,
)
from tests.agent.tiny_card import CUT, OFFLOAD, SPLIT


def test_a_fast_companion_gets_the_work_and_loses_it_when_it_is_lost() -> None:
    planner = connected_planner()
    assert choose(planner).chosen.plan == OFFLOAD
    assert choose(planner, PICTURE).chosen.plan == ENCODED
    planner.companion_lost("the companion went away")
    decision = choose(planner)
    assert decision.chosen.plan == LOCAL
    assert "the companion went away" in decision.reason


def test_what_is_ready_survives_a_silence() -> None:
    planner = connected_planner()
    planner.companion_silent("nothing is heard")
    decision = choose(planner)
    assert decision.chosen.plan == LOCAL
    assert "nothing is heard" in decision.reason
    planner.companion_back(1.0)
    assert choose(planner, now_s=1.5).chosen.plan == OFFLOAD


def test_a_model_made_ready_during_a_silence_ends_neither_the_silence_nor_what_others_have() -> None:
    planner = connected_planner()
    planner.add_model("n", CARD, PROFILE, CONTRACT)
    planner.companion_silent("nothing is heard")
    planner.companion_ready("n", 10.0, 0.5)
    assert planner.local_only_reason("m") == planner.local_only_reason("n") == "nothing is heard"
    planner.companion_back(1.0)
    assert planner.local_only_reason("m") == planner.local_only_reason("n") == ""
    forced = RequestFacts(budget_ms=10_000.0, cut=CUT)
    assert choose(planner, forced).chosen.plan == SPLIT


def test_what_still_comes_from_a_lost_connection_makes_nothing_ready_on_the_next() -> None:
    planner = connected_planner()
    planner.companion_lost("it says goodbye")
    planner.companion_ready("m", 10.0, 0.5)
    planner.companion_back(1.0)
    assert planner.local_only_reason("m") == "it says goodbye"
    planner.connected(max_message_bytes=1 << 28)
    assert planner.local_only_reason("m") == "the companion is not ready for this model yet"


def test_a_new_connection_must_make_every_model_and_cut_ready_anew() -> None:
    planner = connected_planner()
    planner.add_model("n", CARD, PROFILE, CONTRACT)
    planner.companion_ready("n", 10.0, 0.5)
    planner.companion_lost("gone")
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("n", 10.0, 0.5)
    assert planner.local_only_reason("n") == ""
    assert planner.local_only_reason("m") == "the companion is not ready for this model yet"
    planner.companion_ready("m", 10.0, 0.5)
    forced = RequestFacts(budget_ms=10_000.0, cut=CUT)
    assert choose(planner, forced).chosen.plan == LOCAL
    planner.segment_ready("m", CUT, 7.0)
    assert choose(planner, forced).chosen.plan == SPLIT


def test_a_companion_that_is_distrusted_stays_so_until_the_model_is_known_or_calibrated_anew() -> None:
    planner = knowing_planner()

    def why_not(peer: str) -> str:
        planner.connected(max_message_bytes=1 << 20, peer=peer)
        planner.companion_ready("m", 2.0, 0.0)
        return planner.local_only_reason("m")

    assert why_not("attic") == why_not("cellar") == ""
    planner.distrust("m", "attic", "its answers differ")
    assert (why_not("attic"), why_not("cellar"), why_not("attic")) == ("its answers differ", "", "its answers differ")
    planner.recalibrated("m", CARD, PROFILE, CONTRACT)
    assert why_not("attic") == ""
    planner.distrust("m", "attic", "its answers differ")
    planner.add_model("m", CARD, PROFILE, CONTRACT)
    assert why_not("attic") == ""
    planner.distrust("m", "attic", "its answers differ")
    planner.add_model("n", CARD, PROFILE, CONTRACT)
    planner.companion_ready("n", 2.0, 0.0)
    assert planner.local_only_reason("n") == "", "it is of one model"


def test_of_distrusted_companions_so_many_are_remembered_and_the_first_is_forgotten() -> None:
    planner = knowing_planner()
    for number in range(17):
        planner.distrust("m", f"companion {number}", "its answers differ")
    found = []
    for number in range(17):
        planner.connected(max_message_bytes=1 << 20, peer=f"companion {number}")
        planner.companion_ready("m", 2.0, 0.0)
        found.append(planner.local_only_reason("m"))
    assert found == ["", *["its answers differ"] * 16]


def test_a_model_that_may_not_be_shared_stays_here_until_it_is_ready_again() -> None:
    planner = connected_planner()
    planner.forbid_remote("m", "golden outputs differ")
    decision = choose(planner)
    assert decision.chosen.plan == LOCAL
    assert "golden outputs differ" in decision.reason
    planner.forbid_remote("m", None)
    assert choose(planner).chosen.plan == OFFLOAD


def test_pictures_travel_as_tensors_where_both_sides_decode_differently() -> None:
    planner = connected_planner()
    planner.forbid_encoded("m", "the companion decodes pictures otherwise")
    assert choose(planner, PICTURE).chosen.plan == OFFLOAD
    planner.forbid_encoded("m", None)
    assert choose(planner, PICTURE).chosen.plan == ENCODED
