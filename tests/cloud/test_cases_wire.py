"""The wire cases of the case list that concern the companion, each by its id."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

from split.codec.payload import encode
from split.wire.limits import KIB
from split.wire.messages import Pong, Priority, Refused, Reply
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
