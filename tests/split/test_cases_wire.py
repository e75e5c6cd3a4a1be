"""The wire cases of the case list that concern the channel alone, each by its id."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from split.errors import Overloaded
from split.transport.memory import memory_pair
from split.wire.limits import MIB
from split.wire.messages import Cancel, Hello, Infer, Ping, Pong, Priority


def hello() -> Hello:
    known: dict[str, Any] = {"major": 1, "minor": 1, "agent": "test", "runtime": "none", "codecs": ("raw",)}
    return Hello(max_message_bytes=256 * MIB, window_bytes=16 * MIB, **known)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("stops", ["its program takes nothing", "its stream is not read"])
async def test_o_wi_02_a_thousand_activations_for_a_receiver_that_stops_reading_cost_the_cap(stops: str) -> None:
    """Both ends are in this process: the sender's queue of 8 MiB, and what the receiver's window lets wait unread."""
    device, companion = memory_pair(hello(), hello())
    if stops == "its stream is not read":
        device.freeze()
    before = resident_bytes()
    refused = 0
    for number in range(1_000):
        try:
            asked = Infer(request_id=str(number), attempt=1, digest="d", cut="c", codec="raw", budget_ms=5.0)
            device.send(asked, [bytes(MIB)])
        except Overloaded:
            refused += 1
        assert device.queued_bytes <= 8 * MIB
    assert resident_bytes() - before <= (8 + 20) * MIB
    assert refused >= 1_000 - 8 - 17
    if stops == "its program takes nothing":
        device.send(Ping(nonce=1), priority=Priority.CONTROL)
        assert (await device.receive()).message == Pong(nonce=1)
    device.send(Cancel(request_id="0", attempt=1), priority=Priority.CONTROL)
    device.thaw()
    names = []
    for _ in range(1_000 - refused + 1):
        message = (await companion.receive()).message
        names.append("cancel" if isinstance(message, Cancel) else message.request_id)  # type: ignore[union-attr]  # only Infers else
    assert len(set(names)) == 1_000 - refused + 1
    assert device.queued_bytes == 0
