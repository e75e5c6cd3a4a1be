"""The tools' side of the local API: one blocking request at a time to the running daemon, over TCP or UNIX socket."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

import msgspec

from split.errors import InvalidRequest, IsthmusError, RemoteProtocolError
from split.oip.client import build_request, parse_response
from split.oip.infer import OipResponse, Scalar
from split.tensor import Array

DEFAULT_URL: Final = "http://127.0.0.1:8080"
HEADER_LENGTH: Final = "Inference-Header-Content-Length"

JSON_BYTES_MAX: Final = 8 << 20
"""Of an answer that is read as one JSON object; the statistics of a server with hundreds of models are below 1 MB."""
JSON_DEPTH_MAX: Final = 64
"""Objects and lists in each other; what the daemon says has below ten. Deeper ones break what walks them."""
CONTENT_BYTES_MAX: Final = 1 << 30
"""Of any other answer: outputs of a model, a record."""
TIMEOUT_S: Final = 60.0
"""Longest silence of the daemon, its own deadline answers far earlier; and all that an answer may take which is read as
one JSON object: what sends a byte now and then is never silent."""


class DaemonUnreachable(IsthmusError):
    """Nobody answers at the URL."""

    code = "DAEMON_UNREACHABLE"
    status = 503


class DaemonRefused(IsthmusError):
    """The daemon answered with an error; its sentence is kept, and its status."""

    code = "DAEMON_REFUSED"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DaemonClient:
    def __init__(self, url: str, *, option: str = "--url") -> None:
        """`url`: `http://HOST:PORT` or `unix:///PATH`; InvalidRequest, naming `option`, for anything else."""
        self._url = url
        self._option = option
        try:
            self._unix, self._host, self._port = _parse(url)
            self._connection()
        except (ValueError, http.client.InvalidURL):
            raise InvalidRequest(f"{option} must be http://HOST:PORT or unix:///PATH, got {url!r}") from None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        return self._json("GET", path)

    def about(self, model: str, what: str = "") -> dict[str, Any]:
        """What the protocol tells of a model: its metadata, or `config`, `stats`."""
        return self._json("GET", f"/v2/models/{_quoted(model)}{what and '/'}{what}")

    def fetch(self, path: str) -> bytes:
        """What lies at `path`, as it is."""
        return self._send("GET", path, None, {}, CONTENT_BYTES_MAX)[1]

    def describe(self, model: str) -> dict[str, Any]:
        """Metadata, contract and schemas of a model (its `OPTIONS`)."""
        return self._json("OPTIONS", f"/v2/models/{_quoted(model)}")

    def infer(self, model: str, inputs: Mapping[str, Array], parameters: Mapping[str, Scalar]) -> OipResponse:
        """One inference, binary both ways."""
        length, buffers = build_request(inputs, parameters)
        headers = {HEADER_LENGTH: str(length), "Content-Type": "application/octet-stream"}
        path = f"/v2/models/{_quoted(model)}/infer"
        answered, body = self._send("POST", path, b"".join(buffers), headers, CONTENT_BYTES_MAX)
        json_length = answered.get(HEADER_LENGTH)
        if json_length is not None and not (json_length.isascii() and json_length.isdigit()):
            raise self._stranger()
        return parse_response(body, None if json_length is None else int(json_length))

    def _json(self, method: str, path: str) -> dict[str, Any]:
        _, body = self._send(method, path, None, {}, JSON_BYTES_MAX)
        try:
            found = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._stranger() from None
        if not _shallow(found):
            raise self._stranger()
        return found

    def _stranger(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"what answers at {self._url} is no Isthmus daemon; check {self._option}")

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], bytes_max: int
    ) -> tuple[http.client.HTTPMessage, bytes]:
        connection = self._connection()
        try:
            connection.connect()
            with _hung_up_after(TIMEOUT_S if bytes_max == JSON_BYTES_MAX else math.inf, connection.sock):
                connection.request(method, path, body, dict(headers))
                answer = connection.getresponse()
                content = answer.read(bytes_max + 1)
                if len(content) <= bytes_max and answer.length:  # `read` of so many bytes does not say that some lack
                    raise http.client.IncompleteRead(content, answer.length)
        except (OSError, http.client.HTTPException) as error:
            raise DaemonUnreachable(
                f"no daemon answers at {self._url} ({error}); "
                f"start `isthmus agent --config FILE` or check {self._option}"
            ) from None
        finally:
            connection.close()
        if len(content) > bytes_max:
            raise RemoteProtocolError(
                f"what answers at {self._url} sends more than {bytes_max} bytes for {path}; check {self._option}"
            )
        if answer.status != 200:
            raise DaemonRefused(answer.status, _sentence(content) or f"the daemon answered {answer.status}")
        return answer.headers, content

    def _connection(self) -> http.client.HTTPConnection:
        if self._unix is not None:
            return _UnixConnection(self._unix)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)


@contextlib.contextmanager
def _hung_up_after(seconds: float, connected: socket.socket) -> Iterator[None]:
    """What reads from `connected` meanwhile meets the end then, as where the other side has hung up; TimeoutError."""
    late = threading.Event()

    def hang_up() -> None:
        late.set()
        with contextlib.suppress(OSError):  # over by itself
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError(f"no whole answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def _parse(url: str) -> tuple[str | None, str, int]:
    """(socket file or None, host, port); ValueError for what is no address of a daemon."""
    parts = urlsplit(url)
    if not url.isprintable() or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError
    match parts.scheme:
        case "unix" if not parts.netloc and parts.path and "%00" not in parts.path:
            return os.fsdecode(unquote_to_bytes(parts.path)), "localhost", 80
        case "http" if parts.hostname and parts.path in ("", "/") and parts.port != 0:
            parts.hostname.encode("idna")  # as the resolver will, which gives no such clear answer
            return None, parts.hostname, parts.port or 80
        case _:
            raise ValueError


def _quoted(name: str) -> str:
    return quote(os.fsencode(name), safe="")


def _sentence(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=dict[str, str]).get("error", "")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _shallow(value: object) -> bool:
    level = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [part for one in level if isinstance(one, dict | list) for part in _parts(one)]
        if not level:
            return True
    return False


def _parts(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value
