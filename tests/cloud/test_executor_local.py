"""Whose turn it is on the companion's one worker. Segments are stand-ins that note their order."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cloud.executor import Work
from cloud.executor.local import LocalExecutor
from split.errors import DeadlineExceeded, EngineFailed, InvalidModel, ModelUnavailable
from split.runtime.store import SegmentStore


class Notebook:
    """A store of one segment that notes who ran; the first run waits until `go` is set."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.go = threading.Event()
        self.started = threading.Event()

    def get(self, path: Path) -> Notebook:
        return self

    def run(self, feeds, outputs):
        self.started.set()
        assert self.go.wait(30)
        (name,) = feeds
        if name == "broken":
            raise EngineFailed("it broke")
        self.ran.append(name)
        return feeds


@pytest.fixture
def notebook():
    return Notebook()


@pytest.fixture
def executor(notebook):
    executor = LocalExecutor(notebook)
    yield executor
    notebook.go.set()
    executor.close()


def work(name, device="a", deadline_at_s=math.inf, expected_ms=10.0):
    return Work(
        path=Path("tail"),
        feeds={name: np.zeros(1)},
        outputs=None,
        device=device,
        deadline_at_s=deadline_at_s,
        expected_ms=expected_ms,
    )


async def submit(executor, notebook, *works):
    """Submit all while the worker is busy with a first one, so that the order is the executor's choice."""
    tasks = [asyncio.create_task(executor.run(work("first", device="other", expected_ms=0.0)))]
    await asyncio.to_thread(notebook.started.wait, 30)
    for one in works:
        tasks.append(asyncio.create_task(executor.run(one)))
        await asyncio.sleep(0)
    return tasks


async def test_of_one_device_the_earliest_deadline_goes_first(executor, notebook):
    now_s = time.monotonic()
    late, soon = work("late", deadline_at_s=now_s + 200), work("soon", deadline_at_s=now_s + 100)
    tasks = await submit(executor, notebook, work("whenever"), late, soon)
    notebook.go.set()
    await asyncio.gather(*tasks)
    assert notebook.ran == ["first", "soon", "late", "whenever"]


async def test_a_device_with_much_work_does_not_keep_another_waiting(executor, notebook):
    flood = [work(f"a{number}", "a") for number in range(6)]
    tasks = await submit(executor, notebook, *flood, work("b0", "b"), work("b1", "b"))
    assert executor.wait_ms("a") == pytest.approx(80.0)  # its own 60 and b's 20
    assert executor.wait_ms("b") == pytest.approx(40.0)  # its own 20 and as much of a's
    assert executor.wait_ms("c") == pytest.approx(0.0)
    notebook.go.set()
    await asyncio.gather(*tasks)
    assert notebook.ran.index("b1") <= 5
    assert sorted(notebook.ran[1:]) == sorted([*(f"a{n}" for n in range(6)), "b0", "b1"])


async def test_work_past_its_deadline_is_not_started(executor, notebook):
    tasks = await submit(executor, notebook, work("late", deadline_at_s=time.monotonic() - 1))
    notebook.go.set()
    await tasks[0]
    with pytest.raises(DeadlineExceeded):
        await tasks[1]
    assert notebook.ran == ["first"]


async def test_cancelled_work_leaves_the_queue_at_once(executor, notebook):
    tasks = await submit(executor, notebook, work("cancelled"), work("kept"))
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert executor.wait_ms("a") == pytest.approx(10.0)
    notebook.go.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert notebook.ran == ["first", "kept"]


async def test_a_failing_run_fails_its_caller_and_nobody_else(executor, notebook):
    tasks = await submit(executor, notebook, work("broken"), work("fine"))
    notebook.go.set()
    with pytest.raises(EngineFailed):
        await tasks[1]
    assert list((await tasks[2]).outputs) == ["fine"]


async def test_nothing_is_remembered_of_devices_that_have_nothing_here(executor, notebook):
    notebook.go.set()
    await asyncio.gather(*(executor.run(work(f"{n}", device=f"device-{n}")) for n in range(50)))
    await executor.run(work("last", "a"))
    while executor._running is not None:
        await asyncio.to_thread(lambda: None)
    assert executor._lines == {}


async def test_closing_answers_what_waits_and_refuses_what_comes(executor, notebook):
    tasks = await submit(executor, notebook, work("waiting"))
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    while not executor._closed:
        await asyncio.to_thread(lambda: None)
    notebook.go.set()
    await closing
    assert list((await tasks[0]).outputs) == ["first"]
    with pytest.raises(ModelUnavailable):
        await tasks[1]
    with pytest.raises(ModelUnavailable):
        await executor.run(work("after"))


class StuckEngine:
    """Opens every file but those called stuck."""

    name = "stuck"

    def __init__(self) -> None:
        self.go = threading.Event()

    def open(self, path: Path, *, threads: int, spin_us: int = 0) -> Notebook:
        if path.name == "stuck.onnx":
            assert self.go.wait(60)
        return Notebook()

    def trim(self) -> None:
        pass


async def test_an_opening_that_hangs_ends_at_its_limit_and_others_are_opened_meanwhile_and_after(tmp_path):
    engine = StuckEngine()
    store = SegmentStore(engine, threads=1, budget_bytes=1000)
    executor = LocalExecutor(store, open_timeout_s=0.2)
    words = r"load timeout: the companion's runtime did not open stuck\.onnx within 0\.2 s"
    with pytest.raises(InvalidModel, match=words):
        await executor.open(tmp_path / "stuck.onnx")
    await executor.open(tmp_path / "fine.onnx")
    assert store.is_open(tmp_path / "fine.onnx")
    with pytest.raises(InvalidModel, match=words):  # not the opening that hangs: another one
        await executor.open(tmp_path / "stuck.onnx")
    stuck = [one for one in threading.enumerate() if one.name == "isthmus-open stuck.onnx"]
    assert [one.daemon for one in stuck] == [True, True]  # the companion ends without them
    executor.close()
    engine.go.set()
    for one in stuck:
        one.join(30)
    store.close()
