"""A trace happening to a pair: the link's conditions as they come, device and companion slowed down as by heat or load.

A program is slowed by stopping and continuing it every few milliseconds (`brake.py`), so that all that it does takes
longer by the ratio; a busy neighbour on its processor would not do, since a scheduler favours what has slept.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.replay.world import Moment
from scripts.lab_pair import LabPair


class _Brake:
    """One program, held back by a process beside it; with the block it is let go."""

    def __init__(self, pid: int) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("brake.py")), str(pid)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)

    def hold(self, ratio: float) -> None:
        """It takes so many times as long from now on."""
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(f"{ratio}\n")
        pipe.flush()

    def __enter__(self) -> _Brake:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input is the end of it


@contextmanager
def driven(pair: LabPair, course: Sequence[Moment]) -> Iterator[Callable[[], float]]:
    """The trace runs from now on; gives its clock in seconds. At the end everything is as in its first moment."""
    with _Brake(pair.pid("agent")) as device, _Brake(pair.pid("companion")) as companion:
        started_s, ended = time.monotonic(), threading.Event()

        def clock_s() -> float:
            return time.monotonic() - started_s

        def follow() -> None:
            for before, moment in zip((None, *course), course, strict=False):
                if ended.wait(max(moment.at_s - clock_s(), 0.0)):
                    return
                _apply(pair, device, companion, moment, before)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield clock_s
        finally:
            ended.set()
            follower.join()
            pair.change(course[0].up_mbit_s, course[0].down_mbit_s, course[0].rtt_ms, connected=True)


def _apply(pair: LabPair, device: _Brake, companion: _Brake, moment: Moment, before: Moment | None) -> None:
    if before is None or moment.edge_ratio != before.edge_ratio:
        device.hold(moment.edge_ratio)
    if before is None or moment.cloud_ratio != before.cloud_ratio:
        companion.hold(moment.cloud_ratio)
    link = (moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, moment.connected)
    if before is None or link != (before.up_mbit_s, before.down_mbit_s, before.rtt_ms, before.connected):
        with contextlib.suppress(OSError):  # the lab is gone: the run ends anyway
            pair.change(moment.up_mbit_s, moment.down_mbit_s, moment.rtt_ms, connected=moment.connected)
