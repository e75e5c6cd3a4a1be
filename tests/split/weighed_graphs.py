"""Random weighed graphs small enough to look at every closed set."""

from __future__ import annotations

import random
from collections.abc import Iterator

from split.graph.weighed import INPUT, Crossable, Weighed


def random_graph(seed: int, *, nodes_max: int = 12, two_costs: bool = False, awkward: bool = True) -> Weighed:
    """A graph with skips, tensors of many readers, several inputs, nodes nobody reads; some have pins and locks.

    `two_costs`: the companion's costs are no multiple of the device's.
    """
    dice = random.Random(seed)
    count = dice.randint(1, nodes_max)
    reach = dice.choice((1, 2, 3, count))
    inputs = dice.randint(1, 3)
    readers: dict[tuple[int, int], set[int]] = {}
    for node in range(count):
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            maker = dice.randint(max(node - reach, INPUT), node - 1)
            which = dice.randrange(inputs) if maker == INPUT else dice.choice((0, 0, 0, 1))
            readers.setdefault((maker, which), set()).add(node)
    lock = awkward and dice.random() < 0.25
    pin = awkward and dice.random() < 0.25
    device = [dice.choice((0, dice.randint(0, 9), dice.randint(0, 10**6))) for _ in range(count)]
    return Weighed(
        device=device,
        cloud=[dice.randint(0, 10**5) for _ in range(count)] if two_costs else device,
        tensors=[
            Crossable(
                maker=maker,
                readers=tuple(sorted(found)),
                nbytes=dice.choice((0, dice.randint(1, 9), dice.randint(1, 10**6))),
                locked=lock and dice.random() < 0.15,
            )
            for (maker, _), found in readers.items()
        ],
        on_device=frozenset(node for node in range(count) if pin and dice.random() < 0.1),
        on_cloud=frozenset(node for node in range(count) if pin and dice.random() < 0.1),
    )


def closed_sets(graph: Weighed) -> Iterator[int]:
    """Every closed set that respects locks and pins, by trying all sets of nodes: the slow and obvious way."""
    needs: dict[int, set[int]] = {node: set() for node in range(len(graph.device))}
    for tensor in graph.tensors:
        for reader in tensor.readers:
            if tensor.maker != INPUT:
                needs[reader].add(tensor.maker)
    for members in range(1 << len(graph.device)):
        inside = {node for node in needs if members >> node & 1}
        if (
            all(needs[node] <= inside for node in inside)
            and graph.on_device <= inside
            and not graph.on_cloud & inside
            and not any(tensor.locked and _crosses(tensor, inside) for tensor in graph.tensors)
        ):
            yield members


def costs(graph: Weighed, members: int) -> tuple[int, int, int]:
    """(device, bytes, cloud), counted from the definition."""
    inside = {node for node in range(len(graph.device)) if members >> node & 1}
    return (
        sum(graph.device[node] for node in inside),
        sum(tensor.nbytes for tensor in graph.tensors if _crosses(tensor, inside)),
        sum(cost for node, cost in enumerate(graph.cloud) if node not in inside),
    )


def _crosses(tensor: Crossable, inside: set[int]) -> bool:
    return (tensor.maker == INPUT or tensor.maker in inside) and not inside.issuperset(tensor.readers)
