"""What lies in the repository and cannot be served, through the whole daemon: it says why, and harms nobody."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import onnx.parser
import pytest

from agent.config import AgentConfig, Listen, Workbench
from agent.daemon import Daemon
from agent.model_folders import find_models
from split.errors import ConfigError
from split.profiles.address import HostPort
from split.profiles.contract import contract_beside, load_labels
from split.workbench import child
from split.workbench.limits import Limits

TINY = """<ir_version: 10, opset_import: ["" : 18]>
tiny (float[n, 3] x) => (float[n, 3] y) { a = Relu(x)  y = Exp(a) }"""
ENDLESS = """<ir_version: 10, opset_import: ["" : 18]>
g (float[2] x) => (float[2] y) <int64 many = {4611686018427387904}, bool go = {1}> {
  y = Loop (many, go, x) <body = again (int64 i, bool c, float[2] s) => (bool d, float[2] t) {
    d = Identity(c)  t = Tanh(s)
  }>
}"""


def lay(home: Path, name: str | bytes, text: str = TINY) -> Path:
    folder = Path(os.fsdecode(os.path.join(os.fsencode(home / "models"), os.fsencode(name), b"1")))
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return folder


class Caller:
    def __init__(self, session: aiohttp.ClientSession, daemon: Daemon) -> None:
        self.session, self.daemon = session, daemon
        self.base = f"http://127.0.0.1:{daemon.http.ports[0]}"

    async def models(self) -> dict[str, dict[str, Any]]:
        async with self.session.get(f"{self.base}/v2/isthmus/status") as answer:
            assert answer.status == 200
            return {model["name"]: model for model in (await answer.json())["models"]}

    async def index(self) -> dict[str, dict[str, str]]:
        async with self.session.post(f"{self.base}/v2/repository/index", json={}) as answer:
            return {row["name"]: row for row in await answer.json()}

    async def load(self, name: str) -> tuple[int, str]:
        async with self.session.post(f"{self.base}/v2/repository/models/{name}/load", json={}) as answer:
            return answer.status, await answer.text()

    async def infer(self, model: str = "tiny") -> int:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
        async with self.session.post(f"{self.base}/v2/models/{model}/infer", json=body) as answer:
            return answer.status

    async def until(self, state: str, name: str) -> dict[str, Any]:
        async with asyncio.timeout(90):
            while (model := (await self.models())[name])["state"] != state or model["progress"]:
                assert model["state"] != "UNAVAILABLE", model
                await asyncio.sleep(0.05)
            return model


@asynccontextmanager
async def running(home: Path, **workbench: Any) -> AsyncIterator[Caller]:
    config = AgentConfig(
        models=home / "models",
        state_dir=home / "state",
        cache_dir=home / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0")),
        workbench=Workbench(**workbench),
    )
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        yield Caller(session, daemon)


@pytest.mark.parametrize("job", ["prepare", "probe"])
async def test_o_rt_09_a_model_that_kills_its_loader_is_unavailable_and_no_other_request_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    lay(tmp_path, "tiny")
    honest: Callable[[Any, Limits], list[str]] = child._argv

    def argv(command: Any, limits: Limits) -> list[str]:
        if command[0] == job and "/bomb/" in command[1]:
            return [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"]
        return honest(command, limits)

    monkeypatch.setattr(child, "_argv", argv)
    async with running(tmp_path) as caller:
        await caller.until("READY", "tiny")
        lay(tmp_path, "bomb")
        loading = asyncio.create_task(caller.load("bomb"))
        assert [await caller.infer() for _ in range(20)] == [200] * 20
        status, text = await loading
        assert status == 503
        assert "SIGSEGV" in text
        for rows in (await caller.models(), await caller.index()):
            assert rows["bomb"]["state"] == "UNAVAILABLE"
            assert "died by signal SIGSEGV" in rows["bomb"]["reason"]
        assert await caller.infer("bomb") == 503
        assert await caller.infer() == 200


async def test_a_model_that_hangs_does_not_keep_the_one_before_it_from_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(tmp_path, "a")
    lay(tmp_path, "b")
    honest: Callable[[Any, Limits], list[str]] = child._argv

    def argv(command: Any, limits: Limits) -> list[str]:
        if command[0] == "prepare" and "/b/" in command[1]:
            return [sys.executable, "-c", "import signal; signal.pause()"]
        return honest(command, limits)

    monkeypatch.setattr(child, "_argv", argv)
    async with running(tmp_path) as caller:
        async with asyncio.timeout(90):
            while await caller.infer("a") != 200:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
        assert (await caller.index())["b"]["state"] == "LOADING"


async def test_models_that_take_too_much_time_or_memory_are_unavailable_with_the_limit(tmp_path: Path) -> None:
    lay(tmp_path, "endless", ENDLESS)
    async with running(tmp_path, timeout_s=4) as caller:
        status, text = await caller.load("endless")
        assert status == 503
        assert "did not end within 4 s" in text
        assert (await caller.index())["endless"]["state"] == "UNAVAILABLE"


async def test_loads_that_come_together_follow_one_another_and_leave_one_task(tmp_path: Path) -> None:
    lay(tmp_path, "tiny")
    async with running(tmp_path) as caller:
        answers = await asyncio.gather(*(caller.load("tiny") for _ in range(4)))
        assert [status for status, _ in answers] == [200] * 4
        loading = [task for task in asyncio.all_tasks() if task.get_name() == "load tiny"]
        assert len(loading) <= 1
        await caller.until("READY", "tiny")
        assert await caller.infer() == 200
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "load tiny"]


async def test_a_caller_that_leaves_its_load_leaves_a_model_that_answers(tmp_path: Path) -> None:
    lay(tmp_path, "tiny")
    async with running(tmp_path) as caller:
        await caller.until("READY", "tiny")
        for steps in range(8):  # at each of the points where a load waits first
            leaving = asyncio.create_task(caller.daemon.service.load("tiny"))
            for _ in range(steps):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert (await caller.load("tiny"))[0] == 200
        assert await caller.infer() == 200


async def test_an_unload_does_not_wait_for_a_load(tmp_path: Path) -> None:
    lay(tmp_path, "endless", ENDLESS)
    async with running(tmp_path) as caller:
        loading = asyncio.create_task(caller.load("endless"))
        async with asyncio.timeout(60):
            while (await caller.models())["endless"]["progress"] != "probe":  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
            async with caller.session.post(f"{caller.base}/v2/repository/models/endless/unload", json={}) as answer:
                assert answer.status == 200
            assert (await loading)[0] == 503
        assert (await caller.models())["endless"]["reason"] == "unloaded"


NAMES: list[tuple[str | bytes, str]] = [
    ("two words", "two words"),
    ("per%20cent", "per%20cent"),
    ("line\nfeed", "line\\nfeed"),
    ("-\x1b[31m", "-\\x1b[31m"),
    (b"\xff\xfe", "\\udcff\\udcfe"),
    ("größe", "größe"),
    ("x" * 200, "x" * 128 + "…"),
    ("stats", "stats"),
]


async def test_a_name_that_no_url_can_hold_is_never_ready(tmp_path: Path) -> None:
    for name, _ in NAMES:
        lay(tmp_path, name)
    lay(tmp_path, ".hidden")
    lay(tmp_path, "x" * 128)
    async with running(tmp_path) as caller:
        await caller.until("READY", "x" * 128)
        rows = await caller.index()
        assert set(rows) == {shown for _, shown in NAMES} | {"x" * 128}
        for _, shown in NAMES:
            assert rows[shown]["state"] == "UNAVAILABLE"
            assert "; rename " in rows[shown]["reason"]
        assert await caller.infer("x" * 128) == 200


async def test_a_folder_that_cannot_be_read_is_one_model_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(tmp_path, "tiny")
    lay(tmp_path, "secret")
    honest = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    async with running(tmp_path) as caller:
        await caller.until("READY", "tiny")
        secret = (await caller.models())["secret"]
        assert secret["state"] == "UNAVAILABLE"
        assert "secret cannot be read (Permission denied)" in secret["reason"]
        assert await caller.infer() == 200


@pytest.mark.parametrize(
    ("contract", "says"),
    [
        (None, "contract.yaml: cannot be read (Is a directory)"),
        ("data: {outputs: [{name: y, labels: ../other/labels.txt}]}", "must be a file in the model's folder"),
        ("data: {outputs: [{name: y, labels: /proc/self/environ}]}", "must be a file in the model's folder"),
        ("data: {outputs: [{name: y, labels: link.txt}]}", "must be a file in the model's folder"),
        ("data: {outputs: [{name: y, labels: gone.txt}]}", "cannot be read (No such file or directory)"),
    ],
)
def test_a_contract_that_cannot_be_read_is_not_taken_for_none_and_labels_lie_in_the_models_folder(
    tmp_path: Path, contract: str | None, says: str
) -> None:
    home = lay(tmp_path, "tiny").parent
    lay(tmp_path, "other")
    (tmp_path / "models" / "other" / "labels.txt").write_text("cat\n")
    (home / "link.txt").symlink_to("/dev/zero")
    if contract is None:
        (home / "contract.yaml").mkdir()
    else:
        (home / "contract.yaml").write_text(contract)

    def read() -> None:
        found = contract_beside(home / "1" / "model.onnx")
        assert found is not None
        load_labels(found, home)

    with pytest.raises(ConfigError) as caught:
        read()
    assert says in str(caught.value)


def test_version_folders_are_plain_numbers(tmp_path: Path) -> None:
    lay(tmp_path, "tiny")
    for name in ("²", "10x", "2"):
        (tmp_path / "models" / "tiny" / name).mkdir()
    (tmp_path / "models" / "file").touch()
    found = find_models(tmp_path / "models")
    assert {name: place.version for name, place in found.items()} == {"tiny": "2"}


def test_a_repository_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read \(No such file or directory\)"):
        find_models(tmp_path / "nowhere")
