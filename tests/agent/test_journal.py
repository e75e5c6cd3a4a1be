"""Sums of the journal: what it says to who holds it against a contract, and how well requests were predicted."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from agent.intake import InferenceRequest
from agent.journal import FORGOTTEN, KEPT, Entry, Journal
from agent.metrics import Metrics
from agent.planner import Planner
from agent.totals import RECENT
from split.errors import DeadlineExceeded
from split.ids import CutId
from split.plan.plan import LOCAL, Decision, Placement, Plan, PlanEstimate, RequestFacts
from split.profiles.measured import CodecCosts, CutCosts
from tests.agent.planner_world import CARD, CONTRACT, PROFILE, TENSOR

SPLIT = Plan(placement=Placement.SPLIT, cut=CutId("0123456789ab"), codec="raw")


def entry(
    stages_ms: Mapping[str, float],
    *,
    total_ms: float = 10.0,
    plan: Plan = LOCAL,
    predicted_ms: Mapping[str, float] | None = None,
    predicted_total_ms: float = 10.0,
    tried: bool = False,
) -> Entry:
    chosen = PlanEstimate(
        plan=plan,
        predicted_ms=predicted_total_ms,
        risk_ms=predicted_total_ms,
        stages_ms=predicted_ms or {},
        bytes=0,
        fidelity=None,
        allowed=True,
    )
    return Entry(
        model="m",
        received_at_s=0.0,
        deadline_ms=1000.0,
        facts=RequestFacts(budget_ms=1000.0),
        decision=Decision(chosen=chosen, runners_up=(), reason_of=lambda: "r", candidates=1, tried=tried),
        total_ms=total_ms,
        ran=plan,
        stages_ms=stages_ms,
    )


def page(journal: Journal) -> list[str]:
    return Metrics(journal, version="1", gauges={}, link=lambda: None).render().decode().splitlines()


def test_before_the_first_answer_nothing_was_measured() -> None:
    nothing = {"p50_ms": None, "p99_ms": None, "failed_ratio": None, "per_s": None}
    assert Journal().measured("m") == {"requests": 0} | nothing


def test_p99_is_the_latency_that_one_of_a_hundred_exceeds_among_the_last_answers() -> None:
    journal = Journal()
    for number in range(3 * RECENT):
        journal.answered(f"r{number}", entry({"whole": 1.0}, total_ms=float(number)))
    found = journal.measured("m")
    # The last 256 took 512 … 767 ms: the 254th (⌈0.99 · 256⌉) is 765, the median between 639 and 640.
    assert (found["requests"], found["p50_ms"], found["p99_ms"]) == (768, 639.5, 765.0)


def test_the_longest_of_device_network_and_companion_says_how_many_requests_go_through() -> None:
    journal = Journal()
    here = {"queue": 500.0, "head": 3.0, "encode": 1.0, "decode": 1.0}
    for number in range(2):
        away = {"network": 6.0, "cloud_queue": 400.0, "cloud_decode": 1.0, "tail": 9.0 if number else 15.0}
        journal.answered(f"r{number}", entry(here | away, plan=SPLIT, predicted_ms={"up": 4.0, "down": 2.0}))
    # Companion: (16 + 10) / 2 = 13 ms a request; device 5, link up 4, down 2. Waiting keeps nobody else busy.
    assert journal.measured("m")["per_s"] == pytest.approx(1000 / 13, abs=0.001)


def test_a_round_trip_keeps_nobody_from_the_next_request() -> None:
    journal = Journal()
    # 5 KB at 4 Mbit/s leave in 10 ms, of which the round trip of 100 ms is no part: 100 requests a second, not 9.
    away = entry({"head": 2.0, "network": 110.0, "tail": 3.0}, plan=SPLIT, predicted_ms={"up": 60.0, "down": 50.0})
    decision = dataclasses.replace(away.decision, link={"rtt_ms": 100.0})
    journal.answered("a", dataclasses.replace(away, decision=decision))
    assert journal.measured("m")["per_s"] == pytest.approx(100.0)


def test_a_request_without_an_answer_counts_as_one_that_takes_for_ever() -> None:
    journal = Journal()
    for number in range(98):
        journal.answered(f"r{number}", entry({"whole": 1.0}, total_ms=10.0))
    done = entry({"whole": 1.0})
    error = DeadlineExceeded("no answer within 1000 ms")
    model = SimpleNamespace(name="m")
    request = SimpleNamespace(id="f", model=model, received_at_s=0.0, deadline_at_s=1.0, facts=done.facts)
    journal.failed(cast(InferenceRequest, request), done.decision, error, 1000.0)
    found = journal.measured("m")
    # 99 requests: the 99th of them (⌈0.99 · 99⌉) is the one that got none.
    assert (found["requests"], found["p50_ms"], found["p99_ms"]) == (98, 10.0, None)
    assert found["failed_ratio"] == pytest.approx(1 / 99, abs=1e-4)
    journal.answered("r98", entry({"whole": 1.0}, total_ms=30.0))
    assert journal.measured("m")["p99_ms"] == 30.0
    assert journal.p50_ms("m") == 10.0


def test_metrics_hold_each_stage_against_its_prediction() -> None:
    journal = Journal()
    told = {"head": 10.0, "up": 12.0, "down": 8.0, "tail": 4.0, "encode": 0.05}
    came = {"head": 12.0, "network": 16.0, "tail": 4.0, "encode": 9.0, "queue": 7.0}
    journal.answered("a", entry(came, total_ms=48.0, plan=SPLIT, predicted_ms=told, predicted_total_ms=40.0))
    journal.answered("b", entry({"whole": 8.0}, total_ms=8.0, predicted_ms={"head": 10.0}, predicted_total_ms=10.0))
    lines = page(journal)

    def value(name: str, stage: str, **labels: str) -> float:
        inside = ",".join(f'{key}="{text}"' for key, text in sorted((labels | {"model": "m", "stage": stage}).items()))
        (found,) = [line for line in lines if line.startswith(f"{name}{{{inside}}} ")]
        return float(found.split()[-1])

    assert value("isthmus_prediction_ratio_sum", "head") == pytest.approx(1.2)
    assert value("isthmus_prediction_ratio_sum", "network") == pytest.approx(16 / 20)
    assert value("isthmus_prediction_ratio_sum", "tail") == 1.0
    assert value("isthmus_prediction_ratio_sum", "whole") == pytest.approx(0.8)
    assert value("isthmus_prediction_ratio_sum", "total") == pytest.approx(1.2 + 0.8)
    assert value("isthmus_prediction_ratio_bucket", "total", le="0.8") == 1
    assert value("isthmus_prediction_ratio_bucket", "total", le="1.1") == 1
    assert value("isthmus_prediction_ratio_bucket", "total", le="1.25") == 2
    assert value("isthmus_prediction_ratio_count", "total") == 2
    # |48 − 40| / 48 and |8 − 10| / 8: a MAPE of 20.8 %.
    assert value("isthmus_prediction_error_ratio_sum", "total") == pytest.approx(8 / 48 + 2 / 8)
    assert value("isthmus_prediction_error_ratio_count", "total") == 2
    assert not any('stage="encode"' in line or 'stage="queue"' in line for line in lines if "prediction" in line)


def test_of_a_batch_in_parts_the_network_is_held_against_nothing() -> None:
    """It is the first part's alone; the prediction is the whole's."""
    journal = Journal()
    one = entry({"head": 40.0, "network": 16.0}, plan=SPLIT, predicted_ms={"head": 40.0, "up": 50.0, "down": 14.0})
    decision = dataclasses.replace(one.decision, chosen=dataclasses.replace(one.decision.chosen, parts=4))
    journal.answered("a", dataclasses.replace(one, decision=decision))
    assert set(journal.totals["m"].predicted) == {"total", "head"}


def many_plans(cuts: int) -> Planner:
    """A planner with a companion and three codecs at each of so many cuts."""
    ids = [CutId(f"{number:012x}") for number in range(cuts)]
    codecs = tuple(CodecCosts(codec=c, bytes=4_000, encode_ms=0.5, decode_ms=0.1) for c in ("raw", "shuffle", "zstd"))
    card = msgspec.structs.replace(CARD, cuts=tuple(msgspec.structs.replace(CARD.cuts[0], id=cut) for cut in ids))
    costs = tuple(CutCosts(cut=cut, head_ms=20.0, tail_ms=70.0, codecs=codecs) for cut in ids)
    planner = Planner()
    planner.add_model("m", card, msgspec.structs.replace(PROFILE, cuts=costs), CONTRACT)
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    for cut in ids:
        planner.segment_ready("m", cut, 7.0)
    for number in range(10):
        planner.observe_transfer(50_000, 40, 5.0, number * 0.1)
    return planner


def decided(number: int, planner: Planner) -> Entry:
    """A request that finds a head learned anew, so that its table is no other's."""
    cut = Plan(placement=Placement.SPLIT, cut=CutId(f"{0:012x}"), codec="raw")
    planner.observe_edge("m", cut, "head", 26.0 if number % 2 else 15.0)
    decision = planner.decide("m", TENSOR, edge_queue_ms=0.0, now_s=1.0)
    stages_ms = {stage: ms + number for stage, ms in decision.chosen.stages_ms.items()}
    return dataclasses.replace(entry(stages_ms, plan=decision.chosen.plan), decision=decision)


def test_what_is_kept_of_requests_stays_under_eight_megabytes_with_a_hundred_plans() -> None:
    planner, journal = many_plans(33), Journal()
    assert decided(0, planner).decision.candidates >= 100
    tracemalloc.start()
    try:
        for number in range(KEPT + 50):
            journal.answered(f"r{number}", decided(number, planner))
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 8e6


def test_an_older_request_keeps_its_reason_and_says_why_it_does_not_tell_what_it_was_not() -> None:
    planner, journal = many_plans(1), Journal()
    first, last = (decided(number, planner) for number in range(2))
    for number in range(KEPT + 1):
        journal.answered(f"r{number}", {1: first, KEPT: last}.get(number, entry({"whole": 1.0})))
    assert journal.explain("r0") is None
    old, new = journal.explain("r1"), journal.explain(f"r{KEPT}")
    assert old is not None
    assert new is not None
    assert old["reason"] == first.decision.reason != "r"
    assert new["runners_up"]
    assert not old["runners_up"]
    assert new["why_not_split"] != old["why_not_split"] == FORGOTTEN


def test_what_ran_otherwise_than_chosen_says_nothing_of_the_prediction() -> None:
    journal = Journal()
    late = dataclasses.replace(entry({"head": 5.0}, plan=SPLIT, predicted_ms={"head": 1.0}), ran=LOCAL, fallback="late")
    journal.answered("a", late)
    assert not any("isthmus_prediction_ratio_count" in line for line in page(journal))


def test_finishes_beside_the_companion_are_counted_by_who_answered_first() -> None:
    journal = Journal()
    there = entry({"head": 5.0, "network": 9.0}, plan=SPLIT)
    here = dataclasses.replace(there, ran=LOCAL, fallback="late", sent=True)
    for number, one in enumerate([there, dataclasses.replace(there, doubled_ms=4.0), here, here]):
        journal.answered(f"r{number}", one)
    journal.answered("unsent", dataclasses.replace(here, sent=False))
    lines = page(journal)
    assert 'isthmus_hedges_total{model="m",outcome="companion"} 1.0' in lines
    assert 'isthmus_hedges_total{model="m",outcome="device"} 2.0' in lines


def test_requests_that_explore_are_counted() -> None:
    journal = Journal()
    for number in range(3):
        journal.answered(f"r{number}", entry({}, tried=number == 1))
    assert 'isthmus_explored_requests_total{model="m"} 1.0' in page(journal)
