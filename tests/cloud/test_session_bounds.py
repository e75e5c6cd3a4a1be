"""What one device may have open at once, and that reaching it costs the rest nothing."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from split.codec.payload import encode
from split.errors import CodecError, ConnectionLost, EngineFailed
from split.wire.messages import Cancel, ModelReady, Ping, Pong, Priority, Refused, Reply, SegmentOpen, SegmentReady

OTHER = """
<ir_version: 8, opset_import: ["" : 17]>
other (float[2] x) => (float[2] y) { y = Sin (x) }
"""


async def test_a_device_opens_a_bounded_number_of_models_and_those_it_has_answer_on(
    house, make_model, chain, feeds, monkeypatch
):
    monkeypatch.setattr("cloud.openings.MAX_MODELS", 1)
    device = house.connect()
    await device.bring(chain)
    refused = await device.ask(make_model(OTHER).offer)
    assert (type(refused), refused.code) == (Refused, "OVERLOADED")
    device.channel.send(*chain.infer(feeds))
    assert isinstance(await device.next(), Reply)
    assert isinstance(await house.connect("camera-2").bring(make_model(OTHER)), ModelReady)


async def test_a_device_opens_a_bounded_number_of_cuts_at_once(house, chain, monkeypatch):
    monkeypatch.setattr("cloud.openings.MAX_SETUPS", 1)
    device = house.connect()
    await device.bring(chain)
    go, rehearse = asyncio.Event(), house.companion.segments.rehearse

    async def held(*arguments):
        await go.wait()
        await rehearse(*arguments)

    monkeypatch.setattr(house.companion.segments, "rehearse", held)
    cut = chain.card.cuts[0]
    wanted = SegmentOpen(digest=chain.digest, cut=cut.id, node_bitmap=cut.node_bitmap)
    device.channel.send(wanted)
    refused = await device.ask(wanted)
    assert (type(refused), refused.code, refused.cut) == (Refused, "OVERLOADED", cut.id)
    go.set()
    assert isinstance(await device.next(), SegmentReady)
    assert isinstance(await device.ask(wanted), SegmentReady)


async def test_one_device_that_floods_leaves_room_for_another(make_house, chain, feeds):
    house = make_house()
    house.companion.admission._bounds = type(house.companion.admission._bounds)(
        inflight_bytes=1 << 20, device_bytes=1 << 20, device_requests=3
    )
    greedy, modest = house.connect("camera-1"), house.connect("camera-2")
    await greedy.bring(chain)
    await modest.bring(chain)
    segments = house.companion.executor._segments
    release, get = asyncio.Event(), segments.get
    loop = asyncio.get_running_loop()
    segments.get = lambda path: (asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30), get(path))[1]
    for number in range(10):
        greedy.channel.send(*chain.infer(feeds, request_id=f"{number}"))
    for _ in range(7):
        refused = await greedy.next()
        assert (type(refused), refused.code) == (Refused, "OVERLOADED")
    modest.channel.send(*chain.infer(feeds))
    release.set()
    assert isinstance(await modest.next(), Reply)
    assert [type(await greedy.next()) for _ in range(3)] == [Reply] * 3


@pytest.mark.parametrize("codec", ["int8", "raw"])
async def test_what_a_request_becomes_when_it_is_decoded_counts_not_what_was_sent(make_house, chain, codec):
    """A payload says itself how it is packed, whatever codec the message names."""
    house = make_house(inflight_bytes=1 << 20)
    device = house.connect()
    await device.bring(chain)
    zeros = {"x": np.zeros((60_000, 4), np.float32), "bias": np.zeros(4, np.float32)}
    payload = encode(zeros, "int8")
    assert sum(len(part) for part in payload) < 1 << 14
    held = asyncio.Event()

    async def run(work):
        await held.wait()
        raise EngineFailed("not today")

    house.companion.executor.run = run
    for number in range(3):
        message, _ = chain.infer(zeros, request_id=f"{number}", codec=codec)
        device.channel.send(message, payload)
    refused = [await device.next() for _ in range(2)]
    assert [(type(each), each.code) for each in refused] == [(Refused, "OVERLOADED")] * 2
    assert house.companion.admission.inflight_bytes > 900_000
    held.set()
    assert (await device.next()).code == "ENGINE_FAILED"
    await device.session.drained()
    assert house.companion.admission.inflight_bytes == 0


async def test_thousands_of_tensors_where_two_are_taken_are_refused_by_their_number(house, chain, feeds):
    """Reading what each of them is called takes the event loop 30 ms, which are everybody's."""
    device = house.connect()
    await device.bring(chain)
    many = {f"t{number}": np.zeros(0, np.float32) for number in range(4_000)}
    device.channel.send(*chain.infer(many))
    refused = await device.next()
    assert (type(refused), refused.code) == (Refused, "CODEC_ERROR")
    assert "claims 4000 tensors" in refused.message
    device.channel.send(*chain.infer(feeds, request_id="2"))
    assert isinstance(await device.next(), Reply)


async def test_a_request_that_is_cancelled_while_a_thread_decodes_it_counts_until_that_ends(house, chain, monkeypatch):
    """What a thread has begun takes its memory to the end: cancelling again and again frees none of it."""
    device = house.connect()
    await device.bring(chain)
    began, go, ended = threading.Event(), threading.Event(), []

    def slow(payload, *, max_bytes, tables):
        began.set()
        assert go.wait(30)
        ended.append(max_bytes)
        raise CodecError("nobody is told")

    monkeypatch.setattr("cloud.requests.decode", slow)
    zeros = {"x": np.zeros((60_000, 4), np.float32), "bias": np.zeros(4, np.float32)}
    device.channel.send(*chain.infer(zeros, codec="int8"))
    assert await asyncio.to_thread(began.wait, 30)
    admission = house.companion.admission
    for _ in range(3):
        device.channel.send(Cancel(request_id="1", attempt=1), priority=Priority.CONTROL)
    device.channel.send(Ping(nonce=1), priority=Priority.CONTROL)
    assert await device.next() == Pong(nonce=1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert admission.inflight_bytes > 900_000
    go.set()
    await device.session.drained()
    assert (admission.inflight_bytes, len(ended)) == (0, 1)


async def test_a_pong_has_the_padding_that_was_asked_for_and_nobody_gets_more_than_32_kib(house):
    device = house.connect()
    device.channel.send(Ping(nonce=1, pong_bytes=32_768), priority=Priority.CONTROL)
    assert await device.next() == Pong(nonce=1, padding=bytes(32_768))
    device.channel.send(Ping(nonce=2, pong_bytes=32_769), priority=Priority.CONTROL)
    with pytest.raises(ConnectionLost, match=r"0 to 32768 bytes of padding.*PROTOCOL_ERROR"):
        await device.next()


async def test_a_request_that_is_cancelled_before_a_thread_has_begun_it_is_not_decoded(house, chain, monkeypatch):
    device = house.connect()
    await device.bring(chain)
    decoded = []
    monkeypatch.setattr("cloud.requests.decode", lambda payload, *, max_bytes, tables: decoded.append(max_bytes))
    pool, go = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(pool)
    busy = asyncio.create_task(asyncio.to_thread(go.wait, 30))
    zeros = {"x": np.zeros((60_000, 4), np.float32), "bias": np.zeros(4, np.float32)}
    device.channel.send(*chain.infer(zeros, codec="int8"))
    while not house.companion.admission.inflight_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    device.channel.send(Cancel(request_id="1", attempt=1), priority=Priority.CONTROL)
    for _ in range(20):
        await asyncio.sleep(0)
    go.set()
    await busy
    await device.session.drained()
    assert decoded == []
