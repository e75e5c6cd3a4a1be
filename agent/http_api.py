"""The device's front door for local programs: Open Inference Protocol v2 over HTTP, on TCP loopback and a UNIX socket.

HTTP only: what a request means is `split.oip`, what becomes of it is the `Service` behind (`http_service.py`). No error
text holds a traceback; every answer to a failed request is `{"error": "…"}` with the status of its `IsthmusError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
from aiohttp import web

from agent.http_body import body_encoding, pack, read_body, unpack, wanted_encoding
from agent.http_connection import LimitedServer, json_answer
from agent.http_guard import Guard, HttpRefusal
from agent.http_listen import UnixListener, open_tcp, open_unix, parse_address, warn_if_open
from agent.http_service import Service
from agent.log_lines import printable
from agent.room import Holding, Room
from agent.version import VERSION
from split.errors import InvalidRequest, IsthmusError, TooLarge, UnknownModel, UnsupportedRequest
from split.ids import MODEL_NAME, MODEL_NAME_IN_WORDS
from split.oip.request import parse_infer
from split.oip.response import build_response
from split.oip.schema import request_schema, response_schema
from split.oip.tensors import Buffer

log = logging.getLogger(__name__)

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
EXTENSIONS: Final = (
    "binary_tensor_data",
    "model_repository",
    "model_configuration",
    "statistics",
    "parameters",
)

ADMIN_BODY_BYTES: Final = 64 << 10
"""Bodies of index, load and unload are a few words."""


class HttpApi:
    """The server. `await start(…)`, later `await stop()`; both on the same event loop."""

    def __init__(
        self,
        service: Service,
        *,
        max_body_bytes: int = 64 << 20,
        max_json_bytes: int = 16 << 20,
        room: Room | None = None,
        max_connections: int = 256,
        header_timeout_s: float = 10.0,
        body_timeout_s: float = 30.0,
        send_timeout_s: float = 30.0,
        drain_timeout_s: float = 10.0,
        hosts: Iterable[str] = (),
    ) -> None:
        """`max_body_bytes`: one body, packed or unpacked. `max_json_bytes`: the JSON in it, which is read on the event
        loop (16 MiB take about 0.1 s; larger tensors go as binary data). `room`: for all bodies at once
        (None: for one of the largest). `max_connections`: of each listener. `header_timeout_s`, `body_timeout_s`,
        `send_timeout_s`: from first to last byte. `drain_timeout_s`: what `stop` gives to requests in flight.
        `hosts`: further names of this service, besides loopback and the one listened on.
        """
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._max_json_bytes = max_json_bytes
        self._room = Room(max_body_bytes) if room is None else room
        self._max_connections = max_connections
        self._header_timeout_s = header_timeout_s
        self._body_timeout_s = body_timeout_s
        self._send_timeout_s = send_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._hosts = tuple(hosts)
        self._runners: list[web.ServerRunner] = []
        self._unpacking = asyncio.Semaphore(1)
        self._unix: UnixListener | None = None
        self._ports: tuple[int, ...] = ()
        self._places: tuple[str, ...] = ()

    @property
    def ports(self) -> tuple[int, ...]:
        """TCP ports listened on; empty before `start` and without `http`."""
        return self._ports

    @property
    def places(self) -> tuple[str, ...]:
        """Where it listens, as a caller writes it after `--url`; empty before `start`."""
        return self._places

    async def start(self, http: str | None, unix: Path | None) -> None:
        """Listen on `HOST:PORT` and/or a UNIX socket. ConfigError when one cannot be opened; nothing is open then."""
        try:
            if http is not None:
                host, port = parse_address(http)
                opened = open_tcp(host, port)
                self._ports = tuple(sorted({bound.getsockname()[1] for bound in opened}))
                self._places = tuple(f"http://{f'[{host}]' if ':' in host else host}:{port}" for port in self._ports)
                warn_if_open(opened)
                guard = Guard((host, *self._hosts))
                await self._serve(guard, opened)
            if unix is not None:
                self._unix = open_unix(unix)
                self._places += (f"unix://{quote(str(unix))}",)
                await self._serve(None, [self._unix.socket])
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Accept nothing more, let requests in flight end (within the drain time), close. May be called twice."""
        runners, self._runners = self._runners, []
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        self._ports = self._places = ()
        unix, self._unix = self._unix, None
        if unix is not None:
            unix.remove()

    async def _serve(self, guard: Guard | None, opened: list[Any]) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(request, guard)

        runner = web.ServerRunner(
            LimitedServer(handle, max_connections=self._max_connections, header_timeout_s=self._header_timeout_s),
            shutdown_timeout=self._drain_timeout_s,
        )
        self._runners.append(runner)
        await runner.setup()
        for bound in opened:
            await web.SockSite(runner, bound).start()

    # -- one request --------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest, guard: Guard | None) -> web.StreamResponse:
        received_at_s = time.monotonic()
        try:
            if guard is not None:
                guard.check(request.method, request.headers)
            return await self._route(request, received_at_s)
        except IsthmusError as error:
            response = json_answer({"error": str(error)}, error.status)
            if isinstance(error, HttpRefusal):
                response.headers.update(error.headers)
            if error.status == 408:  # the rest of that body may still drip in
                response.force_close()
            return response
        except Exception as error:
            gone = request.transport is None or request.transport.is_closing()
            if gone and isinstance(error, ConnectionError):
                raise
            log.exception("%s failed", printable(f"{request.method} {request.path}"))
            return json_answer({"error": "internal error; the daemon's log says more"}, 500)

    async def _route(self, request: web.BaseRequest, received_at_s: float) -> web.StreamResponse:
        service = self._service
        match request.path.split("/")[1:]:
            case ["v2", "models", name, *rest] if name != "stats" or rest:
                match rest:
                    case ["versions", version, *rest]:
                        pass
                    case _:
                        version = ""
                return await self._model(request, _name(name), version, rest, received_at_s)
            case ["v2"]:
                _only(request, "GET")
                return json_answer({"name": "isthmus", "version": VERSION, "extensions": EXTENSIONS})
            case ["v2", "health", "live"]:
                _only(request, "GET")
                live = service.live()
                return json_answer({"live": live}, 200 if live else 503)
            case ["v2", "health", "ready"]:
                _only(request, "GET")
                ready = service.ready()
                return json_answer({"live": service.live(), "ready": ready}, 200 if ready else 503)
            case ["v2", "models", "stats"]:
                _only(request, "GET")
                return json_answer({"model_stats": service.stats(None)})
            case ["v2", "repository", "index"]:
                return await self._index(request)
            case ["v2", "repository", "models", name, "load"]:
                await self._admin_body(request)
                await service.load(_name(name))
                return web.Response()
            case ["v2", "repository", "models", name, "unload"]:
                await self._admin_body(request)
                await service.unload(_name(name))
                return web.Response()
            case ["v2", "isthmus", "status"]:
                _only(request, "GET")
                return json_answer(service.status())
            case ["v2", "isthmus", "explain", request_id]:
                _only(request, "GET")
                explained = service.explain(request_id)
                if explained is None:
                    raise HttpRefusal(404, "no such request is remembered; the id is isthmus.request_id of an answer")
                return json_answer(explained)
            case ["v2", "isthmus", "record"]:
                _only(request, "GET")
                return web.Response(body=service.record(), headers={"Content-Type": "application/zstd"})
            case ["metrics"]:
                _only(request, "GET")
                return web.Response(
                    body=service.metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
                )
            case _:
                raise HttpRefusal(404, "no such path; GET /v2 and its models are served here")

    async def _model(
        self, request: web.BaseRequest, name: str, version: str, rest: list[str], received_at_s: float
    ) -> web.StreamResponse:
        service = self._service
        match rest:
            case ["infer"]:
                _only(request, "POST")
                return await self._infer(request, name, version, received_at_s)
            case [] if request.method == "OPTIONS":
                return self._describe(name, version)
            case []:
                _only(request, "GET", "OPTIONS")
                return json_answer(service.metadata(name, version).as_json())
            case ["ready"]:
                _only(request, "GET")
                return json_answer({"name": service.metadata(name, version).name, "ready": True})
            case ["config"]:
                _only(request, "GET")
                return json_answer(service.config(name, version))
            case ["stats"]:
                _only(request, "GET")
                service.metadata(name, version)  # a version that is not there has no statistics
                return json_answer({"model_stats": service.stats(name)})
            case _:
                raise HttpRefusal(404, "no such path of a model; served are infer, ready, config and stats")

    def _describe(self, name: str, version: str) -> web.Response:
        metadata = self._service.metadata(name, version)
        body = {
            **metadata.as_json(),
            "contract": self._service.contract(name),
            "runs_on": self._service.runs_on(name),
            "measured": self._service.measured(name),
            "schemas": {"request": request_schema(metadata), "response": response_schema(metadata)},
        }
        response = json_answer(body)
        response.headers["Allow"] = "GET, HEAD, OPTIONS"
        return response

    async def _infer(
        self, request: web.BaseRequest, name: str, version: str, received_at_s: float
    ) -> web.StreamResponse:
        header_length = _header_length(request)
        with Holding(self._room) as holding:
            body = await self._body(request, holding, self._max_body_bytes, header_length or 0)
            json_bytes = body.nbytes if header_length is None else header_length
            if json_bytes > self._max_json_bytes:
                raise TooLarge(
                    f"the request has {json_bytes} bytes of JSON, at most {self._max_json_bytes} are accepted; "
                    "send large tensors as binary data"
                )
            metadata = self._service.metadata(name, version) if header_length == 0 else None
            asked = parse_infer(body, header_length, metadata=metadata)
            holding.made(json_bytes)  # the rest are the inputs' own bytes: the request holds those from here
            response = await self._service.infer(name, version, asked, received_at_s)
            json_length, buffers = build_response(response, asked)
            return await self._answer(request, json_length, buffers)

    async def _body(
        self, request: web.BaseRequest, holding: Holding, limit_bytes: int, json_bytes: int = 0
    ) -> memoryview:
        """The body, whole and unpacked. One is unpacked at a time: each may grow to the limit."""
        encoding = body_encoding(request)
        body = await read_body(
            request,
            holding,
            limit_bytes=limit_bytes,
            timeout_s=self._body_timeout_s,
            json_bytes=0 if encoding else json_bytes,
        )
        if encoding is None:
            return body
        async with self._unpacking:
            body = await unpack(body, encoding, limit_bytes)
        holding.made(body.nbytes)
        return body

    async def _answer(
        self, request: web.BaseRequest, json_length: int | None, buffers: list[Buffer]
    ) -> web.StreamResponse:
        headers = {"Content-Type": "application/json" if json_length is None else "application/octet-stream"}
        if json_length is not None:
            headers[HEADER_LENGTH] = str(json_length)
        encoding = wanted_encoding(request)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
            buffers = [await pack(buffers, encoding)]
        response = web.StreamResponse(headers=headers)
        response.content_length = sum(map(len, buffers))
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await response.prepare(request)
                for buffer in buffers:
                    await response.write(buffer)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the caller does not take its answer") from None
        return response

    async def _index(self, request: web.BaseRequest) -> web.Response:
        only_ready = (await self._admin_body(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("ready must be true or false")
        return json_answer([row for row in self._service.index() if not only_ready or row["state"] == "READY"])

    async def _admin_body(self, request: web.BaseRequest) -> dict[str, Any]:
        """The JSON object of a repository request; an empty body is an empty object."""
        _only(request, "POST")
        with Holding(self._room) as holding:
            body = await self._body(request, holding, ADMIN_BODY_BYTES)
        if not body.nbytes:
            return {}
        try:
            found = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body must be a JSON object or empty: {error}") from None
        parameters = found.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidRequest("parameters must be an object")
        for key, value in parameters.items():
            if key == "unload_dependents" and isinstance(value, bool):
                continue
            if key == "config" or key.startswith("file:"):
                raise UnsupportedRequest("a model's files and configuration cannot be sent; put them into the folder")
            raise InvalidRequest("parameters may hold unload_dependents (true or false) and nothing else")
        return found


def _only(request: web.BaseRequest, *methods: str) -> None:
    if request.method in methods or (request.method == "HEAD" and "GET" in methods):
        return
    allowed = ", ".join(methods)
    raise HttpRefusal(405, f"this path takes {allowed}", {"Allow": allowed})


def _name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise UnknownModel(f"a model's name has {MODEL_NAME_IN_WORDS}")
    return name


def _header_length(request: web.BaseRequest) -> int | None:
    text = request.headers.get(HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidRequest(f"{HEADER_LENGTH} must be a whole number of bytes")
    return int(text)
