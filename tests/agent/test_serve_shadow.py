"""Answers of the companion's compared with the device's own, where the contract asks for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from split.codec.payload import decode, encode
from split.plan.plan import Placement
from split.profiles.contract import Behaviour, Contract, Data, Fallback, Fidelity
from split.runtime.accelerators import Choice
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Infer
from tests.agent.serve_lab import WHOLE_MS, Behaviour_, Lab, Y, answer, assert_right, replies_after

SHADOW = Contract(behaviour=Behaviour(fallback=Fallback(strategy="shadow", agreement_min=0.9)))


def answers_off_by(ratio: float, seconds: float = 0.006) -> Behaviour_:
    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await asyncio.sleep(seconds)
        reply, _ = answer(lab, infer, payload)
        outputs = lab.model.tail(infer.cut).run(decode(payload, max_bytes=1 << 20))  # type: ignore[arg-type]
        channel.send(reply, encode({name: value * np.float32(1 + ratio) for name, value in outputs.items()}, "raw"))

    return behave


def test_a_companion_whose_answers_agree_keeps_the_model_and_is_compared_on_an_idle_device_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            for _ in range(20):
                outcome = await lab.ask()
                assert outcome.ran.placement is Placement.SPLIT
                assert outcome.total_ms < WHOLE_MS  # nobody waits for a comparison
                await asyncio.sleep(0.5)
            compared = lab.journal.shadows("tiny")
            # one whole of 100 ms in a fifth of the time at most: every 500 ms
            assert compared == {"agreed": 20, "differed": 0}
            assert lab.intake.room.held_bytes == 0
            assert lab.planner.local_only_reason("tiny") == ""
            busy = [asyncio.create_task(lab.ask(mode="local", deadline_ms=9000.0)) for _ in range(20)]
            for _ in range(3):
                await lab.ask(deadline_ms=5000.0)
            await asyncio.gather(*busy)
            assert lab.journal.shadows("tiny") == compared

    run_in_virtual_time(story())


def test_a_companion_ten_percent_off_loses_the_model_however_often_it_connects_until_that_is_loaded_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=answers_off_by(0.1), contract=SHADOW) as lab:
            count = 0
            while not lab.planner.local_only_reason("tiny"):
                outcome = await lab.ask()
                np.testing.assert_allclose(outcome.outputs["y"], Y * 1.1, rtol=1e-6)  # returned by the usual rules
                count += 1
                await asyncio.sleep(0.6)
            assert count == 5
            assert lab.journal.shadows("tiny") == {"agreed": 0, "differed": 5}
            why = lab.planner.local_only_reason("tiny")
            assert "0% of the companion's last answers agree" in why
            assert "'y'" in why
            assert any(record.levelname == "WARNING" and why in record.getMessage() for record in caplog.records)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert why in outcome.fallback
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel.kill()
            await lab.until(lambda: lab.uplink.connects == 2)
            await asyncio.sleep(1.0)
            for _ in range(8):
                assert_right(await lab.ask())
                await asyncio.sleep(0.6)
            assert lab.planner.local_only_reason("tiny") == why
            assert lab.journal.shadows("tiny") == {"agreed": 0, "differed": 5}
            lab.planner.connected(max_message_bytes=1 << 20, peer="another")
            assert lab.planner.local_only_reason("tiny") != why, "of another companion nothing was found"
            lab.planner.connected(max_message_bytes=1 << 20, peer=channel.peer.name)
            assert lab.planner.local_only_reason("tiny") == why
            lab.know_model_anew()
            channel = lab.uplink._channel
            assert isinstance(channel, MemoryChannel)
            channel.kill()
            await lab.until(lambda: lab.uplink.connects == 3 and not lab.planner.local_only_reason("tiny"))
            await asyncio.sleep(0.1)
            lab.behave = replies_after(0.006)  # it was mended meanwhile
            for _ in range(8):
                assert_right(await lab.ask())
                await asyncio.sleep(0.6)
            assert lab.planner.local_only_reason("tiny") == ""
            assert lab.journal.shadows("tiny") == {"agreed": 8, "differed": 5}

    run_in_virtual_time(story())


def test_what_the_contracts_fidelity_allows_of_a_lossy_plan_agrees(tmp_path: Path) -> None:
    contract = Contract(behaviour=SHADOW.behaviour, data=Data(fidelity=Fidelity(measure="relative", bound=0.11)))

    async def story() -> None:
        async with Lab(tmp_path, behave=answers_off_by(0.1), contract=contract) as lab:
            for _ in range(8):
                await lab.ask()
                await asyncio.sleep(0.6)
            assert lab.journal.shadows("tiny") == {"agreed": 8, "differed": 0}

    run_in_virtual_time(story())


def test_a_comparison_ends_for_a_request_that_comes_and_makes_none_that_waits_begin_its_finish(tmp_path: Path) -> None:
    """It takes 100 ms: after 50 the request comes, and finds the worker free."""

    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            await lab.ask(deadline_ms=2 * WHOLE_MS)
            waiting = lab.lateness.watch(
                "other",
                deadline_at_s=asyncio.get_running_loop().time() + 0.2,
                local_ms=50.0,
                timeout_ms=None,
                begin=asyncio.get_running_loop().create_future,
            )
            await asyncio.sleep(WHOLE_MS / 2000)
            assert not waiting.done()
            lab.lateness.forget("other")
            assert (await lab.ask(mode="local")).stages_ms["queue"] == 0.0
            assert lab.journal.shadows("tiny") == {}
            await asyncio.sleep(1.0)
            await lab.ask(deadline_ms=2 * WHOLE_MS)
            await asyncio.sleep(WHOLE_MS / 1000 + 0.001)
            assert lab.journal.shadows("tiny") == {"agreed": 1, "differed": 0}

    run_in_virtual_time(story())


def test_a_comparison_on_an_accelerator_makes_no_waiting_request_begin_its_finish_and_no_other_late(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.006), contract=SHADOW) as lab:
            lab.model.choice = Choice(("cuda", "cpu"))
            await lab.ask(deadline_ms=2 * WHOLE_MS)  # the next one like it would be late behind a whole
            await asyncio.sleep(1.0)
            assert lab.journal.shadows("tiny") == {}
            waiting = lab.lateness.watch(
                "other",
                deadline_at_s=asyncio.get_running_loop().time() + 0.2,
                local_ms=50.0,
                timeout_ms=None,
                begin=asyncio.get_running_loop().create_future,
            )
            await lab.ask(deadline_ms=1000.0)
            assert not waiting.done()
            assert lab.journal.shadows("tiny") == {}

    run_in_virtual_time(story())
