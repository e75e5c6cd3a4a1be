"""A step that a model can do without, tried in a process of its own: what fails, hangs or crashes there costs the step.

A fresh interpreter, not a fork: numpy has threads of its own, and a fork of a process with threads may meet a lock that
nobody will open. It stands within the limits its caller stands within (`split/workbench/limits.py`), and ends by itself
when its time is over, should the caller be gone by then.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from typing import Final

STEP_S: Final = 9.0
"""Seconds for a step, the start of its interpreter included: a model of 5,000 nodes takes a fraction of one, and a load
whose step hangs ends within ten."""

INLINE: Final = """
from onnx import ModelProto, inliner
result = inliner.inline_local_functions(ModelProto.FromString(data)).SerializeToString()
"""
"""A model without its local functions."""

_AROUND: Final = """
import os, signal, sys
signal.alarm({seconds})
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # native libraries print on file descriptor 1
data = sys.stdin.buffer.read()
try:
{step}
except Exception as error:  # a C++ pass raises whatever its checks meet
    sys.exit(f"{{type(error).__name__}}: {{error}}")
answer.write(result)
answer.close()
"""


class StepFailed(Exception):
    """Says why, as the end of a sentence. Not for callers of `split.graph`: they get the model without the step."""


def attempt(step: str, data: bytes, *, limit_s: float = STEP_S) -> bytes:
    """What `step`, lines of Python, makes `result` of `data`; StepFailed when it raises, ends its process, or takes
    longer than `limit_s`."""
    lines = "\n".join(f"    {line}" for line in step.splitlines())
    program = _AROUND.format(seconds=math.ceil(limit_s), step=lines)
    # -P: a file `onnx.py` in the working directory is not ours.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise StepFailed(f"that did not end within {limit_s:g} s") from None
    if done.returncode < 0:
        raise StepFailed(_death(-done.returncode))
    if done.returncode > 0:
        lines_said = done.stderr.decode(errors="replace").splitlines()
        raise StepFailed(lines_said[-1] if lines_said else f"the process that tried it ended with {done.returncode}")
    return done.stdout


def _death(number: int) -> str:
    name = next((one.name for one in signal.Signals if one == number), f"signal {number}")
    return f"the process that tried it ended with {name}"
