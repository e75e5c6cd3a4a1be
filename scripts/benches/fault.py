"""The companion is killed, falls silent or is restarted, the device changes its address, while requests are under way.

Real processes and weights. Times are the daemon's own (`isthmus.timings`, and when the request came by `explain`), so
that a busy caller's clock does not count; what the caller saw stands in the rows beside. `killed_ms` needs the clock
that all processes of a host share (CLOCK_MONOTONIC). Local time, from which deadlines are made, is measured before.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from scripts import models
from scripts.benches.figure import CACHE, Figure
from scripts.callers import Callers
from scripts.client import Answer, Refused
from scripts.pair import STATUS, Pair
from split.graph.card import read_card
from split.tensor import Tensors

MODEL: Final = "efficientnet-lite0"
FOLDER: Final = CACHE / "fault"
DIFFERENCE_MAX: Final = 1e-5
TAIL_SHARE_MIN: Final = 0.3
"""The cut whose companion is killed leaves at least so much of the work to the tail."""
UPLOAD_S: Final = 0.4
"""What the boundary takes on the link while the companion is killed: it dies somewhere in there."""
SPARE_MS: Final = (20.0, 30.0, 60.0, 120.0, 300.0)
"""Deadlines beyond the local time of what is asked at once. 20: the least for which DESIGN promises an answer (I3)."""
BURST: Final = 3
WORKERS: Final = 24
FAILURES_SHOWN: Final = 5
BACK_TIMEOUT_S: Final = 30.0


def prepare() -> None:
    """Profile the model, send it to both companions, and open its cuts there, once."""
    place = FOLDER / "models" / MODEL / "1"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(models.model_path(MODEL), place / "model.onnx")
    if (FOLDER / "companion-2-state").exists():
        return
    asked = Asked()
    with Pair(FOLDER, FOLDER / "models", companions=2) as pair:
        pair.start_agent(slowdown=1.0)
        pair.stop_companion(1)
        _until_remote(pair, asked)
        pair.start_companion(1)
        pair.stop_companion(0)
        _until_remote(pair, asked)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    asked = Asked()
    with Pair(FOLDER, FOLDER / "models", companions=2) as pair:
        pair.stop_companion(1)
        pair.start_agent(slowdown=1.0)
        _until_remote(pair, asked)
        killed_ms = _killed(pair, asked, 3 if quick else 25, rows)
        late = _silent(pair, asked, 10 if quick else 120, rows)
        with pair.client() as client:
            twice = abs(int(client.get(STATUS)["requests"]) - asked.count)
        pair.start_companion(1)
        rolling_failed = _rolling(pair, asked, 1 if quick else 6, rows)
    roamed = _roaming(1 if quick else 12)
    rows += [roamed, *({"failure": why} for why in asked.failures[:FAILURES_SHOWN])]
    figures = [
        Figure(name="killed_ms", value=statistics.median(killed_ms), unit="ms", at_most=50),
        Figure(name="silent_late", value=late, unit="answers", at_most=0),
        Figure(name="lost", value=len(asked.failures), unit="requests", at_most=0),
        Figure(name="wrong", value=asked.wrong + roamed.get("wrong", 0), unit="answers", at_most=0),
        Figure(name="twice", value=twice, unit="answers", at_most=0),
        Figure(name="rolling_failed", value=rolling_failed, unit="requests", at_most=0),
    ]
    if "lost" in roamed:
        figures.append(Figure(name="roaming_lost", value=roamed["lost"], unit="requests", at_most=0))
    return figures, rows


@dataclass(slots=True)
class Asked:
    """Requests, and what became of them against the bare runtime."""

    count: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    _session: ort.InferenceSession = field(
        default_factory=lambda: ort.InferenceSession(str(FOLDER / "models" / MODEL / "1" / "model.onnx"))
    )
    _expected: list[tuple[Tensors, Tensors]] = field(default_factory=list)

    def inputs(self, n: int) -> Tensors:
        """One of a few requests, whose answers are known."""
        while len(self._expected) < 4:
            made = draw(np.random.default_rng(len(self._expected)))
            names = [one.name for one in self._session.get_outputs()]
            self._expected.append((made, dict(zip(names, self._session.run(names, made), strict=True))))
        return self._expected[n % len(self._expected)][0]

    def one(self, pair: Pair, n: int, **wishes: Any) -> Answer | str:
        """Ask; the answer, or why there is none."""
        self.count += 1
        with pair.client() as client:
            try:
                answer = client.infer(MODEL, self.inputs(n), **wishes)
            except (Refused, OSError) as error:
                self.failures.append(f"{wishes}: {error}")
                return str(error)
        self.check(answer, self._expected[n % len(self._expected)][1])
        return answer

    def check(self, answer: Answer, expected: Tensors) -> None:
        apart = max(
            float(np.abs(answer.outputs[name] - value).max() / np.abs(value).max()) for name, value in expected.items()
        )
        self.wrong += apart > DIFFERENCE_MAX

    def check_all(self, callers: Callers) -> None:
        for answer, inputs in callers.answers:
            names = [one.name for one in self._session.get_outputs()]
            self.check(answer, dict(zip(names, self._session.run(names, inputs), strict=True)))


def draw(dice: np.random.Generator) -> Tensors:
    """A picture of noise."""
    return {"input": dice.uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)}


# -- killed ---------------------------------------------------------------------------------------------------------


def _killed(pair: Pair, asked: Asked, rounds: int, rows: list[dict[str, Any]]) -> list[float]:
    """(answer − kill) − the tail that was still to run, in ms, per round."""
    cut, boundary_bytes = _cut()
    dice = random.Random(7)
    found: list[float] = []
    seen_ms: list[float] = []
    while len(found) < rounds:
        pair.link(rtt_ms=2, rate_mbit=boundary_bytes * 8 / UPLOAD_S / 1e6)
        with ThreadPoolExecutor(1) as pool, pair.client() as client:
            answer_to = pool.submit(asked.one, pair, len(found), mode="split", cut=cut, codec="raw", deadline_ms=20e3)
            _wait(lambda: client.get(STATUS)["companion"]["inflight"] > 0)
            time.sleep(dice.uniform(0.0, 0.7 * UPLOAD_S))
            killed_at_s = time.monotonic()
            pair.kill_companion()
            answer = answer_to.result(timeout=30)
            came_at_s = time.monotonic()
            if isinstance(answer, Answer) and "local_tail" in answer.timings_ms:
                received_at_s = client.get(f"/v2/isthmus/explain/{answer.request_id}")["received_at_s"]
                answered_at_s = received_at_s + answer.timings_ms["total"] / 1e3
                tail_ms = answer.timings_ms["local_tail"]
                found.append((answered_at_s - killed_at_s) * 1e3 - tail_ms)
                seen_ms.append((came_at_s - killed_at_s) * 1e3 - tail_ms)
        pair.start_companion()
        _until_remote(pair, asked)
    rows.append(
        {
            "fault": "killed",
            "cut": cut,
            "rounds": rounds,
            "median_ms": statistics.median(found),
            "worst_ms": max(found),
            "median_as_the_caller_saw_ms": statistics.median(seen_ms),
        }
    )
    return found


def _cut() -> tuple[str, int]:
    """The largest boundary among the cuts with a tail worth the name, and its bytes."""
    [folder] = (FOLDER / "agent-cache" / "models").iterdir()
    card = read_card(folder)
    sizes = {
        cut.id: sum(spec.nbytes() for spec in cut.boundary)
        for cut in card.cuts
        if cut.compute_share <= 1 - TAIL_SHARE_MIN
    }
    cut = max(sizes, key=lambda one: sizes[one])
    return cut, sizes[cut]


# -- silent ---------------------------------------------------------------------------------------------------------


def _silent(pair: Pair, asked: Asked, rounds: int, rows: list[dict[str, Any]]) -> int:
    """Answers after their deadline, by the daemon's clock, and requests that got none."""
    pair.link(rtt_ms=2, rate_mbit=1000)
    taken = [asked.one(pair, n, mode="local") for n in range(20)]
    local_ms = statistics.median(one.timings_ms["total"] for one in taken if isinstance(one, Answer))
    dice, late, late_for_the_caller, finished_here, worst_ms = random.Random(11), 0, 0, 0, 0.0
    faults: tuple[tuple[Callable[[], None], Callable[[], None]], ...] = (
        (pair.freeze_companion, pair.thaw_companion),
        *((partial(pair.silence_link, way), pair.restore_link) for way in ("both", "up", "down")),
    )
    count = 0
    for n in range(rounds):
        silence, heal = faults[n % len(faults)]
        burst = BURST if n % 3 == 2 else 1
        deadline_ms = burst * local_ms + SPARE_MS[n % len(SPARE_MS)]
        mode = ("split", "offload", "auto")[n // 2 % 3]
        with ThreadPoolExecutor(BURST) as pool:
            answers_to = [pool.submit(asked.one, pair, n + k, mode=mode, deadline_ms=deadline_ms) for k in range(burst)]
            time.sleep(dice.uniform(0.0, local_ms / 1e3))
            silence()
            answers = [one.result(timeout=60) for one in answers_to]
        heal()
        _until_remote(pair, asked)
        for answer in answers:
            count += 1
            if isinstance(answer, Answer):
                over_ms = answer.timings_ms["total"] - deadline_ms
                worst_ms = max(worst_ms, over_ms) if count > 1 else over_ms
                late += over_ms > 0.0
                late_for_the_caller += answer.took_ms > deadline_ms
                finished_here += bool(answer.fallback)
            else:
                late += 1
    rows.append(
        {
            "fault": "silent",
            "local_ms": local_ms,
            "requests": count,
            "finished_here": finished_here,
            "worst_after_deadline_ms": worst_ms,
            "late_as_the_caller_saw": late_for_the_caller,
        }
    )
    return late


# -- restarted, and roaming -----------------------------------------------------------------------------------------


def _rolling(pair: Pair, asked: Asked, restarts: int, rows: list[dict[str, Any]]) -> int:
    """Requests that failed while the companion in use was stopped and started, again and again."""
    with Callers(pair, MODEL, draw, workers=WORKERS) as callers:
        for _ in range(restarts):
            callers.until_remote(30)
            used = pair.companion_in_use()
            pair.stop_companion(used)
            callers.until_remote(30)
            pair.start_companion(used)
    asked.check_all(callers)
    rows.append(
        {
            "fault": "rolling restart",
            "restarts": restarts,
            "requests": sum(callers.counts),
            "remote": callers.remote,
            "first_failure": next(iter(callers.failures), ""),
        }
    )
    return len(callers.failures)


def _roaming(changes: int) -> dict[str, Any]:
    """What `scripts/roam.py` found; without a network namespace only why not."""
    row: dict[str, Any] = {"fault": "roaming", "changes": changes}
    unshare = ["unshare", "--net"]
    able = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if not able or subprocess.run([*unshare, "true"], check=False).returncode:
        return row | {"skipped": "needs root, ip and unshare for a network namespace"}
    done = subprocess.run(
        [*unshare, sys.executable, "-m", "scripts.roam", str(FOLDER), MODEL, "--changes", str(changes)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return row | found


# -- waiting --------------------------------------------------------------------------------------------------------


def _until_remote(pair: Pair, asked: Asked) -> None:
    """Until the companion answers again, split and whole; on a fast link."""
    pair.link(rtt_ms=2, rate_mbit=1000)
    for mode in ("split", "offload"):
        _wait(partial(_answers_remotely, pair, asked, mode))
    with pair.client() as client:
        _wait(lambda: client.get(STATUS)["queue_ms"] == 0)


def _answers_remotely(pair: Pair, asked: Asked, mode: str) -> bool:
    answer = asked.one(pair, 0, mode=mode, deadline_ms=10e3)
    return isinstance(answer, Answer) and answer.placement == mode


def _wait(true: Callable[[], bool]) -> None:
    deadline_at_s = time.monotonic() + BACK_TIMEOUT_S
    while not true():
        if time.monotonic() > deadline_at_s:
            raise TimeoutError(f"it did not come within {BACK_TIMEOUT_S:.0f} s")
        time.sleep(0.005)
