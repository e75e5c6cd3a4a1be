"""Who may come in, what a bug in one session does to the others, and how all are sent home."""

from __future__ import annotations

import asyncio

import pytest

from cloud.accept import SESSIONS_PER_DEVICE, Reception
from cloud.session import Session
from split.errors import ConnectionLost
from split.transport.channel import PeerIdentity
from split.transport.memory import memory_pair
from split.wire.messages import Goodbye, Hello, ModelNeed, Refused

HELLO = Hello(major=1, minor=0, agent="test", runtime="test", max_message_bytes=1 << 20, codecs=("raw",))


def connect(reception, name="camera-1", role="device", **serials):
    device, companion = memory_pair(HELLO, HELLO, device=PeerIdentity(name=name, role=role, **serials))
    return device, asyncio.create_task(reception.receive(companion))


async def test_only_devices_are_served(house):
    reception = Reception(house.companion)
    channel, task = connect(reception, role="companion")
    await task
    with pytest.raises(ConnectionLost):
        await channel.receive()
    assert reception.sessions == 0


async def test_a_bug_met_in_one_session_ends_that_session_only(house, chain, monkeypatch, caplog):
    reception = Reception(house.companion)
    channel, task = connect(reception)
    other, other_task = connect(reception, "camera-2")

    async def broken(self, incoming):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "_take", broken)
        channel.send(chain.offer)
        await task
    assert "session failed device=camera-1" in caplog.text
    other.send(chain.offer)
    assert isinstance((await other.receive()).message, ModelNeed)
    assert reception.sessions == 1
    await other.close("done")
    await other_task
    assert reception.sessions == 0


@pytest.mark.parametrize("revoked", [17, 18])
async def test_revoking_the_certificate_of_either_connection_ends_the_session(house, revoked):
    reception = Reception(house.companion)
    channel, task = connect(reception, serial=17, bulk_serial=18)
    other, other_task = connect(reception, "camera-2", serial=19)
    await asyncio.sleep(0)
    reception.revoke({revoked})
    await task
    with pytest.raises(ConnectionLost, match="your certificate was revoked"):
        await channel.receive()
    assert reception.sessions == 1
    reception.revoke({0})
    assert reception.sessions == 1
    await other.close("done")
    await other_task


async def test_all_are_sent_home_and_nobody_comes_in_any_more(house):
    reception = Reception(house.companion)
    devices = [connect(reception, f"camera-{number}") for number in range(3)]
    await asyncio.sleep(0)
    await reception.send_home("stopping", within_s=5)
    for channel, task in devices:
        assert (await channel.receive()).message == Goodbye(reason="stopping")
        with pytest.raises(ConnectionLost):
            await channel.receive()
        await task
    late, task = connect(reception)
    await task
    with pytest.raises(ConnectionLost):
        await late.receive()


async def test_a_request_that_does_not_end_does_not_keep_the_companion_from_closing(house, chain, feeds):
    import threading

    reception = Reception(house.companion)
    channel, task = connect(reception)
    channel.send(chain.offer)
    await channel.receive()
    from split.wire.messages import ModelChunk

    channel.send(ModelChunk(digest=chain.digest, file="model.onnx", offset=0, last=True), [chain.path.read_bytes()])
    await channel.receive()
    release, get = threading.Event(), house.companion.executor._segments.get
    house.companion.executor._segments.get = lambda path: (release.wait(30), get(path))[1]
    channel.send(*chain.infer(feeds))
    channel.send(*chain.infer(feeds, request_id="refused", digest="sha256:" + "0" * 64))
    assert isinstance((await channel.receive()).message, Refused)
    await reception.send_home("stopping", within_s=0)
    await task
    release.set()
    assert house.companion.admission.inflight_requests == 0


async def test_a_flapping_device_displaces_its_own_oldest_session_and_nobody_elses(house, chain):
    reception = Reception(house.companion)
    other, other_task = connect(reception, "camera-2")
    mine = [connect(reception) for _ in range(SESSIONS_PER_DEVICE)]
    await asyncio.sleep(0)
    assert reception.sessions == 1 + SESSIONS_PER_DEVICE
    mine += [connect(reception) for _ in range(2)]
    for channel, task in mine[:2]:
        goodbye = (await channel.receive()).message
        assert isinstance(goodbye, Goodbye)
        assert goodbye.reason.startswith("camera-1 has more than 4 sessions here")
        with pytest.raises(ConnectionLost):
            await channel.receive()
        await task
    assert reception.sessions == 1 + SESSIONS_PER_DEVICE
    for channel, task in [(other, other_task), *mine[2:]]:
        channel.send(chain.offer)
        assert isinstance((await channel.receive()).message, ModelNeed)
        await channel.close("done")
        await task
    assert reception.sessions == 0


async def test_where_all_places_are_taken_a_device_makes_room_for_itself_and_nobody_else_for_it(house, chain):
    reception = Reception(house.companion)
    mine = [connect(reception) for _ in range(2)]
    other, other_task = connect(reception, "camera-2")
    await asyncio.sleep(0)
    assert not reception.make_room("camera-3")
    assert reception.make_room("camera-1")
    channel, task = mine[0]
    goodbye = (await channel.receive()).message
    assert isinstance(goodbye, Goodbye)
    assert goodbye.reason.startswith("all places are taken here")
    with pytest.raises(ConnectionLost):
        await channel.receive()
    await task
    for channel, task in [(other, other_task), mine[1]]:
        channel.send(chain.offer)
        assert isinstance((await channel.receive()).message, ModelNeed)
        await channel.close("done")
        await task
