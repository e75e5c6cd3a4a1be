"""What is missing of a request is run on the device: opened if it must be, in time, and only where it is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent import stages
from split.errors import DeadlineExceeded, EngineFailed, InvalidRequest, IsthmusError, Overloaded, TooLarge
from split.plan.plan import LOCAL, Placement, Plan
from split.transport.virtual_time import run_in_virtual_time
from tests.agent.serve_lab import BRONZE, HEAD_MS, TAIL_MS, WHOLE_MS, Lab, assert_right, replies_after, says_nothing


def test_a_finish_that_the_deadline_cuts_off_teaches_that_it_takes_at_least_so_long(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            told: list[tuple[str, float]] = []
            lab.planner.observe_edge = lambda _, plan, stage, ms: told.append((stage, ms))  # type: ignore[method-assign]
            lab.compute.takes_ms = lambda expected_ms: 10 * expected_ms
            with pytest.raises(DeadlineExceeded):
                await lab.ask(mode="offload", deadline_ms=500.0)
            await asyncio.sleep(2.0)
            # It began 100 + 5 + 8 + 20 ms before the deadline: 5 % of itself, 8 ms, 5 % of the 400 ms beyond.
            assert dict(told)["whole"] == pytest.approx(133.0, abs=0.5)

    run_in_virtual_time(story())


ERRORS = [EngineFailed("it broke"), InvalidRequest("it broke"), TooLarge("it broke"), Overloaded("it broke")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("stage", "took_ms"),
    [
        # what the worker did: the head's turn, then the whole; or the tail, where the head had made its boundary
        ("head", [HEAD_MS, WHOLE_MS]),
        ("encode", [HEAD_MS, TAIL_MS]),
        ("send", [HEAD_MS, TAIL_MS]),
    ],
)
def test_a_remote_road_that_breaks_before_the_bytes_leave_ends_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, took_ms: list[float], error: IsthmusError
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.break_stage(monkeypatch, stage, error)
            outcome = await lab.ask()
            assert_right(outcome)
            assert outcome.ran.placement is Placement.LOCAL
            assert "it broke" in outcome.fallback
            assert lab.compute.took_ms == took_ms
            assert lab.seen == []

    run_in_virtual_time(story())


def test_a_request_that_the_whole_refuses_too_gets_the_error_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=replies_after(0.01)) as lab:
            lab.break_stage(monkeypatch, "head", InvalidRequest("the head takes no such x"))
            lab.break_stage(monkeypatch, "whole", InvalidRequest("the model takes no such x"))
            with pytest.raises(InvalidRequest, match="the model takes"):
                await lab.ask()

    run_in_virtual_time(story())


def test_local_work_that_comes_while_a_request_waits_does_not_make_its_finish_late(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            waiting = asyncio.create_task(lab.ask(deadline_ms=1000.0))
            # The finish could wait until 1 s − (63 + 8 + 5 % of 900) ms = 0.884; from 0.88 on the worker would be
            # busy for 100 ms.
            await asyncio.sleep(0.880)
            local = await lab.ask(deadline_ms=5000.0, mode="local")
            split = await waiting
            assert_right(split)
            assert split.total_ms == pytest.approx(880 + TAIL_MS, abs=0.5)
            assert_right(local)
            assert local.total_ms == pytest.approx(TAIL_MS + WHOLE_MS, abs=0.5)

    run_in_virtual_time(story())


def test_local_work_with_little_time_goes_before_the_finishes_of_those_that_have_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            waiting = [asyncio.create_task(lab.ask(deadline_ms=1000.0)) for _ in range(6)]
            # Six tails, with their margins, are to begin 85 ms from now; without margins there is time for all seven.
            await asyncio.sleep(0.280)
            local = await lab.ask(deadline_ms=WHOLE_MS + 20.0, mode="local")
            assert_right(local)
            for split in await asyncio.gather(*waiting):
                assert_right(split)
                assert split.total_ms <= 1000.0

    run_in_virtual_time(story())


def test_a_tail_that_is_not_open_any_more_is_given_time_to_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            monkeypatch.setattr(lab.model.store, "activation_ms", lambda path: 300.0)
            outcome = await lab.ask(deadline_ms=1000.0)
            # local finish 360 ms; started 5 % of it, 8 ms and 5 % of the other 600 ms before it had to
            assert outcome.total_ms == pytest.approx(1000.0 - 18 - 8 - 30, abs=0.5)

    run_in_virtual_time(story())


def test_what_the_worker_has_to_open_for_a_finish_is_a_stage_beside_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            await lab.ask()
            store, request = lab.model.store, lab.request
            prepared = stages.Prepared.nothing(request)
            plan = Plan(placement=Placement.SPLIT, cut=lab.cut, codec="raw")
            stages.prepare(request, plan, prepared)
            for work, finished in ((stages.whole, "whole"), (stages.finish, "local_tail")):
                work(request, prepared)  # opens it where it is not
                assert set(work(request, prepared)[1]) == {finished}
                store.forget(Path(lab.model.card.path))
                store.forget(lab.model.folder)
                assert set(work(request, prepared)[1]) == {"activate", finished}

    run_in_virtual_time(story())


def test_the_way_out_of_a_request_stays_open_while_it_waits_whatever_else_is_opened(tmp_path: Path) -> None:
    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing, contract=BRONZE) as lab:
            store, whole = lab.model.store, Path(lab.model.card.path)
            head, tail = (lab.model.folder / f"{lab.cut}.{half}.onnx" for half in ("head", "tail"))
            asked = asyncio.ensure_future(lab.ask(deadline_ms=1000.0))
            await asyncio.sleep(0.5)
            assert lab.seen
            store._budget_bytes = 1  # everything that may be closed is
            store.forget(head)
            store.get(head)
            assert store.is_open(tail)
            assert not store.is_open(whole)
            assert_right(await asked)
            store.forget(head)
            store.get(head)
            assert not store.is_open(tail)

    run_in_virtual_time(story())


@pytest.mark.parametrize("late_s", [0.02, 0.2], ids=["on the worker", "at the companion"])
def test_o_wi_13_a_daemon_that_stops_finishes_here_what_waits_for_a_silent_companion(
    tmp_path: Path, late_s: float
) -> None:
    """Within what the device needs, not at the request's deadline."""

    async def story() -> None:
        async with Lab(tmp_path, behave=says_nothing) as lab:
            asked = asyncio.create_task(lab.ask(deadline_ms=20_000.0))
            await asyncio.sleep(late_s)
            lab.lateness.close()
            outcome = await asked
            assert_right(outcome)
            assert outcome.ran is LOCAL
            assert outcome.total_ms <= max(late_s * 1000, HEAD_MS) + TAIL_MS + 1.0

    run_in_virtual_time(story())
