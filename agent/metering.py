"""Bytes that crossed the links to companions, counted by month and network interface, held against the device's cap,
and kept over restarts. It counts and says what is left; what may not be sent for that is decided by whoever asks.

What is written down includes what the next seconds may bring (`ahead`): after a crash a little too much is counted,
never too little while the traffic stays what it was. Months are those of the wall clock at UTC. A clock that stands
before this program was written is not set yet: what is counted then belongs to the month that was counted in last.
"""

from __future__ import annotations

import asyncio
import calendar
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import psutil

from agent.interfaces import source_towards
from split.errors import NotReached
from split.files import write_whole
from split.plan.observation import Metered

log = logging.getLogger(__name__)

WIRE_RATIO: Final = 1.06
"""Bytes on the link for each byte that is to be sent: TLS 22 in 16,384, TCP and IP 52 in 1,448, and an acknowledgement
of 52 for every second segment. What has crossed is counted as the kernel saw it."""
DIAL_BYTES: Final = 8_000
"""What a connection costs that is given up: certificates both ways, the Hellos, the packets that open and close it."""
EVERY_S: Final = 10.0
"""Between two looks at whether something is to be written down."""
AHEAD_BYTES: Final = 1 << 20
"""What is written down in advance, at least: so an idle link costs a write each few hours."""
PROBES_RATIO: Final = 0.1
"""Of the cap at most this share goes to probes, spread over the month: 10 MB of 100 and not the 1.4 GB that the default
of `link.probe_bytes_per_hour` comes to."""
NEAR_RATIO: Final = 0.05
"""With less than this share of the cap left, nothing is spent on probes any more."""
CLOCK_FLOOR_S: Final = 1_767_225_600.0
"""2026-01-01 at UTC: a clock before it was never set."""
MONTH_HOURS: Final = 31 * 24
MONTHS_KEPT: Final = 13
UNDATED: Final = "undated"
"""The month of what was counted before the clock was ever set; joined to the first real one."""
_FROM_0: Final = "metered bytes are counted from 0 on, so this month's count is too low"
UNCERTAIN: Final = "uncertain"
"""Interface of what was written down in advance before a crash, or whose interface is not known: it is metered."""


class Counted(Protocol):
    """What the meter reads off a connection; every `Channel` has it."""

    @property
    def sent_bytes(self) -> int: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def queued_bytes(self) -> int: ...
    @property
    def closed_because(self) -> str | None: ...


class _Books(msgspec.Struct, kw_only=True):
    """What is kept: `metering.json`."""

    counting: str = UNDATED
    """The month counted in last."""
    months: dict[str, dict[str, int]] = {}
    """Month (`2026-11`) → interface → bytes."""
    ahead: int = 0
    """Of these how many had not crossed yet when they were written; 0 after an orderly end."""
    incomplete: str = ""
    """The month that was begun anew since what was kept was damaged; empty: none."""


@dataclass(slots=True)
class _Followed:
    channel: Counted
    interface: str
    counted: int = 0


class Meter:
    """One per daemon. `interfaces`: the metered ones, empty for all; `cap_bytes` holds for them together.

    Used on the event loop only; `run` writes in a thread. A file that cannot be written (disk full, read-only) costs
    nothing but the memory of a restart: it is said once and tried again.
    """

    def __init__(
        self,
        path: Path,
        *,
        cap_bytes: int | None,
        interfaces: Collection[str] = (),
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self.cap_bytes = cap_bytes
        self._interfaces = frozenset(interfaces)
        self._wall_s = wall_s
        self._followed: list[_Followed] = []
        books, damage = _read(path)
        self._counting = books.counting
        self._incomplete = books.incomplete
        self._months = {month: Counter(counts) for month, counts in books.months.items()}
        if books.ahead:  # it was cut off: what was written in advance may have crossed
            self._months.setdefault(books.counting, Counter())[UNCERTAIN] += books.ahead
        self._from_s, self._until_s = math.inf, -math.inf
        """Wall seconds between which the month stays what it is."""
        if damage:
            self._incomplete = self._month()
            log.warning("%s; %s", damage, _FROM_0)
        self._written_bytes = self._total()
        self._ahead_bytes = 0
        self.write_error = ""
        """Why the count could not be written down the last time; "" when it could."""

    # -- counting -----------------------------------------------------------------------------------------------------

    def follow(self, channel: Counted, interface: str) -> None:
        """Count this connection, which begins on `interface` ("": not known), until it is closed."""
        self._followed.append(_Followed(channel, interface or UNCERTAIN))

    def failed(self, error: Exception) -> None:
        """No connection came of a dial: where the other side answered at all, also by hanging up, that cost a
        handshake."""
        if not isinstance(error, NotReached):
            self._months_now()[UNCERTAIN] += DIAL_BYTES

    def settle(self) -> None:
        """Add what has crossed since the last time."""
        now = self._months_now()
        for one in self._followed:
            crossed = one.channel.sent_bytes + one.channel.received_bytes
            now[one.interface] += crossed - one.counted
            one.counted = crossed
        self._followed = [one for one in self._followed if one.channel.closed_because is None]

    # -- the cap ------------------------------------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """This month, over the metered interfaces; what waits to be sent is in."""
        self.settle()
        waiting = sum(one.channel.queued_bytes for one in self._followed if self.is_metered(one.interface))
        counts = self._months_now().items()
        return sum(count for name, count in counts if self.is_metered(name)) + round(waiting * WIRE_RATIO)

    def is_metered(self, interface: str) -> bool:
        """Whether what crosses this interface counts towards the cap; what is not known does."""
        return not self._interfaces or interface in self._interfaces or interface in ("", UNCERTAIN)

    def left(self) -> Metered | None:
        """What requests may still move on the connections there are; None where nothing is metered."""
        if self.cap_bytes is None or not self._crosses_metered():
            return None
        used_bytes = self.used_bytes()
        left_bytes = max(self.cap_bytes - used_bytes, 0)
        why = ""
        if left_bytes == 0:
            why = f"metered bytes used up: {_size(used_bytes, self.cap_bytes)} this month"
        return Metered(
            left_bytes=left_bytes / WIRE_RATIO,
            used_up=why,
            probe_bytes_per_hour=PROBES_RATIO * self.cap_bytes / MONTH_HOURS,
            may_probe=left_bytes >= NEAR_RATIO * self.cap_bytes,
        )

    def _crosses_metered(self) -> bool:
        """Whether any connection does, or may: without one it is not known which way the next will take."""
        return not self._followed or any(self.is_metered(one.interface) for one in self._followed)

    async def refuses(self, host: str, port: int) -> str:
        """Why no connection may be made to this place now; "" when it may."""
        if self.cap_bytes is None or (used_bytes := self.used_bytes()) < self.cap_bytes:
            return ""
        if self._interfaces and not self.is_metered(await asyncio.to_thread(interface_towards, host, port)):
            return ""
        return f"metered bytes used up: {_size(used_bytes, self.cap_bytes)} this month"

    def snapshot(self) -> dict[str, Any]:
        """For `isthmus status`."""
        used_bytes = self.used_bytes()
        return {
            "month": self._month(),
            "used_bytes": used_bytes,
            "cap_bytes": self.cap_bytes,
            "interfaces": dict(self._months_now()),
            "write_error": self.write_error,
            "count_error": self._count_error(),
        }

    def _count_error(self) -> str:
        """Why this month's count is too low; "" when it is not."""
        return f"{self._path.name} was damaged; {_FROM_0}" if self._incomplete == self._month() else ""

    # -- keeping it ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write the count down now and then, until cancelled; `close` does it for the last time."""
        while True:
            await asyncio.sleep(EVERY_S)
            if (books := self.due()) is not None:
                self._wrote(await asyncio.to_thread(_write, self._path, books))

    def close(self) -> None:
        """The daemon ends, all connections are closed: write down what it is, no more."""
        self.settle()
        self._ahead_bytes = 0
        self._wrote(_write(self._path, self._books()))

    def due(self) -> bytes | None:
        """What is to be written down now, if anything."""
        self.settle()
        grown = self._total() - self._written_bytes
        if grown <= self._ahead_bytes // 2 and not self.write_error:
            return None
        least = AHEAD_BYTES if self.cap_bytes is None else min(AHEAD_BYTES, self.cap_bytes // 100)
        self._written_bytes, self._ahead_bytes = self._total(), max(grown, least)
        return self._books()

    def _books(self) -> bytes:
        months: dict[str, dict[str, int]] = {month: dict(counts) for month, counts in self._months.items()}
        return msgspec.json.encode(
            _Books(counting=self._counting, months=months, ahead=self._ahead_bytes, incomplete=self._incomplete)
        )

    def _wrote(self, error: str) -> None:
        if error and not self.write_error:
            log.warning(
                "%s cannot be written (%s): the count of metered bytes would not survive a restart", self._path, error
            )
        if self.write_error and not error:
            log.info("%s can be written again", self._path)
        self.write_error = error

    def _total(self) -> int:
        """Over all months: it never shrinks while this process lives, but for a month that is forgotten."""
        return sum(sum(counts.values()) for counts in self._months.values())

    # -- months -------------------------------------------------------------------------------------------------------

    def _months_now(self) -> Counter[str]:
        return self._months.setdefault(self._month(), Counter())

    def _month(self) -> str:
        """The month that is counted in now."""
        now_s = self._wall_s()
        if self._from_s <= now_s < self._until_s or now_s < CLOCK_FLOOR_S:
            return self._counting
        date = time.gmtime(now_s)
        days = calendar.monthrange(date.tm_year, date.tm_mon)[1]
        self._from_s = float(calendar.timegm((date.tm_year, date.tm_mon, 1, 0, 0, 0)))
        self._until_s = self._from_s + days * 86_400.0
        self._counting = f"{date.tm_year:04}-{date.tm_mon:02}"
        counts = self._months.setdefault(self._counting, Counter())
        counts.update(self._months.pop(UNDATED, {}))
        if self._incomplete == UNDATED:
            self._incomplete = self._counting
        for month in sorted(self._months)[:-MONTHS_KEPT]:
            if month != self._counting:
                del self._months[month]
        return self._counting


def interface_of(address: str) -> str:
    """The network interface that has this address; "" when none does."""
    wanted = address.partition("%")[0]
    try:
        interfaces = psutil.net_if_addrs() or {}
    except Exception:  # psutil lets through what its C code meets on odd kernels; the name is worth no request
        return ""
    for name, addresses in interfaces.items():
        if any(one.address.partition("%")[0] == wanted for one in addresses):
            return name
    return ""


def interface_towards(host: str, port: int) -> str:
    """The network interface that packets to this place would leave by; "" when that cannot be said. Blocking, where
    `host` is a name; sends nothing to the place itself."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return ""
    return interface_of(source_towards(str(address)) or "")


def _size(used_bytes: int, cap_bytes: int) -> str:
    unit, name = next(((size, name) for size, name in ((1e9, "GB"), (1e6, "MB")) if cap_bytes >= size), (1e3, "kB"))
    return f"{used_bytes / unit:.1f} of {cap_bytes / unit:.1f} {name}"


def _read(path: Path) -> tuple[_Books, str]:
    """What was kept, and why it was not to be had, as a clause; "" when it was, or when nothing was ever kept. What
    cannot be read is put aside, so that the next write does not destroy it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Books), ""
    except FileNotFoundError:
        return _Books(), ""
    except (OSError, msgspec.MsgspecError) as error:
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
            kept = f"it is kept as {aside.name}"
        except OSError as other:
            kept = f"it cannot be kept aside ({other.strerror or other})"
        return _Books(), f"{path} cannot be read ({error}); {kept}"


def _write(path: Path, books: bytes) -> str:
    """In one step: after a power cut there is the old count or the new one. Why it failed; "" when it did not."""
    try:
        write_whole(path, books)
    except OSError as error:
        return error.strerror or str(error)
    return ""
