"""A record of traffic as a world that policies can be replayed in.

What is known is what was measured along the way that was taken. From each request follow, for the time around it:

    load of the device      measured / profiled time of what the device did for it, or for those around it
    load of the companion   measured / told time of what the companion did, in the same way
    link                    as estimated at its decision; where bytes crossed, so much slower or faster that these take
                            what they took, less the waiting behind those before them
    outage                  decided without a companion, or answered here since the companion did not

A request that waited in a queue says nothing of what made it wait: queues come about again by replaying.
Time that no stage accounts for (handing over, waking up) counts as the device's for a local answer, else as the link's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from agent.record import STAGES, BadRecord, Record, Request, Table
from agent.replay.world import Arrival, Fate, Moment, Outcome, Policy, Stages, World
from split.ids import CutId
from split.plan.objective import Prices
from split.plan.plan import LOCAL, Placement, Plan
from split.plan.power import NO_POWER, Power

RATIO_RANGE: Final = (0.01, 100.0)
"""Of loads: what is further off was not this stage."""
SCALE_STEPS: Final = 8
"""Requests whose work is within 5 % of each other are of one size, as `agent/recorder.py` has it."""
TELLING_RATIO: Final = 0.1
"""Of the whole model: a head that is less says more about calls and copies than about the device."""
NEAREST: Final = 15
NEAREST_MIN: Final = 3
"""Measurements whose median stands for a time at which there was none."""
DOUBTED_S: Final = 60.0
"""What crosses the link later says nothing of it now."""
LEAST_MS: Final = 0.01
MBIT_MS: Final = 0.008
"""Milliseconds for a byte at 1 Mbit/s."""
UNKNOWN_LINK: Final = (50.0, 20.0, 20.0)
"""Round trip and rates where none was ever estimated: nothing passes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One recorded request and what it stands for."""

    request: Request
    at_s: float
    """On the world's clock."""
    weight: float
    """Requests that it stands for."""
    model: str
    """In the world."""
    chosen: Plan
    ran: Plan | None
    """None: it was not answered."""

    @property
    def missed(self) -> bool:
        return self.ran is None or self.request.total_ms > self.request.deadline_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A record, ready to be replayed."""

    world: World
    happened: tuple[Happened, ...]
    """In the order of the world's arrivals."""
    zero_s: float
    """Wall clock at the world's 0."""

    @property
    def weights(self) -> np.ndarray:
        return np.array([one.weight for one in self.happened])


class AsItWas(Policy):
    """Every request by the plan that was chosen for it."""

    name = "as it was, replayed"

    def __init__(self, recording: Recording) -> None:
        self._happened = recording.happened
        self._next = 0

    def choose(self, arrival: Arrival, now_s: float, edge_queue_ms: float) -> Plan:
        chosen = self._happened[self._next].chosen
        self._next += 1
        return chosen


def replayable(record: Record, *, prices: Prices | None = None, power: Power | None = None) -> Recording:
    """The world that a record tells of. `prices`, `power`: instead of the recorded ones. BadRecord where it holds no
    request."""
    happened = _happened(record)
    if not happened:
        raise BadRecord("the record holds no request: there is nothing to replay; send some, and ask again")
    zero_s = min(one.at_s for one in happened)
    laid = sorted((replace(one, at_s=one.at_s - zero_s) for one in happened), key=lambda one: one.at_s)
    models = _models(record, laid)
    head = record.heads[-1]
    return Recording(
        world=World(
            models=models,
            trace=_trace(laid, models, head.slowdown),
            arrivals=[
                Arrival(
                    at_s=one.at_s,
                    model=one.model,
                    deadline_ms=one.request.deadline_ms,
                    encoded_bytes=one.request.encoded_bytes,
                )
                for one in laid
            ],
            slowdown=head.slowdown,
            power=power or _power(record, laid),
            prices=prices
            or Prices(per_byte=head.price_per_gb / 1e9, per_companion_ms=head.price_per_companion_s / 1e3),
            lost_after_s=_lost_after_s(laid),
            back_after_s=0.0,  # the trace says when there was a companion again
        ),
        happened=tuple(laid),
        zero_s=zero_s,
    )


def outcomes_as_they_were(recording: Recording) -> list[Outcome]:
    """What was measured, with bytes, energy and money reckoned from it as a simulation does."""
    return [_as_it_was(recording.world, number, one) for number, one in enumerate(recording.happened)]


# -- requests ---------------------------------------------------------------------------------------------------------


def _happened(record: Record) -> list[Happened]:
    """On the wall clock."""
    found = []
    for head, batch in record.batches:
        tables = [record.tables[row.table] for row in batch.rows]
        kept = Counter(table.model for table in tables)
        for row, table in zip(batch.rows, tables, strict=True):
            plans = _plans(table)
            found.append(
                Happened(
                    request=row,
                    at_s=record.heads[head].started_s + row.at_s,
                    weight=batch.seen.get(table.model, 0) / kept[table.model],
                    model=_world_name(table, row),
                    chosen=plans[row.plan],
                    ran=None if row.ran < 0 else plans[row.ran],
                )
            )
    return found


def _plans(table: Table) -> list[Plan]:
    return [_plan(costs.plan) for costs in table.plans]


def _plan(label: str) -> Plan:
    """As `Plan.__str__` writes it; BadRecord for anything else."""
    match label.split():
        case ["local"]:
            return LOCAL
        case ["split", cut, codec]:
            return Plan(placement=Placement.SPLIT, cut=CutId(cut), codec=codec)
        case ["offload", codec]:
            return Plan(placement=Placement.OFFLOAD, codec=codec)
        case _:
            raise BadRecord(f"the record has a plan {label!r}; expected local, split CUT CODEC or offload CODEC")


def _world_name(table: Table, row: Request) -> str:
    """Requests that may be served by the same plans at the same costs are of one model: a policy learns them apart."""
    size = "×".join(map(str, table.sizes))
    step = round(math.log2(max(row.scale, 1e-6)) * SCALE_STEPS)
    parts = [table.model, f"at {size}" if size else "", f"scaled {step}" if step else ""]
    parts.append(("", "no-raw-input", "local-only")[min(row.privacy, 2)])
    return " ".join(filter(None, parts))


def _models(record: Record, happened: Sequence[Happened]) -> dict[str, dict[Plan, Stages]]:
    """Costs of each model as its last table has them, those plans that the contract allows and all that ran."""
    found: dict[str, dict[Plan, Stages]] = {}
    used: dict[str, set[Plan]] = {}
    encoded: dict[str, list[int]] = {}
    for one in happened:
        used.setdefault(one.model, {LOCAL}).update((one.chosen, one.ran or LOCAL))
        if one.request.encoded_bytes:
            encoded.setdefault(one.model, []).append(one.request.encoded_bytes)
    for one in happened:
        table, row = record.tables[one.request.table], one.request
        scale = 2.0 ** (round(math.log2(max(row.scale, 1e-6)) * SCALE_STEPS) / SCALE_STEPS)
        sizes = encoded.get(one.model, [0])
        plans = {
            plan: _stages(table, number, scale, round(sum(sizes) / len(sizes)))
            for number, plan in enumerate(_plans(table))
            if table.plans[number].allowed > row.privacy or plan in used[one.model]
        }
        found[one.model] = found.get(one.model, {}) | plans
    return found


def _stages(table: Table, number: int, scale: float, encoded_bytes: int) -> Stages:
    costs = table.plans[number]
    plan = _plan(costs.plan)
    encoded = plan.codec == "encoded"
    return Stages(
        image_ms=0.0 if encoded else table.image_ms,
        head_ms=costs.head_ms * scale,
        encode_ms=costs.encode_ms * scale,
        up_bytes=encoded_bytes if encoded else round(costs.up_bytes * scale),
        cloud_decode_ms=costs.cloud_decode_ms * scale,
        tail_ms=costs.tail_ms * scale,
        down_bytes=round(costs.down_bytes * scale),
        decode_ms=costs.decode_ms * scale,
        finish_ms=costs.finish_ms * scale + (table.image_ms if encoded else 0.0),
    )


def _power(record: Record, happened: Sequence[Happened]) -> Power:
    """As it was written last."""
    said = record.tables[happened[-1].request.table].power
    if not said.source:
        return NO_POWER
    return Power(
        compute_w=said.compute_w,
        send_w=said.send_w,
        receive_w=said.receive_w,
        wait_w=said.wait_w,
        measured=said.measured,
        source=said.source,
    )


# -- what link and load were ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """Of link and load, as they are put together."""

    edge_ratio: float = 1.0
    cloud_ratio: float = 1.0
    rtt_ms: float = UNKNOWN_LINK[0]
    up_mbit_s: float = UNKNOWN_LINK[1]
    down_mbit_s: float = UNKNOWN_LINK[2]
    connected: bool = True


_Change = tuple[float, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class _Spans:
    """When the parts of a request were, seconds, and how long, milliseconds."""

    starts_s: float
    """The worker begins."""
    device_ms: float
    """Picture, head, encoding."""
    sends_s: float
    network_ms: float
    there_s: float
    """The companion begins."""
    cloud_ms: float


def _trace(happened: Sequence[Happened], models: Mapping[str, Mapping[Plan, Stages]], slowdown: float) -> list[Moment]:
    """Every change where the measurements lie: of a load between the starts of two stages, of the link before a
    transfer, or at the decision that looked at it."""
    spans = [_spans(one) for one in happened]
    changes: list[_Change] = []
    changes += _device_changes(happened, spans, models, slowdown)
    changes += _cloud_changes(happened, spans, models)
    changes += _link_changes(happened, spans, models)
    changes += _outages(happened, spans)
    changes.sort(key=lambda change: change[0])
    state, moments = _State(), dict[float, Moment]()
    for at_s, values in [(0.0, {}), *changes]:
        for name, value in values.items():
            setattr(state, name, value)
        at_s = max(at_s, 0.0)
        moments[at_s] = Moment(
            at_s=at_s,
            up_mbit_s=state.up_mbit_s,
            down_mbit_s=state.down_mbit_s,
            rtt_ms=state.rtt_ms,
            connected=bool(state.connected),
            edge_ratio=state.edge_ratio,
            cloud_ratio=state.cloud_ratio,
        )
    return list(moments.values())


def _measured(one: Happened) -> dict[str, float]:
    return dict.fromkeys(STAGES, 0.0) | dict(zip(STAGES, one.request.stages_ms, strict=False))


def _answered_there(one: Happened) -> bool:
    return one.ran is not None and one.ran != LOCAL and not one.request.fallback


def _spans(one: Happened) -> _Spans:
    ms, total_ms = _measured(one), one.request.total_ms
    before_ms = ms["queue"] + ms["activate"]
    device_ms = ms["image"] + ms["head"] + ms["encode"]
    cloud_ms = ms["cloud_decode"] + ms["tail"]
    if _answered_there(one):
        network_ms = max(total_ms - before_ms - device_ms - cloud_ms - ms["cloud_queue"] - ms["decode"], LEAST_MS)
    elif one.ran == LOCAL == one.chosen:
        device_ms, network_ms = max(total_ms - before_ms, LEAST_MS), 0.0
    else:
        network_ms = 0.0
    starts_s = one.at_s + before_ms / 1e3
    sends_s = starts_s + device_ms / 1e3
    return _Spans(
        starts_s=starts_s,
        device_ms=device_ms,
        sends_s=sends_s,
        network_ms=network_ms,
        there_s=sends_s + (network_ms / 2 + ms["cloud_queue"]) / 1e3,
        cloud_ms=cloud_ms,
    )


def _between(measured: list[tuple[float, float]], name: str) -> list[_Change]:
    """(Start, ratio) → changes halfway between the starts: which of them a stage meets does not hang on a hair."""
    measured.sort()
    return [
        ((measured[n - 1][0] + at_s) / 2 if n else 0.0, {name: float(np.clip(ratio, *RATIO_RANGE))})
        for n, (at_s, ratio) in enumerate(measured)
    ]


def _device_changes(
    happened: Sequence[Happened],
    spans: Sequence[_Spans],
    models: Mapping[str, Mapping[Plan, Stages]],
    slowdown: float,
) -> list[_Change]:
    """Where the device computed something worth it."""
    measured: list[tuple[float, float | None, float]] = []
    for one, span in zip(happened, spans, strict=True):
        plans = models[one.model]
        stages, whole_ms = plans[one.chosen], plans[LOCAL].head_ms
        image_ms = stages.image_ms if one.request.encoded_bytes else 0.0
        expected_ms = image_ms + stages.head_ms + stages.encode_ms
        ratio = None
        if one.ran is not None and one.ran == one.chosen and stages.head_ms >= TELLING_RATIO * whole_ms > 0.0:
            ratio = span.device_ms / (slowdown * expected_ms)
        measured.append((span.starts_s, ratio, one.request.alpha))
    return _between(_filled(measured), "edge_ratio")


def _cloud_changes(
    happened: Sequence[Happened], spans: Sequence[_Spans], models: Mapping[str, Mapping[Plan, Stages]]
) -> list[_Change]:
    """Where the companion answered."""
    measured: list[tuple[float, float | None, float]] = []
    for one, span in zip(happened, spans, strict=True):
        stages = models[one.model][one.chosen]
        expected_ms = stages.cloud_decode_ms + stages.tail_ms
        told = _answered_there(one) and expected_ms > 0.0
        measured.append((span.there_s, span.cloud_ms / expected_ms if told else None, one.request.beta))
    return _between(_filled(measured), "cloud_ratio")


def _filled(measured: list[tuple[float, float | None, float]]) -> list[tuple[float, float]]:
    """(Start, measured ratio or None, drift that the planner had learned) → (start, ratio): where nothing was measured
    the median of the nearest measurements, which no single stall moves, or the drift where there are too few."""
    measured.sort(key=lambda one: one[0])
    told = [(at_s, ratio) for at_s, ratio, _ in measured if ratio is not None]
    times = [at_s for at_s, _ in told]
    found = []
    for at_s, ratio, drift in measured:
        if ratio is None:
            place = min(max(bisect_left(times, at_s) - NEAREST // 2, 0), max(len(told) - NEAREST, 0))
            near = [one for _, one in told[place : place + NEAREST]]
            ratio = float(np.median(near)) if len(near) >= NEAREST_MIN else drift
        found.append((at_s, ratio))
    return found


def _link_changes(
    happened: Sequence[Happened], spans: Sequence[_Spans], models: Mapping[str, Mapping[Plan, Stages]]
) -> list[_Change]:
    """Round trip and rates. A reply that did not come has the device think the link slow, until something crosses it
    again: for this while the link is taken to have been what it then was."""
    changes: list[_Change] = []
    free_s = there_free_s = 0.0
    """When the way up, and the companion, are through with the requests before."""
    doubtful: list[int] = []
    """Changes since a request was given up."""
    in_doubt = False
    for one, span in zip(happened, spans, strict=True):
        in_doubt |= _given_up_after_ms(one) is not None
        if not one.request.link:
            continue
        rtt_ms, up_mbit_s, down_mbit_s = one.request.link
        changes_at_s = one.at_s
        if _answered_there(one):
            stages = models[one.model][one.chosen]
            up_ms = _payload_bytes(one, stages) * MBIT_MS / up_mbit_s
            down_ms = stages.down_bytes * MBIT_MS / down_mbit_s
            sent_s = max(free_s, span.sends_s)
            waits_ms = min((sent_s - span.sends_s) * 1e3, span.network_ms - LEAST_MS)
            ratio = float(np.clip((span.network_ms - waits_ms) / (rtt_ms + up_ms + down_ms), *RATIO_RANGE))
            # what the companion was busy with for others
            others_ms = max(_measured(one)["cloud_queue"] - max(there_free_s - span.there_s, 0.0) * 1e3, 0.0)
            rtt_ms, up_mbit_s, down_mbit_s = rtt_ms * ratio + others_ms, up_mbit_s / ratio, down_mbit_s / ratio
            changes_at_s = min(sent_s, max(free_s, one.at_s))
            free_s, there_free_s = sent_s + ratio * up_ms / 1e3, span.there_s + span.cloud_ms / 1e3
        values = {"rtt_ms": rtt_ms, "up_mbit_s": up_mbit_s, "down_mbit_s": down_mbit_s}
        if _answered_there(one):
            for place in doubtful:
                at_s, thought = changes[place]
                changes[place] = (at_s, values if at_s > one.at_s - DOUBTED_S else thought)
            doubtful, in_doubt = [], False
        elif in_doubt:
            doubtful.append(len(changes))
        changes.append((changes_at_s, values))
    return changes


def _outages(happened: Sequence[Happened], spans: Sequence[_Spans]) -> list[_Change]:
    """A request that was decided without a companion says there was none since some time after the request before; one
    that was given up says that nothing came from when it was sent until its answer was made here."""
    changes: list[_Change] = []
    before_s, heard_s, silent_until_s = 0.0, 0.0, -math.inf
    for one, span in zip(happened, spans, strict=True):
        between_s = max((before_s + one.at_s) / 2, min(heard_s, one.at_s))
        done_s = one.at_s + one.request.total_ms / 1e3
        if not one.request.link:
            changes.append((between_s, {"connected": 0.0}))
        elif (waited_ms := _given_up_after_ms(one)) is not None:
            changes.append((between_s, {"connected": 1.0}))
            changes.append((span.sends_s + min(waited_ms / 4, 1.0) / 1e3, {"connected": 0.0}))
            silent_until_s = done_s
        elif one.at_s >= silent_until_s or _answered_there(one):
            changes.append((between_s, {"connected": 1.0}))
        if _answered_there(one):
            heard_s = max(heard_s, done_s)
        before_s = one.at_s
    return changes


def _given_up_after_ms(one: Happened) -> float | None:
    """How long a request waited for the companion before it was finished here; None for one that was not."""
    if one.chosen == LOCAL or one.ran is None or not one.request.fallback:
        return None
    return max(one.request.total_ms - sum(one.request.stages_ms), 0.0)


def _lost_after_s(happened: Sequence[Happened]) -> float:
    waited_ms = [ms for one in happened if (ms := _given_up_after_ms(one)) is not None]
    return float(np.median(waited_ms)) / 1e3 if waited_ms else 0.0


def _payload_bytes(one: Happened, stages: Stages) -> int:
    return one.request.encoded_bytes if one.chosen.codec == "encoded" else stages.up_bytes


# -- what it came to --------------------------------------------------------------------------------------------------


def _as_it_was(world: World, number: int, one: Happened) -> Outcome:
    arrival, ms, link = world.arrivals[number], _measured(one), one.request.link or UNKNOWN_LINK
    stages = world.models[one.model][one.chosen]
    sent = one.chosen != LOCAL and (one.ran == one.chosen or one.request.fallback)
    up_bytes = _payload_bytes(one, stages) if sent else 0
    down_bytes = stages.down_bytes if _answered_there(one) else 0
    send_ms, receive_ms = up_bytes * MBIT_MS / link[1], down_bytes * MBIT_MS / link[2]
    here_ms = ms["image"] + ms["head"] + ms["encode"] + ms["decode"] + ms["local_tail"]
    there_ms = ms["cloud_decode"] + ms["tail"]
    return Outcome(
        number=number,
        arrival=arrival,
        plan=one.chosen,
        fate=Fate.LATE if one.chosen != LOCAL and one.request.fallback else Fate.PLANNED,
        total_ms=one.request.total_ms,
        stages_ms=ms,
        missed=one.missed,
        joules=world.power.joules(
            compute_ms=here_ms,
            send_ms=send_ms,
            receive_ms=receive_ms,
            wait_ms=max(one.request.total_ms - here_ms - send_ms - receive_ms, 0.0),
        ),
        bytes=up_bytes + down_bytes,
        money=world.prices.per_byte * (up_bytes + down_bytes) + world.prices.per_companion_ms * there_ms,
    )
