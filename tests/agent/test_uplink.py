"""A connection and its end, in virtual time: goodbye, silence, restarts, a network that changes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agent.heartbeat import SILENCE_S
from split.errors import (
    ConnectionLost,
)
from split.ids import ModelDigest
from split.plan.plan import Placement
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Goodbye, Infer, Message, ModelOffer, Pace, Refused, Renew
from tests.agent.uplink_world import (
    CUTS,
    DIGEST,
    GOLDEN,
    HOST,
    TENSOR,
    World,
    model,
    ready,
    running,
    story,
    takes,
)

# -- goodbye ----------------------------------------------------------------------------------------------------------


@story
async def test_after_a_goodbye_nothing_new_goes_there_whatever_still_comes(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        first = world.ask()
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.send(Goodbye(reason="maintenance"))
        await world.until(lambda: "maintenance" in world.why())
        offers = world.count(ModelOffer)
        world.companion_end.send(ready(ModelOffer(digest=DIGEST, files=())))
        world.uplink.suspect()
        world.serve(model(tmp_path, "late"))
        await asyncio.sleep(1.0)  # pongs come
        assert "maintenance" in world.why()
        assert world.count(ModelOffer) == offers
        with pytest.raises(ConnectionLost, match="maintenance"):
            world.ask()
        world.answer("1")
        reply = await first
        np.testing.assert_array_equal(reply.outputs["y"], GOLDEN["y"])
        # Nothing is awaited any more: hung up, and the other companion is used.
        took_s = await world.until(lambda: world.opened("m") == world.opened("late") == set(CUTS))
        assert took_s < 2.0
        assert [address for address, _, _ in world.connected] == ["one:1", "two:1"]


@story
async def test_a_companion_that_says_goodbye_and_then_nothing_is_left_all_the_same(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        lost = world.ask()
        world.companion_end.send(Goodbye(reason="maintenance"))
        world.companion_end.freeze()
        with pytest.raises(ConnectionLost):
            await lost
        await world.until(lambda: world.why() == "", within_s=5)


def test_what_the_companion_says_of_its_pace_is_what_is_expected_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            forced = dataclasses.replace(TENSOR, mode=Placement.OFFLOAD)

            def tail_ms() -> float:
                decision = world.planner.decide("m", forced, edge_queue_ms=0.0, now_s=world.now)
                return decision.chosen.stages_ms["tail"]

            world.companion_end.send(Pace(work_ms=1.5))
            world.companion_end.send(Pace(work_ms=6.0, since_ms=300.0))
            await asyncio.sleep(1)
            assert tail_ms() == pytest.approx(40.0, rel=0.01)  # 10 when it was ready
            world.companion_end.send(Pace(work_ms=math.nan))
            await world.until(lambda: len(world.connected) == 2)  # not understood: that connection is over

    run_in_virtual_time(main())


@pytest.mark.parametrize("minor", [0, 1, 2])
def test_only_a_companion_that_knows_of_renewals_is_asked_for_one(tmp_path: Path, minor: int) -> None:
    async def main() -> None:
        async with running(World(tmp_path, minor=minor)) as world:
            assert not world.uplink.ask_renewal("nobody is there yet")
            await world.until(lambda: world.why() == "")
            assert world.uplink.ask_renewal("request") == (minor >= 1)
            await asyncio.sleep(0.1)
            assert [one.request for one in world.seen if isinstance(one, Renew)] == ["request"] * (minor >= 1)
            world.companion_end.send(Goodbye(reason="stopping"))
            world.ask()  # its answer is awaited, so the connection stays
            await asyncio.sleep(0.1)
            assert not world.uplink.ask_renewal("it is leaving")

    run_in_virtual_time(main())


# -- silence ----------------------------------------------------------------------------------------------------------


@story
async def test_set_up_that_goes_on_during_a_silence_leaves_other_models_ready(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.uplink.suspect()
        assert "does not answer in time" in world.why()
        world.serve(model(tmp_path, "n"))
        await world.until(lambda: world.opened("n") == set(CUTS))
        assert world.opened("m") == set(CUTS)
        assert world.uplink.connects == 1


@story
async def test_a_companion_that_was_frozen_is_used_again_on_the_old_connection_as_soon_as_it_speaks(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.companion_end.freeze()
        world.dead = {HOST}
        world.uplink.suspect()
        await asyncio.sleep(60)
        assert world.uplink.state == "silent"
        assert len(world.dialled) > 5
        world.companion_end.thaw()
        await world.until(lambda: world.opened() == set(CUTS), within_s=0.3)
        await asyncio.sleep(0.5)
        world.dead = set()
        dialled = len(world.dialled)
        await asyncio.sleep(60)
        assert (len(world.dialled), world.uplink.connects) == (dialled, 1)


@story
async def test_an_answer_that_takes_long_on_a_slow_link_is_no_silence(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=SILENCE_S - 1.0)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(600)  # idle pings
        assert len(world.dialled) == 1


@story
async def test_a_link_slower_than_that_ends_the_replacing_by_itself(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=SILENCE_S + 3.0)) as world:
        await asyncio.sleep(600)
        settled = len(world.dialled)
        assert settled <= 3
        await world.until(lambda: world.opened() == set(CUTS))
        await asyncio.sleep(600)
        assert world.uplink.connects <= 3


@pytest.mark.parametrize("broken_s", [0.5, 3.0, 4.9, 5.3, 7.9, 20.0, 77.7, 300.0])
@pytest.mark.parametrize("addresses", [1, 3])
def test_remote_use_is_back_within_five_seconds_of_a_dead_way_that_heals(
    tmp_path: Path, broken_s: float, addresses: int
) -> None:
    """No RST: both ends stay open and nothing arrives. The worst draw of every back-off; the other addresses lead
    nowhere all the time."""
    others = tuple(f"nowhere:{n}" for n in range(1, addresses))

    async def main() -> None:
        world = World(tmp_path, companions=(*others, HOST), dead=set(others), draw=0.999)
        async with running(world):
            await world.until(lambda: world.opened() == set(CUTS))
            _, device, companion = world.connected[-1]
            waiting = world.ask()  # traffic: without it nobody would notice
            device.freeze()
            companion.freeze()
            world.dead.add(HOST)
            await asyncio.sleep(broken_s)
            world.dead.discard(HOST)
            asyncio.get_running_loop().call_later(broken_s, device.thaw)  # TCP sends again: its timer has doubled
            asyncio.get_running_loop().call_later(broken_s, companion.thaw)
            await world.until(lambda: world.opened() == set(CUTS), within_s=5.0)
            waiting.cancel()

    run_in_virtual_time(main())


@pytest.mark.parametrize("down_s", [0.1, 1.0, 2.3, 33.3, 100.0])
def test_remote_use_is_back_within_five_seconds_of_a_restart(tmp_path: Path, down_s: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path, draw=0.999)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            await asyncio.sleep(10)
            world.refused = {HOST}
            world.companion_end.kill()
            await asyncio.sleep(down_s)
            world.refused = set()
            await world.until(lambda: world.opened() == set(CUTS), within_s=5.0)

    run_in_virtual_time(main())


@story
async def test_o_wi_14_after_each_restart_with_other_models_the_view_is_the_companions(tmp_path: Path) -> None:
    """Twenty restarts, A, A and B, B in turn: what is not there any more is not asked for, within two seconds."""
    a, b = (
        model(tmp_path / name, name, digest=ModelDigest("sha256:" + name * 64))
        for name in ("a", "b")
        if not (tmp_path / name).mkdir()  # type: ignore[func-returns-value]  # None: it is there now
    )
    sets = itertools.cycle([{a.digest}, {a.digest, b.digest}, {b.digest}])
    held = next(sets)

    def holds(offer: ModelOffer, before: int) -> Sequence[Message]:
        if offer.digest not in held:
            return (Refused(code="BUDGET_EXCEEDED", message="no room", digest=offer.digest),)
        return takes(offer, before)

    def known_to_be_there() -> bool:
        return {one.digest for one in (a, b) if not world.why(one.name)} == held

    world = World(tmp_path, on_offer=holds, draw=0.999)
    async with running(world, a, b):
        for _ in range(20):
            await world.until(known_to_be_there, within_s=2.0)
            await asyncio.sleep(2.0)  # and stays so
            assert known_to_be_there()
            for one in (a, b):
                assert world.placement(one.name, CUTS[0]) == ("split" if one.digest in held else "local")
            world.companion_end.kill()
            held = next(sets)


@story
async def test_o_wi_13_one_task_owns_reconnection_and_the_daemon_ends_while_it_waits_for_data(tmp_path: Path) -> None:
    def reconnecting() -> list[str]:
        names = [task.get_name() for task in asyncio.all_tasks()]
        return sorted(name for name in names if name in ("uplink", "heartbeat", "receive") or "dial" in name)

    world = World(tmp_path)
    async with running(world):
        await world.until(lambda: world.why() == "")
        assert reconnecting() == ["heartbeat", "receive", "uplink"]
        waiting = world.ask()
        world.companion_end.freeze()
        world.dead.add(HOST)
        await asyncio.sleep(SILENCE_S + 2.0)
        # The heartbeat has one dial beside the silent connection, and nobody else has any.
        assert reconnecting() == ["dial beside", f"dial {HOST}", "heartbeat", "receive", "uplink"]
        began_s = world.now
        await world.uplink.close()
        assert world.now - began_s <= 5.0
        assert reconnecting() == []
        with pytest.raises(ConnectionLost):
            await waiting


# -- a network that changes -------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is one from 10.1.0.2 to 192.0.2.1."""
    monkeypatch.setattr(MemoryChannel, "ends", property(lambda channel: ("10.1.0.2", "192.0.2.1")))


def changes(world: World, leads_from: str | None) -> None:
    """The kernel says that something about the network is different."""
    world.uplink._source_towards = lambda host: leads_from
    world.uplink.network_changed()


def test_a_change_of_the_network_ends_every_pause_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(World(tmp_path, refused={HOST}, draw=0.999)) as world:
            await asyncio.sleep(60)
            await world.until(lambda: world.uplink.unreached[0].next_try_s > 1.4)
            world.refused.clear()
            changes(world, "10.2.0.2")
            assert await world.until(lambda: world.uplink.state == "connected") <= 0.02

    run_in_virtual_time(main())


def test_a_dial_that_hangs_on_the_old_network_holds_up_none_on_the_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(World(tmp_path, dead={HOST}, draw=0.999)) as world:
            await asyncio.sleep(0.1)  # the first SYN is lost
            world.dead.clear()
            changes(world, "10.2.0.2")
            assert await world.until(lambda: world.uplink.state == "connected") <= 0.02
            await asyncio.sleep(10)
            assert [end.closed_because for _, end, _ in world.connected].count(None) == 1

    run_in_virtual_time(main())


def test_a_device_whose_address_has_changed_dials_beside_at_once_and_changes_over(
    tmp_path: Path, at_home: None
) -> None:
    async def main() -> None:
        hurried: list[float] = []
        async with running(World(tmp_path)) as world:
            world.uplink.on_silence = lambda: hurried.append(world.now)
            await world.until(lambda: world.opened() == set(CUTS))
            world.ask()
            _, old, there = world.connected[-1]
            old.freeze()
            there.freeze()  # nothing comes through under the old address
            changed_at_s = world.now
            changes(world, "10.2.0.2")
            await world.until(lambda: world.opened() == set(CUTS) and world.uplink.connects == 2, within_s=0.1)
            assert hurried == pytest.approx([changed_at_s], abs=0.001)  # what waited begins on the device at once

    run_in_virtual_time(main())


def test_a_change_that_does_not_concern_the_way_to_the_companion_leaves_the_connection(
    tmp_path: Path, at_home: None
) -> None:
    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            changes(world, "10.1.0.2")
            changes(world, None)  # out of reach; what there is may still heal
            await asyncio.sleep(10)
            assert len(world.dialled) == 1
            changes(world, "10.1.0.2")  # back again, and TCP's timer has grown meanwhile
            await world.until(lambda: world.uplink.connects == 2, within_s=0.1)

    run_in_virtual_time(main())


@story
async def test_without_companions_nothing_is_dialled_and_the_reason_is_shown(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=())) as world:
        await asyncio.sleep(10)
        assert world.dialled == []
        assert world.why() == world.uplink.state == "no companion configured"
