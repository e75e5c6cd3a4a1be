"""What the daemon costs over the bare runtime, without and with HTTP; one decision; `local` against a tuned session.

The overhead does not depend on the model, so it is measured on one that hardly computes: 600 KB in, one reduction. The
bare runtime is a session with the daemon's own options.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import yaml

from agent.config import AgentConfig
from agent.daemon import Daemon
from scripts import models
from scripts.benches.decisions import decisions_us
from scripts.benches.figure import CACHE, Figure, interleaved, median_difference, median_ratio, paced, percentile
from scripts.client import Client, Refused
from scripts.pair import PROGRAMS, STATUS, free_port
from split.oip.infer import OipRequest
from split.profiles.address import HostPort
from split.profiles.measured import Tuning, read_profile
from split.runtime.machine import read_machine
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.tuning import fastest, tunings

LIGHT: Final = "light-600k"
LIGHT_TEXT: Final = """
<ir_version: 10, opset_import: ["" : 18]>
light (float[1,3,224,224] x) => (float[1,3,1,1] y) { y = GlobalMaxPool(x) }
"""
X: Final = np.random.default_rng(7).uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)
START_TIMEOUT_S: Final = 60.0


def prepare() -> None:
    """The light model in a repository of its own, and the real one that `local_ratio` runs."""
    place = CACHE / "overhead" / "models" / LIGHT / "1"
    place.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.parser.parse_model(LIGHT_TEXT), place / "model.onnx")
    models.model_path("efficientnet-lite0")


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    inprocess_us = asyncio.run(_inprocess_us(300 if quick else 2000, rows))
    http_ms = _http_ms(200 if quick else 1000, rows)
    decisions = decisions_us(2_000 if quick else 20_000)
    rows += [
        {"decision": state, "p50_us": percentile(taken, 0.50), "p99_us": percentile(taken, 0.99)}
        for state, taken in decisions.items()
    ]
    ratio = _local_ratio(40 if quick else 200, rows)
    figures = [
        Figure(name="inprocess_us", value=inprocess_us, unit="µs", at_most=100),
        Figure(name="http_600k_ms", value=http_ms, unit="ms", at_most=1.2),
        Figure(name="decision_p50_us", value=percentile(decisions["plain"], 0.50), unit="µs", at_most=50),
        Figure(name="decision_p99_us", value=percentile(decisions["plain"], 0.99), unit="µs", at_most=200),
        Figure(name="local_ratio", value=ratio, unit="ratio", at_most=1.02),
    ]
    return figures, rows


def _bare() -> Callable[[], object]:
    """The light model in a session as the daemon opens it, without anything around; after it was profiled."""
    profiles = [read_profile(folder) for folder in (CACHE / "overhead" / "cache" / "models").iterdir()]
    tuning = next(profile.tuning for profile in profiles if profile is not None)
    options = ort.SessionOptions()
    options.intra_op_num_threads = tuning.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if tuning.spin_us else "0")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(tuning.spin_us))
    options.add_session_config_entry("session.force_spinning_stop", "1")
    path = CACHE / "overhead" / "models" / LIGHT / "1" / "model.onnx"
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {"x": X}
    return lambda: session.run(["y"], feeds)


async def _inprocess_us(rounds: int, rows: list[dict[str, Any]]) -> float:
    """The daemon's whole way of a request but for HTTP, − bare."""
    folder = CACHE / "overhead"
    config = AgentConfig(
        models=folder / "models",
        state_dir=folder / "state",
        cache_dir=folder / "cache",
        listen=_listen(0),
    )
    async with Daemon(config) as daemon:
        deadline_at_s = time.monotonic() + START_TIMEOUT_S
        while not all(model["profiled"] for model in daemon.service.status()["models"]):
            assert time.monotonic() < deadline_at_s, daemon.service.status()["models"]
            await asyncio.sleep(0.1)
        bare, request = _bare(), OipRequest(inputs={"x": X})
        loop = asyncio.get_running_loop()
        taken: dict[str, list[float]] = {"bare": [], "other_thread": [], "daemon": []}
        with ThreadPoolExecutor(1) as thread:
            for turn in range(-20, rounds):
                at_s = [time.perf_counter()]
                bare()
                at_s.append(time.perf_counter())
                await _on_other_thread(loop, thread, bare)
                at_s.append(time.perf_counter())
                await daemon.service.infer(LIGHT, "", request, loop.time())
                at_s.append(time.perf_counter())
                if turn >= 0:
                    for name, (start_s, end_s) in zip(taken, itertools.pairwise(at_s), strict=True):
                        taken[name].append((end_s - start_s) * 1e3)
    rows.append({"path": "in process", **{f"{k}_ms": statistics.median(v) for k, v in taken.items()}})
    return median_difference(taken, "daemon", "bare") * 1e3


async def _on_other_thread(loop: asyncio.AbstractEventLoop, thread: Executor, work: Callable[[], object]) -> None:
    """The least that "never on the event loop" costs: to a waiting thread, run, and back."""
    done = loop.create_future()

    def run() -> None:
        work()
        loop.call_soon_threadsafe(done.set_result, None)

    thread.submit(run)
    await done


def _listen(port: int) -> Any:
    from agent.config import Listen

    return Listen(http=HostPort(f"127.0.0.1:{port}"))


def _http_ms(rounds: int, rows: list[dict[str, Any]]) -> float:
    """A daemon of its own process, asked over HTTP in binary, − bare in this one."""
    folder, port = CACHE / "overhead", free_port()
    config = {
        "models": str(folder / "models"),
        "state_dir": str(folder / "state"),
        "cache_dir": str(folder / "cache"),
        "listen": {"http": f"127.0.0.1:{port}"},
    }
    path = folder / "agent.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / "agent.log").open("w") as log:
        command = [str(PROGRAMS / "isthmus"), "agent", "--config", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with Client(port) as client:
            _wait_until_profiled(client, process, path.with_name("agent.log"))
            taken = interleaved({"bare": _bare(), "http": lambda: client.infer(LIGHT, {"x": X})}, rounds)
    finally:
        process.terminate()
        process.wait()
    rows.append({"path": "HTTP, 602 KB", **{f"{k}_ms": statistics.median(v) for k, v in taken.items()}})
    return median_difference(taken, "http", "bare")


def _wait_until_profiled(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_at_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_at_s:
        try:
            if all(model["profiled"] for model in client.get(STATUS)["models"]):
                return
        except (OSError, Refused):
            pass
        time.sleep(0.1)
    sys.exit(f"scripts/bench: the daemon did not come up:\n{log.read_text()}")


def _local_ratio(rounds: int, rows: list[dict[str, Any]]) -> float:
    """The whole as the daemon opens it after measuring threads and spinning / the best plain session over both, all
    paced as requests are; with what each takes of the processor."""
    path = models.model_path("efficientnet-lite0")
    feeds = {"input": X}
    engine, machine = OrtEngine(), read_machine()

    def open_with(tuning: Tuning) -> Callable[[], object]:
        segment = engine.open(path, threads=tuning.threads, spin_us=tuning.spin_us)
        return lambda: segment.run(feeds)

    chosen = fastest(tunings(machine), open_with)
    ours = f"ours, {chosen.threads} threads, spinning {chosen.spin_us} µs inside a run"
    work: dict[str, Callable[[], object]] = {ours: open_with(chosen)}
    for threads in range(1, usable_threads() + 1):
        for spinning in ("0", "1"):
            options = ort.SessionOptions()
            options.intra_op_num_threads = threads
            options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            work[f"plain, {threads} threads, spinning {spinning}"] = lambda s=session: s.run(None, feeds)  # type: ignore[misc]  # one session each
    wall, cpu = paced(work, rounds)
    medians = {name: statistics.median(times) for name, times in wall.items()}
    for name, ms in medians.items():
        rows.append({"session": name, "median_ms": ms, "cpu_ms_paced": statistics.median(cpu[name])})
    best = min((name for name in work if name != ours), key=lambda name: medians[name])
    return median_ratio(wall, ours, best)
