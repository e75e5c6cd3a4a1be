"""How a companion is dialled and which one is used, in virtual time. Over real sockets: `test_dialler.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path

import pytest

from split.plan.plan import Placement, Plan
from split.transport.virtual_time import run_in_virtual_time
from tests.agent.uplink_world import (
    CUTS,
    HOST,
    TENSOR,
    World,
    running,
    story,
)


@story
async def test_of_two_companions_that_answer_one_is_used_and_the_other_hung_up_on(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1", "three:1"), dead={"one:1"})) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        assert world.uplink.address == "two:1"
        world.companion_end.kill()
        await world.until(lambda: world.uplink.connects == 2)
        assert world.uplink.address == "three:1"
        await asyncio.sleep(5)
        used = world.companion_end
        assert [end.closed_because is None for _, _, end in world.connected] == [
            end is used for _, _, end in world.connected
        ]


@story
async def test_what_was_learned_of_one_companion_and_its_link_is_not_taken_for_anothers(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(30)  # pings
        world.planner.observe_cloud("m", Plan(placement=Placement.OFFLOAD, codec="raw"), 500.0, 10.0)
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] < 1.0
        world.delay_s, world.refused = 1.0, {"one:1"}
        world.companion_end.kill()
        await world.until(lambda: world.uplink.connects == 2)
        assert world.planner.snapshot(world.now)["link"] == {}
        await world.until(lambda: world.why() == "")
        chosen = world.planner.decide(
            "m", dataclasses.replace(TENSOR, mode=Placement.OFFLOAD), edge_queue_ms=0.0, now_s=world.now
        ).chosen
        assert chosen.stages_ms["cloud_queue"] == 0.0
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] > 500.0


@story
async def test_the_status_names_every_address_that_cannot_be_reached(tmp_path: Path) -> None:
    world = World(tmp_path, companions=("one:1", "two:1"), refused={"one:1", "two:1"})
    async with running(world):
        await world.until(lambda: world.uplink.state.startswith("cannot connect"))
        assert world.uplink.state == world.why() == "cannot connect: one:1 refused (REFUSED); two:1 refused (REFUSED)"


@story
async def test_a_certificate_that_is_refused_everywhere_is_not_shown_twice_a_second(tmp_path: Path) -> None:
    world = World(tmp_path, wrong={HOST})
    async with running(world):
        await asyncio.sleep(300)
        assert 3 <= len(world.dialled) <= 6
        assert "another CA" in world.why()


@story
async def test_o_wi_16_of_one_live_and_three_dead_companions_the_live_one_is_used_within_600_ms(tmp_path: Path) -> None:
    drops, resets, impostor, live = "drops:1", "resets:1", "impostor:1", "live:1"
    world = World(
        tmp_path,
        companions=(drops, resets, impostor, live),
        dead={drops},
        refused={resets},
        wrong={impostor},
        handshake_s=0.12,  # at 40 ms a round trip
        draw=0.999,
    )
    async with running(world):
        assert await world.until(lambda: world.uplink.state == "connected") <= 0.6
        assert world.uplink.address == live
        dialled = len(world.dialled)
        await asyncio.sleep(30)
        assert len(world.dialled) == dialled  # no need for the others
        assert {one.address: one.code for one in world.uplink.unreached} == {
            drops: "TIMEOUT",
            resets: "REFUSED",
            impostor: "SECURITY",
        }
        # Without the live one all are dialled, each at its own pace: a wrong certificate every minute.
        world.refused.add(live)
        world.companion_end.kill()
        await asyncio.sleep(600)
        at_s = {name: [at for at, address in world.dialled if address == name] for name in world.companions}
        assert min(later - earlier for earlier, later in itertools.pairwise(at_s[impostor])) >= 60.0
        assert 8 <= len(at_s[impostor]) <= 11
        for name in (resets, live):
            assert 600 / 1.65 <= len(at_s[name]) <= 600 / 1.6  # 1.5 s and the handshake
        assert "another CA (SECURITY)" in world.why()


@story
async def test_a_wrong_certificate_waits_out_its_minute_however_often_the_network_changes(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("impostor:1", HOST), wrong={"impostor:1"}, refused={HOST})) as world:
        for _ in range(50):
            await asyncio.sleep(1.0)
            world.uplink.network_changed()
        await asyncio.sleep(5.0)
        assert [address for _, address in world.dialled].count("impostor:1") == 1
        assert [address for _, address in world.dialled].count(HOST) > 50


@story
async def test_with_another_certificate_the_minute_of_the_wrong_one_is_over_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, wrong={HOST})
    async with running(world):
        await asyncio.sleep(20.0)
        assert len(world.dialled) == 1
        world.identity_is = "renewed"
        await asyncio.sleep(1.5)
        assert len(world.dialled) == 2
        await asyncio.sleep(40.0)
        assert len(world.dialled) == 2  # that one is wrong, too, and waits its own minute
        world.wrong.clear()
        world.identity_is = "renewed again"
        await world.until(lambda: world.uplink.state == "connected", within_s=1.5)


@pytest.mark.parametrize("why", ["TIMEOUT", "REFUSED", "SECURITY"])
def test_o_wi_17_a_port_that_opens_after_a_minute_is_used_and_until_then_the_reason_is_shown(
    tmp_path: Path, why: str
) -> None:
    async def main() -> None:
        world = World(tmp_path, draw=0.999)
        closed = {"TIMEOUT": world.dead, "REFUSED": world.refused, "SECURITY": world.wrong}[why]
        closed.add(HOST)
        async with running(world):
            for _ in range(60):
                await asyncio.sleep(1.0)
                assert world.placement("m", CUTS[0]) == "local"
                assert world.now < 5.0 or f"({why})" in world.uplink.state == world.why()
            closed.clear()
            bound_s = 10.0 if why != "SECURITY" else 65.0
            assert await world.until(lambda: world.opened() == set(CUTS)) <= bound_s
            assert world.uplink.unreached == []

    run_in_virtual_time(main())


@pytest.mark.parametrize("rtt_s", [0.04, 0.25, 0.6, 1.0, 1.3])
def test_a_link_of_long_round_trips_connects(tmp_path: Path, rtt_s: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path, handshake_s=3 * rtt_s)) as world:
            await world.until(lambda: world.uplink.state == "connected", within_s=9.0)
            # And what was learned of it is kept.
            connected = len(world.dialled)
            world.companion_end.kill()
            await world.until(lambda: world.uplink.connects == 2)
            assert len(world.dialled) == connected + 1

    run_in_virtual_time(main())
