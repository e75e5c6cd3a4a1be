"""Many requests under one split plan: how close throughput comes to what the slowest stage alone allows. And one batch.

Device daemon and companion are real processes with a processor each, an emulated link between them. Callers and link
run on the processor of the side that has time, and the model (`tower.py`) is one whose longer half takes long beside
the two or three milliseconds that HTTP and TLS take of the same processor for each request. In three balances the
device, the link and the companion is the slowest in turn: the model is cut late or early. A stage's time is measured
**alone**, one request after the other in the same run, by the programs' own clocks: the device's is all that its
worker does for a request, the companion's all that it does; the link's is payload / rate, without headers. The bound
is one request for each time of the slowest.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from scripts.benches.figure import CACHE, Figure
from scripts.benches.tower import SIDE, write_tower
from scripts.client import Answer, Client
from scripts.pair import STATUS, Pair
from split.graph.card import CutCard, read_card
from split.tensor import Array, Tensors

MODEL: Final = "tower"
FOLDER: Final = CACHE / "pipeline"
FILE: Final = FOLDER / "models" / MODEL / "1" / "model.onnx"
DIFFERENCE_MAX: Final = 1e-5
RTT_MS: Final = 10.0
FAST_MBIT: Final = 2000.0
CALLERS: Final = 10
"""Requests under way at once: one in each stage, and some that wait so that no stage does."""
WARM: Final = CALLERS * 2
"""Answers before throughput is measured."""
BATCH: Final = 8
PROCESSORS: Final = sorted(os.sched_getaffinity(0))
OPEN_TIMEOUT_S: Final = 60.0
DEVICE_STAGES: Final = ("image", "head", "encode", "decode")
COMPANION_STAGES: Final = ("cloud_decode", "tail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Which stage is the slowest, and how that is brought about."""

    slowest: str
    waist: int
    """Where the model is cut: 0, the first, or 1."""
    link_ratio: float
    """The link's time per request, as a multiple of the slower of the two others."""


BALANCES: Final = (
    Balance(slowest="device", waist=1, link_ratio=0.5),
    Balance(slowest="link", waist=0, link_ratio=1.3),
    Balance(slowest="companion", waist=0, link_ratio=0.5),
)
BATCH_BALANCE: Final = Balance(slowest="companion", waist=0, link_ratio=0.6)


def prepare() -> None:
    """Profile the model and have the companion hold it, once."""
    if not FILE.exists():
        write_tower(FILE)
    if (FOLDER / "companion-cache").exists():
        return
    with _pair() as pair:
        _start(pair)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    alone, seconds, batches = (8, 4.0, 3) if quick else (40, 40.0, 30)
    requests, rows = _Requests(), []
    try:
        with _pair() as pair:
            _start(pair)
            for balance in (*BALANCES, BATCH_BALANCE):
                requests.waist = balance.waist
                _stand_aside(pair, balance.slowest)
                if balance is BATCH_BALANCE:
                    rows.append(_batch(pair, requests, batches))
                else:
                    rows.append(_throughput(pair, balance, requests, alone=alone, seconds=seconds))
    finally:
        os.sched_setaffinity(0, PROCESSORS)
    worst = min(float(row["of_bound"]) for row in rows if "of_bound" in row)
    return [Figure(name="of_bound", value=worst, unit="ratio", at_least=0.95)], rows


def _pair() -> Pair:
    """Each program has a processor of its own where there are two."""
    if len(PROCESSORS) < 2:
        return Pair(FOLDER, FOLDER / "models")
    return Pair(FOLDER, FOLDER / "models", cores={"agent": {PROCESSORS[0]}, "companion": {PROCESSORS[1]}})


def _stand_aside(pair: Pair, slowest: str) -> None:
    """Callers and link take the processor of the side that has time."""
    if len(PROCESSORS) > 1:
        free = {PROCESSORS[1 if slowest == "device" else 0]}
        os.sched_setaffinity(0, free)
        pair.pin("relay", free)


class _Requests:
    """A few inputs, and what the bare runtime makes of them."""

    def __init__(self) -> None:
        self.waist = 0
        dice = np.random.default_rng(3)
        self.inputs = dice.uniform(-1, 1, (BATCH, 3, SIDE, SIDE)).astype(np.float32)

    @cached_property
    def expected(self) -> Array:
        found: Array = ort.InferenceSession(str(FILE)).run(["scores"], {"image": self.inputs})[0]
        return found

    def one(self, client: Client, number: int) -> Answer:
        """One request of one row by the split plan; an assertion when anything else, or anything wrong, comes back."""
        row = number % BATCH
        return self._ask(client, slice(row, row + 1))

    def batch(self, client: Client) -> Answer:
        return self._ask(client, slice(None))

    def _ask(self, client: Client, rows: slice) -> Answer:
        inputs: Tensors = {"image": self.inputs[rows]}
        answer = client.infer(MODEL, inputs, mode="split", cut=_cut(self.waist).id, codec="raw", deadline_ms=30e3)
        found, expected = answer.outputs["scores"], self.expected[rows]
        assert answer.placement == "split", answer.fallback
        assert float(np.abs(found - expected).max() / np.abs(expected).max()) <= DIFFERENCE_MAX
        return answer


# -- throughput -----------------------------------------------------------------------------------------------------


def _throughput(pair: Pair, balance: Balance, requests: _Requests, *, alone: int, seconds: float) -> dict[str, Any]:
    """Stages alone, throughput, stages alone once more."""
    before = _alone(pair, requests, alone)
    link_ms, rate_mbit = _link(pair, balance, before)
    taken_ms, answers = _together(pair, requests, seconds)
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    stages = _stages(before + _alone(pair, requests, alone)) | {"link": link_ms}
    slowest = max(stages, key=lambda stage: stages[stage])
    each_ms = statistics.fmean(taken_ms)
    together = _stages(answers, statistics.fmean) | {"link": link_ms}
    return {
        "slowest": slowest,
        "meant": balance.slowest,
        "rate_mbit": rate_mbit,
        **{f"{stage}_ms": ms for stage, ms in stages.items()},
        "requests": len(taken_ms),
        "ms_per_request": each_ms,
        "slowest_busy": together[slowest] / each_ms,  # 1 where it never waits: then it is slower than alone
        "of_bound": stages[slowest] / each_ms,
    }


def _link(pair: Pair, balance: Balance, alone: list[Answer]) -> tuple[float, float]:
    """Set the link's rate; what a row takes on it, ms, and the rate, Mbit/s."""
    link_ms = balance.link_ratio * max(_stages(alone).values())
    rate_mbit = _row_bytes(balance.waist) * 8 / link_ms / 1e3
    pair.link(rtt_ms=RTT_MS, rate_mbit=rate_mbit)
    return link_ms, rate_mbit


def _alone(pair: Pair, requests: _Requests, count: int) -> list[Answer]:
    with pair.client() as client:
        return [requests.one(client, number) for number in range(count)]


def _stages(answers: list[Answer], typical: Callable[[Iterable[float]], float] = statistics.median) -> dict[str, float]:
    """ms of each."""

    def of(stages: tuple[str, ...]) -> float:
        return typical(sum(answer.timings_ms.get(stage, 0.0) for stage in stages) for answer in answers)

    return {"device": of(DEVICE_STAGES), "companion": of(COMPANION_STAGES)}


def _together(pair: Pair, requests: _Requests, seconds: float) -> tuple[list[float], list[Answer]]:
    """With `CALLERS` requests under way all the time: milliseconds between one answer and the next, whoever gets them;
    and the answers."""
    numbers, ended_at_s = itertools.count(), time.monotonic() + 60.0
    answered_at_s: list[float] = []
    answers: list[Answer] = []

    def call() -> None:
        with pair.client() as client:
            while time.monotonic() < ended_at_s:
                answers.append(requests.one(client, next(numbers)))
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


# -- one batch ------------------------------------------------------------------------------------------------------


def _batch(pair: Pair, requests: _Requests, count: int) -> dict[str, Any]:
    """A batch that goes in parts: what it takes, and what its stages take one after the other."""
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    link_ms, rate_mbit = _link(pair, BATCH_BALANCE, _alone(pair, requests, count))
    with pair.client() as client:
        requests.batch(client)  # the first one learns the rate
        answers = [requests.batch(client) for _ in range(count)]
        explained = client.get(f"/v2/isthmus/explain/{answers[-1].request_id}")
    stages = _stages(answers) | {"link": link_ms * BATCH}
    taken_ms = statistics.median(answer.timings_ms["total"] for answer in answers)
    return {
        "batch": BATCH,
        "parts": explained["chosen"]["parts"],
        "rate_mbit": rate_mbit,
        **{f"{stage}_ms": ms for stage, ms in stages.items()},
        "predicted_ms": statistics.median(answer.predicted_ms for answer in answers),
        "measured_ms": taken_ms,
        "over_one_after_the_other": taken_ms / (sum(stages.values()) + RTT_MS),
    }


# -- the model ------------------------------------------------------------------------------------------------------


def _cut(waist: int) -> CutCard:
    """The one at this waist: of the two narrow places 0 is the earlier."""
    [folder] = (FOLDER / "agent-cache" / "models").iterdir()
    between = [cut for cut in read_card(folder).cuts if 0.05 < cut.compute_share < 0.95]
    cuts = sorted(between, key=lambda cut: sum(spec.nbytes({"N": 1}) for spec in cut.boundary))
    return sorted(cuts[:2], key=lambda cut: cut.compute_share)[waist]


def _row_bytes(waist: int) -> int:
    return sum(spec.nbytes({"N": 1}) for spec in _cut(waist).boundary)


def _start(pair: Pair) -> None:
    """Start the device on a fast link; back when the companion answers at both cuts and nothing else goes on."""
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    pair.start_agent(slowdown=1.0)
    waiting, image = [_cut(waist).id for waist in (0, 1)], np.zeros((1, 3, SIDE, SIDE), np.float32)
    deadline_at_s = time.monotonic() + OPEN_TIMEOUT_S
    with pair.client() as client:
        while waiting:
            cut = waiting[0]
            answer = client.infer(MODEL, {"image": image}, mode="split", cut=cut, codec="raw", deadline_ms=10e3)
            if answer.placement == "split":
                waiting.remove(cut)
                continue
            if time.monotonic() > deadline_at_s:
                raise TimeoutError(
                    f"the companion did not open cut {cut} within {OPEN_TIMEOUT_S:g} s: {answer.fallback}"
                )
            time.sleep(0.05)
        status: Mapping[str, Any] = client.get(STATUS)
        while status["queue_ms"] > 0:
            time.sleep(0.05)
            status = client.get(STATUS)
