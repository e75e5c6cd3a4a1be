"""Has open, when the worker is idle, what the last decisions wanted: the next request does not wait for it.

Looks at a model only when something was decided for it since: what the budget has closed again stays closed until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from agent.compute import Compute
from agent.planner import Planner
from agent.served_model import ServedModel
from split.errors import UnknownModel

EVERY_S: Final = 2.0
"""A look costs some microseconds; what was closed meanwhile is opened by whoever needs it sooner."""


class Warming:
    """`run` lives as long as the daemon; `look` once for tests. On the event loop."""

    def __init__(self, *, planner: Planner, compute: Compute, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._planner = planner
        self._compute = compute
        self._models = models
        self._seen: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def look(self) -> None:
        if self._compute.queue_ms > 0.0:
            return
        for model in self._models():
            try:
                decisions, cuts = self._planner.recent_cuts(model.name)
            except UnknownModel:  # not measured yet
                continue
            if decisions != self._seen.get(model.name):
                self._seen[model.name] = decisions
                model.keep_warm(cuts)
