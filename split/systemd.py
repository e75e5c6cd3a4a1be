"""The service manager's notification protocol: one datagram per message to `$NOTIFY_SOCKET`, nothing where it is unset.

See sd_notify(3). Not a dependency: thirty lines do all that the two programs need. Podman listens to it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator


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


async def feed_watchdog(alive: Callable[[], bool]) -> None:
    """Tell the service manager that this process is `alive`, as often as it asked to hear it; ends at once where it did
    not ask. Run as a task of the event loop whose turning is part of being alive."""
    period_s = watchdog_period_s()
    while period_s is not None:
        if alive():
            notify("WATCHDOG=1")
        await asyncio.sleep(period_s)


@contextlib.contextmanager
def asked_to_stop(stop: asyncio.Event) -> Iterator[None]:
    """Meanwhile SIGTERM, SIGINT and SIGHUP set `stop`, so that a closed terminal loses no request either.

    SIGHUP stays ignored where it is (nohup). Called on the main thread, with its event loop running.
    """
    loop = asyncio.get_running_loop()
    names = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        names.append(signal.SIGHUP)
    for name in names:
        loop.add_signal_handler(name, stop.set)
    try:
        yield
    finally:
        for name in names:
            loop.remove_signal_handler(name)
