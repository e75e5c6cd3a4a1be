"""The Pareto front against every closed set of random graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from weighed_graphs import closed_sets, costs, random_graph

from split.graph.envelope import envelope
from split.graph.pareto import pareto
from split.graph.weighed import INPUT, Crossable, Weighed

Costs = tuple[int, int, int]


def front_of(every: set[Costs]) -> set[Costs]:
    """What nothing else equals or beats in all three."""
    return {
        one
        for one in every
        if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in every)
    }


@pytest.mark.parametrize("two_costs", [False, True])
@pytest.mark.parametrize("start", range(0, 300, 100))
def test_the_front_is_that_of_all_closed_sets(start: int, two_costs: bool) -> None:
    for seed in range(start, start + 100):
        graph = random_graph(seed, nodes_max=8, two_costs=two_costs)
        every = {members: costs(graph, members) for members in closed_sets(graph)}
        found = pareto(graph)
        assert found.dropped == 0
        for point in found.points:
            assert every[point.members] == (point.device, point.nbytes, point.cloud), f"seed {seed}"
        costs_found = [(p.device, p.nbytes, p.cloud) for p in found.points]
        assert set(costs_found) == front_of(set(every.values())), f"seed {seed}"
        assert len(costs_found) == len(set(costs_found)), f"seed {seed}"


def test_a_front_cut_short_says_so_and_holds_only_closed_sets() -> None:
    wide = 12  # parallel nodes of different cost: 4096 closed sets
    graph = Weighed(
        device=[1 << at for at in range(wide)] + [1],
        cloud=[1 << at for at in range(wide)] + [1],
        tensors=[
            *(Crossable(maker=INPUT, readers=(at,), nbytes=10 + at) for at in range(wide)),
            *(Crossable(maker=at, readers=(wide,), nbytes=1 + at) for at in range(wide)),
        ],
    )
    whole = pareto(graph, states_max=10_000, steps_max=1_000_000)
    assert (whole.dropped, len(whole.points)) == (0, 4096 + 1)
    cut_short = pareto(graph, states_max=64)
    assert cut_short.dropped > 0
    legal = set(closed_sets(graph))
    assert {point.members for point in cut_short.points} <= legal
    # The narrowest of all are not lost: they are what is kept.
    assert min(p.nbytes for p in cut_short.points) == min(p.nbytes for p in whole.points)


def test_a_set_inside_the_hull_is_on_the_front_and_not_on_the_envelope() -> None:
    # A chain whose middle tensor lies above the line between its neighbours: (1, 100), (2, 60), (3, 10).
    graph = Weighed(
        device=[1, 1, 1, 1],
        cloud=[1, 1, 1, 1],
        tensors=[
            Crossable(maker=INPUT, readers=(0,), nbytes=200),
            Crossable(maker=0, readers=(1,), nbytes=100),
            Crossable(maker=1, readers=(2,), nbytes=60),
            Crossable(maker=2, readers=(3,), nbytes=10),
        ],
    )
    assert [(p.device, p.nbytes) for p in envelope(graph)] == [(0, 200), (1, 100), (3, 10), (4, 0)]
    assert (2, 60) in [(p.device, p.nbytes) for p in pareto(graph).points]
