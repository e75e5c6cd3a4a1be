"""What all plans cost, as one matrix product says it, against the sums of `predict.py` and `score.py` written out plan
by plan, in thousands of random states."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest

from split.plan.objective import NO_BACKLOG, PATIENCE, Backlog, Prices
from split.plan.observation import LinkEstimate, Observation, Opening, RemoteView, SlowStart
from split.plan.plan import RequestFacts
from split.plan.power import Power
from split.plan.predict import predict, station_ms
from split.plan.score import score
from split.plan.slack import MARGIN_MS, MARGIN_RATIO
from split.plan.table import Column, PlanTable
from split.profiles.contract import Weights
from tests.split.plan_world import at_weights

SEED, STATES = 20261201, 2_000
CLASSES = ("gold", "silver", "bronze")


def random_table(rng: np.random.Generator) -> PlanTable:
    """The plans of `plan_world`, with costs drawn for every column that is no flag, and the spread that follows."""
    drawn = [float(one) for one in rng.dirichlet((1.0, 1.0, 1.0, 1.0))]
    weights = Weights(latency=drawn[0], throughput=drawn[1], energy=drawn[2], cost=drawn[3])
    table = at_weights(Weights() if rng.random() < 0.4 else weights, str(rng.choice(CLASSES)))
    costs = table.costs.copy()
    for column in Column:
        if column not in (Column.ALL, Column.IMAGE, Column.REMOTE, Column.ENCODED):
            costs[column] *= rng.lognormal(0.0, 0.5, len(table))
    for call in (Column.ENCODE_CALL, Column.DECODE_CALL, Column.REPLY_CALL):
        costs[call] = rng.exponential(0.5, len(table)) * costs[Column.REMOTE]
    up, down, encoded = costs[Column.UP], costs[Column.DOWN], costs[Column.ENCODED]
    head, tail = costs[Column.HEAD], costs[Column.TAIL]
    spread = [costs[Column.REMOTE], up, down, up * up, up * down, down * down, encoded, encoded * down]
    scatter = rng.exponential(1_000.0, len(table)) * costs[Column.REMOTE]
    return dataclasses.replace(
        table, costs=costs, spread=np.array([*spread, head * head, tail * tail, scatter * scatter])
    )


def random_state(rng: np.random.Generator, plans: int) -> Observation:
    draw: list[float] = rng.lognormal(0.0, 1.0, 14).tolist()
    flip: list[float] = rng.random(8).tolist()
    root = rng.normal(0.0, 1.0, (3, 3)) * np.array([[2.0], [1e-4], [2e-4]])
    (rr, ru, rd), (_, uu, ud), (_, _, dd) = (root @ root.T).tolist()
    waits = SlowStart(after_bytes=np.array([8_000.0, 30_000.0]), extra_ms=np.array([0.0, 6.0, 9.0]) * draw[0])
    remote = RemoteView(
        link=LinkEstimate(
            rtt_ms=10 * draw[1],
            up_ms_per_byte=1e-3 * draw[2],
            down_ms_per_byte=1e-3 * draw[3],
            covariance=(rr, ru, rd, uu, ud, dd),
            age_s=1.0,
            slow_start=waits if flip[0] < 0.3 else None,
        ),
        beta=0.5 * draw[4],
        beta_sigma=0.2,
        speed_ratio=0.4,
        image_ms=3.0,
        queue_ms=4 * draw[5],
        queue_sigma_ms=draw[6],
        opened=np.ones(plans, dtype=np.bool_),
        ahead_bytes=int(5_000 * draw[7]) if flip[1] < 0.5 else 0,
        rest_ms=draw[12],
    )
    backlog = Backlog(device_ms=20 * draw[8], link_ms=20 * draw[9], companion_ms=5 * draw[10])
    opening = Opening(run_ms=rng.exponential(5.0, plans), finish_ms=rng.exponential(5.0, plans))
    return Observation(
        edge_queue_ms=5 * draw[11],
        rest_ms=draw[13],
        slowdown=[1.0, 2.0, 5.0][int(3 * flip[2])],
        alpha=draw[0],
        alpha_sigma=0.1,
        image_ms=7.0,
        image_ratio=1.5,
        remote=remote,
        opening=opening if flip[3] < 0.3 else None,
        power=Power(compute_w=draw[1], send_w=draw[2], receive_w=draw[3], wait_w=draw[4], measured=False, source="x"),
        prices=Prices(per_byte=1e-6 * draw[5], per_companion_ms=1e-3 * draw[6]),
        battery_low=flip[4] < 0.4,
        backlog=backlog if flip[5] < 0.5 else NO_BACKLOG,
    )


@dataclass
class Sum:
    """One plan, added up in words."""

    mean_ms: float
    risk_ms: float
    way_out_ms: float
    stations_ms: tuple[float, float, float, float]
    energy_j: float
    opening_j: float
    money: float


def added_up(table: PlanTable, state: Observation, facts: RequestFacts, row: int) -> Sum:
    remote = state.remote
    assert remote is not None
    link, power = remote.link, state.power
    cost = {column.name.lower(): float(table.costs[column, row]) for column in Column}
    travels, encoded = cost["remote"], cost["encoded"]
    image = state.slowdown * state.image_ratio * state.image_ms if facts.encoded_bytes else 0.0
    head = state.slowdown * state.alpha * cost["head"]
    encode = state.slowdown * (cost["encode"] + cost["encode_call"])
    reply = state.slowdown * (cost["reply"] + cost["reply_call"])
    sent = cost["up"] + encoded * facts.encoded_bytes
    up, down = link.up_ms_per_byte * sent, link.down_ms_per_byte * cost["down"]
    decode = remote.beta * remote.speed_ratio * cost["cloud_decode"] + cost["decode_call"]
    companion = decode + encoded * remote.image_ms + remote.beta * cost["tail"]
    window = 0.0
    if link.slow_start is not None:
        window = link.slow_start.extra_ms[sum(sent > after for after in link.slow_start.after_bytes)]
    once = travels * (link.rtt_ms + link.up_ms_per_byte * remote.ahead_bytes + remote.queue_ms + remote.rest_ms)
    device = cost["image"] * image + head + encode + reply
    opening = state.opening.run_ms[row] if state.opening is not None else 0.0
    finish = state.slowdown * state.opening.finish_ms[row] if state.opening is not None else 0.0
    mean = opening + state.edge_queue_ms + state.rest_ms + device + once + up + window + companion + down
    rr, ru, rd, uu, ud, dd = link.covariance
    u, d = sent if travels else 0.0, cost["down"]
    variance = (
        travels * (rr + remote.queue_sigma_ms**2) + u * u * uu + d * d * dd + 2 * (u * ru + d * rd + u * d * ud)
        + float(table.spread[-1, row]) * (link.up_ms_per_byte**2 + uu)
        + (state.alpha_sigma * head) ** 2 + (remote.beta * remote.beta_sigma * cost["tail"]) ** 2
    )  # fmt: skip
    # A picture that travelled is prepared here after all.
    missing = (1 + MARGIN_RATIO) * state.slowdown * state.alpha * cost["finish"]
    before = state.edge_queue_ms + state.rest_ms + max(cost["image"], encoded) * image + head + encode
    waited = once + window + companion
    return Sum(
        mean_ms=mean,
        risk_ms=mean + table.objective.sigmas * math.sqrt(max(variance, 0.0)),
        way_out_ms=opening + before + finish + missing + MARGIN_MS * travels,
        stations_ms=(device, up, companion, down),
        energy_j=(power.compute_w * device + power.send_w * up + power.receive_w * down + power.wait_w * waited) / 1e3,
        opening_j=power.compute_w * opening / 1e3,
        money=state.prices.per_byte * travels * (sent + d + 2 * 4096) + state.prices.per_companion_ms * companion,
    )


def values(table: PlanTable, state: Observation, sums: list[Sum]) -> list[float]:
    """Every plan's, by the weights of the moment: those of nothing left out, since everything here has a price."""
    remote, backlog, wish = state.remote, state.backlog, table.objective
    assert remote is not None
    waits_ms = backlog.device_ms + backlog.link_ms + backlog.companion_ms
    local = sums[0]
    if waits_ms == 0.0 and not state.battery_low and wish.energy == wish.cost == 0.0:
        return [one.mean_ms for one in sums]
    latency = [one.mean_ms for one in sums]
    if waits_ms > 0.0:  # without what of our own waits already
        ours = remote.ahead_bytes * remote.link.up_ms_per_byte + min(remote.queue_ms, backlog.companion_ms)
        latency = [ms - state.edge_queue_ms - ours * (one is not local) for ms, one in zip(latency, sums, strict=True)]
    joules = [one.energy_j + one.opening_j for one in sums]
    first_offload = next(n for n, plan in enumerate(table.plans) if str(plan).startswith("offload"))
    time = wish.latency + wish.throughput
    waiting = waits_ms / min(latency)
    throughput = waiting / (waiting + PATIENCE * (1 - wish.throughput)) if waits_ms > 0.0 else 0.0
    left = 0.1 if state.battery_low else 1.0
    own = left * (1 - throughput)
    here_ms = state.slowdown * state.alpha * float(table.costs[Column.HEAD, 0])
    found = []
    for one, ms, joule in zip(sums, latency, joules, strict=True):
        device, up, companion, _ = one.stations_ms
        demand = 0.0
        if waits_ms > 0.0:
            demand = backlog.device_ms * device + backlog.link_ms * up + backlog.companion_ms * companion
            demand /= waits_ms
        worth = own * time * ms + left * throughput * demand
        if state.battery_low or wish.energy > 0.0:
            worth += (1 - left + own * wish.energy) * here_ms * joule / joules[0]
        worth += own * wish.cost * here_ms * one.money / sums[first_offload].money
        found.append(worth)
    return found


def test_one_product_over_all_plans_says_what_adding_up_each_says() -> None:
    rng = np.random.default_rng(SEED)
    tables, seen = [random_table(rng) for _ in range(60)], set()
    for n in range(STATES):
        table = tables[n % len(tables)]
        state = random_state(rng, len(table))
        facts = RequestFacts(budget_ms=1e6, encoded_bytes=0 if rng.random() < 0.5 else 9_000)
        found = predict(table, state, facts)
        sums = [added_up(table, state, facts, row) for row in range(len(table))]
        mask = np.ones(len(table), dtype=np.bool_)
        scored = score(table, state, found, mask)
        # A root of what is nothing but rounding is a millionth of it.
        assert found.risk_ms == pytest.approx(np.array([one.risk_ms for one in sums]), rel=1e-9, abs=1e-5), (SEED, n)
        for ours, expected in (
            (found.mean_ms, [one.mean_ms for one in sums]),
            (found.way_out_ms, [one.way_out_ms for one in sums]),
            (station_ms(table, state, facts).T, [one.stations_ms for one in sums]),
            (found.energy_j, [one.energy_j for one in sums]),
            (found.money, [one.money for one in sums]),
            (scored.value_ms, values(table, state, sums)),
        ):
            if ours is not None:
                np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9, err_msg=f"{SEED} {n}")
        seen.add((found.energy_j is None, found.money is None, found.demand_ms is None))
    assert len(seen) == 6  # money counts only where energy does, requests wait or not


def test_a_contract_that_wants_no_finish_here_has_no_way_out_to_wait_for() -> None:
    rng = np.random.default_rng(SEED)
    table = dataclasses.replace(random_table(rng), finishes_here=False)
    assert not predict(table, random_state(rng, len(table)), RequestFacts(budget_ms=1e6)).way_out_ms.any()
