"""Health and metrics over plain HTTP for the machines around: `/v2/health/live`, `/v2/health/ready`, `/metrics`.

Not for devices: nothing here is authenticated, so it listens on loopback unless the configuration says otherwise, and
says so in the log. Not a web server either: one GET a connection, a bounded number of connections, and each has a few
seconds for all it does (aiohttp bounds neither).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable
from http import HTTPStatus

from cloud.metrics import Metrics
from split.errors import ConfigError
from split.profiles.address import HostPort

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""A probe and a scraper hold one each for milliseconds; more are closed unread."""
ANSWER_S = 5.0
"""For one connection, from its first byte to its last: probes give up after as long."""
HEADER_BYTES = 8192

_EMPTY = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class HealthServer:
    """`start` once, `stop` once; `live` and `ready` are asked at each request."""

    def __init__(self, *, metrics: Metrics, live: Callable[[], bool], ready: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._live = live
        self._ready = ready
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.port = 0
        """Where it listens, once started."""

    async def start(self, address: HostPort) -> None:
        """ConfigError when the address cannot be listened on."""
        try:
            self._server = await asyncio.start_server(self._connected, address.host, address.port, limit=HEADER_BYTES)
        except OSError as error:
            raise ConfigError(
                f"http: {address} cannot be listened on ({error.strerror or error}); stop what listens there, or "
                "choose another HOST:PORT"
            ) from error
        bound = [sock.getsockname() for sock in self._server.sockets]
        self.port = bound[0][1]
        if not all(ipaddress.ip_address(name[0]).is_loopback for name in bound):
            log.warning("http: %s is open to others, who are not authenticated: metrics tell what runs here", address)

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if len(self._serving) <= MAX_CONNECTIONS:
                async with asyncio.timeout(ANSWER_S):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # nobody who is owed an answer
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    def _answer(self, header: bytes) -> bytes:
        """The whole answer to a request's header (RFC 9112); the connection ends with it."""
        method, _, rest = header.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        match path:
            case b"/v2/health/live":
                found = _yes_or_no(self._live())
            case b"/v2/health/ready":
                found = _yes_or_no(self._ready())
            case b"/metrics":
                found = HTTPStatus.OK, _METRICS, self._metrics.exposition()
            case _:
                found = HTTPStatus.NOT_FOUND, _EMPTY, b"here are /v2/health/live, /v2/health/ready and /metrics\n"
        if method not in (b"GET", b"HEAD"):
            found = HTTPStatus.METHOD_NOT_ALLOWED, _EMPTY, b""
        status, kind, body = found
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (body if method != b"HEAD" else b"")


def _yes_or_no(yes: bool) -> tuple[HTTPStatus, str, bytes]:
    return (HTTPStatus.OK if yes else HTTPStatus.SERVICE_UNAVAILABLE), _EMPTY, b""
