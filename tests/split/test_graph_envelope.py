"""The lower envelope against every closed set of random graphs."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from weighed_graphs import closed_sets, costs, random_graph

from split.graph.envelope import MinCut, envelope
from split.graph.weighed import INPUT, Crossable, Weighed


def weighted(weights: tuple[int, int, int], found: tuple[int, int, int]) -> int:
    return sum(weight * cost for weight, cost in zip(weights, found, strict=True))


def random_weights(dice: random.Random, *, cloud: bool) -> tuple[int, int, int]:
    one, two, three = (dice.choice((0, 1, dice.randint(1, 20), dice.randint(1, 10**7))) for _ in range(3))
    return one, two, three if cloud else 0


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_the_best_of_the_envelope_is_the_best_of_all_closed_sets_at_any_speeds_and_rate(start: int) -> None:
    for seed in range(start, start + 100):
        graph = random_graph(seed)
        found = envelope(graph)
        every = {members: costs(graph, members) for members in closed_sets(graph)}
        assert {point.members for point in found} <= every.keys(), f"seed {seed}: not closed, or against a lock or pin"
        assert bool(found) == bool(every), f"seed {seed}"
        for point in found:
            assert (point.device, point.nbytes, point.cloud) == every[point.members], f"seed {seed}"
        dice = random.Random(seed)
        for _ in range(20 if every else 0):
            # A device slower than the companion by any factor; the companion's work is what the device leaves.
            weights = random_weights(dice, cloud=False)
            least = min(weighted(weights, cost) for cost in every.values())
            assert min(point.at(weights) for point in found) == least, f"seed {seed}, weights {weights}"


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_the_same_holds_where_each_side_has_costs_of_its_own(start: int) -> None:
    for seed in range(start, start + 50):
        graph = random_graph(seed, nodes_max=9, two_costs=True)
        found = envelope(graph)
        every = [costs(graph, members) for members in closed_sets(graph)]
        assert bool(found) == bool(every), f"seed {seed}"
        dice = random.Random(seed)
        for _ in range(20 if every else 0):
            weights = random_weights(dice, cloud=True)
            least = min(weighted(weights, cost) for cost in every)
            assert min(point.at(weights) for point in found) == least, f"seed {seed}, weights {weights}"


def test_cuts_move_only_towards_the_device_as_bytes_grow_dear() -> None:
    for seed in range(300):
        found = [point.members for point in envelope(random_graph(seed))]
        oracle = MinCut(random_graph(seed))
        asked = [oracle.best((device, 7, 0)) for device in (0, 1, 3, 10, 1000, 10**7)]
        sets = [point.members for point in reversed(asked) if point is not None]
        for smaller, larger in (*pairwise(found), *pairwise(sets)):
            assert smaller & ~larger == 0, f"seed {seed}: the sets are not nested"


def test_a_tensor_with_many_readers_is_paid_once_and_a_skip_may_travel_beside() -> None:
    # x → a → b, c, d; each reads a (10 bytes) and makes 4; e reads all three.
    graph = Weighed(
        device=[1, 1, 1, 1, 100],
        cloud=[1, 1, 1, 1, 100],
        tensors=[
            Crossable(maker=INPUT, readers=(0,), nbytes=50),
            Crossable(maker=0, readers=(1, 2, 3), nbytes=10),
            *(Crossable(maker=maker, readers=(4,), nbytes=4) for maker in (1, 2, 3)),
        ],
    )
    corners = [(p.device, p.nbytes) for p in envelope(graph)]
    assert corners == [(0, 50), (1, 10), (104, 0)]  # all three crossing once: 10; the three results: 12


def test_contradicting_pins_leave_nothing() -> None:
    chain = [Crossable(maker=INPUT, readers=(0,), nbytes=1), Crossable(maker=0, readers=(1,), nbytes=1)]
    graph = Weighed(device=[1, 1], cloud=[1, 1], tensors=chain, on_device=frozenset((1,)), on_cloud=frozenset((0,)))
    assert envelope(graph) == []


def test_a_chain_is_all_cut_vertices_and_needs_no_flow() -> None:
    count = 3000
    graph = Weighed(
        device=[1] * count,
        cloud=[1] * count,
        tensors=[Crossable(maker=node - 1, readers=(node,), nbytes=1 + (node * 7919) % 1000) for node in range(count)],
    )
    oracle = MinCut(graph)
    best = oracle.best((1, 1, 0))
    assert best is not None
    assert best.at((1, 1, 0)) == min(
        node + 1 + (node * 7919) % 1000 if node < count else node for node in range(count + 1)
    )
    assert oracle.flows == 0
    assert len(graph.blocks) == count + 1


def test_a_mask_that_every_layer_reads_does_not_melt_the_blocks_into_one() -> None:
    # Node 0 makes the mask; layers of two parallel nodes that a third joins read it.
    tensors = [Crossable(maker=INPUT, readers=(0, 1), nbytes=8)]
    layers = 5
    joints = []
    for layer in range(layers):
        at = 1 + 3 * layer
        tensors.append(Crossable(maker=at, readers=(at + 2,), nbytes=4))
        tensors.append(Crossable(maker=at + 1, readers=(at + 2,), nbytes=4))
        joints.append(at + 2)
    for before, after in pairwise(joints):
        tensors.append(Crossable(maker=before, readers=(after - 2, after - 1), nbytes=4))
    tensors.append(Crossable(maker=0, readers=tuple(joint - 1 for joint in joints), nbytes=2))
    count = 1 + 3 * layers
    graph = Weighed(device=[1] * count, cloud=[1] * count, tensors=tensors)
    assert max(block.stop - block.start for block in graph.blocks) <= 3
