"""Many requests at once: throughput beside what the slowest stage alone allows, and what mixing plans gains.

Device daemon and companion are real processes with a processor each, an emulated link between them. Callers and link
run on the processor of the side that has time, and the model (`tower.py`) is one whose longer half takes long beside
the two or three milliseconds that HTTP and TLS take of the same processor for each request. In three balances the
device, the link and the companion is the slowest in turn: the model is cut late or early. A stage's time is measured
**alone**, one request after the other in the same run, by the programs' own clocks: the device's is all that its
worker does for a request, the companion's all that it does; the link's is payload / rate, without headers. The bound
is one request for each time of the slowest. Beside it one batch that goes in parts; and `pipeline_mix.py`.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import Any, Final

from scripts.benches import pipeline_mix
from scripts.benches.figure import CACHE, Figure
from scripts.benches.pipeline_load import (
    BATCH,
    FAST_MBIT,
    PROCESSORS,
    RTT_MS,
    Requests,
    pair_in,
    row_bytes,
    stages_ms,
    start,
    together,
    waist_cut,
)
from scripts.benches.tower import write_tower
from scripts.client import Answer, Client
from scripts.pair import Pair

MODEL: Final = "tower"
FOLDER: Final = CACHE / "pipeline"
FILE: Final = FOLDER / "models" / MODEL / "1" / "model.onnx"
CONTRACT: Final = "behaviour: {fallback: {strategy: fail}}\n"
"""The plan that is asked for and no other: a device that has time would finish some here to be faster."""


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
    """Profile the models and have the companion hold them, once."""
    if not FILE.exists():
        write_tower(FILE)
    (FILE.parents[1] / "contract.yaml").write_text(CONTRACT)
    if not (FOLDER / "companion-cache").exists():
        with pair_in(FOLDER) as pair:
            start(pair, MODEL)
    pipeline_mix.prepare()


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    alone, seconds, batches = (4, 2.0, 2) if quick else (40, 40.0, 30)
    requests, rows = _Split(), []
    try:
        with pair_in(FOLDER) as pair:
            start(pair, MODEL)
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
    mixed, mixed_rows = pipeline_mix.run(quick=quick)
    return [Figure(name="of_bound", value=worst, unit="ratio", at_least=0.95), *mixed], rows + mixed_rows


def _stand_aside(pair: Pair, slowest: str) -> None:
    """Callers and link take the processor of the side that has time."""
    if len(PROCESSORS) > 1:
        free = {PROCESSORS[1 if slowest == "device" else 0]}
        os.sched_setaffinity(0, free)
        pair.pin("relay", free)


class _Split:
    """Requests that are to go by the cut at one of the waists."""

    def __init__(self) -> None:
        self.waist = 0
        self._requests = Requests(FILE)

    def one(self, client: Client, number: int) -> Answer:
        return self._checked(self._requests.row(client, MODEL, number, **self._wishes))

    def batch(self, client: Client) -> Answer:
        return self._checked(self._requests.ask(client, MODEL, slice(None), **self._wishes))

    @property
    def _wishes(self) -> dict[str, str]:
        return {"mode": "split", "cut": waist_cut(FOLDER, self.waist).id, "codec": "raw"}

    def _checked(self, answer: Answer) -> Answer:
        assert answer.placement == "split", answer.fallback
        return answer


# -- throughput -----------------------------------------------------------------------------------------------------


def _throughput(pair: Pair, balance: Balance, requests: _Split, *, alone: int, seconds: float) -> dict[str, Any]:
    """Stages alone, throughput, stages alone once more."""
    before = _alone(pair, requests, alone)
    link_ms, rate_mbit = _link(pair, balance, before)
    taken_ms, answers = together(pair, requests.one, seconds)
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    stages = stages_ms(before + _alone(pair, requests, alone)) | {"link": link_ms}
    slowest = max(stages, key=lambda stage: stages[stage])
    each_ms = statistics.fmean(taken_ms)
    busy = stages_ms(answers, statistics.fmean) | {"link": link_ms}
    return {
        "slowest": slowest,
        "meant": balance.slowest,
        "rate_mbit": rate_mbit,
        **{f"{stage}_ms": ms for stage, ms in stages.items()},
        "requests": len(taken_ms),
        "ms_per_request": each_ms,
        "slowest_busy": busy[slowest] / each_ms,  # 1 where it never waits: then it is slower than alone
        "of_bound": stages[slowest] / each_ms,
    }


def _link(pair: Pair, balance: Balance, alone: list[Answer]) -> tuple[float, float]:
    """Set the link's rate; what a row takes on it, ms, and the rate, Mbit/s."""
    link_ms = balance.link_ratio * max(stages_ms(alone).values())
    rate_mbit = row_bytes(waist_cut(FOLDER, balance.waist)) * 8 / link_ms / 1e3
    pair.link(rtt_ms=RTT_MS, rate_mbit=rate_mbit)
    return link_ms, rate_mbit


def _alone(pair: Pair, requests: _Split, count: int) -> list[Answer]:
    with pair.client() as client:
        return [requests.one(client, number) for number in range(count)]


# -- one batch ------------------------------------------------------------------------------------------------------


def _batch(pair: Pair, requests: _Split, count: int) -> dict[str, Any]:
    """A batch that goes in parts: what it takes, and what its stages take one after the other."""
    pair.link(rtt_ms=RTT_MS, rate_mbit=FAST_MBIT)
    link_ms, rate_mbit = _link(pair, BATCH_BALANCE, _alone(pair, requests, count))
    with pair.client() as client:
        requests.batch(client)  # the first one learns the rate
        answers = [requests.batch(client) for _ in range(count)]
        explained = client.get(f"/v2/isthmus/explain/{answers[-1].request_id}")
    stages = stages_ms(answers) | {"link": link_ms * BATCH}
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
