"""Which HTTP requests may be answered at all: the defence of a loopback port against web pages (DNS rebinding, CSRF).

Looked at before routing and before the body is read. A UNIX socket is out of a browser's reach and is not guarded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

from split.errors import InvalidRequest

BODY_TYPES: Final = frozenset(("application/json", "application/octet-stream"))
"""A page of another origin cannot send these without asking first (CORS preflight), and we never say yes."""


class HttpRefusal(InvalidRequest):
    """A refusal that only HTTP has a word for; `status` and `headers` go into the answer."""

    code = "HTTP_REFUSED"

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}


class Headers(Protocol):
    """The part of a header map that is needed here."""

    def getall(self, key: str, default: Sequence[str], /) -> Sequence[str]: ...


class Guard:
    def __init__(self, hosts: Iterable[str]) -> None:
        """`hosts`: names or addresses besides the loopback ones under which this service is known."""
        self._hosts = {_plain(host) for host in hosts} | {"localhost"}
        self._any_address = bool({"0.0.0.0", "::"} & self._hosts)
        self._known: set[str] = set()

    def check(self, method: str, headers: Headers) -> None:
        """HttpRefusal (400, 403) for a request that a foreign web page may have made."""
        hosts = headers.getall("Host", ())
        if len(hosts) != 1:
            raise HttpRefusal(400, f"a request must have one Host header, got {len(hosts)}")
        host = hosts[0]
        if host not in self._known:
            if not self._allowed(host):
                raise HttpRefusal(403, "this Host is not served; use localhost, 127.0.0.1 or the configured name")
            if len(self._known) < 64:
                self._known.add(host)
        for origin in headers.getall("Origin", ()):
            if urlsplit(origin).netloc.lower() != host.lower():
                raise HttpRefusal(403, "requests from web pages of another origin are not served")
        if method == "POST":
            for kind in headers.getall("Content-Type", ()):
                if kind.partition(";")[0].strip().lower() not in BODY_TYPES:
                    raise HttpRefusal(403, f"Content-Type must be {' or '.join(sorted(BODY_TYPES))}")

    def _allowed(self, host: str) -> bool:
        if not set(host).isdisjoint("@/?#"):  # urlsplit would look past them
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if _plain(name) in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A rebinding page comes by a name; where all addresses are listened on, any literal one may be ours.
        return address.is_loopback or self._any_address


def _plain(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()
