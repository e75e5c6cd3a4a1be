"""HTTP connections with the limits that aiohttp does not set: their number, and the time for a whole header.

No paths and no protocol of ours: what a request means is `http_api.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web

from agent.log_lines import printable

log = logging.getLogger(__name__)

KEEPALIVE_S: Final = 75.0
"""An idle connection is closed after this; a little more than the 60 s after which common clients drop theirs."""
LOGGED_MAX: Final = 200
"""Characters of a caller's that go into one line of the log."""
READ_BUFFER_BYTES: Final = 512 << 10
"""Per connection: large enough that a tensor of 600 KB arrives without pausing the socket again and again."""


def json_answer(value: object, status: int = 200) -> web.Response:
    """An answer with this value as its JSON body."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


class LimitedServer(web.Server):
    """aiohttp's server without an application; a request whose caller has left is cancelled."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        max_connections: int,
        header_timeout_s: float,
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._connections_left = max_connections
        self.header_timeout_s = header_timeout_s

    def take_connection(self) -> bool:
        """Whether one more may stay open; each one taken is given back."""
        self._connections_left -= 1
        return self._connections_left >= 0

    def give_connection(self) -> None:
        self._connections_left += 1

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        protocol.header_came()
        return super()._make_request(message, payload, protocol, writer, task)


class _Connection(web.RequestHandler):
    def __init__(self, server: LimitedServer) -> None:
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # bounded in http_body
            "keepalive_timeout": KEEPALIVE_S,
            "read_bufsize": READ_BUFFER_BYTES,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._server = server
        self._header_timer: asyncio.TimerHandle | None = None
        self._in_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.take_connection():
            assert isinstance(transport, asyncio.Transport)
            transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.give_connection()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and not self._in_request:
            self._header_timer = asyncio.get_running_loop().call_later(self._server.header_timeout_s, self.force_close)
        super().data_received(data)

    def header_came(self) -> None:
        """A request's header is whole; from here to the end of its answer, what comes is its body."""
        self._in_request = True
        self._stop_timer()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._in_request = False
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What never became a request (aiohttp refused its bytes): a sentence instead of aiohttp's page."""
        log.info("bytes that are no HTTP request: %s", printable(str(exc)[:LOGGED_MAX]))
        response = json_answer({"error": f"the bytes are no HTTP/1.1 request ({HTTPStatus(status).phrase})"}, status)
        response.force_close()
        return response

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
