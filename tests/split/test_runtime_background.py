"""Work on threads that keep nobody: what is done, what is refused, what becomes of work that hangs."""

import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial

import pytest

from split.runtime.background import Background, in_own_thread


class Thing:
    """What a weak reference can point at."""


def raises() -> None:
    raise ValueError("no")


def test_work_is_done_in_turn_and_its_error_goes_to_whoever_waits() -> None:
    background, done = Background("test"), list[int]()
    failed = background.submit(raises)
    for number in range(3):
        last = background.submit(partial(done.append, number))
    last.result(30)
    assert done == [0, 1, 2]
    with pytest.raises(ValueError, match="no"):
        failed.result(30)
    background.close()


def test_closing_cancels_what_waits_outlives_what_hangs_and_refuses_what_comes() -> None:
    background, begun, goes_on = Background("test"), threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return goes_on.wait(60)

    stuck, waiting = background.submit(hang), background.submit(raises)
    assert begun.wait(30)
    background.close(timeout_s=0.01)
    with pytest.raises(CancelledError):
        waiting.result(30)
    with pytest.raises(RuntimeError, match="test is closed"):
        background.submit(raises)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "test"]
    assert thread.daemon  # the interpreter ends without it
    goes_on.set()
    assert stuck.result(30)
    thread.join(30)
    assert not thread.is_alive()


def test_an_idle_thread_keeps_nothing_of_what_it_did() -> None:
    background = Background("test")
    thing = Thing()
    gone = weakref.ref(thing)
    background.submit(partial(id, thing)).result(30)
    background.submit(lambda: None).result(30)
    del thing
    assert gone() is None
    background.close()


def test_work_in_its_own_thread_gives_its_result_or_its_error() -> None:
    assert in_own_thread(lambda: threading.current_thread().name, name="alone").result(30) == "alone"
    with pytest.raises(ValueError, match="no"):
        in_own_thread(raises, name="alone").result(30)
    goes_on = threading.Event()
    future = in_own_thread(lambda: goes_on.wait(60), name="alone")
    assert not future.cancel()
    goes_on.set()
    assert future.result(30)
