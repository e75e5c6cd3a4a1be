"""Each constraint over ten thousand random states: a plan that it forbids is never chosen, asked for or not.

What a constraint forbids, and what a plan takes, is worked out here, plan by plan, from the numbers that the world
below is made of; nothing of `constraints.py`, `predict.py` or `table.py` is asked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from split.errors import InvalidRequest
from split.graph.card import CutCard, ModelCard
from split.ids import CutId, ModelDigest
from split.plan.decide import decide
from split.plan.exploring import Explored, Explorer
from split.plan.objective import Backlog
from split.plan.observation import Flags, Floats, LinkEstimate, Observation, RemoteView
from split.plan.plan import LOCAL, Placement, Plan, PlanEstimate, RequestFacts
from split.plan.power import NO_POWER, Power
from split.plan.table import PlanTable
from split.profiles.contract import Behaviour, Contract, Data, Fallback, Fidelity, InputContract, Resource
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile
from split.tensor import TensorSpec

SEED, STATES = 20261130, 10_000
EARLY, LATE = CutId("aaaaaaaaaaaa"), CutId("bbbbbbbbbbbb")
ORDER = ["any", "no-raw-input", "local-only"]
WHOLE_MS, IMAGE_MS, DOWN = 100.0, 7.0, 400
SHARE = {EARLY: 0.2, LATE: 0.7}
WEIGHT_BYTES = {EARLY: 1_000, LATE: 5_000}
HEAD_MS = {EARLY: 20.0, LATE: 70.0}
SHOWN = {EARLY: {"mask"}, LATE: set[str]()}
"""Inputs that travel past a cut as they came."""
COSTS: dict[CutId | None, list[CodecCosts]] = {
    EARLY: [
        CodecCosts(codec="raw", bytes=40_000, encode_ms=0.5, decode_ms=0.25),
        CodecCosts(codec="int8", bytes=10_000, encode_ms=2.0, decode_ms=1.5, fidelity={"kl": 0.04}),
        CodecCosts(codec="fp16", bytes=20_000, encode_ms=1.0, decode_ms=1.0),
    ],
    LATE: [CodecCosts(codec="raw", bytes=10_000, encode_ms=0.5, decode_ms=0.25)],
    None: [
        CodecCosts(codec="raw", bytes=100_000, encode_ms=1.0, decode_ms=2.0),
        CodecCosts(codec="int8", bytes=25_000, encode_ms=3.0, decode_ms=1.0, fidelity={"kl": 0.5}),
    ],
}
CODEC = {(cut, costs.codec): costs for cut, listed in COSTS.items() for costs in listed}

CARD = ModelCard(
    digest=ModelDigest("sha256:" + "0" * 64),
    path="/models/tiny.onnx",
    files=(("tiny.onnx", 1, "0" * 64),),
    inputs=(
        TensorSpec(name="x", dtype="FP32", shape=(1, 3, 8, 8)),
        TensorSpec(name="mask", dtype="FP32", shape=(1, 8)),
    ),
    outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 100)),),
    nodes=10,
    opset=17,
    cuts=tuple(
        CutCard(
            id=cut,
            boundary=(TensorSpec(name=f"at-{cut}", dtype="FP32", shape=(2_500,)),),
            head_inputs=("x",),
            head_outputs=(),
            tail_inputs=tuple(SHOWN[cut]),
            shown_inputs=tuple(SHOWN[cut]),
            tail_outputs=("y",),
            nodes=3,
            compute_share=SHARE[cut],
            node_bitmap="07",
            head_weight_bytes=WEIGHT_BYTES[cut],
        )
        for cut in (EARLY, LATE)
    ),
)
PROFILE = ModelProfile(
    digest=CARD.digest,
    runtime="onnxruntime 1",
    fingerprint="f",
    dims={},
    threads=2,
    whole_ms=WHOLE_MS,
    image_ms=IMAGE_MS,
    input_codecs=tuple(COSTS[None]),
    encoded_bytes=9_000,
    output_bytes=DOWN,
    cuts=tuple(
        CutCosts(cut=cut, head_ms=HEAD_MS[cut], tail_ms=WHOLE_MS - HEAD_MS[cut], codecs=tuple(COSTS[cut]))
        for cut in (EARLY, LATE)
    ),
)


@dataclass(frozen=True)
class Case:
    contract: Contract
    table: PlanTable
    state: Observation
    facts: RequestFacts
    chosen: PlanEstimate
    explored: bool
    """Another plan runs than without an explorer."""

    @property
    def remote(self) -> RemoteView:
        assert self.state.remote is not None
        return self.state.remote


def random_contract(rng: np.random.Generator) -> Contract:
    return Contract(
        resource=Resource(
            memory_bytes=[None, None, None, 999, 1_000][int(rng.integers(5))],
            accelerators=("cuda",) if rng.random() < 0.15 else ("cuda", "cpu"),
        ),
        behaviour=Behaviour(
            service_class=rng.choice(["gold", "silver", "bronze"]),
            fallback=Fallback(strategy="fail" if rng.random() < 0.5 else "local"),
            throughput_min_per_s=float(rng.choice([0.0, 0.0, 2.0, 10.0])),
        ),
        data=Data(
            inputs=(
                InputContract(
                    name="x",
                    encoded=ImageSpec(resize=8, crop=8),
                    privacy="no-raw-input" if rng.random() < 0.1 else "any",
                ),
                InputContract(name="mask", privacy=rng.choice(ORDER, p=[0.9, 0.08, 0.02])),
            ),
            privacy=rng.choice(ORDER, p=[0.85, 0.12, 0.03]),
            depth_min_ratio=float(rng.choice([0.0, 0.0, 0.0, 0.3, 0.8])),
            codecs=tuple(c for c in ("raw", "fp16", "int8", "encoded") if rng.random() < 0.8) or ("raw",),
            fidelity=Fidelity(measure="kl", bound=float(rng.choice([0.0, 0.05, 1.0]))),
        ),
    )


def random_state(rng: np.random.Generator, plans: int) -> Observation:
    draw: list[float] = np.exp(rng.normal(0.0, 1.0, 8)).tolist()
    flip: list[float] = rng.random(8).tolist()
    opened = rng.random(plans) < 0.85
    opened[0] = True
    remote = RemoteView(
        link=LinkEstimate(
            rtt_ms=10 * draw[0],
            up_ms_per_byte=1e-3 * draw[1],
            down_ms_per_byte=1e-3 * draw[2],
            covariance=(draw[3], 0.0, 0.0, 1e-9 * draw[4], 0.0, 0.0),
            age_s=1.0,
        ),
        beta=0.3 * draw[5],
        beta_sigma=0.2,
        speed_ratio=0.5,
        image_ms=2.0,
        queue_ms=draw[6],
        queue_sigma_ms=0.0,
        opened=opened,
        payload_bytes_max=15_000.0 if flip[0] < 0.2 else math.inf,
        metered_left_bytes=30_000.0 if flip[1] < 0.2 else math.inf,
        encoded_why_not="pictures decode differently there" if flip[2] < 0.2 else "",
    )
    there = flip[3] < 0.95
    known = Power(compute_w=4.0, send_w=2.0 * draw[7], receive_w=1.0, wait_w=0.3, measured=False, source="test")
    return Observation(
        edge_queue_ms=2.0,
        slowdown=[1.0, 2.0, 5.0][int(3 * flip[4])],
        alpha=draw[0],
        alpha_sigma=0.1,
        image_ms=IMAGE_MS,
        image_ratio=1.0,
        remote=remote if there else None,
        remote_why_not="" if there else "no companion",
        incumbent=int(plans * flip[5]),
        power=known if flip[6] < 0.8 else NO_POWER,
        battery_low=flip[7] < 0.3,
    )


def random_wish(rng: np.random.Generator) -> dict[str, object]:
    """What a caller asks for, half of the time."""
    return [
        {},
        {},
        {},
        {},
        {"mode": Placement.LOCAL},
        {"mode": Placement.SPLIT},
        {"mode": Placement.OFFLOAD},
        {"cut": [EARLY, LATE][int(rng.integers(2))], "codec": "raw"},
    ][int(rng.integers(8))]


class Daring(Explorer):
    """Tries whatever it may, where the real one would keep to the best."""

    def choose(self, row: int, value_ms: Floats, may_try: Callable[[], Flags]) -> Explored | None:
        if (usual := super().choose(row, value_ms, may_try)) is not None:
            return usual
        others = [other for other in np.flatnonzero(may_try()).tolist() if other != row]
        return Explored(row=others[len(others) // 2], cost_ms=1.0, why="it may") if others else None


def warm_explorer(rng: np.random.Generator, plans: int) -> Explorer:
    """One that has seen plans faster and slower than predicted, by a tenth and more."""
    explorer = Daring(np.arange(plans) > 0, seed=int(rng.integers(1000)))
    for row, off in enumerate(np.exp(rng.normal(0.0, 0.15, plans)).tolist()):
        for _ in range(10):
            explorer.observe(row, 100.0 * off, 100.0)
    return explorer


@cache
def cases() -> list[Case]:
    """The states and what was chosen in them, half of them by a decider that tries plans out and with requests under
    way; those in which what was asked for may never run are refused, not here."""
    rng = np.random.default_rng(SEED)
    rules = [random_contract(rng) for _ in range(80)]
    tables = [PlanTable.build(CARD, PROFILE, rule, ("cpu",)) for rule in rules]
    explorers = [warm_explorer(rng, len(table)) for table in tables]
    found: list[Case] = []
    while len(found) < STATES:
        n = int(rng.integers(len(rules)))
        state = random_state(rng, len(tables[n]))
        facts = RequestFacts(
            budget_ms=float(300 * np.exp(rng.normal(0, 0.8))),
            encoded_bytes=[0, 6_000, 20_000][int(rng.integers(3))],
            privacy=str(rng.choice(ORDER, p=[0.9, 0.07, 0.03])),
            **random_wish(rng),  # type: ignore[arg-type]  # keyword arguments chosen at random
        )
        if busy := rng.random() < 0.5:
            waits: list[float] = rng.exponential(rng.choice([0.0, 0.0, 0.0, 20.0, 200.0]), 3).tolist()
            backlog = Backlog(device_ms=waits[0], link_ms=waits[1], companion_ms=waits[2])
            state = dataclasses.replace(state, backlog=backlog)
        try:
            chosen = usual = decide(tables[n], state, facts).chosen
            if busy:
                chosen = decide(tables[n], state, facts, explorers[n]).chosen
        except InvalidRequest:
            continue
        found.append(Case(rules[n], tables[n], state, facts, chosen, chosen.plan != usual.plan))
    return found


# -- what each plan takes, worked out by hand -------------------------------------------------------------------------


def up_bytes(plan: Plan, case: Case) -> int:
    if plan == LOCAL:
        return 0
    return case.facts.encoded_bytes if plan.codec == "encoded" else CODEC[plan.cut, str(plan.codec)].bytes


def stations_ms(plan: Plan, case: Case) -> tuple[float, float, float, float]:
    """Device, link up, companion, link down."""
    state, picture = case.state, bool(case.facts.encoded_bytes)
    image_ms = state.slowdown * IMAGE_MS if picture and plan.codec != "encoded" else 0.0
    if plan == LOCAL:
        return image_ms + state.slowdown * state.alpha * WHOLE_MS, 0.0, 0.0, 0.0
    link, remote = case.remote.link, case.remote
    head_ms = HEAD_MS[plan.cut] if plan.cut else 0.0
    reply_ms = DOWN * 2.0 / 100_000
    tail_ms = remote.beta * (WHOLE_MS - head_ms)
    up_ms, down_ms = link.up_ms_per_byte * up_bytes(plan, case), link.down_ms_per_byte * DOWN
    device_ms = image_ms + state.slowdown * (state.alpha * head_ms + reply_ms)
    if plan.codec == "encoded":
        return device_ms, up_ms, remote.image_ms + tail_ms, down_ms
    costs = CODEC[plan.cut, str(plan.codec)]
    there_ms = remote.beta * remote.speed_ratio * costs.decode_ms + tail_ms
    return device_ms + state.slowdown * costs.encode_ms, up_ms, there_ms, down_ms


def waits_ms(plan: Plan, case: Case) -> float:
    return case.state.edge_queue_ms + (0.0 if plan == LOCAL else case.remote.link.rtt_ms + case.remote.queue_ms)


def energy_j(plan: Plan, case: Case) -> float:
    power, (device, up, there, down) = case.state.power, stations_ms(plan, case)
    waiting = power.wait_w * (there + waits_ms(plan, case) - case.state.edge_queue_ms)
    return (power.compute_w * device + power.send_w * up + power.receive_w * down + waiting) / 1000


def quantile_ms(plan: Plan, case: Case) -> float:
    """99.9 %, 97.7 % and 90 % of a normal distribution."""
    sigmas = {"gold": 3.0902, "silver": 2.0, "bronze": 1.2816}[case.contract.behaviour.service_class]
    head_ms = WHOLE_MS if plan == LOCAL else HEAD_MS[plan.cut] if plan.cut else 0.0
    variance = (0.1 * case.state.slowdown * case.state.alpha * head_ms) ** 2
    if plan != LOCAL:
        rr, _, _, uu, _, _ = case.remote.link.covariance
        variance += rr + uu * up_bytes(plan, case) ** 2 + (0.2 * case.remote.beta * (WHOLE_MS - head_ms)) ** 2
    return sum(stations_ms(plan, case)) + waits_ms(plan, case) + sigmas * math.sqrt(variance)


def way_out_ms(plan: Plan, case: Case) -> float:
    """Everything here, the missing rest with 5 % and 8 ms of margin; a picture that travelled is prepared after all."""
    if case.contract.behaviour.fallback.strategy == "fail":
        return 0.0
    if plan == LOCAL:
        return sum(stations_ms(plan, case)) + waits_ms(plan, case)
    state = case.state
    done_ms = HEAD_MS[plan.cut] if plan.cut else 0.0
    encode_ms = 0.0 if plan.codec == "encoded" else CODEC[plan.cut, str(plan.codec)].encode_ms
    image_ms = IMAGE_MS if case.facts.encoded_bytes else 0.0
    compute_ms = state.alpha * (done_ms + 1.05 * (WHOLE_MS - done_ms))
    return state.edge_queue_ms + state.slowdown * (image_ms + encode_ms + compute_ms) + 8.0


# -- what each constraint allows --------------------------------------------------------------------------------------


def privacy(plan: Plan, case: Case) -> bool:
    data = case.contract.data
    asked = max(case.facts.privacy, data.privacy, key=ORDER.index)
    of_inputs = {tensor.name: tensor.privacy for tensor in data.inputs}
    if plan == LOCAL:
        return True
    if asked == "local-only" or "local-only" in of_inputs.values():
        return False
    leaves = SHOWN[plan.cut] if plan.cut else {"x", "mask"}
    return not leaves if asked == "no-raw-input" else all(of_inputs[name] == "any" for name in leaves)


def depth(plan: Plan, case: Case) -> bool:
    return plan == LOCAL or (SHARE[plan.cut] if plan.cut else 0.0) >= case.contract.data.depth_min_ratio


def memory(plan: Plan, case: Case) -> bool:
    most = case.contract.resource.memory_bytes
    return most is None or plan.cut is None or WEIGHT_BYTES[plan.cut] <= most


def accelerator(plan: Plan, case: Case) -> bool:
    return plan.placement is Placement.OFFLOAD or "cpu" in case.contract.resource.accelerators


def codec(plan: Plan, case: Case) -> bool:
    return plan == LOCAL or plan.codec in case.contract.data.codecs


def fidelity(plan: Plan, case: Case) -> bool:
    if plan.codec in (None, "raw", "encoded"):
        return True
    measured = CODEC[plan.cut, str(plan.codec)].fidelity.get("kl", math.inf)
    return measured <= case.contract.data.fidelity.bound


def companion(plan: Plan, case: Case) -> bool:
    remote = case.state.remote
    return plan == LOCAL or (remote is not None and bool(remote.opened[case.table.row_of[plan]]))


def payload(plan: Plan, case: Case) -> bool:
    return plan == LOCAL or case.state.remote is None or up_bytes(plan, case) <= case.remote.payload_bytes_max


def metered(plan: Plan, case: Case) -> bool:
    moved = up_bytes(plan, case) + DOWN + 2 * 4096
    return plan == LOCAL or case.state.remote is None or moved <= case.remote.metered_left_bytes


def encoded_form(plan: Plan, case: Case) -> bool:
    if plan.codec != "encoded" or case.state.remote is None:
        return True
    return case.facts.encoded_bytes > 0 and not case.remote.encoded_why_not


def battery(plan: Plan, case: Case) -> bool:
    if plan == LOCAL or case.state.remote is None or not case.state.battery_low:
        return True
    if not accelerator(LOCAL, case):
        return True  # nothing runs here that it could be held against
    return energy_j(plan, case) <= energy_j(LOCAL, case) * (1 + 1e-9)


CONSTRAINTS: list[Callable[[Plan, Case], bool]] = [
    privacy,
    depth,
    memory,
    accelerator,
    codec,
    fidelity,
    companion,
    payload,
    metered,
    encoded_form,
    battery,
]


def asked_for(plan: Plan, facts: RequestFacts) -> bool:
    mode = facts.mode if facts.cut is None else Placement.SPLIT
    return mode in (None, plan.placement) and facts.cut in (None, plan.cut) and facts.codec in (None, plan.codec)


def allowed(case: Case) -> list[Plan]:
    return [
        plan
        for plan in case.table.plans
        if asked_for(plan, case.facts) and all(constraint(plan, case) for constraint in CONSTRAINTS)
    ]


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_plan_that_a_constraint_forbids_is_never_chosen(constraint: Callable[[Plan, Case], bool]) -> None:
    bound = 0
    for n, case in enumerate(cases()):
        chosen = case.chosen.plan
        bound += not all(constraint(plan, case) for plan in case.table.plans)
        # Somebody must answer: where nothing else may, the device does.
        assert constraint(chosen, case) or (chosen == LOCAL and not allowed(case)), (SEED, n, chosen)
    assert bound > 100, "too few states in which it forbids anything"


def test_local_runs_where_nothing_that_was_asked_for_may_and_else_only_what_was() -> None:
    for n, case in enumerate(cases()):
        can = allowed(case)
        assert case.chosen.plan in can or (case.chosen.plan == LOCAL and not can), (SEED, n)


def safe(case: Case) -> list[Plan]:
    """Within the budget even at the class's quantile, and with a way out."""
    budget_ms = case.facts.budget_ms
    return [p for p in allowed(case) if max(quantile_ms(p, case), way_out_ms(p, case)) <= budget_ms]


def test_a_plan_that_may_miss_the_deadline_is_never_chosen_where_one_is_sure_to_meet_it() -> None:
    bound = 0
    for n, case in enumerate(cases()):
        if case.state.remote is None:
            continue
        can = safe(case)
        assert not can or case.chosen.plan in can, (SEED, n, case.chosen.plan, can)
        if not can and allowed(case):
            risks = {plan: quantile_ms(plan, case) for plan in allowed(case)}
            in_time = {plan for plan, risk in risks.items() if risk <= case.facts.budget_ms}
            assert case.chosen.plan in (in_time or {min(risks, key=risks.__getitem__)}), (SEED, n)
        bound += 0 < len(can) < len(allowed(case))
    assert bound > 100


def test_what_is_tried_is_answered_in_half_the_budget_whatever_happens() -> None:
    bound = 0
    for n, case in enumerate(cases()):
        if case.explored:
            plan = case.chosen.plan
            at_worst_ms = max(quantile_ms(plan, case), way_out_ms(plan, case))
            assert at_worst_ms <= case.facts.budget_ms / 2 * (1 + 1e-9), (SEED, n, plan)
            assert not case.contract.behaviour.throughput_min_per_s, (SEED, n)
            bound += 1
    assert bound > 100


def test_a_plan_that_cannot_sustain_the_contracts_rate_is_never_chosen_where_a_safe_one_can() -> None:
    bound = 0
    for n, case in enumerate(cases()):
        rate = case.contract.behaviour.throughput_min_per_s
        if case.state.remote is None or not rate:
            continue
        steady = [plan for plan in safe(case) if max(stations_ms(plan, case)) * rate <= 1000]
        assert not steady or case.chosen.plan in steady, (SEED, n, case.chosen.plan, steady)
        bound += 0 < len(steady) < len(safe(case))
    assert bound > 100
