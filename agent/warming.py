"""Has open, when the worker is idle, what the last decisions wanted: the next request does not wait for it.

Looks at a model only when something was decided for it since: what the budget has closed again stays closed until then.
And only at the popular half of the models that are asked for: where the budget does not hold all of them, a model that
is asked for now and then would close what others need all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from agent.compute import Compute
from agent.planner import Planner
from agent.served_model import ServedModel
from split.errors import UnknownModel
from split.ids import CutId

EVERY_S: Final = 2.0
"""A look costs some microseconds; what was closed meanwhile is opened by whoever needs it sooner."""
KEPT: Final = 0.98
"""Of a model's popularity, from one look to the next: half of it is gone after 70 s."""
POPULAR_PERCENTILE: Final = 0.5
"""Of the models asked for lately, those from this place on, by how often, are popular."""


class Warming:
    """`run` lives as long as the daemon; `look` once for tests. On the event loop."""

    def __init__(self, *, planner: Planner, compute: Compute, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._planner = planner
        self._compute = compute
        self._models = models
        self._seen: dict[str, int] = {}
        self._popularity: dict[str, float] = {}
        """Decisions for each model, old ones counting less."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def look(self) -> None:
        if self._compute.queue_ms > 0.0:
            return
        asked: list[tuple[ServedModel, Sequence[CutId]]] = []
        popularity: dict[str, float] = {}
        for model in self._models():
            try:
                decisions, cuts = self._planner.recent_cuts(model.name)
            except UnknownModel:  # not measured yet
                continue
            new = decisions - self._seen.get(model.name, 0)
            self._seen[model.name] = decisions
            popularity[model.name] = self._popularity.get(model.name, 0.0) * KEPT + max(new, 0)
            if new:
                asked.append((model, cuts))
        self._popularity = popularity
        least = _percentile([count for count in popularity.values() if count >= 0.5], POPULAR_PERCENTILE)
        for model, cuts in sorted(asked, key=lambda one: popularity[one[0].name]):  # the most popular is opened last
            if popularity[model.name] >= least:
                model.keep_warm(cuts)


def _percentile(counts: list[float], share: float) -> float:
    """The value at that place of the sorted list, rounded down; 0 of nothing."""
    return sorted(counts)[int(share * (len(counts) - 1))] if counts else 0.0
