"""A step that a model can do without, tried in a process of its own: what fails, hangs or crashes there costs the step.

A fork, so that nothing has to be read or imported again, and so that the step stands within the limits its caller
stands within. The caller's other threads are not there: it suits pure computations, such as onnx's passes over a graph.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

STEP_S: Final = 10.0
"""Seconds for a step: a model of 5,000 nodes takes a fraction of one."""


class StepFailed(Exception):
    """Says why, as the end of a sentence. Not for callers of `split.graph`: they get the model without the step."""


def attempt(step: Callable[[], bytes], *, limit_s: float = STEP_S) -> bytes:
    """What `step` returns; StepFailed when it raises, ends its process, or takes longer than `limit_s`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_perform, args=(step, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise StepFailed(f"that did not end within {limit_s:g} s")
        result, why_not = receiver.recv()
    except EOFError:
        process.join()
        raise StepFailed(_death(process.exitcode)) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if result is None:
        raise StepFailed(why_not)
    assert isinstance(result, bytes)
    return result


def _perform(step: Callable[[], bytes], sender: Connection) -> None:
    try:
        message: tuple[bytes | None, str] = (step(), "")
    except Exception as error:  # a C++ pass raises whatever its checks meet
        message = (None, f"{type(error).__name__}: {error}")
    sender.send(message)


def _death(exitcode: int | None) -> str:
    name = next((one.name for one in signal.Signals if exitcode == -one), f"status {exitcode}")
    return f"the process that tried it ended with {name}"
