"""Cases from other projects' trackers about what a machine does not tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import psutil
import pytest

from agent.config import AgentConfig, Listen
from agent.daemon import Daemon
from agent.metering import interface_of
from agent.sensors import Sensors, read_sensors
from split.profiles.address import HostPort
from tests.agent import boards

Answer = Callable[..., Any]


def raising(error: type[Exception]) -> Answer:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error("not on this kernel")

    return fail


ANSWERS: dict[str, Answer] = {
    "None": lambda *_, **__: None,
    "FileNotFoundError": raising(FileNotFoundError),
    "NotImplementedError": raising(NotImplementedError),
    "OSError": raising(OSError),
    "zeros": lambda *_, **__: (0.0, 0.0, 0.0),
}


def configured(tmp_path: Path) -> AgentConfig:
    (tmp_path / "models").mkdir()
    return AgentConfig(
        models=tmp_path / "models",
        state_dir=tmp_path / "state",
        cache_dir=tmp_path / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0")),
    )


async def pages(config: AgentConfig, *paths: str) -> dict[str, tuple[int, Any]]:
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        found: dict[str, tuple[int, Any]] = {}
        for path in paths:
            async with session.get(f"http://127.0.0.1:{daemon.http.ports[0]}{path}") as answer:
                text = path == "/metrics"
                found[path] = (answer.status, await answer.text() if text else await answer.json())
        return found


@pytest.mark.parametrize("answer", ANSWERS)
async def test_o_re_01_an_unknown_cpu_frequency_is_null_and_nothing_fails(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", ANSWERS[answer])
    sensors = read_sensors(boards.container(tmp_path / "root"))
    assert sensors.frequency_mhz is None
    assert sensors.frequency_ratio is None
    status, body = (await pages(configured(tmp_path), "/v2/isthmus/status"))["/v2/isthmus/status"]
    assert status == 200
    assert body["sensors"].keys() == msgspec.to_builtins(sensors).keys()


@pytest.mark.parametrize("now", ["0\n", "<unknown>\n", ""])
def test_o_re_01_a_clock_that_the_kernel_cannot_tell_is_null_and_its_bounds_stay(now: str, tmp_path: Path) -> None:
    root = boards.raspberry_pi_5(tmp_path)
    for core in range(4):
        boards.lay_out(root, {f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq": now})
    sensors = read_sensors(root)
    assert sensors.frequency_mhz is None
    assert sensors.frequency_ratio == pytest.approx(1500 / 2400)


@pytest.mark.parametrize("answer", ["None", "FileNotFoundError", "NotImplementedError", "OSError"])
async def test_o_re_03_with_no_answer_from_psutil_every_page_is_there_with_null_where_unknown(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, member in inspect.getmembers(psutil):
        if not name.startswith("_") and inspect.isroutine(member):
            monkeypatch.setattr(psutil, name, ANSWERS[answer])
    assert interface_of("192.0.2.1") == ""
    paths = ("/v2/isthmus/status", "/metrics", "/v2", "/v2/models/stats")
    found = await pages(configured(tmp_path), *paths)
    assert {status for status, _ in found.values()} == {200}
    _, status = found["/v2/isthmus/status"]
    assert {"device", "sensors", "power", "companion", "models", "metering", "queue_ms"} <= status.keys()
    assert status["sensors"].keys() == {field.name for field in msgspec.structs.fields(Sensors)}
    assert "isthmus_build_info" in found["/metrics"][1]
