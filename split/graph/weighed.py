"""A graph as numbers: what each node costs on either side, what each tensor weighs, what must stay where.

The nodes are numbered in topological order and a set of them is an int, bit by bit. A set is *closed* when it holds all
that its nodes need. Everything that looks for good cuts (`envelope.py`, `pareto.py`) works on this and never sees ONNX.

Blocks. A *cut vertex* here is a node that every other node either needs or is needed by. A closed set that holds it
holds all before it; one that does not holds nothing after it. So the closed sets of the whole are those of the
stretches between neighbouring cut vertices, each on top of all that comes before, and a search among millions of sets
becomes one among small blocks. That an optimum lies between two adjacent cut vertices is QDMP's observation (Zhang et
al., "Towards real-time cooperative deep inference over the cloud and edge end devices", IMWUT 2020). Ours: the
vertices are those of the order relation and not single-tensor bridges, so that a mask or a skip that stays alive for
a whole model does not melt its blocks into one; the tensors that pass over a block are a constant of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final

LOOKED_UP_MAX: Final = 500
"""Tensors whose readers are looked up bit by bit; where there are more, sets of numbers are faster."""
INPUT: Final = -1
"""Maker of what the device has from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossable:
    """A tensor: it crosses once, however many readers it has, when it is on the device and a reader is not."""

    maker: int
    """Number of the node that makes it, or `INPUT`."""
    readers: tuple[int, ...]
    """Ascending, each once."""
    nbytes: int
    locked: bool = False
    """It must not cross."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A closed set and its costs."""

    device: int
    nbytes: int
    cloud: int
    members: int

    def at(self, weights: tuple[int, int, int]) -> int:
        """The weighted sum of (device, nbytes, cloud)."""
        return weights[0] * self.device + weights[1] * self.nbytes + weights[2] * self.cloud


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Nodes `start` … `stop - 1` between two cut vertices: everything before them is on the device, the rest is not."""

    start: int
    stop: int
    device: int
    """Of the nodes before it."""
    cloud: int
    """Of the nodes behind it."""
    passing_bytes: int
    """Of tensors that cross whatever the block does."""
    tensors: tuple[Crossable, ...]
    """The others that may cross."""
    must: int
    """Nodes of the block that have to be on the device."""
    may: int
    """Nodes of the block that can be; closed and without what must be on the other side."""

    @property
    def before(self) -> int:
        """All nodes before the block, as a set."""
        return (1 << self.start) - 1


@dataclass(kw_only=True)
class Weighed:
    """Nodes, tensors and pins; see `Block` for how it falls into parts.

    `device`, `cloud`: cost of each node on either side, not negative. `tensors`: those that some node reads (others
    never cross). `on_device`, `on_cloud`: nodes that are pinned.
    """

    device: Sequence[int]
    cloud: Sequence[int]
    tensors: Sequence[Crossable]
    on_device: frozenset[int] = frozenset()
    on_cloud: frozenset[int] = frozenset()
    blocks: tuple[Block, ...] = field(init=False)
    """Those in which there is a set that respects locks and pins; in topological order."""
    needs: tuple[tuple[int, ...], ...] = field(init=False)
    """Nodes whose outputs a node reads."""
    must: int = field(init=False)
    """Nodes that are in every set that respects pins and locks; they are such a set if there is any."""
    may: int = field(init=False)
    """Nodes that are in any such set; they are the largest one if there is any."""

    def __post_init__(self) -> None:
        needs: list[set[int]] = [set() for _ in self.device]
        for tensor in self.tensors:
            assert all(tensor.maker < reader for reader in tensor.readers), "nodes are not in topological order"
            for reader in tensor.readers:
                if tensor.maker != INPUT:
                    needs[reader].add(tensor.maker)
        self.needs = tuple(tuple(sorted(found)) for found in needs)
        self.must, self.may = self._pinned()
        self.blocks = () if self.must & ~self.may else tuple(self._blocks())

    @property
    def everything(self) -> int:
        """The set of all nodes, a bit each."""
        return (1 << len(self.device)) - 1

    @cached_property
    def touching(self) -> tuple[tuple[Crossable, ...], ...]:
        """For each node the tensors it makes and reads."""
        found: list[list[Crossable]] = [[] for _ in self.device]
        for tensor in self.tensors:
            for node in (tensor.maker, *tensor.readers):
                if node != INPUT:
                    found[node].append(tensor)
        return tuple(map(tuple, found))

    def point(self, members: int) -> Point:
        """Costs of any closed set, pins and locks not looked at."""
        inside = set(bits(members))
        return Point(
            device=sum(self.device[node] for node in inside),
            nbytes=sum(
                tensor.nbytes
                for tensor in self.tensors
                if (tensor.maker == INPUT or tensor.maker in inside) and not inside.issuperset(tensor.readers)
            ),
            cloud=sum(cost for node, cost in enumerate(self.cloud) if node not in inside),
            members=members,
        )

    def point_in(self, block: Block, members: int) -> Point:
        """Costs of the block's set `members` on top of all before it."""
        whole = block.before | members
        if len(block.tensors) > LOOKED_UP_MAX:
            return self.point(whole)
        rest = ((1 << block.stop) - 1) & ~whole
        return Point(
            device=block.device + sum(self.device[node] for node in bits(members)),
            nbytes=block.passing_bytes + sum(t.nbytes for t in block.tensors if crosses(t, whole)),
            cloud=block.cloud + sum(self.cloud[node] for node in bits(rest)),
            members=whole,
        )

    def _blocks(self) -> Iterator[Block]:
        count = len(self.device)
        device = list(accumulate(self.device, initial=0))
        cloud = list(accumulate(self.cloud, initial=0))
        must, may = self.must, self.may
        by_last: list[list[Crossable]] = [[] for _ in range(count)]
        by_maker: list[list[Crossable]] = [[] for _ in range(count)]
        alive = {}
        for tensor in self.tensors:
            if tensor.readers:
                by_last[tensor.readers[-1]].append(tensor)
                if tensor.maker == INPUT:
                    alive[id(tensor)] = tensor
                else:
                    by_maker[tensor.maker].append(tensor)
        start = 0
        for stop in (*self._cut_vertices(), count):
            nodes = range(start, stop)
            inside = ((1 << stop) - 1) & ~((1 << start) - 1)
            ending = [tensor for node in nodes for tensor in by_last[node] if tensor.maker < start]
            made = [tensor for node in nodes for tensor in by_maker[node]]
            for tensor in ending:
                del alive[id(tensor)]
            sound = not must >> stop and not ~may & ((1 << start) - 1)
            if sound and not any(tensor.locked for tensor in alive.values()):
                yield Block(
                    start=start,
                    stop=stop,
                    device=device[start],
                    cloud=cloud[count] - cloud[stop],
                    passing_bytes=sum(tensor.nbytes for tensor in alive.values()),
                    tensors=(*ending, *made),
                    must=must & inside,
                    may=may & inside,
                )
            # The cut vertex `stop` joins what lies before the next block.
            for tensor in made:
                if tensor.readers[-1] >= stop:
                    alive[id(tensor)] = tensor
            if stop < count:
                for tensor in by_last[stop]:
                    del alive[id(tensor)]
                alive.update((id(tensor), tensor) for tensor in by_maker[stop])
            start = stop + 1

    def _cut_vertices(self) -> list[int]:
        """Nodes that every other node needs or is needed by. In a topological order these are the nodes before which
        every node has a reader no later than they are, and behind which every node needs one no earlier."""
        count = len(self.device)
        first_reader = [count] * count
        for tensor in self.tensors:
            if tensor.maker != INPUT and tensor.readers:
                first_reader[tensor.maker] = min(first_reader[tensor.maker], tensor.readers[0])
        latest = list(accumulate(first_reader, max, initial=0))
        last_need = [max(found, default=INPUT) for found in self.needs]
        earliest = list(accumulate(reversed(last_need), min, initial=count))[::-1]
        return [node for node in range(count) if latest[node] <= node <= earliest[node + 1]]

    def _pinned(self) -> tuple[int, int]:
        """(nodes that must be on the device, nodes that may be): pins and locks, spread along what needs what."""
        count = len(self.device)
        must = set(self.on_device)
        never = set(self.on_cloud)
        locked_after: list[list[int]] = [[] for _ in range(count)]
        for tensor in self.tensors:
            if tensor.locked and tensor.maker == INPUT:
                must.update(tensor.readers)
            elif tensor.locked:
                locked_after[tensor.maker] += tensor.readers
        # A locked tensor binds its maker to its readers, too: to and fro until nothing more follows.
        before = (-1, -1)
        while before != (len(must), len(never)):
            before = len(must), len(never)
            for node in range(count):
                if not never.isdisjoint(self.needs[node]):
                    never.add(node)
                if node in must and locked_after[node]:
                    must.update(locked_after[node])
            for node in reversed(range(count)):
                if node in must:
                    must.update(self.needs[node])
                if locked_after[node] and not never.isdisjoint(locked_after[node]):
                    never.add(node)
        return as_set(must), self.everything & ~as_set(never)


def crosses(tensor: Crossable, members: int) -> bool:
    """Whether a tensor is on the device and one of its readers is not."""
    if tensor.maker != INPUT and not members >> tensor.maker & 1:
        return False
    return not all(members >> reader & 1 for reader in tensor.readers)


def bits(members: int) -> list[int]:
    """The numbers in a set, ascending."""
    digits = bin(members)[:1:-1]
    found = []
    at = digits.find("1")
    while at >= 0:
        found.append(at)
        at = digits.find("1", at + 1)
    return found


def as_set(numbers: Iterable[int]) -> int:
    """Numbers as one int, bit by bit."""
    chosen = bytearray()
    for number in numbers:
        if number >> 3 >= len(chosen):
            chosen.extend(bytes((number >> 3) + 1 - len(chosen)))
        chosen[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(chosen, "little")
