"""The runtime cases of the case list that concern the daemon, each by its id; O-RT-09's own child is tested with it.

Where a case names milliseconds, `scripts/bench` measures; here it is asked whether the daemon answers at all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import onnx
import onnx.parser
import pytest

from agent.config import AgentConfig, Listen, Workbench
from agent.daemon import Daemon
from agent.model_cache import find_card
from split.profiles.address import HostPort
from split.workbench import child

IDENTITY = '<ir_version: 10, opset_import: ["" : 18]> g (float[3] x) => (float[3] y) { y = Identity(x) }'
ROOT = Path(__file__).resolve().parents[2]


def lay(repository: Path, name: str, text: str) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


class Caller:
    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self._base + path) as answer:
            return answer.status, await answer.json(content_type=None) if await answer.read() else None

    async def infer(self, model: str, inputs: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        async with self._session.post(f"{self._base}/v2/models/{model}/infer", json={"inputs": inputs}) as answer:
            data: dict[str, Any] = await answer.json()
            return answer.status, data

    async def states(self) -> dict[str, tuple[str, str]]:
        """Model → state and reason; those at work on something are LOADING."""
        _, status = await self.get("/v2/isthmus/status")
        return {m["name"]: ("LOADING" if m["progress"] else m["state"], m["reason"]) for m in status["models"]}

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(100):
            while not await true():  # noqa: ASYNC110 - the daemon is asked over HTTP, there is no event
                await asyncio.sleep(0.05)

    async def answering(self) -> bool:
        """Nothing is being loaded; what answers may be being measured still."""
        _, status = await self.get("/v2/isthmus/status")
        return all(m["state"] != "LOADING" for m in status["models"])

    async def settled(self) -> bool:
        return all(state != "LOADING" for state, _ in (await self.states()).values())


@asynccontextmanager
async def daemon(folder: Path, **changes: Any) -> AsyncIterator[Caller]:
    config = AgentConfig(
        models=folder / "models",
        state_dir=folder / "state",
        cache_dir=folder / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0")),
        **changes,
    )
    async with Daemon(config) as running, aiohttp.ClientSession() as session:
        yield Caller(session, f"http://127.0.0.1:{running.http.ports[0]}")


def floats(*values: float, name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [len(values)], "data": list(values)}


async def test_o_rt_01_pinned_to_one_core_the_agent_uses_one_thread_and_says_so(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lay(tmp_path / "models", name, IDENTITY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "agent.yaml"
    config.write_text(
        f"models: {tmp_path}/models\nstate_dir: {tmp_path}/state\ncache_dir: {tmp_path}/cache\n"
        f"listen: {{http: '127.0.0.1:{port}'}}\n"
    )
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, sys; os.sched_setaffinity(0, {int(sys.argv.pop(1))})\n"
        "from agent.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(core), "agent", "--config", str(config)),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        async with aiohttp.ClientSession() as session:
            caller = Caller(session, f"http://127.0.0.1:{port}")

            async def ready() -> bool:
                assert process.returncode is None
                try:
                    return await caller.answering()
                except aiohttp.ClientError:
                    return False

            await caller.until(ready)
            for name in ("one", "two"):
                status, answer = await caller.infer(name, [floats(1, 2, 3)])
                assert status == 200
                assert answer["outputs"][0]["data"] == [1, 2, 3]
            _, status_page = await caller.get("/v2/isthmus/status")
            assert status_page["threads"] == 1
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
    assert b"affinity" not in log.lower()


async def test_o_rt_02_a_load_that_hangs_in_the_child_ends_at_its_limit_and_the_others_serve_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = child._argv

    def hanging(command: list[str], limits: Any) -> list[str]:
        if command[0] == "probe" and "stuck" in command[1]:
            return [sys.executable, "-c", "import time; time.sleep(600)"]
        argv: list[str] = right(command, limits)
        return argv

    monkeypatch.setattr(child, "_argv", hanging)
    lay(tmp_path / "models", "good", IDENTITY)
    async with daemon(tmp_path) as caller:
        await caller.until(caller.settled)
    lay(tmp_path / "models", "stuck", IDENTITY.replace("Identity", "Neg"))
    async with daemon(tmp_path, workbench=Workbench(timeout_s=10.0)) as caller:

        async def gone() -> bool:
            assert (await caller.get("/v2/health/live"))[0] == 200
            if (await caller.states())["good"][0] == "READY":
                assert (await caller.infer("good", [floats(1, 2, 3)]))[0] == 200
            return (await caller.states())["stuck"][0] == "UNAVAILABLE"

        await caller.until(gone)
        reason = (await caller.states())["stuck"][1]
        assert reason.startswith("load timeout: probe of ")
        assert "did not end within 10 s" in reason
        assert (await caller.infer("good", [floats(1, 2, 3)]))[0] == 200


HANGING_DAEMON = """
import sys, threading
from split.runtime.segment import OrtEngine

places = sys.argv.pop(1), sys.argv.pop(1)

def hanging(right):
    def open_as(engine, path, **how):
        if str(path).startswith(places):
            threading.Event().wait()
        return right(engine, path, **how)
    return open_as

OrtEngine.open, OrtEngine.open_optimised = hanging(OrtEngine.open), hanging(OrtEngine.open_optimised)
from agent.cli import run
sys.exit(run(sys.argv[1:]))
"""


async def test_o_rt_02_a_load_that_hangs_in_the_daemon_ends_at_its_limit_and_the_daemon_lives_and_stops(
    tmp_path: Path,
) -> None:
    lay(tmp_path / "models", "good", IDENTITY)
    model = lay(tmp_path / "models", "stuck", IDENTITY.replace("Identity", "Neg"))
    async with daemon(tmp_path) as caller:  # what children do is done here, within the usual limits
        await caller.until(caller.settled)
    found = find_card(tmp_path / "cache", model, None)
    assert found is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "agent.yaml"
    config.write_text(
        f"models: {tmp_path}/models\nstate_dir: {tmp_path}/state\ncache_dir: {tmp_path}/cache\n"
        f"listen: {{http: '127.0.0.1:{port}'}}\nworkbench: {{timeout_s: 2}}\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HANGING_DAEMON, str(model), str(found[0]), "agent", "--config", str(config)),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    alive = []
    try:
        async with aiohttp.ClientSession() as session:
            caller = Caller(session, f"http://127.0.0.1:{port}")

            async def answered() -> bool:
                assert process.returncode is None
                try:
                    alive.append((await caller.get("/v2/health/live"))[0])
                    return await caller.settled()
                except aiohttp.ClientError:
                    return False

            await caller.until(answered)
            assert set(alive) == {200}
            states = await caller.states()
            assert states["good"] == ("READY", "")
            assert states["stuck"] == (
                "UNAVAILABLE",
                f"load timeout: the runtime did not open {model} within 2 s, though it did in a child process; restart "
                "the daemon, and see that its processors are not taken away from it",
            )
            assert (await caller.infer("stuck", [floats(1, 2, 3)]))[0] == 503
            assert (await caller.infer("good", [floats(1, 2, 3)]))[1]["outputs"][0]["data"] == [1, 2, 3]
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await process.communicate()
            assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_o_rt_05_bfloat16_at_the_edge_of_a_model_is_refused_at_load(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 18]> g (bfloat16[3] x) => (bfloat16[3] y) { y = Identity(x) }'
    lay(tmp_path / "models", "brain", text)
    async with daemon(tmp_path) as caller:
        await caller.until(caller.answering)
        state, reason = (await caller.states())["brain"]
        assert state == "UNAVAILABLE"
        assert "unsupported type tensor(bfloat16)" in reason
        status, answer = await caller.infer(
            "brain", [{"name": "x", "datatype": "BF16", "shape": [3], "data": [1, 2, 3]}]
        )
        assert 400 <= status < 500 or status == 503
        assert answer["error"]


async def test_o_rt_06_a_loop_of_no_rounds_is_an_empty_list_over_http(tmp_path: Path) -> None:
    lay(
        tmp_path / "models",
        "loop",
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[3] x, int64 m) => (float[3] v, float[R, C] scan) <bool go = {1}> {
            z = Neg (x)
            u = Neg (z)
            v, scan = Loop (m, go, u) <body = b (int64 i, bool c, float[3] u0) => (bool d, float[3] w, float[3] s) {
                d = Identity(c) w = Add(u0, u0) s = Identity(u0)
            }>
        }""",
    )
    async with daemon(tmp_path) as caller:
        await caller.until(caller.answering)
        rounds = {"name": "m", "datatype": "INT64", "shape": [], "data": [0]}
        status, answer = await caller.infer("loop", [floats(1, 2, 3), rounds])
        assert status == 200
        outputs = {output["name"]: output for output in answer["outputs"]}
        assert outputs["v"]["data"] == [1, 2, 3]
        assert outputs["scan"]["shape"][0] == 0
        assert len(outputs["scan"]["shape"]) == 2
        assert outputs["scan"]["data"] == []


@pytest.mark.parametrize("inside", [True, False])
async def test_o_rt_07_external_weights_are_those_beside_the_model_wherever_the_agent_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    path = tmp_path / "models" / "add" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { a = Identity(x)  y = Add(a, W) }'
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([10, 20, 30]), "W"))
    onnx.save(proto, path, save_as_external_data=True, location="w.data", size_threshold=0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.data").write_bytes(np.float32([7, 7, 7]).tobytes())
    monkeypatch.chdir(path.parent if inside else elsewhere)
    async with daemon(tmp_path) as caller:
        await caller.until(caller.answering)
        status, answer = await caller.infer("add", [floats(1, 2, 3)])
        assert status == 200
        assert answer["outputs"][0]["data"] == [11, 22, 33]


async def test_o_rt_09_a_model_whose_load_kills_its_child_costs_that_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = child._argv

    def deadly(command: list[str], limits: Any) -> list[str]:
        if command[0] == "prepare" and "hostile" in command[1]:
            return [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
        argv: list[str] = right(command, limits)
        return argv

    monkeypatch.setattr(child, "_argv", deadly)
    lay(tmp_path / "models", "good", IDENTITY)
    lay(tmp_path / "models", "hostile", IDENTITY.replace("Identity", "Neg"))
    async with daemon(tmp_path) as caller:
        await caller.until(caller.answering)
        answers = [await caller.infer("good", [floats(number, 2, 3)]) for number in range(20)]
        assert [answer["outputs"][0]["data"] for status, answer in answers if status == 200] == [
            [number, 2, 3] for number in range(20)
        ]
        state, reason = (await caller.states())["hostile"]
        assert state == "UNAVAILABLE"
        assert "SIGSEGV" in reason
