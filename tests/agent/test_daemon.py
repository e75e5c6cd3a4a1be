"""The daemon as a whole in this process: real HTTP, real onnxruntime, the workbench in its child; no companion.

Bad models and bad requests are refused with a sentence, and the daemon answers the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
import pytest_asyncio

import agent.bringing_up
from agent.config import AgentConfig, Emulation, Listen
from agent.daemon import Daemon
from agent.served_model import ServedModel
from split.errors import ConfigError, ModelUnavailable
from split.profiles.address import HostPort
from split.runtime.engine import Segment

TINY = """
<ir_version: 10, opset_import: ["" : 18]>
tiny (float[n, 3] x) => (float[n, 3] y, float[n, 3] z)
{
  a = Relu(x)
  y = Exp(a)
  z = Add(a, y)
}
"""


def lay_model(repository: Path, name: str, data: bytes) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(data)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model; prepared and profiled by the first daemon that starts here."""
    folder = tmp_path_factory.mktemp("home")
    lay_model(folder / "models", "tiny", onnx.parser.parse_model(TINY).SerializeToString())
    return folder


def configured(home: Path, tmp_path: Path, **changes: object) -> AgentConfig:
    fields: dict[str, object] = {
        "models": home / "models",
        "state_dir": home / "state",
        "cache_dir": home / "cache",
        "listen": Listen(http=HostPort("127.0.0.1:0"), unix=tmp_path / "agent.sock"),
    }
    return AgentConfig(**(fields | changes))  # type: ignore[arg-type]


class Caller:
    def __init__(self, session: aiohttp.ClientSession, daemon: Daemon) -> None:
        self.session = session
        self.daemon = daemon
        self.base = f"http://127.0.0.1:{daemon.http.ports[0]}"

    async def get(self, path: str) -> tuple[int, dict[str, object]]:
        async with self.session.get(self.base + path) as answer:
            return answer.status, await answer.json()

    async def infer(self, x: object, model: str = "tiny", **more: object) -> tuple[int, dict[str, object]]:
        shape = list(np.shape(x))  # type: ignore[arg-type]
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": x}]} | more
        async with self.session.post(f"{self.base}/v2/models/{model}/infer", json=body) as answer:
            return answer.status, await answer.json()

    async def until(self, true: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await true():  # noqa: ASYNC110 - the daemon is asked over HTTP, there is no event
                await asyncio.sleep(0.05)

    async def settled(self) -> bool:
        _, status = await self.get("/v2/isthmus/status")
        return all(m["state"] != "LOADING" and not m["progress"] for m in status["models"])  # type: ignore[attr-defined]


@pytest_asyncio.fixture
async def caller(home: Path, tmp_path: Path) -> AsyncIterator[Caller]:
    async with Daemon(configured(home, tmp_path)) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        yield caller


async def test_a_request_is_answered_and_can_be_explained(caller: Caller) -> None:
    status, answer = await caller.infer([[0.0, 1.0, -1.0]], id="mine")
    assert status == 200
    outputs = {o["name"]: o["data"] for o in answer["outputs"]}  # type: ignore[attr-defined]
    a = np.maximum([0.0, 1.0, -1.0], 0)
    np.testing.assert_allclose(outputs["y"], np.exp(a), rtol=1e-6)
    np.testing.assert_allclose(outputs["z"], a + np.exp(a), rtol=1e-6)
    parameters = answer["parameters"]
    assert isinstance(parameters, dict)
    assert answer["id"] == "mine"
    assert parameters["isthmus.placement"] == "local"
    assert parameters["isthmus.fallback"] == ""
    assert json.loads(parameters["isthmus.timings"])["whole"] > 0
    status, why = await caller.get(f"/v2/isthmus/explain/{parameters['isthmus.request_id']}")
    assert status == 200
    assert why["chosen"]["placement"] == "local"  # type: ignore[index]
    assert why["reason"]


async def test_a_request_on_a_raspberry_pi_4_reports_modelled_joules_everywhere(home: Path, tmp_path: Path) -> None:
    board = configured(home, tmp_path, device="raspberry-pi-4", emulation=Emulation(slowdown=3.0))
    async with Daemon(board) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        _, answer = await caller.infer([[0.0, 1.0, -1.0]])
        request_id = answer["parameters"]["isthmus.request_id"]  # type: ignore[index]
        explained: dict[str, Any] = (await caller.get(f"/v2/isthmus/explain/{request_id}"))[1]
        status: dict[str, Any] = (await caller.get("/v2/isthmus/status"))[1]
        async with session.get(f"{caller.base}/metrics") as page:
            metrics = await page.text()
    energy = explained["energy"]
    assert not energy["measured"]
    assert energy["source"].startswith("modelled: raspberry-pi-4")
    # The profile: 7.2 W busy, 3 W idle, by the share of its four cores that this machine's threads would be.
    watts = 4.2 * min(status["threads"], 4) / 4
    assert status["power"]["compute_w"] == pytest.approx(watts)
    on_all_threads_j = watts * explained["measured_ms"]["whole"] / 1000
    assert 0.0 < energy["used_j"] <= on_all_threads_j + 1e-4  # it may have been found to be fastest on fewer
    assert status["models"][0]["joules"] == pytest.approx(energy["used_j"], abs=1e-4)
    assert 'isthmus_energy_joules_total{measured="false",model="tiny"}' in metrics


async def test_a_wanted_output_comes_alone(caller: Caller) -> None:
    _, answer = await caller.infer([[0.0, 1.0, -1.0]], outputs=[{"name": "z"}])
    assert [o["name"] for o in answer["outputs"]] == ["z"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"inputs": []}, "missing"),
        ({"inputs": [{"name": "w", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}, "no input 'w'"),
        ({"inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]}]}, "datatype FP32"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}, "shape [-1, 3]"),
        ({"outputs": [{"name": "w"}]}, "no output 'w'"),
        ({"parameters": {"isthmus.mode": "sideways"}}, "isthmus.mode"),
        ({"parameters": {"isthmus.mode": "split", "isthmus.cut": "0123456789ab"}}, "0123456789ab"),
    ],
)
async def test_a_wrong_request_is_refused_and_the_next_one_answered(
    caller: Caller, changes: dict[str, object], phrase: str
) -> None:
    status, answer = await caller.infer([[1.0, 2.0, 3.0]], **changes)
    assert status == 400
    assert phrase in str(answer["error"])
    assert (await caller.infer([[1.0, 2.0, 3.0]]))[0] == 200


async def test_a_forced_offload_without_companion_is_answered_here_and_says_so(caller: Caller) -> None:
    status, answer = await caller.infer([[1.0, 2.0, 3.0]], parameters={"isthmus.mode": "offload"})
    assert status == 200
    parameters = answer["parameters"]
    assert isinstance(parameters, dict)
    assert parameters["isthmus.placement"] == "local"
    _, why = await caller.get(f"/v2/isthmus/explain/{parameters['isthmus.request_id']}")
    assert "companion" in str(why["reason"])


async def test_models_that_cannot_be_served_say_why_and_harm_nobody(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    whole = onnx.parser.parse_model(TINY).SerializeToString()
    lay_model(repository, "tiny", whole)
    lay_model(repository, "empty", b"")
    lay_model(repository, "garbage", b"\x00\x01garbage" * 100)
    lay_model(repository, "truncated", whole[: len(whole) // 2])
    (repository / "nothing" / "1").mkdir(parents=True)
    (repository / "notes.txt").write_text("not a model")
    lay_model(repository, "wrong-contract", whole)
    (repository / "wrong-contract" / "contract.yaml").write_text("model: x\nbehavour: {}\n")
    async with Daemon(configured(tmp_path, tmp_path)) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        _, status = await caller.get("/v2/isthmus/status")
        models = {m["name"]: m for m in status["models"]}  # type: ignore[attr-defined]
        assert models["tiny"]["state"] == "READY"
        for name in ("empty", "garbage", "truncated", "nothing", "wrong-contract"):
            assert models[name]["state"] == "UNAVAILABLE", name
            assert models[name]["reason"], name
            assert "Traceback" not in models[name]["reason"]
        assert "behavour" in models["wrong-contract"]["reason"]
        code, answer = await caller.infer([[1.0, 2.0, 3.0]], model="garbage")
        assert code == 503
        assert "garbage" in str(answer["error"])
        assert (await caller.infer([[1.0, 2.0, 3.0]], model="unheard-of"))[0] == 404
        assert (await caller.infer([[1.0, 2.0, 3.0]]))[0] == 200
        assert (await caller.get("/v2/health/live"))[0] == 200


async def test_a_model_that_needs_real_sizes_says_so_until_a_golden_request_is_laid_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 18]>
    sized (float[n] x) => (float[m, k] y) { s = Constant <value = int64[2] {2, 3}> ()  y = Reshape(x, s) }
    """
    lay_model(tmp_path / "models", "sized", onnx.parser.parse_model(text).SerializeToString())
    golden = tmp_path / "models/sized/golden"
    golden.mkdir()
    (golden / "photo.png").write_bytes(b"no picture, and nothing says what to do with one")
    async with aiohttp.ClientSession() as session, Daemon(configured(tmp_path, tmp_path)) as daemon:
        caller = Caller(session, daemon)

        await caller.until(caller.settled)
        [model] = daemon.service.status()["models"]
        assert model["state"] == "READY"
        assert "takes none of the built-in test inputs" in model["reason"]
        assert "lay a golden.npz" in model["reason"]
        assert "photo.png is not used as a golden request" in caplog.text
        status, _ = await caller.infer([1, 2, 3, 4, 5, 6], model="sized")
        assert status == 200
        np.savez(tmp_path / "models/sized/golden.npz", x=np.arange(6, dtype="f4"))
        await daemon.service.load("sized")
        await caller.until(caller.settled)
        [model] = daemon.service.status()["models"]
        assert (model["profiled"], model["reason"]) == (True, "")


async def test_a_restart_takes_what_was_prepared_from_the_cache(home: Path, tmp_path: Path) -> None:
    config = configured(home, tmp_path)
    for _ in range(2):
        async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
            caller = Caller(session, daemon)
            await caller.until(caller.settled)
            [card] = (config.cache_dir / "models").glob("*/card.json")
            changed_ns = card.stat().st_mtime_ns
    assert card.stat().st_mtime_ns == changed_ns


async def test_a_cache_without_room_is_said_and_the_models_come_by_themselves_when_there_is_room(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-LC-05 on the device: a full disk while models are prepared and measured, then room again, and no restart."""
    real, failed, room = agent.bringing_up.run_child, dict.fromkeys(("prepare", "profile"), 0), asyncio.Event()

    async def run_child(arguments: Sequence[str], **options: Any) -> None:
        if failed.get(arguments[0], 2) < 2:
            failed[arguments[0]] += 1
            raise ModelUnavailable("card.json.new cannot be used (No space left on device)")
        if arguments[0] == "profile":
            await room.wait()
        await real(arguments, **options)

    monkeypatch.setattr(agent.bringing_up, "run_child", run_child)
    monkeypatch.setattr(agent.bringing_up, "STORAGE_RETRY_S", 0.05)
    config = msgspec.structs.replace(configured(home, tmp_path), cache_dir=tmp_path / "empty")
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        seen: set[tuple[object, object]] = set()

        async def through() -> bool:
            [model] = daemon.service.status()["models"]
            seen.add((model["state"], model["reason"]))
            if failed["profile"] == 2:
                room.set()
            return bool(model["profiled"])

        await caller.until(through)
        [model] = daemon.service.status()["models"]
        assert (model["state"], model["reason"]) == ("READY", "")
        assert ("UNAVAILABLE", "card.json.new cannot be used (No space left on device)") in seen
        assert failed == {"prepare": 2, "profile": 2}
        status, _ = await caller.infer([[0.0, 1.0, -1.0]])
        assert status == 200


async def test_a_busy_port_is_a_sentence_that_names_it(home: Path, tmp_path: Path) -> None:
    async with Daemon(configured(home, tmp_path)) as first:
        taken = first.http.ports[0]
        listen = Listen(http=HostPort(f"127.0.0.1:{taken}"))
        elsewhere = msgspec.structs.replace(
            configured(home, tmp_path, listen=listen), state_dir=tmp_path / "s2", cache_dir=tmp_path / "c2"
        )
        with pytest.raises(ConfigError, match=str(taken)):
            async with Daemon(elsewhere):
                pass


async def test_a_second_daemon_with_the_folders_of_the_first_is_a_sentence_and_starts_when_that_is_gone(
    home: Path, tmp_path: Path
) -> None:
    config = configured(home, tmp_path)
    async with Daemon(config):
        with pytest.raises(ConfigError, match=r"state_dir: .* is in use by another isthmus process"):
            async with Daemon(config):
                pass
    async with Daemon(config) as daemon:
        assert daemon.service.status()["metering"]["used_bytes"] == 0


async def test_a_missing_repository_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models"):
        async with Daemon(configured(tmp_path, tmp_path)):
            pass


async def test_a_model_unloaded_on_purpose_is_not_served_and_does_not_make_the_daemon_unready(caller: Caller) -> None:
    post, models = caller.session.post, f"{caller.base}/v2/repository/models"
    async with post(f"{models}/tiny/unload", json={}) as answer:
        assert answer.status == 200
    assert (await caller.get("/v2/health/ready"))[0] == 200
    status, refused = await caller.infer([[0.0, 1.0, 2.0]])
    assert (status, refused["error"]) == (503, "model 'tiny' is UNAVAILABLE: unloaded")
    async with post(f"{models}/tiny/load", json={}) as answer:
        assert answer.status == 200
    assert (await caller.infer([[0.0, 1.0, 2.0]]))[0] == 200


async def test_emulated_slowness_shows_in_the_timings(home: Path, tmp_path: Path) -> None:
    config = configured(home, tmp_path, emulation=Emulation(slowdown=20.0))
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        _, status = await caller.get("/v2/isthmus/status")
        assert status["emulation"] == {"slowdown": 20.0}
        assert (await caller.infer([[1.0, 2.0, 3.0]]))[0] == 200


async def test_a_damaged_segment_in_the_cache_is_made_again(home: Path, tmp_path: Path) -> None:
    config = configured(home, tmp_path)
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
    head = sorted((config.cache_dir / "models").glob("*/*.head.onnx"))[0]
    whole = head.read_bytes()
    head.write_bytes(whole[: len(whole) // 2])
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        assert head.read_bytes() == whole


async def test_segments_are_opened_as_optimised_for_this_machine(home: Path, tmp_path: Path) -> None:
    config = configured(home, tmp_path)
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        model = daemon.service._repository.serving("tiny")
        names = [str(segment.path.relative_to(model.folder)) for segment in opened(model)]  # type: ignore[attr-defined]
    assert len(names) == 1 + 2 * len(model.card.cuts) > 1
    assert all(name.startswith("optimised/") for name in names)


async def test_damaged_optimised_segments_are_made_again(home: Path, tmp_path: Path) -> None:
    config = configured(home, tmp_path)
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
    [whole] = (config.cache_dir / "models").glob("*/optimised/*/whole.onnx")
    before = whole.read_bytes()
    whole.write_bytes(before[::-1])
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        assert (await caller.infer([[0.0, 1.0, -1.0]]))[0] == 200

        async def mended() -> bool:
            return whole.read_bytes() == before and await caller.settled()

        await caller.until(mended)
        [first, *_] = opened(daemon.service._repository.serving("tiny"))
    assert first.path == whole  # type: ignore[attr-defined]


def opened(model: ServedModel) -> list[Segment]:
    """The whole and the halves of each cut as the daemon opens them, once what goes on in the background is done."""
    paths = [Path(model.card.path)]
    paths += [model.folder / f"{cut.id}.{half}.onnx" for cut in model.card.cuts for half in ("head", "tail")]
    for _ in range(2):
        model.store.warm(paths).result(30)
    return [model.store.get(path) for path in paths]


async def test_a_model_replaced_in_place_answers_with_its_new_weights_once_loaded(tmp_path: Path) -> None:
    lay_model(tmp_path / "models", "tiny", onnx.parser.parse_model(TINY).SerializeToString())
    changed = onnx.parser.parse_model(TINY.replace("y = Exp(a)", "y = Neg(a)")).SerializeToString()
    async with Daemon(configured(tmp_path, tmp_path)) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        assert (await caller.infer([[0.0, 1.0, 2.0]]))[0] == 200
        (tmp_path / "models" / "tiny" / "1" / "model.onnx").write_bytes(changed)
        async with session.post(f"{caller.base}/v2/repository/models/tiny/load", json={}) as answer:
            assert answer.status == 200
        _, answer_now = await caller.infer([[0.0, 1.0, 2.0]], outputs=[{"name": "y"}])
        [y] = answer_now["outputs"]  # type: ignore[misc]
        assert y["data"] == [0.0, -1.0, -2.0]  # type: ignore[index]


async def test_a_request_that_outlives_an_unloading_leaves_no_old_weights_to_what_is_loaded_next(
    tmp_path: Path,
) -> None:
    lay_model(tmp_path / "models", "tiny", onnx.parser.parse_model(TINY).SerializeToString())
    changed = onnx.parser.parse_model(TINY.replace("y = Exp(a)", "y = Neg(a)")).SerializeToString()
    async with Daemon(configured(tmp_path, tmp_path)) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        model = daemon.service._repository.serving("tiny")
        async with session.post(f"{caller.base}/v2/repository/models/tiny/unload", json={}) as answer:
            assert answer.status == 200
        model.whole()  # the worker comes to it only now
        (tmp_path / "models" / "tiny" / "1" / "model.onnx").write_bytes(changed)
        async with session.post(f"{caller.base}/v2/repository/models/tiny/load", json={}) as answer:
            assert answer.status == 200
        _, answer_now = await caller.infer([[0.0, 1.0, 2.0]], outputs=[{"name": "y"}])
        [y] = answer_now["outputs"]  # type: ignore[misc]
        assert y["data"] == [0.0, -1.0, -2.0]  # type: ignore[index]


STRICT = """
<ir_version: 10, opset_import: ["" : 18]>
strict (float[6] x, int64[2] s) => (float[n, m] y) {
  a = Relu(x)
  r = Reshape(a, s)
  y = Exp(r)
}
"""


async def test_golden_requests_laid_beside_a_model_are_measured_on_without_a_new_cache(tmp_path: Path) -> None:
    lay_model(tmp_path / "models", "strict", onnx.parser.parse_model(STRICT).SerializeToString())
    async with Daemon(configured(tmp_path, tmp_path)) as daemon, aiohttp.ClientSession() as session:
        caller = Caller(session, daemon)
        await caller.until(caller.settled)
        _, status = await caller.get("/v2/isthmus/status")
        [model] = status["models"]  # type: ignore[misc]
        assert model["state"] == "READY"
        assert "lay a golden.npz" in model["reason"]
        measured: list[tuple[int, ...]] = []
        for width in (2, 3):
            shape = np.array([6 // width, width])
            np.savez(tmp_path / "models" / "strict" / "golden.npz", x=np.arange(6, dtype="f4"), s=shape)
            async with session.post(f"{caller.base}/v2/repository/models/strict/load", json={}) as answer:
                assert answer.status == 200
            await caller.until(caller.settled)
            _, status = await caller.get("/v2/isthmus/status")
            [model] = status["models"]  # type: ignore[misc]
            assert (model["profiled"], model["reason"]) == (True, "")
            [kept] = (tmp_path / "cache" / "models").glob("*/golden.npz")
            with np.load(kept) as golden:
                measured.append(golden["0/output/y"].shape)
        assert measured == [(3, 2), (2, 3)]
