"""What levels make of tables, kept while there is room: one store for the whole process, bounded in bytes whoever has
brought the tables, since a payload of forty bytes may ask for megabytes of them. Threads share it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Final

from split.codec.transform import Level

KEPT_BYTES: Final = 64 << 20
"""Five levels of a cut of 512 channels in blocks of 32 × 32, the largest there are (13 MB each, 22 ms to work out), or
some hundreds of usual ones; a decider uses one or two of a cut."""

Made = tuple[Level | None, ...]
"""Of each tensor that crosses at a cut; None for one that has no tables."""


class OfOneCut:
    """The levels of one cut's tables that are worked out now. They go with it."""

    def __init__(self) -> None:
        self.made: dict[int, Made] = {}


class LevelsKept:
    """Those used last, of all cuts together at most `bytes_max`, but always the one in use."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._used: OrderedDict[tuple[weakref.ref[OfOneCut], int], int] = OrderedDict()
        """Bytes of each, the one used last at the end. What is gone with its cut counts until its turn comes."""
        self.bytes = 0

    def use(self, cut: OfOneCut, level: int, made: Made) -> None:
        """It is used now, worked out just before or long ago."""
        key = weakref.ref(cut), level
        with self._lock:
            if key in self._used and level in cut.made:
                self._used.move_to_end(key)
                return
            self.bytes -= self._used.pop(key, 0)
            cut.made[level] = made
            size = self._used[key] = sum(one.nbytes for one in made if one is not None)
            self.bytes += size
            while self.bytes > self._bytes_max and len(self._used) > 1:
                (owner, least), freed = self._used.popitem(last=False)
                self.bytes -= freed
                if (known := owner()) is not None:
                    known.made.pop(least, None)


levels_kept: Final = LevelsKept(KEPT_BYTES)
