"""What cases say of the device alone: an agent without companions, started anew for each kind of trouble."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from scripts.benches.figure import CACHE, percentile
from scripts.client import Answer, Client, Refused
from scripts.pair import PROGRAMS, STATUS, free_port
from split.oip.client import build_request
from split.tensor import Tensors

FOLDER: Final = CACHE / "cases"
SLOWDOWN: Final = 20.0
"""So that a model that takes long sleeps: the caller's core stays free."""
START_TIMEOUT_S: Final = 120.0
HANGING: Final = FOLDER / "hanging"
LIMIT_S: Final = 5.0
"""Of a load."""
GONE: Final = 100
"""Callers who leave."""
ROWS: Final = {"x": np.ones((1, 64), np.float32)}

Taken = dict[str, list[float]]
"""Case → what was measured, in ms."""


class Agent:
    """One process of the agent on a port of its own; ends with the `with` block."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, program: Sequence[str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        own = {"listen": {"http": f"127.0.0.1:{self.port}"}}
        path = folder / "agent-alone.yaml"
        path.write_text(yaml.safe_dump({**config, **own}))
        self._log = (folder / "agent-alone.log").open("a")
        command = [*(program or [str(PROGRAMS / "isthmus")]), "agent", "--config", str(path)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def client(self) -> Client:
        return Client(self.port)

    def until(self, true: Any, client: Client) -> None:
        """Until `true(status)` holds; TimeoutError."""
        deadline_at_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_at_s:
            with contextlib.suppress(OSError, Refused):
                if true(client.get(STATUS)):
                    return
            assert self.process.poll() is None, "the agent has ended: see its log"
            time.sleep(0.005)
        raise TimeoutError(f"the agent was not as expected within {START_TIMEOUT_S:.0f} s")


def alone(**more: Any) -> dict[str, Any]:
    """The configuration of an agent without companions that shares what the pair has prepared."""
    place = FOLDER / "alone"
    return {
        "models": str(FOLDER / "models"),
        "state_dir": str(place / "state"),
        "cache_dir": str(FOLDER / "agent-cache"),
        "limits": {"default_deadline_ms": 600_000},
        **more,
    }


def ready(status: Any) -> bool:
    return bool(status["models"]) and all(one["state"] == "READY" and not one["progress"] for one in status["models"])


def ms_of(work: Any, *args: Any, **more: Any) -> float:
    """How long it takes, whether it is answered or refused."""
    started_s = time.perf_counter()
    with contextlib.suppress(Refused):
        work(*args, **more)
    return (time.perf_counter() - started_s) * 1e3


def run(taken: Taken, *, quick: bool) -> None:
    """One agent after the other: they share the folder that only one may hold."""
    pinned = [str(PROGRAMS / "isthmus")]
    core = str(min(os.sched_getaffinity(0)))
    with Agent(FOLDER / "alone", alone(), program=["taskset", "-c", core, *pinned]) as agent, agent.client() as client:
        agent.until(ready, client)
        taken["O-RT-01"] = [ms_of(client.infer, name, ROWS) for name in ("chain", "twin")]
    with Agent(FOLDER / "alone", alone(emulation={"slowdown": SLOWDOWN})) as agent, agent.client() as client:
        agent.until(ready, client)
        rounds = {"sleeper": sleeping(1), "chain": ROWS, "twin": ROWS}
        taken["O-RT-08"] = [ms_of(client.infer, name, inputs) for name, inputs in rounds.items()]
        second = rounds_per_second(client)
        taken["O-OI-10"] = [busy_worker(agent, 2 * second) for _ in range(1 if quick else 10)]
        left = [callers_who_leave(agent, second) for _ in range(1 if quick else 10)]
        taken["O-OI-11"], taken["O-OI-11 next"] = [one for one, _ in left], [one for _, one in left]
        taken["O-OI-12"] = late_for_all(agent, 2 * second, each=1 if quick else 4)


def sleeping(rounds: int) -> Tensors:
    return {"rounds": np.array(rounds), "x": np.ones(1, np.float32)}


def rounds_per_second(client: Client) -> int:
    """How many rounds of `sleeper` take a second of the emulated device."""
    rounds, took_ms = 2_000, 0.0
    while took_ms < 400.0:
        rounds *= 2
        took_ms = client.infer("sleeper", sleeping(rounds), deadline_ms=60_000.0).timings_ms["whole"]
    return int(rounds * 1000.0 / took_ms)


# -- timeouts, and callers who leave ----------------------------------------------------------------------------------


@contextlib.contextmanager
def occupied(agent: Agent, rounds: int) -> Iterator[Future[Answer]]:
    """The worker is busy with one request for so many rounds; its answer."""
    with ThreadPoolExecutor(1) as pool, agent.client() as asking, agent.client() as looking:
        agent.until(lambda status: status["queue_ms"] == 0, looking)  # segments are compared after a start
        busy = pool.submit(asking.infer, "sleeper", sleeping(rounds), deadline_ms=1e5)
        agent.until(lambda status: status["queue_ms"] > 0, looking)
        yield busy
        busy.result()


def busy_worker(agent: Agent, rounds: int) -> float:
    """O-OI-10: how far from its 500 ms a request behind a busy worker is refused."""
    with occupied(agent, rounds), agent.client() as client:
        return abs(ms_of(client.infer, "chain", ROWS, deadline_ms=500.0) - 500.0)


def callers_who_leave(agent: Agent, rounds: int) -> tuple[float, float]:
    """O-OI-11: ms from the last one's leaving until nothing waits, and what the next caller waits behind the first, as
    of a request that takes exactly a second."""
    length, buffers = build_request(sleeping(rounds), {})
    body = b"".join(bytes(one) for one in buffers)
    head = (
        f"POST /v2/models/sleeper/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {length}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    with occupied(agent, rounds) as busy, agent.client() as asking:
        callers = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(GONE)]
        for one in callers:
            one.sendall(head.encode() + body)
        time.sleep(0.02)
        for one in callers:
            one.close()
        left_s = time.perf_counter()
        while waiting_jobs(agent) > 0:
            time.sleep(0.001)
        emptied_ms = (time.perf_counter() - left_s) * 1e3
        assert not busy.done(), "the worker was free before the callers left"
        following_ms = ms_of(asking.infer, "chain", ROWS)
        return emptied_ms, following_ms * 1000.0 / busy.result().timings_ms["whole"]


def waiting_jobs(agent: Agent) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("isthmus_waiting_jobs ")))


def late_for_all(agent: Agent, rounds: int, *, each: int) -> list[float]:
    """O-OI-12: five workers, all told at their timeout; then without one, all answered."""
    refused: list[float] = []
    answered = 0

    def worker(deadline_ms: float) -> int:
        with agent.client() as client:
            for _ in range(each):
                started_s = time.perf_counter()
                try:
                    client.infer("sleeper", sleeping(rounds), deadline_ms=deadline_ms)
                except Refused:
                    refused.append((time.perf_counter() - started_s) * 1e3)
                else:
                    nonlocal answered
                    answered += 1
        return each

    with ThreadPoolExecutor(5) as pool:
        asked = sum(pool.map(worker, [1_000.0] * 5))
        assert len(refused) == asked, "an answer came that was to be late"
        assert min(refused) >= 1_000.0 - 1.0, "a request was given up before its timeout"
        asked = sum(pool.map(worker, [600_000.0] * 5))
    assert answered == asked, "a request without a timeout was not answered"
    return refused


# -- what hangs -------------------------------------------------------------------------------------------------------

STEP_THAT_HANGS: Final = """
import sys, time
from pathlib import Path
import onnx, onnx.parser
import split.graph.load
from split.workbench.cut import prepare
split.graph.load.INLINE = "import time; time.sleep(60)"
folder = Path(sys.argv[1])
text = '''<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
    g (float[3] x) => (float[3] y) { a = local.Twice(x)  y = Neg(a) }
    <domain: "local", opset_import: ["" : 18]> Twice (u) => (v) { v = Add(u, u) }'''
onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
started_s = time.perf_counter()
card = prepare(folder / "model.onnx", folder / "made")
took_ms = (time.perf_counter() - started_s) * 1e3
assert [spec.name for spec in card.outputs] == ["y"]
print(took_ms)
"""


def step_that_hangs(taken: Taken) -> None:
    """O-GS-13: cutting a model while inlining its functions hangs for a minute."""
    folder = FOLDER / "stuck" / "step"
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", STEP_THAT_HANGS, str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    taken["O-GS-13"] = [float(done.stdout)]


LOAD_THAT_HANGS: Final = """
import sys
from split.workbench import child
right = child._argv
def hanging(command, limits):
    if command[0] == "probe" and "/stuck/" in command[1]:
        return [sys.executable, "-c", "import time; time.sleep(600)"]
    return right(command, limits)
child._argv = hanging
from agent.cli import run
sys.exit(run(sys.argv[1:]))
"""


def lay_load_that_hangs() -> None:
    """Two models of which the first is prepared here, within the usual limits; once."""
    if (HANGING / "cache").exists():
        return
    for name, source in (("good", "chain"), ("stuck", "twin")):
        place = HANGING / "models" / name / "1" / "model.onnx"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((FOLDER / "models" / source / "1" / "model.onnx").read_bytes())
        if name == "good":
            with Agent(HANGING, hanging(START_TIMEOUT_S)) as agent, agent.client() as client:
                agent.until(ready, client)


def hanging(limit_s: float) -> dict[str, Any]:
    places = {"models": "models", "state_dir": "state", "cache_dir": "cache"}
    return {key: str(HANGING / name) for key, name in places.items()} | {"workbench": {"timeout_s": limit_s}}


def load_that_hangs(taken: Taken) -> None:
    """O-RT-02: a load that would hang for ten minutes, and how soon the daemon says that it lives meanwhile."""
    live_ms: list[float] = []
    stop = threading.Event()
    program = [sys.executable, "-c", LOAD_THAT_HANGS]
    with Agent(HANGING, hanging(LIMIT_S), program=program) as agent, agent.client() as client:

        def watch() -> None:
            with agent.client() as looking:
                while not stop.wait(0.01):
                    live_ms.append(ms_of(looking.get, "/v2/health/live"))

        def given_up(status: Any) -> bool:
            reasons = {one["name"]: (one["state"], one["reason"]) for one in status["models"]}
            return reasons["stuck"][1].startswith("load timeout") and reasons["good"] == ("READY", "")

        agent.until(given_up, client)  # what it found at its start has been tried
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            took_ms = ms_of(client.load, "stuck")
        finally:
            stop.set()
            watcher.join()
        client.infer("good", ROWS)
    taken["O-RT-02"] = [abs(took_ms - LIMIT_S * 1e3)]
    taken["O-RT-02 live"] = [percentile(live_ms, 0.99)]
