"""A simulated run, recorded by the real recorder and replayed: what was done comes to what it took, and what was not
done to what it would have taken."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from agent.record import BadRecord, Behaviour, Record, unpack
from agent.replay import recording as recording_module
from agent.replay.policies.fixed import Local
from agent.replay.policies.ours import Ours
from agent.replay.recording import AsItWas, Recording, outcomes_as_they_were, replayable
from agent.replay.simulate import Simulation, simulate
from agent.replay.tally import tally
from agent.replay.world import Arrival, Moment, Outcome, Stages, World
from split.plan.objective import Prices
from split.plan.plan import LOCAL
from split.plan.table import Column
from split.profiles.contract import Weights
from tests.agent.recorded_world import PICTURE, POWER, RAW, SPLIT, WORLDS, recorded


def replayed(name: str) -> Recording:
    return replayable(unpack(recorded(name)[2], name=name))


def total_ms(outcomes: list[Outcome]) -> float:
    return sum(one.total_ms for one in outcomes)


@pytest.mark.parametrize("name", WORLDS)
def test_replaying_what_was_done_comes_to_what_was_measured(name: str) -> None:
    recording, measured = replayed(name), recorded(name)[1]
    np.testing.assert_allclose(
        [one.total_ms for one in outcomes_as_they_were(recording)], [one.total_ms for one in measured], atol=0.01
    )
    found = simulate(recording.world, AsItWas(recording))
    assert total_ms(found) == pytest.approx(total_ms(measured), rel=0.03)
    assert sum(one.bytes for one in found) == pytest.approx(sum(one.bytes for one in measured), rel=0.03)


@pytest.mark.parametrize("name", WORLDS)
def test_what_nobody_did_comes_to_what_it_would_have_taken(name: str) -> None:
    """The world that was recorded from is the truth: everything local in it, and in its recording."""
    truth = simulate(recorded(name)[0], Local())
    # What local takes there is the median of seven runs that scatter by 15 %: that scatters by 1.25 · 15 % / √7 = 7 %.
    rel = 0.14 if name == "scattered" else 0.1
    assert total_ms(simulate(replayed(name).world, Local())) == pytest.approx(total_ms(truth), rel=rel)


@pytest.mark.parametrize("name", ["steady", "outage"])
def test_deciding_again_comes_to_what_was_decided(name: str) -> None:
    recording = replayed(name)
    assert total_ms(simulate(recording.world, Ours(recording.known))) == pytest.approx(
        total_ms(recorded(name)[1]), rel=0.1
    )


def test_what_deciding_again_knows_is_what_the_device_believed_and_not_what_turned_out() -> None:
    """Profile and companion said 30 % less than everything took: the world of the recording has what it took, the
    planner what was said."""
    recording = replayed("wrong profile")
    known, took = recording.known["m"], recording.world.models["m"]
    assert took[LOCAL].head_ms == pytest.approx(78.0, rel=0.05)
    assert known.profile.whole_ms == 60.0
    assert known.profile.image_ms == 4.0
    (cut,) = known.profile.cuts
    assert (cut.cut, cut.head_ms, cut.tail_ms) == (SPLIT.cut, 15.0, 46.0)
    assert known.told is not None
    assert {plan: one.tail_ms for plan, one in known.told.items()} == {LOCAL: 0.0, SPLIT: 6.0, RAW: 8.0, PICTURE: 8.0}
    policy = Ours(recording.known)
    simulation = Simulation(recording.world, policy)
    policy.begin(simulation)
    told = policy.planner.known("m", 0.0)
    assert told is not None
    assert told.cloud_ms.tolist() == [0.0, 6.0, 8.0, 8.0]
    # as the device had measured them, before the companion's speed made 8/60 of it
    assert told.table.costs[Column.CLOUD_DECODE].tolist() == pytest.approx([0.0, 0.5, 0.2, 0.0], abs=1e-3)


def test_deciding_again_weighs_as_the_contract_with_the_prices_and_the_power_of_the_record() -> None:
    record = unpack(recorded("steady")[2], name="it")
    asked = Behaviour(weights=(0.0, 0.0, 1.0, 1.0), service_class="gold", strategy="fail", rate_min_per_s=2.5)
    tables = {number: msgspec.structs.replace(table, behaviour=asked) for number, table in record.tables.items()}
    recording = replayable(msgspec.structs.replace(record, tables=tables))
    behaviour = recording.known["m"].contract.behaviour
    assert behaviour.weights == Weights(latency=0.0, energy=1.0, cost=1.0)
    assert (behaviour.service_class, behaviour.fallback.strategy) == ("gold", "fail")
    assert behaviour.throughput_min_per_s == 2.5
    outcomes = simulate(recording.world, Ours(recording.known))
    by_time = simulate(recording.world, Ours(replayed("steady").known))
    assert sum(one.joules for one in outcomes) < sum(one.joules for one in by_time)


def test_energy_and_money_are_those_of_the_record_unless_others_are_given() -> None:
    recording, measured = replayed("steady"), recorded("steady")[1]
    assert recording.world.power == POWER
    assert recording.world.prices == Prices(per_byte=4e-9, per_companion_ms=0.0)
    found = outcomes_as_they_were(recording)
    moved = sum(one.bytes for one in measured)
    assert sum(one.money for one in found) == pytest.approx(4e-9 * moved, rel=0.01)
    # one of them by hand: 2 W for what the device computed, 1.5 and 1 W while bytes crossed, 0.5 W for the rest
    number = next(n for n, one in enumerate(recording.happened) if one.chosen.cut is not None)
    one, ms = found[number], recording.happened[number].request
    up_ms, down_ms = 25_000 * 0.008 / ms.link[1], 4_000 * 0.008 / ms.link[2]
    here_ms = sum(one.stages_ms[stage] for stage in ("image", "head", "encode", "decode"))
    waits_ms = one.total_ms - one.stages_ms["queue"] - here_ms - up_ms - down_ms
    expected = (2.0 * here_ms + 1.5 * up_ms + 1.0 * down_ms + 0.5 * waits_ms) / 1000
    assert one.joules == pytest.approx(expected, rel=1e-6)
    free = replayable(unpack(recorded("steady")[2], name="it"), prices=Prices(per_byte=0.0, per_companion_ms=1.0))
    there_ms = sum(one.stages_ms["tail"] + one.stages_ms["cloud_decode"] for one in outcomes_as_they_were(free))
    assert sum(one.money for one in outcomes_as_they_were(free)) == pytest.approx(there_ms)


def test_a_recorded_request_counts_for_those_it_stands_for() -> None:
    record = unpack(recorded("steady")[2], name="it")
    thinned = [
        (head, type(batch)(seen={"m": 10 * len(batch.rows)}, lost=0, rows=batch.rows)) for head, batch in record.batches
    ]
    recording = replayable(Record(heads=record.heads, tables=record.tables, batches=tuple(thinned), torn_bytes=0))
    assert set(recording.weights) == {10.0}


def test_a_clock_that_was_set_is_no_pause_of_half_a_century() -> None:
    """Started in 1970, set by NTP after the first batches: the same requests, a minute apart there."""
    record = unpack(recorded("steady")[2], name="it")
    head, batches = record.heads[0], record.batches
    early = msgspec.structs.replace(head, started_s=head.started_s - 1.7e9)
    half = len(batches) // 2
    jumped = tuple((int(n >= half), batch) for n, (_, batch) in enumerate(batches))
    recording = replayable(msgspec.structs.replace(record, heads=(early, head), batches=jumped))
    assert recording.gaps == 1
    straight = replayable(record)
    assert straight.gaps == 0
    at_s, straight_s = ([one.at_s for one in each.happened] for each in (recording, straight))
    steps_s, straight_steps_s = np.diff(at_s), np.diff(straight_s)
    jump = int(steps_s.argmax())
    assert steps_s[jump] == pytest.approx(60.0)
    np.testing.assert_allclose(np.delete(steps_s, jump), np.delete(straight_steps_s, jump), atol=1e-6)
    found = simulate(recording.world, Ours(recording.known))
    assert total_ms(found) == pytest.approx(total_ms(recorded("steady")[1]), rel=0.1)


def test_of_a_long_record_runs_are_replayed_that_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replayed("steady")
    monkeypatch.setattr(recording_module, "REPLAYED_MAX", 120)
    monkeypatch.setattr(recording_module, "RUN", 40)
    recording = replayed("steady")
    assert (recording.recorded, len(recording.happened)) == (400, 120)
    assert sum(recording.weights) == pytest.approx(sum(whole.weights))
    at_s = [one.at_s for one in whole.happened]
    places = [at_s.index(one.at_s) for one in recording.happened]
    assert places == [*range(40), *range(133, 173), *range(266, 306)]
    mean_ms, whole_ms = (
        tally("", simulate(each.world, Ours(each.known)), each.weights).mean_ms for each in (recording, whole)
    )
    assert mean_ms == pytest.approx(whole_ms, rel=0.1)


def test_plans_that_the_contract_forbids_are_not_replayed_unless_they_ran() -> None:
    record = unpack(recorded("steady")[2], name="it")
    batches = tuple(
        (head, type(batch)(seen=batch.seen, lost=0, rows=tuple(type(row)(*_private(row)) for row in batch.rows)))
        for head, batch in record.batches
    )
    recording = replayable(Record(heads=record.heads, tables=record.tables, batches=batches, torn_bytes=0))
    assert set(recording.world.models) == {"m local-only"}
    ran = {one.chosen for one in recording.happened}
    assert set(recording.world.models["m local-only"]) == ran | {LOCAL}


def _private(row: object) -> list[object]:
    return [2 if field == "privacy" else getattr(row, field) for field in row.__struct_fields__]  # type: ignore[attr-defined]


def test_a_request_of_a_recording_ends_at_its_deadline_and_leaves_the_queue() -> None:
    """100 ms each. The first runs, and is given up at 50 ms; the third, the most urgent, is given up before its turn;
    the second runs from 100 to 200 ms."""
    deadlines_ms = (50.0, 200.0, 60.0)
    world = World(
        models={"m": {LOCAL: Stages(head_ms=100.0)}},
        trace=(Moment(at_s=0.0, up_mbit_s=1.0, down_mbit_s=1.0, rtt_ms=1.0),),
        arrivals=[Arrival(at_s=n / 100, model="m", deadline_ms=ms) for n, ms in enumerate(deadlines_ms)],
        gives_up=True,
    )
    found = simulate(world, Local())
    assert [one.total_ms for one in found] == pytest.approx([50.0, 190.0, 60.0])
    assert [one.missed for one in found] == [True, False, True]
    assert found[2].stages_ms == {"queue": pytest.approx(60.0)}
    assert replayed("steady").world.gives_up


def test_a_record_without_requests_is_refused() -> None:
    record = unpack(recorded("steady")[2], name="it")
    with pytest.raises(BadRecord, match="holds no request"):
        replayable(Record(heads=record.heads, tables={}, batches=(), torn_bytes=0))
