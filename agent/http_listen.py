"""Where the HTTP API listens: a TCP port and a UNIX socket, opened with clear errors. No HTTP in here."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from split.errors import ConfigError
from split.profiles.address import HostPort

log = logging.getLogger(__name__)

SOCKET_MODE: Final = 0o660
"""Owner and group: who may ask the daemon is who is in its group."""

FOLDER_MODE: Final = 0o750
"""Of the socket's folder, which decides as well, where the daemon makes it."""

BACKLOG: Final = 128
"""Connections that may wait to be accepted."""

_WHY: Final = {
    errno.EADDRINUSE: "is in use by another program; stop that one or set listen.http to another port",
    errno.EACCES: "may not be opened by this user; ports below 1024 need a capability, set listen.http to a higher one",
    errno.EADDRNOTAVAIL: "is no address of this host; set listen.http to 127.0.0.1 or to one that is",
}


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` → (host, port); ConfigError for anything else."""
    try:
        place = HostPort(address)
    except ValueError as error:
        raise ConfigError(f"listen.http: {error}") from None
    return place.host, place.port


def open_tcp(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, one for each address of `host` that this machine has. ConfigError naming host:port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"{host}:{port} cannot be resolved ({error.strerror}); check listen.http") from error
    opened: list[socket.socket] = []
    failure: OSError | None = None
    # With port 0 every socket would get a port of its own: one address is enough then.
    for family, kind, protocol, _, address in found[:1] if port == 0 else found:
        try:
            opened.append(_listen(socket.socket(family, kind, protocol), address))
        except OSError as error:
            failure = error
            if error.errno != errno.EADDRNOTAVAIL:  # `localhost` names ::1 on hosts without IPv6 too
                break
    else:
        if opened:
            return opened
    for bound in opened:
        bound.close()
    assert failure is not None, found
    why = _WHY.get(failure.errno or 0, f"cannot be opened ({failure.strerror}); check listen.http")
    raise ConfigError(f"{host}:{port} {why}") from failure


def warn_if_open(opened: Sequence[socket.socket]) -> None:
    """Say in the log when others than this host's programs can ask: nobody is authenticated here."""
    places = [bound.getsockname()[:2] for bound in opened]
    if any(not ipaddress.ip_address(host.partition("%")[0]).is_loopback for host, _ in places):
        shown = ", ".join(f"{host} port {port}" for host, port in places)
        log.warning("listen.http: %s is open to others, who are not authenticated; 127.0.0.1 is for this host", shown)


def _listen(bound: socket.socket, address: Any) -> socket.socket:
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixListener:
    """A listening UNIX socket and its file."""

    path: Path
    inode: int
    socket: socket.socket

    def remove(self) -> None:
        """Delete the file, unless a daemon that came later has put its own there."""
        if self.path.is_socket() and self.path.stat().st_ino == self.inode:
            self.path.unlink()


def open_unix(path: Path) -> UnixListener:
    """A listening UNIX socket with mode 0660; its folder is made, for this user and group, where it is not there. The
    file of a dead daemon is removed, a live one's is ConfigError."""
    if path.is_socket():
        if _answers(path):
            raise ConfigError(f"{path} belongs to a daemon that is running; stop it or set listen.unix to another file")
        path.unlink(missing_ok=True)
    elif path.exists():
        raise ConfigError(f"{path} is there and is no socket; remove it or set listen.unix to another file")
    _make_folder(path.parent)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~SOCKET_MODE)  # no moment in which others could connect
    try:
        bound.bind(str(path))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{path} cannot be opened as a socket ({error.strerror or error}); set listen.unix to another file"
        ) from error
    finally:
        os.umask(before)
    return UnixListener(path=path, inode=path.stat().st_ino, socket=bound)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}, the folder of listen.unix, is not there and cannot be made ({error.strerror or error}); make "
            "it for the user that the daemon runs as, or set listen.unix to another file"
        ) from error


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog, no permission: somebody may be there
            return True
        return True
