"""Many callers of one daemon at once, each with one request after the other: for flows and benches that break something
meanwhile and want to know what became of every request."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np

from scripts.client import Answer, Client, Refused
from scripts.pair import Pair
from split.tensor import Tensors

MODES: Final = ("split", "offload", "auto")
END_TIMEOUT_S: Final = 120.0


class Callers:
    """They call from entering to leaving the `with` block; afterwards `answers` and `failures` are complete.

    `draw` makes one request's inputs out of a generator.
    """

    def __init__(
        self,
        pair: Pair,
        model: str,
        draw: Callable[[np.random.Generator], Tensors],
        *,
        workers: int,
        deadline_ms: float = 30_000.0,
        modes: Sequence[str] = MODES,
    ) -> None:
        self._pair = pair
        self._model = model
        self._draw = draw
        self._workers = workers
        self._deadline_ms = deadline_ms
        self._modes = modes
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(workers)
        self._calls: list[Future[int]] = []
        self.answers: list[tuple[Answer, Tensors]] = []
        self.failures: list[str] = []
        self.counts: list[int] = []
        """Requests of each caller."""

    def __enter__(self) -> Callers:
        self._calls = [self._pool.submit(self._call, number) for number in range(self._workers)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.counts = [call.result(timeout=END_TIMEOUT_S) for call in self._calls]
        self._pool.shutdown()

    @property
    def remote(self) -> int:
        """Answers so far that a companion made."""
        return sum(answer.placement != "local" for answer, _ in self.answers)

    def until_remote(self, more: int = 50, *, timeout_s: float = 60.0) -> None:
        """Until so many more answers have come from a companion; TimeoutError."""
        wanted, deadline_at_s = self.remote + more, time.monotonic() + timeout_s
        while self.remote < wanted:
            if time.monotonic() > deadline_at_s:
                raise TimeoutError(f"within {timeout_s:.0f} s not {more} answers came from a companion")
            time.sleep(0.05)

    def _call(self, number: int) -> int:
        dice = np.random.default_rng(number)
        with self._pair.client() as client:
            for count, mode in enumerate(itertools.cycle(self._modes)):
                if self._stop.is_set():
                    return count
                self._one(client, mode, self._draw(dice))
        raise AssertionError("modes never end")

    def _one(self, client: Client, mode: str, inputs: Tensors) -> None:
        try:
            answer = client.infer(self._model, inputs, mode=mode, deadline_ms=self._deadline_ms)
        except (Refused, OSError) as error:
            self.failures.append(f"{mode}: {error}")
        else:
            self.answers.append((answer, inputs))
