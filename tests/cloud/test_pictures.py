"""How much is decoded at once is bounded by bytes, whoever sends it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloud.pictures import DECODING_BYTES, DecodingRoom
from split.codec.image import PIXELS_MAX, ImageSpec, decoding_bytes
from split.errors import TooLarge


class Job:
    """Work in a thread that says when it began and ends when it is let go."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.may_end.wait(30)
        return "done"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_does_not_fit_beside_the_others_waits_its_turn():
    room, jobs = DecodingRoom(100), [Job() for _ in range(3)]
    tasks = [asyncio.create_task(room.run(size, job)) for size, job in zip((60, 50, 40), jobs, strict=True)]
    await asyncio.to_thread(jobs[0].begun.wait, 30)
    await settle()
    # the third would fit, but the second was here first
    assert [job.begun.is_set() for job in jobs] == [True, False, False]
    jobs[0].may_end.set()
    for job in jobs[1:]:
        assert await asyncio.to_thread(job.begun.wait, 30)
        job.may_end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 3


async def test_a_request_that_goes_away_keeps_its_room_until_its_thread_has_ended():
    room, first, second, third = DecodingRoom(100), Job(), Job(), Job()
    gone = asyncio.create_task(room.run(100, first))
    await asyncio.to_thread(first.begun.wait, 30)
    waiting = asyncio.create_task(room.run(100, second))
    last = asyncio.create_task(room.run(100, third))
    await settle()
    gone.cancel()
    waiting.cancel()
    await settle()
    assert not third.begun.is_set()
    first.may_end.set()
    third.may_end.set()
    assert await last == "done"
    assert not second.begun.is_set()


async def test_more_than_all_the_room_is_refused():
    with pytest.raises(TooLarge, match="take 101 bytes while they are decoded, at most 100"):
        await DecodingRoom(100).run(101, Job())


async def test_the_largest_picture_that_is_taken_fits():
    import io

    from PIL import Image

    bitmap = io.BytesIO()
    Image.new("1", (10_000, PIXELS_MAX // 10_000)).save(bitmap, "PNG")
    spec = ImageSpec(resize=256, crop=224, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert 8 * PIXELS_MAX <= decoding_bytes(bitmap.getvalue(), spec) <= DECODING_BYTES
