"""The parent's side of the workbench: runs one job in a child process, passes on its progress, raises its typed error.

The child (`python -m split.workbench`, see `__main__.py`) writes JSON lines on stdout: `{"progress": [stage, ratio]}`
and at most one `{"error": {"code", "message"}}`. A child that hangs, or that a native library kills, is an InvalidModel
for the caller: his process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from split.errors import InvalidModel, IsthmusError

Progress = Callable[[str, float], None]
"""Called with the stage's name and the ratio done, 0…1."""

LINE_BYTES_MAX: Final = 1 << 20
STDERR_BYTES_KEPT: Final = 2000


async def run_child(command: Sequence[str], *, timeout_s: float, on_progress: Progress | None = None) -> None:
    """Run `python -m split.workbench COMMAND…` to its end.

    Raises the child's own IsthmusError; InvalidModel when it takes longer than `timeout_s` or dies. Cancelling ends it.
    """
    process = await asyncio.create_subprocess_exec(
        *_argv(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        start_new_session=True,
        env=_environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log = _Outcome(command, on_progress)
    try:
        async with asyncio.timeout(timeout_s):
            async with asyncio.TaskGroup() as readers:
                readers.create_task(_read(process.stdout, log.line))
                readers.create_task(_read(process.stderr, log.complaint))
            await process.wait()
    except TimeoutError:
        log.timed_out_s = timeout_s
    finally:
        if process.returncode is None:
            _end(process.pid)
        # The pipes must be read to their end, or the transport outlives the loop.
        await asyncio.shield(process.communicate())
    log.settle(process.returncode)


def run_child_sync(command: Sequence[str], *, timeout_s: float, on_progress: Progress | None = None) -> None:
    """`run_child` for programs without an event loop (the command line)."""
    asyncio.run(run_child(command, timeout_s=timeout_s, on_progress=on_progress))


async def _read(stream: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    with contextlib.suppress(ValueError):  # a line over the limit: no message of ours
        async for line in stream:
            take(line)


class _Outcome:
    """What the child said, and what that means for the caller."""

    def __init__(self, command: Sequence[str], on_progress: Progress | None) -> None:
        self._command = command
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
                case _:
                    pass
        except ValueError:
            pass  # something a library printed

    def complaint(self, line: bytes) -> None:
        self._complaints = (self._complaints + line)[-STDERR_BYTES_KEPT:]

    def settle(self, returncode: int | None) -> None:
        """Raise what has to be raised."""
        what = f"{self._command[0]} of {self._command[1] if len(self._command) > 1 else 'the model'}"
        if self.timed_out_s is not None:
            raise InvalidModel(
                f"{what} did not end within {self.timed_out_s:g} s; the model is too big or makes it hang"
            )
        if self._error is not None:
            raise _typed(*self._error)
        if returncode:
            last = self._complaints.decode(errors="replace").strip().splitlines()[-1:]
            died = f"died by signal {signal.Signals(-returncode).name}" if returncode < 0 else f"failed ({returncode})"
            raise InvalidModel(" ".join([f"{what} {died}", *(f": {line}" for line in last)]).replace(" : ", ": "))


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


def _argv(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "split.workbench", *command]


def _environment() -> dict[str, str]:
    """Ours, with the same packages to be found first whatever the working directory is."""
    here = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


def say(message: dict[str, Any]) -> None:
    """The child's side of a message: one JSON line on stdout."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
