"""What is known at one moment, as values: the state in which `choose.py` compares plans. Nothing here learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from split.plan.objective import FREE, NO_BACKLOG, Backlog, Prices
from split.plan.power import NO_POWER, Power
from split.plan.values import value

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """What a transfer that is sent now waits for TCP's window to open (`slow_start.py`): a staircase over its size."""

    after_bytes: Floats
    """Ascending: what does not fit before here waits once more."""
    extra_ms: Floats
    """One longer, the first 0: all waits of what reaches so far."""

    def waits(self, up_bytes: float) -> tuple[int, float]:
        """How often a transfer waits, and what it has sent by then."""
        count = int(self.after_bytes.searchsorted(up_bytes))
        return count, float(self.after_bytes[count - 1]) if count else 0.0

    def ms(self, up_bytes: float) -> float:
        """The extra time of one transfer."""
        return float(self.extra_ms[int(self.after_bytes.searchsorted(up_bytes))])


@value(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """The link as `link.py` estimates it: network time = rtt + up_bytes · up + down_bytes · down, and where TCP's
    window is not open `slow_start` on top."""

    rtt_ms: float
    up_ms_per_byte: float
    down_ms_per_byte: float
    covariance: tuple[float, float, float, float, float, float]
    """Of (rtt, up, down): rr, ru, rd, uu, ud, dd; grown by the time that nothing was seen."""
    age_s: float
    """Since the last observation; inf before the first."""
    slow_start: SlowStart | None = None
    """None: nothing waits for TCP's window."""

    def transfer_ms(self, up_bytes: float, down_bytes: float) -> float:
        """Expected network time of one request and its reply."""
        waits_ms = self.slow_start.ms(up_bytes) if self.slow_start is not None else 0.0
        return self.rtt_ms + up_bytes * self.up_ms_per_byte + down_bytes * self.down_ms_per_byte + waits_ms

    def sigma_ms(self, up_bytes: float, down_bytes: float) -> float:
        """Standard deviation of `transfer_ms` that comes from not knowing the link."""
        rr, ru, rd, uu, ud, dd = self.covariance
        u, d = up_bytes, down_bytes
        return math.sqrt(max(rr + u * u * uu + d * d * dd + 2.0 * (u * ru + d * rd + u * d * ud), 0.0))

    def as_mapping(self) -> Mapping[str, float]:
        """For explanations: rtt_ms, up_mbit_s, down_mbit_s, age_s."""
        return {
            "rtt_ms": self.rtt_ms,
            "up_mbit_s": 0.008 / self.up_ms_per_byte,
            "down_mbit_s": 0.008 / self.down_ms_per_byte,
            "age_s": self.age_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """What may still cross a link whose bytes are counted."""

    left_bytes: float
    """Payload bytes, both ways together."""
    used_up: str = ""
    """A sentence where nothing is left; "" otherwise."""
    probe_bytes_per_hour: float = math.inf
    """What looking at the link may cost, beside the bound that holds for every link."""
    may_probe: bool = True
    """Whether enough is left to spend some on looking at the link."""


@value(frozen=True, slots=True, kw_only=True)
class RemoteView:
    """The companion as the device sees it at this moment, for one model."""

    link: LinkEstimate
    beta: float
    """Drift of cloud compute: measured / the table's tail."""
    beta_sigma: float
    """Standard deviation of beta, relative to it."""
    speed_ratio: float
    """Companion / device on the same work: what decoding a payload costs there, as a share of what it costs here."""
    image_ms: float
    """Decoding and preparing one encoded input there, drift in."""
    queue_ms: float
    queue_sigma_ms: float
    opened: Flags
    """Plans whose segment the companion holds open."""
    ahead_bytes: int = 0
    """What other requests have still to send before this one's turn."""
    rest_ms: float = 0.0
    """What a request that travels takes beside all stages, more than one that stays (`rest.py`)."""
    payload_bytes_max: float = math.inf
    """The largest payload that it takes."""
    metered_left_bytes: float = math.inf
    """What may still cross the link this month, both ways together."""
    encoded_why_not: str = ""
    """Why encoded inputs may not travel to this companion (pictures decode differently there); empty when they may."""
    codecs_why_not: Mapping[str, str] = field(default_factory=dict)
    """Codec → why it may not be used now, of those that may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What opening segments on the device would take now, ms for each plan of the table; 0.0 while they are open."""

    run_ms: Floats
    """The head, or the whole for local: beside the worker, before anything runs."""
    finish_ms: Floats
    """What finishes the request here should the companion fail: the tail, or the whole for offload; on the worker."""


@value(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of the device, and of the companion where there is one."""

    edge_queue_ms: float
    slowdown: float
    """`emulation.slowdown`: multiplies every stage that the device runs."""
    alpha: float
    """Drift of edge compute: measured / (slowdown · the table's head)."""
    alpha_sigma: float
    """Standard deviation of alpha, relative to it."""
    image_ms: float
    """Decoding and preparing one encoded input on the device, before drift."""
    image_ratio: float
    """Drift of decoding pictures on the device."""
    remote: RemoteView | None
    opening: Opening | None = None
    """None: everything is open."""
    remote_why_not: str = ""
    """Why `remote` is None, as a sentence; empty when it is not."""
    rest_ms: float = 0.0
    """What every request takes beside all stages (`rest.py`)."""
    incumbent: int | None = None
    """Row of the plan that a challenger must beat (the one chosen last); None compares without stickiness."""
    power: Power = NO_POWER
    prices: Prices = FREE
    battery_low: bool = False
    """Below `power.battery_ratio_min`: energy counts before latency."""
    backlog: Backlog = NO_BACKLOG
    """What earlier requests still have to do, for sharing the stations out; `edge_queue_ms` is what this one waits."""

    def __post_init__(self) -> None:
        assert (self.remote is None) == bool(self.remote_why_not), self.remote_why_not
