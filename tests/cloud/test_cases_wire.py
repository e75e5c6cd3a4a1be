"""The wire cases of the case list that concern the companion, each by its id."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
from pathlib import Path

import numpy as np
import pytest

from cloud.accept import Reception
from scripts.wire_vectors import HELLO, message
from split.codec.payload import encode
from split.identity.certificates import issue, make_authority
from split.identity.contexts import client_context
from split.transport.listener import listen
from split.transport.tls import dial
from split.wire.limits import KIB
from split.wire.messages import Hello, ModelNeed, ModelReady, Pong, Priority, Refused, Reply
from split.wire.outbox import Outgoing


async def test_o_wi_08_an_element_type_255_is_refused_by_its_number_and_the_next_request_is_answered(
    house, chain, feeds
):
    """The number stands in a request's payload, so the refusal is about that request: the connection need not end."""
    device = house.connect()
    await device.bring(chain)
    message, _ = chain.infer(feeds, request_id="bad")
    payload = bytearray(b"".join(encode({"x": np.zeros(3, np.float32)}, "raw")))
    payload[18] = 255  # PAYLOAD.md: 16 bytes of preamble, 2 of the name's length, then the element type
    device.channel.send(message, [payload])
    refused = await device.next()
    assert isinstance(refused, Refused)
    assert (refused.code, refused.request_id) == ("CODEC_ERROR", "bad")
    assert "255" in refused.message
    again = house.connect()
    await again.ask(chain.offer)
    await again.next()
    for one in (device, again):
        one.channel.send(*chain.infer(feeds, request_id="good"))
        assert isinstance(await one.next(), Reply)


async def test_o_wi_10_a_thousand_control_messages_of_random_bytes_cost_no_valid_one(
    house, chain, feeds, caplog: pytest.LogCaptureFixture
):
    """From 1 byte to 64 KiB: a message without metadata cannot be put into a frame, so it is no message at all."""
    device = house.connect()
    await device.bring(chain)
    noise = random.Random(10)
    with caplog.at_level(logging.WARNING):
        for number in range(1_000):
            junk = b"\xc1" + noise.randbytes(noise.randrange(64 * KIB))
            device.channel._connection._outbox.put(Outgoing(Pong(nonce=0), junk, (), Priority.CONTROL))
            if number % 50 == 0:
                device.channel.send(*chain.infer(feeds, request_id=f"{number}"))
                assert (await device.next()).request_id == f"{number}"
    device.channel.send(*chain.infer(feeds, request_id="last"))
    assert (await device.next()).request_id == "last"
    assert device.session._channel.invalid_messages == 1_000
    assert "isthmus_cloud_invalid_messages_total 1000.0" in house.companion.metrics.exposition().decode()
    lines = [one for one in caplog.records if "make no sense" in one.getMessage()]
    seconds = lines[-1].created - lines[0].created
    assert 1 <= len(lines) <= 2 + seconds, "one a second at most"


async def test_o_wi_11_a_device_that_resets_in_the_middle_of_a_frame_a_hundred_times_harms_nobody(
    house, chain, feeds, tmp_path: Path
):
    make_authority(tmp_path / "ca")
    identity = issue(tmp_path / "ca", "companion", "companion", tmp_path / "companion")
    device = issue(tmp_path / "ca", "camera-1", "device", tmp_path / "device")
    await house.connect().bring(chain)
    known = {"major": 1, "minor": 1, "agent": "test", "runtime": "test", "codecs": ("raw",)}
    reception, greeting = Reception(house.companion), Hello(max_message_bytes=1 << 26, **known)
    listener = await listen(
        "127.0.0.1",
        0,
        identity=identity,
        make_hello=lambda: greeting,
        on_channel=reception.receive,
        max_sessions=8,
    )
    try:
        asked, payload = chain.infer(feeds)
        fields = {
            name: getattr(asked, name) for name in ("request_id", "attempt", "digest", "cut", "codec", "budget_ms")
        }
        half = message(2, {"t": "infer"} | fields, b"".join(payload))[:-7]
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client_context(device))
            writer.write(message(1, HELLO, priority=0) + half)
            await writer.drain()
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() is a reset then
            writer.transport.abort()
        channel = await dial("127.0.0.1", listener.port, identity=device, hello=greeting, timeout_s=30)
        channel.send(chain.offer)
        assert isinstance((await channel.receive()).message, ModelNeed)
        assert isinstance((await channel.receive()).message, ModelReady)
        channel.send(asked, payload)
        assert isinstance((await channel.receive()).message, Reply)
        await channel.close("done")
    finally:
        await listener.close()
    assert 'isthmus_cloud_requests_total{outcome="ok"} 1.0' in house.companion.metrics.exposition().decode()
    assert house.companion.admission.inflight_requests == 0
