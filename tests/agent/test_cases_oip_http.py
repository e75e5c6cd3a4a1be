"""The HTTP cases of the case list, each by its id, before the whole daemon: real sockets, real runtime, no companion.

Their gRPC halves belong to the gRPC door. Where a case names milliseconds, a fake clock decides (`serve_lab.py`) and
`scripts/bench cases` measures.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import onnx
import onnx.parser
import pytest
import pytest_asyncio
import tritonclient.http as triton

import agent.local_finish
from agent.config import AgentConfig, Listen
from agent.daemon import Daemon
from split.profiles.address import HostPort

IR = '<ir_version: 10, opset_import: ["" : 18]>'
MODELS = {
    "net": f"{IR} g (float[n, m] x) => (float[n, m] y, float[n, m] z) {{ y = Identity(x)  z = Neg(x) }}",
    "odd": f"{IR} g (float16[3] h, float[n] x) => (float16[3] k, float[2] y) {{ k = Identity(h)  y = Identity(x) }}",
}
"""What `odd` declares of `y` is not so."""
BODY_LIMIT = 64 << 20
"""Bytes; of the daemon unless configured."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models; prepared by the first daemon that starts here."""
    folder = tmp_path_factory.mktemp("home")
    for name, text in MODELS.items():
        place = folder / "models" / name / "1"
        place.mkdir(parents=True)
        onnx.save(onnx.parser.parse_model(text), place / "model.onnx")
    return folder


class Caller:
    def __init__(self, session: aiohttp.ClientSession, daemon: Daemon) -> None:
        self.session = session
        self.daemon = daemon
        self.address = f"127.0.0.1:{daemon.http.ports[0]}"
        self.base = f"http://{self.address}"

    async def post(self, model: str, body: Any, binary: bytes = b"", **headers: str) -> tuple[int, bytes, int]:
        """Status, body and length of the JSON in it; what fails answers `{"error": text}` and nothing else."""
        packed = body if isinstance(body, bytes) else json.dumps(body).encode()
        if binary:
            headers["Inference-Header-Content-Length"] = str(len(packed))
        async with self.session.post(
            f"{self.base}/v2/models/{model}/infer", data=io.BytesIO(packed + binary), headers=headers
        ) as answer:
            data = await answer.read()
            length = int(answer.headers.get("Inference-Header-Content-Length", len(data)))
            if answer.status != 200:
                assert list(json.loads(data)) == ["error"], data
            return answer.status, data, length

    async def infer(self, model: str, *inputs: dict[str, Any], **more: Any) -> tuple[int, Any]:
        status, data, _ = await self.post(model, {"inputs": list(inputs)} | more)
        return status, json.loads(data)

    async def refused(self, model: str, body: Any, phrase: str, status: int = 400) -> None:
        found, data, _ = await self.post(model, body)
        assert found == status, data
        assert phrase in json.loads(data)["error"]
        assert await self.alive()

    async def alive(self) -> bool:
        async with self.session.get(f"{self.base}/v2/health/live") as answer:
            return answer.status == 200

    async def get(self, path: str) -> Any:
        async with self.session.get(self.base + path) as answer:
            assert answer.status == 200
            return await answer.json()


@pytest_asyncio.fixture
async def caller(home: Path) -> AsyncIterator[Caller]:
    config = AgentConfig(
        models=home / "models",
        state_dir=home / "state",
        cache_dir=home / "cache",
        listen=Listen(http=HostPort("127.0.0.1:0")),
    )
    async with Daemon(config) as daemon, aiohttp.ClientSession() as session:
        async with asyncio.timeout(100):
            while any(m["state"] == "LOADING" or m["progress"] for m in daemon.service.status()["models"]):  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.02)
        yield Caller(session, daemon)


def floats(*values: float, shape: list[int] | None = None, **parameters: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": shape or [1, 3], "data": list(values)} | parameters


def as_binary(datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


HALF = as_binary("FP16", [3], 6) | {"name": "h"}

STRANGE_SHAPES = [
    ("-1", "shape"),
    ([-1, 16], "shape"),
    ([1.5], "shape"),
    ([True], "shape"),
    (None, "shape"),
    ([1] * 10_000, "shape"),
]


@pytest.mark.parametrize(("shape", "field"), STRANGE_SHAPES, ids=lambda value: str(value)[:12])
async def test_o_oi_01_a_shape_that_is_none_is_refused_by_the_fields_name(
    caller: Caller, shape: Any, field: str
) -> None:
    await caller.refused("net", {"inputs": [floats(1, 2, 3) | {"shape": shape}]}, field)


async def test_o_oi_01_a_made_up_datatype_and_a_missing_shape_are_refused_by_the_fields_name(caller: Caller) -> None:
    made_up = {"name": "x", "shape": "-1", "datatype": "STRING", "data": [{"b64": ".."}]}
    await caller.refused("net", {"inputs": [made_up]}, "shape")
    await caller.refused("net", {"inputs": [made_up | {"shape": [1]}]}, "datatype 'STRING'")
    await caller.refused("net", {"inputs": [{"name": "x", "datatype": "FP32", "data": [1, 2, 3]}]}, "shape")


async def test_o_oi_02_a_length_beyond_the_buffer_is_refused_and_a_huge_string_is_over_the_limit(
    caller: Caller,
) -> None:
    lying = struct.pack("<I", 0xFFFFFFFF) + b"four"
    status, data, _ = await caller.post("net", {"inputs": [as_binary("BYTES", [1], 8)]}, lying)
    assert status == 400
    assert "element 0 length exceeds buffer" in json.loads(data)["error"]
    reader, writer = await asyncio.open_connection(*caller.address.split(":"))
    writer.write(
        b"POST /v2/models/net/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: 99\r\n"
        b"Content-Length: 300000103\r\n\r\n"
    )
    assert b" 413 " in await reader.readline()  # before one byte of it is sent
    assert f"at most {BODY_LIMIT} are accepted".encode() in await reader.readuntil(b"}")
    writer.close()
    assert await caller.alive()


async def test_o_oi_03_what_json_cannot_carry_is_an_error_that_advises_binary_and_binary_keeps_the_bits(
    caller: Caller,
) -> None:
    bits = bytes.fromhex("0000c07f" "0000807f" "000080ff")  # fmt: skip
    asked = {"inputs": [as_binary("FP32", [1, 3], 12)], "outputs": [{"name": "y"}]}
    status, data, _ = await caller.post("net", asked, bits)
    assert 400 <= status < 600
    assert "binary" in json.loads(data, parse_constant=pytest.fail)["error"]
    status, data, length = await caller.post("net", asked | {"parameters": {"binary_data_output": True}}, bits)
    assert status == 200
    assert data[length:] == bits
    assert json.loads(data[:length])["outputs"][0]["shape"] == [1, 3]


@pytest.mark.parametrize("binary", [False, True])
async def test_o_oi_04_an_output_without_elements_keeps_its_shape_and_type(caller: Caller, binary: bool) -> None:
    nothing = {"name": "x", "datatype": "FP32", "shape": [0, 3], "data": []}
    status, data, length = await caller.post(
        "net", {"inputs": [nothing], "outputs": [{"name": "y"}], "parameters": {"binary_data_output": binary}}
    )
    assert status == 200
    [output] = json.loads(data[:length])["outputs"]
    expected = {"parameters": {"binary_data_size": 0}} if binary else {"data": []}
    assert output == {"name": "y", "datatype": "FP32", "shape": [0, 3]} | expected

    def stock() -> np.ndarray[Any, Any]:
        with triton.InferenceServerClient(caller.address) as client:
            tensor = triton.InferInput("x", [0, 3], "FP32")
            tensor.set_data_from_numpy(np.empty((0, 3), np.float32), binary_data=binary)
            answer = client.infer("net", [tensor], outputs=[triton.InferRequestedOutput("y", binary_data=binary)])
            return np.asarray(answer.as_numpy("y"))

    found = await asyncio.to_thread(stock)
    assert (found.shape, found.dtype) == ((0, 3), np.float32)


async def test_o_oi_05_half_precision_travels_as_bytes_and_not_as_json(caller: Caller) -> None:
    one_two_three = bytes.fromhex("003c00400042")
    asked = {"inputs": [HALF, floats(1, 2, shape=[2])], "outputs": [{"name": "k", "parameters": {"binary_data": True}}]}
    status, data, length = await caller.post("odd", asked, one_two_three)
    assert (status, data[length:]) == (200, one_two_three)
    assert json.loads(data[:length])["outputs"][0]["datatype"] == "FP16"
    as_json = {"name": "h", "datatype": "FP16", "shape": [3], "data": [1, 2, 3]}
    await caller.refused("odd", {"inputs": [as_json, floats(1, 2, shape=[2])]}, "FP16 has no JSON form")


async def test_o_oi_06_an_id_is_echoed_exactly_and_none_is_none(caller: Caller) -> None:
    _, answer = await caller.infer("net", floats(1, 2, 3))
    assert answer.get("id", "") == ""
    for name in ("", "a", "Ünïcode \\ \" 1", "7" * 1000):  # fmt: skip
        _, answer = await caller.infer("net", floats(1, 2, 3), id=name)
        assert answer.get("id", "") == name
    await caller.refused("net", {"inputs": [floats(1, 2, 3)], "id": "x" * (64 << 10)}, "id")
    await caller.refused("net", {"inputs": [floats(1, 2, 3)], "id": 7}, "id")


async def test_o_oi_07_nested_and_flat_data_are_the_same_and_a_v1_body_is_told_what_is_missing(
    caller: Caller,
) -> None:
    rows = [[6.8, 2.8, 4.8, 1.4], [6, 3.4, 4.5, 1.6]]
    nested, flat = [
        await caller.infer("net", floats(shape=[2, 4], data=data))
        for data in (rows, [value for row in rows for value in row])
    ]
    assert nested[0] == flat[0] == 200
    assert nested[1]["outputs"] == flat[1]["outputs"]
    assert nested[1]["outputs"][1]["data"] == (-np.float32(rows)).ravel().tolist()
    await caller.refused("net", {"instances": rows}, "inputs")


async def test_o_oi_08_of_64_callers_at_once_each_gets_its_own_rows(caller: Caller) -> None:
    """Nothing is merged on the device; whoever merges must pass this."""

    async def one(number: int) -> tuple[int, Any]:
        rows = [[number, row, -number] for row in range(1 + number % 3)]
        return await caller.infer("net", floats(shape=[len(rows), 3], data=rows), id=f"caller {number}")

    answers = await asyncio.gather(*(one(number) for number in range(64)))
    for number, (status, answer) in enumerate(answers):
        assert (status, answer["id"]) == (200, f"caller {number}")
        expected = [[number, row, -number] for row in range(1 + number % 3)]
        assert answer["outputs"][0]["shape"] == [len(expected), 3]
        assert answer["outputs"][0]["data"] == [value for row in expected for value in row]


async def test_o_oi_09_exactly_the_outputs_asked_for_come_each_in_its_own_encoding(caller: Caller) -> None:
    x = floats(1, 2, 3)
    _, answer = await caller.infer("net", x, outputs=[{"name": "z"}])
    assert [(one["name"], one["data"]) for one in answer["outputs"]] == [("z", [-1, -2, -3])]
    await caller.refused("net", {"inputs": [x], "outputs": [{"name": "zz"}]}, "'zz'")
    wishes = [{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}]
    status, data, length = await caller.post("net", {"inputs": [x], "outputs": wishes})
    assert status == 200
    assert json.loads(data[:length])["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]},
        {"name": "z", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}},
    ]
    assert data[length:] == np.float32([-1, -2, -3]).tobytes()


async def test_o_oi_11_the_work_of_a_hundred_callers_who_left_is_not_done(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, right = [], agent.local_finish.whole
    monkeypatch.setattr(agent.local_finish, "whole", lambda *how: runs.append(how) or right(*how))
    compute = caller.daemon.service._compute
    busy = threading.Event()
    compute.run(busy.wait, deadline_at_s=0.0, expected_ms=1000.0)
    try:
        leaving = [asyncio.create_task(caller.infer("net", floats(1, 2, 3))) for _ in range(100)]
        async with asyncio.timeout(30):
            while compute.waiting < 100:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
            for one in leaving:
                one.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            while compute.waiting:  # noqa: ASYNC110 - while the worker is still busy
                await asyncio.sleep(0.01)
        assert caller.daemon.service.status()["queue_ms"] <= 1000.0
        assert "isthmus_waiting_jobs 0.0" in caller.daemon.service.metrics().decode()
    finally:
        busy.set()
    assert (await caller.infer("net", floats(1, 2, 3)))[0] == 200
    assert len(runs) - 1 <= 1
    assert caller.daemon.service.status()["requests"] == 1


@pytest.mark.parametrize("value", [b"10000000000", b"-1", b"1e309", b'""', b"true"])
async def test_o_oi_13_a_number_out_of_range_is_refused_with_the_range(caller: Caller, value: bytes) -> None:
    """1e309 is no number of JSON's double precision: it is refused before anybody asks what it means."""
    asked = (
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}], "parameters": {"%s": %s}}'
    )
    for key, most in ((b"timeout", "3600000000"), (b"priority", "4294967295"), (b"isthmus.deadline_ms", "3600000")):
        await caller.refused("net", asked % (key, value), "" if value == b"1e309" else most)
    sized = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": %s}}]}'
    status, data, _ = await caller.post("net", sized % value, b"12 bytes ...")
    assert (status, "binary_data_size" in json.loads(data)["error"] or value == b"1e309") == (400, True)
    for path, body in (
        ("models/net/unload", b'{"parameters": {"unload_dependents": %s}}'),
        ("index", b'{"ready": %s}'),
    ):
        if value != b"true":  # which it may be
            async with caller.session.post(f"{caller.base}/v2/repository/{path}", data=body % value) as answer:
                assert (answer.status, list(await answer.json())) == (400, ["error"])
    assert await caller.get("/v2/models/net/ready") == {"name": "net", "ready": True}


async def test_o_oi_14_an_output_that_is_not_as_declared_comes_with_its_real_shape_and_is_declared_open_then(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = [{"name": "y"}]
    asked = {"inputs": [HALF, floats(1, 2, 3, shape=[3])], "outputs": wanted}
    for _ in range(2):
        status, data, length = await caller.post("odd", asked, bytes(6))
        assert status == 200
        [output] = json.loads(data[:length])["outputs"]
        assert output == {"name": "y", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}
        metadata = await caller.get("/v2/models/odd")
        assert metadata["outputs"][1] == {"name": "y", "datatype": "FP32", "shape": [-1]}
        assert metadata["outputs"][0] == {"name": "k", "datatype": "FP16", "shape": [3]}
    assert (await caller.get("/v2/models/odd/config"))["output"][1]["dims"] == [-1]
    [warning] = [one.getMessage() for one in caplog.records if "declared" in one.getMessage()]
    assert warning == "model odd: output 'y' is declared with shape [2] and came with [3]; from now on it is [-1]"


async def test_o_wi_15_a_batch_of_32_megabytes_passes_both_ways_and_over_the_limit_both_numbers_are_named(
    caller: Caller,
) -> None:
    """Over HTTP; the limit is for whole bodies."""
    pictures = np.random.default_rng(15).standard_normal((129 * 256, 256), np.float32)
    assert pictures.nbytes == 33_816_576
    asked = {"inputs": [as_binary("FP32", [129 * 256, 256], pictures.nbytes)]}
    wanted = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    status, data, length = await caller.post("net", asked | wanted, pictures.tobytes())
    assert status == 200
    assert data[length:] == pictures.tobytes()
    status, data, _ = await caller.post("net", bytes(BODY_LIMIT + 1))
    assert status == 413
    assert f"has {BODY_LIMIT + 1} bytes" in json.loads(data)["error"]
    assert f"at most {BODY_LIMIT} " in json.loads(data)["error"]
