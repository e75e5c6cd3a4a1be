"""When the device's network has changed, as the kernel tells (rtnetlink(7)): a cable, another Wi-Fi, a new address or
route. What follows from it is the uplink's.

Where there is no such socket (another system, a sandbox that forbids it) nothing is ever told, and silence is noticed
by its heartbeat instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

RTMGRP_LINK: Final = 0x1
RTMGRP_IPV4_IFADDR: Final = 0x10
RTMGRP_IPV4_ROUTE: Final = 0x40
RTMGRP_IPV6_IFADDR: Final = 0x100
RTMGRP_IPV6_ROUTE: Final = 0x400
GROUPS: Final = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE
"""linux/rtnetlink.h."""
SETTLE_S: Final = 0.05
"""From the first message to the telling: a change comes as several (link up, address, route)."""
APART_S: Final = 1.0
"""Between two tellings: an interface that flaps must not keep the dialler busy."""
READ_BYTES: Final = 1 << 16


class Interfaces:
    """Calls `on_change` on the running loop, from `start` to `close`. `make_socket` is asked once; OSError or
    AttributeError from it: there is nothing to listen to."""

    def __init__(
        self, on_change: Callable[[], None], *, make_socket: Callable[[], socket.socket] | None = None
    ) -> None:
        self._on_change = on_change
        self._make_socket = make_socket or _netlink
        self._socket: socket.socket | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._told_at_s = float("-inf")

    def start(self) -> None:
        try:
            self._socket = self._make_socket()
        except (OSError, AttributeError) as error:
            log.info("changes of the network are not told here (%s)", error)
            return
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._heard)

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _heard(self) -> None:
        """What changed does not matter, nor what got lost (ENOBUFS: more than the kernel would keep)."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while self._socket.recv(READ_BYTES):
                pass
        if self._telling is None:
            loop = asyncio.get_running_loop()
            at_s = max(loop.time() + SETTLE_S, self._told_at_s + APART_S)
            self._telling = loop.call_at(at_s, self._tell)

    def _tell(self) -> None:
        self._telling, self._told_at_s = None, asyncio.get_running_loop().time()
        self._on_change()


def _netlink() -> socket.socket:
    found = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        found.bind((0, GROUPS))
    except OSError:
        found.close()
        raise
    return found


def source_towards(host: str) -> str | None:
    """The address from which this device would send to the IP address `host` now; None when there is no way.

    Asks the routing table: nothing is sent (connect(2) of a datagram socket).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((host, 9))
            source: str = asking.getsockname()[0]
            return source
    except OSError:
        return None
