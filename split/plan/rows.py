"""The plans of a table one by one: what each is made of, what it sends within a bound of fidelity, and what of the
contract forbids it. `table.py` makes columns of them.

A codec with settings (klt, jpeg, webp) has one row, and in it the cheapest setting that was *measured* inside the
bound: nothing is interpolated. So a closer bound (`isthmus.fidelity`) gives the same rows other bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from split.plan.observation import Flags, Floats
from split.plan.plan import LOSSLESS_CODECS, Placement, Plan
from split.profiles.contract import PRIVACY_ORDER, Contract
from split.profiles.measured import CodecCosts, Point

P95_SIGMAS: Final = 1.645
"""The 95 % quantile of a normal distribution lies so many σ above its mean."""

BOUNDS_KEPT_MAX: Final = 32
"""Bounds that requests may ask for at once without one being worked out anew: 2 KB each for 100 plans."""

MEASURED_BY: Final = {"klt": "isthmus calibrate", "jpeg": "isthmus calibrate", "webp": "isthmus calibrate"}
"""What measures a codec's fidelity; of all others it is `isthmus profile`."""


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

    def sent(self, measure: str, bound: float) -> Point:
        """What it sends, and how far off the outputs are then: the cheapest setting within `bound` of `measure`; where
        none is, the closest (the caller says that it is not allowed). For a codec without settings as measured."""
        codec = self.codec
        if codec is None:
            return _NOTHING
        if not codec.curve:
            worst = codec.fidelity  # of the golden inputs: nothing is above it
            return Point(level=-1, mean_bytes=codec.bytes, p95_bytes=codec.bytes, fidelity=worst, fidelity_high=worst)
        within = [point for point in codec.curve if point.within(measure, bound)]
        if within:
            return min(within, key=lambda point: point.mean_bytes)
        return min(codec.curve, key=lambda point: point.fidelity_high.get(measure, math.inf))


_NOTHING: Final = Point(level=-1, mean_bytes=0, p95_bytes=0, fidelity={}, fidelity_high={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """All rows within one bound, as columns in their order."""

    bound: float
    up: Floats
    """Mean payload bytes; 0 for encoded, whose size the request brings."""
    up_sigma: Floats
    """Their standard deviation from request to request: 0 but for codecs with settings."""
    levels: tuple[int | None, ...]
    """The setting; None for a codec that has none."""
    fidelity: tuple[float | None, ...]
    """By the contract's measure, in the mean; None for a lossless plan and for one not measured."""
    fidelity_high: tuple[float | None, ...]
    """What that mean is at most: the side of it that is held against the bound."""
    allowed: tuple[Flags, Flags, Flags]
    """Per privacy level in the order of `PRIVACY_ORDER`."""
    why_not: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    """The constraint behind each False, as a sentence; "" where allowed."""


class Rows:
    """Of one model under one contract, on a device that runs models on `runs_on` (as for `PlanTable.build`)."""

    def __init__(self, rows: Sequence[Row], contract: Contract, runs_on: Sequence[str] | None) -> None:
        self.rows = tuple(rows)
        self.measure, self.bound = contract.data.fidelity.measure, contract.data.fidelity.bound
        self._contract = contract
        self._runs_on = runs_on
        self._kept: dict[float, Within] = {}

    def within(self, bound: float) -> Within:
        """What they send within `bound`, at most the contract's."""
        if (known := self._kept.get(bound)) is not None:
            return known
        while len(self._kept) >= BOUNDS_KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        found = self._kept[bound] = self._within(bound)
        return found

    def _within(self, bound: float) -> Within:
        measure = self.measure
        sent = [row.sent(measure, bound) for row in self.rows]
        up = np.array([point.mean_bytes for point in sent], dtype=np.float64)
        p95 = np.array([point.p95_bytes for point in sent], dtype=np.float64)
        why_not = self._why_not(sent, bound)
        return Within(
            bound=bound,
            up=up,
            up_sigma=np.maximum(p95 - up, 0.0) / P95_SIGMAS,
            levels=tuple(point.level if point.level >= 0 else None for point in sent),
            fidelity=self._lossy([point.fidelity for point in sent]),
            fidelity_high=self._lossy([point.fidelity_high for point in sent]),
            allowed=(_flags(why_not[0]), _flags(why_not[1]), _flags(why_not[2])),
            why_not=why_not,
        )

    def _lossy(self, measured: Sequence[dict[str, float]]) -> tuple[float | None, ...]:
        return tuple(
            None if row.plan.codec is None or row.plan.codec in LOSSLESS_CODECS else values.get(self.measure)
            for row, values in zip(self.rows, measured, strict=True)
        )

    def _why_not(self, sent: Sequence[Point], bound: float) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        contract = self._contract
        private = {spec.name for spec in contract.data.inputs if spec.privacy != "any"}
        # A local-only input forbids all that is computed from it; which tensors are is not known, so everything.
        local_only = contract.strictest_privacy() == "local-only"
        least = 2 if local_only else PRIVACY_ORDER.index(contract.data.privacy)
        reasons = tuple(
            tuple(
                _forbidden(row, max(level, least), private, contract, self._runs_on)
                or _too_far(row, point, contract, bound)
                for row, point in zip(self.rows, sent, strict=True)
            )
            for level in range(3)
        )
        assert len(reasons) == 3
        return reasons


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
    codec, measure = row.plan.codec, contract.data.fidelity.measure
    if codec is None or codec in LOSSLESS_CODECS:
        return ""
    found = point.fidelity_high.get(measure)
    if found is None:
        return f"fidelity not measured ({measure} of codec {codec}); run {MEASURED_BY.get(codec, 'isthmus profile')}"
    if found <= bound:
        return ""
    whose = "the contract's" if bound == contract.data.fidelity.bound else "the request's"
    if point.level < 0:
        return f"fidelity {measure} {found:.4g} is over {whose} bound {bound:g}"
    return (
        f"no setting of {codec} was measured inside {whose} {measure} of {bound:g}: the closest measured is "
        f"{point.fidelity.get(measure, found):.4g} in the mean, {found:.4g} at most, with {point.mean_bytes:.0f} bytes"
    )


def _flags(reasons: tuple[str, ...]) -> Flags:
    return np.array([not reason for reason in reasons])
