"""Many requests under one split plan: how close throughput comes to what the slowest stage alone allows.

Device daemon and companion are real processes with a processor each, a real model, an emulated link between them. In
three balances the device, the link and the companion is the slowest in turn. A stage's time is measured **alone**, one
request after the other in the same run, by the programs' own clocks: the device's is all that its worker does for a
request, the companion's all that it does; the link's is payload / rate, without headers. The bound is one request for
each time of the slowest. The device is slowed by emulation, so that its processor has time for the callers and the
emulated link, which on real machines cost it nothing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from scripts import models
from scripts.benches.figure import CACHE, Figure
from scripts.client import Answer, Client
from scripts.pair import STATUS, Pair
from split.graph.card import CutCard, read_card
from split.tensor import Tensors

MODEL: Final = "efficientnet-lite0"
FOLDER: Final = CACHE / "pipeline"
DIFFERENCE_MAX: Final = 1e-5
RTT_MS: Final = 10.0
FAST_MBIT: Final = 2000.0
CALLERS: Final = 10
"""Requests under way at once: one in each stage, and some that wait so that no stage does."""
WARM: Final = CALLERS * 2
"""Answers before throughput is measured."""
OPEN_TIMEOUT_S: Final = 60.0
DEVICE_STAGES: Final = ("image", "head", "encode", "decode")
COMPANION_STAGES: Final = ("cloud_decode", "tail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Which stage is the slowest, and how that is brought about."""

    slowest: str
    slowdown: float
    head_share: float
    """Of the model's work: the cut that comes closest to it is taken."""
    link_ratio: float
    """The link's time per request, as a multiple of the slower of the two others."""


BALANCES: Final = (
    Balance(slowest="device", slowdown=6.0, head_share=0.7, link_ratio=0.5),
    Balance(slowest="link", slowdown=2.0, head_share=0.4, link_ratio=1.6),
    Balance(slowest="companion", slowdown=2.0, head_share=0.15, link_ratio=0.5),
)


def prepare() -> None:
    """Profile the model and have the companion hold it, once."""
    place = FOLDER / "models" / MODEL / "1"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(models.model_path(MODEL), place / "model.onnx")
    if (FOLDER / "companion-cache").exists():
        return
    with _pair() as pair:
        pair.start_agent(slowdown=1.0)
        _until_open(pair, _cut(BALANCES[-1].head_share).id)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    alone, seconds = (10, 6.0) if quick else (40, 40.0)
    with _pair() as pair:
        requests = _Requests()
        rows = [_measure(pair, balance, requests, alone=alone, seconds=seconds) for balance in BALANCES]
    worst = min(float(row["of_bound"]) for row in rows)
    return [Figure(name="of_bound", value=worst, unit="ratio", at_least=0.95)], rows


def _pair() -> Pair:
    """Each program has a processor of its own where there are two."""
    own = sorted(os.sched_getaffinity(0))
    cores = {"agent": {own[0]}, "companion": {own[1]}} if len(own) > 1 else {}
    return Pair(FOLDER, FOLDER / "models", cores=cores)


class _Requests:
    """A few inputs, and what the bare runtime makes of them."""

    def __init__(self) -> None:
        session = ort.InferenceSession(str(FOLDER / "models" / MODEL / "1" / "model.onnx"))
        [self.output] = [one.name for one in session.get_outputs()]
        dice = np.random.default_rng(3)
        self.inputs: list[Tensors] = [
            {"input": dice.uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)} for _ in range(4)
        ]
        self.expected = [session.run(None, inputs)[0] for inputs in self.inputs]

    def ask(self, client: Client, number: int, cut: str) -> Answer:
        """One request by the split plan at `cut`; an assertion when anything else, or anything wrong, comes back."""
        number %= len(self.inputs)
        answer = client.infer(MODEL, self.inputs[number], mode="split", cut=cut, codec="raw", deadline_ms=30e3)
        found, expected = answer.outputs[self.output], self.expected[number]
        assert answer.placement == "split", answer.fallback
        assert float(np.abs(found - expected).max() / np.abs(expected).max()) <= DIFFERENCE_MAX
        return answer


def _measure(pair: Pair, balance: Balance, requests: _Requests, *, alone: int, seconds: float) -> dict[str, Any]:
    """Stages alone, throughput, stages alone once more."""
    cut = _cut(balance.head_share)
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    pair.start_agent(slowdown=balance.slowdown)
    _until_open(pair, cut.id)
    payload_bytes = sum(spec.nbytes() for spec in cut.boundary)
    before = _alone(pair, requests, cut.id, alone)
    link_ms = balance.link_ratio * max(_stages(before).values())
    rate_mbit = payload_bytes * 8 / link_ms / 1e3
    pair.link(rtt_ms=RTT_MS, rate_mbit=rate_mbit)
    one_ms = statistics.median(answer.timings_ms["total"] for answer in _alone(pair, requests, cut.id, alone))
    taken_ms, answers = _together(pair, requests, cut.id, seconds)
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    stages = _stages(before + _alone(pair, requests, cut.id, alone)) | {"link": link_ms}
    slowest = max(stages, key=lambda stage: stages[stage])
    each_ms = statistics.fmean(taken_ms)
    together = _stages(answers) | {"link": link_ms}
    return {
        "slowest": slowest,
        "meant": balance.slowest,
        "cut": cut.id,
        "payload_bytes": payload_bytes,
        "rate_mbit": rate_mbit,
        **{f"{stage}_ms": ms for stage, ms in stages.items()},
        "requests": len(taken_ms),
        "one_after_the_other_ms": one_ms,
        "ms_per_request": each_ms,
        "slowest_busy": together[slowest] / each_ms,  # ≈ 1 where it never waits: then it is slower than alone
        "of_bound": stages[slowest] / each_ms,
    }


def _alone(pair: Pair, requests: _Requests, cut: str, count: int) -> list[Answer]:
    with pair.client() as client:
        return [requests.ask(client, number, cut) for number in range(count)]


def _stages(answers: list[Answer]) -> dict[str, float]:
    """Medians, ms."""

    def median(stages: tuple[str, ...]) -> float:
        return statistics.median(sum(answer.timings_ms.get(stage, 0.0) for stage in stages) for answer in answers)

    return {"device": median(DEVICE_STAGES), "companion": median(COMPANION_STAGES)}


def _together(pair: Pair, requests: _Requests, cut: str, seconds: float) -> tuple[list[float], list[Answer]]:
    """With `CALLERS` requests under way all the time: milliseconds between one answer and the next, whoever gets them;
    and the answers."""
    numbers, ended_at_s = itertools.count(), time.monotonic() + 60.0
    answered_at_s: list[float] = []
    answers: list[Answer] = []

    def call() -> None:
        with pair.client() as client:
            while time.monotonic() < ended_at_s:
                answers.append(requests.ask(client, next(numbers), cut))
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


def _cut(head_share: float) -> CutCard:
    [folder] = (FOLDER / "agent-cache" / "models").iterdir()
    return min(read_card(folder).cuts, key=lambda cut: abs(cut.compute_share - head_share))


def _until_open(pair: Pair, cut: str) -> None:
    """Until the companion answers at this cut and the device has nothing else to do."""
    requests, deadline_at_s = _Requests(), time.monotonic() + OPEN_TIMEOUT_S
    with pair.client() as client:
        while True:
            answer = client.infer(MODEL, requests.inputs[0], mode="split", cut=cut, codec="raw", deadline_ms=10e3)
            if answer.placement == "split":
                break
            if time.monotonic() > deadline_at_s:
                raise TimeoutError(
                    f"the companion did not open cut {cut} within {OPEN_TIMEOUT_S:.0f} s: {answer.fallback}"
                )
            time.sleep(0.05)
        status: Mapping[str, Any] = client.get(STATUS)
        while status["queue_ms"] > 0:
            time.sleep(0.05)
            status = client.get(STATUS)
