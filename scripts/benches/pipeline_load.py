"""What the scenarios of `pipeline.py` share: the two programs with a processor each, requests whose answers are
checked, and callers that keep a number of them under way."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from scripts.benches.tower import SIDE
from scripts.client import Answer, Client, Refused
from scripts.pair import STATUS, Pair
from split.graph.card import CutCard, read_card
from split.oip.infer import Scalar
from split.tensor import Array, Tensors

DIFFERENCE_MAX: Final = 1e-5
RTT_MS: Final = 10.0
FAST_MBIT: Final = 2000.0
CALLERS: Final = 10
"""Requests under way at once: one in each stage, and some that wait so that no stage does."""
WARM: Final = CALLERS + 5
"""Answers before throughput is measured: those of the requests that began when nothing was under way, and some."""
BATCH: Final = 8
DEADLINE_MS: Final = 30e3
PROCESSORS: Final = sorted(os.sched_getaffinity(0))
OPEN_TIMEOUT_S: Final = 60.0
DEVICE_STAGES: Final = ("image", "head", "encode", "decode", "whole")
COMPANION_STAGES: Final = ("cloud_decode", "tail")


def pair_in(folder: Path) -> Pair:
    """Each program has a processor of its own where there are two."""
    if len(PROCESSORS) < 2:
        return Pair(folder, folder / "models")
    return Pair(folder, folder / "models", cores={"agent": {PROCESSORS[0]}, "companion": {PROCESSORS[1]}})


def waist_cut(folder: Path, waist: int) -> CutCard:
    """The one at this waist of the tower in a pair's folder: of the two narrow places 0 is the earlier."""
    [made] = (folder / "agent-cache" / "models").iterdir()
    between = [cut for cut in read_card(made).cuts if 0.05 < cut.compute_share < 0.95]
    cuts = sorted(between, key=row_bytes)
    return sorted(cuts[:2], key=lambda cut: cut.compute_share)[waist]


def row_bytes(cut: CutCard) -> int:
    """What one row sends, without headers."""
    return sum(spec.nbytes({"N": 1}) for spec in cut.boundary)


class Requests:
    """A few inputs of a tower, and what the bare runtime makes of them."""

    def __init__(self, file: Path) -> None:
        dice = np.random.default_rng(3)
        self.inputs = dice.uniform(-1, 1, (BATCH, 3, SIDE, SIDE)).astype(np.float32)
        self._file = file

    @cached_property
    def expected(self) -> Array:
        found: Array = ort.InferenceSession(str(self._file)).run(["scores"], {"image": self.inputs})[0]
        return found

    def ask(self, client: Client, model: str, rows: slice, **wishes: Scalar) -> Answer:
        """One request of these rows; an assertion when anything wrong comes back."""
        inputs: Tensors = {"image": self.inputs[rows]}
        answer = client.infer(model, inputs, deadline_ms=DEADLINE_MS, **wishes)
        found, expected = answer.outputs["scores"], self.expected[rows]
        assert float(np.abs(found - expected).max() / np.abs(expected).max()) <= DIFFERENCE_MAX, model
        return answer

    def row(self, client: Client, model: str, number: int, **wishes: Scalar) -> Answer:
        """The same of one row."""
        row = number % BATCH
        return self.ask(client, model, slice(row, row + 1), **wishes)


def stages_ms(
    answers: Sequence[Answer], typical: Callable[[Iterable[float]], float] = statistics.median
) -> dict[str, float]:
    """Of device and companion, by the programs' own clocks."""

    def of(stages: tuple[str, ...]) -> float:
        return typical(sum(answer.timings_ms.get(stage, 0.0) for stage in stages) for answer in answers)

    return {"device": of(DEVICE_STAGES), "companion": of(COMPANION_STAGES)}


def together(pair: Pair, ask: Callable[[Client, int], Answer], seconds: float) -> tuple[list[float], list[Answer]]:
    """With `CALLERS` requests under way all the time: milliseconds between one answer and the next, whoever gets them,
    after the first `WARM`; and all answers."""
    numbers, ended_at_s = itertools.count(), time.monotonic() + 60.0
    answered_at_s: list[float] = []
    answers: list[Answer] = []

    def call() -> None:
        with pair.client() as client:
            while time.monotonic() < ended_at_s:
                answers.append(ask(client, next(numbers)))
                answered_at_s.append(time.monotonic())

    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(call) for _ in range(CALLERS)]
        while len(answered_at_s) < WARM and not any(one.done() for one in calls):
            time.sleep(0.01)
        ended_at_s = time.monotonic() + seconds
        for one in calls:
            one.result()
    steady = sorted(answered_at_s)[WARM:-CALLERS]
    return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(steady)], answers


def start(pair: Pair, *models: str) -> None:
    """Start the device on a fast link; back when the companion answers for each model at both waists and nothing else
    goes on."""
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    pair.start_agent(slowdown=1.0)
    cuts = [waist_cut(pair.folder, waist).id for waist in (0, 1)]
    waiting = list(itertools.product(models, cuts))
    image = np.zeros((1, 3, SIDE, SIDE), np.float32)
    deadline_at_s = time.monotonic() + OPEN_TIMEOUT_S
    with pair.client() as client:
        while waiting:
            model, cut = waiting[0]
            why = _not_open(client, model, cut, {"image": image})
            if not why:
                del waiting[0]
                continue
            if time.monotonic() > deadline_at_s:
                raise TimeoutError(f"the companion did not open cut {cut} of {model} in {OPEN_TIMEOUT_S:g} s: {why}")
            time.sleep(0.05)
        status: Mapping[str, Any] = client.get(STATUS)
        while status["queue_ms"] > 0:
            time.sleep(0.05)
            status = client.get(STATUS)


def _not_open(client: Client, model: str, cut: str, inputs: Tensors) -> str:
    """Why this split does not run yet; "" when it does."""
    try:
        answer = client.infer(model, inputs, mode="split", cut=cut, codec="raw", deadline_ms=10e3)
    except Refused as error:  # where the contract wants no other answer
        return str(error)
    return "" if answer.placement == "split" and not answer.fallback else answer.fallback
