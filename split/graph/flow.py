"""Integer maximum flow by push-relabel: the engine behind exact cuts. It knows vertices and arcs, no models.

Goldberg & Tarjan, "A new approach to the maximum-flow problem", JACM 1988; with the periodic global relabelling of
Cherkassky & Goldberg, Algorithmica 1997. Of its two phases only the first is run: it gives the value and a minimum
cut, and the flow itself is not needed. Push-relabel and not Dinic, because the graphs here are long chains that leak
at every node: each leak is at another distance, so Dinic would need a phase for each.

Capacities are integers, and must be: with floats the value comes out right and the partition sometimes wrong.
"""

from __future__ import annotations

from collections import deque


class Network:
    """Arcs with capacities between `vertices` numbered vertices; `min_cut` uses it up."""

    __slots__ = ("_arcs", "_heads", "_room")

    def __init__(self, vertices: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(vertices)]
        self._heads: list[int] = []
        self._room: list[int] = []
        """What an arc can still take; arc `a ^ 1` is the way back of arc `a`."""

    @property
    def arcs(self) -> int:
        return len(self._heads) // 2

    def vertex(self) -> int:
        """One more vertex."""
        self._arcs.append([])
        return len(self._arcs) - 1

    def join(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        """An arc from `tail` to `head`, and one back; capacities are not negative."""
        assert capacity >= 0 <= back, (capacity, back)
        self._arcs[tail].append(len(self._heads))
        self._arcs[head].append(len(self._heads) + 1)
        self._heads += (head, tail)
        self._room += (capacity, back)

    def min_cut(self, source: int, sink: int) -> tuple[int, list[bool]]:
        """The value of a minimum cut, and which vertices are on the source's side of the largest such side.

        O(V³) at worst; close to linear where the network is a chain of small blocks.
        """
        arcs, heads, room = self._arcs, self._heads, self._room
        vertices = len(arcs)
        height = self._distances(sink)
        height[source] = vertices
        excess = [0] * vertices
        at = [0] * vertices
        active: deque[int] = deque()
        for arc in arcs[source]:
            head, pushed = heads[arc], room[arc]
            if pushed:
                room[arc], room[arc ^ 1] = 0, room[arc ^ 1] + pushed
                if not excess[head] and head != sink:
                    active.append(head)
                excess[head] += pushed
        lifted = 0
        while active:
            vertex = active.popleft()
            mine, level = arcs[vertex], height[vertex]
            while level < vertices:
                left = excess[vertex]
                for place in range(at[vertex], len(mine)):
                    arc = mine[place]
                    space = room[arc]
                    if not space:
                        continue
                    head = heads[arc]
                    if height[head] + 1 != level:
                        continue
                    pushed = min(space, left)
                    room[arc] = space - pushed
                    room[arc ^ 1] += pushed
                    if not excess[head] and head != sink:
                        active.append(head)
                    excess[head] += pushed
                    left -= pushed
                    if not left:
                        at[vertex] = place
                        break
                excess[vertex] = left
                if not left:
                    break
                lowest = vertices
                for arc in mine:
                    if room[arc] and height[heads[arc]] < lowest:
                        lowest = height[heads[arc]]
                level = lowest + 1
                height[vertex], at[vertex] = level, 0
                lifted += 1
            if 2 * lifted >= vertices:  # lifting one by one what can no longer reach the sink is slow; a search is not
                lifted = 0
                height = self._distances(sink)
                height[source] = vertices
                at = [0] * vertices
                active = deque(v for v in active if height[v] < vertices)
        reaches = self._distances(sink)
        return excess[sink], [far == vertices for far in reaches]

    def _distances(self, sink: int) -> list[int]:
        """Arcs with room from each vertex to the sink; the number of vertices where there is no way."""
        arcs, heads, room = self._arcs, self._heads, self._room
        far = len(arcs)
        distance = [far] * far
        distance[sink] = 0
        waiting = [sink]
        for vertex in waiting:  # grows while it is read
            step = distance[vertex] + 1
            for arc in arcs[vertex]:
                before = heads[arc]
                if distance[before] == far and room[arc ^ 1]:
                    distance[before] = step
                    waiting.append(before)
        return distance
