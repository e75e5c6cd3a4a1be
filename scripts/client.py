"""A caller of the device daemon for demo and benches: one kept connection, binary tensors, and how long it took."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from split.oip.client import build_request, parse_response
from split.oip.infer import Scalar
from split.tensor import Tensors


class Refused(Exception):
    """The daemon answered with an error; its sentence is the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and what it says about itself."""

    outputs: Tensors
    placement: str
    cut: str | None
    codec: str | None
    fallback: str
    """Why the device finished what the companion should have; empty when it did not."""
    predicted_ms: float
    request_id: str
    """For `isthmus explain`."""
    timings_ms: Mapping[str, float]
    """By the daemon's clock: each stage, and `total` from the request's arrival to its answer."""
    took_ms: float
    """From the first byte of the request to the last of the answer, as the caller sees it."""

    @property
    def plan(self) -> str:
        return " ".join(part for part in (self.placement, self.cut, self.codec) if part)


class Client:
    """Not thread-safe: one per thread."""

    def __init__(self, where: int | Path, *, timeout_s: float = 60.0) -> None:
        """`where`: a port of this machine, or a UNIX socket, which is reached from any network namespace."""
        self._connection = (
            _OverUnix(where, timeout_s)
            if isinstance(where, Path)
            else http.client.HTTPConnection("127.0.0.1", where, timeout=timeout_s)
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def infer(self, model: str, inputs: Tensors, **wishes: Scalar) -> Answer:
        """One request; `wishes` are `mode`, `cut`, `codec`, `deadline_ms`, `privacy`. Refused, or OSError."""
        parameters: Mapping[str, Scalar] = {f"isthmus.{key}": value for key, value in wishes.items()}
        header_length, buffers = build_request(inputs, parameters)
        body = b"".join(buffers)
        headers = {"Inference-Header-Content-Length": str(header_length), "Content-Type": "application/octet-stream"}
        started_s = time.perf_counter()
        status, answer_headers, data = self._exchange("POST", f"/v2/models/{model}/infer", body, headers)
        took_ms = (time.perf_counter() - started_s) * 1e3
        if status != 200:
            raise Refused(_error_text(data, status))
        length = answer_headers.get("Inference-Header-Content-Length")
        response = parse_response(data, int(length) if length else None)
        said = response.parameters
        return Answer(
            outputs=response.outputs,
            placement=str(said["isthmus.placement"]),
            cut=str(said.get("isthmus.cut") or "") or None,
            codec=str(said.get("isthmus.codec") or "") or None,
            fallback=str(said.get("isthmus.fallback") or ""),
            predicted_ms=float(said["isthmus.predicted_ms"]),
            request_id=str(said["isthmus.request_id"]),
            timings_ms=json.loads(str(said["isthmus.timings"])),
            took_ms=took_ms,
        )

    def load(self, model: str) -> None:
        """Have a model of the repository loaded (again); Refused, or OSError."""
        status, _, data = self._exchange("POST", f"/v2/repository/models/{model}/load", b"", {})
        if status != 200:
            raise Refused(_error_text(data, status))

    def get(self, path: str) -> Any:
        """The JSON at `path`; Refused, or OSError."""
        status, _, data = self._exchange("GET", path, b"", {})
        if status != 200:
            raise Refused(_error_text(data, status))
        return json.loads(data)

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        try:
            self._connection.request(method, path, body, dict(headers))
            response = self._connection.getresponse()
            return response.status, response.headers, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()  # the next exchange dials again
            raise


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))


def _error_text(data: bytes, status: int) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(data)["error"])
    return f"HTTP status {status}"
