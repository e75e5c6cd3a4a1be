"""Which of many to let go: LRU-K with K = 2 (O'Neil, O'Neil and Weikum, SIGMOD 1993). Pure: names in, names out.

What was used twice lately stays before what was used once, however lately: a scan over everything (all cuts measured
once, a model tried out) does not drive out what is used again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

REMEMBERED: Final = 1024
"""Names whose uses are remembered, whether they are kept or were let go: some tens of kilobytes."""


class LruK(Generic[K]):
    """Remembers the last two uses of each name; time is the count of uses."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._now = 0
        self._uses: OrderedDict[K, tuple[int, int]] = OrderedDict()
        """(last use, the one before it, 0 = never), least recently used first."""

    def use(self, name: K) -> None:
        """It is used now; of the names used longest ago one may be forgotten."""
        self._now += 1
        last, _ = self._uses.get(name, (0, 0))
        self._uses[name] = (self._now, last)
        self._uses.move_to_end(name)
        if len(self._uses) > self._remembered:
            self._uses.popitem(last=False)

    def forget(self, name: K) -> None:
        """As if it had never been used; unknown names are ignored."""
        self._uses.pop(name, None)

    def in_order(self, names: Iterable[K]) -> list[K]:
        """The names, first the one to let go first: used at most once before used twice, then by the use before the
        last, then by the last one."""
        return sorted(names, key=lambda name: self._uses.get(name, (0, 0))[::-1])
