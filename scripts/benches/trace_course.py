"""A trace happening to a pair: the link's conditions as they come, device and companion slowed down as by heat or load.

A program is slowed by stopping and continuing it each few milliseconds (SIGSTOP, SIGCONT), so that all that it does
takes longer by the ratio; a busy neighbour on its processor would not do, since a scheduler favours what has slept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from agent.replay.world import Moment
from scripts.lab_pair import LabPair

RUNS_S: Final = 0.0005
"""How long a slowed program runs at a stretch: short beside every stage that counts, so that each is stretched by the
ratio and not by whole stretches (at 2 ms one of 4 ms took 10, 20 or 30)."""
LOOK_S: Final = 0.02
SWITCH_S: Final = 0.0002
"""How long another thread of this process may keep a brake waiting: Python's own 5 ms are ten stretches."""
OWED_S: Final = 0.01
"""What is made up for of a thread that was late itself; more was no brake's matter but a busy machine's."""


class _Brake:
    """One program, held back by a thread of its own; `ratio` may change at any time.

    What is held to the ratio is what it ran and stood since it was slowed: the sleeps of this thread are longer than
    asked for, by a share of so short a stretch that would make a ratio of 5 one of 4."""

    def __init__(
        self,
        send: Callable[[signal.Signals], None],
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ratio = 1.0
        self._send = send
        self._now_s, self._sleep = now_s, sleep
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()

    def _hold(self) -> None:
        with contextlib.suppress(OSError):  # of this thread: before whatever else runs here, since it must not be late
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        owed_s, since_s = 0.0, self._now_s()
        try:
            while not self._ended.is_set():
                if (ratio := self.ratio) <= 1.0:
                    self._ended.wait(LOOK_S)
                    owed_s, since_s = 0.0, self._now_s()
                    continue
                owed_s, since_s = self._stretch(ratio, owed_s, since_s)
        finally:
            self._send(signal.SIGCONT)

    def _stretch(self, ratio: float, owed_s: float, since_s: float) -> tuple[float, float]:
        """It runs since `since_s`, and stands once: for `owed_s` longer, or (below 0) runs the longer for it. What it
        has stood too short by then, and since when it runs again."""
        self._sleep(RUNS_S + max(-owed_s, 0.0) / (ratio - 1.0))
        self._send(signal.SIGSTOP)
        stopped_s = self._now_s()
        owed_s += (stopped_s - since_s) * (ratio - 1.0)
        self._sleep(max(owed_s, 0.0))
        self._send(signal.SIGCONT)
        since_s = self._now_s()
        owed_s -= since_s - stopped_s
        return min(max(owed_s, -OWED_S), OWED_S), since_s


@contextmanager
def driven(pair: LabPair, course: Sequence[Moment]) -> Iterator[Callable[[], float]]:
    """The trace runs from now on; gives its clock in seconds. At the end everything is as in its first moment."""
    brakes = {name: _Brake(partial(pair.send_signal, name)) for name in ("agent", "companion")}
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    started_s, ended = time.monotonic(), threading.Event()

    def clock_s() -> float:
        return time.monotonic() - started_s

    def follow() -> None:
        for before, moment in zip((None, *course), course, strict=False):
            if ended.wait(max(moment.at_s - clock_s(), 0.0)):
                return
            _apply(pair, brakes["agent"], brakes["companion"], moment, before)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield clock_s
    finally:
        ended.set()
        follower.join()
        for brake in brakes.values():
            brake.release()
        sys.setswitchinterval(switch_s)
        pair.change(course[0].up_mbit_s, course[0].down_mbit_s, course[0].rtt_ms, connected=True)


def _apply(pair: LabPair, device: _Brake, companion: _Brake, moment: Moment, before: Moment | None) -> None:
    device.ratio, companion.ratio = moment.edge_ratio, moment.cloud_ratio
    link = (moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, moment.connected)
    if before is None or link != (before.up_mbit_s, before.down_mbit_s, before.rtt_ms, before.connected):
        with contextlib.suppress(OSError):  # the lab is gone: the run ends anyway
            pair.change(moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, connected=moment.connected)
