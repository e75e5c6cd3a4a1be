"""Book-keeping that no answer waits for: learning and the journal, done together a moment later.

Not right after the answer: there the next request is being handed to the worker, and each µs of Python on the loop then
costs it several (measured: 20 µs of notes made it 80 µs later). Whoever reads the books settles them first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

AFTER_S: Final = 0.005
"""Shorter than any model that is worth a decision runs, so that it falls into a run; no estimate gets old by it."""
NOTES_MAX: Final = 64
"""Then they are settled at once: some 20 µs each. What is noted are numbers and names, never tensors."""


class Afterwards:
    """Notes in the order they were made; lives on the event loop."""

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., None], tuple[object, ...]]] = []

    def note(self, write: Callable[..., None], *arguments: object) -> None:
        """Have `write(*arguments)` called soon."""
        if not self._notes:
            asyncio.get_running_loop().call_later(AFTER_S, self.settle)
        self._notes.append((write, arguments))
        if len(self._notes) >= NOTES_MAX:
            self.settle()

    def settle(self) -> None:
        """Write everything down now."""
        notes, self._notes = self._notes, []
        for write, arguments in notes:
            try:
                write(*arguments)
            except Exception:  # a bug of ours; the answers are out, and the other notes are right
                log.exception("a finished request could not be noted")
