"""Weights, quantiles, energy and money: against formulas and sums worked out here."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from split.plan.decide import decide, estimate_all
from split.plan.objective import (
    BATTERY_SHARE,
    NO_BACKLOG,
    PRESETS,
    SIGMAS,
    Backlog,
    Objective,
    Prices,
    ServiceClass,
)
from split.plan.observation import Floats, SlowStart
from split.plan.plan import LOCAL, PlanEstimate, RequestFacts
from split.plan.power import NO_POWER
from split.plan.predict import predict
from split.plan.score import score
from split.profiles.contract import Weights
from tests.split.plan_world import LOCAL_J, STATE, TABLE, at_weights, estimates, named

FACTS = RequestFacts(budget_ms=1e6)
CLASSES: tuple[ServiceClass, ...] = ("gold", "silver", "bronze")
SEED = 20261130


def random_weights(rng: np.random.Generator) -> Weights:
    while True:
        drawn = [float(w) if rng.random() < 0.6 else 0.0 for w in 10.0 ** rng.uniform(-9, 9, 4)]
        if sum(drawn) > 0.0:
            return Weights(latency=drawn[0], throughput=drawn[1], energy=drawn[2], cost=drawn[3])


def test_weights_are_never_negative_and_sum_to_one_in_twenty_thousand_random_states() -> None:
    rng = np.random.default_rng(SEED)
    for n in range(20_000):
        objective = Objective.of(random_weights(rng), CLASSES[n % 3])
        known, priced, low = (rng.random(3) < 0.5).tolist()
        waiting = float(rng.choice([0.0, 10.0 ** rng.uniform(-12, 12)]))
        now = objective.at(energy_known=known, priced=priced, battery_low=low, waiting=waiting)
        weights = list(now.as_mapping().values())
        assert min(weights) >= 0.0, (SEED, n, now)
        assert sum(weights) == pytest.approx(1.0), (SEED, n, now)
        assert known or now.energy == 0.0, (SEED, n)
        assert priced or now.cost == 0.0, (SEED, n)


def fixed_formula(load: float, battery: float) -> tuple[float, float, float]:
    """The obvious fixed-formula mix (latency, throughput, energy): latency counts the more the less there is to do,
    energy the more the emptier the battery, throughput gets what is left. Chosen here as the plainest of its kind."""
    latency, energy = 0.8 - 0.3 * load, 0.2 + 0.6 * (1.0 - battery)
    return latency, 1.0 - latency - energy, energy


def test_a_mix_by_fixed_formula_goes_negative_and_rewards_work_where_ours_cannot() -> None:
    latency, throughput, energy = fixed_formula(load=0.1, battery=0.3)
    assert latency + throughput + energy == pytest.approx(1.0)
    assert throughput == pytest.approx(-0.39)
    # In that state a plan that loads the stations more and gains nothing has the better score …
    thrifty, wasteful = np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 1.0])
    mix = np.array([latency, throughput, energy])
    assert mix @ wasteful < mix @ thrifty
    # … and in ours, at any of its states, not.
    for load in np.linspace(0.0, 1.0, 21):
        objective = Objective.of(Weights(latency=1.0, throughput=1.0, energy=1.0), "silver")
        for battery_low in (False, True):
            now = objective.at(energy_known=True, priced=False, battery_low=battery_low, waiting=float(load))
            ours = np.array([now.latency, now.throughput, now.energy])
            assert ours @ wasteful >= ours @ thrifty


@pytest.mark.parametrize(
    ("waiting", "throughput_weight", "share"),
    [
        (0.0, 0.0, 0.0),
        (1.0, 0.0, 1.0 / 1.5),  # one request's work waits: 1 / (1 + V), V = 0.5
        (3.0, 0.0, 3.0 / 3.5),
        (1.0, 1.0, 1.0 / 1.25),  # half the contract's weight is throughput's: V = 0.25
        (0.0, 1.0, 0.0),  # nothing waits: latency is throughput
    ],
)
def test_the_backlog_shares_the_weights_out_as_drift_plus_penalty(
    waiting: float, throughput_weight: float, share: float
) -> None:
    objective = Objective.of(Weights(latency=1.0, throughput=throughput_weight), "silver")
    now = objective.at(energy_known=False, priced=False, battery_low=False, waiting=waiting)
    assert now.throughput == pytest.approx(share)
    assert now.latency == pytest.approx(1.0 - share)


def test_a_low_battery_puts_energy_before_latency_whatever_waits() -> None:
    for waiting in (0.0, 100.0):
        for service_class in CLASSES:
            objective = Objective.of(Weights(), service_class)
            now = objective.at(energy_known=True, priced=True, battery_low=True, waiting=waiting)
            assert now.energy >= BATTERY_SHARE > 0.5
            unknown = objective.at(energy_known=False, priced=True, battery_low=True, waiting=waiting)
            assert unknown.energy == 0.0


def test_a_class_sets_the_quantile_and_the_weights_that_a_contract_does_not_state() -> None:
    quantiles = {name: NormalDist().cdf(sigmas) for name, sigmas in SIGMAS.items()}
    assert quantiles["gold"] == pytest.approx(0.999, abs=1e-4)
    assert quantiles["silver"] == pytest.approx(0.977, abs=1e-3)
    assert quantiles["bronze"] == pytest.approx(0.9, abs=1e-4)
    for name in ("gold", "silver"):
        assert Objective.of(Weights(), name).time_alone  # type: ignore[arg-type]  # the names are those of the class
    assert Objective.of(Weights(), "bronze").energy == PRESETS["bronze"].energy > 0.0
    stated = Objective.of(Weights(latency=3.0, energy=1.0), "gold")
    assert (stated.latency, stated.energy) == (0.75, 0.25)
    assert at_weights(Weights(), "gold").objective.sigmas > at_weights(Weights(), "bronze").objective.sigmas


def test_risk_is_the_quantile_of_the_class() -> None:
    state = dataclasses.replace(STATE, alpha_sigma=0.1)
    for name, sigmas in (("gold", 3.0902), ("silver", 2.0), ("bronze", 1.2816)):
        table = at_weights(Weights(), name)
        local = estimates(table, state, FACTS)[LOCAL]
        assert local.risk_ms - local.predicted_ms == pytest.approx(sigmas * 0.1 * 250)
        assert local.sigma_ms == pytest.approx(0.1 * 250)
        alone = dataclasses.replace(state, remote=None, remote_why_not="no companion")
        assert decide(table, alone, FACTS).chosen.risk_ms == pytest.approx(local.risk_ms)


# -- what a plan costs ----------------------------------------------------------------------------------------------


def test_energy_is_watts_times_what_device_link_and_waiting_take() -> None:
    found = estimates(TABLE, STATE, FACTS)
    # 5 W · 250 ms of compute; for its turn on the worker a request waits at no cost
    assert found[LOCAL].energy_j == pytest.approx(LOCAL_J) == pytest.approx(5 * 0.250)
    # head 50, encode 1, reply 0.02; up 40; down 0.8; waiting: rtt 10, theirs 3, decode 0.1875, tail 120
    split = found[named("split aaaaaaaaaaaa raw")]
    assert split.energy_j == pytest.approx(5 * 0.051016 + 2 * 0.040 + 3 * 0.0008 + 1 * 0.1331875, rel=1e-6)
    assert not split.energy_measured
    measured = dataclasses.replace(STATE, power=dataclasses.replace(STATE.power, measured=True))
    assert estimates(TABLE, measured, FACTS)[LOCAL].energy_measured


def test_an_encoded_picture_costs_what_sending_it_and_waiting_for_it_take() -> None:
    facts = dataclasses.replace(FACTS, encoded_bytes=6_000)
    found = estimates(TABLE, STATE, facts)[named("offload encoded")]
    # up 6; down 0.8; reply 0.016; waiting: rtt 10, theirs 3, picture 4, whole 150
    assert found.energy_j == pytest.approx(5 * 0.000016 + 2 * 0.006 + 3 * 0.0008 + 1 * 0.167)
    # 6000 up, 400 down and twice 4096 of metadata at a millionth, 154 ms of companion time at a thousandth
    assert found.money == pytest.approx(1e-6 * (6_000 + 400 + 8_192) + 1e-3 * 154)


def test_what_all_plans_cost_at_once_is_what_each_costs_alone() -> None:
    everything = at_weights(Weights(latency=1.0, energy=1.0, cost=1.0))
    alone = dataclasses.replace(STATE, remote=None, remote_why_not="no companion")
    for facts in (FACTS, dataclasses.replace(FACTS, encoded_bytes=6_000)):
        decision = decide(everything, STATE, facts)
        by_plan = estimates(everything, STATE, facts)
        here, away = by_plan[LOCAL], decide(everything, alone, facts).chosen
        assert here.energy_j == pytest.approx(away.energy_j)
        assert away.money == here.money == 0.0
        for estimate in (decision.chosen, *decision.runners_up):
            assert estimate == by_plan[estimate.plan]


def test_waiting_for_tcps_window_costs_what_waiting_costs() -> None:
    """A window of 20,000 bytes on 10 ms and 1 ms per 1,000 bytes would be sent in 20 ms; one of 4,000 leaves 6 of them
    unused, the next 2: whoever sends more than 4,000, or than 12,000, waits 6 or 8 ms longer."""
    assert STATE.remote is not None
    waits = SlowStart(after_bytes=np.array([4_000.0, 12_000.0]), extra_ms=np.array([0.0, 6.0, 8.0]))
    link = dataclasses.replace(STATE.remote.link, slow_start=waits)
    state = dataclasses.replace(STATE, remote=dataclasses.replace(STATE.remote, link=link))
    for facts in (FACTS, dataclasses.replace(FACTS, encoded_bytes=6_000)):
        all_at_once = predict(TABLE, dataclasses.replace(state, battery_low=True), facts).energy_j
        assert all_at_once is not None
        open_window, waiting = (estimate_all(TABLE, one, facts) for one in (STATE, state))
        for row, plan in enumerate(TABLE.plans):
            size = waiting[row].bytes
            extra_ms = 8.0 if size > 12_000 else 6.0 if size > 4_000 else 0.0
            assert waiting[row].energy_j - open_window[row].energy_j == pytest.approx(1 * extra_ms / 1000), plan
            assert all_at_once[row] == pytest.approx(waiting[row].energy_j), plan


def test_what_of_our_own_waits_at_the_companion_counts_once() -> None:
    """Its queue as replies tell it holds our own requests, which the backlog knows; what others have there comes on
    top."""
    view, waiting = STATE.remote, Backlog(device_ms=5.0, link_ms=0.0, companion_ms=50.0)
    assert view is not None

    def values(queue_ms: float) -> Floats:
        state = dataclasses.replace(STATE, remote=dataclasses.replace(view, queue_ms=queue_ms), backlog=waiting)
        mask = np.ones(len(TABLE), dtype=np.bool_)
        scored = score(TABLE, state, predict(TABLE, state, FACTS), mask)
        assert scored.objective.throughput > 0.0
        return scored.value_ms

    nothing, ours = values(0.0), values(40.0)
    assert ours == pytest.approx(nothing)
    more = values(60.0) - nothing
    assert (more[TABLE.splits | TABLE.offloads] > more[TABLE.row_of[LOCAL]] + 1.0).all()


# -- what is chosen -------------------------------------------------------------------------------------------------


def test_each_weight_alone_chooses_the_plan_that_is_least_of_it() -> None:
    all_of = [one for one in estimate_all(TABLE, STATE, FACTS) if one.allowed]
    for weights, least in (
        (Weights(), min(all_of, key=lambda one: one.predicted_ms)),
        (Weights(latency=0.0, energy=1.0), min(all_of, key=lambda one: one.energy_j)),
        (Weights(latency=0.0, cost=1.0), min(all_of, key=lambda one: one.money)),
    ):
        assert decide(at_weights(weights), STATE, FACTS).chosen.plan == least.plan


def test_a_mix_of_weights_chooses_the_least_weighted_sum_relative_to_running_here() -> None:
    rng = np.random.default_rng(SEED)
    offload = estimates(TABLE, STATE, FACTS)[named("offload raw")]
    for _ in range(200):
        latency, energy, cost = rng.dirichlet((1.0, 1.0, 1.0)).tolist()
        table = at_weights(Weights(latency=latency, energy=energy, cost=cost))
        worth = {
            one.plan: latency * one.predicted_ms / 250
            + energy * one.energy_j / LOCAL_J
            + cost * one.money / offload.money
            for one in estimate_all(table, STATE, FACTS)
            if one.allowed
        }
        assert decide(table, STATE, FACTS).chosen.plan == min(worth, key=worth.__getitem__)


def test_what_is_not_known_and_what_costs_nothing_changes_nothing() -> None:
    table = at_weights(Weights(latency=1.0, energy=5.0, cost=5.0))
    blind = dataclasses.replace(STATE, power=NO_POWER, prices=Prices(per_byte=0.0, per_companion_ms=0.0))
    decision = decide(table, blind, FACTS)
    assert decision.objective == {"latency": 1.0, "throughput": 0.0, "energy": 0.0, "cost": 0.0}
    assert decision.chosen.plan == decide(TABLE, STATE, FACTS).chosen.plan
    only_energy = at_weights(Weights(latency=0.0, energy=1.0))
    assert decide(only_energy, blind, FACTS).objective["latency"] == 1.0


def test_a_plan_that_is_better_in_nothing_is_never_chosen_over_one_that_is() -> None:
    rng = np.random.default_rng(SEED)
    tables = [at_weights(random_weights(rng), CLASSES[n % 3]) for n in range(50)]
    seen = 0
    for n in range(10_000):
        table = tables[n % 50]
        draw: list[float] = np.exp(rng.normal(0.0, 1.5, 9)).tolist()
        assert STATE.remote is not None
        link = dataclasses.replace(STATE.remote.link, rtt_ms=10 * draw[0], up_ms_per_byte=0.001 * draw[1])
        state = dataclasses.replace(
            STATE,
            alpha=draw[2],
            remote=dataclasses.replace(STATE.remote, link=link, beta=draw[3]),
            power=dataclasses.replace(STATE.power, compute_w=draw[4], send_w=draw[5]),
            prices=Prices(per_byte=1e-6 * draw[6], per_companion_ms=1e-3 if n % 3 else 0.0),
            battery_low=n % 5 == 0,
            backlog=NO_BACKLOG if n % 2 else Backlog(device_ms=5.0, link_ms=20 * draw[7], companion_ms=20 * draw[8]),
        )
        decision = decide(table, state, FACTS)
        shared = decision.objective["throughput"] > 0.0
        chosen = costs(decision.chosen, stations=shared)
        for other in decision.runners_up:
            worse = costs(other, stations=shared)
            seen += bool((chosen <= worse).all() and (chosen < worse).any())
            assert not ((worse <= chosen).all() and (worse < chosen).any()), (SEED, n, decision.chosen.plan, other.plan)
    assert seen > 1_000  # it is not for want of such pairs


def costs(one: PlanEstimate, *, stations: bool) -> Floats:
    """Everything that can be better in a plan: latency, joules, money, and where they count what each station does."""
    stages = one.stages_ms
    device = stages["image"] + stages["head"] + stages["encode"] + stages["decode"]
    companion = stages["cloud_decode"] + stages["tail"]
    work = [device, stages["up"], companion] if stations else []
    return np.array([one.predicted_ms, one.energy_j, one.money, *work])


# -- what is said ---------------------------------------------------------------------------------------------------


def test_the_reason_names_what_counted_where_it_was_not_latency() -> None:
    assert "expected first" in decide(TABLE, STATE, FACTS).reason
    thrifty = decide(at_weights(Weights(latency=1.0, energy=3.0)), STATE, FACTS)
    assert "latency 25 % and energy 75 %" in thrifty.reason
    assert " J" in thrifty.reason
    low = decide(TABLE, dataclasses.replace(STATE, battery_low=True), FACTS)
    assert "while the battery is low" in low.reason
    dear = decide(at_weights(Weights(latency=1.0, cost=1.0)), STATE, FACTS)
    assert "of money" in dear.reason


def test_why_no_split_was_chosen_is_said_in_one_sentence() -> None:
    assert decide(TABLE, STATE, FACTS).why_no_split() == ""  # one was
    assert STATE.remote is not None
    slow = dataclasses.replace(STATE.remote.link, up_ms_per_byte=1.0)
    far = dataclasses.replace(STATE, remote=dataclasses.replace(STATE.remote, link=slow))
    decision = decide(TABLE, far, FACTS)
    assert decision.chosen.plan == LOCAL
    best = min(
        (one for one in estimate_all(TABLE, far, FACTS) if one.plan.cut and one.allowed),
        key=lambda one: one.predicted_ms,
    )
    said = decision.why_no_split()
    assert f"the best {best.plan} would take {best.predicted_ms:.1f} ms" in said
    assert f"{best.stages_ms['up']:.1f} ms of it up" in said
    assert f"local {decision.chosen.predicted_ms:.1f} ms" in said
    alone = dataclasses.replace(STATE, remote=None, remote_why_not="no companion is connected")
    assert decide(TABLE, alone, FACTS).why_no_split() == "no split: no companion is connected"
    closed = dataclasses.replace(STATE.remote, opened=np.array([plan.cut is None for plan in TABLE.plans]))
    shut = decide(TABLE, dataclasses.replace(STATE, remote=closed), dataclasses.replace(FACTS, privacy="local-only"))
    assert "no split is allowed: privacy is local-only" in shut.why_no_split()


def test_a_rate_that_the_best_plan_cannot_sustain_is_met_by_another_and_the_reason_says_so() -> None:
    # EARLY raw takes 120 ms of companion, LATE raw 175 of device: 8 and 5 a second; int8 as raw but 10 000 bytes
    fast = decide(TABLE, STATE, FACTS)
    slowest = max(120.0, 50 + 4)
    assert fast.chosen.stages_ms["tail"] == pytest.approx(slowest)
    sure = decide(at_weights(Weights(), rate=1000 / slowest - 0.01), STATE, FACTS)
    assert sure.chosen.plan == fast.chosen.plan
    none = decide(at_weights(Weights(), rate=1000.0), STATE, FACTS)
    assert none.chosen.plan == fast.chosen.plan
    assert "no plan sustains the 1000 requests per second" in none.reason
    quick = dataclasses.replace(STATE, alpha=0.2)  # local takes 40 ms, EARLY still 122 at the companion
    assert STATE.remote is not None
    beside = dataclasses.replace(STATE.remote, beta=0.35, queue_ms=0.0)
    link = dataclasses.replace(beside.link, rtt_ms=0.1, up_ms_per_byte=0.0003)
    quick = dataclasses.replace(quick, remote=dataclasses.replace(beside, link=link))
    free, held = (decide(at_weights(Weights(), rate=rate), quick, FACTS) for rate in (0.0, 33.0))
    assert max(free.chosen.stages_ms.values()) > 1000 / 33
    assert max(ms for name, ms in held.chosen.stages_ms.items() if name != "queue") <= 1000 / 33
    assert "does not sustain the 33 requests per second of the contract" in held.reason


@pytest.mark.parametrize("weights", [Weights(), Weights(energy=1.0, cost=1.0), Weights(throughput=1.0, latency=0.0)])
@pytest.mark.parametrize("alpha", [np.inf, np.nan, 1e308])
def test_where_no_prediction_is_a_number_local_runs(weights: Weights, alpha: float) -> None:
    """No estimate is meant to become so; should one, no answer is lost by it."""
    state = dataclasses.replace(STATE, alpha=alpha)
    with np.errstate(all="ignore"):
        assert decide(at_weights(weights), state, RequestFacts(budget_ms=500.0)).chosen.plan == LOCAL
