"""Requests whose connection is lost on the way: sent again where that helps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from split.errors import ChannelError, DeadlineExceeded, NotReached
from split.plan.plan import LOCAL, Placement
from split.profiles.contract import Behaviour, Contract, Fallback, Retry
from split.transport.memory import MemoryChannel
from split.transport.virtual_time import run_in_virtual_time
from split.wire.messages import Infer
from tests.agent.serve_lab import HEAD_MS, MUST_COME, Behaviour_, Lab, assert_right, dies, finishes_in, replies_after


def dies_first(then: Behaviour_, *, times: int = 1) -> Behaviour_:
    """The connection ends under the first requests; the companion that is reached next is another, with no memory."""

    async def behave(lab: Lab, channel: MemoryChannel, infer: Infer, payload: memoryview) -> None:
        await (dies if len(lab.seen) <= times else then)(lab, channel, infer, payload)

    return behave


@pytest.mark.parametrize("mode", ["split", "offload"])
def test_o_wi_12_a_request_that_its_companion_took_with_it_is_answered_by_the_next_from_the_start(
    tmp_path: Path, mode: str
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.02))) as lab:
            finishes_in(lab, 2000.0)
            outcome = await lab.ask(mode=mode, deadline_ms=9_000.0)
            assert_right(outcome)
            assert outcome.ran.placement is Placement(mode)
            assert outcome.fallback == ""
            first, second = lab.seen
            assert (first.attempt, second.attempt) == (1, 2)
            assert msgspec.structs.replace(first, attempt=2, budget_ms=0.0) == msgspec.structs.replace(
                second, budget_ms=0.0
            )
            assert 0.0 < second.budget_ms < first.budget_ms
            assert outcome.total_ms < 1000.0
            lab.serve.settle_books()
            assert lab.journal.counts() == {"requests": 1, "failures": 0, "fallbacks": 0}
            assert lab.uplink.inflight == 0

    run_in_virtual_time(story())


def test_where_the_device_is_sooner_nothing_is_sent_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.5))) as lab:
            finishes_in(lab, 55.0)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(HEAD_MS + 55.0, abs=0.5)
            await asyncio.sleep(5)
            assert len(lab.seen) == 1

    run_in_virtual_time(story())


@pytest.mark.parametrize(("attempts", "deaths", "answered"), [(1, 1, False), (2, 1, True), (2, 2, False), (3, 2, True)])
def test_a_request_goes_to_a_companion_as_often_as_its_contract_says(
    tmp_path: Path, attempts: int, deaths: int, answered: bool
) -> None:
    contract = Contract(behaviour=Behaviour(fallback=Fallback(strategy="fail"), retry=Retry(attempts=attempts)))

    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(0.02), times=deaths), contract=contract) as lab:
            if answered:
                assert_right(await lab.ask(deadline_ms=9_000.0))
            else:
                with pytest.raises(ChannelError):
                    await lab.ask(deadline_ms=9_000.0)
            assert [infer.attempt for infer in lab.seen] == list(range(1, min(attempts, deaths + 1) + 1))

    run_in_virtual_time(story())


def test_a_request_that_cannot_be_sent_again_in_time_is_an_error_by_its_deadline(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=dies, contract=MUST_COME) as lab:

            async def unreachable(address: str, timeout_s: float, first: object) -> MemoryChannel:
                raise NotReached("REFUSED", "nobody is there")

            lab.uplink._dialler._dial = unreachable
            started_s = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await lab.ask(deadline_ms=500.0)
            assert asyncio.get_running_loop().time() - started_s == pytest.approx(0.5, abs=0.001)
            assert lab.uplink.inflight == 0

    run_in_virtual_time(story())


def test_the_device_that_is_through_before_the_second_answer_makes_the_only_one(tmp_path: Path) -> None:
    """The companion is expected sooner and is late: the finish that began with the loss goes on beside it."""

    async def story() -> None:
        async with Lab(tmp_path, behave=dies_first(replies_after(60.0))) as lab:
            finishes_in(lab, 2000.0)
            outcome = await lab.ask(deadline_ms=9_000.0)
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms == pytest.approx(HEAD_MS + 2000.0, abs=0.5)
            assert [infer.attempt for infer in lab.seen] == [1, 2]
            await asyncio.sleep(100)  # its reply comes, and nobody is there
            assert lab.journal.counts()["requests"] == 1
            assert lab.cancelled == [lab.request.id]

    run_in_virtual_time(story())
