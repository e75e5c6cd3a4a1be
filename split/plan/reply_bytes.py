"""What replies really weigh, over what the profile tells of them at their request's sizes. Outputs whose sizes depend
on values, or grow in another way than the card's functions say (`graph/growing.py`), are told wrongly by any factor.
Pure.
"""

from __future__ import annotations

from typing import Final


class ReplyBytes:
    """Of one model: the mean ratio over the last fifty replies or so. The first one is believed as it is, since bytes
    are counted, not measured: a model that is told thirty seconds of download for a kilobyte is asked once."""

    KEPT: Final = 50.0
    """An exponential window as long, as of `Rate`."""
    FRAMING_BYTES: Final = 1024
    """What is off by less is the payload's own words about its tensors, and no ratio."""
    WORTH: Final = 0.02
    """A change by less is not worth a new table (30 µs)."""

    __slots__ = ("_count", "_told", "ratio")

    def __init__(self) -> None:
        self.ratio = self._told = 1.0
        self._count = 0.0

    def observe(self, came_bytes: float, told_bytes: float) -> None:
        """One reply; `told_bytes`: without what was learned. Nothing is learned where nothing was told."""
        if told_bytes <= 0.0:
            return
        ratio = came_bytes / told_bytes if abs(came_bytes - told_bytes) > self.FRAMING_BYTES else 1.0
        self._count = min(self._count + 1.0, self.KEPT)
        self.ratio += (ratio - self.ratio) / self._count

    def moved(self) -> bool:
        """Whether it has changed by enough to be told; then it counts as told."""
        if abs(self.ratio - self._told) <= self.WORTH * self._told:
            return False
        self._told = self.ratio
        return True
