"""What link and load were while recorded requests were answered, as a trace.

For the time around each request:

    load of the device      measured / usual time of what the device did for it, or for those around it
    load of the companion   the same of what the companion did
    link                    as estimated at its decision; where bytes crossed, so much slower or faster that these take
                            what they took, less the waiting behind those before them
    outage                  decided without a companion

A reply that was given up had not come by then: the link was so slow at least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.replay.happened import LEAST_MS, Happened, local_ms
from agent.replay.recorded_costs import Models
from agent.replay.world import Moment, Stages
from split.plan.plan import LOCAL

RATIO_RANGE: Final = (0.01, 100.0)
"""Of loads: what is further off was not this stage."""
TELLING_RATIO: Final = 0.1
"""Of the whole model: a head that is less says more about calls and copies than about the device."""
NEAREST: Final = 15
NEAREST_MIN: Final = 3
"""Measurements whose median stands for a time at which there was none."""
DOUBTED_S: Final = 60.0
"""What crosses the link later says nothing of it now."""
MBIT_MS: Final = 0.008
"""Milliseconds for a byte at 1 Mbit/s."""
UNKNOWN_LINK: Final = (50.0, 20.0, 20.0)
"""Round trip and rates where none was ever estimated: nothing passes it."""


@dataclass(frozen=True, slots=True)
class _Spans:
    """When the parts of a request were, seconds, and how long, milliseconds."""

    starts_s: float
    """The worker begins."""
    device_ms: float
    """Picture, head, encoding; of a local answer all that is no waiting."""
    sends_s: float
    network_ms: float
    """All of the rest that nothing else accounts for."""
    there_s: float
    """The companion begins."""
    cloud_ms: float


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


def trace_of(happened: Sequence[Happened], models: Models, slowdown: float) -> list[Moment]:
    """Every change where the measurements lie: of a load between the starts of two stages, of the link before a
    transfer, or at the decision that looked at it."""
    spans = _spans(happened, models, slowdown)
    changes: list[_Change] = []
    changes += _device_changes(happened, spans, models, slowdown)
    changes += _cloud_changes(happened, spans, models)
    changes += _link_changes(happened, spans, models)
    changes += _outages(happened)
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


def _spans(happened: Sequence[Happened], models: Models, slowdown: float) -> list[_Spans]:
    """Stalls that say nothing of the device's speed (in a stage that is short, behind work that was no request's) count
    as the link's, where there is one: they were waited for once, and slow down no other plan."""
    found = []
    free_s = 0.0
    """When the worker is through with the requests before."""
    for one in happened:
        ms, stages = one.stages_ms, models[one.model][one.chosen]
        queue_ms = min(ms["queue"], max(free_s - one.at_s, 0.0) * 1e3)
        network_ms = cloud_ms = 0.0
        if one.chosen == LOCAL:
            queue_ms, device_ms = ms["queue"] + ms["activate"], local_ms(one)
        else:
            # of an offload that was given up the head is the whole, which ran afterwards
            device_ms = ms["image"] + ms["encode"] + (ms["head"] if one.chosen.cut is not None else 0.0)
            if not _is_telling(one, models):
                device_ms = min(device_ms, slowdown * _device_ms(one, stages))
            cloud_ms = ms["cloud_decode"] + ms["tail"]
            if not one.answered_there:
                cloud_ms = stages.cloud_decode_ms + stages.tail_ms
            left_ms = one.request.total_ms - queue_ms - ms["cloud_queue"] - slowdown * stages.decode_ms
            if device_ms + cloud_ms > max(left_ms, 0.0):  # served in parts, which overlap
                shrunk = max(left_ms, LEAST_MS) / (device_ms + cloud_ms)
                device_ms, cloud_ms = device_ms * shrunk, cloud_ms * shrunk
            network_ms = max(left_ms - device_ms - cloud_ms, LEAST_MS)
        starts_s = one.at_s + queue_ms / 1e3
        sends_s = free_s = starts_s + device_ms / 1e3
        there_s = sends_s + (network_ms / 2 + ms["cloud_queue"]) / 1e3
        found.append(_Spans(starts_s, device_ms, sends_s, network_ms, there_s, cloud_ms))
    return found


def _device_ms(one: Happened, stages: Stages) -> float:
    """What the device usually does for it before anything leaves, without slowdown."""
    return (stages.image_ms if one.request.encoded_bytes else 0.0) + stages.head_ms + stages.encode_ms


def _is_telling(one: Happened, models: Models) -> bool:
    """Whether what the device did for it says how fast the device was."""
    plans = models[one.model]
    served = one.ran == one.chosen and not one.gave_up
    return served and plans[one.chosen].head_ms >= TELLING_RATIO * plans[LOCAL].head_ms > 0.0


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
    models: Models,
    slowdown: float,
) -> list[_Change]:
    """Where the device computed something worth it."""
    measured: list[tuple[float, float | None, float]] = []
    for one, span in zip(happened, spans, strict=True):
        usual_ms = slowdown * _device_ms(one, models[one.model][one.chosen])
        measured.append((span.starts_s, span.device_ms / usual_ms if _is_telling(one, models) else None, 1.0))
    return _between(_filled(measured), "edge_ratio")


def _cloud_changes(happened: Sequence[Happened], spans: Sequence[_Spans], models: Models) -> list[_Change]:
    """Where the companion answered."""
    measured: list[tuple[float, float | None, float]] = []
    for one, span in zip(happened, spans, strict=True):
        stages = models[one.model][one.chosen]
        expected_ms = stages.cloud_decode_ms + stages.tail_ms
        told = one.answered_there and expected_ms > 0.0
        measured.append((span.there_s, span.cloud_ms / expected_ms if told else None, 1.0))
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


def _link_changes(happened: Sequence[Happened], spans: Sequence[_Spans], models: Models) -> list[_Change]:
    """Round trip and rates. A reply that did not come has the device think the link slow, until something crosses it
    again: for this while the link is taken to have been what it then was."""
    changes: list[_Change] = []
    free_s = there_free_s = 0.0
    """When the way up, and the companion, are through with the requests before."""
    doubtful: list[int] = []
    """Changes since a request was given up."""
    in_doubt = False
    for one, span in zip(happened, spans, strict=True):
        in_doubt |= one.gave_up
        if not one.request.link:
            continue
        rtt_ms, up_mbit_s, down_mbit_s = one.request.link
        changes_at_s = one.at_s
        if one.answered_there:
            stages = models[one.model][one.chosen]
            up_ms = one.payload_bytes(stages.up_bytes) * MBIT_MS / up_mbit_s
            down_ms = stages.down_bytes * MBIT_MS / down_mbit_s
            sent_s = max(free_s, span.sends_s)
            waits_ms = min((sent_s - span.sends_s) * 1e3, span.network_ms - LEAST_MS)
            thought_ms = max(rtt_ms + up_ms + down_ms, LEAST_MS)
            ratio = float(np.clip((span.network_ms - waits_ms) / thought_ms, *RATIO_RANGE))
            # what the companion was busy with for others
            others_ms = max(one.stages_ms["cloud_queue"] - max(there_free_s - span.there_s, 0.0) * 1e3, 0.0)
            rtt_ms, up_mbit_s, down_mbit_s = rtt_ms * ratio + others_ms, up_mbit_s / ratio, down_mbit_s / ratio
            changes_at_s = min(sent_s, max(free_s, one.at_s))
            free_s, there_free_s = sent_s + ratio * up_ms / 1e3, span.there_s + span.cloud_ms / 1e3
        elif one.gave_up:
            stages = models[one.model][one.chosen]
            up_ms = one.payload_bytes(stages.up_bytes) * MBIT_MS / up_mbit_s
            down_ms = stages.down_bytes * MBIT_MS / down_mbit_s
            rtt_ms = max(rtt_ms, span.network_ms - up_ms - down_ms)
            changes_at_s = min(max(free_s, one.at_s), span.sends_s)
        values = {"rtt_ms": rtt_ms, "up_mbit_s": up_mbit_s, "down_mbit_s": down_mbit_s}
        if one.answered_there:
            for place in doubtful:
                at_s, thought = changes[place]
                changes[place] = (at_s, values if at_s > one.at_s - DOUBTED_S else thought)
            doubtful, in_doubt = [], False
        elif in_doubt and not one.gave_up:
            doubtful.append(len(changes))
        changes.append((changes_at_s, values))
    return changes


def _outages(happened: Sequence[Happened]) -> list[_Change]:
    """A request that was decided without a companion says that there was none since some time after the one before."""
    changes: list[_Change] = []
    before_s = heard_s = 0.0
    for one in happened:
        between_s = max((before_s + one.at_s) / 2, min(heard_s, one.at_s))
        changes.append((between_s, {"connected": float(bool(one.request.link))}))
        if one.answered_there:
            heard_s = max(heard_s, one.at_s + one.request.total_ms / 1e3)
        before_s = one.at_s
    return changes
