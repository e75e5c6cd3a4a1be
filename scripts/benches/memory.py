"""What segments and the daemon take: the whole, four heads and four tails against one plain session of the whole; a
daemon without models; many shapes; which policy keeps the right segments.

Memory is PSS of a fresh process over what it had after its imports, each segment opened through the daemon's store and
run once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx.parser
import yaml
from onnx import numpy_helper

from scripts.benches.figure import CACHE, Figure
from scripts.benches.nets import NETS, net_path
from scripts.client import Client, Refused
from scripts.pair import PROGRAMS, free_port
from split.codec.golden import golden_inputs
from split.graph.card import CutCard, ModelCard, read_card
from split.runtime.eviction import LruK
from split.runtime.machine import read_machine
from split.runtime.optimised import key_of, lacking, optimised_in, place_of, read_sound
from split.runtime.segment import OrtEngine, usable_threads
from split.runtime.store import SegmentStore
from split.workbench.cut import prepare as cut_model
from split.workbench.optimise import optimise

FOLDER: Final = CACHE / "memory"
CUTS: Final = 4
IDLE_S: Final = 10.0
START_TIMEOUT_S: Final = 60.0

SHAPES: Final = 60
REQUESTS: Final = 10_000
REQUESTS_QUICK: Final = 1_500
DYNAMIC: Final = """
<ir_version: 8, opset_import: ["" : 17]>
dynamic (float[1,3,H,W] x) => (float[1,64] y) {
  a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0)
  b = Relu (a)
  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (b, w1)
  d = Relu (c)
  g = GlobalAveragePool (d)
  y = Flatten (g)
}
"""

ROOM: Final = 8
"""Segments that fit, in the trace of uses."""


def prepare() -> None:
    """Both networks cut and optimised, once for each version of the format."""
    for name in NETS:
        prepared(name)


def run(*, quick: bool) -> tuple[list[Figure], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    copies = []
    for name in NETS:
        plain, all_nine = (_measured(what, name)["mb"] for what in ("plain", "store"))
        copies.append(all_nine / plain)
        rows.append({"model": name, "plain_mb": plain, "nine_segments_mb": all_nine, "copies": copies[-1]})
    rows.append({"requests_of_60_shapes": _measured("shapes", str(REQUESTS_QUICK if quick else REQUESTS))})
    rows.append({"hits_of_8_segments_kept": _hits()})
    idle_mb, idle_core_ratio = _idle()
    figures = [
        Figure(name="copies", value=max(copies), unit="ratio", at_most=1.3),
        Figure(name="idle_mb", value=idle_mb, unit="MB", at_most=75),
        Figure(name="idle_core_ratio", value=idle_core_ratio, unit="ratio", at_most=0.005),
    ]
    return figures, rows


def prepared(name: str) -> tuple[ModelCard, Path, list[CutCard]]:
    """Card, folder and the cuts whose halves are optimised: at most `CUTS`, spread over the model."""
    model, folder = net_path(name, FOLDER), FOLDER / name / "parts"
    if not (folder / "card.json").is_file():
        print(f"cutting {name} …", flush=True)
        cut_model(model, folder)
    card, engine = read_card(folder), OrtEngine()
    cuts = [card.cuts[n * len(card.cuts) // CUTS] for n in range(CUTS)]
    key = key_of(card.digest, engine.name, read_machine())
    if lacking(read_sound(place_of(folder, key), key), [cut.id for cut in cuts]):
        print(f"optimising {name} …", flush=True)
        inputs = golden_inputs(card.inputs, {})
        optimise(card, folder, cuts, inputs=inputs, engine=engine, threads=usable_threads())
    return card, folder, cuts


def opened_store(card: ModelCard, folder: Path) -> SegmentStore:
    """A store as the daemon has it, that knows of the optimised segments."""
    engine = OrtEngine()
    store = SegmentStore(engine, threads=usable_threads(), budget_bytes=1 << 33)
    key = key_of(card.digest, engine.name, read_machine())
    manifest = read_sound(place_of(folder, key), key)
    assert manifest is not None, folder
    store.prefer(optimised_in(folder, Path(card.path), manifest))
    return store


def _measured(*arguments: str) -> dict[str, float]:
    """What `main` says in a process of its own."""
    command = [sys.executable, "-m", "scripts.benches.memory", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(what: str, argument: str) -> dict[str, float]:
    """In the child."""
    if what == "shapes":
        return _shapes(int(argument))
    card, folder, cuts = prepared(argument)
    inputs = golden_inputs(card.inputs, {})
    OrtEngine().trim()  # the runtime is there before memory is counted
    before_mb = pss_mb("self")
    if what == "plain":
        segment = OrtEngine().open(Path(card.path), threads=usable_threads())
        segment.run(inputs)
        return {"mb": pss_mb("self") - before_mb}
    store = opened_store(card, folder)
    paths = [Path(card.path), *(folder / f"{cut.id}.{half}.onnx" for cut in cuts for half in ("head", "tail"))]
    for _ in range(2):  # the second time round all are in the form they stay in
        store.warm(paths).result()
    values = dict(inputs)
    for path in paths:
        segment = store.get(path)  # type: ignore[assignment]  # any segment will do
        values |= segment.run({name: values[name] for name in segment.inputs})
    return {"mb": pss_mb("self") - before_mb}


def _shapes(requests: int) -> dict[str, float]:
    """Memory after every shape came once, after half of the requests, and after all."""
    random = np.random.default_rng(11)
    model = onnx.parser.parse_model(DYNAMIC)
    for name, shape in (("w0", (32, 3, 3, 3)), ("w1", (64, 32, 3, 3))):
        weight = (random.standard_normal(shape) * 0.1).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    path = FOLDER / "dynamic.onnx"
    onnx.save(model, path)
    segment = OrtEngine().open(path, threads=usable_threads())
    shapes = random.integers(32, 320, (SHAPES, 2))
    before_mb = pss_mb("self")
    for height, width in shapes:
        segment.run({"x": np.zeros((1, 3, height, width), np.float32)})
    after_each_mb = pss_mb("self") - before_mb
    half_mb = 0.0
    for done, number in enumerate(random.integers(SHAPES, size=requests - SHAPES)):
        height, width = shapes[number]
        segment.run({"x": np.zeros((1, 3, height, width), np.float32)})
        if done == requests // 2:
            half_mb = pss_mb("self") - before_mb
    return {
        "requests": requests,
        "mb_after_each_shape_once": after_each_mb,
        "mb_after_half": half_mb,
        "mb_at_the_end": pss_mb("self") - before_mb,
    }


def trace(uses: int = 20_000) -> list[int]:
    """A seeded stream of uses: 40 segments by Zipf's law, and now and then each of 30 others once (a trial of all)."""
    random = np.random.default_rng(2)
    popular = ((random.zipf(1.2, uses) - 1) % 40).tolist()
    stream: list[int] = []
    for number in range(0, uses, 200):
        stream += [*popular[number : number + 200], *range(1000, 1030)]
    return stream


def _hits() -> dict[str, float]:
    stream = trace()
    policy: LruK[int] = LruK()
    kept: dict[str, OrderedDict[int, None]] = {"lru": OrderedDict(), "lru_2": OrderedDict()}
    hits = dict.fromkeys(kept, 0)
    for name in stream:
        policy.use(name)
        for kind, cache in kept.items():
            hits[kind] += name in cache
            cache[name] = None
            cache.move_to_end(name)
            if len(cache) > ROOM:
                others = [other for other in cache if other != name]
                del cache[others[0] if kind == "lru" else policy.in_order(others)[0]]
    return {kind: count / len(stream) for kind, count in hits.items()}


def _idle() -> tuple[float, float]:
    """(PSS in MB, share of a core) of a daemon that has no model, over `IDLE_S` seconds."""
    folder = FOLDER / "idle"
    (folder / "models").mkdir(parents=True, exist_ok=True)
    port = free_port()
    settings = {
        "models": str(folder / "models"),
        "state_dir": str(folder / "state"),
        "cache_dir": str(folder / "cache"),
        "listen": {"http": f"127.0.0.1:{port}"},
    }
    (folder / "agent.yaml").write_text(yaml.safe_dump(settings))
    command = [str(PROGRAMS / "isthmus"), "agent", "--config", str(folder / "agent.yaml")]
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until_ready(port)
        before_s = _cpu_s(daemon.pid)
        time.sleep(IDLE_S)
        return pss_mb(daemon.pid), (_cpu_s(daemon.pid) - before_s) / IDLE_S
    finally:
        daemon.terminate()
        daemon.wait()


def _until_ready(port: int) -> None:
    deadline_at_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with Client(port) as client:
                client.get("/v2/health/ready")
            return
        except (OSError, Refused):
            assert time.monotonic() < deadline_at_s, "the daemon did not start"
            time.sleep(0.1)


def pss_mb(pid: int | str) -> float:
    """Memory of a process, what it shares with others in parts (`Pss` of smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("this kernel's smaps_rollup has no Pss")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # user and system, in USER_HZ = 100


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
