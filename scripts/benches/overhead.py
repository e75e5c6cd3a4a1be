"""What the daemon costs over the bare runtime, without and with HTTP; one decision; `local` against a tuned session.

The overhead does not depend on the model, so it is measured on one that hardly computes: 600 KB in, one reduction. The
bare runtime is a session with the daemon's own options.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
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
from agent.planner import Planner
from scripts import models
from scripts.benches.figure import CACHE, Figure, interleaved, median_difference, median_ratio, paced, percentile
from scripts.client import Client, Refused
from scripts.pair import PROGRAMS, STATUS, free_port
from split.graph.card import CutCard, ModelCard
from split.graph.growth import CutGrowth, Elements, Extent, Growth, Step
from split.ids import CutId, ModelDigest
from split.oip.infer import OipRequest
from split.plan.plan import RequestFacts
from split.profiles.address import HostPort
from split.profiles.contract import Contract, Data, InputContract
from split.profiles.image_spec import ImageSpec
from split.profiles.measured import CodecCosts, CutCosts, ModelProfile, Tuning, read_profile
from split.runtime.machine import read_machine
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.tuning import fastest, tunings
from split.tensor import TensorSpec

LIGHT: Final = "light-600k"
LIGHT_TEXT: Final = """
<ir_version: 10, opset_import: ["" : 18]>
light (float[1,3,224,224] x) => (float[1,3,1,1] y) { y = GlobalMaxPool(x) }
"""
X: Final = np.random.default_rng(7).uniform(-1, 1, (1, 3, 224, 224)).astype(np.float32)
START_TIMEOUT_S: Final = 60.0

PLANS: Final = 100
WARM: Final = 600
"""Requests that are answered before decisions are timed: the planner has seen each plan it tries off by a little."""
SCATTER: Final = 0.03
"""Of what they take about what was predicted."""
CODECS: Final = ("raw", "fp16", "int8")


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
    decisions = _decisions_us(5_000 if quick else 50_000)
    resized = _decisions_us(2_000 if quick else 20_000, dynamic=True)
    rows.append({"decision": "each at a size that is new", **_percentiles(resized)})
    ratio = _local_ratio(40 if quick else 200, rows)
    figures = [
        Figure(name="inprocess_us", value=inprocess_us, unit="µs", at_most=100),
        Figure(name="http_600k_ms", value=http_ms, unit="ms", at_most=1.2),
        Figure(name="decision_p50_us", value=percentile(decisions, 0.50), unit="µs", at_most=50),
        Figure(name="decision_p99_us", value=percentile(decisions, 0.99), unit="µs", at_most=200),
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


def _percentiles(taken_us: list[float]) -> dict[str, float]:
    return {"p50_us": percentile(taken_us, 0.50), "p99_us": percentile(taken_us, 0.99)}


def _decisions_us(rounds: int, *, dynamic: bool = False) -> list[float]:
    """`Planner.decide` over a hundred plans: local, the input in three codecs and as a picture, 32 cuts in three.

    `dynamic`: height and width are open, and of 36,863 requests no two have the same.
    """
    cuts = [CutId(f"{number:012x}") for number in range((PLANS - 5) // len(CODECS) + 1)]
    tensor = TensorSpec(name="x", dtype="FP32", shape=(1, 3, *(("height", "width") if dynamic else (224, 224))))
    digest = ModelDigest("sha256:" + "0" * 64)
    card = ModelCard(
        digest=digest,
        path="/nowhere/model.onnx",
        files=(),
        inputs=(tensor,),
        outputs=(TensorSpec(name="y", dtype="FP32", shape=(1, 1000)),),
        nodes=100,
        opset=18,
        cuts=tuple(
            CutCard(
                id=cut,
                boundary=(TensorSpec(name="t", dtype="FP32", shape=(1, 50_000)),),
                head_inputs=("x",),
                head_outputs=(),
                tail_inputs=(),
                shown_inputs=(),
                tail_outputs=("y",),
                nodes=number + 1,
                compute_share=(number + 1) / (len(cuts) + 1),
                node_bitmap="00",
            )
            for number, cut in enumerate(cuts)
        ),
        growth=_growth(cuts) if dynamic else None,
    )

    def codecs(size: int) -> tuple[CodecCosts, ...]:
        return tuple(
            CodecCosts(codec=c, bytes=size // (2**n), encode_ms=0.3, decode_ms=0.2, fidelity={"kl": 0.01 * n})
            for n, c in enumerate(CODECS)
        )

    profile = ModelProfile(
        digest=digest,
        runtime="bench",
        fingerprint="bench",
        dims={"height": 224, "width": 224} if dynamic else {},
        sizes=(224, 224) if dynamic else (),
        threads=2,
        whole_ms=100.0,
        image_ms=5.0,
        input_codecs=codecs(602_112),
        encoded_bytes=40_000,
        output_bytes=4_000,
        cuts=tuple(
            CutCosts(cut=cut, head_ms=3.0 * (n + 1), tail_ms=100 - 3.0 * (n + 1), codecs=codecs(200_000 - 5_000 * n))
            for n, cut in enumerate(cuts)
        ),
    )
    image = InputContract(name="x", encoded=ImageSpec(resize=256, crop=224))
    planner = Planner(slowdown=1.0)
    planner.add_model("m", card, profile, Contract(data=Data(inputs=(image,), codecs=(*CODECS, "encoded"))))
    planner.connected(max_message_bytes=1 << 28)
    planner.companion_ready("m", 10.0, 0.5)
    for n, cut in enumerate(cuts):
        planner.segment_ready("m", cut, 10.0 - 0.3 * n)
    for n in range(10):
        planner.observe_ping(20.0, n * 0.1)
        planner.observe_transfer(50_000, 4_000, 60.0, n * 0.1 + 0.05)
    facts = RequestFacts(budget_ms=1000.0)
    decision = planner.decide("m", facts, edge_queue_ms=0.0, now_s=1.0)
    assert decision.candidates >= PLANS - 5, decision.candidates
    taken, scatter = [], random.Random(7)
    for n in range(-WARM, rounds):
        if dynamic:
            facts = RequestFacts(budget_ms=1000.0, sizes=(129 + n % 193, 129 + n % 191))
        started_s = time.perf_counter()
        chosen = planner.decide("m", facts, edge_queue_ms=0.0, now_s=2.0 + n * 1e-3).chosen
        if n >= 0:
            taken.append((time.perf_counter() - started_s) * 1e6)
        measured_ms = chosen.predicted_ms * math.exp(scatter.gauss(0.0, SCATTER))
        planner.observe_total("m", chosen.plan, measured_ms, chosen.predicted_ms)
    return taken


def _growth(cuts: list[CutId]) -> Growth:
    """Work in proportion to the area; boundaries of about half and a quarter of the sides, no two alike."""
    sides = [Extent(n, (Step(dim, 1, 1, by),)) for n in range(len(cuts) // 2 + 1) for by in (2, 4) for dim in (0, 1)]
    return Growth(
        monomials=((), ((0, 1), (1, 1))),
        extents=tuple(sides),
        whole_work=(0.0, 100.0),
        outputs=(Elements(),),
        cuts={
            cut: CutGrowth(head_work=(0.0, 3.0 * n), crossing=(Elements(extents=(2 * n, 2 * n + 1)),))
            for n, cut in enumerate(cuts)
        },
    )


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
