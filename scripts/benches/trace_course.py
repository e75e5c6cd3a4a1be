"""A trace happening to a pair: the link's conditions as they come, device and companion slowed down as by heat or load.

A program is slowed by stopping and continuing it each few milliseconds (SIGSTOP, SIGCONT), so that all that it does
takes longer by the ratio; a busy neighbour on its processor would not do, since a scheduler favours what has slept.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from agent.replay.world import Moment
from scripts.lab_pair import LabPair

RUNS_S: Final = 0.002
"""How long a slowed program runs at a stretch: shorter than any stage that counts."""
LOOK_S: Final = 0.02


class _Brake:
    """One program, held back by a thread of its own; `ratio` may change at any time."""

    def __init__(self, send: Callable[[signal.Signals], None]) -> None:
        self.ratio = 1.0
        self._send = send
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()

    def _hold(self) -> None:
        try:
            while not self._ended.is_set():
                if self.ratio <= 1.0:
                    self._ended.wait(LOOK_S)
                    continue
                self._send(signal.SIGCONT)
                time.sleep(RUNS_S)
                self._send(signal.SIGSTOP)
                time.sleep(RUNS_S * (self.ratio - 1.0))
                self._send(signal.SIGCONT)
        finally:
            self._send(signal.SIGCONT)


@contextmanager
def driven(pair: LabPair, course: Sequence[Moment]) -> Iterator[Callable[[], float]]:
    """The trace runs from now on; gives its clock in seconds. At the end everything is as in its first moment."""
    brakes = {name: _Brake(partial(pair.send_signal, name)) for name in ("agent", "companion")}
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
        pair.change(course[0].up_mbit_s, course[0].down_mbit_s, course[0].rtt_ms, connected=True)


def _apply(pair: LabPair, device: _Brake, companion: _Brake, moment: Moment, before: Moment | None) -> None:
    device.ratio, companion.ratio = moment.edge_ratio, moment.cloud_ratio
    link = (moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, moment.connected)
    if before is None or link != (before.up_mbit_s, before.down_mbit_s, before.rtt_ms, before.connected):
        with contextlib.suppress(OSError):  # the lab is gone: the run ends anyway
            pair.change(moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, connected=moment.connected)
