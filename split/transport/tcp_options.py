"""What is asked of a connection's TCP socket, and of asyncio's transports over it, as far as this kernel has it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, Final

USER_TIMEOUT_MS: Final = 10_000
"""Unacknowledged for so long, the connection is dead: shorter than the kernel's 15 minutes, longer than a handover."""

KEEPALIVE_S: Final = (15, 5, 3)
"""Idle seconds, interval, probes: an idle connection whose peer vanished is found within half a minute."""

CONGESTION_CONTROL: Final = "bbr"


def keep_few_bytes(transport: asyncio.Transport, sock: Any, waiting_bytes: int) -> None:
    """Bound what waits: in asyncio's TLS layer, in the TCP transport beneath, which has a bound of its own, and in the
    kernel, unsent.

    Without the second 64 KiB more wait.
    """
    for layer in layers(transport):
        layer.set_write_buffer_limits(high=waiting_bytes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, waiting_bytes)


def layers(transport: asyncio.Transport) -> tuple[asyncio.Transport, ...]:
    """The TLS transport, and the TCP transport beneath, to which there is no public way (tests hold it against each
    Python's asyncio)."""
    beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return (transport, beneath) if isinstance(beneath, asyncio.Transport) else (transport,)


def tune(sock: Any) -> str:
    """Set the socket's options as far as this kernel has them; the congestion control now in use."""
    idle_s, interval_s, probes = KEEPALIVE_S
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
    ):
        sock.setsockopt(level, option, value)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
    except OSError:
        pass  # not built into this kernel, or not allowed to users: its default stays
    name: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def restarts_after_idle(congestion_control: str, root: Path = Path("/")) -> bool:
    """Whether this kernel begins anew with a small window after silence (`tcp_slow_start_after_idle_check`, which
    leaves out what paces itself, as every bbr does); yes, Linux's default, where it does not tell."""
    if congestion_control.startswith("bbr"):
        return False
    try:
        return (root / "proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text().strip() != "0"
    except OSError:
        return True
