"""Decisions over a table small enough to be worked out by hand: one model, one cut, round numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from split.errors import InvalidRequest
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step
from split.ids import CutId
from split.plan.decide import decide, estimate_all
from split.plan.exploring import Explored, Explorer
from split.plan.observation import Flags, Floats, LinkEstimate, Observation, Opening
from split.plan.plan import LOCAL, Placement, Plan, PlanEstimate, RequestFacts
from split.plan.predict import predict
from split.plan.table import PlanTable
from split.profiles.contract import Behaviour, Contract, Data, Fallback, Fidelity, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec
from tests.split import plan_world
from tests.split.plan_world import EARLY, LATE, LINK, cut_card, estimates

SURE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
CARD = msgspec.structs.replace(
    plan_world.CARD,
    inputs=(*plan_world.CARD.inputs, TensorSpec(name="mask", dtype="FP32", shape=(1, 8))),
    outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 75)), TensorSpec(name="z", dtype="FP32", shape=(1, 25))),
    cuts=(
        cut_card(EARLY, 0.2, boundary=10_000, tail_inputs=("mask",), tail_outputs=("y", "z")),
        cut_card(LATE, 0.7, head_outputs=("z",)),
    ),
)
PROFILE = msgspec.structs.replace(
    plan_world.PROFILE,
    input_codecs=(
        *plan_world.PROFILE.input_codecs,
        CodecCosts(codec="int8", bytes=25_000, encode_ms=3.0, decode_ms=1.0, fidelity={"kl": 0.5}),
    ),
    cuts=(
        msgspec.structs.replace(
            plan_world.PROFILE.cuts[0],
            codecs=(
                *plan_world.PROFILE.cuts[0].codecs,
                CodecCosts(codec="fp16", bytes=20_000, encode_ms=1.0, decode_ms=1.0),
            ),
        ),
        *plan_world.PROFILE.cuts[1:],
    ),
)


def contract(**data: object) -> Contract:
    inputs = (InputContract(name="x", encoded=ImageSpec(resize=8, crop=8)), InputContract(name="mask"))
    known: dict[str, object] = {
        "inputs": inputs,
        "codecs": ("raw", "fp16", "int8", "encoded"),
        "fidelity": Fidelity(measure="kl", bound=0.05),
    }
    return Contract(data=Data(**{**known, **data}))  # type: ignore[arg-type]  # keyword arguments chosen by each test


TABLE = PlanTable.build(CARD, PROFILE, contract())
REMOTE = dataclasses.replace(plan_world.REMOTE, opened=np.ones(len(TABLE), dtype=np.bool_))
STATE = dataclasses.replace(plan_world.STATE, remote=REMOTE)
ALONE = dataclasses.replace(STATE, remote=None, remote_why_not="no companion is connected")
FACTS = RequestFacts(budget_ms=1e6)
PICTURE = RequestFacts(budget_ms=1e6, encoded_bytes=6_000)


def split_at(name: CutId, codec: str) -> Plan:
    return Plan(placement=Placement.SPLIT, cut=name, codec=codec)


def offload(codec: str) -> Plan:
    return Plan(placement=Placement.OFFLOAD, codec=codec)


@pytest.mark.parametrize(
    ("plan", "facts", "expected_ms"),
    [
        # queue 5 + α·slowdown·whole 1.25·2·100
        (LOCAL, FACTS, 5 + 250),
        # … + image on the device 2·1.5·7
        (LOCAL, PICTURE, 5 + 21 + 250),
        # queue + head 2.5·20 + encode 2·0.5 + rtt 10 + up 40 + queue 3 + decode 1.5·0.5·0.25 + tail 1.5·80
        #   + down 400·0.002 + reply 2·(400/100000·2.0)
        (split_at(EARLY, "raw"), FACTS, 5 + 50 + 1 + 10 + 40 + 3 + 0.1875 + 120 + 0.8 + 0.016),
        # only y comes back: three quarters of the 400 bytes
        (split_at(LATE, "raw"), FACTS, 5 + 175 + 1 + 10 + 10 + 3 + 0.1875 + 45 + 0.6 + 0.012),
        (offload("raw"), FACTS, 5 + 2 + 10 + 100 + 3 + 1.5 + 150 + 0.8 + 0.016),
        # a picture is decoded here before its tensor is offloaded
        (offload("raw"), PICTURE, 5 + 21 + 2 + 10 + 100 + 3 + 1.5 + 150 + 0.8 + 0.016),
        # the picture travels: its own 6000 bytes, decoded there in 4
        (offload("encoded"), PICTURE, 5 + 10 + 6 + 3 + 4 + 150 + 0.8 + 0.016),
    ],
)
def test_predicted_latency_is_the_sum_worked_out_by_hand(plan: Plan, facts: RequestFacts, expected_ms: float) -> None:
    estimate = estimates(TABLE, STATE, facts)[plan]
    assert estimate.predicted_ms == pytest.approx(expected_ms)
    assert sum(estimate.stages_ms.values()) == pytest.approx(expected_ms)


def test_risk_adds_two_standard_deviations_of_independent_parts() -> None:
    link = dataclasses.replace(LINK, covariance=(4.0, 0.0, 0.0, 1e-8, 0.0, 0.0))
    remote = dataclasses.replace(REMOTE, link=link, beta_sigma=0.1, queue_sigma_ms=1.0)
    state = dataclasses.replace(STATE, alpha_sigma=0.2, remote=remote)
    found = estimates(TABLE, state, PICTURE)
    # local: 0.2·250; split: head 0.2·50, tail 0.1·120, rtt 2, queue 1, up 1e-4·40000; encoded: tail 15, up 0.6
    assert found[LOCAL].risk_ms - found[LOCAL].predicted_ms == pytest.approx(2 * 50)
    early = found[split_at(EARLY, "raw")]
    assert early.risk_ms - early.predicted_ms == pytest.approx(2 * np.sqrt(10**2 + 12**2 + 2**2 + 1 + 4**2))
    encoded = found[offload("encoded")]
    assert encoded.risk_ms - encoded.predicted_ms == pytest.approx(2 * np.sqrt(15**2 + 2**2 + 1 + 0.6**2))


def test_a_request_of_other_sizes_is_decided_at_the_costs_of_those() -> None:
    inputs = (TensorSpec(name="x", dtype="FP32", shape=(1, "n")), TensorSpec(name="mask", dtype="FP32", shape=(1,)))
    by_n = Elements(extents=(0,))
    growth = Growth(
        monomials=(((0, 1),),),
        extents=(Extent(0, (Step(0, 1, 0, 1),)),),
        whole_work=(10.0,),
        outputs=(by_n, by_n),
        cuts={
            EARLY: CutGrowth(head_work=(2.0,), crossing=(by_n, by_n)),
            LATE: CutGrowth(head_work=(7.0,), crossing=(by_n,)),
        },
    )
    card = msgspec.structs.replace(CARD, inputs=inputs, growth=growth)
    table = PlanTable.build(card, msgspec.structs.replace(PROFILE, dims={"n": 25_000}, sizes=(25_000,)), contract())
    facts = RequestFacts(budget_ms=1e6, sizes=(75_000,))
    found = estimates(table, STATE, facts)
    assert found[LOCAL].predicted_ms == pytest.approx(5 + 3 * 250)
    assert found[offload("raw")].bytes == pytest.approx(300_000, abs=64)
    assert found[offload("raw")].predicted_ms == pytest.approx(
        5 + 13 + 3 * (2 + 100 + 1.5 + 150 + 0.8 + 0.016), abs=0.1
    )
    decision = decide(table, STATE, facts)
    assert decision.chosen == found[decision.chosen.plan]
    alone = dataclasses.replace(STATE, remote=None, remote_why_not="no companion")
    assert decide(table, alone, facts).chosen.predicted_ms == pytest.approx(5 + 3 * 250)


def test_chosen_is_the_least_predicted_and_runners_up_follow_in_order() -> None:
    decision = decide(TABLE, STATE, PICTURE)
    assert decision.chosen.plan == offload("encoded")
    runners_up = [estimate.predicted_ms for estimate in decision.runners_up]
    assert runners_up == sorted(runners_up)
    assert all(estimate.allowed for estimate in decision.runners_up)
    assert decision.chosen.predicted_ms <= runners_up[0]
    assert decision.candidates == len(TABLE)
    assert decision.link["up_mbit_s"] == pytest.approx(8.0)  # 0.001 ms a byte = 1 MB/s


def test_without_companion_local_is_chosen_and_the_reason_says_why() -> None:
    decision = decide(TABLE, ALONE, PICTURE)
    assert decision.chosen.plan == LOCAL
    assert "no companion is connected" in decision.reason
    assert len(decision.runners_up) == 0
    assert decision.link == {}


# -- thresholds -----------------------------------------------------------------------------------------------------


def with_gain(gain_ms: float, incumbent: Plan, *, sigma_ms: float = 0.0) -> tuple[PlanTable, Observation]:
    """Local takes 100 ms, offload raw `gain_ms` less; nothing else is fast."""
    link = LinkEstimate(
        rtt_ms=100.0 - gain_ms,
        up_ms_per_byte=1e-9,
        down_ms_per_byte=1e-9,
        covariance=(sigma_ms**2, 0, 0, 0, 0, 0),
        age_s=0,
    )
    head = np.full(len(TABLE), 1e4)
    head[TABLE.row_of[LOCAL]] = 100.0
    head[TABLE.row_of[offload("raw")]] = 0.0
    table = TABLE.with_compute(head_ms=head, tail_ms=np.zeros(len(TABLE)))
    table.costs[[2, 6, 8]] = 0.0  # encode, decode, reply
    table.spread[1:] = 0.0
    remote = dataclasses.replace(REMOTE, link=link, queue_ms=0.0, queue_sigma_ms=0.0)
    state = dataclasses.replace(
        STATE, edge_queue_ms=0.0, slowdown=1.0, alpha=1.0, remote=remote, incumbent=table.row_of[incumbent]
    )
    return table, state


@pytest.mark.parametrize(
    ("incumbent", "gain_ms", "sigma_ms", "chosen"),
    [
        (LOCAL, 2.9, 0.0, LOCAL),  # 3 % of 100 ms are not reached
        (LOCAL, 3.1, 0.0, offload("raw")),
        (offload("raw"), 0.1, 0.0, offload("raw")),
        (offload("raw"), -0.1, 0.0, LOCAL),  # back to local at once
        (LOCAL, 4.9, 20.0, LOCAL),  # a quarter of the added uncertainty is not reached
        (LOCAL, 5.1, 20.0, offload("raw")),
        (offload("raw"), 4.9, 20.0, offload("raw")),  # staying adds no uncertainty
    ],
)
def test_a_challenger_must_gain_more_than_the_threshold(
    incumbent: Plan, gain_ms: float, sigma_ms: float, chosen: Plan
) -> None:
    table, state = with_gain(gain_ms, incumbent, sigma_ms=sigma_ms)
    assert decide(table, state, FACTS).chosen.plan == chosen


def test_an_incumbent_that_may_not_run_any_more_is_left_without_a_threshold() -> None:
    table, state = with_gain(1.0, offload("int8"))
    assert decide(table, state, FACTS).chosen.plan == offload("raw")


@pytest.mark.parametrize(
    ("budget_ms", "chosen"),
    [
        (131.0, offload("raw")),  # 90 expected, 130 at two sigmas
        (129.0, LOCAL),  # 100 ms for sure
        (99.0, LOCAL),  # nothing is sure: the least risk
    ],
)
def test_a_plan_whose_risk_is_over_the_budget_gives_way_to_a_sure_one(budget_ms: float, chosen: Plan) -> None:
    table, state = with_gain(10.0, offload("raw"), sigma_ms=20.0)
    decision = decide(table, state, dataclasses.replace(FACTS, budget_ms=budget_ms))
    assert decision.chosen.plan == chosen


# Ways out by hand, queue 5, device 2.5 × the table, what is missing + 5 %, + 8 ms:
#   early int8 5 + 50 + 4 + 210 + 8 = 277 (203 expected) · early raw 5 + 50 + 1 + 210 + 8 = 274 (230)
#   late raw 5 + 175 + 1 + 78.75 + 8 = 267.75 (250) · local 255, which needs none
# With a picture, 21 ms more each, and encoded 5 + 21 + 262.5 + 8 = 296.5 (180).
@pytest.mark.parametrize(
    ("facts", "budget_ms", "chosen"),
    [
        (FACTS, 277.1, split_at(EARLY, "int8")),
        (FACTS, 276.9, split_at(EARLY, "raw")),
        (FACTS, 273.9, split_at(LATE, "raw")),
        (FACTS, 267.7, LOCAL),
        (FACTS, 255.1, LOCAL),
        (PICTURE, 296.6, offload("encoded")),
        (PICTURE, 296.4, split_at(EARLY, "raw")),
    ],
)
def test_a_plan_that_could_not_be_finished_here_in_time_gives_way_to_one_that_could(
    facts: RequestFacts, budget_ms: float, chosen: Plan
) -> None:
    decision = decide(TABLE, STATE, dataclasses.replace(facts, budget_ms=budget_ms))
    assert decision.chosen.plan == chosen
    assert ("should the companion fail" in decision.reason) is (budget_ms not in (277.1, 296.6))


def test_where_no_plan_has_a_way_out_the_best_chance_is_taken_and_the_reason_says_so() -> None:
    decision = decide(TABLE, STATE, dataclasses.replace(FACTS, budget_ms=254.0))
    assert decision.chosen.plan == split_at(EARLY, "int8")
    assert "no plan is sure to be answered here within 254.0 ms" in decision.reason


def test_a_forced_plan_is_respected_without_a_way_out_too() -> None:
    decision = decide(TABLE, STATE, force(cut=LATE, budget_ms=255.1))
    assert decision.chosen.plan == split_at(LATE, "raw")
    assert "should the companion fail" in decision.reason


def test_an_incumbent_without_a_way_out_is_left_without_a_threshold() -> None:
    table, state = with_gain(1.0, offload("raw"))
    # local takes 100 ms; offload 99, but 1.05 · 100 + 8 ms should the companion fail
    assert decide(table, state, dataclasses.replace(FACTS, budget_ms=114.0)).chosen.plan == offload("raw")
    assert decide(table, state, dataclasses.replace(FACTS, budget_ms=112.0)).chosen.plan == LOCAL


def opening(run: dict[Plan, float], finish: dict[Plan, float] | None = None) -> Opening:
    return Opening(
        run_ms=np.array([run.get(plan, 0.0) for plan in TABLE.plans]),
        finish_ms=np.array([(finish or {}).get(plan, 0.0) for plan in TABLE.plans]),
    )


def test_opening_a_closed_segment_is_part_of_what_a_plan_costs_and_of_its_way_out() -> None:
    best = decide(TABLE, STATE, FACTS).chosen
    assert best.plan.placement is Placement.SPLIT
    cold = dataclasses.replace(STATE, opening=opening({best.plan: 4.0}, {best.plan: 3.0}))
    found = estimates(TABLE, cold, FACTS)[best.plan]
    assert found.predicted_ms == pytest.approx(best.predicted_ms + 4.0)
    assert found.risk_ms == pytest.approx(best.risk_ms + 4.0)
    assert found.stages_ms["activate"] == 4.0
    assert sum(found.stages_ms.values()) == pytest.approx(found.predicted_ms)
    row = TABLE.row_of[best.plan]
    before, now = (predict(TABLE, state, FACTS).way_out_ms[row] for state in (STATE, cold))
    assert now == pytest.approx(before + 4.0 + 2.0 * 3.0)  # what finishes is opened on the worker, which is slowed down


def test_where_opening_costs_more_than_the_plan_gains_the_next_best_runs_and_the_cut_is_worth_opening() -> None:
    best, second = (estimate.plan for estimate in (decide(TABLE, STATE, FACTS).chosen, runner_up(STATE)))
    cold = dataclasses.replace(STATE, opening=opening({best: 1000.0}))
    decision = decide(TABLE, cold, FACTS)
    assert decision.chosen.plan == second
    assert decision.worth_opening == best.cut
    assert decide(TABLE, STATE, FACTS).worth_opening is None  # it is open
    hurried = dataclasses.replace(FACTS, budget_ms=decide(TABLE, STATE, FACTS).chosen.predicted_ms - 1.0)
    assert decide(TABLE, cold, hurried).worth_opening is None  # it would be late, opened or not


def test_a_tail_that_is_closed_is_worth_opening_for_the_plan_that_runs() -> None:
    best = decide(TABLE, STATE, FACTS).chosen.plan
    decision = decide(TABLE, dataclasses.replace(STATE, opening=opening({}, {best: 5.0})), FACTS)
    assert decision.chosen.plan == best
    assert decision.worth_opening == best.cut


class Tries(Explorer):
    """Always this plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(np.array([one != LOCAL for one in TABLE.plans]))
        self._row = TABLE.row_of[plan]

    def choose(self, row: int, value_ms: Floats, may_try: Callable[[], Flags]) -> Explored:
        return Explored(row=self._row, cost_ms=1.0, why="as told")


def test_what_is_worth_opening_is_told_by_the_best_plan_not_by_the_one_that_is_tried() -> None:
    assert STATE.remote is not None
    link = dataclasses.replace(STATE.remote.link, covariance=(1e6, *SURE[1:]))  # remote must gain 250 ms on local
    unsure = dataclasses.replace(STATE, remote=dataclasses.replace(STATE.remote, link=link), incumbent=None)
    facts = dataclasses.replace(FACTS, budget_ms=1e6)
    best = decide(TABLE, unsure, facts).chosen.plan
    cold = dataclasses.replace(unsure, opening=opening({}, {best: 5.0}))
    tried = decide(TABLE, cold, facts, Tries(LOCAL))
    assert (tried.chosen.plan, tried.worth_opening) == (LOCAL, best.cut)


def test_five_runners_up_are_named_wherever_the_chosen_plan_stands() -> None:
    table = PlanTable.build(CARD, PROFILE, contract(fidelity=Fidelity(measure="kl", bound=1.0)))
    assert np.count_nonzero(table.allowed[0]) == 7
    may = [one for one in estimate_all(table, STATE, PICTURE) if one.allowed]
    last = decide(table, STATE, PICTURE, Tries(max(may, key=lambda one: one.predicted_ms).plan))
    assert len(last.runners_up) == 5
    assert last.runners_up[0].plan == decide(table, STATE, PICTURE).chosen.plan


def test_where_there_is_only_local_nothing_is_weighed() -> None:
    assert decide(TABLE, ALONE, FACTS).objective == {}


def test_local_pays_for_opening_the_whole_with_and_without_a_companion() -> None:
    closed = opening({LOCAL: 50.0})
    alone = decide(TABLE, dataclasses.replace(ALONE, opening=closed), FACTS).chosen
    assert alone.stages_ms["activate"] == 50.0
    assert alone.predicted_ms == pytest.approx(decide(TABLE, ALONE, FACTS).chosen.predicted_ms + 50.0)
    beside = estimates(TABLE, dataclasses.replace(STATE, opening=closed), FACTS)[LOCAL]
    assert beside.predicted_ms == pytest.approx(alone.predicted_ms)


def runner_up(state: Observation) -> PlanEstimate:
    best = decide(TABLE, state, FACTS).chosen.plan
    rest = [estimate for estimate in estimate_all(TABLE, state, FACTS) if estimate.allowed and estimate.plan != best]
    return min(rest, key=lambda estimate: estimate.predicted_ms)


def test_a_contract_that_wants_no_local_finish_asks_for_no_way_out() -> None:
    wants_none = Contract(data=contract().data, behaviour=Behaviour(fallback=Fallback(strategy="fail")))
    table = PlanTable.build(CARD, PROFILE, wants_none)
    assert decide(table, STATE, dataclasses.replace(FACTS, budget_ms=256.0)).chosen.plan == split_at(EARLY, "int8")


def test_a_better_known_whole_is_what_an_offload_would_have_to_run_here() -> None:
    head_ms = TABLE.costs[9].copy()
    head_ms[0] = 80.0
    table = TABLE.with_compute(head_ms=head_ms, tail_ms=np.zeros(len(TABLE)))
    state = dataclasses.replace(STATE, edge_queue_ms=0.0)
    # 0 + 21 + 2.5 · 80 · 1.05 + 8 = 239
    enough, short = (dataclasses.replace(PICTURE, budget_ms=budget_ms) for budget_ms in (239.1, 238.9))
    assert decide(table, state, enough).chosen.plan == offload("encoded")
    assert decide(table, state, short).chosen.plan != offload("encoded")


@pytest.mark.parametrize(("found", "allowed"), [(0.0499, True), (0.05, True), (0.0501, False), (float("nan"), False)])
def test_a_lossy_plan_is_held_to_the_fidelity_bound(found: float, allowed: bool) -> None:
    lossy = CodecCosts(codec="int8", bytes=10, encode_ms=0.0, decode_ms=0.0, fidelity={"kl": found})
    profile = ModelProfile(
        **{
            **{f: getattr(PROFILE, f) for f in PROFILE.__struct_fields__},
            "cuts": (CutCosts(cut=EARLY, head_ms=1.0, tail_ms=1.0, codecs=(lossy,)),),
        }
    )
    table = PlanTable.build(CARD, profile, contract())
    row = table.row_of[split_at(EARLY, "int8")]
    assert bool(table.allowed[0][row]) is allowed
    assert bool(table.why_not(0, row)) is not allowed


def test_a_lossy_codec_that_was_never_measured_is_not_allowed() -> None:
    why = TABLE.why_not(0, TABLE.row_of[split_at(EARLY, "fp16")])
    assert "not measured" in why
    assert "isthmus profile" in why


@pytest.mark.parametrize(
    ("depth", "forbidden"),
    [
        (0.0, set()),
        (0.2, {Placement.OFFLOAD}),
        (0.21, {Placement.OFFLOAD, EARLY}),
        (0.71, {Placement.OFFLOAD, EARLY, LATE}),
    ],
)
def test_nothing_leaves_before_the_least_depth(depth: float, forbidden: set[object]) -> None:
    table = PlanTable.build(CARD, PROFILE, contract(depth_min_ratio=depth))
    found = {
        plan.cut or plan.placement for row, plan in enumerate(table.plans) if "depth_min_ratio" in table.why_not(0, row)
    }
    assert found == forbidden


def test_no_raw_input_forbids_offload_and_cuts_past_which_an_input_travels() -> None:
    by_level = [
        {plan for plan, ok in zip(TABLE.plans, allowed.tolist(), strict=True) if ok} for allowed in TABLE.allowed
    ]
    assert by_level[1] == {LOCAL, split_at(LATE, "raw")}  # EARLY ships `mask` as it came
    assert by_level[2] == {LOCAL}
    assert offload("encoded") in by_level[0]


def test_privacy_of_one_input_forbids_only_what_ships_that_input() -> None:
    x_private = (InputContract(name="x", privacy="no-raw-input"), InputContract(name="mask"))
    table = PlanTable.build(CARD, PROFILE, contract(inputs=x_private))
    assert bool(table.allowed[0][table.row_of[split_at(EARLY, "raw")]])  # ships mask, not x
    assert not table.allowed[0][table.row_of[offload("raw")]]
    all_private = (InputContract(name="x"), InputContract(name="mask", privacy="local-only"))
    table = PlanTable.build(CARD, PROFILE, contract(inputs=all_private))
    assert table.allowed[0].tolist() == [True] + [False] * (len(table) - 1)


# -- forced plans ---------------------------------------------------------------------------------------------------


def force(**wish: object) -> RequestFacts:
    return dataclasses.replace(FACTS, **wish)  # type: ignore[arg-type]  # keyword arguments chosen by each test


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        ({"mode": Placement.LOCAL}, LOCAL),
        ({"mode": Placement.OFFLOAD}, offload("raw")),
        ({"mode": Placement.SPLIT}, split_at(EARLY, "int8")),
        ({"mode": Placement.SPLIT, "codec": "raw"}, split_at(EARLY, "raw")),
        ({"cut": LATE}, split_at(LATE, "raw")),
        ({"mode": Placement.SPLIT, "cut": EARLY, "codec": "raw"}, split_at(EARLY, "raw")),
    ],
)
def test_a_forced_plan_is_respected(wish: dict[str, object], chosen: Plan) -> None:
    decision = decide(TABLE, STATE, force(**wish))
    assert decision.chosen.plan == chosen
    assert "was asked for" in decision.reason


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"cut": CutId("cccccccccccc")}, "no cut"),
        ({"cut": LATE, "mode": Placement.OFFLOAD}, "a cut goes with mode split"),
        ({"mode": Placement.LOCAL, "codec": "raw"}, "nothing travels"),
        ({"mode": Placement.OFFLOAD, "codec": "fp16"}, "would save no byte there .* there are raw, int8"),
        ({"mode": Placement.OFFLOAD, "codec": "klt"}, "crosses at a cut travels as klt; ask for mode split"),
        ({"cut": LATE, "codec": "klt"}, "no calibration for it here; isthmus calibrate makes one"),
        ({"mode": Placement.SPLIT, "codec": "webp"}, "travel as pictures .webp.; ask for mode offload"),
        ({"cut": LATE, "codec": "int8"}, "would save no byte there .* there are raw"),
        ({"mode": Placement.SPLIT, "codec": "encoded"}, "only whole inputs travel as pictures .* mode offload"),
        ({"mode": Placement.OFFLOAD, "codec": "int8"}, "over the contract's bound"),
        ({"codec": "encoded"}, "came as tensors"),
        ({"mode": Placement.OFFLOAD, "privacy": "no-raw-input"}, "no-raw-input"),
        ({"mode": Placement.SPLIT, "privacy": "local-only"}, "local-only"),
        ({"cut": EARLY, "codec": "fp16"}, "not measured"),
    ],
)
def test_a_forced_plan_that_may_never_run_is_refused_by_name(wish: dict[str, object], says: str) -> None:
    for state in (STATE, ALONE):
        with pytest.raises(InvalidRequest, match=says):
            decide(TABLE, state, force(**wish))


def test_what_no_plan_of_a_model_can_do_is_said_with_its_cause() -> None:
    dropped = PlanTable.build(CARD, msgspec.structs.replace(PROFILE, cuts=PROFILE.cuts[:1]), contract())
    none_left = PlanTable.build(CARD, msgspec.structs.replace(PROFILE, cuts=()), contract())
    whole = msgspec.structs.replace(CARD, cuts=(), no_cuts_reason="it is one node")
    uncut = PlanTable.build(whole, msgspec.structs.replace(PROFILE, cuts=()), contract())
    no_pictures = PlanTable.build(CARD, PROFILE, contract(inputs=(InputContract(name="x"), InputContract(name="mask"))))
    wishes: list[tuple[PlanTable, dict[str, object], str]] = [
        (dropped, {"cut": LATE}, "that cut was left out when .* isthmus check"),
        (none_left, {"mode": Placement.SPLIT}, "all 2 cuts of the model were left out when .* isthmus check"),
        (uncut, {"mode": Placement.SPLIT}, r"the model cannot be cut \(it is one node\); ask for local or offload"),
        (no_pictures, {"codec": "encoded"}, r"contract has no input that comes encoded \(data\.inputs\.encoded\)"),
    ]
    for table, wish, says in wishes:
        with pytest.raises(InvalidRequest, match=says):
            decide(table, ALONE, force(**wish))


def test_a_forced_remote_plan_falls_back_to_local_while_the_companion_is_missing() -> None:
    decision = decide(TABLE, ALONE, force(mode=Placement.OFFLOAD))
    assert decision.chosen.plan == LOCAL
    assert "offload was asked for" in decision.reason
    assert "no companion is connected" in decision.reason


def test_a_forced_cut_that_is_not_open_yet_falls_back_to_local() -> None:
    opened = np.ones(len(TABLE), dtype=np.bool_)
    opened[TABLE.row_of[split_at(LATE, "raw")]] = False
    state = dataclasses.replace(STATE, remote=dataclasses.replace(REMOTE, opened=opened))
    decision = decide(TABLE, state, force(cut=LATE))
    assert decision.chosen.plan == LOCAL
    assert "has not opened this cut" in decision.reason


def test_the_reason_names_the_constraint_that_bound() -> None:
    decision = decide(TABLE, STATE, dataclasses.replace(PICTURE, privacy="local-only"))
    assert decision.chosen.plan == LOCAL
    assert "offload encoded would take" in decision.reason
    assert "local-only" in decision.reason
