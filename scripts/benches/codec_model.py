"""From what was measured to a whole grid: a plan as the sum of its stages, and what a split gains. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

WIN: Final = 1.05
"""A split is worth something where every other plan takes so many times as long."""

DEVICE_STAGES: Final = ("image", "head", "whole", "encode", "decode")
"""What emulated slowness multiplies."""
CLOUD_STAGES: Final = ("cloud_decode", "tail")
NETWORK: Final = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Of one plan at slowdown 1, medians."""

    device_ms: float
    cloud_ms: float
    beside_ms: float
    """What the caller waits beside stages and link."""
    bytes: float
    """Both ways."""

    @staticmethod
    def of(timings_ms: Iterable[Mapping[str, float]], took_ms: Iterable[float], nbytes: float) -> Stages:
        timings = list(timings_ms)

        def total(stages: Iterable[str]) -> float:
            return statistics.median(sum(one.get(stage, 0.0) for stage in stages) for one in timings)

        known = (*DEVICE_STAGES, *CLOUD_STAGES, NETWORK)
        beside = [
            took - sum(one.get(stage, 0.0) for stage in known) for one, took in zip(timings, took_ms, strict=True)
        ]
        return Stages(
            device_ms=total(DEVICE_STAGES),
            cloud_ms=total(CLOUD_STAGES),
            beside_ms=statistics.median(beside),
            bytes=nbytes,
        )


class Network:
    """ms of a link by bytes both ways: straight lines between what was measured there, the last one going on."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """(bytes, ms); at least one."""
        known = sorted(points)
        self._bytes = np.array([size for size, _ in known])
        # A stall only makes a transfer longer: fewer bytes take no longer than more.
        self._ms = np.minimum.accumulate(np.array([ms for _, ms in known])[::-1])[::-1]

    def ms(self, nbytes: float) -> float:
        if nbytes <= self._bytes[-1] or len(self._bytes) < 2:
            return float(np.interp(nbytes, self._bytes, self._ms))
        slope = (self._ms[-1] - self._ms[0]) / (self._bytes[-1] - self._bytes[0])
        return float(self._ms[-1] + slope * (nbytes - self._bytes[-1]))


def modelled_ms(stages: Stages, slowdown: float, network: Network) -> float:
    """The device's stages take `slowdown` times as long, nothing else does; local sends nothing."""
    link_ms = network.ms(stages.bytes) if stages.bytes else 0.0
    return stages.device_ms * slowdown + stages.cloud_ms + stages.beside_ms + link_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One cell: the fastest split against the fastest of everything else."""

    split: str
    split_ms: float
    other: str
    other_ms: float

    @staticmethod
    def of(ms: Mapping[str, float]) -> Contest:
        """`ms`: plan in words → ms; plans that begin with `split` against all others. Where no split ran, it loses."""
        splits = {plan: value for plan, value in ms.items() if plan.startswith("split")}
        others = {plan: value for plan, value in ms.items() if plan not in splits}
        if not splits:
            splits = {"no split ran": math.inf}
        split, other = (min(some, key=lambda plan: some[plan]) for some in (splits, others))
        return Contest(split=split, split_ms=splits[split], other=other, other_ms=others[other])

    @property
    def gain(self) -> float:
        """How many times as long it takes without the split."""
        return self.other_ms / self.split_ms

    @property
    def won(self) -> bool:
        return self.gain >= WIN

    def as_row(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "split_ms": self.split_ms,
            "other": self.other,
            "other_ms": self.other_ms,
            "gain": self.gain,
        }


def summary(contests: Iterable[Contest]) -> dict[str, Any]:
    """Share of the cells that a split wins, and the median gain there (1 where there is none)."""
    every = list(contests)
    won = [one.gain for one in every if one.won]
    return {
        "cells": len(every),
        "won": len(won),
        "won_ratio": len(won) / len(every) if every else 0.0,
        "median_gain_where_won": statistics.median(won) if won else 1.0,
        "largest_gain": max((one.gain for one in every), default=1.0),
    }
