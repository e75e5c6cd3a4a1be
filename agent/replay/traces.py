"""Links and loads that change: the traces that policies are compared on. Seeded; each starts with 20 steady seconds, so
that every policy knows its way before anything happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from agent.replay.world import Moment

Trace = tuple[Moment, ...]

STEADY: Final = Moment(at_s=0.0, up_mbit_s=50.0, down_mbit_s=50.0, rtt_ms=10.0)
"""A good wireless link."""
SLOW: Final = replace(STEADY, up_mbit_s=5.0, down_mbit_s=5.0)

WALK_EVERY_S: Final = 0.5
WALK_STEP: Final = 0.25
"""Standard deviation of log(rate) per step. Over a second a third: what drive tests of LTE show between seconds of one
place (Raca et al., MMSys 2018, a 4G dataset with channel and context metrics, has coefficients of variation of 0.5 to 1
over minutes, which the bounds below give)."""
WALK_MBIT_S: Final = (1.0, 80.0)
WALK_DOWN_RATIO: Final = 3.0
"""LTE carries more down than up."""
WALK_RTT_MS: Final = (25.0, 180.0)
FADE_CHANCE: Final = 0.02
"""Per step; a fade every 25 s."""
FADE_RATIO: Final = 0.1
FADE_STEPS: Final = 4
"""Two seconds."""


def rate_steps() -> Trace:
    """50 → 5 → 50 Mbit/s, 20 s each."""
    return STEADY, replace(SLOW, at_s=20.0), replace(STEADY, at_s=40.0), replace(STEADY, at_s=60.0)


def rtt_spike() -> Trace:
    """10 → 200 → 10 ms; the spike lasts 20 s."""
    return STEADY, replace(STEADY, at_s=20.0, rtt_ms=200.0), replace(STEADY, at_s=40.0), replace(STEADY, at_s=60.0)


def outage() -> Trace:
    """Nothing passes for 5 s."""
    return STEADY, replace(STEADY, at_s=20.0, connected=False), replace(STEADY, at_s=25.0), replace(STEADY, at_s=60.0)


def lte_walk(seed: int = 0, duration_s: float = 120.0) -> Trace:
    """A mobile link: rate and round trip walk, each within bounds it is reflected at, with fades in which the rate
    falls to a tenth."""
    draw = np.random.default_rng(seed)
    log_rate, log_rtt = math.log(15.0), math.log(45.0)
    moments, fades = [], 0
    for step in range(round(duration_s / WALK_EVERY_S) + 1):
        rate = math.exp(log_rate) * (FADE_RATIO if fades > 0 else 1.0)
        rate = max(rate, 0.5)
        moments.append(
            Moment(
                at_s=step * WALK_EVERY_S,
                up_mbit_s=rate,
                down_mbit_s=WALK_DOWN_RATIO * rate,
                rtt_ms=math.exp(log_rtt),
            )
        )
        log_rate = _reflected(log_rate + WALK_STEP * draw.normal(), *WALK_MBIT_S)
        log_rtt = _reflected(log_rtt + 0.5 * WALK_STEP * draw.normal(), *WALK_RTT_MS)
        fades = fades - 1 if fades > 0 else FADE_STEPS * (draw.random() < FADE_CHANCE)
    return tuple(moments)


def cloud_slowdown() -> Trace:
    """The companion takes five times as long for 20 s: others use it, too."""
    return STEADY, replace(STEADY, at_s=20.0, cloud_ratio=5.0), replace(STEADY, at_s=40.0), replace(STEADY, at_s=60.0)


def thermal_throttle() -> Trace:
    """The device becomes hot within 10 s, takes twice as long for 20 s, and cools down within 10 s."""
    ramp = [replace(STEADY, at_s=20.0 + n, edge_ratio=1.0 + n / 10.0) for n in range(1, 11)]
    cool = [replace(STEADY, at_s=50.0 + n, edge_ratio=2.0 - n / 10.0) for n in range(1, 11)]
    return STEADY, *ramp, *cool, replace(STEADY, at_s=80.0)


TRACES: Final[Mapping[str, Callable[[], Trace]]] = {
    "rate steps": rate_steps,
    "rtt spike": rtt_spike,
    "outage": outage,
    "lte walk": lte_walk,
    "cloud slowdown": cloud_slowdown,
    "thermal throttle": thermal_throttle,
}

STEPS_S: Final[Mapping[str, tuple[float, ...]]] = {
    "rate steps": (20.0, 40.0),
    "rtt spike": (20.0, 40.0),
    "outage": (20.0, 25.0),
    "cloud slowdown": (20.0, 40.0),
}
"""When something changes at once, in those where it does."""


def lasts_s(trace: Trace) -> float:
    """Until the beginning of its last moment."""
    return trace[-1].at_s


def _reflected(log_value: float, low: float, high: float) -> float:
    least, most = math.log(low), math.log(high)
    if log_value < least:
        log_value = 2.0 * least - log_value
    if log_value > most:
        log_value = 2.0 * most - log_value
    return min(max(log_value, least), most)
