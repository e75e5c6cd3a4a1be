"""What goes with the dial, and what comes of it: in the world of `uplink_world.py`, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.first_flight import MESSAGES_MAX, FirstFlight
from split.ids import CutId
from split.wire.limits import EARLY_BYTES
from split.wire.messages import Message, ModelNeed, ModelOffer, ModelReady, Refused, SegmentOpen
from tests.agent.uplink_world import CUTS, DIGEST, OTHER, World, joined, model, opens, running, story, takes

RTT_S = 0.5


def offer(digest: str = "d", golden: bytes = b"") -> ModelOffer:
    return ModelOffer(digest=digest, files=(("model.onnx", 1, "0" * 64),), golden=golden)


def wanted(cut: str, digest: str = "d") -> SegmentOpen:
    return SegmentOpen(digest=digest, cut=cut, node_bitmap="07")


def cost(message: Message) -> int:
    """By PROTOCOL.md §7, with msgspec alone."""
    return 512 + len(msgspec.msgpack.encode(message))


async def settled(world: World) -> None:
    await world.until(lambda: world.opened() == set(CUTS))


def used(world: World, cut: CutId) -> None:
    """As if it had been decided for, which here no request's numbers make happen."""
    world.planner._model("m").recent_cuts = (cut,)


async def lose_connection(world: World) -> None:
    """And connect anew; everything seen so far is forgotten."""
    before = world.uplink.connects
    world.seen.clear()
    world.companion_end.kill()
    await world.until(lambda: world.uplink.connects == before + 1)


@story
async def test_what_was_in_use_is_asked_with_the_dial_and_back_as_soon_as_the_answers_come(tmp_path: Path) -> None:
    async with running(World(tmp_path, delay_s=RTT_S)) as world:
        await settled(world)
        used(world, CUTS[2])
        await lose_connection(world)
        took_s = await world.until(lambda: CUTS[2] in world.opened())
        assert took_s <= RTT_S + 0.02, "asked after the model was ready, it would be two of them"
        kinds = [type(one) for one in world.seen if not isinstance(one, ModelReady)]
        assert kinds[:2] == [ModelOffer, SegmentOpen]
        await settled(world)
        asked = [one.cut for one in world.seen if isinstance(one, SegmentOpen)]
        assert asked[0] == CUTS[2]
        assert sorted(asked) == sorted(CUTS), "each was asked for once"
        assert world.count(ModelOffer) == 1


@story
async def test_a_companion_that_lost_the_model_meanwhile_gets_it_again_and_is_asked_for_the_cut_again(
    tmp_path: Path,
) -> None:
    has = True

    def on_offer(message: ModelOffer, before: int) -> Sequence[Message]:
        return (
            takes(message, before) if has else (ModelNeed(digest=DIGEST, missing=(("model.onnx", 100),), lengths=(0,)),)
        )

    def on_cut(message: SegmentOpen, before: int) -> Sequence[Message]:
        if has:
            return opens(message, before)
        return (Refused(code="PLAN_MISMATCH", message="not ready", digest=message.digest, cut=message.cut),)

    world = World(tmp_path, on_offer=on_offer, on_cut=on_cut)
    async with running(world):
        await settled(world)
        used(world, CUTS[0])
        has = False
        await lose_connection(world)
        await world.until(lambda: world.count(SegmentOpen) == 1 and world.count(ModelOffer) == 1)
        has = True
        for answer in takes(offer(DIGEST), 1)[1:]:
            world.companion_end.send(answer)
        await settled(world)


@story
async def test_another_companion_is_asked_for_nothing_before_it_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, companions=("a:1", "b:1"))
    flights: list[tuple[str, int]] = []
    dial = world.dial

    async def noted(address: str, timeout_s: float, first: Sequence[Message]) -> Any:
        flights.append((address, len(first)))
        return await dial(address, timeout_s, first)

    world.uplink._dialler._dial = noted  # type: ignore[assignment]  # the same, noted
    async with running(world):
        await settled(world)
        used = world.uplink.address
        other = "b:1" if used == "a:1" else "a:1"
        flights.clear()
        world.refused.add(used)
        world.companion_end.kill()
        await world.until(lambda: world.uplink.connects == 2)
        await settled(world)
        assert {count for address, count in flights if address == other} == {0}


@story
async def test_a_companion_whose_early_answer_is_of_other_numbers_shares_nothing(tmp_path: Path) -> None:
    numbers = [joined({"y": OTHER["y"]})]
    right = True

    def on_offer(message: ModelOffer, before: int) -> Sequence[Message]:
        need, ready = takes(message, before)
        return need, ready if right else msgspec.structs.replace(ready, golden=numbers[0])

    async with running(World(tmp_path, on_offer=on_offer)) as world:
        await settled(world)
        used(world, CUTS[0])
        right = False
        await lose_connection(world)
        await world.until(lambda: "computes this model differently" in world.why())
        assert world.opened() == set()


@story
async def test_a_cut_whose_early_answer_is_of_other_numbers_is_not_used(tmp_path: Path) -> None:
    right = True

    def on_cut(message: SegmentOpen, before: int) -> Sequence[Message]:
        (ready,) = opens(message, before)
        return (ready if right else msgspec.structs.replace(ready, golden=joined(OTHER)),)

    async with running(World(tmp_path, on_cut=on_cut)) as world:
        await settled(world)
        used(world, CUTS[0])
        right = False
        await lose_connection(world)
        await world.until(lambda: world.count(SegmentOpen) == 3)
        assert world.opened() == set()


@story
async def test_a_model_that_was_loaded_anew_is_not_asked_for_as_it_was(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await settled(world)
        world.uplink.serve_model(model(tmp_path))
        assert world.uplink._first_flight(world.uplink.address) == []


def test_offers_go_before_cuts_and_only_what_was_open() -> None:
    flight = FirstFlight()
    for one in (offer("d"), wanted("c1"), wanted("c2"), offer("e"), wanted("c9", "never offered")):
        flight.opened(one)
    packed = flight.pack([("d", ["c2", "c3", "c1"]), ("e", []), ("never offered", ["c9"]), ("unheard of", ["c1"])])
    assert packed == [offer("d"), offer("e"), wanted("c2"), wanted("c1")]
    flight.forget("d")
    assert flight.pack([("d", ["c1"]), ("e", [])]) == [offer("e")]


@pytest.mark.parametrize("golden_bytes", [0, 1_000, 30_000])
def test_a_flight_keeps_to_what_may_go_early(golden_bytes: int) -> None:
    flight = FirstFlight()
    for n in range(200):
        flight.opened(offer(str(n), bytes(golden_bytes)))
    packed = flight.pack((str(n), []) for n in range(200))
    total = sum(map(cost, packed))
    assert total <= EARLY_BYTES
    assert len(packed) == MESSAGES_MAX or total + cost(packed[0]) > EARLY_BYTES


def test_a_model_whose_golden_inputs_do_not_fit_is_left_out_with_its_cuts_and_the_others_go() -> None:
    flight = FirstFlight()
    for one in (offer("d", bytes(EARLY_BYTES)), wanted("c1"), offer("e"), wanted("c1", "e")):
        flight.opened(one)
    assert flight.pack([("d", ["c1"]), ("e", ["c1"])]) == [offer("e"), wanted("c1", "e")]
