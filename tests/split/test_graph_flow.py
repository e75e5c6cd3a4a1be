"""Maximum flow against networkx on random networks, and the shapes that cut problems have."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from split.graph.flow import Network


def random_network(seed: int) -> tuple[int, list[tuple[int, int, int, int]]]:
    dice = random.Random(seed)
    vertices = dice.randint(2, 14)
    top = dice.choice((1, 3, 100, 10**15))
    arcs = []
    for _ in range(dice.randint(1, 4 * vertices)):
        tail, head = dice.sample(range(vertices), 2)
        arcs.append((tail, head, dice.randint(0, top), dice.choice((0, 0, dice.randint(0, top)))))
    return vertices, arcs


@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_value_and_cut_are_those_of_networkx_on_random_networks(start: int) -> None:
    for seed in range(start, start + 100):
        vertices, arcs = random_network(seed)
        network, oracle = Network(vertices), nx.DiGraph()
        oracle.add_nodes_from(range(vertices))
        for tail, head, capacity, back in arcs:
            network.join(tail, head, capacity, back)
            for a, b, room in ((tail, head, capacity), (head, tail, back)):
                held = oracle.get_edge_data(a, b, {"capacity": 0})["capacity"]
                oracle.add_edge(a, b, capacity=held + room)
        value, side = network.min_cut(0, vertices - 1)
        assert value == nx.maximum_flow_value(oracle, 0, vertices - 1), f"seed {seed}"
        assert side[0]
        assert not side[vertices - 1], f"seed {seed}"
        crossing = sum(
            capacity * (side[tail] and not side[head]) + back * (side[head] and not side[tail])
            for tail, head, capacity, back in arcs
        )
        assert crossing == value, f"seed {seed}: the partition is not the cut of that value"


def test_of_equal_cuts_the_one_with_the_largest_source_side_is_given() -> None:
    network = Network(4)
    for vertex in range(3):
        network.join(vertex, vertex + 1, 5)
    assert network.min_cut(0, 3) == (5, [True, True, True, False])


def test_a_sink_that_nothing_reaches_cuts_nothing() -> None:
    network = Network(3)
    network.join(0, 1, 7)
    assert network.min_cut(0, 2) == (0, [True, True, False])


def test_a_vertex_added_later_counts() -> None:
    network = Network(2)
    middle = network.vertex()
    network.join(0, middle, 4)
    network.join(middle, 1, 3)
    assert network.min_cut(0, 1) == (3, [True, False, True])
    assert network.arcs == 2


def test_a_chain_of_ten_thousand_leaking_vertices_is_no_recursion() -> None:
    # One unit leaks at each vertex; 7 go in, so 7 come out.
    vertices = 10_000
    network = Network(vertices + 2)
    network.join(vertices, 0, 7)
    for vertex in range(vertices):
        network.join(vertex, vertices + 1, 1)
        if vertex:
            network.join(vertex - 1, vertex, 100)
    value, _ = network.min_cut(vertices, vertices + 1)
    assert value == 7
