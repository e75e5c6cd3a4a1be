"""Health and metrics over HTTP: what a probe hears, and what those who only want to hold it up get."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request

import pytest

from cloud.health import HealthServer
from cloud.metrics import Metrics
from split.errors import ConfigError
from split.profiles.address import HostPort


@pytest.fixture
async def server():
    server = HealthServer(metrics=Metrics(), live=lambda: server.says, ready=lambda: not server.says)
    server.says = True
    await server.start(HostPort("127.0.0.1:0"))
    yield server
    await server.stop()


async def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes, str]:
    def fetch():
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers["Content-Type"]

    return await asyncio.to_thread(fetch)


async def test_live_and_ready_say_what_they_are_asked_at_each_request(server):
    assert (await ask(server.port, "/v2/health/live"))[0] == 200
    assert (await ask(server.port, "/v2/health/ready"))[0] == 503
    server.says = False
    assert (await ask(server.port, "/v2/health/live"))[0] == 503
    assert (await ask(server.port, "/v2/health/ready"))[0] == 200


async def test_metrics_are_prometheus_text_and_a_head_request_has_no_body(server):
    status, body, kind = await ask(server.port, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b"\nisthmus_cloud_sessions 0.0\n" in body
    assert (await ask(server.port, "/metrics", "HEAD"))[:2] == (200, b"")


async def test_other_paths_and_methods_are_refused(server):
    assert (await ask(server.port, "/"))[0] == 404
    assert (await ask(server.port, "/../../etc/passwd"))[0] == 404
    assert (await ask(server.port, "/metrics", "POST"))[0] == 405


@pytest.mark.parametrize("garbage", [b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"GET  /metrics\r\n\r\n"])
async def test_garbage_gets_a_refusal_and_the_next_one_an_answer(server, garbage):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(garbage)
    assert (await reader.read()).split()[1] in (b"404", b"405")
    writer.close()
    assert (await ask(server.port, "/v2/health/live"))[0] == 200


async def test_a_header_without_end_is_cut_off(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_those_who_say_nothing_lose_their_place_in_time_and_never_take_all_of_them(server, monkeypatch):
    monkeypatch.setattr("cloud.health.ANSWER_S", 0.2)
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
    for reader, writer in silent:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert not server._serving
    assert (await ask(server.port, "/v2/health/live"))[0] == 200


async def test_an_address_open_to_others_is_warned_about_and_loopback_is_not(server, caplog):
    assert "open to others" not in caplog.text
    open_one = HealthServer(metrics=Metrics(), live=bool, ready=bool)
    await open_one.start(HostPort("0.0.0.0:0"))
    await open_one.stop()
    assert "http: 0.0.0.0:0 is open to others" in caplog.text


async def test_a_taken_port_is_bad_configuration(server):
    with pytest.raises(ConfigError, match=f"http: 127.0.0.1:{server.port} cannot be listened on"):
        await HealthServer(metrics=Metrics(), live=bool, ready=bool).start(HostPort(f"127.0.0.1:{server.port}"))
