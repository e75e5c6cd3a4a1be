"""The plans of a table one by one: what each is made of, what it sends within a bound of fidelity, and what of the
contract forbids it. `table.py` makes columns of them.

A codec with settings (klt, jpeg, webp) has one row, and in it the cheapest setting that was *measured* inside the
bound: nothing is interpolated. So a closer bound (`isthmus.fidelity`) gives the same rows other bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from split.plan.observation import Flags, Floats
from split.plan.plan import LOSSLESS_CODECS, WITH_LEVELS, Placement, Plan
from split.profiles.contract import PRIVACY_ORDER, Contract
from split.profiles.measured import CodecCosts, Point, cheapest

P95_SIGMAS: Final = 1.645
"""The 95 % quantile of a normal distribution lies so many σ above its mean."""

BOUNDS_KEPT_MAX: Final = 32
"""Ranges of bounds that requests may ask for at once without one being worked out anew: 5 KB each for 100 plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan, with what was measured of it."""

    plan: Plan
    finish_ms: float
    head_ms: float = 0.0
    tail_ms: float = 0.0
    codec: CodecCosts | None = None
    down: int = 0
    depth: float = 0.0
    weight_bytes: int = 0
    """Of the head."""
    raw_inputs: tuple[str, ...] = ()
    """Model inputs that can be read off what travels."""
    doubt: float = 1.0

    def settings(self, measure: str) -> tuple[Sequence[float], Sequence[Point]]:
        """Ascending bounds of `measure` from which on another point is what it sends, and what it sends below the first
        of them and from each on: the cheapest setting inside, below the first the closest (the caller says that it is
        not allowed). A codec without settings sends what was measured."""
        codec = self.codec
        if codec is None:
            return (), (_NOTHING,)
        if not codec.curve:
            worst = codec.fidelity  # of the golden inputs: nothing is above it
            only = Point(level=-1, mean_bytes=codec.bytes, p95_bytes=codec.bytes, fidelity=worst, fidelity_high=worst)
            return (), (only,)
        bounds: list[float] = []
        points = [min(codec.curve, key=lambda point: _high(point, measure))]
        for bound in sorted({_high(point, measure) for point in codec.curve} - {math.inf}):
            found = cheapest(codec.curve, measure, bound)
            assert found is not None, "the point itself"
            if not bounds or found is not points[-1]:
                bounds.append(bound)
                points.append(found)
        return bounds, points


def _high(point: Point, measure: str) -> float:
    """What the mean is at most; infinite where that is not known, or no number."""
    high = point.fidelity_high.get(measure, math.inf)
    return math.inf if math.isnan(high) else high


_NOTHING: Final = Point(level=-1, mean_bytes=0, p95_bytes=0, fidelity={}, fidelity_high={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """All rows within a range of bounds that makes no difference to any, as columns in their order."""

    key: int
    """Number of the range."""
    points: tuple[Point, ...]
    """What is sent."""
    up: Floats
    """Mean payload bytes; 0 for encoded, whose size the request brings."""
    up_sigma: Floats
    """Their standard deviation from request to request: 0 but for codecs with settings."""
    levels: tuple[int | None, ...]
    """The setting; None for a codec that has none."""
    allowed: tuple[Flags, Flags, Flags]
    """Per privacy level in the order of `PRIVACY_ORDER`."""
    of_other_sizes: bool = False
    """Whether it is for requests of sizes at which no setting was measured: none is allowed."""

    def at_other_sizes(self) -> Within:
        """The same for a request whose sizes no setting was measured near."""
        plain = np.array([level is None for level in self.levels])
        one, two, three = self.allowed
        return replace(self, allowed=(one & plain, two & plain, three & plain), of_other_sizes=True)


class Rows:
    """Of one model under one contract, on a device that runs models on `runs_on` (as for `PlanTable.build`).

    Any request may ask for a bound of its own. Few of them differ in what they make of the plans: what is worked out is
    kept for the range of bounds, and sentences are made when asked for.
    """

    def __init__(self, rows: Sequence[Row], contract: Contract, runs_on: Sequence[str] | None) -> None:
        self.rows = tuple(rows)
        self.measure, self.bound = contract.data.fidelity.measure, contract.data.fidelity.bound
        self._name = contract.data.fidelity.name
        self._contract = contract
        self._settings = [row.settings(self._name) for row in self.rows]
        self._lossy = [row.plan.codec is not None and row.plan.codec not in LOSSLESS_CODECS for row in self.rows]
        self._forbidden = _all_forbidden(self.rows, contract, runs_on)
        self._may = tuple(np.array([not why for why in level]) for level in self._forbidden)
        points = (
            point for lossy, (_, of_row) in zip(self._lossy, self._settings, strict=True) if lossy for point in of_row
        )
        self._ranges = sorted({_high(point, self._name) for point in points} - {math.inf})
        """Where one begins, with its first bound in it."""
        self._kept: dict[int, Within] = {}

    def key(self, bound: float) -> int:
        """Number of the range that `bound` lies in."""
        return bisect_right(self._ranges, bound)

    def within(self, key: int) -> Within:
        """What they send within the bounds of this range."""
        if (known := self._kept.get(key)) is not None:
            return known
        while len(self._kept) >= BOUNDS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        bound = self._ranges[key - 1] if key else -math.inf
        points = tuple(points[bisect_right(bounds, bound)] for bounds, points in self._settings)
        up, p95 = np.array([(point.mean_bytes, point.p95_bytes) for point in points], dtype=np.float64).T
        fits = np.array(
            [not lossy or point.within(self._name, bound) for lossy, point in zip(self._lossy, points, strict=True)]
        )
        one, two, three = self._may
        found = self._kept[key] = Within(
            key=key,
            points=points,
            up=up,
            up_sigma=np.maximum(p95 - up, 0.0) / P95_SIGMAS,
            levels=tuple(point.level if point.level >= 0 else None for point in points),
            allowed=(one & fits, two & fits, three & fits),
        )
        return found

    def fidelity(self, within: Within, row: int) -> tuple[float | None, float | None]:
        """By the contract's measure, in the mean and at most; None for a lossless plan and for what is not measured."""
        point = within.points[row]
        if not self._lossy[row]:
            return None, None
        return point.fidelity.get(self._name), point.fidelity_high.get(self._name)

    def why_not(self, within: Within, level: int, row: int, bound: float | None = None) -> str:
        """The constraint that forbids this row, at a privacy level in the order of `PRIVACY_ORDER` and within `bound`
        (None: the contract's), as a sentence; "" where it is allowed."""
        why = self._forbidden[level][row]
        if why or not self._lossy[row]:
            return why
        if within.of_other_sizes and within.levels[row] is not None:
            return (
                f"the settings of {self.rows[row].plan.codec} were measured on inputs of other sizes than this "
                "request's; run isthmus calibrate with inputs of such sizes, too"
            )
        return _too_far(self.rows[row], within.points[row], self._contract, self.bound if bound is None else bound)


def _all_forbidden(
    rows: Sequence[Row], contract: Contract, runs_on: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    private = {spec.name for spec in contract.data.inputs if spec.privacy != "any"}
    # A local-only input forbids all that is computed from it; which tensors are is not known, so everything.
    local_only = contract.strictest_privacy() == "local-only"
    least = 2 if local_only else PRIVACY_ORDER.index(contract.data.privacy)
    one, two, three = (
        tuple(_forbidden(row, max(level, least), private, contract, runs_on) for row in rows) for level in range(3)
    )
    return one, two, three


def _forbidden(row: Row, level: int, private: set[str], contract: Contract, runs_on: Sequence[str] | None) -> str:
    """The first constraint of the contract, fidelity apart, that forbids this plan at this privacy level; "" when none
    does."""
    codec, usable = row.plan.codec, contract.resource.accelerators
    if row.plan.placement is not Placement.OFFLOAD and runs_on is not None and not set(usable) & set(runs_on):
        return f"resource.accelerators is {', '.join(usable)}: the device runs models on {', '.join(runs_on)}"
    if codec is None:
        return ""
    if level == 2:
        return "privacy is local-only: nothing may leave the device"
    leaking = [name for name in row.raw_inputs if level == 1 or name in private]
    if leaking:
        return f"privacy is no-raw-input: input {', '.join(map(repr, leaking))} could be read off what leaves"
    data = contract.data
    if row.depth < data.depth_min_ratio:
        return (
            f"depth_min_ratio is {data.depth_min_ratio:g}: only {row.depth:.3g} of the compute would be done "
            "before something leaves the device"
        )
    most = contract.resource.memory_bytes
    if most is not None and row.weight_bytes > most:
        return f"resource.memory_bytes is {most}: the weights of this head alone take {row.weight_bytes}"
    if codec not in data.codecs:
        return f"the contract does not allow codec {codec} (allowed: {', '.join(data.codecs) or 'none'})"
    return ""


def _too_far(row: Row, point: Point, contract: Contract, bound: float) -> str:
    """Why a lossy plan does not keep to the bound; "" when it does."""
    codec, measure, name = row.plan.codec, contract.data.fidelity.measure, contract.data.fidelity.name
    assert codec is not None, "a lossy plan"
    found = point.fidelity_high.get(name)
    if found is None:
        command = "isthmus calibrate" if codec in WITH_LEVELS else "isthmus profile"
        such = "" if contract.data.fidelity.boxes is None else " with inputs that show it something"
        return f"fidelity not measured ({measure} of codec {codec}); run {command}{such}"
    if found <= bound:
        return ""
    whose = "the contract's" if bound == contract.data.fidelity.bound else "the request's"
    if point.level < 0:
        return f"fidelity {measure} {found:.4g} is over {whose} bound {bound:g}"
    return (
        f"no setting of {codec} was measured inside {whose} {measure} of {bound:g}: the closest measured is "
        f"{point.fidelity.get(name, found):.4g} in the mean, {found:.4g} at most, with {point.mean_bytes:.0f} bytes"
    )
