"""A device that is slowed down (`emulation.slowdown`): replies are decoded beside its worker."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent import waiting
from split.plan.plan import LOCAL, Placement
from split.profiles.contract import Behaviour, Contract, Fallback
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Infer
from tests.agent.serve_lab import BRONZE, Lab, answer, assert_right, finishes_in, replies_after, says_nothing

SLOW = 6.0
"""The whole takes it 600 ms, a head 240, a tail 360."""
DECODED_MS = 4.0
HELD_MS = (SLOW - 1.0) * DECODED_MS
"""The decoding of a reply takes no virtual time, only what emulation adds to it."""


def decodes_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock before and after the decoding of a reply is `DECODED_MS` later than the last."""
    ticks = itertools.count()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * DECODED_MS / 1000))


@pytest.mark.parametrize("deadline_ms", [400.0, 590.0])
def test_a_reply_never_waits_for_a_finish_on_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_ms: float
) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.1), slowdown=SLOW) as lab:
            for _ in range(3):
                outcome = await lab.ask(mode="offload", deadline_ms=deadline_ms)
                assert_right(outcome)
                assert outcome.ran.placement is Placement.OFFLOAD
                assert outcome.total_ms == pytest.approx(100.0 + HELD_MS, abs=2)

    run_in_virtual_time(story())


def test_a_reply_never_waits_for_the_finish_of_another_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes_slowly(monkeypatch)
    silent: list[str] = []

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        if infer.request_id not in silent and not silent:
            silent.append(infer.request_id)
            return
        await replies_after(0.1)(lab, channel, infer, payload)

    async def story() -> None:
        async with Lab(tmp_path, behave=behave, slowdown=SLOW, contract=BRONZE) as lab:
            unanswered = asyncio.create_task(lab.ask(mode="offload", deadline_ms=700.0))
            await asyncio.sleep(0.010)
            answered = await lab.ask(mode="offload", deadline_ms=400.0)
            assert answered.ran.placement is Placement.OFFLOAD
            assert answered.total_ms == pytest.approx(100.0 + HELD_MS, abs=2)
            finished = await unanswered
            assert finished.ran is LOCAL
            assert finished.total_ms <= 700.0

    run_in_virtual_time(story())


def test_a_device_that_is_through_before_a_slow_reply_is_decoded_makes_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        contract = Contract(behaviour=Behaviour(fallback=Fallback(timeout_ms=10.0)))
        async with Lab(tmp_path, behave=replies_after(0.5), slowdown=40 * SLOW, contract=contract) as lab:
            finishes_in(lab, 800.0)  # there at 810 ms; the reply, come after 500, is decoded at 500 + 239 · 4 = 1456
            outcome = await lab.ask(mode="offload", deadline_ms=5000.0)
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(810.0, abs=2)
            await asyncio.sleep(5.0)
            lab.serve.settle_books()
            assert lab.journal.counts()["requests"] == 1

    run_in_virtual_time(story())


def test_replies_are_decoded_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes_slowly(monkeypatch)

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, slowdown=SLOW, contract=BRONZE) as lab:

            async def at_once(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
                reply, parts = answer(lab, infer, payload)
                asyncio.get_running_loop().call_at(began_s + 0.1, channel.send, reply, parts)

            lab.behave = at_once
            began_s = asyncio.get_running_loop().time()
            outcomes = await asyncio.gather(*(lab.ask(mode="offload", deadline_ms=5000.0) for _ in range(3)))
            assert sorted(outcome.total_ms for outcome in outcomes) == pytest.approx(
                [100.0 + HELD_MS, 100.0 + 2 * HELD_MS, 100.0 + 3 * HELD_MS], abs=2
            )
            assert [one.stages_ms["decode"] for one in outcomes] == pytest.approx([SLOW * DECODED_MS] * 3)

    run_in_virtual_time(story())
