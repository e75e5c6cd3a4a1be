"""Notes are written a moment later, in order, all of them, and at once when somebody wants to read."""

from __future__ import annotations

import asyncio

import pytest

from agent.afterwards import AFTER_S, NOTES_MAX, Afterwards
from split.transport.virtual_time import run_in_virtual_time


def test_notes_are_written_together_a_moment_later_in_their_order() -> None:
    async def story() -> None:
        books: list[tuple[str, float]] = []
        afterwards = Afterwards()
        for name in ("first", "second"):
            afterwards.note(lambda name: books.append((name, asyncio.get_running_loop().time())), name)
            await asyncio.sleep(AFTER_S / 4)
        assert books == []
        await asyncio.sleep(AFTER_S)
        assert books == [("first", pytest.approx(AFTER_S)), ("second", pytest.approx(AFTER_S))]
        await asyncio.sleep(1.0)
        assert len(books) == 2

    run_in_virtual_time(story())


def test_who_reads_settles_first_and_later_notes_are_still_written() -> None:
    async def story() -> None:
        books: list[int] = []
        afterwards = Afterwards()
        afterwards.note(books.append, 1)
        afterwards.settle()
        assert books == [1]
        afterwards.note(books.append, 2)
        await asyncio.sleep(2 * AFTER_S)
        assert books == [1, 2]

    run_in_virtual_time(story())


def test_many_notes_do_not_pile_up() -> None:
    async def story() -> None:
        books: list[int] = []
        afterwards = Afterwards()
        for number in range(NOTES_MAX):
            afterwards.note(books.append, number)
        assert books == [*range(NOTES_MAX)]

    run_in_virtual_time(story())


def test_a_note_that_fails_is_logged_and_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        books: list[int] = []
        afterwards = Afterwards()
        afterwards.note(lambda: 1 // 0)
        afterwards.note(books.append, 1)
        afterwards.settle()
        assert books == [1]
        assert "could not be noted" in caplog.text

    run_in_virtual_time(story())
