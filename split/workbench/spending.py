"""How much of a profile's time goes to the choice of threads and to each cut, so that a slow model is profiled within
the budget, too."""

from __future__ import annotations

from enum import Enum
from typing import Final

MEASURED_MIN: Final = 3
"""Cuts measured as sessions before time is kept for the others: from three on estimates are a few per cent off."""

THREADS_SHARE: Final = 0.25
"""Of the budget, at most, for choosing threads: a model of 50 ms takes 4 s of 55, one of a second all of it."""


class Care(Enum):
    """What is done with a cut."""

    MEASURED = "run, compared, and its halves timed"
    ESTIMATED = "run and compared"
    NONE = "left out"


class Spending:
    """Divides what is left of `budget_s` among the cuts, by what the dearest one so far took.

    Before the first one it goes by `whole_ms`, a run of the whole, and the number of golden requests.
    """

    def __init__(self, *, whole_ms: float, requests: int, budget_s: float) -> None:
        self.whole_ms = whole_ms
        self.budget_s = budget_s
        whole_s = whole_ms / 1e3
        # Every request through both halves, and through a tail (half of the whole) for each of two lossy codecs; once
        # the golden inputs.
        self._run_s = (2 * requests + 1) * whole_s
        self._timing_s = 6 * whole_s  # whole, head and tail: once to warm up, two rounds
        self._measured = 0

    def care(self, spent_s: float, cuts_left: int) -> Care:
        """Of the next cut, itself counted in `cuts_left`."""
        for_others_s = 0.0 if self._measured < MEASURED_MIN else self._run_s * (cuts_left - 1)
        if spent_s + self._run_s + self._timing_s + for_others_s <= self.budget_s:
            return Care.MEASURED
        return Care.ESTIMATED if spent_s + self._run_s <= self.budget_s else Care.NONE

    def took(self, *, run_s: float, timing_s: float | None = None) -> None:
        """A cut took this long to open, run and compare, and (None: not done) to time."""
        self._run_s = max(self._run_s, run_s)
        if timing_s is not None:
            self._timing_s = max(self._timing_s, timing_s)
            self._measured += 1
