"""Which boundaries are worth calibrating: every one of a topological order is looked at, not only those that are narrow
uncoded. A boundary of few numbers that are alike in space and across channels (a bottleneck's projection, before its
activation) codes into far fewer bytes than its size says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.codec.calibration import LAYOUTS
from split.graph.cuts import Cut
from split.graph.model import Model
from split.tensor import Array, Tensors, TensorSpec
from split.workbench.klt_tables import Statistics, gaussian_bytes, klt_of, plain_sensitivity, transformed
from split.workbench.planes import block_of, layouts_of, planes

CUTS_MAX: Final = 8
"""Each costs a few seconds of calibration, and a second of every profile."""
SHARE_MIN: Final = 0.05
"""Of the compute: a head that does less takes nothing off the companion, and what it sends is as good as the input."""
TRANSFORMED_MAX: Final = 512
"""Channels: the transform of more takes a device as long as a good part of the model."""
NOISE_SHARE: Final = 0.05
"""Power of the noise in that of the signal at which boundaries are compared. EfficientNet-Lite0 diverges by 0.036 nats
at sizes 0.6 (deep in it) to 1.3 times (early) what this gives."""
ELEMENT_BYTES: Final = 0.02
"""What each number adds to what the variances say: a sixth of a bit, since early and expanded maps need finer noise
(EfficientNet-Lite0's first expansion takes four times what they say), and transforming it takes time."""
PICTURE_BYTES: Final = 1 / 8
"""For each value of a picture input, as a JPEG of quality 90 has: a cut that sends more is left to the codecs of
pictures."""
APART_SHARE: Final = 0.02
"""Of the compute: a cut is left out where one so little deeper sends less."""
SAVING_MIN: Final = 0.1
"""A deeper cut must send so much less than one before it: the estimate is no better."""
POSITIONS_MAX: Final = 2048
"""Of one tensor that are looked at: of larger ones some rows of blocks."""
RANKED_COST_MAX: Final = 1e10
"""Of all boundaries, channels² × (positions + channels) each: ten seconds. Of a model with more, boundaries are
compared on fewer of their channels, and wide ones then look a little dearer than they are."""
RANKED_CHANNELS_MIN: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a cut is expected to send, and what it leaves the device to do."""

    cut: Cut
    share: float
    """Of the compute, in the head."""
    nbytes: float


def layout_of(tensors: Sequence[Array], spec: TensorSpec) -> str:
    """The layout in which a boundary tensor, as seen for a few inputs, takes the fewest bytes; "" for one that is not
    transformed: no float, no fixed channels, too many of them, or values that are not finite."""
    layouts = layouts_of(spec, tensors[0].shape, channels_max=TRANSFORMED_MAX)
    sizes = {layout: _transformed_bytes(tensors, layout) for layout in layouts}
    best = min(sizes, key=lambda layout: sizes[layout], default="")
    return best if best and math.isfinite(sizes[best]) else ""


def expected_bytes(tensors: Sequence[Array], spec: TensorSpec, *, channels_max: int = TRANSFORMED_MAX) -> float:
    """Of a boundary tensor as seen for a few inputs, one request's bytes at `NOISE_SHARE`, by `channels_max` of its
    channels; its size where it is not transformed."""
    layouts = layouts_of(spec, tensors[0].shape, channels_max=TRANSFORMED_MAX)
    plain = float(np.mean([array.nbytes for array in tensors]))
    return min((plain, *(_transformed_bytes(tensors, layout, channels_max) for layout in layouts)))


def channels_within(boundaries: Sequence[tuple[TensorSpec, tuple[int, ...]]], cost_max: float) -> int:
    """By how many channels these boundaries (spec and shape) can be compared at this cost: `TRANSFORMED_MAX`, or half
    of it, or a quarter … `RANKED_CHANNELS_MIN` at least."""
    sizes = []
    for spec, shape in boundaries:
        for layout in layouts_of(spec, shape, channels_max=TRANSFORMED_MAX):
            channels = shape[LAYOUTS[layout][1]]
            sizes.append((channels, min(math.prod(shape) // channels, POSITIONS_MAX)))
    most = TRANSFORMED_MAX
    while most > RANKED_CHANNELS_MIN and sum(min(c, most) ** 2 * (p + min(c, most)) for c, p in sizes) > cost_max:
        most //= 2
    return most


def _transformed_bytes(tensors: Sequence[Array], layout: str, channels_max: int = TRANSFORMED_MAX) -> float:
    """By the variances of the principal components' coefficients; inf where a value is not finite."""
    parts = [_part(array, layout, channels_max) for array in tensors]
    statistics = Statistics(layout="NCHW")
    for part in parts:
        statistics.add(part)
    if not statistics.finite:
        return math.inf
    klt = klt_of(statistics, plain_sensitivity(statistics.covariance()))
    squares: Array = np.mean([(transformed(klt, part) ** 2).mean(axis=3) for part in parts], axis=0)
    each = gaussian_bytes(squares, NOISE_SHARE) / squares.size + ELEMENT_BYTES
    return float(each * tensors[0].size)


def _part(array: Array, layout: str, channels_max: int) -> Array:
    """FP32 [batch, channels, rows, columns], of large planes every so manieth row of blocks, of many channels some."""
    x = planes(array, layout).astype(np.float32)
    if x.shape[1] > channels_max:
        x = x[:, np.arange(channels_max) * x.shape[1] // channels_max]
    n, channels, rows, columns = x.shape
    side = block_of(rows, columns)[0]
    every = -(-n * rows * columns // POSITIONS_MAX)
    if every == 1 or rows % side:
        return x
    return np.ascontiguousarray(x.reshape(n, channels, rows // side, side, columns)[:, :, ::every]).reshape(
        n, channels, -1, columns
    )


def choose(worth: Sequence[Worth], input_bytes: float, *, limit: int = CUTS_MAX) -> list[Worth]:
    """At most `limit` on the Pareto front of bytes against compute share, in order of depth: first the corners of the
    convex hull in (share, log bytes), then those that halve the widest gaps. None that sends `input_bytes` or more, as
    long as there are others."""
    deep = [one for one in worth if one.share >= SHARE_MIN]
    narrow = [one for one in deep if one.nbytes < input_bytes] or deep
    front: list[Worth] = []
    for one in sorted(narrow, key=lambda one: (one.share, one.nbytes, one.cut.id)):
        if not front or one.nbytes < (1 - SAVING_MIN) * front[-1].nbytes:
            if front and one.share - front[-1].share < APART_SHARE:
                front.pop()
            front.append(one)
    chosen = _hull(front)
    if len(chosen) > limit:  # the ends and those between them at even distances
        chosen = [chosen[round(number * (len(chosen) - 1) / (limit - 1))] for number in range(limit)]
    while len(chosen) < min(limit, len(front)):
        rest = [one for one in front if one not in chosen]
        chosen.append(max(rest, key=lambda one: (min(abs(one.share - other.share) for other in chosen), one.cut.id)))
    return sorted(chosen, key=lambda one: (one.share, one.cut.id))


def _hull(front: Sequence[Worth]) -> list[Worth]:
    hull: list[Worth] = []
    for one in front:
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            slope = (np.log2(b.nbytes + 1) - np.log2(a.nbytes + 1)) * (one.share - a.share)
            if slope < (np.log2(one.nbytes + 1) - np.log2(a.nbytes + 1)) * (b.share - a.share):
                break
            hull.pop()
        hull.append(one)
    return hull


def boundaries(model: Model, cuts: Sequence[Cut], bytes_max: int) -> list[list[str]]:
    """The tensors that cross these cuts, in groups whose sizes together stay below `bytes_max` (one at least)."""
    names = dict.fromkeys(name for cut in cuts for name in cut.boundary)
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        size = model.nbytes(name)
        if groups[-1] and filled + size > bytes_max:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [group for group in groups if group]


def rank(
    model: Model,
    cuts: Sequence[Cut],
    shares: Sequence[float],
    seen: Callable[[Sequence[str]], list[Tensors]],
    *,
    bytes_max: int,
) -> list[Worth]:
    """Each cut with the bytes it is expected to send. `seen`: these values for a few requests."""
    crossing = dict.fromkeys(name for cut in cuts for name in cut.boundary)
    specs = {name: spec for name in crossing if isinstance(spec := model.crossing(name), TensorSpec)}
    shapes = [(spec, tuple(model.shapes.get(name, ()))) for name, spec in specs.items()]
    channels_max = channels_within([(spec, shape) for spec, shape in shapes if shape], RANKED_COST_MAX)
    sizes: dict[str, float] = {}
    for names in boundaries(model, cuts, bytes_max):
        found = seen(names)
        for name in names:
            assert name in specs, "a legal cut's boundary crosses"
            sizes[name] = expected_bytes([tensors[name] for tensors in found], specs[name], channels_max=channels_max)
    return [
        Worth(
            cut=cut,
            share=share,
            nbytes=sum(sizes[name] for name in cut.boundary) + sum(model.nbytes(name) for name in cut.tail_inputs),
        )
        for cut, share in zip(cuts, shares, strict=True)
    ]
