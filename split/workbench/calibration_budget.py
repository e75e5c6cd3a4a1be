"""What calibrating a model may take: operations counted beforehand, so that the same inputs give the same file on any
machine, and the clock, which ends what is slower than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from split.codec.calibration import LAYOUTS
from split.codec.picture import PICTURE_CODECS
from split.graph.cost import node_flops
from split.graph.model import Model
from split.tensor import TensorSpec
from split.workbench.coded_pictures import ladders
from split.workbench.planes import layouts_of
from split.workbench.worth_coding import TRANSFORMED_MAX, Worth, choose

PROBES_SHARE: Final = 0.55
"""Of the budget, for sensitivity."""
PROBE_FLOPS: Final = 1.5e12
"""All runs for sensitivity together: half a minute of a core that does 5e10 a second, as today's do."""
PROBES_MAX: Final = 17
"""Requests that each channel is moved in: more gained 2 % on a mobile CNN, four instead lost 8 %."""
PROBES_MIN: Final = 2
"""One in each of two folds, so that no fold's tables go by less than the others'."""
HELD_OUT_MAX: Final = 24
SOURCES_HELD_OUT_MAX: Final = 48
HELD_OUT_MIN: Final = 6
CUTS_MIN: Final = 3
CURVE_FLOPS: Final = 1.5e12
CURVE_POINTS: Final = 14
"""Requests that curves are measured on: 24, or one of each of up to 48 sources (few sources leave much open), as far as
all runs stay within so many operations, at so many points. Of a model too slow for six, fewer cuts are calibrated, but
three."""
PICTURE_POINTS: Final = 5
"""As many, of each size of each codec of pictures."""


def probe_flops(model: Model, worth: Worth) -> float:
    """Operations that one request's sensitivity takes: a run of the tail for each channel."""
    whole = sum(node_flops(model))
    channels = 0
    for name in worth.cut.boundary:
        spec, shape = model.crossing(name), model.shapes.get(name, ())
        layouts = layouts_of(spec, shape, channels_max=TRANSFORMED_MAX) if isinstance(spec, TensorSpec) else []
        channels += shape[LAYOUTS[layouts[0]][1]] if layouts else 0
    return channels * (1 - worth.share) * whole


def affordable(model: Model, worth: Sequence[Worth], input_bytes: float) -> list[Worth]:
    """The best cuts; of a slow model fewer, so that the curves of all are measured on enough requests."""
    chosen = choose(worth, input_bytes)
    while len(chosen) > CUTS_MIN and _curve_flops(model, chosen) * HELD_OUT_MIN > CURVE_FLOPS:
        chosen = choose(worth, input_bytes, limit=len(chosen) - 1)
    return chosen


def _curve_flops(model: Model, chosen: Sequence[Worth]) -> float:
    """Operations that the curves take for each request held out."""
    pictures = PICTURE_POINTS * len(ladders()) * len(PICTURE_CODECS)
    runs = CURVE_POINTS * sum(1 - worth.share for worth in chosen) + pictures
    return runs * sum(node_flops(model)) or 1.0


def held_out_count(model: Model, chosen: Sequence[Worth], sources: int) -> int:
    """How many requests curves are measured on."""
    most = max(HELD_OUT_MAX, min(sources, SOURCES_HELD_OUT_MAX))
    return max(HELD_OUT_MIN, min(most, int(CURVE_FLOPS / _curve_flops(model, chosen))))


class Spending:
    """Divides `PROBES_SHARE` of the budget, the time for sensitivity, among the cuts by what each one's takes, and all
    there is until `until_s` among the curves."""

    def __init__(self, *, budget_s: float, until_s: float, flops: Sequence[float], now_s: Callable[[], float]) -> None:
        self._left_s = PROBES_SHARE * budget_s
        self._until_s = until_s
        self._flops = flops
        self._now_s = now_s
        self.probes = max(PROBES_MIN, min(PROBES_MAX, int(PROBE_FLOPS / (sum(flops) or 1.0))))
        """Requests that each channel is moved in, of every cut."""

    @contextmanager
    def on(self, number: int) -> Iterator[Callable[[], bool]]:
        """Whether there is still time for this cut: its part of what the cuts before it left."""
        from_s = self._now_s()
        part_s = self._left_s * self._flops[number] / (sum(self._flops[number:]) or 1.0)
        until_s = min(from_s + part_s, self._until_s)
        try:
            yield lambda: self._now_s() < until_s
        finally:
            self._left_s = max(self._left_s - (self._now_s() - from_s), 0.0)

    def part_of(self, left: int) -> Callable[[], bool]:
        """Whether there is still time for a curve: its part, with `left` of them still to be measured, itself among
        them."""
        from_s = self._now_s()
        until_s = from_s + (self._until_s - from_s) / left
        return lambda: self._now_s() < until_s
