"""Slows a program down by a ratio, by stopping and continuing it: `python brake.py PID`, ratios come as lines of stdin,
and with its end the program runs freely.

A process of its own, before whatever else runs here: a thread of the bench waits for Python's lock, which on a busy
machine is held by one that does not run; and what should take five times as long took three times. And SIGSTOP goes to
every thread: sent to the process it waits for the main one, which the thread that computes keeps from their processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

RUNS_S: Final = 0.001
"""How long a slowed program runs at a stretch: short beside every stage that counts, so that each is stretched by the
ratio and not by whole stretches (at 2 ms one of 4 ms took 10, 20 or 30)."""
WAKES_S: Final = 0.00014
"""What of it passes before the thread that computes is on its processor again: without, 1 of 5 ms made a tail of 9.4 ms
one of 54.8, 5.8 times as long (companion with 15 threads, two virtual x86 cores)."""
OWED_S: Final = 0.01
"""What is made up for of a brake that was late itself; more was no brake's matter but a busy machine's."""
LISTED_S: Final = 0.05
"""So old may the list of a program's threads be."""


class Brake:
    """What is held to the ratio is what the program ran and stood since it was slowed: sleeps are longer than asked
    for, by a share of so short a stretch that would make a ratio of 5 one of 4."""

    def __init__(
        self,
        send: Callable[[signal.Signals], None],
        *,
        wakes_s: float = WAKES_S,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send = send
        self._wakes_s = wakes_s
        self._now_s, self._sleep = now_s, sleep
        self._owed_s = 0.0
        """What it has stood too short, or (below 0) too long."""
        self._runs_since_s = now_s()

    def release(self) -> None:
        """It runs freely, and nothing is owed."""
        self._send(signal.SIGCONT)
        self._owed_s, self._runs_since_s = 0.0, self._now_s()

    def stretch(self, ratio: float) -> None:
        """It runs and stands once, at `ratio` > 1."""
        self._sleep(self._wakes_s + RUNS_S + max(-self._owed_s, 0.0) / (ratio - 1.0))
        self._send(signal.SIGSTOP)
        stopped_s = self._now_s()
        owed_s = self._owed_s + max(stopped_s - self._runs_since_s - self._wakes_s, 0.0) * (ratio - 1.0)
        self._sleep(max(owed_s, 0.0))
        self._send(signal.SIGCONT)
        self._runs_since_s = self._now_s()
        self._owed_s = min(max(owed_s - (self._runs_since_s - stopped_s), -OWED_S), OWED_S)


class Threads:
    """Of a process, signalled one by one (tgkill(2))."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ids: list[int] = []
        self._listed_at_s = -LISTED_S
        self._tgkill = ctypes.CDLL(None).tgkill

    def send(self, which: signal.Signals) -> None:
        """SIGCONT needs no more than one. ProcessLookupError once it has ended."""
        if which is signal.SIGCONT:
            os.kill(self._pid, which)
            return
        if (now_s := time.monotonic()) - self._listed_at_s >= LISTED_S:
            try:
                self._ids = [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]
            except FileNotFoundError as error:
                raise ProcessLookupError(f"process {self._pid} has ended") from error
            self._listed_at_s = now_s
        for thread in self._ids:
            self._tgkill(self._pid, thread, int(which))  # one that has ended since: nothing happens


def main() -> None:
    pid = int(sys.argv[1])
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    brake, ratio = Brake(Threads(pid).send), 1.0
    with contextlib.suppress(ProcessLookupError):
        try:
            while True:
                if ratio <= 1.0 or select.select([sys.stdin], [], [], 0.0)[0]:
                    if not (line := sys.stdin.readline()):
                        return
                    ratio = float(line)
                    brake.release()
                else:
                    brake.stretch(ratio)
        finally:
            brake.release()


if __name__ == "__main__":
    main()
