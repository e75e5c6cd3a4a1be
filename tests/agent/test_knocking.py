"""A way that was broken is found open before TCP tries again: in virtual time, the kernel's words made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import MethodType

import pytest

from agent.knocking import EVERY_S, FOR_S, TIMEOUT_S, TIMEOUTS
from split.transport.channel import LinkFacts, Observation
from split.transport.memory import MemoryChannel
from tests.agent.uplink_world import CUTS, HOST, World, running, story


def facts(timeouts: int) -> LinkFacts:
    return LinkFacts(
        lane="",
        congestion_control="bbr",
        rtt_ms=10.0,
        rtt_var_ms=1.0,
        min_rtt_ms=10.0,
        rate_bytes_per_s=1e6,
        app_limited=True,
        cwnd_bytes=14_480,
        unacked_bytes=1_448 if timeouts else 0,
        unsent_bytes=0,
        acked_bytes=1_000,
        retransmits=timeouts,
        frame_bytes=16_384,
        timeouts=timeouts,
    )


class Kernel:
    """Of a device in this world: retransmission timers, and who answers a SYN."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.knocked: list[float] = []
        self.broken_at_s: float | None = None
        world.uplink._knock = self.knock

    async def knock(self, address: str, port: int, timeout_s: float) -> bool:
        assert (address, port, timeout_s) == ("10.0.0.2", 1, TIMEOUT_S)
        self.knocked.append(self.world.now)
        if HOST in self.world.dead:
            await asyncio.sleep(timeout_s)
        return HOST not in self.world.dead

    def watch(self, channel: MemoryChannel) -> None:
        def observe(_: MemoryChannel) -> Observation:
            # 0.2 s, 0.4, 0.8, … : after 0.6 s it has run out twice
            stuck = self.broken_at_s is not None and self.world.now - self.broken_at_s >= 0.6
            connections = (facts(TIMEOUTS if stuck else TIMEOUTS - 1),)
            return Observation(sent_bytes=0, received_bytes=0, queued_bytes=0, connections=connections)

        channel.observe = MethodType(observe, channel)  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _at_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryChannel, "ends", property(lambda _: ("10.0.0.1", "10.0.0.2")))


@story
async def test_remote_use_is_back_within_half_a_second_of_a_short_break(tmp_path: Path) -> None:
    world = World(tmp_path)
    kernel = Kernel(world)
    async with running(world):
        await world.until(lambda: world.opened() == set(CUTS))
        _, device, companion = world.connected[-1]
        kernel.watch(device)
        waiting = world.ask()
        device.freeze()
        companion.freeze()  # for good: TCP's timer is far away
        kernel.broken_at_s = world.now
        world.dead.add(HOST)
        await asyncio.sleep(2.5)
        assert "acknowledges nothing" in world.why()
        assert len(world.dialled) == 1, "nothing is dialled while nothing answers"
        world.dead.discard(HOST)
        await world.until(lambda: world.opened() == set(CUTS), within_s=EVERY_S + 0.1)
        assert world.uplink.connects == 2
        waiting.cancel()


@story
async def test_a_connection_that_wakes_first_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, handshake_s=1.0)
    kernel = Kernel(world)
    async with running(world):
        await world.until(lambda: world.opened() == set(CUTS))
        _, device, companion = world.connected[-1]
        kernel.watch(device)
        waiting = world.ask()
        device.freeze()
        companion.freeze()
        kernel.broken_at_s = world.now
        world.dead.add(HOST)
        await asyncio.sleep(2.5)
        world.dead.discard(HOST)
        await asyncio.sleep(0.5)
        assert len(world.dialled) == 2
        kernel.broken_at_s = None
        device.thaw()
        companion.thaw()
        await world.until(lambda: world.opened() == set(CUTS), within_s=0.5)
        await asyncio.sleep(5)
        assert world.uplink.connects == 1
        assert world.uplink.state == "connected"
        waiting.cancel()


@story
async def test_nobody_knocks_for_ever_nor_where_bytes_are_acknowledged(tmp_path: Path) -> None:
    world = World(tmp_path)
    kernel = Kernel(world)
    async with running(world):
        await world.until(lambda: world.opened() == set(CUTS))
        _, device, _ = world.connected[-1]
        kernel.watch(device)
        waiting = world.ask()
        await asyncio.sleep(1)
        assert kernel.knocked == []
        device.freeze()
        kernel.broken_at_s = world.now
        world.dead.add(HOST)
        await asyncio.sleep(FOR_S + 20)
        assert FOR_S / EVERY_S - 5 <= len(kernel.knocked) <= FOR_S / EVERY_S + 1
        waiting.cancel()
