"""Where this device can say itself what it draws: a power monitor on its supply, the processor's counters, its battery.

Files below a root directory. What is not there, or may not be read, is None; nothing here raises. What a request used
is not read from here (a counter does not know requests): `device_watch.py` learns watts from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from split.profiles.radio import LinkKind
from split.runtime.kernel_files import exists, read_number, read_text

_MONITORS: Final = ("ina209", "ina219", "ina220", "ina226", "ina230", "ina231", "ina237", "ina238", "ina3221")
"""Names of Linux's ina2xx, ina238 and ina3221 drivers."""
_SUPPLY_RAILS: Final = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN")
"""Labels of the rail that feeds the whole module: Jetson Orin Nano and Xavier NX; Nano and TX2; others."""
_TUNNELS: Final = ("tun", "tap", "wg", "tailscale", "zt", "ipsec")
_OF_CONTAINERS: Final = ("docker", "br-", "veth", "virbr", "cni")


class EnergyGauge(Protocol):
    """One way to read energy."""

    source: str
    """What it measures, as a clause."""
    instant: bool
    """Whether `read` gives watts of this moment; otherwise joules since some moment."""

    def read(self) -> float | None:
        """None when it does not answer now."""


def find_gauge(root: Path = Path("/")) -> tuple[EnergyGauge | None, str]:
    """The best one that answers: the supply before the processor alone, that before a battery, which tells only while
    it is drawn from. With it, why a better one could not be used ("" mostly)."""
    if (rail := _supply_rail(root)) is not None:
        return rail, ""
    rapl, note = _rapl(root)
    if rapl is not None:
        return rapl, note
    battery = BatteryGauge(root)
    return (battery if battery.exists else None), note


class RaplGauge:
    """Intel's and AMD's running average power limit counters, through powercap."""

    instant = False

    def __init__(self, zones: list[Path], source: str) -> None:
        self.source = source
        self._zones = zones
        self._last_uj: dict[Path, float] = {}
        self._total_uj = 0.0

    def read(self) -> float | None:
        """Joules over all zones since the first look; each counter begins again at 0 after its range."""
        for zone in self._zones:
            now_uj = read_number(zone / "energy_uj")
            if now_uj is None:
                self._last_uj.clear()
                return None
            gone_uj = now_uj - self._last_uj.get(zone, now_uj)
            if gone_uj < 0.0:
                gone_uj += read_number(zone / "max_energy_range_uj") or 0.0
            self._total_uj += max(gone_uj, 0.0)
            self._last_uj[zone] = now_uj
        return self._total_uj / 1e6


class RailGauge:
    """A current and voltage monitor: hwmon gives µW, or mV and mA."""

    instant = True

    def __init__(self, chip: Path, channel: int, source: str) -> None:
        self.source = source
        self._power = chip / f"power{channel}_input"
        self._volt, self._ampere = chip / f"in{channel}_input", chip / f"curr{channel}_input"

    def read(self) -> float | None:
        """Watts now."""
        if (power_uw := read_number(self._power)) is not None:
            return power_uw / 1e6
        return _product(read_number(self._volt), read_number(self._ampere), 1e-6)


class BatteryGauge:
    """The battery's own gauge: what leaves it is what the device draws, while nothing charges it."""

    instant = True
    source = "the battery's gauge (whole device, while it discharges)"

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def exists(self) -> bool:
        return any(self._watts(supply) is not None for supply in batteries(self._root))

    def read(self) -> float | None:
        """Watts now, of all batteries together; None unless one discharges and none charges."""
        supplies = batteries(self._root)
        states = [read_text(supply / "status") for supply in supplies]
        if "Discharging" not in states or "Charging" in states:
            return None
        drawn = [self._watts(supply) for supply, state in zip(supplies, states, strict=True) if state == "Discharging"]
        known = [watts for watts in drawn if watts is not None]
        return sum(known) if len(known) == len(drawn) else None

    @staticmethod
    def _watts(supply: Path) -> float | None:
        power_uw = read_number(supply / "power_now")
        if power_uw is None:
            power_uw = _product(read_number(supply / "voltage_now"), read_number(supply / "current_now"), 1e-6)
        return None if power_uw is None else abs(power_uw) / 1e6  # some drivers count what leaves as negative


def batteries(root: Path) -> list[Path]:
    """Those that power the device: not those of mice and keyboards."""
    return [
        supply
        for supply in sorted((root / "sys/class/power_supply").glob("*"))
        if read_text(supply / "type") == "Battery"
        and read_text(supply / "scope") != "Device"
        and read_text(supply / "present") != "0"
    ]


def link_kind(interface: str, root: Path = Path("/")) -> LinkKind | None:
    """What kind of link bytes leave by that leave by this network interface: its own, by its driver and else by its
    name; of a bridge or a VLAN that of what is below it, of a tunnel that of the default route. None for what never
    leaves this host (loopback, a bridge of containers) or is unknown (an empty name, the inside of a container)."""
    if not interface or interface == "lo":
        return None
    folder = root / "sys/class/net" / interface
    told = read_text(folder / "uevent")
    if "DEVTYPE=wlan" in told or exists(folder / "wireless") or interface.startswith("wl"):
        return LinkKind.WIFI
    if "DEVTYPE=wwan" in told or interface.startswith(("ww", "rmnet", "ppp")):
        return LinkKind.LTE
    if interface.startswith(_TUNNELS):
        way_out = _default_route(root)
        return None if way_out.startswith(_TUNNELS) else link_kind(way_out, root)
    below = [path.name.removeprefix("lower_") for path in sorted(folder.glob("lower_*"))]
    if below or interface.startswith(_OF_CONTAINERS):  # below is no loop: the kernel forbids one
        return next((kind for one in below if (kind := link_kind(one, root)) is not None), None)
    return LinkKind.ETHERNET if exists(folder / "device") or not exists(folder) else None


def _default_route(root: Path) -> str:
    """The interface of the main table's default route; "" where there is none."""
    routes = [line.split() for line in read_text(root / "proc/net/route").splitlines()[1:]]
    # Interface, destination, gateway, flags, two counters, metric, mask; addresses in hex.
    ways_out = [(int(route[6]), route[0]) for route in routes if len(route) > 7 and route[1] == route[7] == "00000000"]
    return min(ways_out, default=(0, ""))[1]


def _supply_rail(root: Path) -> RailGauge | None:
    """The monitor channel that feeds the board: by its label, or that of the only chip, if nobody has labelled it."""
    chips = [
        (chip, name)
        for chip in sorted((root / "sys/class/hwmon").glob("hwmon*"))
        if (name := read_text(chip / "name")).startswith(_MONITORS)
    ]
    for chip, name in chips:
        for label in sorted(chip.glob("in*_label")):
            channel = label.name.removeprefix("in").removesuffix("_label")
            if read_text(label) in _SUPPLY_RAILS and channel.isdigit():
                return _answering(RailGauge(chip, int(channel), f"{name}, rail {read_text(label)} (whole board)"))
    single = [(chip, name) for chip, name in chips if name != "ina3221"]
    # Several would be rails of which nobody says what they feed; whoever labels one as anything else says a part.
    if len(single) == 1 and not any(single[0][0].glob("in*_label")) and not exists(single[0][0] / "label"):
        chip, name = single[0]
        # In the ina2xx drivers in0 is the shunt's voltage, in1 the bus's.
        return _answering(RailGauge(chip, 1, f"{name} (the only power monitor, taken for the board's supply)"))
    return None


def _answering(gauge: RailGauge) -> RailGauge | None:
    return gauge if gauge.read() is not None else None


def _rapl(root: Path) -> tuple[RaplGauge | None, str]:
    """Whole platform where the processor counts it, else packages and the memory beside them."""
    top = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
    names = {zone: read_text(zone / "name") for zone in top}
    platform = [zone for zone, name in names.items() if name == "psys"]
    zones = platform or [zone for zone, name in names.items() if name.startswith("package") or name == "dram"]
    if not zones:
        return None, ""
    what = "psys (whole platform)" if platform else "processor package, without the rest of the board"
    if any(read_number(zone / "energy_uj") is None for zone in zones):
        return None, (
            "the processor's energy counters (RAPL) may not be read: since CVE-2020-8694 only root may; give the "
            "service's user read access to energy_uj, or read what is modelled"
        )
    return RaplGauge(zones, f"RAPL, {what}"), ""


def _product(left: float | None, right: float | None, scale: float) -> float | None:
    return None if left is None or right is None else left * right * scale
