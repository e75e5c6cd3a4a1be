"""The parent's side of the workbench: runs one job in a child process, passes on its progress, raises its typed error.

The child (`python -m split.workbench`, see `__main__.py`) writes JSON lines on stdout: `{"progress": [stage, ratio]}`
and at most one `{"error": {"code", "message"}}`. It runs within limits (see `limits.py`): a child that hangs, takes too
much, or that a native library kills, is an InvalidModel for the caller: his process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from split.errors import InvalidModel, IsthmusError
from split.graph.card import CARD_VERSION
from split.profiles.measured import PROFILE_VERSION
from split.workbench.limits import Limits, default_limits, inherited_limit, tells_of_memory

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the stage's name and the ratio done, 0…1."""

FORMATS: Final = f"card-{CARD_VERSION}-profile-{PROFILE_VERSION}"
"""What this code writes and reads. The child is told its parent's: it may start from files that an upgrade replaced."""

LOADING: Final = ("prepare", "probe")
"""Jobs without which a model does not load."""

LINE_BYTES_MAX: Final = 1 << 20
STDERR_BYTES_KEPT: Final = 2000
DRAIN_S: Final = 5.0
"""For the pipes of a child that was ended: at once, unless something that fled its process group holds them open."""


async def run_child(
    command: Sequence[str],
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
    cpu_s: int | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Run `python -m split.workbench COMMAND…` to its end; the second word of the command is the model's file.

    `memory_bytes`, `cpu_s`: what it may use, all threads together; None as `default_limits` has it. Raises the child's
    own IsthmusError; InvalidModel, naming the limit, when it takes longer than `timeout_s`, uses more or dies.
    Cancelling ends it, and it ends with this process; what it has in its temporary folder goes with it.
    """
    scratch = await asyncio.to_thread(_scratch)
    try:
        await _run(command, scratch, timeout_s, memory_bytes, cpu_s, on_progress)
    finally:
        if scratch:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))


def _scratch() -> str:
    """A folder for what the child has no use for later, which a child that is ended leaves there, weights and all; ""
    where none can be made: most jobs need none, and the others say so."""
    try:
        return tempfile.mkdtemp(prefix="isthmus-child-")
    except OSError:
        return ""


async def _run(
    command: Sequence[str],
    scratch: str,
    timeout_s: float,
    memory_bytes: int | None,
    cpu_s: int | None,
    on_progress: Progress | None,
) -> None:
    model = Path(command[1]) if len(command) > 1 else Path()
    usual = await asyncio.to_thread(default_limits, model, timeout_s)
    limits = Limits(memory_bytes=memory_bytes or usual.memory_bytes, cpu_s=cpu_s or usual.cpu_s)
    process = await asyncio.create_subprocess_exec(
        *_argv(command, limits),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        start_new_session=True,
        env=_environment(scratch),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    outcome = _Outcome(command, limits, on_progress)
    ended = False
    try:
        async with asyncio.timeout(timeout_s):
            async with asyncio.TaskGroup() as readers:
                readers.create_task(_read(process.stdout, outcome.line))
                readers.create_task(_read(process.stderr, outcome.complaint))
            await process.wait()
            ended = True
    except TimeoutError:
        outcome.timed_out_s = timeout_s
    finally:
        if not ended:
            _end(process.pid)
            # The pipes must be read to their end, or the transport outlives the loop.
            await asyncio.shield(_drain(process))
    outcome.settle(process.returncode)


def run_child_sync(command: Sequence[str], *, timeout_s: float, on_progress: Progress | None = None) -> None:
    """`run_child` for threads without an event loop: the command line's, where SIGTERM ends it as Ctrl-C does, and what
    it has in temporary folders with it (SystemExit, with the status that a shell gives it), and a daemon's beside its
    loop."""
    job = run_child(command, timeout_s=timeout_s, on_progress=on_progress)
    asyncio.run(_until_terminated(job) if threading.current_thread() is threading.main_thread() else job)


async def _until_terminated(job: Coroutine[None, None, None]) -> None:
    loop, task, terminated = asyncio.get_running_loop(), asyncio.ensure_future(job), asyncio.Event()

    def end() -> None:
        terminated.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated.is_set():
            raise
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _read(stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line over the limit: no message of ours
            continue
        if not line:
            return
        take(line)


async def _drain(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await process.communicate()


class _Outcome:
    """What the child said, and what that means for the caller."""

    def __init__(self, command: Sequence[str], limits: Limits, on_progress: Progress | None) -> None:
        self._job = command[0]
        self._what = f"{command[0]} of {command[1] if len(command) > 1 else 'the model'}"
        self._limits = limits
        self._on_progress = on_progress
        self._error: tuple[str, str] | None = None
        self._complaints = b""
        self.timed_out_s: float | None = None

    def line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            match message:
                case {"progress": [str(stage), float() | int() as ratio]}:
                    if self._on_progress is not None:
                        self._on_progress(stage, float(ratio))
                case {"error": {"code": str(code), "message": str(text)}}:
                    self._error = (code, text)
                case {"warning": str(text)}:
                    log.warning("%s: %s", self._what, text)
                case _:
                    pass
        except ValueError:
            pass  # something a library printed

    def complaint(self, line: bytes) -> None:
        self._complaints = (self._complaints + line)[-STDERR_BYTES_KEPT:]

    def settle(self, returncode: int | None) -> None:
        """Raise what has to be raised."""
        if self.timed_out_s is not None:
            raise InvalidModel(
                f"{'load timeout: ' if self._job in LOADING else ''}{self._what} did not end within "
                f"{self.timed_out_s:g} s; the model is too big or makes it hang"
            )
        if self._error is not None:
            code, text = self._error
            if tells_of_memory(text):
                raise InvalidModel(f"{self._out_of_memory()}: {text}")
            raise _typed(code, text)
        if not returncode:
            return
        complaints = self._complaints.decode(errors="replace").strip()
        if tells_of_memory(complaints):
            raise InvalidModel(self._out_of_memory())
        last = "".join(f": {line}" for line in complaints.splitlines()[-1:])
        raise InvalidModel(f"{self._what} {self._death(returncode)}{last}")

    def _out_of_memory(self) -> str:
        if inherited := inherited_limit(self._limits.memory_bytes):
            return f"{self._what} needs more than {inherited}; start it with more"
        return (
            f"{self._what} needs more than the {self._limits.memory_bytes >> 20} MiB of memory that its child process "
            "may use; the agent's key workbench.memory_bytes allows more"
        )

    def _death(self, returncode: int) -> str:
        if returncode > 0:
            return f"failed ({returncode})"
        match -returncode:
            case signal.SIGXCPU:
                return f"used more than the {self._limits.cpu_s} s of processor time it may use and was ended"
            case signal.SIGKILL:
                return "was killed (SIGKILL): the system ran out of memory, or somebody did it by hand"
            case number:
                name = next((one.name for one in signal.Signals if one == number), number)
                inherited = inherited_limit(self._limits.memory_bytes)
                too_little = f", or needs more than {inherited}" if inherited else ""
                return f"died by signal {name}: the model makes the runtime crash{too_little}"


def _typed(code: str, message: str) -> IsthmusError:
    for kind in _tree(IsthmusError):
        if kind.code == code and kind.__init__ is Exception.__init__:
            return kind(message)
    return IsthmusError(message)


def _tree(kind: type[IsthmusError]) -> Iterator[type[IsthmusError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _end(pid: int) -> None:
    """End the child and what it started (it leads its own process group)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _argv(command: Sequence[str], limits: Limits) -> list[str]:
    start = (FORMATS, limits.memory_bytes, limits.cpu_s, os.getpid())
    # -P: a folder `split` or a file `numpy.py` in the working directory is not ours.
    return [sys.executable, "-P", "-m", "split.workbench", *map(str, start), *command]


def _environment(scratch: str = "") -> dict[str, str]:
    """Ours, with the same packages to be found first whatever the working directory is, and a temporary folder."""
    here = str(Path(__file__).resolve().parents[2])
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    return found | {"TMPDIR": scratch} if scratch else found


def say(message: dict[str, Any]) -> None:
    """The child's side of a message: one JSON line on stdout."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
