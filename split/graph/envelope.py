"""The cuts that are fastest for some device, companion and link, exactly: the lower envelope over all closed sets.

Latency of a set S is w·(device(S), bytes(S), cloud(rest)) with weights w that are how slow the device, the link and the
companion are at the moment. For given weights the best set is a minimum cut. Over all weights, the best sets are the
corners of the lower convex hull of all (device, bytes, cloud): far fewer than sets.

What is whose. The network (a node's costs to source and sink, one auxiliary vertex for each tensor so that it is paid
once however many read it, infinite arcs against the flow of data) is DADS (Hu et al., "Dynamic adaptive DNN surgery
for inference acceleration on the edge", INFOCOM 2019); a closed set of least weight as a minimum cut is Picard 1976.
Searching between adjacent cut vertices is QDMP (see `weighed.py`). Finding all corners by asking the minimum at each
corner of the envelope known so far, 2k − 1 questions for k corners with one parameter, is Eisner & Severance, JACM
1976. That minimum cuts are nested when the sink's capacities only grow with the parameter, so that later questions
are asked between earlier answers, is Gallo, Grigoriadis & Tarjan, SIAM J. Comput. 1989; we take the nesting and start
each flow afresh. Ours are the inputs that the tail needs as tensors of the source, locked tensors, blocks skipped by
a bound, and integers throughout.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import gcd

from split.graph.flow import Network
from split.graph.weighed import INPUT, Block, Crossable, Point, Weighed, as_set, bits, crosses

_Vector = tuple[int, int, int]
Weights = tuple[int, int, int]
"""What one unit of (device cost, bytes, cloud cost) costs: integers, not negative."""


def envelope(weighed: Weighed) -> list[Point]:
    """The closed sets, one for each corner of the lower envelope, by growing device cost; the empty set and the full
    one are among them. Empty when locks and pins contradict each other.

    For any weights the least `Point.at` of the result is the least over all closed sets that respect locks and pins.
    """
    oracle = MinCut(weighed)
    # Where the companion does the same work at another speed, the cloud's cost is what the device's leaves of it.
    same = list(weighed.device) == list(weighed.cloud)
    found = _with_one_parameter(weighed, oracle) if same else _with_two_parameters(oracle)
    return sorted(found, key=lambda point: (point.device, -point.nbytes, point.cloud))


def _with_one_parameter(weighed: Weighed, oracle: MinCut) -> list[Point]:
    """Eisner–Severance between the cheapest sets for the device and for the link."""
    if not weighed.blocks:
        return []
    # All other sets hold `must`, and none crosses less than nothing.
    least_work, least_bytes = weighed.point(weighed.must), weighed.point(weighed.may)
    if least_bytes.nbytes:
        least_bytes = oracle.best((1, sum(weighed.device) + 1, 0)) or least_bytes
    found = [least_work]
    if least_bytes.nbytes < least_work.nbytes:
        found.append(least_bytes)
        spans = [(least_work, least_bytes)]
        while spans:
            low, high = spans.pop()
            weights = (low.nbytes - high.nbytes, high.device - low.device, 0)
            middle = oracle.best(weights)
            if middle is not None and middle.at(weights) < low.at(weights):
                found.append(middle)
                spans += [(low, middle), (middle, high)]
    return found


def _with_two_parameters(oracle: MinCut) -> list[Point]:
    """The same where both sides have costs of their own: every corner of what is known is asked for until none falls.

    The envelope of the true points is concave over the weights, lies below that of the known ones and meets it at all
    corners of the latter once none falls: then they are the same.
    """
    found: list[Point] = []
    asked: set[Weights] = set()
    fresh = True
    while fresh:
        fresh = False
        for weights in list(_corners(found)):
            if weights in asked:
                continue
            asked.add(weights)
            point = oracle.best(weights)
            if point is not None and all(point.at(weights) < known.at(weights) for known in found):
                found.append(point)
                fresh = True
                break
    return found


def _corners(points: Sequence[Point]) -> Iterator[Weights]:
    """Weights at which the least of the points changes, the three axes among them."""
    axes = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    yield from axes
    planes = [(p.device, p.nbytes, p.cloud) for p in points]
    # Three costs tie there, or two with one weight 0.
    pairs: list[tuple[_Vector, _Vector]] = [(_minus(p, q), axis) for p, q in combinations(planes, 2) for axis in axes]
    pairs += [(_minus(p, q), _minus(p, r)) for p, q, r in combinations(planes, 3)]
    for one, two in pairs:
        cross = (
            one[1] * two[2] - one[2] * two[1],
            one[2] * two[0] - one[0] * two[2],
            one[0] * two[1] - one[1] * two[0],
        )
        if min(cross) < 0:
            cross = (-cross[0], -cross[1], -cross[2])
        if min(cross) < 0 or not any(cross):
            continue
        shared = gcd(*cross)
        weights = (cross[0] // shared, cross[1] // shared, cross[2] // shared)
        values = [point.at(weights) for point in points]
        if values.count(min(values, default=0)) + weights.count(0) >= 3:
            yield weights


def _minus(one: _Vector, two: _Vector) -> _Vector:
    return one[0] - two[0], one[1] - two[1], one[2] - two[2]


class MinCut:
    """The best closed set for given weights, block by block; remembers what narrows later questions."""

    def __init__(self, weighed: Weighed) -> None:
        self._weighed = weighed
        self._blocks = weighed.blocks
        self._fewest: dict[int, Point | None] = {}
        """By block's start: the set of fewest bytes; None where locks leave no set."""
        self._known: dict[int, list[tuple[Fraction, int]]] = {}
        """By block's start: device weight / byte weight → the largest best set. It shrinks as the ratio grows."""
        self._tied: dict[int, _Ties] = {}
        """By block's start."""
        self.flows = 0

    def best(self, weights: Weights) -> Point | None:
        """A set of least weighted cost that respects locks and pins; None when there is none."""
        bounds = [(self._bound(block, block.passing_bytes, weights), block.start, block) for block in self._blocks]
        bounds.sort(key=lambda bound: bound[:2])
        best: Point | None = None
        least = 0
        for bound, start, block in bounds:
            if best is not None and bound >= least:
                break
            if start not in self._fewest:
                full = self._weighed.point_in(block, block.may)
                done = full.nbytes == block.passing_bytes and not self._locked(block, full.members)
                self._fewest[start] = full if done else self._ask(block, (0, 1, 0))
            narrowest = self._fewest[start]
            if narrowest is None or (best is not None and self._bound(block, narrowest.nbytes, weights) >= least):
                continue
            point = self._ask(block, weights)
            if point is not None and (best is None or point.at(weights) < least):
                best, least = point, point.at(weights)
        return best

    def narrowest_between(self, block: Block, inside: int, outside: int) -> Point | None:
        """The set of fewest bytes, and of those of least device cost, with node `inside` of the block and without
        node `outside`; None when there is none."""
        low, high = {inside}, {outside}
        for node in range(inside, block.start - 1, -1):
            if node in low:
                low.update(self._weighed.needs[node])
        for node in range(outside, block.stop):
            if not high.isdisjoint(self._weighed.needs[node]):
                high.add(node)
        must = block.must | as_set(node for node in low if node >= block.start)
        may = block.may & ~as_set(high)
        if must & ~may:
            return None
        members = self._solve(block, (1, 1 + sum(self._weighed.device), 0), must, may)
        if self._locked(block, block.before | members):
            return None
        return self._weighed.point_in(block, members)

    @staticmethod
    def _bound(block: Block, nbytes: int, weights: Weights) -> int:
        """What any set of the block costs at least that crosses `nbytes` or more."""
        return weights[0] * block.device + weights[1] * nbytes + weights[2] * block.cloud

    def _ask(self, block: Block, weights: Weights) -> Point | None:
        members = self._nested(block, weights) if not weights[2] else self._solve(block, weights, block.must, block.may)
        return None if self._locked(block, block.before | members) else self._weighed.point_in(block, members)

    @staticmethod
    def _locked(block: Block, whole: int) -> bool:
        return any(tensor.locked and crosses(tensor, whole) for tensor in block.tensors)

    def _nested(self, block: Block, weights: Weights) -> int:
        """The largest best set, asked for between the answers to the next larger and the next smaller ratio."""
        device, per_byte, _ = weights
        if not per_byte:  # no limit of the others: what costs the device nothing may then be on either side
            return self._solve(block, weights, block.must, block.may)
        ratio = Fraction(device, per_byte)
        known = self._known.setdefault(block.start, [])
        place = bisect_left(known, (ratio, 0))
        if place < len(known) and known[place][0] == ratio:
            return known[place][1]
        high = known[place - 1][1] if place else block.may
        low = known[place][1] if place < len(known) else block.must
        members = self._solve(block, weights, low, high)
        insort(known, (ratio, members))
        return members

    def _solve(self, block: Block, weights: Weights, low: int, high: int) -> int:
        """The largest best set of the block between `low` and `high`."""
        free = list(bits(high & ~low))
        if not free:
            return low
        self.flows += 1
        weighed, whole = self._weighed, block.before | low
        device, per_byte, cloud = weights
        gains = {node: device * weighed.device[node] - cloud * weighed.cloud[node] for node in free}
        endless = 1 + sum(map(abs, gains.values())) + per_byte * sum(tensor.nbytes for tensor in block.tensors)
        host = _hosts(self._ties(block), gains)
        number = {node: at for at, node in enumerate(node for node in free if host[node] == node)}
        vertex = {node: number[host[node]] for node in free}
        source, sink = len(number), len(number) + 1
        network = Network(len(number) + 2)
        total = [0] * len(number)
        for node, gain in gains.items():
            total[vertex[node]] += gain
        for at, gain in enumerate(total):
            if gain > 0:
                network.join(at, sink, gain)
            elif gain < 0:
                network.join(source, at, -gain)
        for tensor in block.tensors:
            self._join(network, tensor, vertex, whole, source, sink, per_byte, endless)
        closure = {
            (vertex[node], vertex[needed]) for node in free for needed in weighed.needs[node] if needed in vertex
        }
        for reader, maker in closure:
            if reader != maker:
                network.join(reader, maker, endless)
        _, side = network.min_cut(source, sink)
        return low | as_set(node for node in free if side[vertex[node]])

    def _ties(self, block: Block) -> _Ties:
        if block.start not in self._tied:
            self._tied[block.start] = _ties_of(block)
        return self._tied[block.start]

    @staticmethod
    def _join(
        network: Network,
        tensor: Crossable,
        vertex: dict[int, int],
        whole: int,
        source: int,
        sink: int,
        per_byte: int,
        endless: int,
    ) -> None:
        """The arcs of one tensor: from where it is made to where it is read, paid once."""
        if tensor.maker == INPUT or whole >> tensor.maker & 1:
            start = source
        elif tensor.maker in vertex:
            start = vertex[tensor.maker]
        else:
            return  # its maker is not on the device: it does not cross
        free = sorted({vertex[reader] for reader in tensor.readers if reader in vertex} - {start})
        leaves = any(reader not in vertex and not whole >> reader & 1 for reader in tensor.readers)
        price = endless if tensor.locked else per_byte * tensor.nbytes
        if leaves:  # some reader is on the other side for sure
            if start != source:
                network.join(start, sink, price)
        elif len(free) == 1:
            network.join(start, free[0], price)
        elif free:
            once = network.vertex()
            network.join(start, once, price)
            for reader in free:
                network.join(once, reader, endless)


@dataclass(frozen=True, slots=True)
class _Ties:
    """What the nodes of a block read, and who reads what they make."""

    reads: Mapping[int, Sequence[Crossable]]
    only_reader: Mapping[int, int]
    """Nodes all of whose tensors go to one node → that node."""
    made_bytes: Mapping[int, int]


def _ties_of(block: Block) -> _Ties:
    reads: dict[int, list[Crossable]] = {}
    makes: dict[int, list[Crossable]] = {}
    for tensor in block.tensors:
        makes.setdefault(tensor.maker, []).append(tensor)
        for reader in tensor.readers:
            reads.setdefault(reader, []).append(tensor)
    readers = {node: {reader for tensor in made for reader in tensor.readers} for node, made in makes.items()}
    return _Ties(
        reads,
        {node: min(found) for node, found in readers.items() if len(found) == 1},
        {node: sum(tensor.nbytes for tensor in made) for node, made in makes.items()},
    )


def _hosts(ties: _Ties, gains: Mapping[int, int]) -> dict[int, int]:
    """For each free node the node on whose side it is in every best set: itself, or its one reader.

    A node that costs the device more than the companion and makes no fewer bytes than it reads is in a best set only
    for the sake of a reader: without one there, to leave it out is cheaper. If all it makes goes to one node, the two
    are on one side. So it is for the two as one node, and so on: what is left are the places where a graph gets
    narrower.
    """
    host = {node: node for node in gains}
    # What a node together with all it hosts reads from elsewhere, and what it costs more here than there.
    outside: dict[int, dict[int, Crossable]] = {}
    cost = dict(gains)
    guests: dict[int, list[int]] = {}
    for node in sorted(gains):
        reader = ties.only_reader.get(node)
        if reader is None or reader not in gains or cost[node] <= 0:
            continue
        inner = {node, *guests.get(node, ())}
        mine = outside.get(node, {})
        mine.update((id(tensor), tensor) for tensor in ties.reads.get(node, ()) if tensor.maker not in inner)
        if any(tensor.locked for tensor in mine.values()):
            continue
        if sum(tensor.nbytes for tensor in mine.values()) > ties.made_bytes[node]:
            continue
        host[node] = reader
        cost[reader] += cost[node]
        outside.setdefault(reader, {}).update(mine)
        guests.setdefault(reader, []).extend(inner)
    for node in sorted(gains, reverse=True):
        host[node] = host[host[node]]
    return host
