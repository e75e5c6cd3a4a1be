"""Looks at the device every ten seconds: sensors go to the planner, an energy counter teaches what computing draws.

Reads files on a thread (a sensor on a slow bus may block for milliseconds), keeps what it found for `status`. It
decides nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.energy import find_gauge, link_kind
from agent.sensors import Sensors, read_sensors
from split.plan.power import Power, PowerModel, modelled
from split.plan.power_fit import PowerFit
from split.profiles.device import DeviceProfile
from split.profiles.radio import RADIOS, Radio

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""Temperature and charge change over minutes; a counter window of it averages over many requests."""
SAMPLE_S: Final = 1.0
"""Between two readings of a monitor that knows only this moment: ten make a window."""
WINDOW_MAX_S: Final = 3 * EVERY_S
"""A longer gap (the device slept) says nothing."""
BATTERY_MARGIN: Final = 0.02
"""Above `battery_ratio_min`, where a low battery counts as recovered: gauges jitter by a percent."""


class DeviceWatch:
    """`look` once, then `run` as long as the daemon lives. On the event loop.

    `profile`: whose power holds until something was measured; None: nothing is known. `generic`: it is not this
    board's, for which there is none. `threads`: that segments use at
    most. `busy_s`: of the compute worker, so far.
    """

    def __init__(
        self,
        *,
        profile: DeviceProfile | None,
        threads: int,
        battery_ratio_min: float,
        busy_s: Callable[[], float],
        generic: bool = False,
        root: Path = Path("/"),
    ) -> None:
        self._root = root
        self._battery_ratio_min = battery_ratio_min
        self._busy_s = busy_s
        self.on_sensors: Callable[[Sensors], None] = _nobody_minds
        """Told of each reading."""
        self._gauge, self.note = find_gauge(root)
        """`note`: why a better source of energy could not be used; "" mostly."""
        self._fit = PowerFit()
        self._samples_w: list[float] = []
        self._window: tuple[float, float, float] | None = None
        """Since when, the worker's busy seconds and the counter's joules then."""
        self._radio: Radio | None = None
        self._throttle_c = None if profile is None else profile.throttle_celsius
        self.power = modelled(profile, threads, None)
        if generic and self.power.source:
            self.power = dataclasses.replace(self.power, source=f"{self.power.source}; no profile for this board")
        self.sensors: Sensors | None = None
        """As read last; None before the first look."""
        self.battery_low = False

    def linked(self, interface: str) -> None:
        """The connection to the companion leaves by this network interface; "" where that is unknown."""
        kind = link_kind(interface, self._root)
        self._radio = None if kind is None else RADIOS[kind]
        if self.power.source:
            self.power = dataclasses.replace(self.power, radio=self._radio)

    def snapshot(self, power: Power) -> dict[str, object]:
        """For `isthmus status`: `power` at the link's rates now; watts are null where nothing is known."""
        known = bool(power.source)
        watts = {
            name: getattr(power, name) if known else None for name in ("compute_w", "send_w", "receive_w", "wait_w")
        }
        return {
            **watts,
            "measured": power.measured,
            "source": power.source,
            "gauge": self._gauge.source if self._gauge is not None else None,
            "note": self.note,
            "battery_low": self.battery_low,
            "throttle_c": self._throttle_c,
        }

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        sampled = self._gauge is not None and self._gauge.instant
        while True:
            next_at_s = loop.time() + EVERY_S
            while (left_s := next_at_s - loop.time()) > 0.0:
                await asyncio.sleep(min(left_s, SAMPLE_S) if sampled else left_s)
                if sampled:
                    await self.sample()
            await self.look(loop.time())

    async def look(self, now_s: float) -> None:
        """Read everything once and learn from it."""
        sensors = await asyncio.to_thread(read_sensors, self._root)
        self.sensors = sensors
        self._judge_battery(sensors)
        self.on_sensors(sensors)
        if self._gauge is None:
            return
        if self._gauge.instant:
            self._learn(now_s, None)
        else:
            self._learn(now_s, await asyncio.to_thread(self._gauge.read))

    async def sample(self) -> None:
        """One reading of a monitor that knows only this moment."""
        assert self._gauge is not None
        if (watts := await asyncio.to_thread(self._gauge.read)) is not None:
            self._samples_w.append(watts)

    def _judge_battery(self, sensors: Sensors) -> None:
        """Low while the device runs on it and the charge is below the configured one; a charger ends it at once."""
        if sensors.battery_ratio is None or not sensors.on_battery:
            self.battery_low = False
            return
        margin = BATTERY_MARGIN if self.battery_low else 0.0
        low = sensors.battery_ratio < self._battery_ratio_min + margin
        if low != self.battery_low:
            log.info("battery at %.0f %%: %s", 100 * sensors.battery_ratio, "low" if low else "no longer low")
        self.battery_low = low

    def _learn(self, now_s: float, total_j: float | None) -> None:
        """The window that ends now; `total_j` of a counter, None for the samples of a monitor."""
        busy_s, began, samples_w = self._busy_s(), self._window, self._samples_w
        self._samples_w = []
        counter = self._gauge is not None and not self._gauge.instant
        if counter and total_j is None:
            self._window = None
            return
        self._window = (now_s, busy_s, total_j or 0.0)
        if began is None or not 0.0 < now_s - began[0] <= WINDOW_MAX_S:
            return
        seconds = now_s - began[0]
        if counter:
            joules = (total_j or 0.0) - began[2]
        elif samples_w:
            joules = seconds * sum(samples_w) / len(samples_w)
        else:
            return
        self._fit.observe(seconds, joules, busy_s - began[1])
        if self._fit.compute_w is not None:
            self._measured(self._fit.compute_w)

    def _measured(self, compute_w: float) -> None:
        assert self._gauge is not None
        self.power = PowerModel(
            compute_w=compute_w,
            radio=self._radio,
            measured=True,
            source=f"measured: {self._gauge.source}",
        )


def _nobody_minds(_: Sensors) -> None:
    return None
