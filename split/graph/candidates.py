"""Which cuts of a model are worth having: the best ones for any device, companion and link, few enough to be measured.

Taken are, weighed with the bytes of uncoded tensors:

1. the corners of the lower envelope (`envelope.py`): for linear costs, no other cut is fastest anywhere; weighed with
   int8 bytes, too, where that is another question (integers do not shrink, floats do);
2. the same where the inputs may not travel, each alone and all together: else shipping a small input hides every cut;
3. the narrowest cut in each sixth of the compute: contracts may ask for a depth;
4. the Pareto front (`pareto.py`), the narrowest first: throughput wants cuts that no weighted sum prefers.

A cut then moves behind nodes that cost next to nothing and do not widen it, because cuts inside what a runtime fuses
are dear. What is lost: points of 4 beyond the limit, and what truncation dropped (`Candidates` counts both). Costs
are estimates here; the candidates are measured as sessions later, and the choice is made on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final

from split.graph.cost import Shapes, node_flops
from split.graph.cuts import Cut, cut_from_mask, troubles
from split.graph.demands import NO_DEMANDS, Demands, meets, pins_of, require_known
from split.graph.envelope import MinCut, envelope
from split.graph.exposure import shown_inputs
from split.graph.model import Model
from split.graph.pareto import pareto, undominated
from split.graph.weighed import Point, Weighed, as_set, bits, crosses
from split.graph.weighing import in_units, read_values, weigh_values

CANDIDATES_MAX: Final = 24
"""Each costs two segments and a second and a half of profiling, which shall end within a minute."""
SHARE_BINS: Final = 6
"""Parts of the compute in each of which the narrowest cut is a candidate."""
ANCHORS: Final = 12
"""Parts of the compute between whose heaviest nodes the narrowest cut is sought where a front was cut short."""
FUSION_SHARE_MAX: Final = 0.01
"""How much more of the compute a cut may take in to stay behind an activation or an Add that would fuse: cuts inside
such a group cost up to 1 % of the whole (measured on ResNet-50 and MobileNetV3)."""
FUSION_NODES_MAX: Final = 12
"""How far ahead it looks for the end of such a group: a decomposed GELU or layer norm has ten nodes."""
PRIVATE_INPUTS_MAX: Final = 4
"""Up to here every input is kept on the device once alone; models with more (caches, states) only all together."""
APART_SHARE: Final = 0.05
APART_BYTES: Final = 0.1
"""A point of the front is left out when a cut within 5 % of the compute is at most 10 % wider: with costs known that
well, and cuts mixed across requests, it gains nothing that could be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The cuts found, in topological order, and what was not looked at."""

    cuts: tuple[Cut, ...]
    corners: int
    """Sets on the lower envelopes, those that ship nothing or compute nothing on the device not counted."""
    beyond_limit: int
    """Points of the Pareto front that no candidate is near: what there was no room for."""
    dropped: int
    """Partial sets given up in blocks with too many of them: 0 means that the Pareto front is complete."""


def candidates(model: Model, *, limit: int = CANDIDATES_MAX) -> list[Cut]:
    """The cuts worth measuring, in topological order, at most `limit`."""
    return list(find_candidates(model, limit=limit).cuts)


def find_candidates(
    model: Model,
    *,
    limit: int = CANDIDATES_MAX,
    demands: Demands = NO_DEMANDS,
) -> Candidates:
    """At most `limit` legal cuts that meet the demands, weighed at `model.shapes` by estimated operations.

    CutRefused for a demand that names no node or input of this model.
    """
    if model.no_cuts_reason:
        return Candidates(cuts=(), corners=0, beyond_limit=0, dropped=0)
    device = in_units(node_flops(model))
    require_known(model, demands)
    shown = shown_inputs(model)
    refused = troubles(model)
    locked = frozenset(refused) | {name for name, inputs in shown.items() if not demands.private.isdisjoint(inputs)}
    pins = pins_of(model, demands, device)
    values = read_values(model)
    weighed = weigh_values(values, device, device, locked=locked, pins=pins)
    coded = weigh_values(values, device, device, locked=locked, pins=pins, coded=True)
    best = _inner(weighed, envelope(weighed))
    best_coded = [] if _proportional(weighed, coded) else _inner(coded, envelope(coded))
    forced = [
        _inner(weighed, envelope(weigh_values(values, device, device, locked=locked | names, pins=pins)))
        for names in _inputs_kept(model, shown)
    ]
    front = pareto(weighed)
    every = [*best, *_inner(weighed, front.points), *(_between_anchors(weighed) if front.dropped else ())]
    useful, useful_coded = _narrower_than_inputs(weighed, every), _narrower_than_inputs(coded, best_coded)
    best_first = (
        *_spread(lower_hull(useful)),
        *(weighed.point(point.members) for point in _spread(lower_hull(useful_coded))),
        *chain.from_iterable(_spread(lower_hull(points)) for points in forced),
        *_narrowest(weighed, every),
    )
    order = [(point, True) for point in best_first]
    order += [(point, False) for point in sorted(useful, key=lambda point: point.nbytes)]
    chosen = _choose(model, refused, weighed, demands, order, limit)
    return Candidates(
        cuts=tuple(cut for cut, _ in chosen),
        corners=len({point.members for points in (best, best_coded, *forced) for point in points}),
        beyond_limit=sum(not _covered(point, chosen, sum(device)) for point in useful),
        dropped=front.dropped,
    )


def find_candidates_at_both(
    model: Model, shapes: Shapes, *, limit: int = CANDIDATES_MAX, demands: Demands = NO_DEMANDS
) -> Candidates:
    """Those at `model.shapes`, and up to a quarter of `limit` beside that are worth having at `shapes` (values that it
    does not tell weigh as in `model.shapes`): a mask that is narrow in a short text is wide in a long one."""
    here = model.shapes
    try:
        model.shapes = {**here, **shapes}
        there = find_candidates(model, limit=limit // 4, demands=demands)
    finally:
        model.shapes = here
    found = find_candidates(model, limit=limit, demands=demands)
    only_there = _without(there.cuts, found.cuts)
    if len(found.cuts) + len(only_there) > limit:
        found = find_candidates(model, limit=limit - len(only_there), demands=demands)
        only_there = _without(there.cuts, found.cuts)
    cuts = sorted((*found.cuts, *only_there), key=lambda cut: cut.nodes)
    return replace(found, cuts=tuple(cuts))


def _without(cuts: Iterable[Cut], others: Iterable[Cut]) -> list[Cut]:
    known = {cut.mask for cut in others}
    return [cut for cut in cuts if cut.mask not in known]


def lower_hull(points: Sequence[Point]) -> list[Point]:
    """Corners of the lower convex hull of (device, bytes) over a front of growing device costs and shrinking bytes."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda point: (point.device, point.nbytes)):
        if hull and point.nbytes >= hull[-1].nbytes:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (b.device - a.device) * (point.nbytes - a.nbytes) > (b.nbytes - a.nbytes) * (point.device - a.device):
                break
            hull.pop()
        hull.append(point)
    return hull


def mask_from(model: Model, members: int) -> int:
    """A set of numbered nodes as a cut's mask."""
    return as_set(model.nodes[number].bit for number in bits(members))


def _inputs_kept(model: Model, shown: Mapping[str, frozenset[str]]) -> list[frozenset[str]]:
    """What must not cross when inputs are kept on the device: each of a few alone, then all of them."""
    names = [spec.name for spec in model.inputs]
    kept = [{name} for name in names] if len(names) <= PRIVATE_INPUTS_MAX else []
    hidden = [frozenset(value for value, seen in shown.items() if seen & inputs) for inputs in (*kept, set(names))]
    return list(dict.fromkeys(hidden))


def _proportional(one: Weighed, two: Weighed) -> bool:
    """Whether all tensors shrink alike, so that both have the same best cuts."""
    all_one, all_two = (sum(tensor.nbytes for tensor in weighed.tensors) for weighed in (one, two))
    return all(a.nbytes * all_two == b.nbytes * all_one for a, b in zip(one.tensors, two.tensors, strict=True))


def _narrower_than_inputs(weighed: Weighed, points: Iterable[Point]) -> list[Point]:
    """The front of these points without those that are slower than sending the inputs, where these may be sent."""
    front = undominated(points)
    if weighed.must:
        return front
    offload = weighed.point(0)
    return [point for point in front if point.nbytes < offload.nbytes]


def _inner(weighed: Weighed, points: Iterable[Point]) -> list[Point]:
    """Without the set of no node (offload) and that of all (local)."""
    return [point for point in points if point.members not in {0, weighed.everything}]


def _between_anchors(weighed: Weighed) -> list[Point]:
    """The narrowest set with the heaviest node of one twelfth of the compute on the device and that of the next one
    not.

    For graphs whose front was cut short: exact where it matters, one minimum cut each.
    """
    oracle, total = MinCut(weighed), sum(weighed.device)
    found = []
    for block in weighed.blocks:
        anchors: dict[int, int] = {}
        done = block.device
        for node in range(block.start, block.stop):
            part = done * ANCHORS // total
            if part not in anchors or weighed.device[node] > weighed.device[anchors[part]]:
                anchors[part] = node
            done += weighed.device[node]
        found += [oracle.narrowest_between(block, *pair) for pair in pairwise(anchors.values())]
    return _inner(weighed, [point for point in found if point is not None])


def _narrowest(weighed: Weighed, points: Iterable[Point]) -> list[Point]:
    """In each part of the compute the set with the fewest bytes, the narrowest first."""
    total = sum(weighed.device)
    best: dict[int, Point] = {}
    for point in points:
        part = min(point.device * SHARE_BINS // total, SHARE_BINS - 1)
        if part not in best or point.nbytes < best[part].nbytes:
            best[part] = point
    return sorted(best.values(), key=lambda point: point.nbytes)


def _choose(
    model: Model,
    refused: Mapping[str, str],
    weighed: Weighed,
    demands: Demands,
    order: Iterable[tuple[Point, bool]],
    limit: int,
) -> list[tuple[Cut, Point]]:
    """Up to `limit` different cuts out of sets in order of merit; those marked False only where none is near."""
    total = sum(weighed.device)
    chosen: dict[int, tuple[Cut, Point]] = {}
    for point, needed in order:
        if len(chosen) >= limit:
            break
        if not needed and _covered(point, chosen.values(), total):
            continue
        settled = _settled(weighed, point)
        if settled in chosen or not meets(model, weighed, demands, settled):
            continue
        cut = cut_from_mask(model, mask_from(model, settled), refused=refused)
        if cut.legal and cut.boundary:
            chosen[settled] = cut, weighed.point(settled)
    return sorted(chosen.values(), key=lambda pair: (pair[0].nodes, pair[1].device))


def _covered(point: Point, chosen: Iterable[tuple[Cut, Point]], total: int) -> bool:
    """Whether a chosen cut is about as deep and no wider."""
    return any(
        abs(point.device - other.device) <= APART_SHARE * total and other.nbytes <= (1 + APART_BYTES) * point.nbytes
        for _, other in chosen
    )


def _settled(weighed: Weighed, point: Point) -> int:
    """The last set behind this one that is no wider and takes in next to no compute."""
    allowed = FUSION_SHARE_MAX * sum(weighed.device)
    inside = set(bits(point.members))
    members = best = point.members
    nbytes, locked, added, looked = point.nbytes, 0, 0, 0
    for node in range(len(weighed.device)):
        if node in inside or not inside.issuperset(weighed.needs[node]):
            continue
        if looked == FUSION_NODES_MAX or node in weighed.on_cloud:
            break
        looked += 1
        if added + weighed.device[node] > allowed:
            continue
        more = members | 1 << node
        if more == weighed.everything:
            break
        for tensor in weighed.touching[node]:
            change = crosses(tensor, more) - crosses(tensor, members)
            nbytes += change * tensor.nbytes
            locked += change * tensor.locked
        added += weighed.device[node]
        inside.add(node)
        members = more
        if nbytes <= point.nbytes and not locked:
            best = members
    return best


def _spread(items: Sequence[Point]) -> Iterator[Point]:
    """The same items, the middle first, then the middles of both halves and so on: any prefix of it is spread out."""
    ranges = [(0, len(items))]
    for low, high in ranges:  # grows while it is read
        if low < high:
            middle = (low + high) // 2
            yield items[middle]
            ranges += [(low, middle), (middle + 1, high)]
