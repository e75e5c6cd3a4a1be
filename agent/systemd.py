"""The service manager's notification protocol: one datagram per message to `$NOTIFY_SOCKET`, nothing where it is unset.

See sd_notify(3). Not a dependency: twenty lines do all that the daemon needs.
"""

from __future__ import annotations

import os
import socket


def notify(message: str) -> None:
    """Send `READY=1`, `WATCHDOG=1`, `STATUS=…` or `STOPPING=1`; a service manager that is gone is no reason to fail."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # abstract socket
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        try:
            out.sendto(message.encode(), address)
        except OSError:
            return


def watchdog_period_s() -> float | None:
    """Half of `$WATCHDOG_USEC`, as sd_watchdog_enabled(3) advises; None where no watchdog is set for this process."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6
