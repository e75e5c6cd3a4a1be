"""What a request's time costs in energy: watts above the idle board, by what the device is doing.

Above idle, because an idle board draws its idle power whatever is chosen. Nothing here measures or learns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from split.profiles.device import DeviceProfile
from split.profiles.radio import RATE_MAX_MBIT_S, Radio


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Watts above idle of the whole board. The energy of a plan is linear in the same columns as its latency."""

    compute_w: float
    """While the worker computes: picture, head or whole, encode, decode, finish."""
    send_w: float
    """While bytes leave."""
    receive_w: float
    """While bytes come."""
    wait_w: float
    """While the request waits for the companion. (For its turn on the worker it waits at no cost: nothing of it keeps
    a radio awake.)"""
    measured: bool
    """Whether `compute_w` was measured on this device; otherwise it is modelled from a device profile."""
    source: str
    """Where the figures come from, as a clause; "" where nothing is known."""

    def __post_init__(self) -> None:
        for name, watts in (
            ("compute_w", self.compute_w),
            ("send_w", self.send_w),
            ("receive_w", self.receive_w),
            ("wait_w", self.wait_w),
        ):
            assert 0.0 <= watts < math.inf, f"{name} must be watts, 0 or more, got {watts}"

    def joules(self, *, compute_ms: float, send_ms: float, receive_ms: float, wait_ms: float) -> float:
        """Energy above idle of so many milliseconds of each."""
        return (
            self.compute_w * compute_ms + self.send_w * send_ms + self.receive_w * receive_ms + self.wait_w * wait_ms
        ) / 1000.0


NO_POWER: Final = Power(compute_w=0.0, send_w=0.0, receive_w=0.0, wait_w=0.0, measured=False, source="")
"""Nothing is known of this device's power: every plan costs 0 J, so energy decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """What a device draws, before it is known how fast its link is."""

    compute_w: float
    """As `Power.compute_w`, on `threads` threads."""
    threads: int = 0
    """0: over whatever ran while it was measured, and taken for any number."""
    radio: Radio | None
    """Of the link to the companion; None: nothing leaves by a radio (no companion yet, or on the same host)."""
    measured: bool
    source: str

    def at(self, up_mbit_s: float, down_mbit_s: float, *, threads: int = 0) -> Power:
        """While bytes cross at these rates, Mbit/s: base + slope × rate (Huang et al., MobiSys 2012, eq. 1).

        `threads`: that the model in question computes on, fewer of them draw in proportion; 0: not known.
        """
        radio, compute_w = self.radio, self.compute_w
        if 0 < threads < self.threads:
            compute_w *= threads / self.threads
        if radio is None:
            return Power(
                compute_w=compute_w,
                send_w=0.0,
                receive_w=0.0,
                wait_w=0.0,
                measured=self.measured,
                source=self.source,
            )
        return Power(
            compute_w=compute_w,
            send_w=radio.base_w + radio.send_w_per_mbit_s * min(up_mbit_s, RATE_MAX_MBIT_S),
            receive_w=radio.base_w + radio.receive_w_per_mbit_s * min(down_mbit_s, RATE_MAX_MBIT_S),
            wait_w=radio.wait_w,
            measured=self.measured,
            source=f"{self.source}; the radio is modelled" if self.measured else self.source,
        )


NO_POWER_MODEL: Final = PowerModel(compute_w=0.0, radio=None, measured=False, source="")
"""`NO_POWER` at any rate."""


def modelled(device: DeviceProfile | None, threads: int, radio: Radio | None) -> PowerModel:
    """From a profile: the share of busy − idle that falls to so many threads (`DeviceProfile.busy_share`)."""
    if device is None or device.power is None:
        return NO_POWER_MODEL
    span_w = device.power.busy_w - device.power.idle_w
    return PowerModel(
        compute_w=span_w * device.busy_share(threads),
        threads=threads,
        radio=radio,
        measured=False,
        source=f"modelled: {device.name}, {span_w:g} W between idle and all cores busy",
    )


def crossing_ms(
    measured_ms: Mapping[str, float], predicted_ms: Mapping[str, float], rtt_ms: float, parts: int = 1
) -> tuple[float, float]:
    """How long bytes left and came: `network` is measured as one time; it is split as the prediction had `up` and
    `down`, in which half the round trip `rtt_ms` each is waiting. Of a request in several parts `network` is that of
    the first (`agent/parts.py`); the others are taken to have had its rate."""
    up_ms, down_ms = predicted_ms.get("up", 0.0), predicted_ms.get("down", 0.0)
    if up_ms + down_ms <= 0.0:
        return 0.0, 0.0
    ratio = measured_ms.get("network", 0.0) / (rtt_ms + (up_ms + down_ms - rtt_ms) / parts)
    return ratio * max(up_ms - rtt_ms / 2.0, 0.0), ratio * max(down_ms - rtt_ms / 2.0, 0.0)


_COMPUTED: Final = ("activate", "image", "head", "whole", "encode", "decode", "local_tail")
"""Measured stages (`agent/journal.py`) in which the device works."""


def used_joules(
    power: Power,
    measured_ms: Mapping[str, float],
    predicted_ms: Mapping[str, float],
    rtt_ms: float,
    total_ms: float,
    *,
    parts: int = 1,
    sent: bool = False,
    doubled_ms: float = 0.0,
) -> float:
    """What an answered request used above idle: its measured stages times the power in them.

    `parts`: that it went in. `sent`: its payload left, whoever answered; where no reply tells how long that took
    (`network`), it is what was predicted, within the time there was. `doubled_ms`: of the device, for an answer that
    came second. What no stage explains of `total_ms` was waited for the companion, its own time included; nothing was
    where nothing left.
    """
    compute_ms = sum(measured_ms.get(stage, 0.0) for stage in _COMPUTED)
    left_ms = max(total_ms - compute_ms - measured_ms.get("queue", 0.0), 0.0)
    send_ms = receive_ms = wait_ms = 0.0
    if "network" in measured_ms:
        send_ms, receive_ms = crossing_ms(measured_ms, predicted_ms, rtt_ms, parts)
        wait_ms = max(left_ms - send_ms - receive_ms, 0.0)
    elif sent:
        send_ms = min(max(predicted_ms.get("up", 0.0) - rtt_ms / 2.0, 0.0), left_ms)
        wait_ms = left_ms - send_ms
    return power.joules(compute_ms=compute_ms + doubled_ms, send_ms=send_ms, receive_ms=receive_ms, wait_ms=wait_ms)
