"""Trade-offs between device cost, bytes and cloud cost that no weighted sum prefers: what throughput needs.

A pipeline is as fast as its slowest stage, min max(device, bytes, cloud); the best set for it may lie inside the
convex hull, so the envelope misses it. This finds the sets that no other one beats in all three, by dynamic
programming over closed sets between neighbouring cut vertices. Over closed sets ("ideals") is Tarnawski et al.,
"Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020; the cut vertices are QDMP's
(`weighed.py`). Ours: states that agree on what later nodes can still see are one state, and truncation is counted,
never silent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from split.graph.weighed import INPUT, Block, Point, Weighed, crosses

STATES_MAX: Final = 512
"""States of one block at a time: all closed sets of nine parallel nodes, and more than a mobile CNN's blocks have."""
STEPS_MAX: Final = 100_000
"""State transitions for a whole graph, about: a quarter of a second. Sets how many states large blocks may have."""
STATES_MIN: Final = 16
BINS: Final = 64
"""Parts of the compute: a block with too many states keeps the narrowest ones of each."""

_Costs = tuple[int, int, int, int]
"""(nodes later ones read, tensors paid for that later nodes read, device, cloud): what tells two states apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Sets that none beats in all three costs, by growing device cost."""

    points: tuple[Point, ...]
    dropped: int
    """Partial sets that were given up for want of room: 0 means the front is complete."""


def pareto(weighed: Weighed, *, states_max: int = STATES_MAX, steps_max: int = STEPS_MAX) -> Front:
    """The Pareto front over all closed sets that respect locks and pins, the empty and the full one among them.

    With one cost for both sides (the companion does what the device leaves) every device cost is on the front with its
    fewest bytes. At most `states_max` states are kept at a time, fewer where `steps_max` asks for it.
    """
    large = sum(block.stop - block.start for block in weighed.blocks)
    room = max(min(states_max, steps_max // max(large, 1)), STATES_MIN)
    points: list[Point] = []
    dropped = 0
    for block in weighed.blocks:
        found, lost = _block(weighed, block, room)
        points += found
        dropped += lost
    return Front(points=tuple(undominated(points)), dropped=dropped)


def undominated(points: Iterable[Point]) -> list[Point]:
    """Points that no other one equals or beats in all three costs, by growing device cost."""
    kept: list[Point] = []
    # Bytes and cloud costs of a staircase: of those kept so far, what none of them beats in these two.
    widths: list[int] = []
    clouds: list[int] = []
    for point in sorted(points, key=lambda point: (point.device, point.nbytes, point.cloud)):
        place = bisect_right(widths, point.nbytes)
        if place and clouds[place - 1] <= point.cloud:
            continue
        kept.append(point)
        place = bisect_left(widths, point.nbytes)
        end = place
        while end < len(clouds) and clouds[end] >= point.cloud:
            end += 1
        widths[place:end], clouds[place:end] = [point.nbytes], [point.cloud]
    return kept


def _block(weighed: Weighed, block: Block, room: int) -> tuple[list[Point], int]:
    """All sets of a block worth keeping, and how many partial ones were dropped."""
    start, stop = block.start, block.stop
    made: list[list[int]] = [[] for _ in range(start, stop)]
    read: list[list[int]] = [[] for _ in range(start, stop)]
    ends: list[int] = [0] * (stop - start)  # tensors whose last reader a node is
    last_reader = [node - start for node in range(start, stop)]
    source = 0  # tensors that are on the device before the block
    for number, tensor in enumerate(block.tensors):
        if tensor.maker == INPUT or tensor.maker < start:
            source |= 1 << number
        else:
            at = tensor.maker - start
            last_reader[at] = max(last_reader[at], tensor.readers[-1] - start)
            if tensor.readers[-1] >= stop:
                made[at].append(number)
                continue  # it crosses as soon as it is made: readers inside change nothing
        for reader in tensor.readers:
            if reader >= start:
                read[reader - start].append(number)
        ends[tensor.readers[-1] - start] |= 1 << number
    forgotten: list[int] = [0] * (stop - start)
    for at, last in enumerate(last_reader):
        if last < stop - start:
            forgotten[last] |= 1 << at
    states: dict[_Costs, tuple[int, int]] = {(0, 0, block.device, block.cloud): (block.passing_bytes, 0)}
    dropped = 0
    for at, node in enumerate(range(start, stop)):
        bit = 1 << at
        needs = sum(1 << needed - start for needed in weighed.needs[node] if needed >= start)
        inside = bool(block.may >> node & 1)
        outside = not block.must >> node & 1
        made_bytes = sum(block.tensors[number].nbytes for number in made[at])
        inside &= not any(block.tensors[number].locked for number in made[at])
        paid_for = [
            (
                1 << number,
                0 if source >> number & 1 else 1 << block.tensors[number].maker - start,
                block.tensors[number],
            )
            for number in read[at]
        ]
        fresh: dict[_Costs, tuple[int, int]] = {}
        for (seen, paid, device, cloud), (nbytes, members) in states.items():
            if inside and seen & needs == needs:
                key = ((seen | bit) & ~forgotten[at], paid & ~ends[at], device + weighed.device[node], cloud)
                value = (nbytes + made_bytes, members | bit)
                if key not in fresh or value < fresh[key]:
                    fresh[key] = value
            if outside:
                legal = True
                for flag, maker, tensor in paid_for:
                    if not paid & flag and seen & maker == maker:
                        paid |= flag
                        nbytes += tensor.nbytes
                        legal &= not tensor.locked
                key = (seen & ~forgotten[at], paid & ~ends[at], device, cloud + weighed.cloud[node])
                value = (nbytes, members)
                if legal and (key not in fresh or value < fresh[key]):
                    fresh[key] = value
        states = fresh
        if len(states) > room:
            dropped += len(states)
            states = _narrowest(states, room)
            dropped -= len(states)
    found = [
        Point(device=device, nbytes=nbytes, cloud=cloud, members=block.before | members << start)
        for (_, _, device, cloud), (nbytes, members) in states.items()
    ]
    return [*found, *_prefixes(weighed, block)] if dropped else found, dropped


def _prefixes(weighed: Weighed, block: Block) -> Iterator[Point]:
    """The sets of the block that hold all nodes up to one: never lost, however many others are dropped."""
    members = block.before
    point = weighed.point_in(block, 0)
    device, nbytes, cloud = point.device, point.nbytes, point.cloud
    locked = sum(tensor.locked and crosses(tensor, members) for tensor in block.tensors)
    for node in range(block.start, block.stop):
        if not block.may >> node & 1:
            return
        more = members | 1 << node
        for tensor in weighed.touching[node]:
            change = crosses(tensor, more) - crosses(tensor, members)
            nbytes += change * tensor.nbytes
            locked += change * tensor.locked
        members = more
        device += weighed.device[node]
        cloud -= weighed.cloud[node]
        if not locked and not block.must & ~members:
            yield Point(device=device, nbytes=nbytes, cloud=cloud, members=members)


def _narrowest(states: dict[_Costs, tuple[int, int]], room: int) -> dict[_Costs, tuple[int, int]]:
    """Of each part of the range of device costs the states with the fewest bytes so far."""
    least = min(key[2] for key in states)
    width = (max(key[2] for key in states) - least) // min(BINS, room // 4) + 1
    bins: dict[int, int] = {}
    rank: list[tuple[int, int, _Costs]] = []
    for key, value in sorted(states.items(), key=lambda item: item[1][0]):
        part = (key[2] - least) // width
        bins[part] = bins.get(part, -1) + 1
        rank.append((bins[part], value[0], key))
    return {key: states[key] for _, _, key in sorted(rank)[:room]}
