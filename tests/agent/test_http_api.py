"""The HTTP API on real sockets, before a service that answers by itself: stock clients, hostile bytes, limits."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import socket
import stat
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

from agent.commands import explain, infer, status
from agent.http_api import HttpApi
from agent.http_client import DaemonClient, DaemonRefused, DaemonUnreachable
from agent.room import Holding, Room
from split.errors import ConfigError, DeadlineExceeded, InvalidRequest, ModelUnavailable, Overloaded, UnknownModel
from split.oip.client import build_request
from split.oip.infer import ModelMetadata, OipRequest, OipResponse
from split.tensor import TensorSpec

MODEL = ModelMetadata(
    name="net",
    versions=("1",),
    platform="onnx_onnxv1",
    inputs=(TensorSpec(name="x", dtype="FP32", shape=(-1, 3)),),
    outputs=(TensorSpec(name="y", dtype="FP32", shape=(-1, 3)),),
)


class Echo:
    """A service with one model whose output `y` is its input `x`."""

    def __init__(self) -> None:
        self.is_ready = True
        self.failure: Exception | None = None
        self.requests: list[OipRequest] = []
        self.entered = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.cancelled = asyncio.Event()
        self.loaded: list[str] = []

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def index(self) -> list[dict[str, str]]:
        return [
            {"name": "net", "version": "1", "state": "READY", "reason": ""},
            {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "damaged"},
        ]

    def metadata(self, name: str, version: str) -> ModelMetadata:
        if name == "bad":
            raise ModelUnavailable("model bad is damaged")
        if name != "net" or version not in ("", "1"):
            raise UnknownModel(f"there is no model {name!r} of version {version or 'any'}")
        return MODEL

    def contract(self, name: str) -> dict[str, Any]:
        picture = {"name": "x", "encoded": {"kind": "image"}}
        return {"data": {"inputs": [picture], "privacy": "any"}, "labels": {"y": ["cat", "dog", "owl"]}}

    def runs_on(self, name: str) -> list[str]:
        return ["cuda", "cpu"]

    def measured(self, name: str) -> dict[str, float | None]:
        return {"requests": 7, "p50_ms": 3.0, "p99_ms": 4.5, "per_s": 400.0}

    def config(self, name: str, version: str) -> dict[str, Any]:
        return {"name": self.metadata(name, version).name, "max_batch_size": 0}

    def stats(self, name: str | None) -> list[dict[str, Any]]:
        return [{"name": "net", "version": "1", "inference_count": len(self.requests)}]

    async def infer(self, model: str, version: str, request: OipRequest, received_at_s: float) -> OipResponse:
        self.metadata(model, version)
        self.requests.append(request)
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.failure is not None:
            raise self.failure
        array = request.inputs["x"]
        scores = np.array([[0.1, 0.7, 0.2]], np.float32) if array.dtype == object else array
        said: dict[str, Any] = {
            "isthmus.request_id": "00c0ffee",
            "isthmus.placement": "local",
            "isthmus.predicted_ms": 2.5,
            "isthmus.timings": '{"head": 1.25}',
        }
        return OipResponse(model_name=model, model_version="1", id=request.id, parameters=said, outputs={"y": scores})

    async def load(self, name: str) -> None:
        self.loaded.append(name)

    async def unload(self, name: str) -> None:
        self.loaded.remove(name)

    def status(self) -> dict[str, Any]:
        models = [{"name": "net", "version": "1", "state": "READY", "placements": {"local": 7}, "p50_ms": 3.21}]
        companion = {"address": "cloud.example:7443", "state": "connected", "link": {"rtt_ms": 40.0}}
        return {"version": "0", "models": models, "companion": companion, "emulation": {"slowdown": 6.0}}

    def explain(self, request_id: str) -> dict[str, Any] | None:
        if request_id != "00c0ffee":
            return None
        chosen = {"placement": "split", "cut": "0123456789ab", "codec": "fp16", "predicted_ms": 41.0, "parts": 3}
        chosen["stages_ms"] = {"head": 12.0, "tail": 29.0, "queue": 0.0}
        rival = {"placement": "local", "predicted_ms": 99.5, "energy_j": 1.25, "money": 0.0}
        return {"request_id": request_id, "model": "net", "chosen": chosen, "runners_up": [rival],
                "reason": "it is the fastest", "measured_ms": {"head": 13.5}, "why_not_split": "it is far",
                "objective": {"latency": 0.25, "throughput": 0.0, "energy": 0.75, "cost": 0.0}}  # fmt: skip

    def record(self) -> bytes:
        return b"record"

    def metrics(self) -> bytes:
        return b"# TYPE isthmus_requests counter\n"


@pytest.fixture
def service() -> Echo:
    return Echo()


@contextlib.asynccontextmanager
async def serving(service: Echo, unix: Path | None = None, **limits: Any) -> AsyncIterator[HttpApi]:
    api = HttpApi(service, **limits)
    await api.start("127.0.0.1:0", unix)
    try:
        yield api
    finally:
        await api.stop()


@pytest.fixture
async def api(service: Echo, tmp_path: Path) -> AsyncIterator[HttpApi]:
    async with serving(service, tmp_path / "api.sock", max_body_bytes=1 << 20) as started:
        yield started


@pytest.fixture
def url(api: HttpApi) -> str:
    return f"http://127.0.0.1:{api.ports[0]}"


def body_of(values: list[Any], *, shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": shape or [1, 3], "datatype": "FP32", "data": values}], **more}


async def raw(api: HttpApi, request: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to exactly these bytes, the connection closed by us or them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.ports[0])
    try:
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")
        )
        return int(head.split(b" ")[1]), await reader.readexactly(length)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


# -- stock clients -----------------------------------------------------------------------------------------------------


def triton_inputs(array: np.ndarray[Any, Any], *, binary: bool = True) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return [tensor]


@pytest.mark.parametrize("packed_up", [None, "gzip", "deflate"])
@pytest.mark.parametrize("packed_down", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
async def test_stock_tritonclient_infers(
    api: HttpApi, service: Echo, binary: bool, packed_up: str | None, packed_down: str | None
) -> None:
    array = np.linspace(0, 1, 30, dtype=np.float32).reshape(10, 3)

    def call() -> np.ndarray[Any, Any]:
        with triton.InferenceServerClient(f"127.0.0.1:{api.ports[0]}") as client:
            answer = client.infer(
                "net",
                triton_inputs(array, binary=binary),
                outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
                request_id="mine",
                timeout=250_000,
                priority=2,
                request_compression_algorithm=packed_up,
                response_compression_algorithm=packed_down,
            )
        assert answer.get_response()["id"] == "mine"
        assert answer.get_response()["parameters"]["isthmus.placement"] == "local"
        return np.asarray(answer.as_numpy("y"))

    found = await asyncio.to_thread(call)
    assert found.tobytes() == array.tobytes()
    assert service.requests[0].parameters == {"timeout": 250_000, "priority": 2}


async def test_stock_tritonclient_finds_health_metadata_statistics_and_repository(api: HttpApi, service: Echo) -> None:
    def call() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{api.ports[0]}") as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("net")
            assert client.is_model_ready("net", "1")
            assert not client.is_model_ready("net", "2")
            assert not client.is_model_ready("bad")
            assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
            assert client.get_model_metadata("net")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
            assert client.get_model_config("net")["max_batch_size"] == 0
            assert len(client.get_inference_statistics("net")["model_stats"]) == 1
            assert client.get_inference_statistics()["model_stats"][0]["name"] == "net"
            assert [row["name"] for row in client.get_model_repository_index()] == ["net", "bad"]
            client.load_model("net")
            assert service.loaded == ["net"]
            client.unload_model("net")
            assert service.loaded == []

    await asyncio.to_thread(call)


async def test_stock_tritonclient_infers_with_asyncio(api: HttpApi) -> None:
    array = np.ones((1, 3), np.float32)
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{api.ports[0]}") as client:
        answer = await client.infer("net", triton_inputs(array))
        assert answer.as_numpy("y").tolist() == [[1.0, 1.0, 1.0]]


async def test_a_large_binary_tensor_arrives_aligned_and_whole(service: Echo, tmp_path: Path) -> None:
    array = np.random.default_rng(3).random((50_000, 3), dtype=np.float32)
    unix = tmp_path / "s"
    async with serving(service, unix):
        answer = await asyncio.to_thread(DaemonClient(f"unix://{unix}").infer, "net", {"x": array}, {})
    assert answer.outputs["y"].tobytes() == array.tobytes()
    assert service.requests[0].inputs["x"].flags.aligned


async def test_the_unix_socket_answers_whatever_the_host_header_says(api: HttpApi, tmp_path: Path) -> None:
    connector = aiohttp.UnixConnector(str(tmp_path / "api.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://any.name/v2/models/net/infer", json=body_of([1, 2, 3])) as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["outputs"][0]["data"] == [1.0, 2.0, 3.0]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (InvalidRequest("no"), 400),
        (UnknownModel("no"), 404),
        (Overloaded("no"), 503),
        (DeadlineExceeded("no"), 504),
        (ConnectionResetError("a secret at 10.0.0.1"), 500),
        (TimeoutError("a secret"), 500),
        (RuntimeError("a secret in /etc"), 500),
    ],
)
async def test_a_failure_of_the_service_becomes_its_status_and_no_secret_gets_out(
    url: str, service: Echo, failure: Exception, code: int
) -> None:
    service.failure = failure
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v2/models/net/infer", json=body_of([1, 2, 3])) as answer:
            text = (await answer.json())["error"]
            assert answer.status == code
        assert text == ("internal error; the daemon's log says more" if code == 500 else "no")
        async with session.get(f"{url}/v2/health/live") as alive:
            assert alive.status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v2/", None, 404),
        ("GET", "/v2/models/none", None, 404),
        ("GET", "/v2/models/..%2f..%2fetc", None, 404),
        ("GET", "/v2/models/net/versions/2", None, 404),
        ("GET", "/v2/models/net/secrets", None, 404),
        ("GET", "/v2/models/bad/ready", None, 503),
        ("GET", "/v2/models/net/infer", None, 405),
        ("DELETE", "/v2/models/net", None, 405),
        ("GET", "/v2/isthmus/explain/unknown", None, 404),
        ("POST", "/v2/models/net/infer", b"{", 400),
        ("POST", "/v2/models/net/infer", b'{"instances": []}', 400),
        ("POST", "/v2/repository/index", b"[]", 400),
        ("POST", "/v2/repository/index", b'{"ready": 1}', 400),
        ("POST", "/v2/repository/models/net/load", b'{"parameters": {"config": "{}"}}', 501),
        ("POST", "/v2/repository/models/net/load", b'{"parameters": {"file:1/model.onnx": "AAAA"}}', 501),
        ("POST", "/v2/repository/models/net/unload", b'{"parameters": {"unload_dependents": 10000000000}}', 400),
        ("POST", "/v2/repository/models/..net/load", b"", 404),
        ("POST", "/v2/repository/models/net/load", b" " * 70_000, 413),
    ],
)
async def test_what_is_not_served_is_refused_with_its_status(
    url: str, method: str, path: str, body: bytes | None, code: int
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, data=body) as answer,
    ):
        assert answer.status == code
        assert set(await answer.json()) == {"error"}


async def test_not_ready_is_503_and_says_so(url: str, service: Echo) -> None:
    service.is_ready = False
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v2/health/ready") as answer:
        assert (answer.status, await answer.json()) == (503, {"live": True, "ready": False})


async def test_only_ready_models_are_listed_when_asked_for(url: str) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v2/repository/index", json={"ready": True}) as answer,
    ):
        assert [row["name"] for row in await answer.json()] == ["net"]


async def test_options_give_the_contract_and_the_schemas_and_no_other_origin_is_let_in(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.options(f"{url}/v2/models/net") as answer:
        described = await answer.json()
        assert answer.headers["Allow"] == "GET, HEAD, OPTIONS"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert described["contract"]["data"]["privacy"] == "any"
    assert described["schemas"]["request"]["required"] == ["inputs"]
    assert described["runs_on"] == ["cuda", "cpu"]
    assert described["measured"] == {"requests": 7, "p50_ms": 3.0, "p99_ms": 4.5, "per_s": 400.0}


async def test_metrics_are_prometheus_text(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"isthmus_requests" in await answer.read()


async def test_hostile_bytes_make_one_line_of_the_log_each(api: HttpApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    requests = [
        b"GET\x1b[31m / HTTP/1.1\r\n\r\n",
        b"G\nERROR fake: root logged in\nET / HTTP/1.1\r\n\r\n",
        b"\x00" * 300 + b"\r\n\r\n",
    ]
    for request in requests:
        status, _ = await raw(api, request)
        assert status == 400
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("agent")]
    assert len(lines) == len(requests)
    assert all(line.isprintable() and len(line) < 900 for line in lines), lines


async def test_bytes_that_are_no_http_get_a_sentence(api: HttpApi) -> None:
    code, body = await raw(api, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
    assert code == 400
    assert "no HTTP/1.1 request" in json.loads(body)["error"]


# -- who may ask -------------------------------------------------------------------------------------------------------

LIVE = "GET /v2/health/live HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("head", "code"),
    [
        ("Host: localhost", 200),
        ("Host: LOCALHOST.", 200),
        ("Host: 127.0.0.1:8000", 200),
        ("Host: 127.8.9.1", 200),
        ("Host: [::1]:8000", 200),
        ("Host: board.local:80", 200),
        ("Host: evil.example:8000", 403),
        ("Host: 127.0.0.1.evil.example", 403),
        ("Host: localhost.evil.example", 403),
        ("Host: 192.168.1.7", 403),
        ("Host: evil.example@localhost", 403),
        ("Host: [::1", 403),
        ("Host: ", 403),
        ("Accept: */*", 400),
        ("Host: localhost:80\r\nOrigin: http://localhost:80", 200),
        ("Host: localhost\r\nOrigin: https://evil.example", 403),
        ("Host: localhost:80\r\nOrigin: http://localhost:3000", 403),
        ("Host: localhost\r\nOrigin: null", 403),
    ],
)
async def test_only_local_names_and_pages_of_our_own_origin_are_answered(service: Echo, head: str, code: int) -> None:
    async with serving(service, hosts=["board.local"]) as api:
        assert (await raw(api, f"{LIVE}{head}\r\n\r\n".encode()))[0] == code


async def test_a_request_without_a_host_is_refused(api: HttpApi) -> None:
    assert (await raw(api, b"GET /v2/health/live HTTP/1.0\r\n\r\n"))[0] == 400


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_a_body_that_any_web_page_could_post_is_refused(url: str, service: Echo, kind: str) -> None:
    body = json.dumps(body_of([1, 2, 3])).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v2/models/net/infer", data=body, headers={"Content-Type": kind}) as answer,
    ):
        assert answer.status == 403
    assert service.requests == []


# -- limits ------------------------------------------------------------------------------------------------------------

POST = b"POST /v2/models/net/infer HTTP/1.1\r\nHost: localhost\r\n"


async def test_a_body_announced_over_the_limit_is_refused_before_it_is_sent(api: HttpApi) -> None:
    code, body = await raw(api, POST + b"Content-Length: 300000000\r\n\r\n")
    assert code == 413
    assert "at most 1048576" in json.loads(body)["error"]


async def test_a_body_without_a_length_is_refused_at_the_limit(api: HttpApi) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert (await raw(api, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 17))[0] == 413


async def test_a_body_in_chunks_is_read(api: HttpApi) -> None:
    body = json.dumps(body_of([1, 2, 3])).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    code, answer = await raw(api, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert (code, json.loads(answer)["outputs"][0]["data"]) == (200, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("encoding", "body", "code"),
    [
        ("gzip", gzip.compress(b" " * (16 << 20)), 413),
        ("deflate", zlib.compress(b" " * (16 << 20)), 413),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b"{}")[:-4], 400),
        ("gzip", gzip.compress(b"{}") + b"more", 400),
        ("zstd", b"", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
    ],
)
async def test_a_packed_body_is_unpacked_within_the_limit_or_refused(
    api: HttpApi, encoding: str, body: bytes, code: int
) -> None:
    head = f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    assert (await raw(api, POST + head + body))[0] == code


async def test_a_list_of_encodings_is_answered_plain(url: str) -> None:
    headers = {"Accept-Encoding": "gzip, deflate, br"}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(f"{url}/v2/models/net/infer", json=body_of([1, 2, 3]), headers=headers) as answer,
    ):
        assert "Content-Encoding" not in answer.headers


async def test_json_over_its_own_limit_is_refused_with_the_advice_to_send_binary(service: Echo) -> None:
    async with serving(service, max_json_bytes=200) as api:
        body = json.dumps(body_of([0.5] * 300, shape=[100, 3])).encode()
        code, answer = await raw(api, POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert code == 413
    assert "binary" in json.loads(answer)["error"]


@pytest.mark.parametrize("length", [b"x", b"-1", b"1e3", b"9999999999999999"])
async def test_a_header_length_that_is_no_number_is_refused(api: HttpApi, length: bytes) -> None:
    head = POST + b"Inference-Header-Content-Length: " + length + b"\r\nContent-Length: 2\r\n\r\n{}"
    assert (await raw(api, head))[0] == 400


async def test_bodies_in_flight_share_one_budget_and_give_it_back(service: Echo) -> None:
    service.gate = asyncio.Event()
    async with serving(service, max_body_bytes=400) as api, aiohttp.ClientSession() as session:
        target = f"http://127.0.0.1:{api.ports[0]}/v2/models/net/infer"
        body = json.dumps(body_of([1, 2, 3])).encode().ljust(300)
        first = asyncio.create_task(session.post(target, data=body))
        await service.entered.wait()
        async with session.post(target, data=body) as refused:
            assert refused.status == 503
        service.gate.set()
        async with await first as answered, session.post(target, data=body) as after:
            assert (answered.status, after.status) == (200, 200)


@pytest.mark.parametrize("binary", [True, False])
async def test_what_the_tensors_of_a_request_take_is_not_counted_as_its_body_too(service: Echo, binary: bool) -> None:
    service.gate, room = asyncio.Event(), Room(10_000)
    x = np.ones((1, 1000), np.float32)
    if binary:
        json_bytes, buffers = build_request({"x": x}, {})
        body, headers = b"".join(buffers), {"Inference-Header-Content-Length": str(json_bytes)}
    else:
        body, headers = json.dumps(body_of([1, 2, 3])).encode(), {}
        json_bytes = len(body)
    async with serving(service, room=room) as api, aiohttp.ClientSession() as session:
        target = f"http://127.0.0.1:{api.ports[0]}/v2/models/net/infer"
        asked = asyncio.create_task(session.post(target, data=body, headers=headers))
        await service.entered.wait()
        assert room.held_bytes == json_bytes  # the tensors are the service's to count
        service.gate.set()
        async with await asked as answered:
            assert answered.status == 200
            await answered.read()
        assert room.held_bytes == 0


async def test_a_body_finds_no_room_where_tensors_in_flight_have_taken_it(service: Echo) -> None:
    room = Room(10_000)
    body = json.dumps(body_of([1, 2, 3])).encode()
    async with serving(service, room=room) as api, aiohttp.ClientSession() as session:
        target = f"http://127.0.0.1:{api.ports[0]}/v2/models/net/infer"
        with Holding(room, 10_000 - len(body) + 1):
            async with session.post(target, data=body) as refused:
                assert refused.status == 503
        async with session.post(target, data=body) as answered:
            assert answered.status == 200


async def test_a_body_that_drips_is_given_up(service: Echo) -> None:
    async with serving(service, body_timeout_s=0.05) as api:
        assert (await raw(api, POST + b"Content-Length: 100\r\n\r\n{"))[0] == 408


async def test_a_header_that_drips_is_hung_up_on(service: Echo) -> None:
    async with serving(service, header_timeout_s=0.05) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports[0])
        writer.write(b"GET /v2/health/live HT")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_connections_over_the_limit_are_hung_up_on_and_room_comes_back(service: Echo) -> None:
    live = f"{LIVE}Host: localhost\r\n\r\n".encode()
    async with serving(service, max_connections=1) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.ports[0])
        writer.write(live)
        await reader.readuntil(b"}")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await raw(api, live)
        writer.close()
        await writer.wait_closed()
        while True:  # until the server has seen that the first is gone
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                assert (await raw(api, live))[0] == 200
                break


async def test_the_work_of_a_caller_who_left_is_cancelled(api: HttpApi, service: Echo) -> None:
    service.gate = asyncio.Event()
    body = json.dumps(body_of([1, 2, 3])).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", api.ports[0])
    writer.write(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await service.entered.wait()
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(5):
        await service.cancelled.wait()
    service.gate.set()
    live = f"{LIVE}Host: localhost\r\n\r\n".encode()
    assert (await raw(api, live))[0] == 200


async def test_a_caller_that_waits_to_be_let_in_is_let_in(api: HttpApi) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.ports[0])
    body = json.dumps(body_of([1, 2, 3])).encode()
    writer.write(POST + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


async def test_stopping_lets_the_request_in_flight_end(service: Echo, tmp_path: Path) -> None:
    service.gate = asyncio.Event()
    api = HttpApi(service)
    await api.start("127.0.0.1:0", tmp_path / "s")
    async with aiohttp.ClientSession() as session:
        target = f"http://127.0.0.1:{api.ports[0]}/v2/models/net/infer"
        call = asyncio.create_task(session.post(target, json=body_of([1, 2, 3])))
        await service.entered.wait()
        stopping = asyncio.create_task(api.stop())
        service.gate.set()
        async with await call as answer:
            assert answer.status == 200
        await stopping
    assert not (tmp_path / "s").exists()


# -- where it listens --------------------------------------------------------------------------------------------------


async def test_a_busy_port_is_a_sentence_that_names_it(service: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use.*set listen.http to another port"):
            await HttpApi(service).start(f"127.0.0.1:{port}", None)


@pytest.mark.parametrize(
    ("host", "shown", "warned"),
    [("127.0.0.1", "127.0.0.1", False), ("localhost", "localhost", False), ("0.0.0.0", "0.0.0.0", True)],
)
async def test_it_says_where_it_listens_and_warns_when_others_may_ask(
    service: Echo, caplog: pytest.LogCaptureFixture, host: str, shown: str, warned: bool
) -> None:
    api = HttpApi(service)
    await api.start(f"{host}:0", None)
    assert api.places == (f"http://{shown}:{api.ports[0]}",)
    await api.stop()
    assert api.places == ()
    assert ("open to others, who are not authenticated" in caplog.text) is warned


@pytest.mark.parametrize("address", ["8080", "localhost", ":80", "h:x", "h:70000", "::1:80", "h:-1"])
async def test_an_address_that_is_none_is_refused(service: Echo, address: str) -> None:
    with pytest.raises(ConfigError, match=r"listen\.http: expected"):
        await HttpApi(service).start(address, None)


async def test_the_socket_of_a_dead_daemon_is_replaced_and_only_its_group_may_connect(
    service: Echo, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(service, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert await asyncio.to_thread(DaemonClient(f"unix://{path}").get, "/v2/health/live") == {"live": True}


async def test_the_folder_of_the_socket_is_made_for_its_user_and_group(service: Echo, tmp_path: Path) -> None:
    async with serving(service, tmp_path / "run" / "s"):
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750
        assert (tmp_path / "run" / "s").is_socket()


async def test_a_folder_of_the_socket_that_cannot_be_made_is_a_sentence_that_names_it(
    service: Echo, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"run/isthmus, the folder of listen\.unix, .* cannot be made \(Not a dir"):
        await HttpApi(service).start(None, tmp_path / "run" / "isthmus" / "s")


async def test_the_socket_of_a_running_daemon_is_left_alone(api: HttpApi, service: Echo, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a daemon that is running"):
        await HttpApi(service).start(None, tmp_path / "api.sock")
    assert (tmp_path / "api.sock").is_socket()


async def test_a_file_that_is_no_socket_is_left_alone(service: Echo, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary")
    with pytest.raises(ConfigError, match="is no socket"):
        await HttpApi(service).start("127.0.0.1:0", tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "dear diary"


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(url: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command module against the daemon; what it printed."""

    async def call(module: Any, *words: str) -> str:
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert await asyncio.to_thread(module.run, parser.parse_args([*words, "--url", url])) == 0
        return capsys.readouterr().out

    return call


async def test_infer_sends_a_picture_as_it_is_and_names_the_best_label(
    command: Any, service: Echo, tmp_path: Path
) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8\xff and so on")
    shown = json.loads(await command(infer, "net", str(tmp_path / "cat.jpg"), "--mode", "offload", "--json"))
    assert service.requests[0].inputs["x"].tolist() == [b"\xff\xd8\xff and so on"]
    assert service.requests[0].parameters["isthmus.mode"] == "offload"
    assert [one["label"] for one in shown["outputs"][0]["top"]] == ["dog", "owl", "cat"]
    assert shown["plan"] == {"placement": "local", "cut": None, "codec": None}
    assert shown["timings_ms"] == {"head": 1.25}
    text = await command(infer, "net", str(tmp_path / "cat.jpg"))
    assert "dog  (1)" in text
    assert "predicted 2.5 ms" in text


async def test_infer_sends_the_arrays_of_an_npz_by_their_names(command: Any, service: Echo, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.array([[3, 1, 2]], np.float32))
    shown = json.loads(await command(infer, "net", str(tmp_path / "in.npz"), "--deadline-ms", "50", "--json"))
    assert service.requests[0].parameters["isthmus.deadline_ms"] == 50.0
    assert (shown["outputs"][0]["min"], shown["outputs"][0]["max"], shown["outputs"][0]["mean"]) == (1.0, 3.0, 2.0)


async def test_infer_does_not_unpickle(command: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", x=np.array([{}], object))
    with pytest.raises(InvalidRequest, match=r"no \.npz file of plain arrays"):
        await command(infer, "net", str(tmp_path / "in.npz"))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await command(infer, "net", str(tmp_path / "none.npz"))


async def test_the_record_of_the_last_hour_is_fetched_as_it_is(service: Echo) -> None:
    async with serving(service) as api:
        client = DaemonClient(f"http://127.0.0.1:{api.ports[0]}")
        assert await asyncio.to_thread(client.fetch, "/v2/isthmus/record") == b"record"


async def test_status_shows_models_companion_and_emulation(command: Any) -> None:
    text = await command(status)
    assert "cloud.example:7443: connected, 40 ms round trip" in text
    assert "slowed down 6 times" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("net ")]
    assert row == ["net", "1", "READY", "7", "0", "0", "3.2", "–"]
    assert json.loads(await command(status, "--json"))["models"][0]["name"] == "net"


async def test_explain_shows_prediction_beside_measurement_and_the_runners_up(command: Any) -> None:
    text = await command(explain, "00c0ffee")
    rows = [line.split() for line in text.splitlines()]
    assert ["head", "12.00", "ms", "13.50", "ms"] in rows
    assert ["local", "99.50", "ms,", "1.25", "J"] in rows
    assert ["no", "split", "it", "is", "far"] in rows
    assert ["counted", "latency", "25", "%,", "energy", "75", "%"] in rows
    assert "split 0123456789ab fp16 in 3 parts, predicted 41.00 ms" in text
    with pytest.raises(DaemonRefused, match="no such request"):
        await command(explain, "unknown")


def test_a_daemon_that_does_not_run_is_a_clear_sentence(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(DaemonUnreachable, match=f"no daemon answers at {url}.*isthmus agent --config"):
            DaemonClient(url).get("/v2")
    with pytest.raises(DaemonUnreachable, match="no daemon answers"):
        DaemonClient(f"unix://{tmp_path}/none").get("/v2")


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
)
def test_what_answers_a_byte_now_and_then_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, begins: bytes, goes_on: bytes
) -> None:
    monkeypatch.setattr("agent.http_client.TIMEOUT_S", 0.2)

    hung_up = threading.Event()

    def answer(listening: socket.socket) -> None:
        connected, _ = listening.accept()
        with connected, contextlib.suppress(OSError):  # until it is hung up on
            connected.sendall(begins)
            while not hung_up.wait(0.01):
                connected.sendall(goes_on)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer, args=(listening,))
        answering.start()
        with pytest.raises(DaemonUnreachable, match=r"no whole answer within 0\.2 s"):
            DaemonClient(f"http://127.0.0.1:{listening.getsockname()[1]}").get("/v2")
        hung_up.set()
        answering.join()


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://", "http://h:x", "unix://", "http://h/path"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--url must be"):
        DaemonClient(url)
