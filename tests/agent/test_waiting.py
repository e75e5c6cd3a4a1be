"""Requests that wait for a companion: bounds, answers that are none, what is sent again. In virtual time."""

from __future__ import annotations

import asyncio
import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from split.codec.payload import encode
from split.errors import (
    CompanionRefused,
    ConnectionLost,
    Overloaded,
    RemoteProtocolError,
)
from split.plan.observation import Metered
from split.plan.plan import Placement, RequestFacts
from split.transport.virtual_time import run_in_virtual_time
from split.wire.limits import CONTROL_QUEUE_BYTES, DEFAULT_LIMITS
from split.wire.messages import Infer, ModelChunk, Priority, Refused, Reply
from tests.agent.uplink_world import (
    CUTS,
    DIGEST,
    GOLDEN,
    World,
    running,
    story,
)


@story
async def test_o_wi_02_where_the_companion_stops_reading_the_queue_is_bounded_and_new_requests_run_here(
    tmp_path: Path,
) -> None:
    """A thousand requests of a MiB, none of which gets through."""
    world = World(tmp_path, max_message_bytes=1 << 28)
    async with running(world):
        await world.until(lambda: world.opened() == set(CUTS))
        _, device, companion = world.connected[-1]
        device.freeze()
        refused = 0
        for _ in range(1000):
            try:
                world.ask(size=1 << 20)
            except Overloaded:
                refused += 1
            assert device.queued_bytes <= DEFAULT_LIMITS.queue_bytes + CONTROL_QUEUE_BYTES
        assert 992 <= refused < 1000
        # What is queued before it counts in the prediction of every further one.
        await asyncio.sleep(1.0)
        facts = RequestFacts(budget_ms=10_000.0, mode=Placement.OFFLOAD)
        queued = world.planner.decide("m", facts, edge_queue_ms=0.0, now_s=world.now).chosen.stages_ms["up"]
        for name in range(1, 1001):
            world.uplink.abandon(str(name))
        assert device.queued_bytes < 1 << 20
        free = world.planner.decide("m", facts, edge_queue_ms=0.0, now_s=world.now).chosen.stages_ms["up"]
        assert queued > 2 * free
        companion.kill()


# -- sent again -------------------------------------------------------------------------------------------------------


@story
async def test_o_wi_12_a_reply_to_an_attempt_that_counts_no_more_is_no_answer(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        asked = world.asked(attempts=3)
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 2)
        assert "reset" in asked.lost.result()
        world.answer("1", attempt=1, tail_ms=111.0)
        world.answer("1", attempt=3, tail_ms=333.0)
        stale = Refused(code="UNKNOWN_MODEL", message="stale", request_id="1", attempt=1)
        world.companion_end.send(stale)
        await asyncio.sleep(1.0)
        assert not asked.reply.done()
        world.answer("1", attempt=2, tail_ms=222.0)
        assert (await asked.reply).reply.tail_ms == 222.0
        world.answer("1", attempt=2, tail_ms=222.0)  # twice
        await asyncio.sleep(1.0)
        assert world.uplink.inflight == 0


@story
async def test_what_a_connection_took_with_it_goes_to_another_companion(tmp_path: Path) -> None:
    async with running(World(tmp_path, companions=("one:1", "two:1"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        split, whole = world.asked(attempts=2, cut=CUTS[2]), world.asked(attempts=2)
        await world.until(lambda: world.count(Infer) == 2)
        world.refused.add("one:1")
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 4)
        assert world.uplink.address == "two:1"
        # Each as soon as what it needs is open there: the whole is before the cuts.
        assert [(one.request_id, one.attempt) for one in world.seen if isinstance(one, Infer)][2:] == [
            ("2", 2),
            ("1", 2),
        ]
        for name in ("1", "2"):
            world.uplink.abandon(name)
        assert world.uplink.inflight == 0
        assert not split.reply.done()
        assert not whole.reply.done()


@story
async def test_what_the_next_companion_does_not_read_is_not_sent_to_it(tmp_path: Path) -> None:
    async with running(World(tmp_path, codecs=("raw", "jpeg"))) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        asked = [world.asked(attempts=3, codec=codec) for codec in ("raw", "jpeg")]
        await world.until(lambda: world.count(Infer) == 2)
        world.codecs = ("raw",)
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 3)
        await asyncio.sleep(1.0)
        assert [one.codec for one in world.seen if isinstance(one, Infer)] == ["raw", "jpeg", "raw"]
        world.codecs = ("raw", "jpeg")
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 5)
        assert not any(one.reply.done() for one in asked)


@story
async def test_nothing_is_sent_again_that_would_come_too_late(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        too_little, here_before = world.asked(attempts=2, budget_ms=900.0, cloud_ms=1000.0), world.asked(attempts=2)
        here_before.here_at_s = world.now + 0.01
        in_time = world.asked(attempts=2, cloud_ms=1000.0)
        await world.until(lambda: world.count(Infer) == 3)
        world.companion_end.kill()
        await world.until(lambda: world.count(Infer) == 4)
        await asyncio.sleep(5.0)
        for asked in (too_little, here_before):
            with pytest.raises(ConnectionLost, match="too late"):
                await asked.reply
        assert world.count(Infer) == 4
        assert not in_time.reply.done()


@story
async def test_what_nobody_waits_for_any_more_is_not_sent_again(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        world.asked(attempts=2)
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.kill()
        await world.until(lambda: world.uplink.state != "connected")
        assert world.uplink.inflight == 1
        world.uplink.abandon("1")
        await world.until(lambda: world.opened() == set(CUTS))
        assert (world.count(Infer), world.uplink.inflight) == (1, 0)


@story
async def test_a_request_too_large_for_the_companion_is_a_failed_road_and_no_mistake_of_the_callers(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path, max_message_bytes=1 << 17)) as world:
        await world.until(lambda: world.why() == "")
        with pytest.raises(CompanionRefused, match="the peer takes at most 131072") as caught:
            world.ask(size=1 << 17)
        assert caught.value.code == "TOO_LARGE"
        assert world.uplink.inflight == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("of", ["queue_ms", "decode_ms", "tail_ms", "encode_ms", "cloud_ms"])
def test_a_reply_whose_times_are_none_is_no_answer_and_teaches_nothing(tmp_path: Path, of: str, wrong: float) -> None:
    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            before = world.planner.snapshot(world.now)
            asked = world.ask()
            await world.until(lambda: world.count(Infer) == 1)
            world.answer("1", **{of: wrong})
            with pytest.raises(RemoteProtocolError, match="not usable: it says that it took"):
                await asked
            after = world.planner.snapshot(world.now)
            assert after["models"] == before["models"]
            assert after["link"]["up_mbit_s"] == before["link"]["up_mbit_s"]

    run_in_virtual_time(main())


@story
async def test_requests_wait_behind_those_before_them_and_not_behind_the_files_of_a_model(tmp_path: Path) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        ahead = world.planner._companion.ahead_bytes
        _, device, _ = world.connected[-1]
        device.freeze()
        device.send(ModelChunk(digest=DIGEST, file="f", offset=0), [bytes(1 << 19)], priority=Priority.BULK)
        assert ahead() == 0
        world.ask(size=30_000)
        assert ahead() == 30_000
        world.ask(size=10_000)
        assert ahead() == 40_000
        world.uplink.abandon("1")
        assert ahead() == 10_000
        device.thaw()
        await asyncio.sleep(0.01)
        assert ahead() == 0


def test_a_reply_that_unpacks_to_more_than_it_may_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16,000 bytes of floats, which came as half of that."""
    monkeypatch.setattr("agent.waiting.DECODED_BYTES", 10_000)
    outputs = {"y": np.random.default_rng(5).standard_normal(4_000).astype(np.float32)}

    async def main() -> None:
        async with running(World(tmp_path)) as world:
            await world.until(lambda: world.opened() == set(CUTS))
            for number, codec in enumerate(("fp16", "raw"), start=1):
                asked = world.ask()
                times = dict.fromkeys(("queue_ms", "decode_ms", "tail_ms", "encode_ms", "cloud_ms"), 1.0)
                reply = Reply(request_id=f"{number}", attempt=1, cut="offload", codec="raw", **times)
                world.companion_end.send(reply, encode(outputs, codec))
                if codec == "raw":
                    assert (await asked).outputs["y"].nbytes == 16_000
                else:
                    with pytest.raises(RemoteProtocolError, match="not usable"):
                        await asked

    run_in_virtual_time(main())


@story
async def test_the_replies_that_requests_under_way_will_bring_are_not_promised_to_others(tmp_path: Path) -> None:
    """Three requests of 100 bytes each and replies of `answered` bytes, with just enough left for two of them."""
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.opened() == set(CUTS))
        first = world.ask()
        world.answer("1")
        answered = sum(map(len, encode(GOLDEN, "raw")))
        await first
        world.metered = Metered(left_bytes=100 + 2 * answered)
        world.ask()
        world.ask()
        with pytest.raises(Overloaded, match=f"would move {100 + 3 * answered} bytes"):
            world.ask()
        world.uplink.abandon("2")
        world.ask()


@story
async def test_lateness_is_not_put_down_to_the_link_where_the_companion_was_expected_to_compute(
    tmp_path: Path,
) -> None:
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        await asyncio.sleep(1.0)
        before = world.planner.snapshot(world.now)["link"]["rtt_ms"]
        world.ask(cloud_ms=1_000.0)
        await asyncio.sleep(1.0)
        world.uplink.abandon("1")
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] == pytest.approx(before, abs=0.1)
        for request_id in ("2", "3"):  # one alone would pass for a stall
            world.ask(cloud_ms=0.0)
            await asyncio.sleep(1.0)
            world.uplink.abandon(request_id)
        assert world.planner.snapshot(world.now)["link"]["rtt_ms"] > before + 0.1


@story
async def test_a_refusal_that_nobody_waits_for_any_more_is_no_line_in_the_log(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    async with running(World(tmp_path)) as world:
        await world.until(lambda: world.why() == "")
        reply = world.ask()
        await world.until(lambda: world.count(Infer) == 1)
        world.companion_end.send(Refused(code="DEADLINE_EXCEEDED", message="too late", request_id="1", attempt=1))
        await world.until(reply.done)
        del reply
        gc.collect()
    assert said == []
