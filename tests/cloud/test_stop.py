"""How a companion's process ends: asked to, it answers what it took; killed, nothing half-written is trusted later."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from cloud.config import load_config
from cloud.identity import authority_folder, make_identity
from split.codec.payload import decode
from split.errors import ConnectionLost
from split.identity.certificates import Identity, issue
from split.transport.tls import TlsChannel, dial
from split.wire.messages import Goodbye, Hello, ModelChunk, ModelNeed, ModelReady, Refused, Reply

HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 26, codecs=("raw",))

SLOW = """
<ir_version: 8, opset_import: ["" : 17]>
slow (float[1] x) => (float[1] y)
{
    trips = Constant <value = int64 {100000}> ()
    go = Constant <value = bool {1}> ()
    y = Loop (trips, go, x) <body = body (int64 i, bool c, float[1] v) => (bool c2, float[1] v2) {
        c2 = Identity (c)
        v2 = Neg (v)
    }>
}
"""
"""A tenth of a second; an even number of negations: y = x."""


class Home:
    """A companion's files, and its process each time it is started on them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "companion.yaml"
        self.path.write_text(
            "{state_dir: state, cache_dir: cache, listen: '127.0.0.1:0', http: null, "
            "identity: {cert: id/cert.pem, key: id/key.pem, ca: id/ca.pem}}"
        )
        config = load_config(self.path, {})
        make_identity(config, "companion")
        self.device: Identity = issue(authority_folder(config), "camera-1", "device", folder / "camera-1")
        self.log = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, TlsChannel]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cloud.cli", "serve", "--config", str(self.path)), stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        self.log = ""
        try:
            async with asyncio.timeout(90):
                while not (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", self.log)):
                    line = await process.stderr.readline()
                    assert line, self.log
                    self.log += line.decode()
                channel = await dial("127.0.0.1", int(found[1]), identity=self.device, hello=HELLO, timeout_s=20)
                yield process, channel
                await channel.close("done")
        finally:
            if process.returncode is None:
                process.kill()
            self.log += (await process.communicate())[1].decode()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def send_file(channel, model, start: int, end: int | None = None) -> None:
    data = model.path.read_bytes()
    end = len(data) if end is None else end
    chunk = ModelChunk(digest=model.digest, file="model.onnx", offset=start, last=end == len(data))
    channel.send(chunk, [data[start:end]])


async def test_asked_to_stop_it_says_goodbye_answers_what_it_took_and_ends_with_0(home, make_model):
    model = make_model(SLOW)
    x = np.array([3.5], np.float32)
    async with home.running() as (process, channel):
        channel.send(model.offer)
        await channel.receive()
        send_file(channel, model, 0)
        assert isinstance((await channel.receive()).message, ModelReady)
        channel.send(*model.infer({"x": x}, request_id="taken"))
        channel.send(*model.infer({"x": x}, request_id="barrier", cut="none"))
        assert isinstance((await channel.receive()).message, Refused)  # so the one before it was taken
        process.send_signal(signal.SIGTERM)
        assert isinstance((await channel.receive()).message, Goodbye)
        incoming = await channel.receive()
        assert isinstance(incoming.message, Reply)
        assert incoming.message.request_id == "taken"
        assert decode(incoming.payload, max_bytes=1000)["y"] == x
        with pytest.raises(ConnectionLost):
            await channel.receive()
        assert await process.wait() == 0
    assert "Traceback" not in home.log


async def test_killed_at_any_step_it_resumes_and_answers_right(home, chain, feeds):
    half = chain.path.stat().st_size // 2

    async def kill(process, channel) -> None:
        process.kill()
        with contextlib.suppress(ConnectionLost):
            while True:
                await channel.receive()

    async with home.running() as (process, channel):  # while the model is sent
        channel.send(chain.offer)
        await channel.receive()
        send_file(channel, chain, 0, half)
        channel.send(chain.offer)  # answered once what was sent before it is stored
        assert (await channel.receive()).message == ModelNeed(digest=chain.digest, missing=(("model.onnx", half),))
        await kill(process, channel)
    async with home.running() as (process, channel):  # while it is checked and cut
        channel.send(chain.offer)
        assert (await channel.receive()).message == ModelNeed(digest=chain.digest, missing=(("model.onnx", half),))
        send_file(channel, chain, half)
        channel.send(*chain.infer(feeds))
        assert isinstance((await channel.receive()).message, Refused)  # the last piece was stored before
        await kill(process, channel)
    cache = home.path.parent / "cache" / "models"
    for file in cache.rglob("*"):  # and what had been made meanwhile is cut short, as by a power cut
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-7])
    async with home.running() as (_, channel):
        channel.send(chain.offer)
        need = (await channel.receive()).message
        assert isinstance(need, ModelNeed)
        if need.missing:
            send_file(channel, chain, need.missing[0][1])
        ready = (await channel.receive()).message
        assert isinstance(ready, ModelReady), ready
        channel.send(*chain.infer(feeds))
        incoming = await channel.receive()
        outputs = decode(incoming.payload, max_bytes=1 << 20)
        expected = chain.whole(feeds)
        assert outputs.keys() == expected.keys()
        assert all(np.allclose(outputs[name], expected[name], rtol=1e-5) for name in expected)
    assert "Traceback" not in home.log


async def test_a_companion_that_holds_a_thousand_models_greets_all_the_same(home: Home, tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / "state" / "models" / f"{number:064x}" / "files").mkdir(parents=True)
    async with home.running() as (_, channel):
        assert 0 < len(channel.peer_hello.models) < 1000
